"""The eager twin of every op: its definition, on any device, in any floating dtype.

Each takes exactly what the public op takes. Sums, roots and exponentials run in the wider of the
input's dtype and float32, and a result is rounded once, to the dtype that the docstring of the
public op names; so float64 in gives float64 throughout, and gradients come from autograd.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from d9d_kernels.types import Place, Reducer, Route


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype that its arithmetic runs in: float32, or wider if `x` is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, zero_centred: bool = False) -> Tensor:
    h = wide(x)
    scale = wide(weight) + 1 if zero_centred else wide(weight)
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    return _rotate(wide(x), cos, sin, interleaved).to(x.dtype)


def _rotate(h: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first `2 * cos.shape[-1]` channels of `h` [batch, seq, *heads, dim]."""
    half = cos.shape[-1]
    heads = (1,) * (h.ndim - 3)
    c, s = (t.to(h.dtype).reshape(*t.shape[:-1], *heads, half) for t in (cos, sin))
    turned, rest = h[..., : 2 * half], h[..., 2 * half :]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        out = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        out = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((out, rest), -1)


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
    def one(x: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm(wide(x), weight, eps, zero_centred=zero_centred)
        return _rotate(normed, cos, sin, interleaved).to(x.dtype)

    return one(q, q_weight), one(k, k_weight)


def swiglu(gate_up: Tensor, interleaved: bool = True, probs: Tensor | None = None) -> Tensor:
    h = wide(gate_up)
    gate, up = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
    out = functional.silu(gate) * up
    if probs is not None:
        out = out * wide(probs).unsqueeze(-1)
    return out.to(gate_up.dtype)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    first_row: int = 0,
    vocab_size: int | None = None,
    reducer: Reducer | None = None,
) -> Tensor:
    logits = wide(functional.linear(x, weight))
    rows = torch.arange(first_row, first_row + weight.shape[0], device=x.device)
    if vocab_size is not None:
        logits = logits.masked_fill(rows >= vocab_size, -torch.inf)
    end = first_row + weight.shape[0]
    inside = (labels >= first_row) & (
        labels < (end if vocab_size is None else min(end, vocab_size))
    )
    column = torch.where(inside, labels - first_row, 0)
    if weight.shape[0] == 0:
        here = logits.sum(-1)
    else:
        here = torch.where(inside, logits.gather(1, column[:, None])[:, 0], 0)

    peak = logits.detach().amax(-1) if weight.shape[0] else torch.full_like(here, -torch.inf)
    found = here.detach().masked_fill(~inside, -torch.inf)
    if reducer is not None:
        both = torch.stack((peak, found))
        reducer.max_(both)
        peak, found = both.unbind()
    partial = (logits - peak[:, None]).exp().sum(-1)
    total = partial.detach().clone()
    if reducer is not None:
        reducer.sum_(total)
    # The value is the whole vocabulary's, the gradient this shard's: x - x.detach() has slope 1.
    lse = peak + total.log() + (partial - partial.detach()) / total
    target = torch.where(inside, here, found)
    return torch.where(labels == ignore_index, 0, lse - target).sum()


def moe_route(experts: Tensor, num_experts: int) -> Route:
    flat = experts.flatten()
    key = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    source = torch.argsort(key, stable=True)
    position = torch.empty_like(source)
    position[source] = torch.arange(source.numel(), device=source.device)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    return Route(
        counts=counts.int(),
        offsets=counts.cumsum(0).int(),
        source=source.int(),
        position=position.int().view(experts.shape),
    )


def moe_permute(
    x: Tensor, route: Route, probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    kept = torch.arange(route.source.numel(), device=x.device) < _routed(route)
    token = route.source.long() // route.position.shape[1]
    rows = torch.where(kept[:, None], x.index_select(0, token), 0)
    if probs is None:
        return rows, None
    return rows, torch.where(kept, probs.flatten().index_select(0, route.source.long()), 0)


def moe_unpermute(rows: Tensor, route: Route, probs: Tensor | None = None) -> Tensor:
    kept = (route.position < _routed(route))[..., None]
    picked = wide(rows).index_select(0, route.position.flatten().long())
    picked = picked.view(*route.position.shape, rows.shape[-1])
    if probs is not None:
        picked = picked * wide(probs)[..., None]
    return torch.where(kept, picked, 0).sum(1).to(rows.dtype)


def _routed(route: Route) -> Tensor:
    """How many rows have an expert, as a 0-D tensor."""
    return route.counts.sum()


def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    starts = [0, *ends]
    groups = zip(starts[:-1], ends, weights.unbind(0), strict=True)
    tail = x.new_zeros(x.shape[0] - starts[-1], weights.shape[1])
    return torch.cat([*(functional.linear(x[a:b], w) for a, b, w in groups), tail])


PHILOX_ROUNDS = 7
# What a tensor's noise is for: one stream each, so that no two roundings share bits.
PARAM, EXP_AVG, EXP_AVG_SQ = 0, 1, 2


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of two 32-bit numbers, in int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(seed: int, counter: tuple[Tensor, Tensor, int, int]) -> list[Tensor]:
    """Philox 4x32 (Salmon et al. 2011) with seven rounds: four 32-bit words, in int64."""
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    zero = torch.zeros_like(counter[0])
    c0, c1, c2, c3 = (zero + c for c in counter)
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high2, low2 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ key0, low2, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def noise(number: Tensor, seed: int, step: int, stream: int) -> Tensor:
    """16 random bits for each element: eight consecutive numbers share a draw."""
    group, lane = number >> 3, number & 7
    words = torch.stack(philox(seed, (group & 0xFFFFFFFF, group >> 32, step, stream)))
    word = words.gather(0, (lane >> 1)[None])[0]
    return (word >> (16 * (lane & 1))) & 0xFFFF


def numbers(x: Tensor, place: Place) -> Tensor:
    """Global numbers of the elements of `x`, flat."""
    i = torch.arange(x.numel(), device=x.device)
    columns = max(place.columns, 1)
    return place.offset + i // columns * place.pitch + i % columns


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 `x` to bf16, up with the probability of the part that is cut off.

    Infinities stay, and NaN becomes the quiet NaN: neither takes noise, which could carry into
    the exponent or the sign.
    """
    raw = x.view(torch.int32)
    rounded = (raw + bits.to(torch.int32).view(x.shape)) & -65536
    out = torch.where(x.isfinite(), rounded, raw & -65536).view(torch.float32)
    return torch.where(x.isnan(), torch.nan, out).to(torch.bfloat16)


@torch.no_grad()
def stochastic_copy_(
    out: Tensor, x: Tensor, place: Place | None = None, *, seed: int, step: int
) -> None:
    place = Place(0, x.numel(), x.numel()) if place is None else place
    bits = noise(numbers(x, place), seed, step, PARAM)
    out.copy_(round_stochastically(x.contiguous(), bits))


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
    beta1, beta2 = betas
    step_size = lr / (1 - beta1**step)
    root = (1 - beta2**step) ** -0.5
    for p, g, m, v, place in zip(params, grads, exp_avgs, exp_avg_sqs, places, strict=True):
        grad, mean, square = g.float(), m.float(), v.float()
        mean = mean + (grad - mean) * (1 - beta1)
        square = square * beta2 + grad * grad * (1 - beta2)
        new = p.float() * (1 - lr * weight_decay)
        new = new - mean / (square.sqrt() * root + eps) * step_size
        for target, value, stream in (
            (p, new, PARAM), (m, mean, EXP_AVG), (v, square, EXP_AVG_SQ)
        ):  # fmt: skip
            if target.dtype == torch.bfloat16:
                bits = noise(numbers(value, place), seed, step, stream)
                value = round_stochastically(value, bits)
            target.copy_(value)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([wide(t).square().sum() for t in tensors]).sum()
