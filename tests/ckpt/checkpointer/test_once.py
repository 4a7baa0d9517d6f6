"""What several ranks hold is read by one of them, in turns, and sent to the others."""

from functools import partial

import pytest
import torch
from helpers.ranks import launch
from helpers.topologies import Meshes, state_of, whole

from d9d_ckpt.checkpointer.once import readers
from d9d_ckpt.checkpointer.saver import Checkpointer
from d9d_ckpt.checkpointer.share import Holding
from d9d_ckpt.errors import UsageError
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.tensors import Region

MODEL = whole("llama", dtype="float32")
TOPOLOGY = Topology(dp_replicate=2, dp_shard=2)


def test_holders_of_a_box_read_in_turns_and_a_single_one_is_left_out():
    a, b = Region((0,), (2,)), Region((2,), (2,))
    spec = ("F32", (4,))
    every = [
        Holding(("x", "y"), (spec, spec), boxes) for boxes in ((a, a), (b, a), (a, None), (b, b))
    ]
    assert readers(every) == {
        ("x", a): (0, (0, 2)),
        ("x", b): (3, (1, 3)),
        ("y", a): (0, (0, 1)),
    }


def _load(path, rank):
    meshes = Meshes.make(TOPOLOGY, rank)
    state = {"model": state_of(MODEL, meshes, offset=9.0), "plain": torch.zeros(5000), "step": 0}
    with Checkpointer(path) as saver:
        report = saver.load(state, read="once")
        again = saver.load(state, read="once")
    expected = state_of(MODEL, meshes)
    wrong = [
        n
        for n, t in expected.items()
        if not torch.equal(t.to_local(), state["model"][n].to_local())
    ]
    assert torch.equal(state["plain"], torch.arange(5000.0))
    assert state["step"] == 4
    return wrong, report.bytes_read, again.bytes_read


@pytest.mark.ranks
def test_replicas_are_read_once_over_all_ranks(tmp_path):
    state = {"model": dict(MODEL.tensors), "plain": torch.arange(5000.0), "step": 4}
    with Checkpointer(tmp_path) as saver:
        saver.save(4, state, blocking=True)
    found = launch(4, partial(_load, tmp_path))
    assert [wrong for wrong, _, _ in found] == [[]] * 4
    total = sum(t.nbytes for t in MODEL.tensors.values()) + 20_000
    assert sum(read for _, read, _ in found) == total
    assert sum(read for _, _, read in found) == total


def test_another_way_to_read_is_refused(tmp_path):
    with Checkpointer(tmp_path) as saver, pytest.raises(UsageError, match="each or once"):
        saver.load({}, read="twice")
