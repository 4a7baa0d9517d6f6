"""Three steps of AdamW, a save, three more on another topology: against six that nothing interrupted."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers.ranks import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from d9d_ckpt import Checkpointer, DataCursor

pytestmark = pytest.mark.ranks

STEPS, BATCH, VOCAB, HIDDEN, INNER = 3, 8, 11, 6, 10
"""Four ranks divide neither the vocabulary nor the hidden sizes."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _sharded(net, mesh):
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


def _alone(net):
    return 0, 1


def _fsdp(net):
    mesh = init_device_mesh("cpu", (4,))
    _sharded(net, mesh)
    return mesh.get_local_rank(), 4


def _fsdp_tp(net):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _sharded(net, mesh["fsdp"])
    return mesh["fsdp"].get_local_rank(), 2


def _hsdp(net):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "fsdp"))
    _sharded(net, mesh)
    return mesh["rep"].get_local_rank() * 2 + mesh["fsdp"].get_local_rank(), 4


TOPOLOGIES: dict[str, tuple[int, Callable[[nn.Module], tuple[int, int]]]] = {
    "alone": (1, _alone),
    "fsdp=4": (4, _fsdp),
    "fsdp=2,tp=2": (4, _fsdp_tp),
    "rep=2,fsdp=2": (4, _hsdp),
}
"""Ranks of each, and what makes a model parallel and says which share of a batch a rank takes."""


class Trainer:
    def __init__(self, topology, seed):
        torch.manual_seed(seed)
        self.net = Net().double()
        self.reader, self.readers = TOPOLOGIES[topology][1](self.net)
        decayed = [p for p in self.net.parameters() if p.dim() > 1]
        others = [p for p in self.net.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optim = torch.optim.AdamW(groups, lr=0.05, foreach=False)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.8)
        self.cursor = DataCursor(1000, 0)

    @property
    def state(self):
        return {
            "model": self.net,
            "optim": self.optim,
            "sched": self.sched,
            "data": self.cursor,
        }

    def train(self, steps):
        for _ in range(steps):
            share = self.cursor.share(self.reader, self.readers, BATCH)
            tokens = torch.tensor([[(n * k) % VOCAB for k in (1, 3, 7)] for n in share])
            self.optim.zero_grad()
            logits = self.net(tokens)
            nn.functional.cross_entropy(
                logits.flatten(0, 1), (tokens * 2 % VOCAB).flatten()
            ).backward()
            self.optim.step()
            self.sched.step()
            self.cursor.advance(BATCH)

    def tensors(self):
        """Parameters and moments, whole."""
        out = {}
        for name, parameter in self.net.named_parameters():
            slots = {slot: self.optim.state[parameter][slot] for slot in ("exp_avg", "exp_avg_sq")}
            for slot, tensor in {"": parameter, **slots}.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                out[f"{slot} {name}"] = whole.detach().numpy()
        return out


def _uninterrupted(rank):
    trainer = Trainer("alone", 0)
    trainer.train(2 * STEPS)
    return trainer.tensors()


def _save(root, topology, rank):
    trainer = Trainer(topology, 0)
    trainer.train(STEPS)
    with Checkpointer(root / topology) as saver:
        handle = saver.save(STEPS, trainer.state)
        trainer.train(1)
        handle.wait()


def _resume(root, topology, rank):
    """Every save, resumed with other random parameters than it began with."""
    out = {}
    for name in TOPOLOGIES:
        trainer = Trainer(topology, 1)
        with Checkpointer(root / name) as saver:
            report = saver.load(trainer.state)
        assert (report.step, report.missing, report.unexpected, report.fresh) == (STEPS, (), (), ())
        trainer.train(STEPS)
        out[name] = trainer.tensors(), trainer.cursor.consumed, trainer.sched.get_last_lr()
    return out


@pytest.fixture(scope="module")
def expected():
    return launch(1, _uninterrupted)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("continuation")
    for name, (world, _) in TOPOLOGIES.items():
        launch(world, partial(_save, root, name))
    return root


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_d04_d20_a_resume_on_any_topology_goes_on_as_if_never_stopped(saved, expected, topology):
    found = launch(TOPOLOGIES[topology][0], partial(_resume, saved, topology))
    for rank in found:
        for name, (tensors, consumed, rates) in rank.items():
            errors = {key: abs(tensors[key] - whole).max() for key, whole in expected.items()}
            assert max(errors.values()) < 1e-10, (name, errors)
            assert consumed == 2 * STEPS * BATCH
            assert rates == pytest.approx([0.05 * 0.8**6] * 2)
