"""RMSNorm."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from d9d_kernels import gradmask, launch, reference
from d9d_kernels.lang import apply, ceil_div, constexpr, jit, processors, runs_triton, tensor, tl

# A program holds a row in registers; longer rows take the reference.
MAX_DIM = 1 << 15
# Up to here the host's time decides, and torch's own operator, all of it C++, spends the least.
SMALL = 1 << 16


@jit
def _forward(
    x: tensor,
    weight: tensor,
    y: tensor,
    rstd: tensor,
    rows: tensor,
    stride: tensor,
    eps: tensor,
    DIM: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
    ZERO_CENTRED: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < DIM)[None, :]
    h = tl.load(x + row[:, None] * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + col, mask=col < DIM, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        scale += 1.0
    r = tl.rsqrt(tl.sum(h * h, 1) / DIM + eps)
    out = h * r[:, None] * scale[None, :]
    tl.store(y + row[:, None] * DIM + col[None, :], out.to(y.dtype.element_ty), mask=mask)
    tl.store(rstd + row, r, mask=row < rows)


@jit
def _backward(
    x: tensor,
    weight: tensor,
    rstd: tensor,
    dy: tensor,
    dx: tensor,
    dw: tensor,
    rows: tensor,
    stride: tensor,
    DIM: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
    STAGES: constexpr,
    ZERO_CENTRED: constexpr,
    NEED_WEIGHT: constexpr,
) -> None:
    program, programs = tl.program_id(0), tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    scale = tl.load(weight + col, mask=col < DIM, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        scale += 1.0
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (col < DIM)[None, :]
        h = tl.load(x + row[:, None] * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        at = row[:, None] * DIM + col[None, :]
        g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        h = h * r
        if NEED_WEIGHT:
            acc += g * h
        g = g * scale[None, :]
        out = r * (g - h * (tl.sum(g * h, 1) / DIM)[:, None])
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
    if NEED_WEIGHT:
        total = tl.sum(acc, 0).to(dw.dtype.element_ty)
        tl.store(dw + program.to(tl.int64) * DIM + col, total, mask=col < DIM)


@jit
def _sum_rows(
    parts: tensor, out: tensor, rows: tensor, DIM: constexpr, ROWS: constexpr, BLOCK: constexpr
) -> None:
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, rows, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (col < DIM)[None, :]
        acc += tl.load(parts + row[:, None] * DIM + col[None, :], mask=mask, other=0.0)
    tl.store(out + col, tl.sum(acc, 0).to(out.dtype.element_ty), mask=col < DIM)


def sum_rows(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of fp32 `parts` [rows, dim] over the rows, in an order that the shape alone fixes."""
    rows, dim = parts.shape
    out = torch.empty(dim, dtype=dtype, device=parts.device)
    _sum_rows[(ceil_div(dim, 16),)](parts, out, rows, DIM=dim, ROWS=256, BLOCK=16, num_warps=8)
    return out


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
        dim = x.shape[-1]
        flat = _rows(x, dim)
        rows = flat.shape[0]
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        tile = launch.norm_forward(dim)
        if rows:
            _forward[(ceil_div(rows, tile.rows),)](
                flat,
                weight,
                y,
                rstd,
                rows,
                flat.stride(0),
                eps,
                DIM=dim,
                ROWS=tile.rows,
                BLOCK=tile.block,
                ZERO_CENTRED=zero_centred,
                num_warps=tile.warps,
            )
        ctx.save_for_backward(flat, weight, rstd)
        ctx.zero_centred, ctx.weight_grad = zero_centred, None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_weight, *_ = gradmask.needs(ctx)
        if ctx.weight_grad is not None and not need_x:
            return None, ctx.weight_grad, None, None
        flat, weight, rstd = ctx.saved_tensors
        dy = grads[0].contiguous()
        rows, dim = flat.shape
        dx = torch.empty_like(dy)
        tile = launch.norm_backward(dim)
        programs = min(ceil_div(rows, tile.rows), tile.waves * processors(dy.device))
        if programs == 0:
            return dx, torch.zeros_like(weight), None, None
        # One program writes the gradient itself; several write fp32 parts, summed in order.
        dtype = weight.dtype if programs == 1 else torch.float32
        parts = torch.empty((programs, dim), dtype=dtype, device=dy.device)
        _backward[(programs,)](
            flat,
            weight,
            rstd,
            dy,
            dx,
            parts,
            rows,
            flat.stride(0),
            DIM=dim,
            ROWS=tile.rows,
            BLOCK=tile.block,
            STAGES=tile.stages,
            ZERO_CENTRED=ctx.zero_centred,
            NEED_WEIGHT=ctx.needs_input_grad[1],
            num_warps=tile.warps,
        )
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None
        weight_grad = parts[0] if programs == 1 else sum_rows(parts, weight.dtype)
        if need_weight:
            return dx, weight_grad, None, None
        # Of a backward pass in parts: one kernel gives both, the second part takes what is there.
        ctx.weight_grad = weight_grad
        return dx, None, None, None


def _rows(x: Tensor, dim: int) -> Tensor:
    """`x` as a matrix whose rows are dense, copied only where its strides cannot say that."""
    flat = x if x.ndim == 2 else x.reshape(-1, dim)
    return flat if flat.stride(1) == 1 or dim == 1 else flat.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, zero_centred: bool = False) -> Tensor:
    """Scale every row by the inverse root of its mean square.

    Sums and products run in float32 and are rounded once, to `x.dtype`. The gradient of `weight`
    is summed in float32 in a fixed order.

    Args:
        x: [..., dim].
        weight: dense [dim].
        eps: added to the mean square.
        zero_centred: multiply by `1 + weight`, added in float32, in place of `weight`.

    Returns:
        [..., dim] in `x.dtype`.
    """
    if not runs_triton(x) or x.shape[-1] > MAX_DIM:
        return reference.rms_norm(x, weight, eps, zero_centred=zero_centred)
    if x.numel() <= SMALL and x.dtype == weight.dtype and not zero_centred:
        return torch.rms_norm(x, weight.shape, weight, eps)
    out: Tensor = apply(_RMSNorm, x, weight, eps, zero_centred)
    return out
