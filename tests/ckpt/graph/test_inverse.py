"""A mapping reversed gives every leaf back, or says why it cannot."""

import pytest
import torch
from helpers.evaluate import evaluate
from helpers.strategies import lazily, leaf_numbers, programs, run, seeded, values_of
from hypothesis import given

from d9d_ckpt.errors import MappingError
from d9d_ckpt.graph import ops
from d9d_ckpt.graph.build import LazyTensor, cat, stack
from d9d_ckpt.graph.pushdown import invert, leaves
from d9d_ckpt.tensors import DTYPES, TensorSpec


def leaf(*shape, source="x"):
    return LazyTensor(ops.leaf(source, TensorSpec(DTYPES["F32"], shape)))


@seeded(500)
@given(programs(bijective=True))
def test_the_inverse_gives_each_leaf_back(program):
    node = lazily(program).node
    output = run(program, values_of, torch)
    back = invert(node, ops.leaf("out", node.spec))
    assert set(back) == leaves([node])
    for n in set(leaf_numbers(program)) & set(back):
        wanted = values_of(n, *program[n].args)
        assert back[n].shape == tuple(wanted.shape)
        assert torch.equal(evaluate(back[n], {"out": output}), wanted)


def test_inverse_of_a_hand_written_interleave():
    pairs = stack([leaf(2, 1, source="g"), leaf(2, 1, source="u")], 1).reshape(4, 1).node
    back = invert(pairs, ops.leaf("out", pairs.spec))
    data = {"out": torch.tensor([[1.0], [2.0], [3.0], [4.0]])}
    assert evaluate(back["g"], data).tolist() == [[1.0], [3.0]]
    assert evaluate(back["u"], data).tolist() == [[2.0], [4.0]]


def test_padding_is_stripped_on_the_way_back():
    padded = leaf(3).pad(0, 1, 2).node
    back = invert(padded, ops.leaf("out", padded.spec))
    assert evaluate(back["x"], {"out": torch.arange(6.0)}).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "lossy",
    [leaf(4).narrow(0, 1, 2), leaf(4)[1:], leaf(2, 2)[0], leaf(4).index_select(0, [0, 1, 1, 3])],
    ids=["narrow", "slice", "row", "repeat"],
)
def test_ops_that_drop_or_repeat_elements_cannot_be_reversed(lossy):
    with pytest.raises(MappingError, match="cannot be reversed"):
        invert(lossy.node, ops.leaf("out", lossy.spec))


def test_a_leaf_used_twice_cannot_be_reversed():
    x = leaf(2)
    twice = cat([x, leaf(1, source="y"), x])
    with pytest.raises(MappingError):
        invert(twice.node, ops.leaf("out", twice.spec))
