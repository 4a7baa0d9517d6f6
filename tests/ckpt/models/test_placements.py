"""Where each training tensor goes, written out for one layer of each kind."""

import pytest
from helpers.families import checkpoint, forward, small

from d9d_ckpt.errors import LayoutError
from d9d_ckpt.layout.placement import Cut, Heads, Placement, held
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.models.family import placements_of
from d9d_ckpt.models.registry import FAMILIES
from make_checkpoint import config_json

VOCAB = Cut(tp=0, vocab=True)
EXPERTS = Cut(experts=True)


def placed(name, **raw):
    of = FAMILIES[name]
    config = small(name, layers=1, heads=4, kv_heads=2)
    return placements_of(of, of.config(config_json(config) | raw))


def attention(head_dim, *, qk_norm=False, qkv_bias=False, o_bias=False):
    qkv = Placement(0, Cut(tp=0, units=2, heads=Heads(2, 2, head_dim)))
    at = "model.layers.0.self_attn."
    out = {at + "qkv_proj.weight": qkv, at + "o_proj.weight": Placement(0, Cut(tp=1, units=4))}
    if qkv_bias:
        out[at + "qkv_proj.bias"] = qkv
    if o_bias:
        out[at + "o_proj.bias"] = Placement(0)
    if qk_norm:
        out |= {f"{at}{n}_norm.weight": Placement(0) for n in "qk"}
    return out


COMMON = {
    "model.embed_tokens.weight": Placement("first", VOCAB),
    "model.norm.weight": Placement("last"),
    "lm_head.weight": Placement("last", VOCAB),
    "model.layers.0.input_layernorm.weight": Placement(0),
    "model.layers.0.post_attention_layernorm.weight": Placement(0),
}
MLP = {
    "model.layers.0.mlp.gate_up_proj.weight": Placement(0, Cut(tp=0, units=160)),
    "model.layers.0.mlp.down_proj.weight": Placement(0, Cut(tp=1, units=160)),
}
MOE = {
    "model.layers.0.mlp.router.weight": Placement(0),
    "model.layers.0.mlp.experts.gate_up_proj.weight": Placement(0, EXPERTS),
    "model.layers.0.mlp.experts.down_proj.weight": Placement(0, EXPERTS),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", attention(24) | MLP),
        ("qwen2", attention(16, qkv_bias=True) | MLP),
        ("qwen3", attention(24, qk_norm=True) | MLP),
        ("qwen3_moe", attention(24, qk_norm=True) | MOE),
        ("mixtral", attention(16) | MOE),
    ],
)
def test_placements_of_a_family(name, expected):
    assert placed(name) == COMMON | expected


def test_column_biases_are_cut_like_rows_and_row_biases_replicated():
    found = placed("llama", attention_bias=True, mlp_bias=True)
    biases = {
        "model.layers.0.mlp.gate_up_proj.bias": Placement(0, Cut(tp=0, units=160)),
        "model.layers.0.mlp.down_proj.bias": Placement(0),
    }
    assert found == COMMON | attention(24, qkv_bias=True, o_bias=True) | MLP | biases


@pytest.mark.parametrize("name", FAMILIES)
def test_a_graph_places_what_the_table_places(name):
    config = small(name)
    mapped = forward(config, checkpoint(config))
    of = FAMILIES[name]
    assert dict(mapped.placements) == placements_of(of, of.config(config_json(config)))
    assert mapped.nodes.keys() == mapped.placements.keys()
    assert mapped.layers == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_tp_never_cuts_a_unit_of_any_tensor(name):
    """tp 4 over 4 q heads and 2 kv heads; every box of qkv is whole heads, of gate_up whole pairs."""
    config = small(name, heads=4, kv_heads=2)
    mapped = forward(config, checkpoint(config))
    for tensor, place in mapped.placements.items():
        shape = mapped.nodes[tensor].shape
        for boxes in held(shape, place.cut, Topology(tp=4)):
            if "qkv_proj" in tensor:
                assert all(
                    b.start[0] % config.head_dim == b.shape[0] % config.head_dim == 0 for b in boxes
                )
            if "gate_up_proj" in tensor and not config.experts:
                assert [(b.start[0] % 2, b.shape[0]) for b in boxes] == [(0, 80)]
            if "o_proj" in tensor:
                assert [b.shape[1] for b in boxes] == [config.head_dim]


def test_tp_that_does_not_fit_the_heads_is_refused():
    config = small("qwen3", heads=4, kv_heads=2)
    mapped = forward(config, checkpoint(config))
    at = "model.layers.0.self_attn."
    for name in (at + "qkv_proj.weight", at + "o_proj.weight"):
        with pytest.raises(LayoutError, match="tp=3"):
            held(mapped.nodes[name].shape, mapped.placements[name].cut, Topology(tp=3))
