"""A tied head written as a second, real tensor, and wrapped names of one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import d9d_ckpt
import make_checkpoint
from d9d_ckpt.errors import MappingError, UsageError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def llama(path: Path, *, tie: bool) -> Path:
    config = make_checkpoint.sized("llama", "tiny", tied=tie)
    make_checkpoint.write(config, path, seed=3, max_shard_size=10**9, sparse=False)
    return path


def test_a05_copy_tied_writes_both_as_real_tensors(tmp_path: Path):
    source = llama(tmp_path / "hf", tie=True)
    assert HEAD not in load_file(source / "model.safetensors")
    d9d_ckpt.convert(str(source), str(tmp_path / "s"), to="sharded", layout="tp=2,pp=2")
    for number, start in enumerate((tmp_path / "s", source)):
        out = tmp_path / f"out{number}"
        d9d_ckpt.convert(str(start), str(out), to="huggingface", copy_tied=True)
        tensors = load_file(out / "model.safetensors")
        assert torch.equal(tensors[HEAD], tensors[EMBEDDING])
        assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    again = tmp_path / "again"
    d9d_ckpt.convert(str(tmp_path / "out0"), str(again), to="sharded", layout="tp=2")
    assert d9d_ckpt.diff(str(again), str(tmp_path / "s")).equal


def test_a05_copy_tied_of_an_untied_head_is_refused(tmp_path: Path):
    source = llama(tmp_path / "hf", tie=False)
    with pytest.raises(MappingError, match="does not tie the head"):
        d9d_ckpt.convert(str(source), str(tmp_path / "o"), to="huggingface", copy_tied=True)
    with pytest.raises(UsageError, match="--copy-tied"):
        d9d_ckpt.convert(
            str(source), str(tmp_path / "o"), to="sharded", layout="tp=2", copy_tied=True
        )


@pytest.mark.parametrize("equal", [True, False])
def test_a05_a06_a_wrapped_head_is_compared_with_its_wrapped_embedding(tmp_path: Path, equal: bool):
    source = llama(tmp_path / "hf", tie=True)
    tensors = load_file(source / "model.safetensors")
    head = tensors[EMBEDDING].clone()
    if not equal:
        head[1, 2] += 1
    wrapped = {f"_orig_mod.module.{name}": t for name, t in (tensors | {HEAD: head}).items()}
    save_file(wrapped, source / "model.safetensors", {"format": "pt"})
    if equal:
        report = d9d_ckpt.convert(str(source), str(tmp_path / "s"), to="sharded", layout="tp=2")
        assert report.dropped == (HEAD,)
        return
    with pytest.raises(MappingError, match=r"two different tensors \(they differ by up to 1"):
        d9d_ckpt.convert(str(source), str(tmp_path / "s"), to="sharded", layout="tp=2")
