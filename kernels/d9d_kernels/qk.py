"""RMSNorm of query and key heads, and their rotary embedding, in one pass."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from d9d_kernels import gradmask, launch, reference
from d9d_kernels.lang import (
    apply,
    ceil_div,
    constexpr,
    jit,
    power_of_2,
    processors,
    runs_triton,
    tensor,
    tl,
)
from d9d_kernels.norm import sum_rows
from d9d_kernels.rotary import (
    Heads,
    check_angles,
    heads_of,
    load_angles,
    load_rows,
    load_turned,
    locate,
    store_rows,
    store_turned,
)


@jit
def _load_weight(
    weight: tensor, HALF: constexpr, WIDTH: constexpr, PAIRS: constexpr, ZERO_CENTRED: constexpr
) -> tensor:
    """The scale of the two channels of each pair, [1, WIDTH] each."""
    col = tl.arange(0, WIDTH)
    if PAIRS:
        first, second = 2 * col, 2 * col + 1
    else:
        first, second = col, HALF + col
    a = tl.load(weight + first, mask=col < HALF, other=0.0).to(tl.float32)
    b = tl.load(weight + second, mask=col < HALF, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        a += 1.0
        b += 1.0
    return a[None, :], b[None, :]


@jit
def _load_rest_weight(
    weight: tensor, START: constexpr, N: constexpr, REST: constexpr, ZERO_CENTRED: constexpr
) -> tensor:
    col = tl.arange(0, REST)
    w = tl.load(weight + START + col, mask=col < N, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        w += 1.0
    return w[None, :]


@jit
def _forward_heads(
    x: tensor,
    weight: tensor,
    y: tensor,
    cos: tensor,
    sin: tensor,
    tile: tensor,
    rows: tensor,
    seq: tensor,
    batch_stride: tensor,
    seq_stride: tensor,
    outer_stride: tensor,
    inner_stride: tensor,
    angle_stride: tensor,
    eps: tensor,
    HEADS: constexpr,
    INNER: constexpr,
    DIM: constexpr,
    HALF: constexpr,
    WIDTH: constexpr,
    REST: constexpr,
    ROWS: constexpr,
    PAIRS: constexpr,
    ZERO_CENTRED: constexpr,
) -> None:
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    keep = row < rows
    source, angle = locate(
        row, seq, batch_stride, seq_stride, outer_stride, inner_stride, angle_stride,
        HEADS, INNER, HALF,
    )  # fmt: skip
    c, s = load_angles(cos, sin, angle, keep, HALF, WIDTH)
    a, b = load_turned(x, source, keep, HALF, WIDTH, PAIRS)
    square = tl.sum(a * a + b * b, 1)
    if REST > 0:
        rest = load_rows(x, source, keep, 2 * HALF, DIM - 2 * HALF, REST)
        square += tl.sum(rest * rest, 1)
    r = tl.rsqrt(square / DIM + eps)[:, None]
    wa, wb = _load_weight(weight, HALF, WIDTH, PAIRS, ZERO_CENTRED)
    a, b = a * r * wa, b * r * wb
    store_turned(y, a * c - b * s, b * c + a * s, row * DIM, keep, HALF, WIDTH, PAIRS)
    if REST > 0:
        w = _load_rest_weight(weight, 2 * HALF, DIM - 2 * HALF, REST, ZERO_CENTRED)
        store_rows(y, rest * r * w, row * DIM, keep, 2 * HALF, DIM - 2 * HALF, REST)


@jit
def _forward(
    q: tensor,
    k: tensor,
    q_weight: tensor,
    k_weight: tensor,
    q_out: tensor,
    k_out: tensor,
    cos: tensor,
    sin: tensor,
    q_rows: tensor,
    k_rows: tensor,
    seq: tensor,
    q_batch: tensor,
    q_seq: tensor,
    q_outer: tensor,
    q_inner: tensor,
    k_batch: tensor,
    k_seq: tensor,
    k_outer: tensor,
    k_inner: tensor,
    angle_stride: tensor,
    eps: tensor,
    Q_HEADS: constexpr,
    K_HEADS: constexpr,
    Q_INNER: constexpr,
    K_INNER: constexpr,
    DIM: constexpr,
    HALF: constexpr,
    WIDTH: constexpr,
    REST: constexpr,
    ROWS: constexpr,
    PAIRS: constexpr,
    ZERO_CENTRED: constexpr,
) -> None:
    """ROWS heads: the first programs have query heads, the others key heads."""
    tile, q_tiles = tl.program_id(0), tl.cdiv(q_rows, ROWS)
    if tile < q_tiles:
        _forward_heads(
            q, q_weight, q_out, cos, sin, tile, q_rows, seq,
            q_batch, q_seq, q_outer, q_inner, angle_stride, eps,
            Q_HEADS, Q_INNER, DIM, HALF, WIDTH, REST, ROWS, PAIRS, ZERO_CENTRED,
        )  # fmt: skip
    else:
        _forward_heads(
            k, k_weight, k_out, cos, sin, tile - q_tiles, k_rows, seq,
            k_batch, k_seq, k_outer, k_inner, angle_stride, eps,
            K_HEADS, K_INNER, DIM, HALF, WIDTH, REST, ROWS, PAIRS, ZERO_CENTRED,
        )  # fmt: skip


@jit
def _backward_heads(
    x: tensor,
    weight: tensor,
    dy: tensor,
    dx: tensor,
    part: tensor,
    cos: tensor,
    sin: tensor,
    rows: tensor,
    seq: tensor,
    batch_stride: tensor,
    seq_stride: tensor,
    outer_stride: tensor,
    inner_stride: tensor,
    angle_stride: tensor,
    eps: tensor,
    HEADS: constexpr,
    INNER: constexpr,
    DIM: constexpr,
    HALF: constexpr,
    WIDTH: constexpr,
    REST: constexpr,
    ROWS: constexpr,
    STAGES: constexpr,
    PAIRS: constexpr,
    ZERO_CENTRED: constexpr,
) -> None:
    """Every `num_programs`-th tile of heads, and their share of the weight's gradient."""
    wa, wb = _load_weight(weight, HALF, WIDTH, PAIRS, ZERO_CENTRED)
    acc_a = tl.zeros([ROWS, WIDTH], tl.float32)
    acc_b = tl.zeros([ROWS, WIDTH], tl.float32)
    if REST > 0:
        wr = _load_rest_weight(weight, 2 * HALF, DIM - 2 * HALF, REST, ZERO_CENTRED)
        acc_r = tl.zeros([ROWS, REST], tl.float32)
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, tl.cdiv(rows, ROWS), step, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        keep = row < rows
        source, angle = locate(
            row, seq, batch_stride, seq_stride, outer_stride, inner_stride, angle_stride,
            HEADS, INNER, HALF,
        )  # fmt: skip
        target = row * DIM
        a, b = load_turned(x, source, keep, HALF, WIDTH, PAIRS)
        ga, gb = load_turned(dy, target, keep, HALF, WIDTH, PAIRS)
        c, s = load_angles(cos, sin, angle, keep, HALF, WIDTH)
        square = tl.sum(a * a + b * b, 1)
        if REST > 0:
            rest = load_rows(x, source, keep, 2 * HALF, DIM - 2 * HALF, REST)
            gr = load_rows(dy, target, keep, 2 * HALF, DIM - 2 * HALF, REST)
            square += tl.sum(rest * rest, 1)
        r = tl.rsqrt(square / DIM + eps)[:, None]
        ga, gb = ga * c + gb * s, gb * c - ga * s
        a, b = a * r, b * r
        acc_a += ga * a
        acc_b += gb * b
        ga, gb = ga * wa, gb * wb
        dot = tl.sum(ga * a + gb * b, 1)
        if REST > 0:
            rest *= r
            acc_r += gr * rest
            gr *= wr
            dot += tl.sum(gr * rest, 1)
        mean = (dot / DIM)[:, None]
        store_turned(dx, r * (ga - a * mean), r * (gb - b * mean), target, keep, HALF, WIDTH, PAIRS)
        if REST > 0:
            out = r * (gr - rest * mean)
            store_rows(dx, out, target, keep, 2 * HALF, DIM - 2 * HALF, REST)
    col = tl.arange(0, WIDTH)
    if PAIRS:
        even, odd = 2 * col, 2 * col + 1
    else:
        even, odd = col, HALF + col
    tl.store(part + even, tl.sum(acc_a, 0), mask=col < HALF)
    tl.store(part + odd, tl.sum(acc_b, 0), mask=col < HALF)
    if REST > 0:
        col = tl.arange(0, REST)
        tl.store(part + 2 * HALF + col, tl.sum(acc_r, 0), mask=col < DIM - 2 * HALF)


@jit
def _backward(
    q: tensor,
    k: tensor,
    q_weight: tensor,
    k_weight: tensor,
    dq_out: tensor,
    dk_out: tensor,
    dq: tensor,
    dk: tensor,
    q_parts: tensor,
    k_parts: tensor,
    cos: tensor,
    sin: tensor,
    q_rows: tensor,
    k_rows: tensor,
    seq: tensor,
    q_batch: tensor,
    q_seq: tensor,
    q_outer: tensor,
    q_inner: tensor,
    k_batch: tensor,
    k_seq: tensor,
    k_outer: tensor,
    k_inner: tensor,
    angle_stride: tensor,
    eps: tensor,
    Q_HEADS: constexpr,
    K_HEADS: constexpr,
    Q_INNER: constexpr,
    K_INNER: constexpr,
    DIM: constexpr,
    HALF: constexpr,
    WIDTH: constexpr,
    REST: constexpr,
    ROWS: constexpr,
    STAGES: constexpr,
    PAIRS: constexpr,
    ZERO_CENTRED: constexpr,
) -> None:
    part = tl.program_id(0).to(tl.int64) * DIM
    _backward_heads(
        q, q_weight, dq_out, dq, q_parts + part, cos, sin, q_rows, seq,
        q_batch, q_seq, q_outer, q_inner, angle_stride, eps,
        Q_HEADS, Q_INNER, DIM, HALF, WIDTH, REST, ROWS, STAGES, PAIRS, ZERO_CENTRED,
    )  # fmt: skip
    _backward_heads(
        k, k_weight, dk_out, dk, k_parts + part, cos, sin, k_rows, seq,
        k_batch, k_seq, k_outer, k_inner, angle_stride, eps,
        K_HEADS, K_INNER, DIM, HALF, WIDTH, REST, ROWS, STAGES, PAIRS, ZERO_CENTRED,
    )  # fmt: skip


def _constants(q: Heads, k: Heads, half: int) -> dict[str, int]:
    dim = q.tensor.shape[-1]
    return {
        "Q_HEADS": q.heads,
        "K_HEADS": k.heads,
        "Q_INNER": q.inner,
        "K_INNER": k.inner,
        "DIM": dim,
        "HALF": half,
        "WIDTH": power_of_2(half),
        "REST": power_of_2(dim - 2 * half) if dim > 2 * half else 0,
    }


class _QKNormRoPE(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        zero_centred: bool,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor]:
        q_out, k_out = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
        qh, kh = heads_of(q), heads_of(k)
        tile = launch.qk_norm_rope_forward(q.shape[-1])
        if q.numel() + k.numel():
            _forward[(ceil_div(qh.rows, tile.rows) + ceil_div(kh.rows, tile.rows),)](
                qh.tensor,
                kh.tensor,
                q_weight,
                k_weight,
                q_out,
                k_out,
                cos,
                sin,
                qh.rows,
                kh.rows,
                qh.seq,
                *qh.strides,
                *kh.strides,
                cos.stride(0) if cos.ndim == 3 else 0,
                eps,
                **_constants(qh, kh, cos.shape[-1]),
                ROWS=tile.rows,
                PAIRS=interleaved,
                ZERO_CENTRED=zero_centred,
                num_warps=tile.warps,
            )
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.eps, ctx.zero_centred, ctx.interleaved = eps, zero_centred, interleaved
        ctx.weight_grads = None
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        need_q, need_k, *need_weights = gradmask.needs(ctx)[:4]
        if ctx.weight_grads is not None and not (need_q or need_k):
            return None, None, *ctx.weight_grads, None, None, None, None, None
        q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
        dq_out, dk_out = (g.contiguous() for g in grads)
        dq, dk = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
        qh, kh = heads_of(q), heads_of(k)
        tile = launch.qk_norm_rope_backward(q.shape[-1], pairs=ctx.interleaved)
        most = max(ceil_div(h.rows, tile.rows) for h in (qh, kh))
        programs = min(most, tile.waves * processors(q.device))
        parts = torch.empty((2, programs, q.shape[-1]), dtype=torch.float32, device=q.device)
        if programs:
            _backward[(programs,)](
                qh.tensor,
                kh.tensor,
                q_weight,
                k_weight,
                dq_out,
                dk_out,
                dq,
                dk,
                parts[0],
                parts[1],
                cos,
                sin,
                qh.rows,
                kh.rows,
                qh.seq,
                *qh.strides,
                *kh.strides,
                cos.stride(0) if cos.ndim == 3 else 0,
                ctx.eps,
                **_constants(qh, kh, cos.shape[-1]),
                ROWS=tile.rows,
                STAGES=tile.stages,
                PAIRS=ctx.interleaved,
                ZERO_CENTRED=ctx.zero_centred,
                num_warps=tile.warps,
            )
        q_grad, k_grad = ctx.needs_input_grad[2:4]
        dq_weight = sum_rows(parts[0], q_weight.dtype) if q_grad else None
        dk_weight = sum_rows(parts[1], k_weight.dtype) if k_grad else None
        if need_weights == [q_grad, k_grad]:
            return dq, dk, dq_weight, dk_weight, None, None, None, None, None
        # Of a backward pass in parts: one kernel gives all, the second part takes what is there.
        ctx.weight_grads = dq_weight, dk_weight
        return dq, dk, None, None, None, None, None, None, None


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    zero_centred: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise each head of `q` and `k`, then rotate it: `rope(rms_norm(...))`, rounded once.

    The backward normalises again from `q` and `k`; nothing else is kept.

    Args:
        q: [batch, seq, *heads, dim]; any number of head dims, and only the last need be dense,
            so that `q` may be a part of a fused projection.
        k: [batch, seq, *heads, dim], with heads of its own.
        q_weight: [dim], the scale of every query head.
        k_weight: [dim], the scale of every key head.
        cos: [seq, r] or [batch, seq, r], as `rope` takes it.
        sin: as `cos`.
        eps: added to the mean square.
        zero_centred: multiply by `1 + weight`.
        interleaved: pair channels (2i, 2i + 1); otherwise (i, i + r).

    Returns:
        New dense tensors like `q` and `k`.

    Raises:
        ValueError: `cos` and `sin` are not one row per token, or do not fit in a head.
    """
    check_angles(q, cos, sin)
    check_angles(k, cos, sin)
    if runs_triton(q):
        angles = cos.contiguous(), sin.contiguous()
        q_out, k_out = apply(
            _QKNormRoPE, q, k, q_weight, k_weight, *angles, eps, zero_centred, interleaved
        )
        return q_out, k_out
    return reference.qk_norm_rope(
        q, k, q_weight, k_weight, cos, sin, eps, zero_centred=zero_centred, interleaved=interleaved
    )
