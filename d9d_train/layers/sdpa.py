"""Attention of whole sequences, causal within each document."""

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

from d9d_train.batch import Batch


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Grouped-query attention, scaled by the root of D.

    Packed documents on a GPU go through FlexAttention, which stores no S x S mask.

    Args:
        q: [B, T, Hq, D].
        k: [B, T, Hkv, D]; Hkv divides Hq, and query head h sees head h // (Hq / Hkv).
        v: [B, T, Hkv, D].
        batch: Where documents start; all T tokens of a sequence are here.

    Returns:
        [B, T, Hq, D].
    """
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if not batch.packed:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    elif q.is_cuda and q.dtype != torch.float64:
        out = _flex()(q, k, v, block_mask=_blocks(batch.starts), enable_gqa=grouped)
    else:
        mask = _visible(batch.starts)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return out.transpose(1, 2)


def _visible(starts: torch.Tensor) -> torch.Tensor:
    """[B, 1, T, T] bool: which keys a token attends to."""
    index = torch.arange(starts.shape[1], device=starts.device)
    return ((starts[:, :, None] <= index) & (index <= index[:, None]))[:, None]


@cache
def _flex() -> Any:
    """FlexAttention compiled: run eagerly, it stores every score."""
    return torch.compile(flex_attention, dynamic=False)


_known = WeakTensorKeyDictionary()
"""Blocks of a batch's ``starts``: one mask for all layers, gone with the batch."""


def _blocks(starts: torch.Tensor) -> BlockMask:
    """Which blocks of 128 x 128 scores are computed, found without all scores in one piece."""
    if starts not in _known:
        known = starts.detach()  # not the key itself, which the mask would keep alive

        def seen(b: Any, h: Any, row: Any, column: Any) -> Any:
            return (known[b, row] <= column) & (column <= row)

        batch, length = starts.shape
        _known[starts] = _create()(seen, batch, None, length, length, device=starts.device)
    blocks: BlockMask = _known[starts]
    return blocks


@cache
def _create() -> Any:
    return torch.compile(create_block_mask, dynamic=False)
