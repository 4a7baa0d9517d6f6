"""How long a training loop is held up by an asynchronous save: ours against torch DCP's async_save.

    python tools/bench_save_stall.py                       # on a GPU: 8.6 GB of state
    python tools/bench_save_stall.py --device cpu --size 512MiB

In one process, alternating: the call, the time until the snapshot is complete (the state may be written
again), until it is durable, and, on a GPU, the time of a training step while the copies run against one
without. On a GPU the snapshot is compared with the bandwidth from the device to pinned memory measured
in the same run. RSS is sampled after every save.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import d9d_ckpt
from d9d_ckpt.tensors import parse_bytes

_TENSORS = 64
_MATMUL = 8192


def state_of(nbytes: int, device: str) -> dict[str, torch.Tensor]:
    """bf16 matrices of together about ``nbytes``."""
    width = 4096
    rows = nbytes // _TENSORS // width // 2
    return {
        f"layers.{n}.weight": torch.randn(rows, width, device=device, dtype=torch.bfloat16)
        for n in range(_TENSORS)
    }


def rss() -> int:
    """Resident bytes of this process, staging memory included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def link_bandwidth(nbytes: int = 1 << 30) -> float:
    """Bytes a second from the GPU to pinned memory."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    seconds = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return nbytes / min(seconds)


class Training:
    """A step that keeps the GPU busy for some 20 ms, and then writes to the state as an optimizer does."""

    def __init__(self, state: dict[str, torch.Tensor], device: str) -> None:
        self.state, self.device = state, device
        self._a = torch.randn(_MATMUL, _MATMUL, device=device, dtype=torch.bfloat16)

    def step(self) -> None:
        if self.device == "cuda":
            for _ in range(16):
                self._a @ self._a

    def timed(self, count: int) -> list[float]:
        """Milliseconds of each of ``count`` steps on the GPU."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for n in range(count):
            self.step()
            events[n + 1].record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]


def ours(saver: Any, training: Training, number: int) -> dict[str, float]:
    """Seconds of one save of ours."""
    _synchronise(training.device)
    began = time.perf_counter()
    handle = saver.save(number, {"model": training.state}, overwrite=True)
    called = time.perf_counter()
    steps = training.timed(8) if training.device == "cuda" else []
    handle.wait_snapshot()
    copied = time.perf_counter()
    handle.wait()
    out = {"call": called - began, "durable": time.perf_counter() - began}
    if steps:
        out["step_ms"] = statistics.median(steps[:4])
    else:
        out["snapshot"] = copied - began
    return out


def snapshot_alone(saver: Any, training: Training, number: int) -> float:
    """Seconds from the call until the copy is complete, with nothing else on the GPU."""
    _synchronise(training.device)
    began = time.perf_counter()
    handle = saver.save(number, {"model": training.state}, overwrite=True)
    handle.wait_snapshot()
    seconds = time.perf_counter() - began
    handle.wait()
    return seconds


def theirs(folder: Path, training: Training) -> dict[str, float]:
    """Seconds of one async_save of torch DCP, as it comes."""
    _synchronise(training.device)
    began = time.perf_counter()
    future = dcp.async_save(
        training.state, checkpoint_id=str(folder), no_dist=not dist.is_initialized()
    )
    called = time.perf_counter()
    result = getattr(future, "result")  # noqa: B009 - a Future, or a response that holds several
    result()
    return {"call": called - began, "durable": time.perf_counter() - began}


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Everything, in one run."""
    state = state_of(parse_bytes(args.size), args.device)
    nbytes = sum(t.nbytes for t in state.values())
    training = Training(state, args.device)
    found: dict[str, Any] = {"bytes": nbytes, "ours": [], "dcp": [], "rss": []}
    if args.device == "cuda":
        found["link"] = link_bandwidth()
        training.timed(4)
        found["step_ms"] = statistics.median(training.timed(16))
    with d9d_ckpt.Checkpointer(scratch / "ours", keep_last=1) as saver:
        for number in range(args.rounds):
            found["ours"].append(ours(saver, training, 2 * number))
            if args.device == "cuda":
                found["ours"][-1]["snapshot"] = snapshot_alone(saver, training, 2 * number + 1)
            if not args.no_dcp:
                shutil.rmtree(scratch / "dcp", ignore_errors=True)
                found["dcp"].append(theirs(scratch / "dcp", training))
            found["rss"].append(rss())
        for number in range(args.flat):
            saver.save(10_000 + number, {"model": state}).wait()
            found["rss"].append(rss())
    return found


def table(found: dict[str, Any]) -> str:
    """The figures for people; medians from the second round on, when slots and caches are warm."""
    lines = [f"{found['bytes'] / 1e9:.2f} GB of state"]
    if "link" in found:
        best = found["bytes"] / found["link"]
        lines.append(f"GPU to pinned memory {found['link'] / 1e9:.1f} GB/s: {best:.3f} s at best")
    for side in ("ours", "dcp"):
        rounds = found[side][1:] or found[side]
        for key in rounds[0] if rounds else ():
            values = [r[key] for r in rounds]
            unit = "ms" if key == "step_ms" else "s"
            lines.append(
                f"{side:5} {key:9} median {statistics.median(values):9.4f} {unit}, "
                f"from {min(values):.4f} to {max(values):.4f}; first {found[side][0][key]:.4f}"
            )
    if "step_ms" in found:
        lines.append(f"a step without a save: {found['step_ms']:.4f} ms")
    sizes = found["rss"]
    lines.append(
        f"RSS after each save: {sizes[0] / 1e9:.2f} GB ... {sizes[-1] / 1e9:.2f} GB, "
        f"at most {max(sizes) / 1e9:.2f} over {len(sizes)}"
    )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", default="8GiB" if torch.cuda.is_available() else "1GiB")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--flat", type=int, default=0, help="so many more saves, for RSS")
    parser.add_argument("--no-dcp", action="store_true")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))  # noqa: S108
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        found = measure(args, Path(scratch))
    sys.stdout.write(table(found) + "\n")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
