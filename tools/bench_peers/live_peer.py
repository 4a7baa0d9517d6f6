"""Saves and loads of live state by `Checkpointer` and by torch's distributed checkpoint, taking turns.

    python live_peer.py save DIRECTORY --size 2GiB --ranks 2 --rounds 5
    python live_peer.py load DIRECTORY --size 2GiB --ranks 1 --rounds 5

One process, or forked gloo ranks that hold row shards as FSDP does. Seconds are those of the calls alone,
on the slowest rank; what they wrote is deleted between them. In round 0 memory is touched that later
rounds find there: it is reported by itself.
"""

import argparse
import json
import os
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from child import busy_s, descendants
from counters import bytes_read
from dcp_peer import fork_ranks
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from d9d_ckpt import Checkpointer
from d9d_ckpt.tensors import parse_bytes

TENSORS, WIDTH = 64, 4096

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """One way to do it.

    Attributes:
        name: As printed.
        call: The timed part, given the number of the round.
        clear: Removes what it wrote.
    """

    name: str
    call: Callable[[int], object]
    clear: Callable[[], None] = lambda: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["save", "load"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("2GiB"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.ranks == 1:
        torch.set_num_threads(1)
        measure(args, None)
    else:
        fork_ranks(lambda mesh: measure(args, mesh), args.ranks)


def measure(args: argparse.Namespace, mesh: DeviceMesh | None) -> None:
    state = state_of(args.size, mesh)
    with Checkpointer(args.directory / "ours") as saver:
        sides = SIDES[args.mode](saver, state, args.directory)
        report = alternate(sides, args.rounds)
    report["bytes"] = sum(tensor.nbytes for tensor in state.values())
    if is_first():
        print(json.dumps(report))


def state_of(nbytes: int, mesh: DeviceMesh | None) -> State:
    """bf16 matrices of together about ``nbytes``, each rank its rows."""
    rows = nbytes // TENSORS // WIDTH // 2
    share = rows // (mesh.size() if mesh else 1)
    state: State = {}
    for number in range(TENSORS):
        local = torch.randn(share, WIDTH).to(torch.bfloat16)
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False) if mesh else local
        state[f"layers.{number}.weight"] = whole
    return state


def saving(saver: Checkpointer, state: State, directory: Path) -> list[Side]:
    ours, theirs = directory / "ours", directory / "dcp"
    alone = not dist.is_initialized()
    return [
        Side(
            "ours",
            lambda number: saver.save(2 * number, {"model": state}, blocking=True),
            lambda: cleared(ours),
        ),
        Side(
            "ours, async",
            lambda number: saver.save(2 * number + 1, {"model": state}).wait(),
            lambda: cleared(ours),
        ),
        Side(
            "dcp",
            lambda _: dcp_save(state, checkpoint_id=theirs, no_dist=alone),
            lambda: cleared(theirs),
        ),
    ]


def loading(saver: Checkpointer, state: State, directory: Path) -> list[Side]:
    theirs = directory / "dcp"
    alone = not dist.is_initialized()
    saver.save(1, {"model": state}, blocking=True)
    dcp_save(state, checkpoint_id=theirs, no_dist=alone)
    return [
        Side("ours", lambda _: saver.load({"model": state})),
        Side("dcp", lambda _: dcp_load(state, checkpoint_id=theirs, no_dist=alone)),
    ]


SIDES = {"save": saving, "load": loading}


def cleared(directory: Path) -> None:
    """Remove what all ranks wrote, once all are done with it."""
    if is_first():
        shutil.rmtree(directory)


def alternate(sides: list[Side], rounds: int) -> dict[str, Any]:
    """Every side once a round, the order turning round with each (ABBA)."""
    runs: dict[str, list[Mapping[str, float]]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides[:: 1 if number % 2 else -1]:
            runs[side.name].append(timed(side, number))
            side.clear()
    return {
        "first": {name: found[0] for name, found in runs.items()},
        "runs": {name: found[1:] for name, found in runs.items()},
    }


def timed(side: Side, number: int) -> dict[str, float]:
    """Seconds of the slowest rank, and what all ranks read meanwhile."""
    barrier()
    read, busy, cpu, start = bytes_read(), busy_s(), cpu_s(), time.perf_counter()
    side.call(number)
    seconds = time.perf_counter() - start
    read, cpu = bytes_read() - read, cpu_s() - cpu
    barrier()
    cpu, busy = over_ranks(cpu, dist.ReduceOp.SUM), busy_s() - busy
    return {
        "wall_s": over_ranks(seconds, dist.ReduceOp.MAX),
        "cpu_s": cpu,
        "others_cpu_s": max(busy - cpu, 0.0),
        "peak_rss": over_ranks(peak_rss(), dist.ReduceOp.MAX),
        "bytes_read": over_ranks(read, dist.ReduceOp.SUM),
    }


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def over_ranks(value: float, how: Any) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total, op=how)
    return float(total)


def cpu_s() -> float:
    """Processor seconds of this process and of those that it has running."""
    ticks = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


if __name__ == "__main__":
    main()
