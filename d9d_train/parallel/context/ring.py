"""Ring: keys and values travel from rank to rank while each attends to what it holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from d9d_train.batch import Batch
from d9d_train.collectives import shift
from d9d_train.data.order import Order
from d9d_train.mesh import Axis
from d9d_train.parallel.context import partial
from d9d_train.parallel.context.partial import Seen
from d9d_train.parallel.context.spans import Span, spans, visible

LONGEST = 1024
"""Tokens of a span where scores are stored: 1024 x 1024 of 32 heads are 128 MiB in float32."""


@dataclass(frozen=True)
class Ring:
    """Attention of a rank's tokens to the keys and values that come by; none are gathered.

    Spans of keys that no token of a span sees are skipped. With packed documents, which these are is
    read from the device once a call, and scores are stored a pair of spans at a time.

    Attributes:
        axis: cp; twice its size divides a sequence.
    """

    order: ClassVar[Order] = "head_tail"

    axis: Axis

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """[B, S, Hq, D] from q [B, S, Hq, D], k and v [B, S, Hkv, D]; S are this rank's tokens."""
        starts = batch.starts if batch.packed else None
        longest = None if starts is None and partial.fused(q) else LONGEST
        pairs = _Pairs(self.axis, q.shape[1], longest, starts)
        return _Attention.apply(q, k, v, pairs)  # type: ignore[no-untyped-call, no-any-return]


class _Pairs:
    """Which spans of a rank's queries see which spans of another's keys.

    Args:
        axis: cp.
        length: Tokens of a rank.
        longest: Tokens of a span.
        starts: [B, T], where each token's document starts; None if that is 0 for all.
    """

    def __init__(
        self, axis: Axis, length: int, longest: int | None, starts: torch.Tensor | None
    ) -> None:
        self.axis = axis
        self.starts = starts
        self._by_rank = [spans(length, axis.size, rank, longest) for rank in range(axis.size)]
        self._reach = self._lowest_seen()

    def of(self, source: int) -> Iterator[tuple[Span, Span, Seen]]:
        """(this rank's queries, keys of rank ``source``, which of them are seen)."""
        for mine in self._by_rank[self.axis.rank]:
            for theirs in self._by_rank[source]:
                if self._reach[mine.first] < theirs.end and theirs.first <= mine.first:
                    yield mine, theirs, self._seen(mine, theirs)

    def _lowest_seen(self) -> dict[int, int]:
        """By first token of a span of queries, the lowest index that any of its tokens sees."""
        firsts = [span.first for span in self._by_rank[self.axis.rank]]
        if self.starts is None:
            return dict.fromkeys(firsts, 0)
        # Documents start in order, so the first token of a span sees the furthest.
        return dict(zip(firsts, self.starts[:, firsts].amin(0).tolist(), strict=True))

    def _seen(self, mine: Span, theirs: Span) -> Seen:
        causal = mine.first == theirs.first
        if self.starts is None:
            return Seen(causal)
        rows, keys = (x.indices(self.starts.device) for x in (mine, theirs))
        return Seen(causal, visible(rows, keys, self.starts[:, rows]))


class _Attention(torch.autograd.Function):
    """Keys and values travel again in backward, and what is summed of their gradients one step behind."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: _Pairs
    ) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=wide)
        lse = q.new_full((len(q), q.shape[2], q.shape[1]), -torch.inf, dtype=wide)
        for source, keys, values in _passing(k, v, pairs.axis):
            for mine, theirs, seen in pairs.of(source):
                qkv = q[:, mine.rows], keys[:, theirs.rows], values[:, theirs.rows]
                part = partial.attend(qkv, seen)
                partial.merge(out[:, mine.rows], lse[:, :, mine.rows], *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pairs = pairs
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        dq = torch.zeros_like(q, dtype=lse.dtype)
        summed = None
        for source, keys, values in _passing(k, v, ctx.pairs.axis):
            dkv = lse.new_zeros((2, *keys.shape))
            for mine, theirs, seen in ctx.pairs.of(source):
                qkv = q[:, mine.rows], keys[:, theirs.rows], values[:, theirs.rows]
                merged = out[:, mine.rows], lse[:, :, mine.rows]
                parts = partial.backward(grad[:, mine.rows], qkv, *merged, seen)
                totals = dq[:, mine.rows], *dkv[:, :, theirs.rows]
                for total, part in zip(totals, parts, strict=True):
                    total += part
            if summed is not None:
                dkv += summed.wait()
            summed = shift(dkv, ctx.pairs.axis)
        assert summed is not None  # noqa: S101 - an axis has a rank
        return dq.to(q.dtype), *summed.wait().to(k.dtype), None


def _passing(
    k: torch.Tensor, v: torch.Tensor, axis: Axis
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(rank, its keys, its values) as they come by; the next are under way while these are in use."""
    kv = torch.stack([k, v])
    for step in range(axis.size):
        coming = shift(kv, axis) if step < axis.size - 1 else None
        yield (axis.rank - step) % axis.size, kv[0], kv[1]
        if coming is not None:
            kv = coming.wait()
