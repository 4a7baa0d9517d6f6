"""Samples over dp ranks and micro-batches, tokens over cp ranks."""

import pytest
import torch
from helpers.strategies import seeded
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.errors import LayoutError
from d9d_train.data.order import Share, token_index


def test_shares_by_hand():
    assert Share(8, 2, 2, 0).numbers(16) == [range(16, 18), range(18, 20)]
    assert Share(8, 2, 2, 1).numbers(16) == [range(20, 22), range(22, 24)]


@seeded(50)
@given(
    size=st.integers(1, 6), parts=st.integers(1, 4), each=st.integers(1, 4), step=st.integers(0, 9)
)
def test_shares_of_all_ranks_are_the_step(size, parts, each, step):
    batch = size * parts * each
    shares = [Share(batch, parts, size, rank).numbers(step * batch) for rank in range(size)]
    taken = [number for share in shares for part in share for number in part]
    assert taken == list(range(step * batch, (step + 1) * batch))


def test_a_batch_that_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(LayoutError, match=r"12 does not divide over 4 dp ranks x 2 .* = 8"):
        Share(12, 2, 4, 0)


def test_token_orders_by_hand():
    assert token_index(8, 2, 1, "contiguous").tolist() == [4, 5, 6, 7]
    assert token_index(8, 2, 0, "head_tail").tolist() == [0, 1, 6, 7]
    assert token_index(8, 2, 1, "head_tail").tolist() == [2, 3, 4, 5]
    assert token_index(6, 1, 0, "head_tail").tolist() == [0, 1, 2, 3, 4, 5]


@seeded(50)
@given(
    cp=st.integers(1, 8), each=st.integers(1, 5), order=st.sampled_from(["contiguous", "head_tail"])
)
def test_token_orders_part_the_sequence_and_ascend(cp, each, order):
    length = 2 * cp * each
    parts = [token_index(length, cp, rank, order) for rank in range(cp)]
    assert torch.cat(parts).sort().values.tolist() == list(range(length))
    assert all((part.diff() > 0).all() for part in parts)
    assert {len(part) for part in parts} == {2 * each}


@seeded(20)
@given(cp=st.integers(1, 8), each=st.integers(1, 5))
def test_head_tail_costs_all_ranks_the_same(cp, each):
    # The causal pairs of a token at index i are i + 1.
    work = {int((token_index(2 * cp * each, cp, r, "head_tail") + 1).sum()) for r in range(cp)}
    assert len(work) == 1


def test_a_sequence_that_does_not_divide_is_refused_with_the_numbers():
    assert len(token_index(12, 4, 0, "contiguous")) == 3
    with pytest.raises(LayoutError, match=r"12 tokens .* 8 chunks \(head_tail over cp=4\)"):
        token_index(12, 4, 0, "head_tail")
    with pytest.raises(LayoutError, match=r"12 tokens .* 5 chunks"):
        token_index(12, 5, 0, "contiguous")
