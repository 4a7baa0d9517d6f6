"""Matrix products of consecutive groups of rows, each with a weight of its own.

The products are torch's. Around them this closes what they leave open: gradients that arrive
expanded or transposed are made dense; rows past the last offset, which torch leaves uninitialised,
are zero, so that a later `0 * NaN` cannot happen; offsets stay on the device.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from d9d_kernels import gradmask, reference
from d9d_kernels.lang import apply, ceil_div, constexpr, jit, runs_triton, tensor, tl

# Rows of every operand start on 16 bytes, or the product is refused.
ALIGNMENT = 16


@jit
def _zero_tail(
    x: tensor,
    offsets: tensor,
    rows: tensor,
    groups: tensor,
    DIM: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
) -> None:
    """Zero the rows past the last offset; other programs end without touching memory."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    used = tl.load(offsets + groups - 1)
    zero = tl.zeros([BLOCK], x.dtype.element_ty)
    if first + ROWS > used:
        for row in range(tl.maximum(first, used), tl.minimum(first + ROWS, rows)):
            for start in tl.static_range(0, DIM, BLOCK):
                col = start + tl.arange(0, BLOCK)
                tl.store(x + row * DIM + col, zero, mask=col < DIM)


def _product(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """`x` [rows, in] times `weights` [groups, in, out], zero past the last offset."""
    out: Tensor = functional.grouped_mm(x, weights, offs=offsets)
    rows, dim = out.shape
    if out.numel():
        _zero_tail[(ceil_div(rows, 64),)](
            out, offsets, rows, offsets.numel(), DIM=dim, ROWS=64, BLOCK=2048, num_warps=8
        )
    return out


class _GroupedMM(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, offsets)
        return _product(x, weights.transpose(1, 2), offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, offsets = ctx.saved_tensors
        dy = grads[0].contiguous()
        need_x, need_weights, _ = gradmask.needs(ctx)
        dx = _product(dy, weights, offsets) if need_x else None
        dw = functional.grouped_mm(dy.t(), x, offs=offsets) if need_weights else None
        return dx, dw, None


def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """`x[start:end] @ weights[group].T` for every group of rows.

    Widths whose rows are not whole multiples of 16 bytes take the reference, which waits for the
    device to learn the offsets.

    Args:
        x: [rows, in].
        weights: [groups, out, in].
        offsets: int32 [groups], where each group's rows end, not decreasing, on `x`'s device.

    Returns:
        [rows, out]; rows past the last offset are zero, and so is their gradient.
    """
    itemsize = x.element_size()
    aligned = all(dim * itemsize % ALIGNMENT == 0 for dim in weights.shape[1:])
    if runs_triton(x) and aligned and x.shape[0]:
        out: Tensor = apply(_GroupedMM, x.contiguous(), weights.contiguous(), offsets)
        return out
    return reference.grouped_mm(x, weights, offsets)
