"""Which rank holds what, with numbers worked out by hand, and against torch's own chunking."""

import pytest
import torch
from helpers.evaluate import box
from helpers.strategies import placed, seeded, topologies
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.errors import LayoutError
from d9d_ckpt.layout.placement import REPLICATED, Cut, Heads, held
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.tensors import Region

A02 = Heads(groups=2, queries=2, rows=2)
"""16 rows: q0 q1 k0 v0 q2 q3 k1 v1, two rows each."""


def spans(boxes, dim=0):
    """(start, stop) along ``dim`` of each box, rank by rank."""
    return [[(b.start[dim], b.stop[dim]) for b in rank] for rank in boxes]


def rows(n):
    return [[span] if span[0] < span[1] else [] for span in n]


def qkv(tp, dp_shard=1, heads=A02):
    cut = Cut(tp=0, units=heads.groups, heads=heads)
    total = heads.groups * (heads.queries + 2) * heads.rows
    return spans(held((total, 3), cut, Topology(tp=tp, dp_shard=dp_shard)))


def test_a02_qkv_is_cut_by_kv_group():
    assert qkv(1) == rows([(0, 16)])
    assert qkv(2) == rows([(0, 8), (8, 16)])


def test_a02_more_ranks_than_kv_heads_hold_their_q_and_the_groups_k_and_v():
    assert qkv(4) == [
        [(0, 2), (4, 6), (6, 8)],
        [(2, 4), (4, 6), (6, 8)],
        [(8, 10), (12, 14), (14, 16)],
        [(10, 12), (12, 14), (14, 16)],
    ]


def test_a02_fsdp_chunks_the_concatenation_of_q_k_and_v():
    """6 local rows over 2: q and the first row of k, then the second row of k and v."""
    assert qkv(4, dp_shard=2) == [
        [(0, 2), (4, 5)],
        [(2, 4), (4, 5)],
        [(8, 10), (12, 13)],
        [(10, 12), (12, 13)],
        [(5, 6), (6, 8)],
        [(5, 6), (6, 8)],
        [(13, 14), (14, 16)],
        [(13, 14), (14, 16)],
    ]


def test_a02_fsdp_alone_cuts_rows_inside_groups():
    heads = Heads(groups=4, queries=1, rows=2)
    assert qkv(1, dp_shard=8, heads=heads) == rows([(3 * i, 3 * i + 3) for i in range(8)])


def test_a02_several_q_heads_a_rank():
    """2 groups of 4 q heads of 1 row over tp 4: two q heads each."""
    assert qkv(4, heads=Heads(groups=2, queries=4, rows=1)) == [
        [(0, 2), (4, 5), (5, 6)],
        [(2, 4), (4, 5), (5, 6)],
        [(6, 8), (10, 11), (11, 12)],
        [(8, 10), (10, 11), (11, 12)],
    ]


def test_a20_qkv_bias_follows_the_rows_of_its_weight():
    cut = Cut(tp=0, units=2, heads=A02)
    for tp in (1, 2, 4):
        assert spans(held((16,), cut, Topology(tp=tp))) == qkv(tp)


@pytest.mark.parametrize(
    ("tp", "heads", "numbers"),
    [
        (3, A02, ("tp=3", "2 KV heads", "4 q heads")),
        (8, A02, ("tp=8", "2 KV heads", "4 q heads")),
        (4, Heads(2, 3, 1), ("tp=4", "2 KV heads", "6 q heads")),
        (2, Heads(3, 2, 2), ("tp=2", "3 units")),
    ],
    ids=str,
)
def test_a02_tp_that_fits_neither_kv_nor_q_heads_is_refused(tp, heads, numbers):
    with pytest.raises(LayoutError) as error:
        qkv(tp, heads=heads)
    assert all(n in str(error.value) for n in numbers)


def test_a03_gate_up_is_cut_between_pairs():
    """12 rows g0 u0 ... g5 u5: r0 = g0 u0 g1 u1 g2 u2."""
    boxes = held((12, 5), Cut(tp=0, units=6), Topology(tp=2))
    assert spans(boxes) == rows([(0, 6), (6, 12)])
    names = [f"{half}{i}" for i in range(6) for half in "gu"]
    assert names[slice(*spans(boxes)[0][0])] == ["g0", "u0", "g1", "u1", "g2", "u2"]
    assert names[slice(*spans(boxes)[1][0])] == ["g3", "u3", "g4", "u4", "g5", "u5"]


def test_a03_three_pairs_over_two_ranks_are_refused_although_six_rows_divide():
    with pytest.raises(LayoutError, match=r"\[6, 5\]: tp=2 does not divide the 3 units of dim 0"):
        held((6, 5), Cut(tp=0, units=3), Topology(tp=2))


def test_row_parallel_weights_are_cut_by_columns_in_units():
    """o_proj of 4 heads of 2 columns, tp 2, and rows 5 over dp_shard 2."""
    boxes = held((5, 8), Cut(tp=1, units=4), Topology(tp=2, dp_shard=2))
    assert [rank[0] for rank in boxes] == [
        Region((0, 0), (3, 4)),
        Region((0, 4), (3, 4)),
        Region((3, 0), (2, 4)),
        Region((3, 4), (2, 4)),
    ]
    with pytest.raises(LayoutError, match=r"tp=2 does not divide the 3 units of dim 1 \(size 6\)"):
        held((5, 6), Cut(tp=1, units=3), Topology(tp=2))


def test_norms_are_replicated_over_tp_and_cut_by_fsdp():
    boxes = held((5,), REPLICATED, Topology(tp=2, dp_shard=3))
    assert spans(boxes) == rows([(0, 2), (0, 2), (2, 4), (2, 4), (4, 5), (4, 5)])


def test_cp_shards_parameters_like_dp_shard():
    assert held((7, 2), REPLICATED, Topology(cp=3)) == held(
        (7, 2), REPLICATED, Topology(dp_shard=3)
    )
    assert held((7, 2), REPLICATED, Topology(cp=2, dp_shard=2)) == held(
        (7, 2), REPLICATED, Topology(dp_shard=4)
    )


def test_d04_uneven_and_empty_shards():
    assert spans(held((6, 2), REPLICATED, Topology(dp_shard=4))) == rows(
        [(0, 2), (2, 4), (4, 6), (6, 6)]
    )
    assert (
        spans(held((3, 2), REPLICATED, Topology(dp_shard=8)))
        == rows([(0, 1), (1, 2), (2, 3)]) + [[]] * 5
    )
    assert spans(held((1, 5), REPLICATED, Topology(dp_shard=4))) == rows([(0, 1)]) + [[]] * 3


def test_fsdp_chunks_what_tp_left_not_the_whole():
    """10 rows, tp 2, dp_shard 2: 5 local rows are 3 and 2, never 10 over 4."""
    boxes = held((10, 1), Cut(tp=0, units=10), Topology(tp=2, dp_shard=2))
    assert spans(boxes) == rows([(0, 3), (5, 8), (3, 5), (8, 10)])


def test_f15_scalars_are_whole_on_every_rank():
    whole = (Region((), ()),)
    assert held((), REPLICATED, Topology(dp_shard=2, tp=2)) == (whole,) * 4


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (0, 0, 4)], ids=str)
def test_f15_empty_tensors_are_held_by_nobody(shape):
    assert held(shape, REPLICATED, Topology(dp_shard=4)) == ((),) * 4


def vocab(total, multiple, **degrees):
    cut = Cut(tp=0, vocab=True)
    return spans(held((total, 2), cut, Topology(vocab_multiple=multiple, **degrees)))


def test_a04_vocabulary_is_cut_as_if_padded_and_stored_without_padding():
    assert vocab(50257, 128) == rows([(0, 50257)])
    assert vocab(50257, 128, tp=2) == rows([(0, 25216), (25216, 50257)])
    assert vocab(50257, 128, tp=8) == rows(
        [(6400 * r, min(6400 * (r + 1), 50257)) for r in range(8)]
    )
    assert vocab(50257, 128, tp=8)[7] == [(44800, 50257)]
    assert vocab(65535, 1, tp=2) == rows([(0, 32768), (32768, 65535)])


def test_a04_fsdp_chunks_the_padded_rows():
    """50257 is padded to 50304 by 128 without tp: 25152 rows a shard, not ceil(50257 / 2) = 25129."""
    assert vocab(50257, 128, dp_shard=2) == rows([(0, 25152), (25152, 50257)])


def test_a04_a_rank_of_padding_alone_holds_nothing():
    """5 rows padded to 4 x 4: 4 a rank."""
    assert vocab(5, 4, tp=4) == rows([(0, 4), (4, 5), (5, 5), (5, 5)])


def experts(shape, **degrees):
    return held(shape, Cut(experts=True), Topology(**degrees))


def test_a12_experts_are_cut_by_global_id():
    assert spans(experts((4, 3, 2), dp_shard=2, ep=2)) == rows([(0, 2), (2, 4)])
    assert spans(experts((4, 3, 2), tp=2, ep=2)) == rows([(0, 2), (2, 4)])


def test_experts_are_not_cut_by_tp():
    boxes = experts((8, 6, 4), dp_shard=2, tp=2, ep=4)
    assert [rank[0] for rank in boxes] == [Region((2 * r, 0, 0), (2, 6, 4)) for r in range(4)]


def test_expert_shards_cut_dim_0_while_there_are_experts_enough():
    """8 experts, ep 2, efsdp 2: efsdp index is flat // ep, ep index flat % ep."""
    assert spans(experts((8, 3, 2), dp_shard=4, ep=2)) == rows([(0, 2), (4, 6), (2, 4), (6, 8)])


def test_expert_shards_may_be_uneven_and_empty():
    assert spans(experts((5, 3, 2), dp_shard=4)) == rows([(0, 2), (2, 4), (4, 5), (5, 5)])
    assert spans(experts((5, 3, 2), dp_shard=5)) == rows([(i, i + 1) for i in range(5)])


def test_expert_shards_cut_dim_1_when_experts_are_fewer():
    """2 experts, ep 2, efsdp 2: one expert a rank, its 6 rows in two."""
    assert [rank[0] for rank in experts((2, 6, 4), dp_shard=4, ep=2)] == [
        Region((0, 0, 0), (1, 3, 4)),
        Region((1, 0, 0), (1, 3, 4)),
        Region((0, 3, 0), (1, 3, 4)),
        Region((1, 3, 0), (1, 3, 4)),
    ]


def test_expert_refusals_have_their_numbers():
    with pytest.raises(LayoutError, match=r"\[3, 6, 4\]: ep=2 does not divide its 3 experts"):
        experts((3, 6, 4), dp_shard=2, ep=2)
    with pytest.raises(
        LayoutError, match=r"\[2, 6, 4\]: 2 experts .* = 4, which must then divide dim 1"
    ):
        experts((2, 6, 4), dp_shard=4)


def local_of(ids, cut, t, fsdp_i, tp_i):
    """The local tensor as torch makes it: tp or ep first, then chunks, padding dropped last."""
    if not ids.dim():
        return ids
    if cut.experts:
        efsdp_i, ep_i = divmod(fsdp_i * t.tp + tp_i, t.ep)
        mine = ids.chunk(t.ep)[ep_i]
        return nth(mine, t.efsdp, efsdp_i, 0 if len(mine) >= t.efsdp else 1)
    if cut.vocab:
        multiple = t.vocab_multiple * t.tp
        blank = torch.full((-len(ids) % multiple, *ids.shape[1:]), -1)
        ids = nth(torch.cat([ids, blank]), t.tp, tp_i)
    elif cut.heads and t.tp > cut.heads.groups:
        ids = replicated(ids, cut.heads, t.tp, tp_i)
    elif cut.tp is not None:
        ids = nth(ids, t.tp, tp_i, cut.tp)
    if cut.rows:
        ids = nth(ids, t.fsdp, fsdp_i)
    return ids[ids[:, 0] >= 0] if cut.vocab else ids


def nth(tensor, parts, index, dim=0):
    found = tensor.chunk(parts, dim)
    return found[index] if index < len(found) else tensor.narrow(dim, 0, 0)


def replicated(ids, heads, tp, tp_i):
    group, piece = divmod(tp_i, tp // heads.groups)
    units = ids.reshape(heads.groups, heads.queries + 2, heads.rows, *ids.shape[1:])[group]
    q, k, v = units.split([heads.queries, 1, 1])
    return torch.cat([q.chunk(tp // heads.groups)[piece], k, v]).flatten(0, 1)


@seeded(600)
@given(topologies(), st.data())
def test_every_rank_holds_what_torch_would_give_it(topology, data):
    shape, cut = data.draw(placed(topology))
    ids = torch.arange(torch.Size(shape).numel()).reshape(shape)
    ranks = held(shape, cut, topology)
    assert len(ranks) == topology.fsdp * topology.tp
    for flat, boxes in enumerate(ranks):
        wanted = local_of(ids, cut, topology, *divmod(flat, topology.tp))
        assert all(b.numel for b in boxes)
        if boxes:
            parts = [box(ids, b) for b in boxes]
            assert torch.equal(torch.cat(parts) if shape else parts[0], wanted)
        else:
            assert not wanted.numel()
