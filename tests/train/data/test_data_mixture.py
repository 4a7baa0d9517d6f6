"""Mixtures: exact shares, and every source read in order."""

from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from helpers.strategies import seeded
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.errors import UsageError
from d9d_train.data.mixture import Mixture, place, shares
from d9d_train.data.sample import Sample

weights = st.lists(
    st.one_of(st.integers(1, 50), st.floats(1e-3, 1e3, allow_nan=False)), min_size=1, max_size=6
)


@dataclass(frozen=True)
class Named:
    """A stream whose samples say where they come from."""

    name: int
    length: int = 7

    def sample(self, number):
        tokens = torch.tensor([self.name, number])
        return Sample(tokens, tokens, tokens)


def test_by_hand():
    # Two of three from the second: the first is behind until its third.
    assert [place(n, shares([1, 2])) for n in range(6)] == [
        (1, 0), (1, 1), (0, 0), (1, 2), (1, 3), (0, 1)
    ]  # fmt: skip


@seeded(60)
@given(weights=weights, first=st.integers(0, 10**15))
def test_positions_go_on_without_history(weights, first):
    parts = shares(weights)
    there = {}
    for number in range(first, first + 200):
        source, own = place(number, parts)
        assert own == there.get(source, own)
        there[source] = own + 1


@seeded(60)
@given(weights=weights, count=st.integers(1, 2000))
def test_shares_are_met_at_every_length(weights, count):
    exact = [Fraction(str(weight)) for weight in weights]
    parts = shares(weights)
    taken = [0] * len(weights)
    for number in range(count):
        source, own = place(number, parts)
        assert own == taken[source]
        taken[source] += 1
    off = [abs(n - count * w / sum(exact)) for n, w in zip(taken, exact, strict=True)]
    assert max(off) < max(1, len(weights) - 1)


def test_decimals_are_exact():
    parts = shares([0.7, 0.2, 0.1])
    taken = [place(n, parts)[0] for n in range(10_000)]
    assert [taken.count(source) for source in range(3)] == [7000, 2000, 1000]


def test_samples_come_from_the_sources():
    mixture = Mixture([Named(0), Named(1)], [1, 2])
    assert [mixture.sample(n).tokens.tolist() for n in range(3)] == [[1, 0], [1, 1], [0, 0]]
    assert mixture.length == 14


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_mean_nothing_are_refused(weight):
    with pytest.raises(UsageError, match="all above 0"):
        Mixture([Named(0), Named(1)], [1.0, weight])
