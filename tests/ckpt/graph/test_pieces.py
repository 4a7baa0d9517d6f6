"""The two ways of cutting a piece, against enumeration of its elements."""

import itertools

from helpers.strategies import pieces, seeded
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.graph.pieces import Digit, Piece, cells, cut, row_major


def elements(piece):
    """(address, target) of every element, sorted."""
    out = []
    for steps in itertools.product(*(range(d.count) for d in piece.digits)):
        moved = list(zip(steps, piece.digits, strict=True))
        out.append(
            (
                piece.base + sum(j * d.address for j, d in moved),
                piece.target + sum(j * d.stride for j, d in moved),
            )
        )
    return sorted(out)


def low_reach(piece, period):
    return sum((d.count - 1) * d.address for d in piece.digits if d.address % period)


@seeded(1500)
@given(pieces(), st.integers(1, 40))
def test_cut_keeps_every_element_once_and_never_crosses_a_multiple(piece, period):
    parts = cut(piece, period)
    assert sorted(e for p in parts for e in elements(p)) == elements(piece)
    for p in parts:
        assert p.base % period + low_reach(p, period) < period


@seeded(300)
@given(pieces(), st.integers(1, 40))
def test_cut_of_what_fits_is_the_piece_itself(piece, period):
    [first, *_] = cut(piece, period)
    assert cut(first, period) == [first]


@seeded(1500)
@given(pieces(), st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_cells_keep_every_element_once_and_name_its_cell(piece, sizes):
    bounds = [0, *itertools.accumulate(sizes)]
    period = bounds[-1]
    found = []
    for part in cut(piece, period):
        for cell, p in cells(part, period, bounds):
            for address, target in elements(p):
                assert bounds[cell] <= address % period < bounds[cell + 1]
                found.append((address, target))
    assert sorted(found) == elements(piece)


@seeded(300)
@given(pieces(), st.lists(st.integers(0, 80), max_size=5))
def test_cells_over_one_period_need_no_cut(piece, inner):
    end = piece.base + piece.reach + 1
    bounds = sorted({0, end, *(b for b in inner if b < end)})
    found = []
    for cell, p in cells(piece, end, bounds):
        assert all(bounds[cell] <= address < bounds[cell + 1] for address, _ in elements(p))
        found += elements(p)
    assert sorted(found) == elements(piece)


@seeded(300)
@given(pieces())
def test_merging_and_turning_keep_every_element(piece):
    assert elements(piece.merged()) == elements(piece)
    assert sorted((t, a) for a, t in elements(piece.turned())) == elements(piece)
    assert len(elements(piece)) == piece.numel
    assert max(a for a, _ in elements(piece)) - piece.base == piece.reach


def test_a_row_of_many_periods_is_cut_by_radix_not_by_period():
    """1,000 periods of 10 elements are one piece of two digits, whatever their number."""
    assert cut(Piece(0, 0, (Digit(10_000, 1, 1),)), 10) == [
        Piece(0, 0, (Digit(1000, 10, 10), Digit(10, 1, 1)))
    ]
    parts = cut(Piece(3, 0, (Digit(10_000, 1, 1),)), 10)
    assert sorted(parts) == [
        Piece(0 + 3, 0, (Digit(7, 1, 1),)),
        Piece(10, 7, (Digit(999, 10, 10), Digit(10, 1, 1))),
        Piece(10_000, 9_997, (Digit(3, 1, 1),)),
    ]


def test_row_major_strides():
    assert row_major(()) == []
    assert row_major((7,)) == [1]
    assert row_major((4, 1, 3)) == [3, 3, 1]
    assert row_major((2, 0, 3)) == [0, 3, 1]
