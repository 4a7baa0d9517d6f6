"""Mixture of experts: a top-k softmax router, experts by grouped products, and two ways to balance."""

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from d9d_kernels import grouped_mm, moe_permute, moe_route, moe_unpermute, swiglu
from d9d_kernels.types import Route
from d9d_train.collectives import all_reduce, shared_sum
from d9d_train.layers.recompute import recomputing
from d9d_train.layers.weights import local
from d9d_train.mesh import Axis


class Exchange(Protocol):
    """Rows to the ranks that hold their experts, and back."""

    def there(
        self, rows: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Send rows.

        Args:
            rows: [R, H], by expert.
            counts: [E] int64, rows of each of all experts.

        Returns:
            Rows for the local experts, by expert; how many each has, [E_local] int64; and a ticket for
            the way back.
        """

    def back(self, rows: torch.Tensor, ticket: Any) -> torch.Tensor:
        """[R, H], in the order in which they were sent."""


class Router(nn.Module):
    """Chooses k of E experts for each token, by a softmax over all.

    Args:
        hidden: Width of a token.
        experts: How many there are.
        chosen: How many a token gets.
        normalize: Whether the probabilities of a token's experts are divided by their sum.
        biased: Whether choices, and they alone, see a bias that balances loads without a loss.

    Attributes:
        weight: [E, H].
        bias: [E] float32, a saved buffer; None without bias balancing.
    """

    bias: torch.Tensor | None

    def __init__(
        self, hidden: int, experts: int, chosen: int, *, normalize: bool, biased: bool = False
    ) -> None:
        super().__init__()
        self.experts, self.chosen, self.normalize = experts, chosen, normalize
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        bias = torch.empty(experts, dtype=torch.float32) if biased else None
        self.register_buffer("bias", bias)

    def forward(
        self, x: torch.Tensor, replay: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Route tokens.

        Args:
            x: [N, H].
            replay: [N, k] int64: choices to take in place of the router's own.

        Returns:
            Probabilities of the choices [N, k], in float32 or wider; the choices [N, k] int64; all
            scores [N, E].
        """
        logits = functional.linear(x, local(self.weight))
        scores = logits.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        experts = self._choice(scores.detach()) if replay is None else replay
        probs = scores.gather(-1, experts)
        if self.normalize:
            probs = probs / probs.sum(-1, keepdim=True)
        return probs, experts, scores

    def _choice(self, scores: torch.Tensor) -> torch.Tensor:
        ranked = scores if self.bias is None else scores + self.bias
        return ranked.topk(self.chosen, dim=-1).indices

    @torch.no_grad()
    def rebalance(self, counts: torch.Tensor, rate: float) -> None:
        """Move the bias towards experts that had less than the mean (DeepSeek-V3, section 2.1.2).

        Args:
            counts: [E], tokens of each expert in the whole step, over all ranks.
            rate: By how much.
        """
        assert self.bias is not None  # noqa: S101 - for the type checker
        load = counts.to(torch.float64)
        self.bias += rate * (load.mean() - load).sign().to(self.bias.dtype)


class Grouped(nn.Module):
    """A weight matrix for each expert: [E, out, in]."""

    def __init__(self, experts: int, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outer, inner))

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[R, out] from [R, in] and where the rows of each local expert end, [E_local] int32."""
        return grouped_mm(rows, local(self.weight), ends)


class Experts(nn.Module):
    """SwiGLU of each expert; rows of ``gate_up_proj`` go in pairs (g0 u0 g1 u1 ...)."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = Grouped(experts, hidden, 2 * width)
        self.down_proj = Grouped(experts, width, hidden)

    def forward(
        self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What each row's expert makes of it.

        Args:
            rows: [R, H], sorted by expert.
            counts: [E_local] int64, rows of each; rows past these come out as zero.
            weights: [R], factors of the results; None for 1.

        Returns:
            [R, H].
        """
        ends = counts.cumsum(0).int()
        hidden = swiglu(self.gate_up_proj(rows, ends), probs=weights)
        out: torch.Tensor = self.down_proj(hidden, ends)
        return out


class MoE(nn.Module):
    """The sparse feed-forward part of a layer.

    Args:
        router: The router.
        experts: Experts, as many as it knows.

    Attributes:
        counts: [E] int64: tokens that this rank sent to each expert since this was last set to None, in
            training passes, each counted once whatever is recomputed; a buffer that is not saved.
        balance: Seam of the loop: weight of the balance loss of one sequence, which is the loss's
            coefficient over the sequences of the global batch.
        exchange: Seam of expert parallelism; None: all experts are here.
        reduce_axes: Seam of cp and tp: the axes over which the tokens of a sequence are cut.
        replay: Seam of tests: [B * S, k] int64, the choices to take.
    """

    counts: torch.Tensor | None

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        # None rather than zeros: what a model on the meta device is given memory for is not set.
        self.register_buffer("counts", None, persistent=False)
        self.balance = 0.0
        self.exchange: Exchange | None = None
        self.reduce_axes: tuple[Axis, ...] = ()
        self.replay: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H] from the same, with the gradient of the balance loss attached."""
        flat = x.flatten(0, 1)
        probs, choices, scores = self.router(flat, self.replay)
        route = moe_route(choices, self.router.experts)
        y = self._computed(flat, route, probs).view_as(x)
        if not torch.is_grad_enabled():
            return y
        if not recomputing():
            counts = route.counts.long()
            self.counts = counts if self.counts is None else self.counts + counts
        if not self.balance:
            return y
        choices, scores = (part.unflatten(0, x.shape[:2]) for part in (choices, scores))
        return attach(y, self.balance * balance_loss(choices, scores, self.reduce_axes))

    def _computed(self, x: torch.Tensor, route: Route, probs: torch.Tensor) -> torch.Tensor:
        """What a token's experts make of it, weighted and summed, wherever they are: [N, H]."""
        counts = route.counts.long()
        if self.exchange is None:
            # Weighted before the last product, whose output need not be kept then.
            rows, weights = moe_permute(x, route, probs)
            return moe_unpermute(self.experts(rows, counts, weights), route)
        rows, _ = moe_permute(x, route)
        sent, received, ticket = self.exchange.there(rows, counts)
        rows = self.exchange.back(self.experts(sent, received), ticket)
        return moe_unpermute(rows, route, probs)


def balance_loss(
    choices: torch.Tensor, scores: torch.Tensor, axes: tuple[Axis, ...] = ()
) -> torch.Tensor:
    """How unevenly each sequence loads the experts, summed over sequences.

    For a sequence of T tokens, E experts of which each token gets k, and c_e tokens sent to expert e,
    it is ``E / (k T) * sum_e c_e * mean_t score[t, e]``: 1 when loads or scores are even. This is the
    sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20, without alpha; softmax
    scores need no division by their sum), and that of the Switch Transformer (arXiv 2101.03961,
    equations 4 to 6, as ``load_balancing_loss_func`` of transformers has it) of one sequence over k.
    Counts are constants; the gradient comes through the scores.

    Args:
        choices: [B, S, k] int64.
        scores: [B, S, E].
        axes: Those over which the tokens of a sequence are cut; ranks along them return the same, and
            each has the gradient of its own tokens' scores.
    """
    experts, chosen = scores.shape[-1], choices.shape[-1]
    flat = choices.flatten(1)
    ones = scores.new_ones(()).expand_as(flat)
    counts = scores.new_zeros((len(flat), experts)).scatter_add_(1, flat, ones)
    totals, tokens = scores.sum(1), scores.shape[1]
    for axis in axes:
        counts, totals = all_reduce(counts, axis), shared_sum(totals, axis)
        tokens *= axis.size
    return (counts * totals).sum() * (experts / (chosen * tokens * tokens))


def attach(y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """``y`` as it is, through whose backward pass ``loss`` gets the gradient 1.

    So a loss that arises inside a layer needs no way out of it, at any stage of a pipeline.
    """
    return _Attach.apply(y, loss)  # type: ignore[no-untyped-call, no-any-return]


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.one = torch.ones_like(loss)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, ctx.one
