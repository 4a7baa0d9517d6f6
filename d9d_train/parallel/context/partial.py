"""Attention to some of the keys, with the log-sum-exp by which such parts are merged."""

from dataclasses import dataclass

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001 - with log-sum-exp
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward  # noqa: SLF001


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [B, S, Hq, D], keys and values [B, L, Hkv, D]."""


@dataclass(frozen=True)
class Seen:
    """Which keys a query sees.

    Attributes:
        causal: Query i sees keys up to the i-th, of as many; otherwise all.
        mask: [B, S, L] bool, in place of that.
    """

    causal: bool
    mask: torch.Tensor | None = None


def fused(q: torch.Tensor) -> bool:
    """Whether flash kernels take queries such as ``q``; scores are stored otherwise, or with a mask."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def attend(qkv: QKV, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries to these keys alone.

    Returns:
        The output [B, S, Hq, D], and the log-sum-exp of the scores [B, Hq, S] in float32 or better: 0
        and -inf where a query sees no key.
    """
    q, k, v = qkv
    if seen.mask is None and fused(q):
        out, lse, *_ = _flash(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, seen.causal)
        return out.transpose(1, 2), lse
    scores = _scores(q, k, seen)
    lse = scores.logsumexp(-1)
    out = (scores - _finite(lse)[..., None]).exp() @ _columns(v)
    return _unfolded(out, q), lse.reshape(len(q), q.shape[2], -1)


def backward(grad: torch.Tensor, qkv: QKV, out: torch.Tensor, lse: torch.Tensor, seen: Seen) -> QKV:
    """The share of the gradients of queries, keys and values that comes through these keys.

    Args:
        grad: [B, S, Hq, D], of the merged output.
        qkv: As in `attend`.
        out: [B, S, Hq, D], the merged output.
        lse: [B, Hq, S], the merged log-sum-exp.
        seen: As in `attend`.
    """
    q, k, v = qkv
    if seen.mask is None and fused(q):
        # The offsets are of packed batches and the random state of dropout: neither is read.
        unread = lse.new_empty(2, dtype=torch.uint64)
        dq, dk, dv = _flash_backward(
            *(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse.contiguous(), None, None,
            q.shape[1], k.shape[1], 0.0, seen.causal, unread, unread,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
    rows, grads, outs = (_folded(x, k.shape[2]) for x in (q, grad, out))
    weights = (_scores(q, k, seen) - lse.reshape(*rows.shape[:-1], 1)).exp()
    through = grads @ _columns(v).mT - (grads * outs).sum(-1, keepdim=True)
    slopes = weights * through * _scale(q)
    dq = _unfolded(slopes @ _columns(k), q)
    return dq, (slopes.mT @ rows).transpose(1, 2), (weights.mT @ grads).transpose(1, 2)


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Fold attention to further keys into ``out`` and ``lse``, in place.

    Args:
        out: [B, S, H, D].
        lse: [B, H, S].
        part: [B, S, H, D], over keys that ``out`` has not seen.
        part_lse: [B, H, S].
    """
    total = torch.logaddexp(lse, part_lse)
    kept, added = ((x - _finite(total)).exp().mT[..., None] for x in (lse, part_lse))
    out.mul_(kept).add_(part * added)
    lse.copy_(total)


def _scores(q: torch.Tensor, k: torch.Tensor, seen: Seen) -> torch.Tensor:
    """[B, Hkv, G S, L], -inf where a key is not seen."""
    scores = _folded(q, k.shape[2]) @ _columns(k).mT * _scale(q)
    mask = seen.mask
    if mask is None and seen.causal:
        mask = torch.ones(1, *scores.shape[-1:] * 2, dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return scores
    by_query = scores.view(*scores.shape[:2], -1, *mask.shape[1:])
    return by_query.masked_fill_(~mask[:, None, None], -torch.inf).view(scores.shape)


def _folded(q: torch.Tensor, groups: int) -> torch.Tensor:
    """[B, Hkv, G S, D] from [B, S, Hq, D]: the heads of a group are rows to the same keys; widened."""
    by_group = _wide(q).transpose(1, 2)
    return by_group.reshape(len(q), groups, -1, q.shape[-1])


def _unfolded(rows: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[B, S, Hq, D], as q is, from [B, Hkv, G S, D]."""
    return rows.reshape(len(q), q.shape[2], q.shape[1], -1).transpose(1, 2)


def _columns(x: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, L, D] from [B, L, Hkv, D]; widened."""
    return _wide(x).transpose(1, 2)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scale(q: torch.Tensor) -> float:
    return float(q.shape[-1] ** -0.5)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """0 in place of -inf, whose difference to itself is NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)
