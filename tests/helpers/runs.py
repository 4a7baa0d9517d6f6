"""Runs that save in one place and go on in another, beside one that nobody interrupts."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.ranks import launch
from helpers.trainers import MOE, config, documents

import d9d_ckpt
from d9d_train.build import train
from d9d_train.config import Config

Sections = Mapping[str, Mapping[str, Any]]

BOUND = 1e-10
"""Largest difference of parameters, optimizer state and metrics in float64."""

HALF, STEPS = 3, 6
"""Steps before and after a change of topology, together those of the run that nobody interrupts."""

RUN = {
    "train": {"balance_bias": 0.001},
    # Gradient norms of these models are 0.4 to 0.8: every step is clipped.
    "optim": {"lr": 1e-2, "max_norm": 0.3},
}
"""What all of them have in common: a float64 MoE with everything turned on, clipped."""


def mesh(microbatches: int = 1, **axes: int) -> Sections:
    """Sections of a topology."""
    return {"mesh": axes, "pipeline": {"microbatches": microbatches}}


ALONE = mesh()

PAIRS: Mapping[str, tuple[Sections, Sections]] = {
    "six axes' worth to 4": (
        mesh(2, pp=2, dp_shard=2, tp=2, ep=4),
        mesh(dp_replicate=2, cp=2, ep=2),
    ),
    "8 cp tp to pipeline of 2": (mesh(cp=2, tp=4, ep=8), mesh(4, pp=2)),
    "1 to 8": (ALONE, mesh(dp_replicate=2, dp_shard=2, cp=2, ep=4)),
    "4 to 1": (mesh(2, pp=2, tp=2, ep=2), mesh(2)),
    "8 to 8, dp 8 to dp 2": (mesh(dp_shard=8, ep=8), mesh(2, pp=2, dp_shard=2, tp=2)),
    "8 to 8, hsdp to cp": (mesh(dp_replicate=4, dp_shard=2), mesh(cp=4, tp=2, ep=2)),
    "8 to 4 pipeline stages": (mesh(dp_shard=2, tp=4, ep=2), mesh(8, pp=4)),
    "4 pipeline stages to 8": (mesh(4, pp=4), mesh(2, pp=2, cp=2, tp=2, ep=2)),
    "2 to 8": (mesh(4, dp_shard=2, ep=2), mesh(4, pp=4, dp_shard=2)),
    "8 to 2": (mesh(pp=1, dp_replicate=2, dp_shard=2, tp=2, ep=4), mesh(tp=2)),
    "1 to 2": (mesh(4), mesh(8, dp_replicate=2)),
    "4 to 4, ring": (
        {**mesh(cp=4, ep=4), "context": {"kind": "ring"}},
        {**mesh(dp_shard=2, cp=2, ep=2), "context": {"kind": "ulysses"}},
    ),
}


def merged(*parts: Sections) -> dict[str, dict[str, Any]]:
    """Sections of which later ones win, key by key."""
    out: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, section in part.items():
            out[name] = {**out.get(name, {}), **section}
    return out


@dataclass(frozen=True)
class Place:
    """A directory for one run: its checkpoints and its metrics.

    Attributes:
        folder: The directory.
        model: Of the run.
        data: Directory of its tokens; None for the same.
    """

    folder: Path
    model: Mapping[str, Any] = field(default_factory=lambda: MOE)
    data: Path | None = None

    @property
    def run(self) -> str:
        """URL of the checkpoints."""
        return str(self.folder / "run")

    @property
    def metrics(self) -> Path:
        """What is told of the steps."""
        return self.folder / "metrics.jsonl"

    def config(self, steps: int, *parts: Sections) -> Config:
        """A config that saves every `HALF` steps here."""
        tokens = (self.data or self.folder) / "tokens.bin"
        if not tokens.exists():
            tokens.parent.mkdir(parents=True, exist_ok=True)
            documents(tokens)
        own = {
            "train": {"steps": steps},
            "checkpoint": {"url": self.run, "every": HALF},
            "metrics": {"jsonl": str(self.metrics)},
        }
        return config(str(tokens), self.model, **merged(RUN, own, *parts))

    def train(self, steps: int, *parts: Sections) -> None:
        """Run up to a step on forked ranks."""
        made = self.config(steps, *parts)
        launch(made.topology.world, lambda rank: train(made), timeout=180)

    def lines(self) -> list[dict[str, Any]]:
        """What was told of the steps."""
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]


def differences(one: Place, other: Place) -> dict[str, float]:
    """Of the last checkpoints of two runs, parameters and optimizer state alike: largest first."""
    report = d9d_ckpt.diff(one.run, other.run)
    assert not report.only_in_a
    assert not report.only_in_b
    found = sorted(report.different, key=lambda d: d.max_abs, reverse=True)
    return {different.name: different.max_abs for different in found}


def farthest(one: Place, other: Place) -> float:
    """The largest of the `differences`."""
    return next(iter(differences(one, other).values()), 0.0)


def told_apart(one: Place, other: Place) -> float:
    """The largest relative difference between what two runs told of a step, but for times and ranks."""
    pairs = list(zip(one.lines(), other.lines(), strict=True))
    assert all(a["step"] == b["step"] and a["tokens"] == b["tokens"] for a, b in pairs)
    return max(
        abs(a[key] / b[key] - 1)
        for a, b in pairs
        for key in ("loss", "grad_norm", "lr", "expert_load")
    )


@contextmanager
def warnings_of(package: str) -> Iterator[list[str]]:
    """What a package warns of meanwhile."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(package)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
