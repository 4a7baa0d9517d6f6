"""Who stores what: every element once, by a rank that holds it, in even parts."""

from collections import defaultdict

import torch
from helpers.evaluate import box
from helpers.strategies import placed, seeded, topologies
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.layout.placement import REPLICATED, SMALL, Cut, Heads, Share, held, shares
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.tensors import Region

LARGE = SMALL
"""An item size that puts every box above the limit under which it is not cut."""


def rows_of(found):
    return [(s.box.start[0], s.box.stop[0], s.ranks, s.part) for s in found]


@seeded(500)
@given(topologies(), st.data(), st.sampled_from((2, LARGE)))
def test_stored_boxes_partition_the_tensor(topology, data, itemsize):
    shape, cut = data.draw(placed(topology))
    count = torch.zeros(shape, dtype=torch.int64)
    holders = held(shape, cut, topology)
    for share in shares(shape, itemsize, cut, topology):
        view = box(count, share.box)
        view += 1
        assert list(share.ranks) == sorted(set(share.ranks))
        assert share.owner(7) in share.ranks
        for rank in share.ranks:
            mine = holders[rank % len(holders)]
            assert any(b.intersect(share.box) == share.box for b in mine)
    assert (count == 1).all()


@seeded(500)
@given(topologies(), st.data())
def test_every_holder_of_a_large_box_stores_the_same_to_within_a_row(topology, data):
    shape, cut = data.draw(placed(topology))
    stored = defaultdict(lambda: defaultdict(int))
    for share in shares(shape, LARGE, cut, topology):
        if share.box.shape and len(share.ranks) > 1:
            [held_box] = [
                b
                for b in held(shape, cut, topology)[share.ranks[0] % (topology.fsdp * topology.tp)]
                if b.intersect(share.box) == share.box
            ]
            stored[held_box, share.ranks][share.owner(0)] += share.box.shape[0]
    for (_, ranks), found in stored.items():
        each = [found[rank] for rank in ranks]
        assert max(each) - min(each) <= 1


@seeded(200)
@given(topologies(), st.data())
def test_small_boxes_are_whole(topology, data):
    shape, cut = data.draw(placed(topology))
    boxes = {b for rank in held(shape, cut, topology) for b in rank}
    assert {s.box for s in shares(shape, 1, cut, topology)} == boxes


def test_a_box_of_one_holder_is_its_own():
    assert shares((4, 2), 2, Cut(tp=0, units=2), Topology(tp=2)) == (
        Share(Region((0, 0), (2, 2)), (0,), 0),
        Share(Region((2, 0), (2, 2)), (1,), 0),
    )


def test_replicas_under_64_kib_take_turns():
    [share] = shares((32767,), 2, REPLICATED, Topology(dp_replicate=2, tp=2))
    assert share == Share(Region((0,), (32767,)), (0, 1, 2, 3), None)
    assert [share.owner(turn) for turn in range(6)] == [0, 1, 2, 3, 0, 1]


def test_replicas_of_64_kib_are_cut_over_their_holders():
    found = shares((32768,), 2, REPLICATED, Topology(dp_replicate=2, tp=2))
    ranks = (0, 1, 2, 3)
    assert rows_of(found) == [(8192 * p, 8192 * p + 8192, ranks, p) for p in range(4)]
    assert [s.owner(turn=9) for s in found] == [0, 1, 2, 3]


def test_five_rows_over_four_holders_leave_nobody_without():
    found = shares((5, 2), LARGE, REPLICATED, Topology(dp_replicate=4))
    assert sorted(s.box.shape[0] for s in found) == [1, 1, 1, 2]
    assert {s.owner(0) for s in found} == {0, 1, 2, 3}


def test_dp_replicate_counts_whole_blocks_of_ranks():
    """fsdp 2 x tp 2 = 4 ranks a replica: fsdp shard 1 of tp 0 is rank 2, and 6 in the second."""
    found = shares((4, 1), 2, Cut(tp=0, units=2), Topology(dp_replicate=2, dp_shard=2, tp=2))
    assert rows_of(found) == [
        (0, 1, (0, 4), None),
        (1, 2, (2, 6), None),
        (2, 3, (1, 5), None),
        (3, 4, (3, 7), None),
    ]


def test_a02_the_ranks_of_a_kv_group_share_its_k_and_v():
    cut = Cut(tp=0, units=2, heads=Heads(2, 2, 2))
    found = shares((16, 3), 2, cut, Topology(tp=4))
    assert rows_of(found) == [
        (0, 2, (0,), 0),
        (2, 4, (1,), 0),
        (4, 6, (0, 1), None),
        (6, 8, (0, 1), None),
        (8, 10, (2,), 0),
        (10, 12, (3,), 0),
        (12, 14, (2, 3), None),
        (14, 16, (2, 3), None),
    ]


def test_a02_k_rows_are_shared_at_one_fsdp_index_only():
    cut = Cut(tp=0, units=2, heads=Heads(2, 2, 2))
    found = rows_of(shares((16, 3), 2, cut, Topology(tp=4, dp_shard=2)))
    assert (4, 5, (0, 1), None) in found
    assert (5, 6, (4, 5), None) in found


def test_f15_scalars_have_one_owner_in_turn():
    [share] = shares((), 4, REPLICATED, Topology(dp_shard=2, tp=2))
    assert share == Share(Region((), ()), (0, 1, 2, 3), None)


def test_a04_padding_is_owned_by_nobody():
    found = shares((5, 2), 2, Cut(tp=0, vocab=True), Topology(tp=4, vocab_multiple=4))
    assert rows_of(found) == [(0, 4, (0,), 0), (4, 5, (1,), 0)]
