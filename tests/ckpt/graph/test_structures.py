"""Which graphs count as alike."""

import itertools

from helpers.strategies import lazily, leaf_numbers, programs, seeded
from hypothesis import given

from d9d_ckpt.graph import ops
from d9d_ckpt.graph.build import LazyTensor, cat, stack
from d9d_ckpt.graph.pushdown import Structures, leaves, pushdown
from d9d_ckpt.tensors import DTYPES, Region, TensorSpec


def leaf(*shape, source="x", dtype="F32"):
    return LazyTensor(ops.leaf(source, TensorSpec(DTYPES[dtype], shape)))


@seeded(200)
@given(programs())
def test_equal_graphs_over_other_leaves_have_one_form_and_their_own_leaves(program):
    structures = Structures()
    one, two = lazily(program).node, lazily(program, first=1000).node
    form, mine = structures.of(one)
    again, others = structures.of(two)
    assert form == again
    assert [x.source + 1000 for x in mine] == [x.source for x in others]
    assert {x.source for x in mine} <= set(leaf_numbers(program))
    assert len(mine) == one.width
    assert leaves([one]) == {x.source for x in mine}
    region = Region.whole(one.shape)
    assert pushdown(one, region) == pushdown(two, region)


def test_every_parameter_is_part_of_the_form():
    x = leaf(4, 4)
    other = leaf(4, 4, source="y")
    graphs = [
        x,
        leaf(4, 5),
        leaf(4, 4, dtype="BF16"),
        x.to("bfloat16"),
        x.to("float16"),
        x.to("bfloat16").to("float32"),
        x.reshape(2, 8),
        x.reshape(8, 2),
        x.permute(1, 0),
        x.reshape(2, 2, 4).permute(0, 2, 1),
        x.reshape(2, 2, 4).permute(2, 0, 1),
        x.reshape(2, 2, 4).permute(1, 0, 2),
        x.permute(0, 1),
        x.reshape(2, 2, 2, 2).permute(1, 0, 2, 3),
        x.reshape(2, 2, 2, 2).permute(0, 1, 3, 2),
        x.narrow(0, 0, 2),
        x.narrow(0, 1, 2),
        x.narrow(0, 1, 3),
        x.narrow(1, 1, 2),
        x.index_select(0, [0, 2]),
        x.index_select(0, [0, 3]),
        x.index_select(1, [0, 2]),
        cat([x, other], 0),
        cat([x, other], 1),
        cat([x, other, x], 0),
        stack([x, other], 0),
        stack([x, other], 2),
        x.pad(0, 1, 0),
        x.pad(0, 0, 1),
        x.pad(1, 0, 1),
        cat([x[:1], other]),
        cat([x, other[:1]]),
        cat([cat([x, other]), x]),
        cat([x, cat([other, x])]),
    ]
    structures = Structures()
    forms = [structures.of(g.node)[0] for g in graphs]
    same = [
        (graphs[a], graphs[b])
        for a, b in itertools.combinations(range(len(graphs)), 2)
        if forms[a] == forms[b]
    ]
    assert not same


def test_one_leaf_twice_has_the_form_of_two_leaves():
    x, y = leaf(2, source="x"), leaf(2, source="y")
    structures = Structures()
    form, slots = structures.of(cat([x, x]).node)
    other, two = structures.of(cat([x, y]).node)
    assert form == other
    assert ([n.source for n in slots], [n.source for n in two]) == (["x", "x"], ["x", "y"])


def test_deep_graphs_do_not_recurse():
    x = leaf(2, 3)
    for _ in range(5000):
        x = x.transpose(0, 1)
    assert Structures().of(x.node)[1][0].source == "x"
    assert len(pushdown(x.node, Region.whole((2, 3)))) == 1
