"""Push-down against eager torch: values, each element once, and no source element too many."""

import itertools

import torch
from helpers.evaluate import box, evaluate, fill
from helpers.strategies import (
    ids_of,
    lazily,
    leaf_numbers,
    programs,
    regions,
    run,
    seeded,
    values_of,
)
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.graph import ops
from d9d_ckpt.graph.build import LazyTensor, cat, stack
from d9d_ckpt.graph.pieces import Digit
from d9d_ckpt.graph.pushdown import ZERO, Copy, Structures, pushdown
from d9d_ckpt.tensors import DTYPES, Region, TensorSpec

UNWRITTEN = -1


def leaf(*shape, source="x", dtype="F32"):
    return LazyTensor(ops.leaf(source, TensorSpec(DTYPES[dtype], shape)))


def touched(copies, leaves):
    """Ids of the source elements that the copies read."""
    out = set()
    for c in copies:
        if c.leaf != ZERO:
            sizes, strides = [d.count for d in c.digits], [d.address for d in c.digits]
            out.update(
                torch.as_strided(leaves[c.leaf].view(-1), sizes, strides, c.source)
                .flatten()
                .tolist()
            )
    return out


def moves(copies):
    """(target element, leaf slot, source element) of every element that the copies move."""
    for c in copies:
        for steps in itertools.product(*(range(d.count) for d in c.digits)):
            at = c.target + sum(j * d.stride for j, d in zip(steps, c.digits, strict=True))
            yield (
                at,
                c.leaf,
                c.source + sum(j * d.address for j, d in zip(steps, c.digits, strict=True)),
            )


@seeded(1600)
@given(programs(), st.data())
def test_any_region_equals_eager_torch_element_for_element(program, data):
    node = lazily(program).node
    wanted = run(program, ids_of, torch)
    assert node.shape == tuple(wanted.shape)
    leaves = [ids_of(x.source, "", x.shape) for x in Structures().of(node)[1]]
    for region in data.draw(st.lists(regions(node.shape), min_size=1, max_size=3)):
        copies = pushdown(node, region)
        bare = [c._replace(casts=()) for c in copies]
        got = torch.full(region.shape, UNWRITTEN)
        for c in bare:
            strides = [d.stride for d in c.digits]
            into = torch.as_strided(got.view(-1), [d.count for d in c.digits], strides, c.target)
            assert (into == UNWRITTEN).all()
            fill(got, [c], leaves)
        expected = box(wanted, region)
        assert torch.equal(got, expected)
        assert sum(torch.Size([d.count for d in c.digits]).numel() for c in copies) == region.numel
        assert touched(copies, leaves) == set(expected.flatten().tolist()) - {0}


@seeded(800)
@given(programs(), st.data())
def test_values_equal_eager_torch_bit_for_bit_through_casts(program, data):
    node = lazily(program).node
    wanted = run(program, values_of, torch)
    assert node.dtype.torch == str(wanted.dtype).removeprefix("torch.")
    region = data.draw(regions(node.shape))
    leaves = {n: values_of(n, *program[n].args) for n in leaf_numbers(program)}
    assert torch.equal(evaluate(node, leaves, region), box(wanted, region))


@seeded(150)
@given(programs(steps=5), st.data())
def test_digits_are_normal(program, data):
    """Counts above one, outermost target stride first, nothing left to join."""
    node = lazily(program).node
    region = data.draw(regions(node.shape))
    for c in pushdown(node, region):
        assert all(d.count > 1 for d in c.digits)
        for outer, inner in itertools.pairwise(c.digits):
            assert outer.stride >= inner.stride * inner.count
            assert (outer.address, outer.stride) != (
                inner.count * inner.address,
                inner.count * inner.stride,
            )


def test_contiguous_rows_are_one_copy_of_one_digit():
    x = leaf(10, 6)
    assert pushdown(x[2:5].node, Region.whole((3, 6))) == [Copy(0, 12, 0, (Digit(18, 1, 1),), ())]
    assert pushdown(x.node, Region((2, 0), (3, 6))) == [Copy(0, 12, 0, (Digit(18, 1, 1),), ())]


def test_column_cut_is_one_copy_of_two_digits():
    x = leaf(10, 6)
    expected = [Copy(0, 2, 0, (Digit(10, 6, 3), Digit(3, 1, 1)), ())]
    assert pushdown(x[:, 2:5].node, Region.whole((10, 3))) == expected
    assert pushdown(x.node, Region((0, 2), (10, 3))) == expected


def test_scalar_is_one_copy_without_digits():
    assert pushdown(leaf().node, Region((), ())) == [Copy(0, 0, 0, (), ())]


def test_empty_region_has_no_copies():
    assert pushdown(leaf(3, 4).node, Region((1, 4), (2, 0))) == []
    assert pushdown(leaf(0, 4).node, Region.whole((0, 4))) == []


def test_gate_and_up_interleave_in_two_copies():
    rows, width = 6, 5
    gate, up = leaf(rows, width, source="g"), leaf(rows, width, source="u")
    pairs = stack([gate, up], 1).reshape(2 * rows, width).node
    digits = (Digit(rows, width, 2 * width), Digit(width, 1, 1))
    assert sorted(pushdown(pairs, Region.whole(pairs.shape))) == [
        Copy(0, 0, 0, digits, ()),
        Copy(1, 0, width, digits, ()),
    ]


def test_half_of_the_pairs_reads_half_of_both():
    pairs = stack([leaf(6, 5, source="g"), leaf(6, 5, source="u")], 1).reshape(12, 5).node
    digits = (Digit(3, 5, 10), Digit(5, 1, 1))
    assert sorted(pushdown(pairs, Region((6, 0), (6, 5)))) == [
        Copy(0, 15, 0, digits, ()),
        Copy(1, 15, 5, digits, ()),
    ]


def test_a02_qkv_by_group_is_three_copies():
    """4 q heads, 2 kv heads of 2 rows, width 3: 16 rows q0 q1 k0 v0 q2 q3 k1 v1."""
    q, k, v = leaf(8, 3, source="q"), leaf(4, 3, source="k"), leaf(4, 3, source="v")
    units = [t.reshape(2, t.shape[0] // 2, 3) for t in (q, k, v)]
    qkv = cat(units, 1).reshape(16, 3).node
    assert sorted(pushdown(qkv, Region.whole((16, 3)))) == [
        Copy(0, 0, 0, (Digit(2, 12, 24), Digit(12, 1, 1)), ()),
        Copy(1, 0, 12, (Digit(2, 6, 24), Digit(6, 1, 1)), ()),
        Copy(2, 0, 18, (Digit(2, 6, 24), Digit(6, 1, 1)), ()),
    ]
    second = [Copy(0, 12, 0, (Digit(12, 1, 1),), ()), Copy(1, 6, 12, (Digit(6, 1, 1),), ())]
    assert sorted(pushdown(qkv, Region((8, 0), (6, 3)))) == second


def test_transposed_expert_stack_is_one_copy_an_expert():
    experts = [leaf(4, 3, source=e) for e in range(2)]
    node = stack(experts).transpose(1, 2).node
    assert node.shape == (2, 3, 4)
    assert sorted(pushdown(node, Region.whole(node.shape))) == [
        Copy(0, 0, 0, (Digit(3, 1, 4), Digit(4, 3, 1)), ()),
        Copy(1, 0, 12, (Digit(3, 1, 4), Digit(4, 3, 1)), ()),
    ]
    assert pushdown(node, Region((1, 1, 0), (1, 1, 4))) == [Copy(1, 1, 0, (Digit(4, 3, 1),), ())]


def test_padding_is_a_fill_and_reads_nothing():
    node = leaf(3, 2).pad(0, 1, 2).node
    assert sorted(pushdown(node, Region.whole((6, 2)))) == [
        Copy(ZERO, 0, 0, (Digit(2, 1, 1),), ()),
        Copy(ZERO, 0, 8, (Digit(4, 1, 1),), ()),
        Copy(0, 0, 2, (Digit(6, 1, 1),), ()),
    ]


def test_strided_rows_are_one_copy_a_run():
    node = leaf(6, 2).index_select(0, [0, 2, 4, 1, 3, 5]).node
    assert sorted(pushdown(node, Region.whole((6, 2)))) == [
        Copy(0, 0, 0, (Digit(3, 4, 2), Digit(2, 1, 1)), ()),
        Copy(0, 2, 6, (Digit(3, 4, 2), Digit(2, 1, 1)), ()),
    ]


def test_strided_rows_are_cut_again_where_a_reshape_runs_across_them():
    node = leaf(6, 2).index_select(0, [0, 2, 4, 1, 3, 5]).reshape(12).node
    assert sorted(pushdown(node, Region((1,), (4,)))) == [
        Copy(0, 1, 0, (), ()),
        Copy(0, 4, 1, (Digit(2, 1, 1),), ()),
        Copy(0, 8, 3, (), ()),
    ]


def test_two_rows_are_no_run_where_the_second_starts_a_longer_one():
    node = leaf(6, 2).index_select(0, [0, 2, 3, 4]).node
    assert sorted(pushdown(node, Region.whole((4, 2)))) == [
        Copy(0, 0, 0, (Digit(2, 1, 1),), ()),
        Copy(0, 4, 2, (Digit(6, 1, 1),), ()),
    ]


def test_repeated_row_is_one_copy_of_step_zero():
    node = leaf(6, 2).index_select(0, [3, 3, 3]).node
    assert pushdown(node, Region.whole((3, 2))) == [
        Copy(0, 6, 0, (Digit(3, 0, 2), Digit(2, 1, 1)), ())
    ]


def test_casts_apply_from_the_leaf_outwards():
    x = leaf(3)
    node = x.to("bfloat16").reshape(3, 1).to("float32").node
    [copy] = pushdown(node, Region.whole((3, 1)))
    assert [d.name for d in copy.casts] == ["BF16", "F32"]
    values = torch.tensor([1.0, 1 + 2**-7, 1 + 2**-9])
    assert evaluate(node, {"x": values}).flatten().tolist() == [1.0, 1 + 2**-7, 1.0]


def test_each_input_keeps_its_own_casts():
    left, right = leaf(2, source="l"), leaf(2, source="r", dtype="F16")
    node = cat([left.to("bfloat16"), right.to("bfloat16")]).to("float64").node
    found = {c.leaf: [d.name for d in c.casts] for c in pushdown(node, Region.whole((4,)))}
    assert found == {0: ["BF16", "F64"], 1: ["BF16", "F64"]}
    assert all(not c.casts for c in pushdown(cat([left, left]).node, Region.whole((4,))))


def test_leaf_slots_count_paths_from_the_left():
    x, y = leaf(1, source="x"), leaf(1, source="y")
    node = cat([y, cat([x, y]), x]).node
    assert [n.source for n in Structures().of(node)[1]] == ["y", "x", "y", "x"]
    assert sorted(moves(pushdown(node, Region.whole((4,))))) == [(i, i, 0) for i in range(4)]
