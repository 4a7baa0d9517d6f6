"""One optimizer step over all ranks: forward and backward of every micro-batch, clip, update."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from d9d_ckpt.models.family import EMBEDDING
from d9d_train.batch import Batch
from d9d_train.layers.dropout import set_step
from d9d_train.layers.moe import MoE
from d9d_train.mesh import Mesh
from d9d_train.models.decoder import CausalLM
from d9d_train.optim.adamw import AdamW
from d9d_train.optim.clip import clip_, replicas, total_norm
from d9d_train.parallel.pipeline.run import Executor
from d9d_train.parallel.stages import follow_tied, sum_tied

Judge = Callable[[float, float], bool]
"""(loss, gradient norm) -> whether the step is good to be applied."""


@dataclass(frozen=True)
class Outcome:
    """What a step came to.

    Attributes:
        loss: Mean over the labels that count, of the language model alone.
        grad_norm: Before clipping.
        tokens: Labels that counted, over all ranks.
        applied: Whether parameters were updated.
        expert_load: Tokens of the busiest expert over the mean, in the layer where that is largest; 0
            for dense models.
    """

    loss: float
    grad_norm: float
    tokens: int
    applied: bool
    expert_load: float


@dataclass(frozen=True)
class Stepper:
    """Takes optimizer steps.

    Attributes:
        stages: This rank's stages, by index.
        executor: Runs their forward and backward passes.
        optimizer: Updates their parameters.
        mesh: This rank's.
        max_norm: Gradients of a larger norm are scaled down to it.
        balance_rate: Step of the routers' selection bias.
        before_update: Called before anything that a snapshot may be reading is written to.
    """

    stages: Mapping[int, CausalLM]
    executor: Executor
    optimizer: AdamW
    mesh: Mesh
    max_norm: float
    balance_rate: float
    before_update: Callable[[], None]

    def step(
        self, number: int, batches: Sequence[Batch], counted: int, lr: float, judge: Judge
    ) -> Outcome:
        """Take one.

        The host waits for the device once, to know whether loss and norm are good.

        Args:
            number: Of the step, which keys dropout.
            batches: Micro-batches of this rank.
            counted: Labels that count in the whole sequences of this rank's dp share.
            lr: Rate of this step.
            judge: Whether what it came to may be applied.
        """
        for stage in self.stages.values():
            set_step(stage, number)
        tokens = self.tokens(counted)
        loss = self.gradients(batches, 1 / tokens.clamp(min=1))
        norm = self.norm()
        loads = self._loads()
        told = torch.stack([loss, norm, tokens.double(), self._worst(loads)]).tolist()
        loss_now, norm_now, count, load = told
        applied = judge(loss_now, norm_now)
        if applied:
            self.before_update()
            if math.isfinite(self.max_norm):
                clip_(self._grads(), norm, self.max_norm)
            self.optimizer.step(lr)
            follow_tied(self.stages)
            self._rebalance(loads)
        self.clear()
        return Outcome(loss_now, norm_now, int(count), applied, load)

    def gradients(self, batches: Sequence[Batch], scale: torch.Tensor) -> torch.Tensor:
        """Gradients of ``scale`` times the loss sum over all ranks, in every parameter's ``grad``.

        Returns:
            0-D float64: that loss, on every rank.
        """
        sums = self.executor.step(batches, scale)
        total = self._zero() + sum(sums) * scale
        sum_tied(self.stages, self.mesh)
        # Over the world, for the same bits everywhere: ranks judge a step by it. Along tp all have the same.
        total /= self.mesh.topology.tp
        dist.all_reduce(total)
        return total

    def norm(self) -> torch.Tensor:
        """The norm of all gradients on all ranks, float64."""
        copies = [
            0 if self._second(name) else replicas(p, self.mesh.topology.stage_ranks)
            for name, p in self.optimizer.parameters.items()
        ]
        return total_norm(self._grads(), copies, self.mesh.torch_device)

    def clear(self) -> None:
        """Forget gradients and counts."""
        for parameter in self.optimizer.parameters.values():
            parameter.grad = None
        for moe in self._sparse():
            moe.counts = None

    def tokens(self, counted: int) -> torch.Tensor:
        """Labels that count in the global batch, 0-D int64."""
        tokens = torch.full((), counted, device=self.mesh.torch_device)
        dist.all_reduce(tokens, group=self.mesh.axis("dp").group)
        return tokens

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.mesh.torch_device)

    def _second(self, name: str) -> bool:
        """Whether a parameter is a copy of one on another pipeline rank: the head of a tied model."""
        return name == EMBEDDING and all(s.model.embed_tokens is None for s in self.stages.values())

    def _grads(self) -> list[torch.Tensor]:
        parameters = self.optimizer.parameters.items()
        missing = [name for name, p in parameters if p.grad is None]
        if missing:
            raise RuntimeError(f"{missing[0]}: has no gradient; it took no part in the loss")
        return [p.grad for _, p in parameters if p.grad is not None]

    def _sparse(self) -> list[MoE]:
        return [m for stage in self.stages.values() for m in stage.modules() if isinstance(m, MoE)]

    def _loads(self) -> torch.Tensor | None:
        """[sparse layers of this pipeline rank, E] int64: tokens of each expert on all ranks."""
        counts = [moe.counts for moe in self._sparse() if moe.counts is not None]
        if not counts:
            return None
        loads = torch.stack(counts)
        for name in ("dp", "cp", "tp"):
            dist.all_reduce(loads, group=self.mesh.axis(name).group)
        return loads

    def _worst(self, loads: torch.Tensor | None) -> torch.Tensor:
        """Busiest expert over mean in the worst layer of all, 0-D float64."""
        worst = self._zero() if loads is None else expert_load(loads)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.mesh.axis("pp").group)
        return worst

    def _rebalance(self, loads: torch.Tensor | None) -> None:
        if loads is None or not self.balance_rate:
            return
        for moe, load in zip(self._sparse(), loads, strict=True):
            moe.router.rebalance(load, self.balance_rate)


def expert_load(counts: torch.Tensor) -> torch.Tensor:
    """Tokens of the busiest expert over the mean, of the layer where it is largest; 1 is balance.

    Args:
        counts: [layers, E], tokens that went to each.

    Returns:
        0-D float64.
    """
    mean = counts.to(torch.float64).mean(-1).clamp(min=1e-9)
    return (counts.amax(-1) / mean).max()
