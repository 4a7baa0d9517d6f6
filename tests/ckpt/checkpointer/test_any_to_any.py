"""Saved by eight ranks on one topology, loaded on every other one and by one process, bit for bit."""

from functools import partial

import pytest
import torch
from helpers.checkpoints import cli
from helpers.ranks import launch
from helpers.topologies import Meshes, Whole, state_of, whole

import d9d_ckpt
from d9d_ckpt.checkpointer.saver import Checkpointer
from d9d_ckpt.layout.topology import Topology

TOPOLOGIES = {
    "dp_replicate=8": Topology(dp_replicate=8),
    "dp_shard=8": Topology(dp_shard=8),
    "tp=8": Topology(tp=8),
    "pp=8": Topology(pp=8),
    "dp_shard=8,ep=8": Topology(dp_shard=8, ep=8),
    "cp=8": Topology(cp=8),
    "dp_replicate=2,dp_shard=4": Topology(dp_replicate=2, dp_shard=4),
    "dp_shard=4,tp=2": Topology(dp_shard=4, tp=2),
    "pp=2,tp=4,ep=2": Topology(pp=2, tp=4, ep=2),
    "pp=2,dp_shard=2,cp=2,ep=4": Topology(pp=2, dp_shard=2, cp=2, ep=4),
    "pp=2,dp_replicate=2,dp_shard=2": Topology(pp=2, dp_replicate=2, dp_shard=2),
    "pp=2,dp_shard=2,tp=2,ep=4": Topology(pp=2, dp_shard=2, tp=2, ep=4),
}
SLOTS = {"exp_avg": 0.25, "exp_avg_sq": 0.5}
"""Slots of an optimizer, as what is added to every element of the parameter."""

MODEL = whole(
    "qwen3_moe", layers=8, heads=16, kv_heads=8, head_dim=3, hidden=24, experts=8, vocab=40
)


def states(made: Whole, meshes: Meshes, step: float) -> dict[str, object]:
    """A state as a trainer's dict has it, with the values that belong to ``step``."""
    optim = {slot: state_of(made, meshes, offset=shift + step) for slot, shift in SLOTS.items()}
    names = optim["exp_avg"]
    optim["step"] = {name: torch.tensor(step) for name in names}
    model = state_of(made, meshes, offset=step)
    return {"model": model, "optim": optim, "step": int(step), "data": {"consumed": 40 + int(step)}}


def _save(root, name, topology, rank):
    meshes = Meshes.make(topology, rank)
    with Checkpointer(root / name, layout=topology, family="qwen3_moe", config=MODEL.json) as saver:
        saver.save(7, states(MODEL, meshes, 7.0), blocking=True)


def _load(root, topology, rank):
    """Every save on this topology; what differs, and the bytes read over the bytes held."""
    meshes = Meshes.make(topology, rank)
    wrong = []
    for name in TOPOLOGIES:
        state = states(MODEL, meshes, 0.0)
        with Checkpointer(root / name) as saver:
            report = saver.load(state)
        expected = states(MODEL, meshes, 7.0)
        wrong += [f"{name}: {at}" for at in _differing(state, expected)]
        held = sum(t.nbytes for t in _locals(expected))
        if report.bytes_read > 1.02 * held:
            wrong.append(f"{name}: {report.bytes_read} bytes read for {held}")
    return wrong


def _differing(a, b, path=""):
    for key, value in a.items():
        if isinstance(value, dict):
            yield from _differing(value, b[key], f"{path}{key}.")
        elif not (_same(value, b[key])):
            yield f"{path}{key}"


def _same(a, b):
    if not isinstance(a, torch.Tensor):
        return a == b
    a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
    return a.dtype == b.dtype and torch.equal(a, b)


def _locals(state):
    for value in state.values():
        if isinstance(value, dict):
            yield from _locals(value)
        elif isinstance(value, torch.Tensor):
            yield value.to_local() if hasattr(value, "to_local") else value


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("any")
    for name, topology in TOPOLOGIES.items():
        launch(8, partial(_save, root, name, topology))
    return root


def whole_state():
    tensors = MODEL.tensors
    out = {name: t + 7.0 for name, t in tensors.items()}
    for slot, shift in SLOTS.items():
        out |= {f"optim.{slot}.{name}": t + shift + 7.0 for name, t in tensors.items()}
    return out | {f"optim.step.{name}": torch.tensor(7.0) for name in tensors}


@pytest.mark.ranks
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_d04_a_save_of_any_topology_is_whole(saved, name):
    ckpt = d9d_ckpt.open(str(saved / name))
    found = {n: t.read() for n, t in ckpt.tensors.items()}
    expected = whole_state()
    assert found.keys() == expected.keys()
    assert [n for n in found if not torch.equal(found[n], expected[n])] == []
    assert ckpt.metadata["values"] == {"step": 7, "data": {"consumed": 47}}
    assert d9d_ckpt.verify(str(saved / name)).ok


@pytest.mark.ranks
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_d04_d20_every_save_is_loaded_on_any_topology(saved, name):
    for rank, wrong in enumerate(launch(8, partial(_load, saved, TOPOLOGIES[name]))):
        assert wrong == [], rank


@pytest.mark.ranks
def test_d04_every_save_is_loaded_by_one_process(saved):
    for name in TOPOLOGIES:
        state = {"model": {n: torch.zeros_like(t) for n, t in MODEL.tensors.items()}}
        with Checkpointer(saved / name) as saver:
            report = saver.load(state, ignore=["optim.*"])
        assert report.step == 7
        assert all(torch.equal(t, MODEL.tensors[n] + 7.0) for n, t in state["model"].items())


@pytest.mark.ranks
@pytest.mark.parametrize("target", ["tp=2,dp_shard=2", "pp=4,dp_shard=2,ep=2"])
def test_a_reshard_of_a_save_has_the_bits_of_a_load(saved, tmp_path, target):
    for name in TOPOLOGIES:
        out = tmp_path / name
        assert cli("reshard", saved / name, out, "--layout", target).code == 0
        found = {n: t.read() for n, t in d9d_ckpt.open(str(out)).tensors.items()}
        assert [n for n, t in whole_state().items() if not torch.equal(found[n], t)] == []
