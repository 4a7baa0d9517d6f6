"""Schedules, by values worked out by hand, and settings that are refused."""

import math
from typing import Any

import pytest

from d9d_ckpt.errors import UsageError
from d9d_train.optim.lr import OptimConfig, decay_steps, factor, learning_rate


def factors(steps: int, **settings: Any) -> list[float]:
    config = OptimConfig(**settings)
    return [factor(config, step) for step in range(1, steps + 1)]


def test_constant_is_the_default_without_warm_up() -> None:
    assert factors(3) == [1, 1, 1]
    assert learning_rate(OptimConfig(lr=0.25), 1000) == 0.25


def test_warm_up_rises_in_equal_parts_and_is_over_with_its_last_step() -> None:
    assert factors(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert learning_rate(OptimConfig(lr=0.5, warmup_steps=4), 1) == 0.125


def test_wsd_is_stable_then_falls_in_equal_parts() -> None:
    found = factors(9, schedule="wsd", warmup_steps=2, total_steps=8, decay_fraction=0.5)
    assert found == [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]


def test_wsd_ends_at_its_floor() -> None:
    settings = {"schedule": "wsd", "total_steps": 4, "decay_fraction": 0.5, "min_factor": 0.2}
    assert factors(6, **settings) == pytest.approx([1, 1, 1, 0.6, 0.2, 0.2], abs=1e-15)


def test_wsd_by_the_root_falls_fast_and_levels_off() -> None:
    settings = {"schedule": "wsd", "total_steps": 4, "decay_fraction": 1.0, "decay": "1-sqrt"}
    expected = [1, 1 - math.sqrt(0.25), 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0]
    assert factors(5, **settings) == pytest.approx(expected, abs=1e-15)


def test_cosine_is_half_way_down_in_the_middle() -> None:
    found = factors(8, schedule="cosine", warmup_steps=2, total_steps=6, min_factor=0.1)
    high, low = (0.1 + 0.9 * (1 + sign * math.sqrt(0.5)) / 2 for sign in (1, -1))
    assert found == pytest.approx([0.5, 1, 1, high, 0.55, low, 0.1, 0.1][:8], abs=1e-15)


def test_warm_up_may_fill_all_steps() -> None:
    assert factors(3, schedule="cosine", warmup_steps=2, total_steps=2) == [0.5, 1, 0]


def test_a_decay_has_at_least_one_step() -> None:
    config = OptimConfig(schedule="wsd", total_steps=3, decay_fraction=0.01)
    assert decay_steps(config, 3) == 1
    assert factors(4, schedule="wsd", total_steps=3, decay_fraction=0.01) == [1, 1, 1, 0]


def test_an_ending_schedule_needs_its_end() -> None:
    with pytest.raises(UsageError, match=r"optim\.total_steps: cosine needs the step"):
        learning_rate(OptimConfig(schedule="cosine"), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1e-3}, "optim.lr: -0.001 must be at least 0"),
        ({"lr": math.nan}, "optim.lr: nan must be"),
        ({"lr": math.inf}, "optim.lr: inf must be"),
        ({"betas": (0.9, 1.0)}, r"optim.betas: 1.0 must be at least 0, below 1"),
        ({"eps": 0.0}, "optim.eps: 0.0 must be above 0"),
        ({"weight_decay": -0.1}, "optim.weight_decay: -0.1"),
        ({"max_norm": 0.0}, "optim.max_norm: 0.0 must be above 0"),
        ({"warmup_steps": -1}, "optim.warmup_steps: -1"),
        ({"total_steps": 0}, "optim.total_steps: 0 must be at least 1"),
        ({"decay_fraction": 1.5}, "optim.decay_fraction: 1.5"),
        ({"min_factor": 2.0}, "optim.min_factor: 2.0 must be from 0 to 1"),
        (
            {"schedule": "wsd", "warmup_steps": 6, "total_steps": 10, "decay_fraction": 0.5},
            "warmup_steps 6 and 5 steps of decay are more than total_steps 10",
        ),
        (
            {"schedule": "cosine", "warmup_steps": 11, "total_steps": 10},
            "warmup_steps 11 and 0 steps of decay are more than total_steps 10",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OptimConfig(**settings)


def test_a_constant_rate_may_warm_up_beyond_the_run() -> None:
    assert OptimConfig(warmup_steps=100, total_steps=10).warmup_steps == 100
