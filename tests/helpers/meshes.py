"""Ranks of a mesh without the others: torch's fake process group, whose collectives do nothing."""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

_NUMBERS = count()


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    """Be ``rank`` of ``world`` inside; nothing is ever sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fresh_mesh(*shape: int) -> DeviceMesh:
    """A CPU mesh that equals none before it; its axes are in ``mesh_dim_names``.

    DTensor's caches hand out an equal mesh in place of the one at hand, with the coordinates of the
    rank that this process was when it made that one.
    """
    number = next(_NUMBERS)
    names = tuple(f"axis{axis}_{number}" for axis in range(len(shape)))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def on_fake_ranks(world: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` gives on each rank, each in a process of its own."""
    return [_forked(rank, world, work) for rank in range(world)]


def _forked(rank: int, world: int, work: Callable[[int], Any]) -> Any:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        torch.set_num_threads(1)
        try:
            with fake_rank(rank, world):
                answer = (True, work(rank))
        except BaseException as error:  # noqa: BLE001
            answer = (False, repr(error))
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        good, answer = pickle.load(pipe)  # noqa: S301
    os.waitpid(child, 0)
    assert good, f"rank {rank}: {answer}"
    return answer
