"""Writes the golden checkpoints of a format version that are not there yet: each once.

    PYTHONPATH=.:tools:tests python tests/ckpt/golden/make.py tests/ckpt/golden/v1

What is there is never written again: the files stand for every checkpoint that people have. The
expected tensors come from eager torch, not from d9d_ckpt.
"""

import sys
import tempfile
from pathlib import Path

import fsspec
import torch
from helpers.checkpoints import Model, convert, model, training, write_model
from safetensors.torch import save_file

GOLDEN = (
    ("dense", model("llama", dtype="bfloat16", layers=3), "tp=2,pp=2", "none"),
    ("moe", model("qwen3_moe", layers=1), "dp_shard=2,ep=2", "none"),
    ("zstd", model("llama", dtype="bfloat16", layers=1), "tp=2", "zstd"),
)


def make(root: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name, exact, layout, codec in GOLDEN:
        if (root / name).exists():
            continue
        random = torch.Generator().manual_seed(len(name))
        drawn = {
            n: torch.randn(t.shape, generator=random).to(t.dtype) for n, t in exact.tensors.items()
        }
        made = Model(drawn, exact.config)
        with tempfile.TemporaryDirectory() as scratch:
            for file in write_model(Path(scratch), made).iterdir():
                memory.pipe_file(f"/golden-{name}/{file.name}", file.read_bytes())
        # From a memory:// URL, so that the manifest's provenance names no machine's path.
        options = ("--layout", layout, "--codec", codec)
        convert(f"memory://golden-{name}", (root / name).absolute(), "sharded", *options)
        expected = {n: t.contiguous().clone() for n, t in training(made).items()}
        save_file(expected, root / f"{name}.safetensors")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
