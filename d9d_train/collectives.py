"""Collectives that autograd goes through; each states its own backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from d9d_train.mesh import Axis

# torch 2.13 warns of the names that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of ``x`` over the axis, outside autograd."""
    out = x.detach().clone()
    dist.all_reduce(out, group=axis.group)
    return out


def gather(x: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """All ranks' ``x`` along ``dim``; backward sums the gradients and scatters them."""
    return _Gather.apply(x, dim, axis)  # type: ignore[no-untyped-call, no-any-return]


def reduce_scatter(x: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """This rank's part along ``dim`` of the sum of ``x``; backward gathers."""
    return _ReduceScatter.apply(x, dim, axis)  # type: ignore[no-untyped-call, no-any-return]


def shared_sum(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of ``x`` where every rank goes on to compute the same from it; backward is the identity."""
    return _SharedSum.apply(x, axis)  # type: ignore[no-untyped-call, no-any-return]


def all_to_all(
    x: torch.Tensor, sent: Sequence[int] | None, received: Sequence[int] | None, axis: Axis
) -> torch.Tensor:
    """Rows of ``x``, ``sent[r]`` of them to rank r; backward sends the gradients back.

    Args:
        x: [rows, ...].
        sent: Rows for each rank; None for equal parts.
        received: Rows from each rank; None for equal parts.
        axis: Whose ranks exchange.
    """
    return _AllToAll.apply(x, sent, received, axis)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(frozen=True)
class Shift:
    """A tensor under way to the next rank of a ring.

    Attributes:
        sent: Kept alive until it has left.
        received: What the previous rank sent, once it is here.
        works: The transfers.
    """

    sent: torch.Tensor
    received: torch.Tensor
    works: tuple[dist.Work, ...]

    def wait(self) -> torch.Tensor:
        """What the previous rank sent."""
        for work in self.works:
            work.wait()
        return self.received


def shift(x: torch.Tensor, axis: Axis) -> Shift:
    """Start sending ``x`` to the next rank, the last one's to the first, outside autograd."""
    if axis.size == 1:
        return Shift(x, x, ())
    x = x.contiguous()
    received = torch.empty_like(x)
    following, previous = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=axis.group, group_peer=following),
            dist.P2POp(dist.irecv, received, group=axis.group, group_peer=previous),
        ]
    )
    return Shift(x, received, tuple(works))


def _gathered(x: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    first = x.movedim(dim, 0).contiguous()
    out = first.new_empty((axis.size * first.shape[0], *first.shape[1:]))
    _all_gather(out, first, group=axis.group)
    return out.movedim(0, dim)


def _scattered(x: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    first = x.movedim(dim, 0).contiguous()
    out = first.new_empty((first.shape[0] // axis.size, *first.shape[1:]))
    _reduce_scatter(out, first, group=axis.group)
    return out.movedim(0, dim)


def _exchanged(
    x: torch.Tensor, sent: Sequence[int] | None, received: Sequence[int] | None, axis: Axis
) -> torch.Tensor:
    rows = x.shape[0] if received is None else sum(received)
    out = x.new_empty((rows, *x.shape[1:]))
    into, out_of = (None if n is None else list(n) for n in (received, sent))
    dist.all_to_all_single(out, x.contiguous(), into, out_of, group=axis.group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
        ctx.call = dim, axis
        return _gathered(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _scattered(grad, *ctx.call), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
        ctx.call = dim, axis
        return _scattered(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _gathered(grad, *ctx.call), None, None


class _SharedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        sent: Sequence[int] | None,
        received: Sequence[int] | None,
        axis: Axis,
    ) -> torch.Tensor:
        ctx.call = received, sent, axis
        return _exchanged(x, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _exchanged(grad, *ctx.call), None, None, None
