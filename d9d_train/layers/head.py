"""The head: logits, or the loss without ever holding all of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from d9d_kernels import gradmask, linear_cross_entropy
from d9d_kernels.lang import runs_triton
from d9d_train.batch import IGNORED
from d9d_train.collectives import gather
from d9d_train.layers.weights import local
from d9d_train.mesh import Axis

CHUNK_BYTES = 32 << 20
"""Logits that exist at once, where no kernel goes by chunks of its own."""


class LMHead(nn.Module):
    """Logits of a vocabulary, and the cross-entropy of labels.

    Args:
        hidden: Width of the residual stream.
        vocab: Rows of the vocabulary.

    Attributes:
        weight: [rows, H]; where the vocabulary is padded, rows from ``vocab`` on take no part.
        vocab: Seam of tensor parallelism: the axis over which the rows are cut.
        rows: The vocabulary without padding.
    """

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.rows = vocab
        self.vocab: Axis | None = None

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        """The loss of a micro-batch, or its logits.

        Args:
            x: [B, S, H].
            labels: [B, S] int64, `IGNORED` where a token counts for nothing; None for logits.

        Returns:
            0-D: the sum of the tokens' losses, in float32 or wider; or logits [B, S, vocab].
        """
        weight = local(self.weight)
        if labels is None:
            return self._logits(functional.linear(x, weight))
        loss = partial(
            linear_cross_entropy,
            ignore_index=IGNORED,
            first_row=0 if self.vocab is None else self.vocab.rank * weight.shape[0],
            vocab_size=self.rows,
            reducer=None if self.vocab is None else _Sums(self.vocab),
        )
        return token_loss(x.flatten(0, 1), weight, labels.flatten(), loss)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """All ranks' rows, without padding; not for a backward pass over ``vocab``."""
        if self.vocab is not None:
            rows = gather(rows, rows.ndim - 1, self.vocab)
        return rows[..., : self.rows]


@dataclass(frozen=True)
class _Sums:
    """Sums and maxima over the ranks of an axis."""

    axis: Axis

    def max_(self, values: torch.Tensor) -> None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.axis.group)

    def sum_(self, values: torch.Tensor) -> None:
        dist.all_reduce(values, group=self.axis.group)


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def token_loss(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, loss: Loss
) -> torch.Tensor:
    """A sum over tokens, computed by chunks of them together with its gradients.

    Args:
        x: [N, H].
        weight: [rows, H].
        labels: [N] int64.
        loss: Of (x, weight, labels), with [n, rows] logits inside.

    Returns:
        0-D, in float32 or wider.
    """
    if runs_triton(x):
        return loss(x, weight, labels)
    return _TokenLoss.apply(x, weight, labels, loss)  # type: ignore[no-untyped-call, no-any-return]


def _chunks(tokens: int, rows: int, itemsize: int) -> Iterator[slice]:
    step = max(CHUNK_BYTES // max(rows * itemsize, 1), 1)
    return (slice(at, at + step) for at in range(0, tokens, step))


class _TokenLoss(torch.autograd.Function):
    """The gradients are made in the forward pass, while a chunk's logits are there; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, loss: Loss
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        needed = any(ctx.needs_input_grad[:2])
        total = x.new_zeros((), dtype=wide)
        x_grad = torch.empty_like(x)
        weight_grad = torch.zeros_like(weight, dtype=wide)
        for part in _chunks(len(x), len(weight), wide.itemsize):
            with torch.set_grad_enabled(needed):
                xs, w = (t.detach().requires_grad_(needed) for t in (x[part], weight))
                chunk = loss(xs, w, labels[part])
            total += chunk.detach()
            if needed:
                x_grad[part], grad = torch.autograd.grad(chunk, (xs, w))
                weight_grad += grad
        if needed:
            ctx.save_for_backward(x_grad, weight_grad)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x_grad, weight_grad = ctx.saved_tensors
        need_x, need_weight, *_ = gradmask.needs(ctx)
        return (
            x_grad * grad.to(x_grad.dtype) if need_x else None,
            (weight_grad * grad).to(ctx.dtype) if need_weight else None,
            None,
            None,
        )
