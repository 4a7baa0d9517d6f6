"""The same work by torch's distributed checkpoint, through its public API.

    python dcp_peer.py make    HF_SRC DST                   # 2 ranks save, everything cut by rows
    python dcp_peer.py reshard SRC DST                      # 2 ranks load at tp=2 and save
    python dcp_peer.py load    SRC --cut tp --rank 1 --ranks 4

Ranks are forked after torch is imported, so that start-up is paid once. At tp=2,pp=2 a process
plays one tp rank of both stages: two processes for two cores, as on our side.
"""

import argparse
import json
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from counters import bytes_read
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_form import cut_dim, share, training_tensors

RANKS = 2
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

Spec = tuple[tuple[int, ...], torch.dtype]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["make", "reshard", "load"])
    parser.add_argument("src", type=Path)
    parser.add_argument("dst", type=Path, nargs="?")
    parser.add_argument("--cut", choices=["tp", "columns", "rows"])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=int)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.mode == "make":
        fork_ranks(lambda mesh: make(args.src, args.dst, mesh))
    elif args.mode == "reshard":
        fork_ranks(lambda mesh: reshard(args.src, args.dst, mesh))
    else:
        load(args.src, args.cut, args.rank, args.ranks)


def fork_ranks(work: Callable[[DeviceMesh], None], ranks: int = RANKS) -> None:
    """Runs `work` in forked gloo ranks; any failure is the command's."""
    # As under torchrun: a store in a file answers a look at it, ten milliseconds apart.
    store = f"tcp://127.0.0.1:{_free_port()}"
    pids = [_fork_rank(rank, ranks, store, work) for rank in range(ranks)]
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(int(any(statuses)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fork_rank(rank: int, ranks: int, store: str, work: Callable[[DeviceMesh], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
            work(init_device_mesh("cpu", (ranks,)))
            dist.destroy_process_group()
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            os._exit(status)
    return pid


def make(src: Path, dst: Path, mesh: DeviceMesh) -> None:
    specs = {name: (t.shape, DTYPES[t.dtype]) for name, t in training_tensors(src).items()}
    state = sharded(specs, "rows", mesh)
    for tensor in state.values():
        tensor.to_local().fill_(mesh.get_rank() + 1)
    dcp.save(state, checkpoint_id=dst)


def reshard(src: Path, dst: Path, mesh: DeviceMesh) -> None:
    before = bytes_read()
    start = time.perf_counter()
    state = sharded(saved_specs(src), "tp", mesh)
    dcp.load(state, checkpoint_id=src)
    dcp.save(state, checkpoint_id=dst)
    dist.barrier()
    seconds = time.perf_counter() - start
    count = torch.tensor(bytes_read() - before)
    dist.all_reduce(count)
    if mesh.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "bytes_read": int(count)}))


def load(src: Path, cut: str, rank: int, ranks: int) -> None:
    """One rank of several, alone: its process group is a fake, the load takes no part in it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    before = bytes_read()
    start = time.perf_counter()
    state = sharded(saved_specs(src), cut, mesh)
    dcp.load(state, checkpoint_id=src, no_dist=True)
    seconds = time.perf_counter() - start
    report = {
        "seconds": seconds,
        "bytes_read": bytes_read() - before,
        "bytes_loaded": sum(tensor.to_local().nbytes for tensor in state.values()),
    }
    print(json.dumps(report))


def saved_specs(src: Path) -> dict[str, Spec]:
    entries = dcp.FileSystemReader(src).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def sharded(specs: Mapping[str, Spec], cut: str, mesh: DeviceMesh) -> dict[str, DTensor]:
    """Empty DTensors at a layout; `from_local` needs the whole shape where shards are uneven."""
    state = {}
    for name, (shape, dtype) in specs.items():
        dim = cut_dim(name, shape, cut)
        region = share(shape, dim, mesh.get_rank(), mesh.size())
        local = torch.empty([part.stop - part.start for part in region], dtype=dtype)
        placement = Replicate() if dim is None else Shard(dim)
        whole = torch.empty(shape, device="meta")
        state[name] = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return state


if __name__ == "__main__":
    main()
