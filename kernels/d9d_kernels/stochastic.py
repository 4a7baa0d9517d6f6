"""bf16 weights without fp32 masters: AdamW and copies that round stochastically.

A value between two bf16 numbers becomes the upper one with the probability of its distance from
the lower, so small updates survive on average. Philox gives 16 bits for each rounding, eight of
them a draw, keyed by the element's number in the whole model: results do not depend on how
tensors are cut over ranks. Kernels handle bf16 as integers, so rounding is exact by construction.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from d9d_kernels import launch, many, reference
from d9d_kernels.lang import ceil_div, constexpr, jit, runs_triton, tensor, tl
from d9d_kernels.reference import PHILOX_ROUNDS
from d9d_kernels.types import Place

# Of a table row: four addresses, elements, first chunk, offset, columns, pitch.
FIELDS = 9


@jit
def _widen(raw: tensor) -> tensor:
    """The fp32 value of bf16 bits."""
    return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@jit
def _round(x: tensor, bits: tensor) -> tensor:
    """bf16 bits of fp32 `x`; see `reference.round_stochastically`."""
    raw = x.to(tl.int32, bitcast=True)
    rest = raw & 0x7FFFFFFF
    rounded = tl.where(rest < 0x7F800000, raw + bits, raw)
    return (tl.where(rest > 0x7F800000, 0x7FC00000, rounded) >> 16).to(tl.int16)


@jit
def _draw(
    number: tensor, seed: tensor, step: tensor, STREAM: constexpr, ROUNDS: constexpr
) -> tensor:
    """Four 32-bit words for the group of eight that each number is in."""
    group = number >> 3
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    zero = low * 0
    return tl.philox(seed, low, high, zero + tl.cast(step, tl.uint32), zero + STREAM, ROUNDS)


@jit
def _number(i: tensor, offset: tensor, columns: tensor, pitch: tensor) -> tensor:
    row = i // columns
    return offset + row * pitch + (i - row * columns)


@jit
def _shared(
    number: tensor, seed: tensor, step: tensor, STREAM: constexpr, ROUNDS: constexpr
) -> tensor:
    """The 16 bits of eight elements [GROUPS, 8] from one draw, at the group's first number."""
    a, b, c, d = _draw(number, seed, step, STREAM, ROUNDS)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    words = tl.reshape(words, (words.shape[0], 4))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (words.shape[0], 8)).to(tl.int32)


@jit
def _noise(
    group: tensor,
    offset: tensor,
    columns: tensor,
    pitch: tensor,
    seed: tensor,
    step: tensor,
    STREAM: constexpr,
    SHARING: constexpr,
    ROUNDS: constexpr,
) -> tensor:
    """16 bits for eight elements from each of `group` [GROUPS] on."""
    if SHARING == 2:
        bits = _shared(offset + group, seed, step, STREAM, ROUNDS)
    elif SHARING == 1:
        bits = _shared(_number(group, offset, columns, pitch), seed, step, STREAM, ROUNDS)
    else:
        i = group[:, None] + tl.arange(0, 8)[None, :]
        number = _number(i, offset, columns, pitch)
        a, b, c, d = _draw(number, seed, step, STREAM, ROUNDS)
        lane = number & 7
        word = tl.where(lane < 4, tl.where(lane < 2, a, b), tl.where(lane < 6, c, d))
        bits = ((word >> ((lane & 1) * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32)
    return bits


@jit
def _pointer(at: tensor, NARROW: constexpr, ALIGNED: constexpr) -> tensor:
    """An address as a pointer to the bits of bf16 (NARROW) or to fp32."""
    if NARROW:
        pointer = at.to(tl.pointer_type(tl.int16))
    else:
        pointer = at.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@jit
def _load(at: tensor, i: tensor, size: tensor, WHOLE: constexpr) -> tensor:
    """fp32 values; WHOLE: none is past the end."""
    value = tl.load(at + i) if WHOLE else tl.load(at + i, mask=i < size, other=0)
    return _widen(value) if at.dtype.element_ty == tl.int16 else value


@jit
def _store(at: tensor, i: tensor, value: tensor, size: tensor, WHOLE: constexpr) -> None:
    if WHOLE:
        tl.store(at + i, value)
    else:
        tl.store(at + i, value, mask=i < size)


@jit
def _update(
    param: tensor,
    grad: tensor,
    exp_avg: tensor,
    exp_avg_sq: tensor,
    size: tensor,
    group: tensor,
    offset: tensor,
    columns: tensor,
    pitch: tensor,
    keep: tensor,
    step_size: tensor,
    root: tensor,
    one_minus_beta1: tensor,
    beta2: tensor,
    one_minus_beta2: tensor,
    eps: tensor,
    step: tensor,
    seed: tensor,
    WHOLE: constexpr,
    SHARING: constexpr,
    ROUNDS: constexpr,
) -> None:
    i = group[:, None] + tl.arange(0, 8)[None, :]
    p, g = _load(param, i, size, WHOLE), _load(grad, i, size, WHOLE)
    m, v = _load(exp_avg, i, size, WHOLE), _load(exp_avg_sq, i, size, WHOLE)
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + g * g * one_minus_beta2
    p = p * keep
    p = p - m / (tl.sqrt(v) * root + eps) * step_size
    bits = _noise(group, offset, columns, pitch, seed, step, 0, SHARING, ROUNDS)
    _store(param, i, _round(p, bits), size, WHOLE)
    if exp_avg.dtype.element_ty == tl.int16:
        bits = _noise(group, offset, columns, pitch, seed, step, 1, SHARING, ROUNDS)
        _store(exp_avg, i, _round(m, bits), size, WHOLE)
        bits = _noise(group, offset, columns, pitch, seed, step, 2, SHARING, ROUNDS)
        _store(exp_avg_sq, i, _round(v, bits), size, WHOLE)
    else:
        _store(exp_avg, i, m, size, WHOLE)
        _store(exp_avg_sq, i, v, size, WHOLE)


@jit
def _adamw(
    table: tensor,
    owner: tensor,
    keep: tensor,
    step_size: tensor,
    root: tensor,
    one_minus_beta1: tensor,
    beta2: tensor,
    one_minus_beta2: tensor,
    eps: tensor,
    step: tensor,
    seed: tensor,
    FIELDS: constexpr,
    GROUPS: constexpr,
    NARROW_GRAD: constexpr,
    NARROW_STATE: constexpr,
    ALIGNED: constexpr,
    SHARING: constexpr,
    ROUNDS: constexpr,
) -> None:
    """A chunk of one tensor; only a tensor's last chunk pays for masks."""
    chunk = tl.program_id(0)
    row = table + tl.load(owner + chunk).to(tl.int64) * FIELDS
    param = _pointer(tl.load(row), True, ALIGNED)
    grad = _pointer(tl.load(row + 1), NARROW_GRAD, ALIGNED)
    exp_avg = _pointer(tl.load(row + 2), NARROW_STATE, ALIGNED)
    exp_avg_sq = _pointer(tl.load(row + 3), NARROW_STATE, ALIGNED)
    size, start = tl.load(row + 4), (chunk - tl.load(row + 5)) * (GROUPS * 8)
    offset, columns = tl.load(row + 6), tl.load(row + 7)
    pitch = tl.load(row + 8)
    group = start + tl.arange(0, GROUPS) * 8
    if start + GROUPS * 8 <= size:
        _update(
            param, grad, exp_avg, exp_avg_sq, size, group, offset, columns, pitch,
            keep, step_size, root, one_minus_beta1, beta2, one_minus_beta2, eps, step, seed,
            True, SHARING, ROUNDS,
        )  # fmt: skip
    else:
        _update(
            param, grad, exp_avg, exp_avg_sq, size, group, offset, columns, pitch,
            keep, step_size, root, one_minus_beta1, beta2, one_minus_beta2, eps, step, seed,
            False, SHARING, ROUNDS,
        )  # fmt: skip


@jit
def _copy(
    out: tensor,
    x: tensor,
    size: tensor,
    offset: tensor,
    columns: tensor,
    pitch: tensor,
    step: tensor,
    seed: tensor,
    GROUPS: constexpr,
    SHARING: constexpr,
    ROUNDS: constexpr,
) -> None:
    group = (tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)) * 8
    i = group[:, None] + tl.arange(0, 8)[None, :]
    mask = i < size
    value = tl.load(x + i, mask=mask, other=0.0)
    bits = _noise(group, offset, columns, pitch, seed, step, 0, SHARING, ROUNDS)
    tl.store(out + i, _round(value, bits), mask=mask)


def _sharing(place: Place, size: int) -> int:
    """How eight elements in a row find their draw.

    2: they share it, and numbers run on; 1: they share it, row by row; 0: each has its own, since
    groups of eight of the local and of the whole tensor do not coincide.
    """
    if place.offset % 8:
        return 0
    if size <= place.columns:
        return 2
    return int(place.columns % 8 == 0 and place.pitch % 8 == 0)


def _launch_adamw(
    rows: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Place]],
    sharing: int,
    scalars: tuple[float, ...],
    step: int,
    seed: int,
) -> None:
    """One launch over tensors that find their draws alike."""
    _, grad, exp_avg, _, _ = rows[0]
    sizes = tuple(row[0].numel() for row in rows)
    groups, warps = launch.stochastic()
    owner = many.owners(sizes, groups * 8, grad.device)
    firsts = many.first_chunks(sizes, groups * 8)
    table = [
        [*(t.data_ptr() for t in tensors), size, first, *place]
        for (*tensors, place), size, first in zip(rows, sizes, firsts, strict=True)
    ]
    _adamw[(owner.numel(),)](
        many.send(table, grad.device),
        owner,
        *scalars,
        step,
        seed,
        FIELDS=FIELDS,
        GROUPS=groups,
        NARROW_GRAD=grad.dtype == torch.bfloat16,
        NARROW_STATE=exp_avg.dtype == torch.bfloat16,
        ALIGNED=all(many.aligned(tensors) for *tensors, _ in rows),
        SHARING=sharing,
        ROUNDS=PHILOX_ROUNDS,
        num_warps=warps,
    )


def _require(**dtypes: tuple[Sequence[Tensor], tuple[torch.dtype, ...]]) -> None:
    """Refuse lists of other or mixed dtypes.

    Raises:
        ValueError: with the name, what was expected and what was found.
    """
    for name, (tensors, allowed) in dtypes.items():
        found = {t.dtype for t in tensors}
        if len(found) != 1 or not found <= set(allowed):
            raise ValueError(f"{name}: expected one dtype of {allowed}, found {found}")


@torch.no_grad()
def stochastic_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    places: Sequence[Place],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int,
    seed: int,
) -> None:
    """One AdamW step of bf16 parameters, in place, all tensors in one launch.

    Tensors whose place is not in multiples of eight take a second launch, and a draw per element.
    Arithmetic is fp32; the parameters, and moments kept in bf16, are rounded stochastically.

    Args:
        params: dense bf16 tensors.
        grads: as `params`, all bf16 or all float32.
        exp_avgs: first moments, all bf16 or all float32.
        exp_avg_sqs: second moments, of the dtype of the first.
        places: where each tensor's elements are in the whole model; they key the noise.
        lr: the step's learning rate.
        betas: decays of the two moments.
        eps: added to the root.
        weight_decay: decoupled, times `lr`.
        step: from 1; keys the noise too.
        seed: from 0, below 2^63.

    Raises:
        ValueError: a tensor has gaps, or a list's dtype is not one of the above.
    """
    if not params:
        return
    bf16, either = (torch.bfloat16,), (torch.bfloat16, torch.float32)
    moments = [*exp_avgs, *exp_avg_sqs]
    _require(params=(params, bf16), grads=(grads, either), moments=(moments, either))
    many.require_dense(params=params, grads=grads, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
    if not runs_triton(params[0]):
        reference.stochastic_adamw_(
            params, grads, exp_avgs, exp_avg_sqs, places, lr=lr, betas=betas, eps=eps,
            weight_decay=weight_decay, step=step, seed=seed,
        )  # fmt: skip
        return
    beta1, beta2 = betas
    # On the host, in double: float32 powers are off by 1.7e-4 at beta 0.9999.
    step_size, root = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
    scalars = (1 - lr * weight_decay, step_size, root, 1 - beta1, beta2, 1 - beta2, eps)
    kinds: dict[int, list[tuple[Tensor, Tensor, Tensor, Tensor, Place]]] = {}
    for row in zip(params, grads, exp_avgs, exp_avg_sqs, places, strict=True):
        if size := row[0].numel():
            kinds.setdefault(_sharing(row[-1], size), []).append(row)
    for sharing, rows in kinds.items():
        _launch_adamw(rows, sharing, scalars, step, seed)


@torch.no_grad()
def stochastic_copy_(
    out: Tensor, x: Tensor, place: Place | None = None, *, seed: int, step: int
) -> None:
    """Round fp32 `x` to bf16 `out`, up or down with the probability of each.

    NaN and infinities stay what they are.

    Args:
        out: dense bf16.
        x: dense float32 of the same shape.
        place: where the elements are in the whole model; None: numbers from 0.
        seed: from 0, below 2^63.
        step: keys the noise too.

    Raises:
        ValueError: dtypes, shapes or strides are others.
    """
    _require(out=([out], (torch.bfloat16,)), x=([x], (torch.float32,)))
    many.require_dense(out=[out], x=[x])
    if out.shape != x.shape:
        raise ValueError(f"out: expected {tuple(x.shape)}, found {tuple(out.shape)}")
    if not runs_triton(x):
        reference.stochastic_copy_(out, x, place, seed=seed, step=step)
        return
    size = x.numel()
    place = Place(0, size, size) if place is None else place
    groups, warps = launch.stochastic()
    if size:
        _copy[(ceil_div(size, groups * 8),)](
            out.view(torch.int16),
            x,
            size,
            *place,
            step,
            seed,
            GROUPS=groups,
            SHARING=_sharing(place, size),
            ROUNDS=PHILOX_ROUNDS,
            num_warps=warps,
        )
