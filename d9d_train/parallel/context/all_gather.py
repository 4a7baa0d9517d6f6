"""All-gather: every rank gets all keys and values, and attends with its own queries."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

from d9d_train.batch import Batch
from d9d_train.collectives import gather
from d9d_train.data.order import Order
from d9d_train.mesh import Axis
from d9d_train.parallel.context.spans import in_order, spans, visible


# Compiled, neither makes a tensor of queries x keys. Not at import: that alone takes seconds.
@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


@dataclass(frozen=True)
class AllGather:
    """Attention of a rank's tokens to the gathered keys and values.

    Attributes:
        axis: cp; twice its size divides a sequence.
        masks: Block masks on a GPU, by ``starts`` of their batches: all layers share one.
    """

    order: ClassVar[Order] = "head_tail"

    axis: Axis
    masks: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary, repr=False)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """[B, S, Hq, D] from q [B, S, Hq, D], k and v [B, S, Hkv, D]; S are this rank's tokens."""
        gathered = in_order(gather(torch.stack([k, v]), 2, self.axis), self.axis.size, 2)
        q, k, v = (x.transpose(1, 2) for x in (q, *gathered))
        if not q.is_cuda or q.dtype == torch.float64:
            out = _masked(q, k, v, batch)
        elif batch.packed:
            grouped = q.shape[1] != k.shape[1]
            flex = _compiled(flex_attention)
            out = flex(q, k, v, block_mask=self._blocks(batch), enable_gqa=grouped)
        else:
            out = self._causal(q, k, v)
        return out.transpose(1, 2)

    def _causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Each chunk of queries with the keys up to its end, which the flash kernel masks by itself."""
        grouped = q.shape[1] != k.shape[1]
        outs = []
        for span in spans(q.shape[2], self.axis.size, self.axis.rank):
            qkv = q[:, :, span.rows], k[:, :, : span.end], v[:, :, : span.end]
            mask = causal_lower_right(len(span), span.end)
            outs.append(scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=grouped))
        return torch.cat(outs, 2)

    def _blocks(self, batch: Batch) -> BlockMask:
        if batch.starts not in self.masks:
            self.masks[batch.starts] = _blocks_of(batch)
        mask: BlockMask = self.masks[batch.starts]
        return mask


def _blocks_of(batch: Batch) -> BlockMask:
    index, first = batch.index, batch.starts[:, batch.index]

    def sees(
        sequence: torch.Tensor, _: torch.Tensor, row: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (first[sequence, row] <= key) & (key <= index[row])

    size = len(first), None, len(index), batch.starts.shape[1]
    mask: BlockMask = _compiled(create_block_mask)(sees, *size, device=index.device)
    return mask


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
    everything = torch.arange(k.shape[2], device=q.device)
    mask = visible(batch.index, everything, batch.starts[:, batch.index])[:, None]
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
