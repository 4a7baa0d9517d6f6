"""fp8 weights with block scales: against torch, element by element, on any layout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import d9d_ckpt
import make_checkpoint
from d9d_ckpt.errors import MappingError
from d9d_ckpt.graph import ops

BLOCK = 128


def expanded(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    rows = scale.repeat_interleave(BLOCK, 0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def quantised(tensors: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """The tensors with every projection as fp8 and scales, and what they mean in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    stored, meant = {}, {}
    for name, t in tensors.items():
        if "proj" not in name:
            stored[name] = meant[name] = t
            continue
        blocks = tuple(-(-n // BLOCK) for n in t.shape)
        scale = torch.rand(blocks, generator=generator) + 0.5
        stored[name] = (t.float() * 8).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        meant[name] = (stored[name].float() * expanded(scale, t.shape)).to(torch.bfloat16)
    return stored, meant


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, dict]:
    root = tmp_path_factory.mktemp("fp8")
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 320}
    config = make_checkpoint.sized("qwen3", "tiny", layers=2, **sizes)
    make_checkpoint.write(config, root / "bf16", seed=1, max_shard_size=10**9, sparse=False)
    stored, meant = quantised(load_file(root / "bf16" / "model.safetensors"))
    (root / "fp8").mkdir()
    save_file(stored, root / "fp8" / "model.safetensors", {"format": "pt"})
    values = json.loads((root / "bf16" / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (root / "fp8" / "config.json").write_text(json.dumps(values))
    return root / "fp8", stored, meant


@pytest.mark.parametrize("layout", ["tp=2,dp_shard=3", "pp=2", "tp=4,dp_replicate=2"])
def test_a08_each_element_times_the_scale_of_its_block(checkpoint, tmp_path: Path, layout: str):
    source, _, meant = checkpoint
    d9d_ckpt.convert(str(source), str(tmp_path / "s"), to="sharded", layout=layout, dequantize=True)
    d9d_ckpt.convert(str(tmp_path / "s"), str(tmp_path / "hf"), to="huggingface")
    back = load_file(tmp_path / "hf" / "model.safetensors")
    assert back.keys() == meant.keys()
    assert [n for n in back if not torch.equal(back[n], meant[n])] == []


def test_a08_dequantised_checkpoint_says_so_in_its_config(checkpoint, tmp_path: Path):
    d9d_ckpt.convert(
        str(checkpoint[0]),
        str(tmp_path / "hf"),
        to="huggingface",
        dequantize=True,
        dtype="float32",
    )
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "float32"
    back = load_file(tmp_path / "hf" / "model.safetensors")
    assert {t.dtype for t in back.values()} == {torch.float32}


def test_a08_without_the_option_bits_pass_through(checkpoint, tmp_path: Path):
    source, stored, _ = checkpoint
    d9d_ckpt.convert(str(source), str(tmp_path / "hf"), to="huggingface")
    back = load_file(tmp_path / "hf" / "model.safetensors")
    assert back.keys() == stored.keys()
    bits = {n: (back[n].view(torch.uint8), stored[n].view(torch.uint8)) for n in stored}
    assert all(torch.equal(a, b) for a, b in bits.values())


def test_a08_without_the_option_fusing_is_refused(checkpoint, tmp_path: Path):
    with pytest.raises(MappingError, match=r"14 quantised tensors with 14 scales.*--dequantize"):
        d9d_ckpt.convert(str(checkpoint[0]), str(tmp_path / "s"), to="sharded", layout="tp=2")


def one_weight(root: Path, tensors: dict[str, torch.Tensor]) -> str:
    root.mkdir()
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return str(root)


W = torch.arange(256 * 256).reshape(256, 256).remainder(13).to(torch.float8_e4m3fn)
HALF = torch.full((2, 2), 0.5)


@pytest.mark.parametrize(
    ("scale", "value"),
    [
        ({"w.weight_scale_inv": HALF}, HALF),
        ({"w.weight_scale": HALF}, HALF),
        ({"w.scale": HALF.to(torch.float8_e8m0fnu)}, HALF),
        ({"w.weight_scale": torch.tensor(0.25)}, torch.full((2, 2), 0.25)),
    ],
)
def test_a08_known_names_of_scales(tmp_path: Path, scale: dict, value: torch.Tensor):
    source = one_weight(tmp_path / "in", {"w.weight": W, **scale})
    d9d_ckpt.convert(source, str(tmp_path / "out"), to="huggingface", dequantize=True)
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert list(back) == ["w.weight"]
    assert torch.equal(back["w.weight"], (W.float() * expanded(value, W.shape)).to(torch.bfloat16))


def test_a08_one_scale_a_row(tmp_path: Path):
    rows = torch.linspace(0.5, 2.0, 256).reshape(256, 1)
    source = one_weight(tmp_path / "in", {"w.weight": W, "w.weight_scale": rows})
    d9d_ckpt.convert(source, str(tmp_path / "out"), to="huggingface", dequantize=True)
    back = load_file(tmp_path / "out" / "model.safetensors")["w.weight"]
    assert torch.equal(back, (W.float() * rows).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w.weight": W}, r"'w.weight' is F8_E4M3 and has no scale"),
        ({"w.weight": W, "w.weight_scale_inv": torch.ones(2, 3)}, r"\[2, 3\], expected \[2, 2\]"),
        (
            {"w.weight": W.to(torch.bfloat16), "w.weight_scale_inv": HALF},
            r"scales 'w.weight', which is BF16, not fp8",
        ),
        (
            {"w.weight": W, "w.weight_scale_inv": HALF, "w.weight_scale": HALF.clone()},
            r"'w.weight' has two scales",
        ),
        ({"w.weight": W, "w.weight_scala": HALF}, r"has no scale"),
    ],
)
def test_a08_doubtful_scales_are_refused(tmp_path: Path, tensors: dict, message: str):
    source = one_weight(tmp_path / "in", tensors)
    with pytest.raises(MappingError, match=message):
        d9d_ckpt.convert(source, str(tmp_path / "out"), to="huggingface", dequantize=True)
    assert not (tmp_path / "out").exists()


def test_partial_reads_of_a_dequantised_tensor_are_exact(checkpoint, tmp_path: Path):
    """A column slice is staged run by run; its scales still belong to the original positions."""
    source, stored, _ = checkpoint
    name = "model.layers.0.mlp.down_proj.weight"
    ckpt = d9d_ckpt.open(str(source))
    node = ops.dequantize(ckpt[name].node, ckpt[f"{name}_scale_inv"].node, (BLOCK, BLOCK))
    lazy = d9d_ckpt.LazyTensor(node, ckpt.reader)
    whole = stored[name].float() * expanded(stored[f"{name}_scale_inv"], stored[name].shape)
    assert torch.equal(lazy[3:200, 120:140].read(), whole[3:200, 120:140])
    assert torch.equal(lazy.transpose(0, 1)[100:180, 5:77].read(), whole.T[100:180, 5:77])
