"""Whole runs on forked ranks, and what they compute beside what one process does."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.ranks import launch

from d9d_ckpt.layout.placement import Cut, held
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.models.family import placements_of
from d9d_ckpt.models.registry import family_of
from d9d_train.build import built
from d9d_train.config import Config, model_config
from d9d_train.mesh import mesh_of
from d9d_train.optim.shards import shard
from d9d_train.parallel.stages import saved_tensors
from d9d_train.telemetry import Progress
from d9d_train.trainer import Run
from d9d_train.typed import read

SEQ_LEN, BATCH, VOCAB, EOS = 32, 16, 61, 0
"""A vocabulary that no tp divides; sequences that every order cuts; sixteen of them a step."""

STEPS = 2
"""The second sees biases that are not zero, moments, a routers' bias, and ranks without a label."""

MAX_NORM = 0.5
"""Below the norm of every model here, so that clipping counts."""

BOUND = 1e-11
"""What float64 may differ by, relative to a tensor's largest element."""

MOE = {
    "family": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "norm_topk_prob": True,
    "max_position_embeddings": SEQ_LEN,
}

DENSE = {
    "family": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "max_position_embeddings": SEQ_LEN,
}


def documents(path: Path) -> str:
    """Two steps of documents of some twenty tokens each; a mask, ``path`` + ``.mask``, is beside them.

    It leaves the second half of the second step, which is the share of the last dp ranks, without a
    single label.
    """
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, VOCAB, STEPS * BATCH * SEQ_LEN + 1)
    tokens[draw.random(len(tokens)) < 1 / 20] = EOS
    tokens.astype("<u2").tofile(path)
    predicted = np.arange(len(tokens)) <= (STEPS * BATCH - BATCH // 2) * SEQ_LEN
    predicted.astype("u1").tofile(f"{path}.mask")
    return str(path)


def config(tokens: str, model: Mapping[str, Any] = MOE, **sections: Mapping[str, Any]) -> Config:
    """A small float64 run on packed documents, with all that adds to a gradient turned on."""
    values: dict[str, Any] = {
        "model": dict(model),
        "train": {
            "steps": 6,
            "global_batch": BATCH,
            "seq_len": SEQ_LEN,
            "dtype": "float64",
            "dropout": 0.1,
            "balance_loss": 0.01,
            "balance_bias": 0.001,
        },
        # Adam's first update is g / (|g| + eps): a smaller eps would make a last bit of g a large one.
        "optim": {"lr": 0.01, "eps": 1e-3, "max_norm": MAX_NORM},
        "data": {
            "kind": "tokens",
            "tokens": {
                "files": [tokens],
                "masks": [f"{tokens}.mask"],
                "eos": EOS,
                "shuffle": False,
            },
        },
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return read(Config, values, "")


@dataclass(frozen=True)
class Taken:
    """What a rank has before a step is applied.

    Attributes:
        loss: Over all ranks.
        norm: Of the gradients on all ranks.
        gradients: This rank's shards.
    """

    loss: float
    norm: float
    gradients: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Trained:
    """A rank's steps, and its shards of parameters and saved buffers after them."""

    steps: tuple[Taken, ...]
    values: Mapping[str, np.ndarray]


def trained(made: Config, rank: int) -> Trained:
    """Some steps on this rank, by the code that trains."""
    mesh = mesh_of(made.topology, "cpu")
    with ExitStack() as stack:
        run = built(made, model_config(made.model), mesh, Progress(), stack)
        for stage in run.stages.values():
            stage.train()
        steps = tuple(_step(run, number) for number in range(1, STEPS + 1))
        return Trained(steps, {n: _copied(t) for n, t in saved_tensors(run.stages).items()})


def _step(run: Run, number: int) -> Taken:
    work = next(run.loader)
    seen = []

    def judge(loss: float, norm: float) -> bool:
        parameters = run.stepper.optimizer.parameters
        seen.append(Taken(loss, norm, {n: _copied(p.grad) for n, p in parameters.items()}))
        return True

    run.stepper.step(number, work.batches, work.counted, run.config.optim.lr, judge)
    return seen[0]


def _copied(tensor: torch.Tensor | None) -> np.ndarray:
    assert tensor is not None
    return shard(tensor).numpy().copy()


@dataclass(frozen=True)
class Difference:
    """How far a topology is from one process: the most over steps, ranks and tensors.

    Attributes:
        loss: Relative.
        norm: Of all gradients; relative.
        gradient: Relative to the largest element of its tensor.
        value: Of a parameter or a saved buffer after all steps; relative likewise.
        where: The tensor that is furthest off.
    """

    loss: float
    norm: float
    gradient: float
    value: float
    where: str

    @property
    def worst(self) -> float:
        """The largest of them; NaN if any is."""
        return float(np.max([self.loss, self.norm, self.gradient, self.value]))


def alone(made: Config) -> Trained:
    """What one process computes."""
    return launch(1, lambda rank: trained(made, rank))[0]


def spread(made: Config, timeout: float = 120.0) -> list[Trained]:
    """What every rank of a topology computes."""
    return launch(made.topology.world, lambda rank: trained(made, rank), timeout=timeout)


def spread_all(many: Sequence[Config], timeout: float = 600.0) -> list[list[Trained]]:
    """What every rank computes of each of several runs of one world, one after the other in one launch."""
    world = many[0].topology.world
    ranks = launch(world, lambda rank: [trained(made, rank) for made in many], timeout=timeout)
    return [list(run) for run in zip(*ranks, strict=True)]


def difference(made: Config, whole: Trained, ranks: list[Trained]) -> Difference:
    """Every rank's shards beside their places in the whole.

    Args:
        made: The run of the ranks.
        whole: What `alone` gave for the same model.
        ranks: What `spread` gave.
    """
    gradients = {}
    for number, expected in enumerate(whole.steps):
        found = [rank.steps[number].gradients for rank in ranks]
        for name, far in _tensors(made, expected.gradients, found):
            gradients[f"{name}.grad, step {number + 1}"] = far
    values = dict(_tensors(made, whole.values, [rank.values for rank in ranks]))
    every = gradients | values
    return Difference(
        loss=_scalars(whole, ranks, "loss"),
        norm=_scalars(whole, ranks, "norm"),
        gradient=float(np.max(list(gradients.values()))),
        value=float(np.max(list(values.values()))),
        where=max(every, key=lambda name: np.nan_to_num(every[name], nan=np.inf)),
    )


def _scalars(whole: Trained, ranks: list[Trained], name: str) -> float:
    """The largest relative difference of a loss or norm; of NaN, NaN."""
    expected = np.array([getattr(step, name) for step in whole.steps])
    found = np.array([[getattr(step, name) for step in rank.steps] for rank in ranks])
    return float(np.abs(found / expected - 1).max())


def _tensors(
    made: Config, whole: Mapping[str, np.ndarray], ranks: list[Mapping[str, np.ndarray]]
) -> Iterator[tuple[str, float]]:
    """Each tensor's difference, over the largest element; where all is zero, zero or infinite."""
    assert {name for rank in ranks for name in rank} == set(whole)
    topology, raw = made.topology, model_config(made.model)
    family = family_of(raw)
    placed = placements_of(family, family.config(raw))
    for name, expected in whole.items():
        cut = placed[name].cut if name in placed else Cut(rows=False)  # a buffer is everywhere
        far = np.max(
            [
                _farthest(held_here[name], expected, cut, topology, rank)
                for rank, held_here in enumerate(ranks)
                if name in held_here
            ]
        )
        scale = np.abs(expected).max()
        if scale:
            yield name, float(far / scale)
        else:
            yield name, 0.0 if far == 0 else np.inf


def _farthest(
    local: np.ndarray, whole: np.ndarray, cut: Cut, topology: Topology, rank: int
) -> float:
    """The largest difference between a shard and its part of the whole; padding has to be zero."""
    boxes = held(whole.shape, cut, topology)[rank % (topology.fsdp * topology.tp)]
    parts = [whole[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] for box in boxes]
    expected = np.concatenate(parts) if parts else local[:0]
    rows = len(expected)
    far = np.abs(local[:rows] - expected).max(initial=0.0)
    return float(np.max([far, np.abs(local[rows:]).max(initial=0.0)]))
