"""Runs of bytes in few requests."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.storage.ranges import GAP, LARGEST, Filling, Request, coalesced, fillings

OFFSETS = st.lists(st.integers(0, 300), max_size=30)


def test_by_hand():
    # 0-4, 6-10 are 2 apart; 13-17 is 3 from them.
    assert list(coalesced([13, 0, 6], 4, gap=2, largest=100)) == [
        Request(0, 10, (1, 2)),
        Request(13, 4, (0,)),
    ]


def test_a_request_never_exceeds_the_largest():
    assert [r.nbytes for r in coalesced([0, 4, 8, 12, 16], 4, gap=9, largest=8)] == [8, 8, 4]


def test_one_run_may_exceed_the_largest():
    assert list(coalesced([5, 50], 20, gap=99, largest=10)) == [
        Request(5, 20, (0,)),
        Request(50, 20, (1,)),
    ]


def test_equal_and_overlapping_runs_share_a_request():
    assert list(coalesced([7, 7, 5], 4, gap=0, largest=100)) == [Request(5, 6, (2, 0, 1))]


def test_nothing():
    assert not list(coalesced([], 4))


@given(OFFSETS, st.integers(1, 20), st.integers(0, 20), st.integers(1, 60))
def test_every_run_lies_in_one_request(offsets, nbytes, gap, largest):
    requests = list(coalesced(offsets, nbytes, gap=gap, largest=largest))
    assert sorted(n for r in requests for n in r.runs) == list(range(len(offsets)))
    for r in requests:
        wanted = {b for n in r.runs for b in range(offsets[n], offsets[n] + nbytes)}
        assert (min(wanted), max(wanted)) == (r.offset, r.offset + r.nbytes - 1)
        assert r.nbytes <= max(largest, nbytes)
        assert _longest_hole(wanted) <= gap
    assert [r.offset for r in requests] == sorted(r.offset for r in requests)


@given(OFFSETS, st.integers(1, 20), st.integers(0, 20), st.integers(1, 60))
def test_neighbours_are_apart_for_a_reason(offsets, nbytes, gap, largest):
    requests = list(coalesced(offsets, nbytes, gap=gap, largest=largest))
    for a, b in pairwise(requests):
        far = b.offset - (a.offset + a.nbytes) > gap
        large = b.offset + nbytes - a.offset > largest
        assert far or large


@given(st.lists(st.integers(0, 1 << 26), max_size=20), st.integers(1, 1 << 16))
def test_the_usual_limits(offsets, nbytes):
    for r in coalesced(offsets, nbytes):
        starts = sorted(offsets[n] for n in r.runs)
        assert r.nbytes <= LARGEST
        assert all(b - a - nbytes <= GAP for a, b in pairwise(starts))


def views(*sizes):
    return [memoryview(bytearray(n)) for n in sizes]


def test_bytes_fill_views_one_after_the_other():
    out = views(3, 0, 2, 4)
    filling = Filling(out)
    assert (filling.nbytes, filling.done) == (9, 0)
    for piece in (b"ab", b"cde", b"", b"f", b"ghi"):
        filling.put(piece)
    assert filling.done == 9
    assert [bytes(v) for v in out] == [b"abc", b"", b"de", b"fghi"]


def test_more_bytes_than_are_missing_are_an_error():
    with pytest.raises(IndexError):
        Filling(views(2)).put(b"abc")


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 40))
def test_views_in_groups(sizes, largest):
    out = views(*sizes)
    groups = fillings(out, largest)
    total = sum(sizes)
    assert [g.nbytes for g in groups[:-1]] == [largest] * (len(groups) - 1)
    assert sum(g.nbytes for g in groups) == total
    assert all(g.nbytes for g in groups)
    content = bytes(n % 251 for n in range(total))
    for group in groups:
        group.put(content[: group.nbytes])
        content = content[group.nbytes :]
    assert b"".join(out) == bytes(n % 251 for n in range(total))


def _longest_hole(wanted):
    longest = hole = 0
    for byte in range(min(wanted), max(wanted) + 1):
        hole = 0 if byte in wanted else hole + 1
        longest = max(longest, hole)
    return longest
