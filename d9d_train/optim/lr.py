"""The learning rate of a step, and the settings of the optimizer."""

import math
from dataclasses import dataclass
from typing import Literal

from d9d_ckpt.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, clipping, and the schedule of the learning rate.

    Attributes:
        lr: The rate that warm-up leads to.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled, times the rate; of matrices alone.
        decay_embeddings: Whether the embedding, and a head tied to it, is one of these.
        max_norm: Gradients of a larger norm are scaled down to it; ``inf`` for never.
        schedule: ``constant``, ``wsd`` (stable, then decay at the end) or ``cosine``.
        warmup_steps: Steps over which the rate rises in equal parts, the last of them at ``lr``.
        total_steps: Where the decay ends; None for the last step of training.
        decay_fraction: The part of ``total_steps`` over which ``wsd`` decays.
        decay: How ``wsd`` decays: ``linear``, or ``1-sqrt``, which falls fast and levels off.
        min_factor: The part of ``lr`` that decay leads to.

    Raises:
        UsageError: A number out of its range, or a warm-up and decay longer than ``total_steps``.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_embeddings: bool = True
    max_norm: float = 1.0
    schedule: Literal["constant", "wsd", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    decay_fraction: float = 0.1
    decay: Literal["linear", "1-sqrt"] = "linear"
    min_factor: float = 0.0

    def __post_init__(self) -> None:
        _check("lr", self.lr, 0 <= self.lr < math.inf, "at least 0, and finite")
        for beta in self.betas:
            _check("betas", beta, 0 <= beta < 1, "at least 0, below 1")
        _check("eps", self.eps, 0 < self.eps < math.inf, "above 0, and finite")
        decays = 0 <= self.weight_decay < math.inf
        _check("weight_decay", self.weight_decay, decays, "at least 0, and finite")
        _check("max_norm", self.max_norm, self.max_norm > 0, "above 0; inf does not clip")
        _check("warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "at least 0")
        part = 0 < self.decay_fraction <= 1
        _check("decay_fraction", self.decay_fraction, part, "above 0, at most 1")
        _check("min_factor", self.min_factor, 0 <= self.min_factor <= 1, "from 0 to 1")
        if self.total_steps is not None:
            _check("total_steps", self.total_steps, self.total_steps >= 1, "at least 1")
            self._check_length(self.total_steps)

    def _check_length(self, total: int) -> None:
        """Warm-up and decay fit into ``total`` steps; without a decay there is no end to fit."""
        decay = decay_steps(self, total) if self.schedule == "wsd" else 0
        if self.schedule != "constant" and self.warmup_steps + decay > total:
            raise UsageError(
                f"optim: warmup_steps {self.warmup_steps} and {decay} steps of decay are more than "
                f"total_steps {total}"
            )


def _check(key: str, value: float, good: bool, rule: str) -> None:
    if not good:
        raise UsageError(f"optim.{key}: {value} must be {rule}")


def decay_steps(config: OptimConfig, total: int) -> int:
    """Steps at the end of ``total`` over which ``wsd`` decays, at least one."""
    return max(1, round(config.decay_fraction * total))


def learning_rate(config: OptimConfig, step: int) -> float:
    """The rate of a step.

    A decay over n steps takes the first of them at the full rate, and would reach its floor in the
    step after the last, so that no step is spent at a rate of zero.

    Args:
        config: Settings.
        step: Number of the step, from 1.

    Raises:
        UsageError: A schedule that ends, without ``total_steps``.
    """
    return config.lr * factor(config, step)


def factor(config: OptimConfig, step: int) -> float:
    """The part of ``lr`` that a step takes, from 0 to 1; arguments as for `learning_rate`."""
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.total_steps is None:
        raise UsageError(f"optim.total_steps: {config.schedule} needs the step at which it ends")
    left = _left(config, step - 1, config.total_steps)
    return config.min_factor + (1 - config.min_factor) * left


def _left(config: OptimConfig, done: int, total: int) -> float:
    """What is left of the way from the full rate, 1, to the floor, 0, after so many steps."""
    cosine = config.schedule == "cosine"
    start = config.warmup_steps if cosine else total - decay_steps(config, total)
    if done >= total:
        return 0.0
    if done <= start:
        return 1.0
    gone = (done - start) / (total - start)
    if cosine:
        return (1 + math.cos(math.pi * gone)) / 2
    return 1 - (math.sqrt(gone) if config.decay == "1-sqrt" else gone)
