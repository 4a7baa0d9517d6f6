"""Attention over a sequence that ranks share, against one process, in float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import launch
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_ckpt.errors import LayoutError, UsageError
from d9d_train.batch import Batch
from d9d_train.data.order import split, token_index
from d9d_train.layers import sdpa
from d9d_train.layers.attention import Attention
from d9d_train.layers.rope import Rope
from d9d_train.mesh import Axis
from d9d_train.parallel import context
from d9d_train.parallel.context import all_gather, partial, ring

CLOSE = 1e-14

DOCUMENTS = ([0, 5, 6, 19, 40], [0, 33])
"""Where the documents of two sequences start; one is a single token, some cross every cut."""


@dataclass(frozen=True)
class Case:
    kind: str
    heads: tuple[int, int]
    packed: bool
    length: int = 48
    head_dim: int = 8

    def batch(self) -> Batch:
        """Two whole sequences."""
        starts = torch.zeros(2, self.length, dtype=torch.int64)
        if self.packed:
            for row, firsts in zip(starts, DOCUMENTS, strict=True):
                for first in firsts:
                    row[first:] = first
        return Batch(
            tokens=torch.zeros_like(starts),
            labels=None,
            index=torch.arange(self.length),
            starts=starts,
            samples=torch.arange(2),
            packed=self.packed,
        )

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v and the gradient of the output."""
        torch.manual_seed(0)
        queries, keys = self.heads
        heads = (queries, keys, keys, queries)
        return [torch.randn(2, self.length, h, self.head_dim, dtype=torch.float64) for h in heads]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The definition, with a score for every pair of tokens."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    token = batch.index
    seen = (batch.starts[:, :, None] <= token) & (token <= token[:, None])
    return torch.einsum(
        "bhij,bjhd->bihd", scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1), v
    )


def outcome(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], batch: Batch
) -> list[torch.Tensor]:
    """The output and the gradients of q, k and v."""
    *qkv, grad = inputs
    qkv = [x.clone().requires_grad_() for x in qkv]
    out = attend(*qkv, batch)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in qkv)]


def axis_of(rank: int) -> Axis:
    return Axis(dist.get_world_size(), rank, dist.group.WORLD)


def shared(case: Case, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(What this rank computes of a case, the same part of the definition's)."""
    axis = axis_of(rank)
    attend = context.KINDS[case.kind](axis)
    whole, tensors = case.batch(), case.tensors()
    index = token_index(case.length, axis.size, rank, attend.order)
    mine = outcome(attend, [x[:, index] for x in tensors], split(whole, index))
    return mine, [x[:, index] for x in outcome(dense, tensors, whole)]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.ranks
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("kind", context.KINDS)
def test_ranks_compute_what_one_process_does(kind: str, cp: int) -> None:
    cases = [
        Case(kind, heads, packed)
        for heads in [(4, 4), (8, 2), (4, 1), (12, 6)]
        for packed in (False, True)
    ]

    def work(rank: int) -> list[list[float]]:
        return [[error(*pair) for pair in zip(*shared(case, rank), strict=True)] for case in cases]

    for errors in launch(cp, work):
        for case, per_tensor in zip(cases, errors, strict=True):
            assert max(per_tensor) < CLOSE, (case, per_tensor)


@pytest.mark.ranks
@pytest.mark.parametrize("packed", [False, True])
def test_ulysses_repeats_one_device_bit_for_bit(packed: bool) -> None:
    case = Case("ulysses", (8, 4), packed)

    def work(rank: int) -> list[bool]:
        axis = axis_of(rank)
        index = token_index(case.length, axis.size, rank, "contiguous")
        mine, _ = shared(case, rank)
        one = outcome(sdpa.attend, case.tensors(), case.batch())
        return [torch.equal(got, x[:, index]) for got, x in zip(mine, one, strict=True)]

    assert launch(4, work) == [[True] * 4] * 4


@pytest.mark.ranks
def test_spans_that_cannot_be_seen_are_skipped_and_the_rest_is_balanced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a rank's two chunks and another's two, two pairs are seen, and three of its own."""
    seen = counted(monkeypatch, "attend")

    def work(rank: int) -> tuple[int, int]:
        shared(Case("ring", (4, 2), packed=False), rank)
        causal = len(seen)
        attend = context.Ring(axis_of(rank))
        case = Case("ring", (4, 2), packed=True)
        whole = case.batch()
        # A document for every chunk of 6.
        whole.starts.copy_(torch.arange(case.length) // 6 * 6)
        index = token_index(case.length, 4, rank, "head_tail")
        outcome(attend, [x[:, index] for x in case.tensors()], split(whole, index))
        return causal, len(seen) - causal

    assert launch(4, work) == [(2 * 4 + 1, 2)] * 4


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Grows by ``name`` with every call of that function of `partial`."""
    calls: list[str] = []
    inner = getattr(partial, name)

    def called(*args: Any) -> Any:
        calls.append(name)
        return inner(*args)

    monkeypatch.setattr(partial, name, called)
    return calls


@pytest.mark.ranks
def test_the_next_keys_are_under_way_while_these_are_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = counted(monkeypatch, "attend")
    inner = ring.shift

    def shift(*args: Any) -> Any:
        events.append("shift")
        return inner(*args)

    monkeypatch.setattr(ring, "shift", shift)

    def work(rank: int) -> list[str]:
        case = Case("ring", (4, 4), packed=False)
        index = token_index(case.length, 2, rank, "head_tail")
        q, k, v, _ = (x[:, index] for x in case.tensors())
        context.Ring(axis_of(rank))(q, k, v, split(case.batch(), index))
        return events

    assert launch(2, work) == [["shift", *["attend"] * 5]] * 2


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.ranks
@pytest.mark.parametrize("packed", [False, True])
def test_a_ring_stores_scores_of_one_pair_of_spans(
    monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(ring, "LONGEST", 16)
    case = Case("ring", (2, 2), packed, length=512)

    def work(rank: int) -> int:
        index = token_index(case.length, 2, rank, "head_tail")
        inputs, batch = [x[:, index] for x in case.tensors()], split(case.batch(), index)
        with Largest() as largest:
            outcome(context.Ring(axis_of(rank)), inputs, batch)
        return largest.elements

    held = 2 * 2 * 256 * 2 * 8
    """k and v of a rank: B 2, S 256, 2 heads of 8; the scores of its tokens alone would be 16 times that."""
    assert launch(2, work) == [held] * 2


def attention(heads: int = 4, kv_heads: int = 2) -> Attention:
    layer = Attention(12, heads, kv_heads, 8, norm_eps=1e-6).double()
    torch.manual_seed(0)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    return layer


def gradients(layer: Attention, x: torch.Tensor, slope: torch.Tensor, batch: Batch) -> Any:
    """(output, gradient of x, gradients of the weights) with positions that restart per document."""
    x = x.clone().requires_grad_()
    out = layer(x, Rope(dim=8, theta=100.0).angles(batch, x.dtype), batch)
    out.backward(slope)
    return out.detach(), x.grad, [weight.grad for weight in layer.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", context.KINDS)
def test_a_layer_over_ranks_is_the_layer_of_one_process(kind: str) -> None:
    """Gradients of weights are sums over the ranks."""
    case = Case(kind, (4, 2), packed=True)

    def work(rank: int) -> list[float]:
        axis, one, layer = axis_of(rank), attention(), attention()
        context.parallelize(layer, axis, kind)
        torch.manual_seed(1)
        x, slope = torch.randn(2, 2, case.length, 12, dtype=torch.float64)
        index = token_index(case.length, axis.size, rank, context.KINDS[kind].order)
        out, dx, expected = gradients(one, x, slope, case.batch())
        mine = gradients(layer, x[:, index], slope[:, index], split(case.batch(), index))
        for grad in mine[2]:
            dist.all_reduce(grad)
        weights = zip(mine[2], expected, strict=True)
        pairs = [(mine[0], out[:, index]), (mine[1], dx[:, index]), *weights]
        return [error(*pair) for pair in pairs]

    for errors in launch(4, work):
        assert len(errors) == 6
        assert max(errors) < 5 * CLOSE, errors


def test_what_cannot_be_shared_is_refused_with_the_numbers() -> None:
    axis = Axis(4, 0, None)  # type: ignore[arg-type]
    model = torch.nn.ModuleDict({"self_attn": attention(heads=6, kv_heads=2)})
    with pytest.raises(LayoutError, match=r"self_attn: ulysses cuts the 6 query heads.*cp=4"):
        context.parallelize(model, axis, "ulysses")
    with pytest.raises(UsageError, match="'star' is none of ulysses, all_gather, ring"):
        context.parallelize(model, axis, "star")


def test_one_rank_attends_as_before() -> None:
    layer = attention()
    context.parallelize(layer, Axis(1, 0, None), "ring")  # type: ignore[arg-type]
    assert layer.attend is sdpa.attend


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """A flavour on one rank, which takes the ways that several do but sends nothing."""
    monkeypatch.setattr(all_gather, "gather", lambda x, dim, axis: x)
    return context.KINDS[kind](Axis(1, 0, None))  # type: ignore[arg-type]


def on_gpu(case: Case) -> tuple[list[torch.Tensor], Batch]:
    """Tensors and batch of a case in bfloat16 on the GPU."""
    batch = case.batch()
    inputs = [x.to("cuda", torch.bfloat16) for x in case.tensors()]
    return inputs, replace(batch, index=batch.index.cuda(), starts=batch.starts.cuda())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["all_gather", "ring"])
def test_the_kernels_of_a_gpu_compute_the_same(
    kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, batch = on_gpu(Case(kind, (8, 2), packed, length=640, head_dim=64))
    got = outcome(alone(kind, monkeypatch), inputs, batch)
    expected = outcome(dense, [x.double() for x in inputs], batch)
    errors = [error(*pair) for pair in zip(got, expected, strict=True)]
    assert max(errors) < 1e-2, errors


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["all_gather", "ring"])
def test_a_gpu_stores_nothing_of_tokens_by_tokens(
    kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(kind, (8, 2), packed, length=32768, head_dim=64)
    inputs, batch = on_gpu(case)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outcome(alone(kind, monkeypatch), inputs, batch)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 2 * case.length**2, f"{used:,} bytes"
