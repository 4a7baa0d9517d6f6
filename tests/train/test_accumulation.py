"""Micro-batches of a step: gradients are summed over ranks once, however many there are."""

from contextlib import ExitStack

import pytest
import torch.distributed as dist
from helpers.ranks import launch
from helpers.trainers import config, documents

from d9d_train.build import built
from d9d_train.config import model_config
from d9d_train.mesh import mesh_of
from d9d_train.telemetry import Progress

COUNTED = ("reduce_scatter", "all_gather_into", "all_gather_single", "all_to_all")


def calls(made, rank):
    """Collectives of FSDP and of experts that one step begins on this rank, by kind."""
    mesh = mesh_of(made.topology, "cpu")
    with ExitStack() as stack:
        run = built(made, model_config(made.model), mesh, Progress(), stack)
        counts = dict.fromkeys(COUNTED, 0)
        for name in [n for n in vars(dist) if n.startswith(COUNTED)]:
            setattr(dist, name, counting(getattr(dist, name), counts))
        work = next(run.loader)
        run.stepper.step(1, work.batches, work.counted, 0.01, lambda loss, norm: True)
    return counts


def counting(function, counts):
    kind = next(kind for kind in COUNTED if function.__name__.startswith(kind))

    def counted(*args, **kwargs):
        counts[kind] += 1
        return function(*args, **kwargs)

    return counted


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}])
def test_gradients_are_reduced_and_parameters_gathered_once_a_step(tmp_path, mesh):
    tokens = documents(tmp_path / "tokens")
    found = {}
    for count in (1, 2, 4):
        made = config(
            tokens,
            mesh=mesh,
            pipeline={"microbatches": count},
            train={"reshard_after_forward": False},
        )
        found[count] = launch(4, lambda rank, made=made: calls(made, rank))[0]
    units = 4 + 4 + 1  # layers, their experts, the ends
    assert found[1]["reduce_scatter"] == units
    assert sum(found[1].values()) >= 2 * units
    assert found[1] == found[2] == found[4]
