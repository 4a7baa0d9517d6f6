"""Loss, norm and every gradient on all axes are those of one process; tools/parity.py runs the rest."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from helpers.axes import FEW, SIX, config_of, schedules
from helpers.trainers import (
    BOUND,
    MAX_NORM,
    Trained,
    alone,
    difference,
    documents,
    spread,
    spread_all,
)

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> str:
    return documents(tmp_path_factory.mktemp("data") / "tokens.bin")


@pytest.fixture(scope="module")
def whole(tokens) -> Callable[[str], Trained]:
    """What one process computes with a model, once for all topologies."""
    return cache(lambda model: alone(config_of(model, tokens)))


@pytest.mark.parametrize("line", [*FEW, SIX[0]])
def test_a_topology_computes_what_one_process_does(line, tokens, whole):
    made = config_of(line, tokens)
    found = difference(made, whole(line.split()[0]), spread(made))
    assert found.worst <= BOUND, found


@pytest.mark.parametrize(
    ("line", "microbatches"),
    [("moe-8 pp=2 dp_shard=2 ep=2", (4,)), ("tied-8 pp=4", (8,)), ("moe-8 pp=2 tp=2", (2, 16))],
)
def test_every_schedule_computes_what_one_process_does(line, microbatches, tokens, whole):
    lines = schedules(line, microbatches)
    assert len({word for line in lines for word in line.split() if "schedule" in word}) == 7
    many = [config_of(line, tokens) for line in lines]
    for name, made, ranks in zip(lines, many, spread_all(many), strict=True):
        found = difference(made, whole(line.split()[0]), ranks)
        assert found.worst <= BOUND, (name, found)


@pytest.mark.parametrize("model", ["moe", "llama"])
def test_the_reference_clips_and_moves_every_parameter(model, whole):
    """Else a fault could hide behind a zero."""
    found = whole(model)
    assert min(step.norm for step in found.steps) > MAX_NORM
    for step in found.steps:
        assert [name for name, grad in step.gradients.items() if not grad.any()] == []
    still = [name for name, value in found.values.items() if np.all(value == value.flat[0])]
    assert still == []
