"""Layers of stages by cost."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.errors import LayoutError
from d9d_train.parallel.balance import balanced


def most(costs, last, counts):
    """What the most expensive stage costs."""
    ends = [sum(counts[:n]) for n in range(len(counts) + 1)]
    sums = [sum(costs[a:b]) for a, b in pairwise(ends)]
    return max([*sums[:-1], sums[-1] + last])


@given(
    costs=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=8),
    last=st.sampled_from([0.0, 1.0, 4.0]),
    data=st.data(),
)
def test_no_other_split_is_better(costs, last, data):
    stages = data.draw(st.integers(1, len(costs)))
    counts = balanced(costs, last, stages)
    assert (len(counts), sum(counts)) == (stages, len(costs))
    assert min(counts) >= 1
    others = (
        most(costs, last, [b - a for a, b in pairwise((0, *cuts, len(costs)))])
        for cuts in combinations(range(1, len(costs)), stages - 1)
    )
    assert most(costs, last, counts) == min(others)


def test_by_hand():
    assert balanced([1.0] * 10, 0.0, 3) == (4, 3, 3)
    assert balanced([1.0] * 10, 3.0, 3) == (5, 4, 1)
    assert balanced([1.0, 1.0, 4.0, 4.0], 0.0, 2) == (3, 1)


def test_a_stage_without_a_layer_is_refused():
    with pytest.raises(LayoutError, match="5 stages for 4 layers; at most 4"):
        balanced([1.0] * 4, 0.0, 5)
