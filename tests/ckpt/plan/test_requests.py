"""Which boxes are asked for, and how a layout file changes that."""

import pytest
from helpers.families import checkpoint, forward, small

from d9d_ckpt.errors import LayoutError, MappingError
from d9d_ckpt.graph import ops
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.models.family import Mapped
from d9d_ckpt.plan.requests import held_requests, stored_requests, whole_requests
from d9d_ckpt.tensors import DTYPES, Region, TensorSpec


def mapped(**shapes):
    nodes = {n: ops.leaf(n, TensorSpec(DTYPES["F32"], s)) for n, s in shapes.items()}
    return Mapped(nodes, {}, 0)


def boxes(requests):
    return {
        r.name: [(rank, *b) for b, rank in zip(r.boxes, r.ranks, strict=True)] for r in requests
    }


def test_without_a_family_dp_shard_and_cp_cut_rows():
    found = boxes(stored_requests(mapped(a=(5, 2), s=(), e=(0, 3)), Topology(dp_shard=2, cp=2)))
    assert found["a"] == [(0, (0, 0), (2, 2)), (1, (2, 0), (2, 2)), (2, (4, 0), (1, 2))]
    assert found["e"] == []
    assert len(found["s"]) == 1


@pytest.mark.parametrize("axis", ["pp", "tp", "ep"])
def test_without_a_family_other_axes_need_a_named_dim(axis):
    layout = Topology(**{axis: 2}, **({"dp_shard": 2} if axis == "ep" else {}))
    with pytest.raises(LayoutError, match=f"tensor 'a'.*{axis}=2"):
        stored_requests(mapped(a=(4, 4)), layout)


def test_a_layout_file_names_dims():
    layout = Topology(tp=2, dp_shard=2, tensors=(("a*", (("tp", 1),)), ("b", (("tp", 0),))))
    found = boxes(stored_requests(mapped(a1=(4, 6), b=(4, 6)), layout))
    assert found["a1"] == [
        (0, (0, 0), (2, 3)),
        (1, (0, 3), (2, 3)),
        (2, (2, 0), (2, 3)),
        (3, (2, 3), (2, 3)),
    ]
    assert sorted(found["b"]) == [
        (0, (0, 0), (1, 6)),
        (1, (2, 0), (1, 6)),
        (2, (1, 0), (1, 6)),
        (3, (3, 0), (1, 6)),
    ]


def test_a_layout_file_names_a_stage():
    layout = Topology(pp=2, tensors=(("a", (("pp", 1),)), ("*", (("pp", 0),))))
    found = boxes(stored_requests(mapped(a=(4,), b=(4,)), layout))
    assert (found["a"][0][0], found["b"][0][0]) == (1, 0)


def test_a_pattern_that_matches_nothing_is_refused():
    layout = Topology(tensors=(("nothing.*", (("tp", 0),)),))
    with pytest.raises(MappingError, match=r"nothing\.\*.*matches no tensor"):
        stored_requests(mapped(a=(4,)), layout)


def test_a_stage_beyond_pp_is_refused():
    layout = Topology(pp=2, tensors=(("*", (("pp", 2),)),))
    with pytest.raises(LayoutError, match="pp=2"):
        stored_requests(mapped(a=(4,)), layout)


def test_a_dim_that_does_not_divide_names_tensor_dim_size_and_degree():
    layout = Topology(tp=4, tensors=(("*", (("tp", 1),)),))
    with pytest.raises(LayoutError, match=r"tensor 'a'.*tp=4.*6"):
        stored_requests(mapped(a=(4, 6)), layout)


def test_whole_requests_ask_for_every_tensor():
    found = {r.name: r.boxes for r in whole_requests(mapped(a=(4, 2), s=()))}
    assert found == {"a": (Region.whole((4, 2)),), "s": (Region((), ()),)}


def family_mapped():
    config = small("qwen3_moe", layers=3)
    return forward(config, checkpoint(config))


@pytest.mark.parametrize(
    "layout",
    [
        Topology(),
        Topology(pp=3, tp=2, ep=2),
        Topology(dp_replicate=2, dp_shard=3, tp=2, ep=2),
        Topology(pp=2, dp_shard=4, cp=2, ep=8),
    ],
)
def test_stored_boxes_hold_each_element_once_and_in_a_rank_that_holds_it(layout):
    every = family_mapped()
    held = boxes(held_requests(every, layout))
    for request in stored_requests(every, layout):
        assert sum(b.numel for b in request.boxes) == request.node.spec.numel, request.name
        for box, rank in zip(request.boxes, request.ranks, strict=True):
            mine = [Region(*r[1:]) for r in held[request.name] if r[0] == rank]
            assert any(m.intersect(box) == box for m in mine), (request.name, rank, box)
            assert 0 <= rank < layout.world


def test_a_tied_embedding_is_stored_by_the_first_stage_and_held_by_the_last_as_well():
    config = small("qwen3", layers=2, tied=True)
    every = forward(config, checkpoint(config))
    name = "model.embed_tokens.weight"
    stored, held = (
        {r.name: set(r.ranks) for r in f(every, Topology(pp=2))}[name]
        for f in (stored_requests, held_requests)
    )
    assert (stored, held) == ({0}, {0, 1})


def test_replicated_tensors_are_owned_in_turn():
    every = family_mapped()
    layout = Topology(dp_replicate=4)
    owners = {rank for r in stored_requests(every, layout) for rank in r.ranks}
    assert owners == {0, 1, 2, 3}


def test_a_layout_that_cannot_be_names_the_tensor():
    with pytest.raises(
        LayoutError, match=r"tensor 'model\.layers\.0\.self_attn\.\w+\.weight'.*tp=3.*divi"
    ):
        stored_requests(family_mapped(), Topology(tp=3))
