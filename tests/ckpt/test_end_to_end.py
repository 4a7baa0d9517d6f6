"""Checkpoints that transformers wrote, through two topologies and back: every bit, name and file.

Sources come from ``save_pretrained``; what comes back is read by safetensors alone and, once for each
source, by transformers.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import d9d_ckpt
from d9d_ckpt.layout.topology import Topology
from make_checkpoint import config_json, tiny, write, write_real

INDEX = "model.safetensors.index.json"
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 512

SOURCES = {
    "llama": replace(tiny("llama"), dtype="bfloat16"),
    "llama_tied": replace(tiny("llama"), dtype="float32", tied=True),
    "qwen2": replace(tiny("qwen2"), dtype="float16"),
    "qwen3": replace(tiny("qwen3"), dtype="bfloat16"),
    "qwen3_moe": replace(tiny("qwen3_moe"), dtype="bfloat16"),
    "qwen3_moe_fused": replace(tiny("qwen3_moe"), dtype="float32", layout="fused"),
    "mixtral": replace(tiny("mixtral"), dtype="float32"),
    "mixtral_fused": replace(tiny("mixtral"), dtype="bfloat16", layout="fused"),
}
"""4 layers, 4 q heads over 2 KV heads, 512 vocabulary rows, 8 experts."""

SPARSE = ["qwen3_moe", "mixtral"]

LAYOUTS = {
    "one": "pp=1",
    "tp2": "tp=2",
    "tp4_above_kv_heads": "tp=4",
    "pp2": "pp=2",
    "pp3_uneven": "pp=3",
    "ep2": "dp_shard=2,ep=2",
    "ep4": "dp_shard=4,ep=4",
    "dp_shard3_uneven": "dp_shard=3",
    "dp_replicate2": "dp_replicate=2",
    "cp2": "cp=2",
    "four_axes": "pp=2,dp_shard=2,tp=2,ep=4",
    "replicas_and_uneven_rows": "dp_replicate=2,dp_shard=3,tp=2,ep=2",
    "cp_and_kv_replicas": "pp=3,cp=2,tp=4,ep=4",
    "experts_on_dim_1": "dp_shard=4,tp=4,ep=4,pp=2",
    "all_six": "pp=2,dp_replicate=2,dp_shard=2,cp=2,tp=2,ep=8",
    "virtual_loop": Topology(pp=2, virtual=2, tp=2),
    "virtual_v": Topology(pp=2, virtual=2, order="v", dp_shard=2),
    "vocab_multiple": Topology(tp=4, dp_shard=2, ep=2, vocab_multiple=200),
    "yaml": "pp: 3\ndp_shard: 2\ntp: 2\nep: 2\nstages: [1, 2, 1]\nvocab_multiple: 100\n",
}


# -- what is compared -------------------------------------------------------------------------


def weights(url):
    """Every tensor of a Hugging Face directory, found as its readers find them: by the index."""
    if (url / INDEX).exists():
        names = json.loads((url / INDEX).read_text())["weight_map"]
        files = {file: load_file(url / file) for file in set(names.values())}
        assert sorted(names) == sorted(name for content in files.values() for name in content)
        return {name: files[file][name] for name, file in names.items()}
    return load_file(url / "model.safetensors")


def others(url):
    """Everything beside the weights, byte for byte."""
    files = (path for path in url.iterdir() if "safetensors" not in path.name)
    return {path.name: path.read_bytes() for path in files}


def bits(tensors):
    return {
        name: (t.dtype, t.shape, t.contiguous().view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


def check_equal(back, source):
    assert bits(weights(back)) == bits(weights(source))
    assert others(back) == others(source)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= others(back).keys()


def loaded(url):
    """The model that transformers makes of a directory, all of its parameters from the files.

    Copied into memory of torch's own alignment: mapped files differ in theirs, and kernels sum in an
    order that depends on it, so that one file and several of one model's own ``save_pretrained`` do
    not give the same logits.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        url, dtype="auto", output_loading_info=True, local_files_only=True
    )
    assert not any(info.values()), info
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Each source, written by transformers in a few files once it is asked for."""
    root, made = tmp_path_factory.mktemp("sources"), {}

    def source(name):
        if name not in made:
            made[name] = root / name
            made[name].mkdir()
            write_real(SOURCES[name], made[name], max_shard_size=300_000)
        return made[name]

    return source


def layout_of(name, folder):
    """A layout's text or topology; the YAML one by its file."""
    layout = LAYOUTS[name]
    if isinstance(layout, str) and ":" in layout:
        path = folder / "layout.yaml"
        path.write_text(layout)
        return str(path)
    return layout


def cycle(source, folder, first, second, **settings):
    """Hugging Face to ``first`` to ``second`` and back; returns the last directory."""
    urls = [str(folder / name) for name in ("first", "second", "back")]
    settings = {"workers": 1} | settings
    d9d_ckpt.convert(str(source), urls[0], layout=layout_of(first, folder), **settings)
    d9d_ckpt.reshard(urls[0], urls[1], layout=layout_of(second, folder), **settings)
    d9d_ckpt.convert(urls[1], urls[2], to="huggingface", **settings)
    return folder / "back"


# -- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("name", SOURCES)
def test_two_topologies_and_back_change_no_bit(sources, tmp_path, name, first):
    """The second topology is another one for every family, so that pairs differ as well."""
    names = list(LAYOUTS)
    apart = 1 + 2 * list(SOURCES).index(name)
    second = names[(names.index(first) + apart) % len(names)]
    check_equal(cycle(sources(name), tmp_path, first, second), sources(name))


@pytest.mark.parametrize("name", SOURCES)
def test_transformers_loads_what_comes_back_and_computes_the_same_bits(sources, tmp_path, name):
    back = cycle(sources(name), tmp_path, "cp_and_kv_replicas", "yaml", verify=True)
    check_equal(back, sources(name))
    before, after = logits(loaded(sources(name))), logits(loaded(back))
    assert before.isfinite().all()
    assert before.std() > 0
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen3_moe", {"attention_bias": True, "mlp_only_layers": [2]}),
        ("qwen3_moe", {"tie_word_embeddings": True, "decoder_sparse_step": 2}),
        ("mixtral", {"tie_word_embeddings": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_options_of_a_family_come_back_too(tmp_path, family, options):
    """Models that make_checkpoint does not write: biases, dense layers among sparse ones, ties."""
    sizes = config_json(SOURCES[family]) | options
    config = AutoConfig.for_model(**{k: v for k, v in sizes.items() if k != "torch_dtype"})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    source = tmp_path / "hf"
    model.save_pretrained(source)
    back = cycle(source, tmp_path, "cp_and_kv_replicas", "yaml")
    assert bits(weights(back)) == bits(weights(source))
    assert others(back) == others(source)
    assert torch.equal(logits(loaded(back)), logits(loaded(source)))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_small_shard_size_gives_several_files_and_an_index_of_them(sources, tmp_path, name):
    back = cycle(sources(name), tmp_path, "four_axes", "tp2", max_shard_size="200KB")
    check_equal(back, sources(name))
    index = json.loads((back / INDEX).read_text())
    files = sorted(path.name for path in back.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))
    ]
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights(back).values())


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", "mixtral_fused"])
def test_verify_and_diff_agree_on_every_step(sources, tmp_path, name):
    cycle(sources(name), tmp_path, "replicas_and_uneven_rows", "virtual_v")
    urls = [str(sources(name)), *(str(tmp_path / step) for step in ("first", "second", "back"))]
    assert all(d9d_ckpt.verify(url, workers=1).ok for url in urls[1:])
    for url in urls[1:]:
        found = d9d_ckpt.diff(urls[0], url)
        assert (found.equal, found.only_in_a, found.only_in_b) == (True, (), ())


def test_a_bit_pattern_that_is_no_number_passes_through(sources, tmp_path):
    """Every one of the 65,536 patterns of bf16, NaNs with payloads among them."""
    config = replace(SOURCES["llama"], layers=2, hidden=128, head_dim=32)
    source = tmp_path / "hf"
    write(config, source)
    path = source / "model.safetensors"
    content = path.read_bytes()
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).numpy().tobytes()
    header = 8 + int.from_bytes(content[:8], "little")
    body = (patterns * (len(content) // len(patterns) + 1))[: len(content) - header]
    path.write_bytes(content[:header] + body)
    check_equal(cycle(source, tmp_path, "four_axes", "tp4_above_kv_heads"), source)


# -- split and fused experts ------------------------------------------------------------------


@pytest.mark.parametrize("through", [True, False], ids=["through_sharded", "at_once"])
@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("wanted", ["fused", "split"])
def test_experts_change_their_layout_and_nothing_else(sources, tmp_path, family, wanted, through):
    """The result holds what transformers has in memory once it has loaded the source."""
    source = sources(family if wanted == "fused" else f"{family}_fused")
    start, back = source, tmp_path / "back"
    if through:
        start = tmp_path / "sharded"
        layout = LAYOUTS["cp_and_kv_replicas"]
        d9d_ckpt.convert(str(source), str(start), layout=layout, workers=1)
    d9d_ckpt.convert(str(start), str(back), to="huggingface", hf_experts=wanted, workers=1)
    stored = weights(back)
    fused = [
        name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    assert len(fused) == (8 if wanted == "fused" else 0)
    assert others(back) == others(source)
    model, result = loaded(source), loaded(back)
    assert bits(result.state_dict()) == bits(model.state_dict())
    assert torch.equal(logits(result), logits(model))
    if wanted == "fused":
        assert bits(stored) == bits(model.state_dict())


@pytest.mark.parametrize("family", SPARSE)
def test_split_experts_come_back_from_fused_ones(sources, tmp_path, family):
    """HF split, sharded, HF fused, sharded, HF split: transformers' own split files again."""
    source, last = sources(family), tmp_path / "split"
    steps = [
        ("a", {"layout": "tp=2,ep=2"}),
        ("fused", {"to": "huggingface", "hf_experts": "fused"}),
        ("b", {"layout": "dp_shard=3"}),
        ("split", {"to": "huggingface", "hf_experts": "split"}),
    ]
    url = source
    for name, settings in steps:
        d9d_ckpt.convert(str(url), str(tmp_path / name), workers=1, **settings)
        url = tmp_path / name
    check_equal(last, source)


@pytest.mark.parametrize("name", ["qwen3_moe_fused", "mixtral_fused"])
def test_experts_stay_as_the_source_had_them_unless_asked(sources, tmp_path, name):
    back = cycle(sources(name), tmp_path, "ep4", "pp3_uneven")
    assert weights(back).keys() == weights(sources(name)).keys()
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in weights(back))


# -- several processes ------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_two_workers_write_what_one_writes(tmp_path, family):
    """Tensors are large enough that there is work for both."""
    source, sharded, back = (tmp_path / name for name in ("hf", "sharded", "back"))
    config = replace(SOURCES[family], hidden=768, vocab=30_000, head_dim=64)
    write(config, source, max_shard_size=40_000_000)
    layout = LAYOUTS["cp_and_kv_replicas"]
    there = d9d_ckpt.convert(str(source), str(sharded), layout=layout, workers=2, verify=True)
    again = d9d_ckpt.convert(str(sharded), str(back), to="huggingface", workers=2)
    assert (there.ranks, again.ranks) == (2, 2)
    check_equal(back, source)
