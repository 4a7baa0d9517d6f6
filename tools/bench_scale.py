"""What the engine costs apart from moving bytes: start-up, planning, memory, and how both grow.

    python tools/bench_scale.py [--json FILE] [--only help,inspect,linear,plan,memory]

Checkpoints are made in a temporary directory in memory and removed. Every figure is a whole process:
wall and CPU seconds and peak resident memory of the process or any of its workers, from `wait4`.

- help: `d9d-ckpt --help`
- inspect: 100,000 tensors
- linear: convert of 2,000, 20,000 and 200,000 tiny tensors; cost per tensor against the smallest
- plan: Qwen3-235B-A22B, 36,945 tensors over holes, to 512 ranks
- memory: convert, reshard and back of 4 GiB with one tensor of 1.2 GiB under --memory 128MiB
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROUNDS = 3
MEMORY = "/dev/shm"  # noqa: S108 - a directory in memory, where each run makes one of its own


@dataclass(frozen=True)
class Cost:
    """One command, the best of its rounds.

    Attributes:
        name: What was run.
        wall: Seconds.
        cpu: Seconds, workers included.
        rss: Peak resident memory of the largest process, bytes.
        target: What it must not exceed.
    """

    name: str
    wall: float
    cpu: float
    rss: int
    target: str


def cost(name: str, target: str, *argv: str, rounds: int = ROUNDS) -> Cost:
    """The cheapest of ``rounds`` runs of one d9d-ckpt command."""
    runs = [_run(argv) for _ in range(rounds)]
    wall, cpu, rss = (min(run[k] for run in runs) for k in range(3))
    return Cost(name, wall, cpu, int(rss), target)


def _run(argv: Sequence[str]) -> tuple[float, float, float]:
    started = time.perf_counter()
    child = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "d9d_ckpt", *argv], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"d9d-ckpt {' '.join(argv)} ended with {child.returncode}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10


def bench_help(root: Path) -> list[Cost]:
    return [cost("--help", "0.3 s of CPU", "--help")]


def many(root: Path, layers: int) -> Path:
    """A checkpoint of about 393 tiny tensors a layer."""
    path = root / f"many-{layers}"
    sizes = "--hidden 16 --heads 2 --kv-heads 1 --head-dim 8 --moe-intermediate 8"
    more = f"--intermediate 16 --experts 128 --vocab 64 --layers {layers}"
    make("qwen3_moe", path, *sizes.split(), *more.split())
    return path


def make(family: str, path: Path, *options: str) -> None:
    """A checkpoint, by a process of its own: a child starts with its parent's peak memory."""
    tool = Path(__file__).with_name("make_checkpoint.py")
    argv = [sys.executable, str(tool), family, str(path), *options]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own tool


def bench_inspect(root: Path) -> list[Cost]:
    source = many(root, 255)
    return [cost("inspect, 100,218 tensors", "1 s", "inspect", str(source), "--json")]


def bench_linear(root: Path) -> list[Cost]:
    out = []
    for layers in (5, 51, 510):
        source, target = many(root, layers), root / "out"
        best = None
        for _ in range(ROUNDS):
            layout = ("--to", "sharded", "--layout", "ep=2,dp_shard=2", "--workers", "2")
            argv = ("convert", str(source), str(target), *layout, "--quiet")
            name = f"convert, {layers * 393 + 3:,} tensors"
            once = cost(name, "1.3 of proportional", *argv, rounds=1)
            best = once if best is None or once.cpu < best.cpu else best
            shutil.rmtree(target)
        if best is not None:
            out.append(best)
    return out


def bench_plan(root: Path) -> list[Cost]:
    source = root / "235b"
    make("qwen3_moe", source, "--size", "235b", "--sparse")
    layout = "pp=8,dp_shard=8,tp=8,ep=8"
    return [cost("plan, 235B to 512 ranks", "5 s, 1 GiB", "plan", str(source), "--layout", layout)]


def bench_memory(root: Path) -> list[Cost]:
    sizes = "--size 4GiB --vocab 314624 --hidden 2048 --max-shard-size 2GB"
    make("llama", root / "large", *sizes.split())
    common = ("--memory", "128MiB", "--workers", "2", "--quiet")
    steps = (
        ("convert, 1.2 GiB tensor", "convert", "large", "a", "--to", "sharded", "--layout", "tp=4"),
        ("reshard, 1.2 GiB tensor", "reshard", "a", "b", "--layout", "pp=2,dp_shard=3"),
        ("back, 1.2 GiB tensor", "convert", "b", "a", "--to", "huggingface"),
    )
    out = []
    for name, command, src, dst, *rest in steps:
        shutil.rmtree(root / dst, ignore_errors=True)
        argv = (command, str(root / src), str(root / dst), *rest, *common)
        out.append(cost(name, "256 MiB", *argv, rounds=1))
        shutil.rmtree(root / src)
    return out


BENCHES: dict[str, Callable[[Path], list[Cost]]] = {
    "help": bench_help,
    "inspect": bench_inspect,
    "linear": bench_linear,
    "plan": bench_plan,
    "memory": bench_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dir", default=MEMORY, help="where checkpoints are made")
    parser.add_argument("--only", default=",".join(BENCHES), help="comma-separated benches")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    args = parser.parse_args()
    found: list[Cost] = []
    for name in args.only.split(","):
        root = Path(tempfile.mkdtemp(prefix="d9d-scale-", dir=args.dir))
        try:
            for c in BENCHES[name](root):
                found.append(c)
                rss = f"{c.rss / 2**20:.0f} MiB"
                print(
                    f"{c.name:32} {c.wall:7.2f} s wall {c.cpu:7.2f} s cpu {rss:>9}   at most {c.target}"
                )
        finally:
            shutil.rmtree(root)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(c) for c in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
