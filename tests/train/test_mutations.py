"""Faults that a trainer on six axes may have, each seeded, and each caught by comparing with one process.

Ranks are forked, so what is patched here is what they run. A fault that a test of the loss alone would
miss is said to be silent: the loss of the first step is the same to the bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers.axes import config_of
from helpers.trainers import BOUND, Trained, alone, difference, documents, spread
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from d9d_train import collectives
from d9d_train.batch import IGNORED, Batch
from d9d_train.data import loader
from d9d_train.layers import sdpa
from d9d_train.layers.dropout import Dropout
from d9d_train.layers.embedding import Embedding
from d9d_train.layers.head import LMHead
from d9d_train.layers.linear import Linear
from d9d_train.layers.moe import Experts
from d9d_train.layers.weights import local
from d9d_train.mesh import Axis, Mesh
from d9d_train.optim.clip import clip_, replicas
from d9d_train.optim.shards import shard
from d9d_train.parallel import fsdp, stages, tensor
from d9d_train.parallel.context import all_gather, ring
from d9d_train.parallel.pipeline.actions import Action
from d9d_train.parallel.pipeline.run import _Walk
from d9d_train.step import Stepper

pytestmark = pytest.mark.ranks

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """Something wrong.

    Attributes:
        line: The smallest topology that shows it.
        silent: Whether the loss of the first step does not.
        seed: Puts it in.
    """

    line: str
    silent: bool
    seed: Callable[[Patch], None]


FAULTS: list[Fault] = []


def fault(line: str, *, silent: bool) -> Callable[[Callable[[Patch], None]], None]:
    def add(seed: Callable[[Patch], None]) -> None:
        FAULTS.append(Fault(line, silent, seed))

    return add


def whole_gradient(weight: torch.Tensor) -> torch.Tensor:
    """What `local` would be if each rank's gradient of a replicated weight were that of all ranks."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


# Tensor parallelism


@fault("llama tp=2", silent=True)
def partial_sums_of_replicated_weights_dropped(patch: Patch) -> None:
    for room in ("attention", "embedding", "head", "linear", "moe", "norm"):
        patch.setattr(f"d9d_train.layers.{room}.local", whole_gradient)


@fault("moe tp=2", silent=True)
def partial_sum_of_the_router_dropped(patch: Patch) -> None:
    patch.setattr("d9d_train.layers.moe.local", whole_gradient)


@fault("moe tp=2", silent=True)
def partial_sum_of_query_and_key_norms_dropped(patch: Patch) -> None:
    patch.setattr("d9d_train.layers.attention.local", whole_gradient)


@fault("moe tp=2", silent=True)
def backward_of_a_scatter_without_the_other_ranks(patch: Patch) -> None:
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dim, axis = ctx.call
        parts = [torch.zeros_like(grad)] * axis.size
        parts[axis.rank] = grad
        return torch.cat(parts, dim), None, None

    patch.setattr(collectives._ReduceScatter, "backward", staticmethod(backward))


@fault("moe tp=2", silent=True)
def backward_of_a_gather_without_the_sum(patch: Patch) -> None:
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dim, axis = ctx.call
        return grad.chunk(axis.size, dim)[axis.rank], None, None

    patch.setattr(collectives._Gather, "backward", staticmethod(backward))


@fault("llama tp=2", silent=True)
def bias_added_on_every_rank(patch: Patch) -> None:
    """Biases start at zero, so the first loss knows nothing of them."""

    def forward(self: Linear, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else local(self.bias)
        return functional.linear(x, local(self.weight), bias)

    patch.setattr(Linear, "forward", forward)


@fault("moe tp=2", silent=False)
def first_row_of_a_vocabulary_shard_off_by_one(patch: Patch) -> None:
    follow = tensor._follow

    def off(model: torch.nn.Module, placed: Any, axis: Axis) -> None:
        follow(model, placed, axis)
        for module in model.modules():
            if isinstance(module, Embedding):
                module.first_row += axis.rank

    patch.setattr(tensor, "_follow", off)


@fault("moe tp=2", silent=False)
def padding_of_the_vocabulary_takes_part(patch: Patch) -> None:
    forward = LMHead.forward

    def padded(self: LMHead, x: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        self.rows = local(self.weight).shape[0] * self.vocab.size
        return forward(self, x, labels)

    patch.setattr(LMHead, "forward", padded)


@fault("moe tp=2", silent=True)
def norm_counts_replicated_weights_twice(patch: Patch) -> None:
    patch.setattr("d9d_train.step.replicas", lambda t, ranks: max(replicas(t, ranks) // 2, 1))


# Data and expert parallelism


@fault("moe dp_shard=2", silent=True)
def gradients_averaged(patch: Patch) -> None:
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda unit, factor: None)


@fault("moe dp_replicate=2", silent=True)
def gradients_of_replicas_not_summed(patch: Patch) -> None:
    patch.setattr(fsdp, "_shards", lambda view, name: view[name])


@fault("moe dp_shard=4 ep=2", silent=True)
def gradients_of_experts_divided_by_ep(patch: Patch) -> None:
    """Over one rank FSDP2 divides nothing, so efsdp is 2 here."""
    divide = FSDPModule.set_gradient_divide_factor

    def by_degree(unit: FSDPModule, factor: float) -> None:
        divide(unit, 2.0 if isinstance(unit, Experts) else factor)

    patch.setattr(FSDPModule, "set_gradient_divide_factor", by_degree)


@fault("moe dp_shard=2 ep=2", silent=False)
def rows_stay_in_order_of_arrival(patch: Patch) -> None:
    patch.setattr("d9d_train.parallel.expert._moved", lambda sizes, rows: torch.arange(rows))


@fault("moe dp_shard=2", silent=False)
def loss_divided_by_the_labels_of_a_rank(patch: Patch) -> None:
    def tokens(self: Stepper, counted: int) -> torch.Tensor:
        return torch.tensor(counted * self.mesh.axis("dp").size)

    patch.setattr(Stepper, "tokens", tokens)


@fault("moe dp_shard=2", silent=False)
def ignored_labels_counted(patch: Patch) -> None:
    patch.setattr(loader, "IGNORED", IGNORED - 1)


@fault("moe dp_shard=2", silent=False)
def dropout_keyed_by_the_sequences_of_a_rank(patch: Patch) -> None:
    elements = Dropout._elements

    def own(self: Dropout, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return elements(self, x, replace(batch, samples=torch.arange(len(batch.samples))))

    patch.setattr(Dropout, "_elements", own)


@fault("moe dp_shard=2 microbatches=2", silent=True)
def first_microbatch_reduced_in_place_of_the_last(patch: Patch) -> None:
    synchronise = fsdp.synchronise

    def inverted(stage: torch.nn.Module, *, last: bool, **others: Any) -> None:
        synchronise(stage, last=not last, **others)

    patch.setattr(fsdp, "synchronise", inverted)


@fault("moe dp_shard=2", silent=True)
def balance_loss_weighed_by_the_sequences_of_a_rank(patch: Patch) -> None:
    cut = stages._cut_sequences

    def heavy(model: torch.nn.Module, mesh: Mesh, balance: float) -> None:
        cut(model, mesh, balance * mesh.axis("dp").size)

    patch.setattr(stages, "_cut_sequences", heavy)


@fault("moe dp_shard=2", silent=True)
def routers_balanced_by_the_loads_of_a_rank(patch: Patch) -> None:
    patch.setattr(Stepper, "_loads", lambda self: torch.stack([m.counts for m in self._sparse()]))


@fault("moe dp_shard=2", silent=True)
def clipped_by_the_norm_of_a_rank(patch: Patch) -> None:
    """Neither loss nor gradients nor norm of the first step show it."""

    def by_own(grads: Any, norm: torch.Tensor, max_norm: float) -> None:
        own = torch.stack([shard(grad).norm() for grad in grads if shard(grad).numel()]).norm()
        clip_(grads, own, max_norm)

    patch.setattr("d9d_train.step.clip_", by_own)


# Context parallelism


@fault("moe cp=2", silent=False)
def positions_from_the_index_on_a_rank(patch: Patch) -> None:
    def positions(batch: Batch) -> torch.Tensor:
        index = torch.arange(len(batch.index))
        return index - batch.starts[:, index]

    patch.setattr(Batch, "positions", property(positions))


@fault("moe cp=2", silent=False)
def labels_shifted_after_the_cut(patch: Patch) -> None:
    split = loader.split

    def shifted(full: Batch, index: torch.Tensor) -> Batch:
        part = split(full, index)
        following = part.tokens.roll(-1, 1)
        return replace(part, labels=following.masked_fill(part.labels == IGNORED, IGNORED))

    patch.setattr(loader, "split", shifted)


@fault("moe cp=2", silent=False)
def dropout_keyed_by_the_index_on_a_rank(patch: Patch) -> None:
    elements = Dropout._elements

    def own(self: Dropout, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return elements(self, x, replace(batch, index=torch.arange(len(batch.index))))

    patch.setattr(Dropout, "_elements", own)


@fault("moe cp=2", silent=True)
def balance_loss_counts_the_tokens_of_a_rank(patch: Patch) -> None:
    patch.setattr("d9d_train.layers.moe.all_reduce", lambda counts, axis: counts)


@fault("moe cp=2", silent=True)
def gradient_of_the_balance_loss_summed_again(patch: Patch) -> None:
    def summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return collectives.gather(x[None], 0, axis).sum(0)

    patch.setattr("d9d_train.layers.moe.shared_sum", summed)


@fault("moe cp=2 context=all_gather", silent=False)
def gathered_keys_left_in_order_of_ranks(patch: Patch) -> None:
    patch.setattr(all_gather, "in_order", lambda x, size, dim: x)


@fault("moe cp=2 context=ulysses", silent=False)
def documents_forgotten_with_the_exchange_of_heads(patch: Patch) -> None:
    attend = sdpa.attend

    def over_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
        return attend(q, k, v, replace(batch, packed=False))

    patch.setattr(sdpa, "attend", over_all)


@fault("moe cp=2 context=ring", silent=False)
def ring_skips_a_block_that_is_seen(patch: Patch) -> None:
    pairs = ring._Pairs.of

    def fewer(self: ring._Pairs, source: int) -> Iterator[Any]:
        return (pair for pair in pairs(self, source) if pair[1].first or not pair[0].first)

    patch.setattr(ring._Pairs, "of", fewer)


# Pipeline


@fault("llama pp=2", silent=True)
def gradients_of_tied_ends_not_summed(patch: Patch) -> None:
    patch.setattr("d9d_train.step.sum_tied", lambda stages, mesh: None)


@fault("llama pp=2", silent=True)
def norm_counts_both_copies_of_tied_ends(patch: Patch) -> None:
    patch.setattr(Stepper, "_second", lambda self, name: False)


@fault("moe pp=2 schedule=gpipe microbatches=2", silent=True)
def gradients_meet_the_graph_of_another_microbatch(patch: Patch) -> None:
    backward = _Walk._backward

    def crossed(self: _Walk, action: Action) -> None:
        if (action.stage, action.microbatch) == (0, 0):
            graphs = self._graphs
            graphs[0, 0], graphs[0, 1] = graphs[0, 1], graphs[0, 0]
        backward(self, action)

    patch.setattr(_Walk, "_backward", crossed)


@fault("moe microbatches=2", silent=True)
def gradient_of_a_microbatch_added_twice(patch: Patch) -> None:
    backward = _Walk._backward

    def doubled(self: _Walk, action: Action) -> None:
        once = self._scale
        self._scale = once * 2 if action.microbatch == 0 else once
        backward(self, action)
        self._scale = once

    patch.setattr(_Walk, "_backward", doubled)


# The test


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> str:
    return documents(tmp_path_factory.mktemp("data") / "tokens.bin")


@pytest.fixture(scope="module")
def whole(tokens) -> Callable[[str], Trained]:
    """What one process computes with a model."""
    return cache(lambda model: alone(config_of(model, tokens)))


@pytest.fixture(scope="module")
def sound(tokens) -> Callable[[str], list[Trained]]:
    """What the ranks of a topology compute without a fault."""
    return cache(lambda line: spread(config_of(line, tokens)))


@pytest.mark.parametrize("seeded", FAULTS, ids=lambda f: f.seed.__name__)
def test_a_fault_is_caught(seeded, tokens, whole, sound):
    made, one = config_of(seeded.line, tokens), whole(seeded.line.split()[0])
    control = sound(seeded.line)
    with pytest.MonkeyPatch.context() as patch:
        seeded.seed(patch)
        faulty = spread(made)
    assert difference(made, one, control).worst <= BOUND
    found = difference(made, one, faulty)
    assert not found.worst <= BOUND
    losses = [[rank.steps[0].loss for rank in ranks] for ranks in (control, faulty)]
    assert (losses[0] == losses[1]) == seeded.silent
    assert seeded.silent or not found.loss <= BOUND


def test_more_than_a_loss_is_needed():
    assert len(FAULTS) >= 12
    assert sum(seeded.silent for seeded in FAULTS) >= 2
