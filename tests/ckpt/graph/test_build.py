"""What the combinators refuse, and where they do as torch does."""

import pytest
import torch
from helpers.strategies import Step, apply

from d9d_ckpt.errors import CkptError, MappingError, RequestError
from d9d_ckpt.graph import build, ops
from d9d_ckpt.graph.build import LazyTensor, cat, stack
from d9d_ckpt.tensors import DTYPES, TensorSpec


def leaf(*shape, source="x", dtype="F32"):
    return LazyTensor(ops.leaf(source, TensorSpec(DTYPES[dtype], shape)))


REFUSED = [
    ("narrow", (0, 2, 3)),
    ("narrow", (2, 0, 1)),
    ("narrow", (0, -5, 1)),
    ("narrow", (0, 0, -1)),
    ("reshape", (5, 3)),
    ("reshape", (-1, 5)),
    ("permute", (0, 0)),
    ("permute", (0,)),
    ("permute", (0, 2)),
    ("transpose", (0, 2)),
    ("index_select", (0, (4,))),
    ("index_select", (0, (-1,))),
    ("index_select", (-3, (0,))),
    ("split", ((1, 1), 0, 0)),
    ("split", (1, 2, 0)),
    ("unbind", (2, 0)),
    ("getitem", (4,)),
    ("getitem", (-5,)),
    ("getitem", (0, 0, 0)),
    ("to", ("int64",)),
]


@pytest.mark.parametrize(("op", "args"), REFUSED, ids=[f"{op}{args}" for op, args in REFUSED])
def test_what_torch_refuses_is_refused_with_a_message(op, args):
    step = Step(op, (0,), args)
    with pytest.raises(MappingError):
        apply(step, [leaf(4, 3)], build)
    if op != "to":
        with pytest.raises((RuntimeError, IndexError)):
            apply(step, [torch.zeros(4, 3)], torch)


@pytest.mark.parametrize("sizes", [(-1, -1), (-1, -12), (-3, -4), (-12, -1)], ids=str)
def test_negative_sizes_are_no_shape(sizes):
    with pytest.raises(MappingError):
        leaf(4, 3).reshape(*sizes)


def test_two_sizes_cannot_be_inferred():
    with pytest.raises(MappingError):
        leaf(1).reshape(-1, -1)


@pytest.mark.parametrize(("before", "after"), [(-1, 0), (0, -2), (-1, 1)])
def test_negative_padding_is_refused(before, after):
    with pytest.raises(MappingError):
        leaf(4, 3).pad(0, before, after)


@pytest.mark.parametrize("dim", [3, -4])
def test_stack_refuses_a_dim_outside(dim):
    with pytest.raises(MappingError):
        stack([leaf(4, 3), leaf(4, 3)], dim)


@pytest.mark.parametrize(
    "others",
    [[(4, 4)], [(4, 3, 1)], [(4,)], [()]],
    ids=str,
)
def test_cat_refuses_other_shapes(others):
    with pytest.raises(MappingError, match="cannot join"):
        cat([leaf(4, 3), *(leaf(*shape) for shape in others)])


def test_cat_and_stack_refuse_mixed_dtypes_and_nothing():
    for join in (cat, stack):
        with pytest.raises(MappingError, match=r"F16.*F32"):
            join([leaf(4, 3), leaf(4, 3, dtype="F16")])
        with pytest.raises(MappingError, match="no tensors"):
            join([])


def test_only_floats_are_cast():
    for dtype in ("I64", "F8_E4M3", "BOOL", "C64"):
        with pytest.raises(MappingError, match=f"cannot cast {dtype} to BF16"):
            leaf(2, dtype=dtype).to("bfloat16")
        with pytest.raises(MappingError, match=f"cannot cast F32 to {dtype}"):
            leaf(2).to(DTYPES[dtype])
        assert leaf(2, dtype=dtype).to(DTYPES[dtype]).spec.dtype.name == dtype


def test_unknown_dtype_lists_those_there_are():
    with pytest.raises(RequestError, match=r"'float31'.*bfloat16"):
        leaf(2).to("float31")


def test_slices_with_a_step_point_to_index_select():
    with pytest.raises(MappingError, match="index_select"):
        leaf(4, 3)[::2]


def test_split_of_no_rows_is_one_empty_part_as_in_torch():
    assert [tuple(t.shape) for t in torch.empty(0, 3).split(2)] == [(0, 3)]
    assert [t.shape for t in leaf(0, 3).split(2)] == [(0, 3)]


@pytest.mark.parametrize("sizes", [0, -1])
def test_split_into_parts_of_no_rows_is_an_error_of_ours(sizes):
    with pytest.raises(CkptError):
        leaf(4, 3).split(sizes)


def test_reading_a_graph_without_a_checkpoint_says_so():
    with pytest.raises(MappingError, match="no checkpoint behind it"):
        leaf(2, 2).read()


def test_shape_and_dtype_are_known_before_reading():
    x = leaf(4, 3).to("bfloat16").transpose(0, 1)
    assert (x.shape, x.dtype, repr(x)) == ((3, 4), "bfloat16", "LazyTensor(bfloat16, [3, 4])")
