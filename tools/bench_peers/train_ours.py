"""Our trainer in the benchmark, configured as a user would."""

from contextlib import ExitStack

import torch

from bench_peers.train_case import (
    BETAS,
    LR,
    MAX_NORM,
    SEED,
    WEIGHT_DECAY,
    Case,
    Trainee,
    random_tokens,
)
from d9d_train.batch import Batch
from d9d_train.build import built
from d9d_train.config import Config, TrainConfig
from d9d_train.launch import started
from d9d_train.mesh import mesh_of
from d9d_train.optim.lr import OptimConfig
from d9d_train.optim.shards import shard
from d9d_train.telemetry import Progress

_open = ExitStack()
"""What ends with the process."""


def prepare(case: Case) -> Trainee:
    """A run on one GPU, which stays open until the process ends."""
    config = _config(case)
    device = _open.enter_context(started(deterministic=False))
    mesh = mesh_of(config.topology, device)
    run = built(config, case.config, mesh, Progress(), _open)
    stepper, batches = run.stepper, [_batch(tokens) for tokens in random_tokens(case, device)]
    counted, taken = case.sequences * case.length, 0

    def step() -> float:
        nonlocal taken
        taken += 1
        batch = batches[taken % len(batches)]
        return stepper.step(taken, [batch], counted, LR, lambda loss, norm: True).loss

    parameters = sum(shard(p).numel() for p in stepper.optimizer.parameters.values())
    return Trainee(step, parameters)


def _config(case: Case) -> Config:
    sizes = {k: v for k, v in case.config.items() if k != "model_type"}
    return Config(
        model={"family": case.config["model_type"], **sizes},
        train=TrainConfig(
            steps=1000,
            global_batch=case.sequences,
            seq_len=case.length,
            dtype="bfloat16",
            seed=SEED,
            compile=case.compiled and not case.dry,
            reshard_after_forward=False,
        ),
        optim=OptimConfig(lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM),
    )


def _batch(tokens: torch.Tensor) -> Batch:
    """One document a sequence; a label is the token after."""
    sequences, length = tokens.shape[0], tokens.shape[1] - 1
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        index=torch.arange(length, device=tokens.device),
        starts=torch.zeros(sequences, length, dtype=torch.int64, device=tokens.device),
        samples=torch.arange(sequences, device=tokens.device),
        packed=False,
    )
