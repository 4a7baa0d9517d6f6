"""SwiGLU on a fused projection."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from d9d_kernels import launch, reference
from d9d_kernels.lang import apply, ceil_div, constexpr, jit, runs_triton, tensor, tl


@jit
def _load_pair(
    x: tensor,
    row: tensor,
    start: tensor,
    keep: tensor,
    F: constexpr,
    BLOCK: constexpr,
    PAIRS: constexpr,
) -> tensor:
    """Gates and ups [ROWS, BLOCK] of channels `start ..`, in fp32.

    A pair of 16-bit numbers is one 32-bit load, so that a thread has the channels that it has of
    the other operand, and nothing goes through shared memory.
    """
    dtype = x.dtype.element_ty
    col = start + tl.arange(0, BLOCK)
    mask = keep[:, None] & (col < F)[None, :]
    if PAIRS and dtype.primitive_bitwidth == 16:
        words = x.to(tl.pointer_type(tl.uint32))
        both = tl.load(words + row[:, None] * F + col[None, :], mask=mask, other=0)
        gate = (both & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        up = (both >> 16).to(tl.uint16).to(dtype, bitcast=True)
    elif PAIRS:
        wide = start * 2 + tl.arange(0, 2 * BLOCK)
        inside = keep[:, None] & (wide < 2 * F)[None, :]
        both = tl.load(x + row[:, None] * (2 * F) + wide[None, :], mask=inside, other=0.0)
        gate, up = tl.split(tl.reshape(both, (both.shape[0], BLOCK, 2)))
    else:
        at = x + row[:, None] * (2 * F) + col[None, :]
        gate = tl.load(at, mask=mask, other=0.0)
        up = tl.load(at + F, mask=mask, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@jit
def _store_pair(
    x: tensor,
    gate: tensor,
    up: tensor,
    row: tensor,
    start: tensor,
    keep: tensor,
    F: constexpr,
    BLOCK: constexpr,
    PAIRS: constexpr,
) -> None:
    dtype = x.dtype.element_ty
    col = start + tl.arange(0, BLOCK)
    mask = keep[:, None] & (col < F)[None, :]
    if PAIRS and dtype.primitive_bitwidth == 16:
        low = gate.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = up.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        words = x.to(tl.pointer_type(tl.uint32))
        tl.store(words + row[:, None] * F + col[None, :], low | (high << 16), mask=mask)
    elif PAIRS:
        wide = start * 2 + tl.arange(0, 2 * BLOCK)
        inside = keep[:, None] & (wide < 2 * F)[None, :]
        both = tl.interleave(gate, up).to(dtype)
        tl.store(x + row[:, None] * (2 * F) + wide[None, :], both, mask=inside)
    else:
        at = x + row[:, None] * (2 * F) + col[None, :]
        tl.store(at, gate.to(dtype), mask=mask)
        tl.store(at + F, up.to(dtype), mask=mask)


@jit
def _forward(
    gate_up: tensor,
    probs: tensor,
    out: tensor,
    rows: tensor,
    F: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
    PAIRS: constexpr,
    PROBS: constexpr,
) -> None:
    # Neighbouring programs have neighbouring channels: rows first costs 4% of the bandwidth.
    blocks: constexpr = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) % blocks * BLOCK
    keep = row < rows
    gate, up = _load_pair(gate_up, row, start, keep, F, BLOCK, PAIRS)
    h = gate / (1.0 + tl.exp(-gate)) * up
    if PROBS:
        h *= tl.load(probs + row, mask=keep, other=0.0).to(tl.float32)[:, None]
    col = start + tl.arange(0, BLOCK)
    mask = keep[:, None] & (col < F)[None, :]
    tl.store(out + row[:, None] * F + col[None, :], h.to(out.dtype.element_ty), mask=mask)


@jit
def _backward(
    gate_up: tensor,
    probs: tensor,
    dout: tensor,
    dgate_up: tensor,
    dprobs: tensor,
    rows: tensor,
    F: constexpr,
    SPAN: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
    PAIRS: constexpr,
    PROBS: constexpr,
) -> None:
    """SPAN channels of ROWS rows: one block, or with probabilities the whole row."""
    blocks: constexpr = tl.cdiv(F, SPAN)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) % blocks * BLOCK
    keep = row < rows
    if PROBS:
        p = tl.load(probs + row, mask=keep, other=0.0).to(tl.float32)[:, None]
        acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(0, SPAN, BLOCK):
        start = first + step
        gate, up = _load_pair(gate_up, row, start, keep, F, BLOCK, PAIRS)
        col = start + tl.arange(0, BLOCK)
        mask = keep[:, None] & (col < F)[None, :]
        g = tl.load(dout + row[:, None] * F + col[None, :], mask=mask, other=0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * s
        if PROBS:
            acc += g * silu * up
            g *= p
        slope = s + silu * (1.0 - s)
        _store_pair(dgate_up, g * up * slope, g * silu, row, start, keep, F, BLOCK, PAIRS)
    if PROBS:
        tl.store(dprobs + row, tl.sum(acc, 1).to(dprobs.dtype.element_ty), mask=keep)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, interleaved: bool, probs: Tensor | None) -> Tensor:
        gate_up = gate_up.contiguous()
        *lead, width = gate_up.shape
        ffn, rows = width // 2, gate_up.numel() // max(width, 1)
        factors = gate_up if probs is None else probs.contiguous()
        out = torch.empty((*lead, ffn), dtype=gate_up.dtype, device=gate_up.device)
        tile = launch.swiglu(ffn)
        if out.numel():
            _forward[(ceil_div(rows, tile.rows) * ceil_div(ffn, tile.block),)](
                gate_up,
                factors,
                out,
                rows,
                F=ffn,
                ROWS=tile.rows,
                BLOCK=tile.block,
                PAIRS=interleaved,
                PROBS=probs is not None,
                num_warps=tile.warps,
            )
        ctx.save_for_backward(gate_up, factors)
        ctx.interleaved, ctx.with_probs = interleaved, probs is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, factors = ctx.saved_tensors
        dout = grads[0].contiguous()
        ffn = dout.shape[-1]
        rows = dout.numel() // max(ffn, 1)
        dgate_up = torch.empty_like(gate_up)
        dprobs = torch.zeros_like(factors) if ctx.with_probs else None
        tile = launch.swiglu(ffn, whole_rows=ctx.with_probs)
        if dout.numel():
            blocks = 1 if ctx.with_probs else ceil_div(ffn, tile.block)
            _backward[(ceil_div(rows, tile.rows) * blocks,)](
                gate_up,
                factors,
                dout,
                dgate_up,
                factors if dprobs is None else dprobs,
                rows,
                F=ffn,
                SPAN=ffn if ctx.with_probs else tile.block,
                ROWS=tile.rows,
                BLOCK=tile.block,
                PAIRS=ctx.interleaved,
                PROBS=ctx.with_probs,
                num_warps=tile.warps,
            )
        return dgate_up, None, dprobs


def swiglu(gate_up: Tensor, interleaved: bool = True, probs: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`, each row optionally times its probability.

    All products run in float32 and are rounded once, to `gate_up.dtype`.

    Args:
        gate_up: [..., 2 * ffn].
        interleaved: channels go gate, up, gate, up; otherwise all gates, then all ups.
        probs: [...], one factor per row, differentiable.

    Returns:
        [..., ffn] in `gate_up.dtype`.

    Raises:
        ValueError: the last dim is odd, or `probs` is not one factor per row.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: expected an even last dim, found {tuple(gate_up.shape)}")
    if probs is not None and probs.shape != gate_up.shape[:-1]:
        expected, found = tuple(gate_up.shape[:-1]), tuple(probs.shape)
        raise ValueError(f"probs: expected one factor per row, {expected}, found {found}")
    if runs_triton(gate_up):
        out: Tensor = apply(_SwiGLU, gate_up, interleaved, probs)
        return out
    return reference.swiglu(gate_up, interleaved, probs)
