"""A run that goes on elsewhere is the run that was never interrupted: state, metrics and data."""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.ranks import launch
from helpers.runs import (
    ALONE,
    BOUND,
    HALF,
    PAIRS,
    STEPS,
    Place,
    Sections,
    farthest,
    mesh,
    told_apart,
)
from helpers.trainers import BATCH, DENSE

from d9d_train.build import built
from d9d_train.config import Config, model_config
from d9d_train.mesh import mesh_of
from d9d_train.telemetry import Progress

pytestmark = pytest.mark.ranks

SOME = ("six axes' worth to 4", "8 cp tp to pipeline of 2", "1 to 8", "4 to 1")
"""All twelve: ``python tools/train_drill.py --pairs``."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Six steps of one process."""
    place = Place(tmp_path_factory.mktemp("whole"))
    place.train(STEPS, ALONE)
    return place


@pytest.mark.parametrize("name", SOME)
def test_a_run_resumes_on_another_topology(name: str, whole: Place, tmp_path: Path):
    first, second = PAIRS[name]
    place = Place(tmp_path)
    place.train(HALF, first)
    place.train(STEPS, second)
    assert farthest(whole, place) < BOUND
    assert told_apart(whole, place) < BOUND


def test_every_step_is_clipped(whole: Place):
    assert min(line["grad_norm"] for line in whole.lines()) > 0.3


def test_a_tied_model_leaves_and_enters_a_pipeline(tmp_path: Path):
    model = DENSE | {"tie_word_embeddings": True}
    dense = {"train": {"balance_bias": 0.0, "balance_loss": 0.0}}
    whole, place = Place(tmp_path / "whole", model), Place(tmp_path / "parts", model)
    whole.train(STEPS, dense)
    place.train(2, dense, {"checkpoint": {"every": 2}}, mesh(2, pp=2, tp=2))
    place.train(4, dense, {"checkpoint": {"every": 2}}, mesh(dp_shard=2))
    place.train(STEPS, dense, mesh(4, pp=4))
    assert farthest(whole, place) < BOUND


@pytest.mark.parametrize("where", [ALONE, mesh(2, pp=2, dp_shard=2, ep=2)], ids=["1", "4"])
def test_the_same_topology_resumes_to_the_bit(where: Sections, tmp_path: Path):
    same = {"train": {"dtype": "float32", "deterministic": True}}
    whole, place = Place(tmp_path / "whole"), Place(tmp_path / "parts")
    whole.train(STEPS, where, same)
    place.train(HALF, where, same)
    place.train(STEPS, where, same)
    assert farthest(whole, place) == 0
    assert told_apart(whole, place) == 0


@pytest.mark.parametrize(
    "where", [mesh(), mesh(4, dp_replicate=2), mesh(2, dp_shard=2, cp=2)], ids=["1", "2", "2 x cp"]
)
def test_a_resume_goes_on_with_the_next_global_sample(where: Sections, before: Place):
    made = before.config(HALF + 2, where)
    seen = launch(made.topology.world, lambda rank: samples(made, 2))
    copies = len(seen) // made.mesh.readers
    for step in range(2):
        first = (HALF + step) * BATCH
        taken = Counter(number for rank in seen for number in rank[step])
        assert taken == dict.fromkeys(range(first, first + BATCH), copies)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Three steps of four readers."""
    place = Place(tmp_path_factory.mktemp("before"))
    place.train(HALF, mesh(2, dp_shard=4))
    return place


def samples(made: Config, steps: int) -> list[list[int]]:
    """Numbers of the samples that this rank gets in the next steps of a run."""
    with ExitStack() as stack:
        mesh = mesh_of(made.topology, "cpu")
        run = built(made, model_config(made.model), mesh, Progress(), stack)
        return [
            [int(n) for batch in next(run.loader).batches for n in batch.samples]
            for _ in range(steps)
        ]
