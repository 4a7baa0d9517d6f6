"""Schedules beside torch's, which are built without its stages and process groups."""

from itertools import product
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from d9d_ckpt.errors import LayoutError
from d9d_train.parallel.pipeline.schedule import BUILDERS

CLASSES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "interleaved": (theirs.ScheduleInterleaved1F1B, (2, 3)),
    "looped_bfs": (theirs.ScheduleLoopedBFS, (1, 2, 3)),
    "zb1p": (theirs.ScheduleInterleavedZeroBubble, (1, 2, 3)),
    "zbv": (theirs.ScheduleZBVZeroBubble, (2,)),
    "dualpipev": (theirs.ScheduleDualPipeV, (2,)),
}


def torchs_order(name: str, local: int, ranks: int, microbatches: int) -> list[list[str]]:
    cls, _ = CLASSES[name]
    schedule = cls.__new__(cls)
    schedule.pp_group_size, schedule.n_local_stages = ranks, local
    schedule.num_stages = schedule._num_stages = local * ranks
    schedule._stages, schedule._n_microbatches = [None] * local, microbatches
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    orders = map(schedule._calculate_single_rank_operations, range(ranks))
    return [[str(action) for action in order if action is not None] for order in orders]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_order_is_torchs(name: str) -> None:
    compared = 0
    for local, ranks, microbatches in product(CLASSES[name][1], (2, 3, 4, 8), (1, 2, 4, 8, 9, 32)):
        try:
            ours = BUILDERS[name](local * ranks, ranks, microbatches)
        except LayoutError:
            continue
        for rank, order in enumerate(torchs_order(name, local, ranks, microbatches)):
            texts = ours.texts(rank)
            assert sorted(texts) == sorted(order)
            assert timely(texts) == timely(order)
        compared += 1
    assert compared >= 8


def timely(texts: list[str]) -> list[str]:
    """All but weights' parts, which nothing waits for: ZBV does the longest left first, torch's not always."""
    return [text for text in texts if "W" not in text]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 4), (4, 8), (8, 32)])
def test_the_order_of_gpipe_is_torchs(ranks: int, microbatches: int) -> None:
    schedule: Any = theirs.ScheduleGPipe.__new__(theirs.ScheduleGPipe)
    schedule._num_stages, schedule._n_microbatches = ranks, microbatches
    ours = BUILDERS["gpipe"](ranks, ranks, microbatches)
    for rank, order in schedule._get_pipeline_order().items():
        found = [str(action) for action in order if action is not None]
        assert [*ours.texts(rank), f"{rank}REDUCE_GRAD"] == found
