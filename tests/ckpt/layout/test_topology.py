"""Rank numbering, pipeline stages, and what a layout may not say."""

import itertools

import pytest
import torch
from helpers.strategies import seeded, topologies
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.errors import CkptError, LayoutError, UsageError
from d9d_ckpt.layout.placement import Cut, chunk, held
from d9d_ckpt.layout.topology import Topology, layout_from, parse_layout


def test_missing_axes_are_one():
    assert parse_layout("tp=2") == Topology(tp=2)
    assert parse_layout("") == Topology()
    assert Topology().world == 1


def test_every_axis_is_read_in_any_order_and_spacing():
    text = " ep=4, tp=2 ,cp=3,dp_shard=2,dp_replicate=5,pp=7,"
    assert parse_layout(text) == Topology(7, 5, 2, 3, 2, 4)


def test_world_and_derived_degrees():
    t = Topology(pp=2, dp_replicate=3, dp_shard=4, cp=2, tp=2, ep=8)
    assert (t.world, t.stage_ranks, t.fsdp, t.efsdp) == (96, 48, 8, 2)


def test_d25_expert_ranks_lie_over_dp_shard_cp_and_tp():
    """8 ranks of tp2 pp2 ep4: 8 / (2 x 2) dense and 8 / (4 x 2) expert replicas both come out even."""
    t = parse_layout("pp=2,dp_shard=2,tp=2,ep=4")
    assert (t.world, t.efsdp) == (8, 1)
    boxes = held((8, 3, 2), Cut(experts=True), t)
    assert [[b.start[0] for b in rank] for rank in boxes] == [[0], [2], [4], [6]]


def test_rank_numbering_is_pp_replicate_shard_cp_tp_with_ep_innermost():
    """A tensor with a unit for every (fsdp, tp) shows who holds what."""
    t = Topology(dp_shard=2, cp=3, tp=2, ep=4)
    starts = []
    for flat, [box] in enumerate(held((2, 6), Cut(tp=1, units=2, rows=False), t)):
        assert box.start == (0, 3 * (flat % 2))
        starts.append(flat)
    assert len(starts) == 12
    dense = held((12, 1), Cut(tp=0, units=2), t)
    for shard, cp, tp in itertools.product(range(2), range(3), range(2)):
        flat = (shard * 3 + cp) * 2 + tp
        assert dense[flat][0].start[0] == tp * 6 + shard * 3 + cp
    experts = held((4, 6, 1), Cut(experts=True), t)
    assert [b[0].start[:2] for b in experts] == [
        *((e, 0) for e in range(4)),
        *((e, 2) for e in range(4)),
        *((e, 4) for e in range(4)),
    ]


@pytest.mark.parametrize(
    ("pp", "layers", "counts"),
    [
        (3, 10, (4, 3, 3)),
        (4, 10, (3, 3, 2, 2)),
        (1, 5, (5,)),
        (5, 5, (1,) * 5),
        (8, 94, (12,) * 6 + (11,) * 2),
    ],
    ids=str,
)
def test_layers_fall_ceil_first(pp, layers, counts):
    t = Topology(pp=pp)
    assert t.layers_per_stage(layers) == counts
    assert t.pipeline_rank_of_layers(layers) == tuple(
        r for r, n in enumerate(counts) for _ in range(n)
    )


def test_stages_may_be_given():
    t = Topology(pp=3, stages=(2, 5, 3))
    assert t.layers_per_stage(10) == (2, 5, 3)
    assert t.pipeline_rank_of_layers(10) == (0, 0, 1, 1, 1, 1, 1, 2, 2, 2)
    with pytest.raises(LayoutError, match=r"\[2, 5, 3\] hold 10 layers, the model has 11"):
        t.layers_per_stage(11)


def test_virtual_stages_loop():
    t = Topology(pp=2, virtual=3)
    assert t.pipeline_rank_of_layers(6) == (0, 1, 0, 1, 0, 1)
    assert t.pipeline_rank_of_layers(8) == (0, 0, 1, 1, 0, 1, 0, 1)


def test_virtual_stages_in_a_v():
    t = Topology(pp=3, virtual=2, order="v")
    assert t.pipeline_rank_of_layers(6) == (0, 1, 2, 2, 1, 0)
    assert Topology(pp=2, virtual=3, order="v").pipeline_rank_of_layers(6) == (0, 1, 1, 0, 0, 1)


def test_virtual_stages_take_given_counts():
    t = Topology(pp=2, virtual=2, stages=(1, 2, 1, 1))
    assert t.pipeline_rank_of_layers(5) == (0, 1, 1, 0, 1)


@pytest.mark.parametrize(
    ("degrees", "layers"), [({"pp": 5}, 4), ({"pp": 2, "virtual": 3}, 5)], ids=str
)
def test_more_stages_than_layers_are_refused(degrees, layers):
    with pytest.raises(LayoutError, match=f"stages for {layers} layers; at most {layers}"):
        Topology(**degrees).layers_per_stage(layers)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 0}, "tp=0 must be at least 1"),
        ({"virtual": 0}, "virtual=0"),
        ({"vocab_multiple": 0}, "vocab_multiple=0"),
        ({"ep": 3, "dp_shard": 2, "tp": 2}, r"ep=3 must divide dp_shard x cp x tp = 2 x 1 x 2 = 4"),
        ({"order": "w"}, "order='w' must be loop or v"),
        ({"pp": 2, "stages": (1, 2, 3)}, "3 stages given for pp x virtual = 2 x 1"),
    ],
    ids=str,
)
def test_combinations_that_cannot_exist(values, message):
    with pytest.raises(LayoutError, match=message):
        Topology(**values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "'tp' is not AXIS=NUMBER"),
        ("tp=", "is not AXIS=NUMBER"),
        ("=2", "unknown key ''"),
        ("tp=-1", "is not AXIS=NUMBER"),
        ("tp=2.0", "is not AXIS=NUMBER"),
        ("tp=two", "is not AXIS=NUMBER"),
        ("tp=²", "is not AXIS=NUMBER"),
        ("tp=2,tp=2", "tp is given twice"),
        ("dp=2", "unknown key 'dp'; known: cp, dp_replicate"),
        ("stages=3", "stages must be a list"),
        ("tensors=3", "tensors must map globs"),
        ("tensors=0", "tensors must map globs"),
    ],
)
def test_malformed_text_is_a_usage_error(text, message):
    with pytest.raises(UsageError, match=message) as error:
        parse_layout(text)
    assert error.value.exit_code == 2
    assert text in str(error.value)


def test_text_that_reads_well_but_cannot_exist_is_a_layout_error():
    with pytest.raises(LayoutError, match="pp=0") as error:
        parse_layout("pp=0")
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dp": 2}, "unknown key 'dp'"),
        ({3: 2}, "unknown key 3"),
        ({"tp": "2"}, "tp must be a whole number, not '2'"),
        ({"tp": True}, "tp must be a whole number, not True"),
        ({"tp": None}, "tp must be a whole number, not None"),
        ({"vocab_multiple": 1.5}, "vocab_multiple must be a whole number"),
        ({"stages": "4,3"}, "stages must be a list of layer counts, not '4,3'"),
        ({"stages": [4, 0]}, "stages must be a list of layer counts"),
        ({"stages": [4, True]}, "stages must be a list of layer counts"),
        ({"tensors": ["*"]}, "tensors must map globs"),
        ({"tensors": {"*": 0}}, r"tensors\['\*'\] must be \{axis: dim\}, not 0"),
        ({"tensors": {"*": {"dp": 0}}}, r"tensors\['\*'\]"),
        ({"tensors": {"*": {"tp": -1}}}, r"tensors\['\*'\]"),
        ({"tensors": {"*": {"tp": "0"}}}, r"tensors\['\*'\]"),
        ({"tensors": {"*": {3: 0}}}, r"tensors\['\*'\]"),
    ],
    ids=str,
)
def test_malformed_values_are_usage_errors_naming_the_file(values, message):
    with pytest.raises(UsageError, match=message) as error:
        layout_from(values, "layout.yaml")
    assert str(error.value).startswith("layout.yaml: ")


@pytest.mark.parametrize("order", [5, ["v"], None], ids=str)
def test_order_of_another_kind_is_refused(order):
    with pytest.raises(CkptError, match="order"):
        layout_from({"order": order}, "layout.yaml")


def test_every_key_of_a_yaml_file_is_kept():
    values = {
        "pp": 2,
        "tp": 2,
        "stages": [2, 1, 1, 2],
        "virtual": 2,
        "order": "v",
        "vocab_multiple": 128,
        "tensors": {"w.*": {"tp": 1, "pp": 0}},
    }
    t = layout_from(values, "layout.yaml")
    assert t == Topology(
        pp=2,
        tp=2,
        stages=(2, 1, 1, 2),
        virtual=2,
        order="v",
        vocab_multiple=128,
        tensors=(("w.*", (("pp", 0), ("tp", 1))),),
    )
    assert layout_from(t.to_json(), "manifest.json") == t


def test_json_of_a_plain_layout_is_its_axes():
    assert Topology(tp=2).to_json() == {
        "pp": 1,
        "dp_replicate": 1,
        "dp_shard": 1,
        "cp": 1,
        "tp": 2,
        "ep": 1,
    }


@seeded(100)
@given(topologies())
def test_json_reads_back(topology):
    assert layout_from(topology.to_json(), "manifest.json") == topology


@seeded(300)
@given(st.text("dps_hardcteplv=,0123 -²", max_size=20))
def test_any_text_is_a_topology_or_an_error_of_ours(text):
    try:
        assert isinstance(parse_layout(text), Topology)
    except CkptError as error:
        assert str(error)  # noqa: PT017


@pytest.mark.parametrize("parts", range(1, 10))
def test_chunks_are_torchs(parts):
    for total in range(41):
        rows = torch.arange(total)
        pieces = [p.tolist() for p in rows.chunk(parts)] + [[]] * parts
        for index in range(parts):
            start, length = chunk(total, parts, index)
            assert list(range(start, start + length)) == pieces[index]
