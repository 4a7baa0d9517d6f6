"""Rotary position embedding."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from d9d_kernels import launch, reference
from d9d_kernels.lang import apply, ceil_div, constexpr, jit, power_of_2, runs_triton, tensor, tl


class Heads(NamedTuple):
    """A [batch, seq, *heads, dim] tensor as [batch, seq, outer, inner, dim] with a dense last dim.

    A fused projection leaves its query heads in two dims, group and head of the group, that no
    single stride covers.
    """

    tensor: Tensor
    batch: int
    seq: int
    outer: int
    inner: int

    @property
    def heads(self) -> int:
        return self.outer * self.inner

    @property
    def rows(self) -> int:
        return self.batch * self.seq * self.heads

    @property
    def strides(self) -> tuple[int, int, int, int]:
        t = self.tensor
        return t.stride(0), t.stride(1), t.stride(2), t.stride(3)


def heads_of(x: Tensor) -> Heads:
    """The strides of `x`'s heads; a copy where more than two are needed."""
    if x.ndim == 3:
        x = x[:, :, None, None]
    elif x.ndim == 4:
        x = x[:, :, None]
    if x.ndim > 5 or x.stride(-1) != 1:
        x = x.flatten(2, -2).contiguous()[:, :, None]
    batch, seq, outer, inner, _ = x.shape
    return Heads(x, batch, seq, outer, inner)


@jit
def load_rows(
    x: tensor, at: tensor, keep: tensor, start: constexpr, N: constexpr, WIDTH: constexpr
) -> tensor:
    """Channels `start .. start + N` of each head [ROWS, WIDTH], in fp32."""
    col = tl.arange(0, WIDTH)
    mask = keep[:, None] & (col < N)[None, :]
    return tl.load(x + at[:, None] + (start + col)[None, :], mask=mask, other=0.0).to(tl.float32)


@jit
def store_rows(
    x: tensor,
    value: tensor,
    at: tensor,
    keep: tensor,
    start: constexpr,
    N: constexpr,
    WIDTH: constexpr,
) -> None:
    col = tl.arange(0, WIDTH)
    mask = keep[:, None] & (col < N)[None, :]
    tl.store(x + at[:, None] + (start + col)[None, :], value.to(x.dtype.element_ty), mask=mask)


@jit
def load_turned(
    x: tensor, at: tensor, keep: tensor, HALF: constexpr, WIDTH: constexpr, PAIRS: constexpr
) -> tensor:
    """The two channels of each rotated pair, [ROWS, WIDTH] each."""
    if PAIRS:
        both = load_rows(x, at, keep, 0, 2 * HALF, 2 * WIDTH)
        a, b = tl.split(tl.reshape(both, (both.shape[0], WIDTH, 2)))
    else:
        a = load_rows(x, at, keep, 0, HALF, WIDTH)
        b = load_rows(x, at, keep, HALF, HALF, WIDTH)
    return a, b


@jit
def store_turned(
    x: tensor,
    a: tensor,
    b: tensor,
    at: tensor,
    keep: tensor,
    HALF: constexpr,
    WIDTH: constexpr,
    PAIRS: constexpr,
) -> None:
    if PAIRS:
        store_rows(x, tl.interleave(a, b), at, keep, 0, 2 * HALF, 2 * WIDTH)
    else:
        store_rows(x, a, at, keep, 0, HALF, WIDTH)
        store_rows(x, b, at, keep, HALF, HALF, WIDTH)


@jit
def locate(
    row: tensor,
    seq: tensor,
    batch_stride: tensor,
    seq_stride: tensor,
    outer_stride: tensor,
    inner_stride: tensor,
    angle_stride: tensor,
    HEADS: constexpr,
    INNER: constexpr,
    HALF: constexpr,
) -> tensor:
    """Where each row, a head of a token, starts in its tensor, and its angles in theirs."""
    program, head = row // HEADS, row % HEADS
    batch, token = program // seq, program % seq
    at = batch * batch_stride + token * seq_stride
    at += (head // INNER) * outer_stride + (head % INNER) * inner_stride
    return at, batch * angle_stride + token * HALF


@jit
def load_angles(
    cos: tensor, sin: tensor, at: tensor, keep: tensor, HALF: constexpr, WIDTH: constexpr
) -> tensor:
    """Cosines and sines of each row [ROWS, WIDTH], in fp32; heads of a token find them cached."""
    return load_rows(cos, at, keep, 0, HALF, WIDTH), load_rows(sin, at, keep, 0, HALF, WIDTH)


@jit
def _rotate(
    x: tensor,
    y: tensor,
    cos: tensor,
    sin: tensor,
    rows: tensor,
    seq: tensor,
    batch_stride: tensor,
    seq_stride: tensor,
    outer_stride: tensor,
    inner_stride: tensor,
    angle_stride: tensor,
    sign: tensor,
    HEADS: constexpr,
    INNER: constexpr,
    DIM: constexpr,
    HALF: constexpr,
    WIDTH: constexpr,
    REST: constexpr,
    ROWS: constexpr,
    PAIRS: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    keep = row < rows
    source, angle = locate(
        row, seq, batch_stride, seq_stride, outer_stride, inner_stride, angle_stride,
        HEADS, INNER, HALF,
    )  # fmt: skip
    c, s = load_angles(cos, sin, angle, keep, HALF, WIDTH)
    s *= sign
    a, b = load_turned(x, source, keep, HALF, WIDTH, PAIRS)
    store_turned(y, a * c - b * s, b * c + a * s, row * DIM, keep, HALF, WIDTH, PAIRS)
    if REST > 0:
        rest = load_rows(x, source, keep, 2 * HALF, DIM - 2 * HALF, REST)
        store_rows(y, rest, row * DIM, keep, 2 * HALF, DIM - 2 * HALF, REST)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool) -> Tensor:
    """A dense copy of `x` whose pairs are turned by `sign` times the angles."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = heads_of(x)
    dim, half = x.shape[-1], cos.shape[-1]
    tile = launch.rope(dim)
    if y.numel():
        _rotate[(ceil_div(h.rows, tile.rows),)](
            h.tensor,
            y,
            cos,
            sin,
            h.rows,
            h.seq,
            *h.strides,
            cos.stride(0) if cos.ndim == 3 else 0,
            sign,
            HEADS=h.heads,
            INNER=h.inner,
            DIM=dim,
            HALF=half,
            WIDTH=power_of_2(half),
            REST=power_of_2(dim - 2 * half) if dim > 2 * half else 0,
            ROWS=tile.rows,
            PAIRS=interleaved,
            num_warps=tile.warps,
        )
    return y


class _RoPE(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _launch(x, cos, sin, 1.0, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _launch(grads[0], cos, sin, -1.0, ctx.interleaved), None, None, None


def check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Refuse angles that do not belong to the tokens of `x`.

    Raises:
        ValueError: as `rope` says.
    """
    seq = tuple(x.shape[:2])
    if x.ndim < 3 or cos.shape != sin.shape or tuple(cos.shape[:-1]) not in (seq, seq[1:]):
        raise ValueError(
            f"cos and sin: expected [seq, r] or [batch, seq, r] for x {tuple(x.shape)}, "
            f"found {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"cos: {cos.shape[-1]} pairs do not fit in a head of {x.shape[-1]}")


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate channel pairs of each head by its token's angles.

    Args:
        x: [batch, seq, *heads, dim]; any number of head dims, and only the last need be dense.
        cos: [seq, r] or [batch, seq, r], cosines of the tokens' positions, each pair once;
            channels from `2 * r` on pass unchanged. Not differentiable.
        sin: as `cos`.
        interleaved: pair channels (2i, 2i + 1); otherwise (i, i + r).

    Returns:
        A new dense tensor like `x`.

    Raises:
        ValueError: `cos` and `sin` are not one row per token, or do not fit in a head.
    """
    check_angles(x, cos, sin)
    if runs_triton(x):
        out: Tensor = apply(_RoPE, x, cos.contiguous(), sin.contiguous(), interleaved)
        return out
    return reference.rope(x, cos, sin, interleaved=interleaved)
