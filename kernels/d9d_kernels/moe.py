"""Tokens to experts and back: route, permute, unpermute.

Routing is a counting sort in three launches: each program counts the experts of its run of
choices, one program per expert turns those counts into bases, and each choice's row is its base
plus its rank among the equal choices of its run. No sort, no atomics, no host.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from d9d_kernels import launch, reference
from d9d_kernels.lang import apply, ceil_div, constexpr, jit, power_of_2, runs_triton, tensor, tl
from d9d_kernels.types import Route


@jit
def _load_key(experts: tensor, at: tensor, choices: tensor, EXPERTS: constexpr) -> tensor:
    """The bin of each choice: its expert, or EXPERTS where it has none."""
    key = tl.load(experts + at, mask=at < choices, other=-1)
    return tl.where((key >= 0) & (key < EXPERTS), key, EXPERTS).to(tl.int32)


@jit
def _count(
    experts: tensor,
    table: tensor,
    choices: tensor,
    EXPERTS: constexpr,
    BINS: constexpr,
    RUN: constexpr,
) -> None:
    """Row of the table [runs, EXPERTS + 1]: how often this run chooses each expert."""
    at = tl.program_id(0) * RUN + tl.arange(0, RUN)
    key = _load_key(experts, at, choices, EXPERTS)
    key = tl.where(at < choices, key, BINS - 1)
    counts = tl.histogram(key, BINS)
    bin = tl.arange(0, BINS)
    tl.store(table + tl.program_id(0) * (EXPERTS + 1) + bin, counts, mask=bin <= EXPERTS)


@jit
def _scan(table: tensor, counts: tensor, runs: tensor, BINS: constexpr, BLOCK: constexpr) -> None:
    """Exclusive sums of one column of the table, in place, and its total."""
    column = tl.program_id(0)
    seen = 0
    for start in range(0, runs, BLOCK):
        run = start + tl.arange(0, BLOCK)
        here = tl.load(table + run * BINS + column, mask=run < runs, other=0)
        tl.store(table + run * BINS + column, seen + tl.cumsum(here, 0) - here, mask=run < runs)
        seen += tl.sum(here, 0)
    tl.store(counts + column, seen)


@jit
def _place(
    experts: tensor,
    table: tensor,
    counts: tensor,
    offsets: tensor,
    source: tensor,
    position: tensor,
    choices: tensor,
    EXPERTS: constexpr,
    BINS: constexpr,
    RUN: constexpr,
) -> None:
    bin = tl.arange(0, BINS)
    size = tl.load(counts + bin, mask=bin <= EXPERTS, other=0)
    ends = tl.cumsum(size, 0)
    if tl.program_id(0) == 0:
        tl.store(offsets + bin, ends, mask=bin < EXPERTS)
    base = tl.load(table + tl.program_id(0) * (EXPERTS + 1) + bin, mask=bin <= EXPERTS, other=0)
    base += ends - size
    lane = tl.arange(0, RUN)
    at = tl.program_id(0) * RUN + lane
    key = _load_key(experts, at, choices, EXPERTS)
    earlier = (key[:, None] == key[None, :]) & (lane[None, :] < lane[:, None])
    row = tl.gather(base, key, 0) + tl.sum(earlier.to(tl.int32), 1)
    tl.store(position + at, row, mask=at < choices)
    tl.store(source + row, at, mask=at < choices)


@jit
def _spread(
    x: tensor,
    position: tensor,
    offsets: tensor,
    probs: tensor,
    rows: tensor,
    row_probs: tensor,
    experts: tensor,
    K: constexpr,
    DIM: constexpr,
    BLOCK: constexpr,
    PROBS: constexpr,
) -> None:
    """Copy a token to its K rows; zeros to the rows past the last expert."""
    blocks: constexpr = tl.cdiv(DIM, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK
    routed = tl.load(offsets + experts - 1)
    col = start + tl.arange(0, BLOCK)
    h = tl.load(x + token * DIM + col, mask=col < DIM, other=0.0)
    for slot in tl.static_range(K):
        row = tl.load(position + token * K + slot).to(tl.int64)
        kept = row < routed
        tl.store(rows + row * DIM + col, tl.where(kept, h, 0.0).to(h.dtype), mask=col < DIM)
        if PROBS:  # noqa: SIM102, a compile-time test around one of the run
            if start == 0:
                p = tl.load(probs + token * K + slot)
                tl.store(row_probs + row, tl.where(kept, p, 0.0).to(p.dtype))


@jit
def _gather(
    rows: tensor,
    position: tensor,
    offsets: tensor,
    probs: tensor,
    out: tensor,
    row_probs: tensor,
    dprobs: tensor,
    experts: tensor,
    K: constexpr,
    DIM: constexpr,
    BLOCK: constexpr,
    PROBS: constexpr,
    ROW_PROBS: constexpr,
) -> None:
    """Sum a token's K rows in fp32, each times its probability; gather what its rows carry."""
    blocks: constexpr = tl.cdiv(DIM, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK
    routed = tl.load(offsets + experts - 1)
    col = start + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(position + token * K + slot).to(tl.int64)
        kept = row < routed
        h = tl.load(rows + row * DIM + col, mask=col < tl.where(kept, DIM, 0), other=0.0).to(
            tl.float32
        )
        if PROBS:
            h *= tl.load(probs + token * K + slot).to(tl.float32)
        acc += h
        if ROW_PROBS:  # noqa: SIM102
            if start == 0:
                p = tl.load(row_probs + row, mask=kept, other=0.0)
                tl.store(dprobs + token * K + slot, p)
    tl.store(out + token * DIM + col, acc.to(out.dtype.element_ty), mask=col < DIM)


@jit
def _gather_backward(
    rows: tensor,
    position: tensor,
    offsets: tensor,
    probs: tensor,
    dout: tensor,
    drows: tensor,
    dprobs: tensor,
    experts: tensor,
    K: constexpr,
    DIM: constexpr,
    BLOCK: constexpr,
) -> None:
    """`p * dout` to each row of a token, and the product of each row with `dout`."""
    token = tl.program_id(0).to(tl.int64)
    routed = tl.load(offsets + experts - 1)
    for slot in tl.static_range(K):
        row = tl.load(position + token * K + slot).to(tl.int64)
        kept = row < routed
        p = tl.load(probs + token * K + slot).to(tl.float32)
        acc = tl.zeros([BLOCK], tl.float32)
        for start in tl.static_range(0, DIM, BLOCK):
            col = start + tl.arange(0, BLOCK)
            g = tl.load(dout + token * DIM + col, mask=col < DIM, other=0.0).to(tl.float32)
            at = row * DIM + col
            h = tl.load(rows + at, mask=col < tl.where(kept, DIM, 0), other=0.0).to(tl.float32)
            acc += g * h
            scaled = tl.where(kept, g * p, 0.0).to(drows.dtype.element_ty)
            tl.store(drows + at, scaled, mask=col < DIM)
        dot = tl.where(kept, tl.sum(acc, 0), 0.0)
        tl.store(dprobs + token * K + slot, dot.to(dprobs.dtype.element_ty))


def _route(experts: Tensor, num_experts: int) -> Route:
    device, choices = experts.device, experts.numel()
    run = 256
    runs, bins = ceil_div(choices, run), power_of_2(num_experts + 2)
    table = torch.empty((runs, num_experts + 1), dtype=torch.int32, device=device)
    counts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    offsets = torch.empty(num_experts, dtype=torch.int32, device=device)
    source = torch.empty(choices, dtype=torch.int32, device=device)
    position = torch.empty(experts.shape, dtype=torch.int32, device=device)
    _count[(runs,)](experts, table, choices, EXPERTS=num_experts, BINS=bins, RUN=run, num_warps=4)
    _scan[(num_experts + 1,)](table, counts, runs, BINS=num_experts + 1, BLOCK=1024, num_warps=4)
    _place[(runs,)](
        experts,
        table,
        counts,
        offsets,
        source,
        position,
        choices,
        EXPERTS=num_experts,
        BINS=bins,
        RUN=run,
        num_warps=8,
    )
    return Route(counts[:num_experts], offsets, source, position)


def _launch_spread(x: Tensor, route: Route, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    (tokens, dim), k = x.shape, route.position.shape[1]
    rows = torch.empty((tokens * k, dim), dtype=x.dtype, device=x.device)
    row_probs = None
    if probs is not None:
        row_probs = torch.empty(tokens * k, dtype=probs.dtype, device=x.device)
    tile = launch.moe_spread(dim)
    if rows.numel():
        _spread[(tokens * ceil_div(dim, tile.block),)](
            x,
            route.position,
            route.offsets,
            x if probs is None else probs,
            rows,
            x if row_probs is None else row_probs,
            route.offsets.numel(),
            K=k,
            DIM=dim,
            BLOCK=tile.block,
            PROBS=probs is not None,
            num_warps=tile.warps,
        )
    return rows, row_probs


def _launch_gather(
    rows: Tensor, route: Route, probs: Tensor | None, row_probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    (tokens, k), dim = route.position.shape, rows.shape[1]
    out = torch.empty((tokens, dim), dtype=rows.dtype, device=rows.device)
    picked = None
    if row_probs is not None:
        picked = torch.empty((tokens, k), dtype=row_probs.dtype, device=rows.device)
    tile = launch.moe_gather(dim)
    if out.numel():
        _gather[(tokens * ceil_div(dim, tile.block),)](
            rows,
            route.position,
            route.offsets,
            rows if probs is None else probs,
            out,
            rows if row_probs is None else row_probs,
            rows if picked is None else picked,
            route.offsets.numel(),
            K=k,
            DIM=dim,
            BLOCK=tile.block,
            PROBS=probs is not None,
            ROW_PROBS=row_probs is not None,
            num_warps=tile.warps,
        )
    return out, picked


class _Permute(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, *route: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*route)
        return _launch_spread(x, Route(*route), probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        route = Route(*ctx.saved_tensors)
        drows, drow_probs = grads
        carried = None if drow_probs is None else drow_probs.contiguous()
        dx, dprobs = _launch_gather(drows.contiguous(), route, None, carried)
        return dx, dprobs, None, None, None, None


class _Unpermute(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, probs: Tensor | None, *route: Tensor) -> Tensor:
        ctx.save_for_backward(rows if probs is not None else None, probs, *route)
        return _launch_gather(rows, Route(*route), probs, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, probs, *tensors = ctx.saved_tensors
        route, dout = Route(*tensors), grads[0].contiguous()
        if probs is None:
            return _launch_spread(dout, route, None)[0], None, None, None, None, None
        (tokens, k), dim = route.position.shape, rows.shape[1]
        drows, dprobs = torch.empty_like(rows), torch.zeros_like(probs)
        if rows.numel():
            tile = launch.moe_gather(dim)
            _gather_backward[(tokens,)](
                rows,
                route.position,
                route.offsets,
                probs,
                dout,
                drows,
                dprobs,
                route.offsets.numel(),
                K=k,
                DIM=dim,
                BLOCK=tile.block,
                num_warps=tile.warps,
            )
        return drows, dprobs, None, None, None, None


def moe_route(experts: Tensor, num_experts: int) -> Route:
    """Order the choices by expert, then by token.

    Args:
        experts: int32 or int64 [tokens, k]; an id outside `[0, num_experts)` drops the choice.
        num_experts: how many groups of rows to make, at least 1.

    Returns:
        The counts, the ends of the groups, and the permutation both ways.

    Raises:
        ValueError: `experts` is not an integer matrix, or has 2^31 choices or more.
    """
    if experts.ndim != 2 or experts.is_floating_point() or experts.numel() >= 1 << 31:
        raise ValueError(
            "experts: expected int32 or int64 [tokens, k] of less than 2^31 choices, "
            f"found {experts.dtype} {tuple(experts.shape)}"
        )
    if runs_triton(experts, (torch.int32, torch.int64)):
        return _route(experts.contiguous(), num_experts)
    return reference.moe_route(experts, num_experts)


def moe_permute(
    x: Tensor, route: Route, probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Copy each token to the rows of its experts.

    Args:
        x: [tokens, hidden].
        route: where the choices go.
        probs: [tokens, k], carried along, differentiable.

    Returns:
        Rows [tokens * k, hidden] in the order of the experts and, with `probs`, the probability
        of each row [tokens * k]. Rows of dropped choices, past the last offset, are zero.
    """
    if runs_triton(x):
        factors = None if probs is None else probs.contiguous()
        rows, row_probs = apply(_Permute, x.contiguous(), factors, *route)
        return rows, row_probs
    return reference.moe_permute(x, route, probs)


def moe_unpermute(rows: Tensor, route: Route, probs: Tensor | None = None) -> Tensor:
    """Sum each token's rows, optionally weighted; the inverse of `moe_permute`.

    The sum runs in float32 in the order of the token's choices. Rows past the last offset are
    never read, whatever they hold.

    Args:
        rows: [tokens * k, hidden] in the order of the experts.
        route: where the choices went.
        probs: [tokens, k], the weight of each choice, differentiable; None: 1.

    Returns:
        [tokens, hidden] in `rows.dtype`.
    """
    if runs_triton(rows):
        factors = None if probs is None else probs.contiguous()
        out: Tensor = apply(_Unpermute, rows.contiguous(), factors, *route)
        return out
    return reference.moe_unpermute(rows, route, probs)
