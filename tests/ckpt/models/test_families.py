"""Every family against values written by hand, and there and back."""

import pytest
import torch
from helpers.families import (
    DENSE,
    SPARSE,
    backward,
    checkpoint,
    counted,
    equal,
    forward,
    read,
    small,
)

from d9d_ckpt.layout.placement import held
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.models.registry import FAMILIES
from make_checkpoint import tensors

LAYER = "model.layers.0."
CASES = [
    ("llama", {}),
    ("llama", {"tied": True}),
    ("qwen2", {}),
    ("qwen3", {"heads": 6, "kv_heads": 3}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"layout": "fused"}),
    ("mixtral", {}),
    ("mixtral", {"layout": "fused", "kv_heads": 4}),
]
IDS = [f"{name}-{'-'.join(map(str, sizes.values())) or 'plain'}" for name, sizes in CASES]


def test_every_family_is_tested():
    assert set(FAMILIES) == {*DENSE, *SPARSE}


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=IDS)
def test_forward_then_reverse_gives_every_tensor_back(name, sizes):
    config = small(name, **sizes)
    stored = checkpoint(config)
    training = read(forward(config, stored), stored)
    back = backward(config, training, config.layout if config.experts else "")
    assert equal(read(back, training), stored)


@pytest.mark.parametrize("name", SPARSE)
def test_a01_both_expert_layouts_give_the_same_training_bits(name):
    split = small(name, layout="split")
    fused = small(name, layout="fused")
    stored = checkpoint(split)
    one = read(forward(split, stored), stored)
    hub = read(backward(split, one, "fused"), one)
    assert {t.name: t.shape for t in tensors(fused)} == {n: tuple(t.shape) for n, t in hub.items()}
    two = read(forward(fused, hub), hub)
    assert equal(one, two)
    assert equal(read(backward(fused, two, "split"), two), stored)


@pytest.mark.parametrize("name", SPARSE)
def test_the_layout_of_experts_is_seen_in_the_names(name):
    for layout in ("split", "fused"):
        names = [t.name for t in tensors(small(name, layout=layout))]
        assert FAMILIES[name].experts_layout(names) == layout


def moe(layout, **sizes):
    return small(
        "qwen3_moe", layers=1, hidden=5, experts=4, moe_intermediate=6, layout=layout, **sizes
    )


def expert_values(half, e, rows, columns, sign=1):
    """1000 x expert + 100 x half + row + 0.01 x column: legible, and unlike in every place."""
    base = torch.arange(rows).view(-1, 1) + torch.arange(columns) / 100
    return (base + 1000 * e + 100 * half).double() * sign


def test_a01_gate_and_up_of_every_expert_go_in_pairs_of_rows():
    """E=4, F=6, H=5."""
    config = moe("split")
    stored = checkpoint(config)
    for e in range(4):
        at = f"{LAYER}mlp.experts.{e}."
        stored[at + "gate_proj.weight"] = expert_values(1, e, 6, 5)
        stored[at + "up_proj.weight"] = expert_values(2, e, 6, 5)
        stored[at + "down_proj.weight"] = expert_values(3, e, 5, 6)
    training = read(forward(config, stored), stored)
    gate_up = training[LAYER + "mlp.experts.gate_up_proj.weight"]
    down = training[LAYER + "mlp.experts.down_proj.weight"]
    assert gate_up.shape == (4, 12, 5)
    assert down.shape == (4, 5, 6)
    for e in range(4):
        rows = [100, 200, 101, 201, 102, 202, 103, 203, 104, 204, 105, 205]
        assert gate_up[e, :, 0].tolist() == [1000 * e + row for row in rows]
        assert gate_up[e, 3].tolist() == pytest.approx([1000 * e + 201 + c / 100 for c in range(5)])
        assert down[e, :, 0].tolist() == [1000 * e + row for row in range(300, 305)]
        assert down[e, 2].tolist() == pytest.approx([1000 * e + 302 + c / 100 for c in range(6)])
    fused = read(backward(config, training, "fused"), training)
    halves = fused[LAYER + "mlp.experts.gate_up_proj"]
    for e in range(4):
        assert torch.equal(halves[e, :6], expert_values(1, e, 6, 5))
        assert torch.equal(halves[e, 6:], expert_values(2, e, 6, 5))


def test_a09_square_experts_keep_their_orientation():
    """E=2, H=F=4: where shapes cannot tell, values written by hand do."""
    config = small("qwen3_moe", layers=1, hidden=4, experts=2, moe_intermediate=4, layout="fused")
    stored = checkpoint(config)
    stored[LAYER + "mlp.experts.gate_up_proj"] = torch.arange(64.0).reshape(2, 8, 4)
    stored[LAYER + "mlp.experts.down_proj"] = torch.arange(32.0).reshape(2, 4, 4)
    training = read(forward(config, stored), stored)
    assert training[LAYER + "mlp.experts.gate_up_proj.weight"].tolist() == [
        [
            [0, 1, 2, 3],
            [16, 17, 18, 19],
            [4, 5, 6, 7],
            [20, 21, 22, 23],
            [8, 9, 10, 11],
            [24, 25, 26, 27],
            [12, 13, 14, 15],
            [28, 29, 30, 31],
        ],
        [
            [32, 33, 34, 35],
            [48, 49, 50, 51],
            [36, 37, 38, 39],
            [52, 53, 54, 55],
            [40, 41, 42, 43],
            [56, 57, 58, 59],
            [44, 45, 46, 47],
            [60, 61, 62, 63],
        ],
    ]
    down = training[LAYER + "mlp.experts.down_proj.weight"]
    assert down[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert down[1, 2].tolist() == [24, 25, 26, 27]


def test_a09_square_experts_of_the_split_layout_are_not_transposed():
    config = small(
        "mixtral", layers=1, hidden=4, heads=2, experts=2, moe_intermediate=4, head_dim=2
    )
    stored = checkpoint(config)
    at = LAYER + "block_sparse_moe.experts.1."
    stored[at + "w1.weight"] = torch.arange(16.0).reshape(4, 4).double()
    stored[at + "w3.weight"] = 100 + torch.arange(16.0).reshape(4, 4).double()
    stored[at + "w2.weight"] = 200 + torch.arange(16.0).reshape(4, 4).double()
    training = read(forward(config, stored), stored)
    gate_up = training[LAYER + "mlp.experts.gate_up_proj.weight"][1]
    assert gate_up[:4].tolist() == [
        [0, 1, 2, 3],
        [100, 101, 102, 103],
        [4, 5, 6, 7],
        [104, 105, 106, 107],
    ]
    assert training[LAYER + "mlp.experts.down_proj.weight"][1, 1].tolist() == [204, 205, 206, 207]


@pytest.mark.parametrize("name", SPARSE)
def test_a12_expert_ids_are_numbers_not_strings(name):
    """12 experts, each filled with its id: 10 and 11 come last."""
    config = small(name, layers=1, experts=12, moe_intermediate=2)
    stored = checkpoint(config)
    for key in stored:
        if ".experts." in key:
            stored[key].fill_(int(key.split(".experts.")[1].split(".")[0]))
    training = read(forward(config, stored), stored)
    for part in ("gate_up_proj", "down_proj"):
        values = training[f"{LAYER}mlp.experts.{part}.weight"]
        assert values.flatten(1).unique(dim=1).flatten().tolist() == list(range(12))


def test_a12_each_ep_rank_owns_the_experts_of_its_global_ids():
    config = moe("split")
    mapped = forward(config, checkpoint(config))
    name = LAYER + "mlp.experts.down_proj.weight"
    boxes = held(mapped.nodes[name].shape, mapped.placements[name].cut, Topology(dp_shard=2, ep=2))
    assert [(rank[0].start[0], rank[0].stop[0]) for rank in boxes] == [(0, 2), (2, 4)]


@pytest.mark.parametrize("name", SPARSE)
def test_the_router_only_changes_its_name(name):
    config = small(name)
    stored = checkpoint(config)
    router = {"qwen3_moe": "mlp.gate", "mixtral": "block_sparse_moe.gate"}[name]
    training = read(forward(config, stored), stored)
    assert torch.equal(training[LAYER + "mlp.router.weight"], stored[f"{LAYER}{router}.weight"])


def rows_of(first, count, width):
    return (first + torch.arange(float(count))).view(-1, 1).expand(-1, width).double().contiguous()


def test_a02_qkv_goes_kv_group_by_kv_group():
    """4 q heads, 2 kv heads of 2 rows: q0 q1 k0 v0 q2 q3 k1 v1."""
    config = small("qwen3", layers=1, hidden=3, heads=4, kv_heads=2, head_dim=2)
    stored = checkpoint(config)
    at = LAYER + "self_attn."
    stored[at + "q_proj.weight"] = rows_of(0, 8, 3)
    stored[at + "k_proj.weight"] = rows_of(100, 4, 3)
    stored[at + "v_proj.weight"] = rows_of(200, 4, 3)
    qkv = read(forward(config, stored), stored)[at + "qkv_proj.weight"]
    expected = [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    assert qkv.tolist() == [[row] * 3 for row in expected]


def test_a20_biases_follow_the_rows_of_their_weights():
    config = small("qwen2", layers=1, hidden=8, heads=4, kv_heads=2, head_dim=2)
    stored = checkpoint(config)
    at = LAYER + "self_attn."
    stored[at + "q_proj.bias"] = torch.arange(8.0).double()
    stored[at + "k_proj.bias"] = 100 + torch.arange(4.0).double()
    stored[at + "v_proj.bias"] = 200 + torch.arange(4.0).double()
    bias = read(forward(config, stored), stored)[at + "qkv_proj.bias"]
    assert bias.tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]


def test_a03_gate_and_up_go_in_pairs_of_rows():
    config = small("llama", layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=6)
    stored = checkpoint(config)
    stored[LAYER + "mlp.gate_proj.weight"] = rows_of(0, 6, 4)
    stored[LAYER + "mlp.up_proj.weight"] = rows_of(100, 6, 4)
    pairs = read(forward(config, stored), stored)[LAYER + "mlp.gate_up_proj.weight"]
    assert pairs[:, 0].tolist() == [0, 100, 1, 101, 2, 102, 3, 103, 4, 104, 5, 105]


@pytest.mark.parametrize(
    ("name", "raw", "added"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, 7),
        ("qwen3", {"attention_bias": True}, 4),
        ("qwen3_moe", {"attention_bias": True}, 4),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a20_biases_that_the_config_turns_on_are_all_kept(name, raw, added):
    """q, k, v, o and gate, up, down: one layer, each bias in and out."""
    config = small(name, layers=1)
    shapes = {t.name: t.shape for t in tensors(config)}
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    biased = attention if added == 4 else attention + mlp
    for key, shape in list(shapes.items()):
        if key.split(".")[-2] in biased and ".experts." not in key:
            shapes[key.replace(".weight", ".bias")] = shape[:1]
    assert len(shapes) == len(tensors(config)) + added
    stored = counted(shapes)
    training = read(forward(config, stored, **raw), stored)
    assert sum(key.endswith(".bias") for key in training) == {4: 2, 7: 4}[added]
    layout = config.layout if config.experts else ""
    assert equal(read(backward(config, training, layout, **raw), training), stored)


def test_a20_q_and_k_norms_are_kept_and_replicated():
    config = small("qwen3")
    stored = checkpoint(config)
    mapped = forward(config, stored)
    training = read(mapped, stored)
    for norm in ("q_norm", "k_norm"):
        name = f"{LAYER}self_attn.{norm}.weight"
        assert torch.equal(training[name], stored[name])
        assert mapped.placements[name].cut.tp is None


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=IDS)
def test_every_training_element_is_one_source_element(name, sizes):
    config = small(name, **sizes)
    stored = checkpoint(config)
    training = read(forward(config, stored), stored)
    values = torch.cat([t.flatten() for t in training.values()])
    assert values.sort().values.tolist() == list(range(sum(t.numel() for t in stored.values())))


def test_layers_that_the_config_keeps_dense_have_a_dense_mlp():
    """Layer 1 by name; of layers 0 to 3 with a step of 2, 0 and 2 as well."""
    config = small("qwen3_moe", layers=4, hidden=4, experts=2, moe_intermediate=3, intermediate=7)
    raw = {"mlp_only_layers": [1], "decoder_sparse_step": 2}
    dense = {"gate_proj": (7, 4), "up_proj": (7, 4), "down_proj": (4, 7)}
    shapes = {t.name: t.shape for t in tensors(config) if ".mlp." not in t.name or ".3." in t.name}
    for layer in (0, 1, 2):
        shapes |= {f"model.layers.{layer}.mlp.{n}.weight": s for n, s in dense.items()}
    stored = counted(shapes)
    training = read(forward(config, stored, **raw), stored)
    assert training["model.layers.1.mlp.gate_up_proj.weight"].shape == (14, 4)
    assert training["model.layers.3.mlp.experts.gate_up_proj.weight"].shape == (2, 6, 4)
    assert equal(read(backward(config, training, "split", **raw), training), stored)
