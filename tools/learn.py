"""A small model that learns real text, beside the entropy of its tokens: docs/train/LEARNS.md.

    python tools/learn.py [--metrics FILE] [section.key=value]...

Trains docs/train/learn.toml on the sources of this Python's standard library, with the command that users
type, and compares the losses with the entropy of the same labels: the least that a model reaches which
knows how frequent each byte is, and nothing else. 0 if it ends half a nat under that.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from d9d_train.batch import IGNORED
from d9d_train.config import load_config
from d9d_train.data.config import DataConfig
from d9d_train.data.opening import open_stream

CONFIG = ROOT / "docs" / "train" / "learn.toml"
_CLEARLY = 0.5
"""Nats."""

_SHOWN = 50
"""Steps between two lines."""


def main() -> int:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--metrics", default="", metavar="FILE", help="keep the metrics here")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        metrics = args.metrics or f"{folder}/metrics.jsonl"
        Path(metrics).unlink(missing_ok=True)
        overrides = [*sources(), f"metrics.jsonl={json.dumps(metrics)}", *args.overrides]
        train(overrides)
        lines = [json.loads(line) for line in Path(metrics).read_text().splitlines()]
    config = load_config(str(CONFIG), overrides)
    batch = config.train.global_batch
    seen = entropy(config.data, batch * len(lines), config.train.seq_len)
    held_out = entropy(
        config.validation.data, batch * config.validation.batches, config.train.seq_len
    )
    print(f"{'step':>6} {'loss':>7} {'validation':>11} {'tokens/s':>9}")
    for line in lines:
        if line["step"] == 1 or line["step"] % _SHOWN == 0:
            validation = line.get("validation_loss")
            shown = "" if validation is None else f"{validation:.3f}"
            print(f"{line['step']:>6} {line['loss']:7.3f} {shown:>11} {line['tokens_per_s']:9,.0f}")
    print(f"unigram entropy of the labels: {seen:.3f} in training, {held_out:.3f} in validation")
    return 0 if lines[-1]["validation_loss"] < held_out - _CLEARLY else 1


def sources() -> list[str]:
    """Overrides that name the files: modules to train on, two packages to validate with."""
    library = os.path.dirname(os.__file__)
    held_out = [f"{library}/{package}/*.py" for package in ("json", "email")]
    return [
        f"data.text.files={json.dumps([f'{library}/*.py'])}",
        f"validation.data.text.files={json.dumps(held_out)}",
    ]


def train(overrides: list[str]) -> None:
    """Run the command in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "d9d_train", "train", str(CONFIG), *overrides],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )


def entropy(data: DataConfig, samples: int, seq_len: int) -> float:
    """Of the labels of the first samples, in nats, each by its frequency among all of them."""
    stream = open_stream(data, seq_len=seq_len, vocab_size=258, seed=0)
    labels = torch.cat([stream.sample(number).labels for number in range(samples)])
    counts = labels[labels != IGNORED].bincount().double()
    return float(torch.special.entr(counts / counts.sum()).sum())


if __name__ == "__main__":
    sys.exit(main())
