"""Written rank files, opened with safetensors alone, against rows and owners written by hand.

Sources are tiny Hugging Face checkpoints whose elements say where they are from. A label such as
``q3`` is row 3 of q_proj, ``2g0`` row 0 of expert 2's gate, ``o1[2:4]`` columns 2 and 3 of o_proj's
row 1; ``q0..2`` is short for ``q0 q1 q2``.
"""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import d9d_ckpt
from d9d_ckpt import api
from d9d_ckpt.errors import LayoutError, MappingError
from d9d_ckpt.layout.topology import Topology
from make_checkpoint import Config, config_json, tensors

ROW, TENSOR = 2**16, 2**34
"""What a row and a tensor count for in an element; elements are int64, so no code is ever rounded."""

WIDE = 8192
"""Columns of which one row of int64 is 64 KiB, the least that is cut over its owners."""

LETTERS = {
    "embed_tokens": "e", "lm_head": "h", "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
    "gate_proj": "g", "up_proj": "u", "down_proj": "d", "w1": "g", "w3": "u", "w2": "d", "gate": "r",
    "q_norm": "Q", "k_norm": "K", "input_layernorm": "a", "post_attention_layernorm": "b", "norm": "n",
}  # fmt: skip

QKV = "model.layers.0.self_attn.qkv_proj.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
EXPERTS_UP = "model.layers.0.mlp.experts.gate_up_proj.weight"
EXPERTS_DOWN = "model.layers.0.mlp.experts.down_proj.weight"
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

DENSE = Config(
    family="llama", layers=1, hidden=4, heads=4, kv_heads=2, head_dim=2, intermediate=6, vocab=8,
    dtype="float32",
)  # fmt: skip
EIGHT = replace(DENSE, intermediate=8)
"""An MLP that tp 4 and 8 divide."""

SPARSE = replace(DENSE, family="qwen3_moe", experts=4, moe_intermediate=6, experts_per_token=2)


# -- sources ----------------------------------------------------------------------------------


class Source:
    """A Hugging Face checkpoint written by safetensors, its elements coded."""

    def __init__(self, path, config, *, fused=False, drop=(), add=None, values=None, **raw):
        self.path = path
        self.shapes = {t.name: t.shape for t in tensors(config)} | (add or {})
        stored = {
            name: coded(number, shape)
            for number, (name, shape) in enumerate(self.shapes.items())
            if name not in drop
        }
        stored |= values or {}
        path.mkdir()
        save_file(fuse(stored) if fused else stored, path / "model.safetensors", {"format": "pt"})
        raw = {"head_dim": config.head_dim} | raw
        (path / "config.json").write_text(json.dumps(config_json(config) | raw))

    def cut(self, layout="pp=1"):
        """Written as ``sharded`` beside the source."""
        url = self.path.with_name("sharded")
        d9d_ckpt.convert(str(self.path), str(url), to="sharded", layout=layout, workers=1)
        return Shards(url, self.shapes)


def coded(number, shape):
    rows = torch.arange(shape[0]) * ROW
    columns = torch.arange(shape[1] if len(shape) == 2 else 1)
    return (number * TENSOR + rows[:, None] + columns).reshape(shape)


def fuse(split):
    """As transformers 5 keeps experts: [E, 2F, H] of gate rows, then up rows, and [E, H, F]."""
    out, experts = {}, {}
    for name, tensor in split.items():
        found = re.fullmatch(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
        if found:
            experts.setdefault(found[1], {})[int(found[2]), LETTERS[found[3]]] = tensor
        else:
            out[name.replace("block_sparse_moe", "mlp")] = tensor
    for layer, parts in experts.items():
        count = range(len(parts) // 3)
        out |= {
            f"{layer}.mlp.experts.gate_up_proj": torch.stack(
                [torch.cat([parts[e, "g"], parts[e, "u"]]) for e in count]
            ),
            f"{layer}.mlp.experts.down_proj": torch.stack([parts[e, "d"] for e in count]),
        }
    return out


# -- what was written -------------------------------------------------------------------------


class Shards:
    """A sharded checkpoint's rank files and manifest, read without d9d_ckpt."""

    def __init__(self, url, shapes):
        self.url, self.shapes, self.names = url, shapes, list(shapes)
        self.manifest = json.loads((url / "manifest.json").read_bytes())
        files = sorted((url / self.manifest["save_id"]).iterdir())
        self.ranks = {rank_of(file): load_file(file) for file in files}

    def boxes(self, name):
        """[(rank, its rows)] of every stored box of a tensor, in the order of its chunks."""
        found = []
        for rank, entries in self.ranks.items():
            for entry, tensor in entries.items():
                stem, _, chunk = entry.partition("#")
                if stem == name:
                    found.append((int(chunk or 0), rank, " ".join(self._labels(tensor, name))))
        return [(rank, text) for _, rank, text in sorted(found)]

    def rows(self, name):
        """{rank: all rows of a tensor that it stores}."""
        out = {}
        for rank, text in self.boxes(name):
            out.setdefault(rank, []).append(text)
        return {rank: " ".join(texts) for rank, texts in sorted(out.items())}

    def ranks_with(self, name):
        return {rank for rank, _ in self.boxes(name)}

    def check_owners(self, name, expected):
        """Boxes are exactly ``expected``, [(rows, ranks one of which stores them once)]."""
        boxes = self.boxes(name)
        assert [text for _, text in boxes] == [rows(text) for text, _ in expected]
        for (rank, text), (_, owners) in zip(boxes, expected, strict=True):
            assert rank in owners, text

    def _labels(self, tensor, target):
        """One label a row; every element is read, and its layer must be its target's."""
        flat = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
        assert torch.equal(flat, flat[:, :1] + torch.arange(flat.shape[1]))
        for code in flat[:, 0].tolist():
            name, row, start = self.names[code // TENSOR], code % TENSOR // ROW, code % ROW
            assert layer_of(name) == layer_of(target)
            stop = start + flat.shape[1]
            whole = (start, stop) == (0, (*self.shapes[name], 1)[1])
            yield f"{letter(name)}{row}" + ("" if whole else f"[{start}:{stop}]")


def rank_of(file: Path) -> int:
    return int(re.fullmatch(r"rank-(\d{5})\.safetensors", file.name)[1])


def layer_of(name):
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found and found[1]


def letter(name):
    expert = re.search(r"\.experts\.(\d+)\.", name)
    return (expert[1] if expert else "") + LETTERS[name.split(".")[-2]]


def rows(text):
    """``q0..2 k0`` written out: ``q0 q1 q2 k0``."""

    def spelled(found):
        stem, first, last = found.groups()
        return " ".join(f"{stem}{n}" for n in range(int(first), int(last) + 1))

    return re.sub(r"(\d*[a-zA-Z])(\d+)\.\.(\d+)", spelled, text)


def by_rank(**texts):
    """``by_rank(r0="q0..2")`` is {0: "q0 q1 q2"}."""
    return {int(key[1:]): rows(text) for key, text in texts.items()}


def expert_pairs(experts, first=0, stop=6):
    """Rows ``first`` to ``stop`` of gate and up of some experts, in pairs."""
    pairs = [f"{e}g{row} {e}u{row}" for e in experts for row in range(first, stop)]
    return " ".join(pairs)


# -- the labels themselves --------------------------------------------------------------------


def test_labels_name_rows_and_columns_and_see_a_single_wrong_element(tmp_path):
    shards = Source(tmp_path / "hf", DENSE).cut("tp=2")
    [(_, entries)] = [(r, e) for r, e in shards.ranks.items() if r == 1]
    assert shards.rows(O_PROJ)[1] == "o0[4:8] o1[4:8] o2[4:8] o3[4:8]"
    [name] = [n for n in entries if n.startswith(O_PROJ)]
    entries[name][2, 1] += 1
    with pytest.raises(AssertionError):
        shards.rows(O_PROJ)


def test_float64_is_no_quantised_dtype(tmp_path):
    config = replace(DENSE, layers=0)
    values = {t.name: torch.full(t.shape, 1 / 3, dtype=torch.float64) for t in tensors(config)}
    source = Source(tmp_path / "hf", replace(DENSE, layers=1), values=values)
    [entries] = source.cut().ranks.values()
    assert all(torch.equal(entries[name], tensor) for name, tensor in values.items())


# -- A02: qkv by KV group ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "expected"),
    [
        (1, by_rank(r0="q0..3 k0..1 v0..1 q4..7 k2..3 v2..3")),
        (2, by_rank(r0="q0..3 k0..1 v0..1", r1="q4..7 k2..3 v2..3")),
    ],
)
def test_a02_qkv_rows_go_kv_group_by_kv_group(tmp_path, tp, expected):
    assert Source(tmp_path / "hf", DENSE).cut(f"tp={tp}").rows(QKV) == expected


def test_a02_above_the_kv_heads_rank_r_holds_q_r_and_one_of_its_group_stores_k_and_v(tmp_path):
    shards = Source(tmp_path / "hf", EIGHT).cut("tp=4")
    shards.check_owners(
        QKV,
        [
            ("q0..1", {0}),
            ("q2..3", {1}),
            ("k0..1", {0, 1}),
            ("v0..1", {0, 1}),
            ("q4..5", {2}),
            ("q6..7", {3}),
            ("k2..3", {2, 3}),
            ("v2..3", {2, 3}),
        ],
    )
    assert shards.rows(O_PROJ) == {
        r: " ".join(f"o{row}[{2 * r}:{2 * r + 2}]" for row in range(4)) for r in range(4)
    }


def test_a02_replicated_kv_rows_of_64_kib_are_cut_over_their_owners(tmp_path):
    source = Source(tmp_path / "hf", replace(EIGHT, hidden=WIDE))
    assert source.cut("tp=4").rows(QKV) == by_rank(
        r0="q0..1 k0 v0", r1="q2..3 k1 v1", r2="q4..5 k2 v2", r3="q6..7 k3 v3"
    )


def test_a02_a_rank_takes_its_slice_of_the_groups_q_heads(tmp_path):
    """8 q heads over 2 KV heads at tp 4: two heads, four rows, a rank."""
    source = Source(tmp_path / "hf", replace(EIGHT, heads=8))
    expected = [
        ("q0..3", {0}),
        ("q4..7", {1}),
        ("k0..1", {0, 1}),
        ("v0..1", {0, 1}),
        ("q8..11", {2}),
        ("q12..15", {3}),
        ("k2..3", {2, 3}),
        ("v2..3", {2, 3}),
    ]
    source.cut("tp=4").check_owners(QKV, expected)


def test_a02_fsdp_chunks_q_k_v_of_a_rank_end_to_end(tmp_path):
    """Six local rows q q k k v v over dp_shard 2: the ranks of a group share at one index only."""
    Source(tmp_path / "hf", EIGHT).cut("tp=4,dp_shard=2").check_owners(
        QKV,
        [
            ("q0..1", {0}),
            ("q2..3", {1}),
            ("k0", {0, 1}),
            ("k1", {4, 5}),
            ("v0..1", {4, 5}),
            ("q4..5", {2}),
            ("q6..7", {3}),
            ("k2", {2, 3}),
            ("k3", {6, 7}),
            ("v2..3", {6, 7}),
        ],
    )


def test_a02_fsdp_8_over_4_kv_heads_cuts_inside_groups(tmp_path):
    source = Source(tmp_path / "hf", replace(DENSE, kv_heads=4))
    assert source.cut("dp_shard=8").rows(QKV) == by_rank(
        r0="q0..1 k0", r1="k1 v0..1", r2="q2..3 k2", r3="k3 v2..3",
        r4="q4..5 k4", r5="k5 v4..5", r6="q6..7 k6", r7="k7 v6..7",
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(4, 2, 3), (6, 2, 4), (6, 3, 2), (4, 2, 8)])
def test_a02_tp_that_fits_neither_kv_nor_q_heads_is_refused(tmp_path, heads, kv_heads, tp):
    config = replace(DENSE, heads=heads, kv_heads=kv_heads, intermediate=24)
    with pytest.raises(LayoutError, match=rf"(qkv|o)_proj.weight.*tp={tp}"):
        Source(tmp_path / "hf", config).cut(f"tp={tp}")
    assert not (tmp_path / "sharded").exists()


# -- A03: gate_up in pairs --------------------------------------------------------------------


def test_a03_gate_and_up_rows_go_in_pairs_and_down_follows_by_columns(tmp_path):
    shards = Source(tmp_path / "hf", DENSE).cut("tp=2")
    assert shards.rows(GATE_UP) == {0: "g0 u0 g1 u1 g2 u2", 1: "g3 u3 g4 u4 g5 u5"}
    assert shards.rows(DOWN) == {
        0: "d0[0:3] d1[0:3] d2[0:3] d3[0:3]",
        1: "d0[3:6] d1[3:6] d2[3:6] d3[3:6]",
    }


def test_a03_three_pairs_over_tp_2_are_refused_though_the_six_rows_divide(tmp_path):
    with pytest.raises(
        LayoutError, match=r"(gate_up|down)_proj.weight.*tp=2 does not divide the 3 units"
    ):
        Source(tmp_path / "hf", replace(DENSE, intermediate=3)).cut("tp=2")
    assert not (tmp_path / "sharded").exists()


def test_a03_dp_shard_cuts_inside_pairs_unevenly(tmp_path):
    """Twelve rows over 5 ranks are 3, 3, 3, 3 and none."""
    assert Source(tmp_path / "hf", DENSE).cut("dp_shard=5").rows(GATE_UP) == {
        0: "g0 u0 g1",
        1: "u1 g2 u2",
        2: "g3 u3 g4",
        3: "u4 g5 u5",
    }


def test_a03_dp_shard_cuts_what_tp_left(tmp_path):
    assert Source(tmp_path / "hf", DENSE).cut("dp_shard=2,tp=2").rows(GATE_UP) == {
        0: "g0 u0 g1",
        1: "g3 u3 g4",
        2: "u1 g2 u2",
        3: "u4 g5 u5",
    }


# -- A01, A09, A12: experts -------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a01_both_source_layouts_give_pairs_expert_by_expert(tmp_path, family, fused):
    config = replace(SPARSE, family=family, hidden=5)
    shards = Source(tmp_path / "hf", config, fused=fused).cut()
    assert shards.ranks[0][EXPERTS_UP].shape == (4, 12, 5)
    assert shards.rows(EXPERTS_UP) == {0: expert_pairs("0123")}
    assert shards.ranks[0][EXPERTS_DOWN].shape == (4, 5, 6)
    assert shards.rows(EXPERTS_DOWN) == by_rank(r0="0d0..4 1d0..4 2d0..4 3d0..4")
    assert shards.rows("model.layers.0.mlp.router.weight") == by_rank(r0="r0..3")
    assert not [name for name in shards.ranks[0] if "block_sparse_moe" in name or "gate." in name]


def test_a01_an_expert_that_nothing_fills_is_refused(tmp_path):
    hole = "model.layers.0.mlp.experts.2.up_proj.weight"
    with pytest.raises(MappingError, match=re.escape(hole)):
        Source(tmp_path / "hf", SPARSE, drop=[hole]).cut()
    assert not (tmp_path / "sharded").exists()


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_a09_square_experts_keep_their_orientation(tmp_path, fused):
    """E=2, H=F=4: gates hold 0 to 31, ups 32 to 63, downs 64 to 95."""
    at = "model.layers.0.mlp.experts."
    values = {
        f"{at}{e}.{part}_proj.weight": (torch.arange(16.0) + first + 16 * e).reshape(4, 4)
        for first, part in ((0, "gate"), (32, "up"), (64, "down"))
        for e in range(2)
    }
    config = replace(SPARSE, experts=2, moe_intermediate=4)
    Source(tmp_path / "hf", config, fused=fused, values=values).cut("dp_shard=2,ep=2")
    [folder] = [path for path in (tmp_path / "sharded").iterdir() if path.is_dir()]
    first, second = (load_file(folder / f"rank-0000{rank}.safetensors") for rank in range(2))
    expected = [
        [0, 1, 2, 3], [32, 33, 34, 35], [4, 5, 6, 7], [36, 37, 38, 39],
        [8, 9, 10, 11], [40, 41, 42, 43], [12, 13, 14, 15], [44, 45, 46, 47],
    ]  # fmt: skip
    down = [[64, 65, 66, 67], [68, 69, 70, 71], [72, 73, 74, 75], [76, 77, 78, 79]]
    assert first[f"{EXPERTS_UP}#0"].tolist() == [expected]
    assert first[f"{EXPERTS_DOWN}#0"].tolist() == [down]
    assert second[f"{EXPERTS_UP}#1"].tolist() == [[[n + 16 for n in row] for row in expected]]
    assert second[f"{EXPERTS_DOWN}#1"].tolist() == [[[n + 16 for n in row] for row in down]]


@pytest.mark.parametrize(
    ("experts", "layout", "expected"),
    [
        (4, "dp_shard=2,ep=2", {0: "01", 1: "23"}),
        (4, "cp=2,ep=2", {0: "01", 1: "23"}),
        (4, "tp=2,ep=2", {0: "01", 1: "23"}),
        (4, "dp_shard=4,ep=4", {0: "0", 1: "1", 2: "2", 3: "3"}),
        (4, "dp_shard=2,tp=2,ep=2", {0: "0", 1: "2", 2: "1", 3: "3"}),
        (4, "dp_shard=2,tp=2", {0: "0", 1: "1", 2: "2", 3: "3"}),
        (6, "dp_shard=4,ep=2", {0: "01", 1: "34", 2: "2", 3: "5"}),
        (8, "dp_shard=6,ep=2", {0: "01", 1: "45", 2: "23", 3: "67"}),
    ],
)
def test_a12_experts_are_global_and_cut_by_ep_then_efsdp(tmp_path, experts, layout, expected):
    shards = Source(tmp_path / "hf", replace(SPARSE, experts=experts)).cut(layout)
    assert shards.rows(EXPERTS_UP) == {r: expert_pairs(es) for r, es in expected.items()}
    assert shards.rows(EXPERTS_DOWN) == {
        r: rows(" ".join(f"{e}d0..3" for e in es)) for r, es in expected.items()
    }


def test_a12_fewer_experts_than_efsdp_are_cut_on_dim_1(tmp_path):
    shards = Source(tmp_path / "hf", SPARSE).cut("dp_shard=8,ep=4")
    up = {e: expert_pairs([e], 0, 3) for e in range(4)}
    up |= {4 + e: expert_pairs([e], 3, 6) for e in range(4)}
    assert shards.rows(EXPERTS_UP) == up
    assert shards.rows(EXPERTS_DOWN) == by_rank(
        r0="0d0..1", r1="1d0..1", r2="2d0..1", r3="3d0..1",
        r4="0d2..3", r5="1d2..3", r6="2d2..3", r7="3d2..3",
    )  # fmt: skip


def test_a12_replicas_of_an_expert_rank_store_it_once(tmp_path):
    shards = Source(tmp_path / "hf", SPARSE).cut("dp_replicate=2,dp_shard=2,ep=2")
    shards.check_owners(EXPERTS_UP, [(expert_pairs("01"), {0, 2}), (expert_pairs("23"), {1, 3})])


def test_a12_the_second_stage_has_its_own_expert_ranks(tmp_path):
    shards = Source(tmp_path / "hf", replace(SPARSE, layers=2)).cut("pp=2,tp=2,ep=2")
    second = EXPERTS_UP.replace("layers.0", "layers.1")
    assert shards.rows(EXPERTS_UP) == {0: expert_pairs("01"), 1: expert_pairs("23")}
    assert shards.rows(second) == {2: expert_pairs("01"), 3: expert_pairs("23")}


@pytest.mark.parametrize(
    ("sizes", "layout", "message"),
    [
        ({}, "dp_shard=3,ep=3", r"ep=3 does not divide its 4 experts"),
        ({"hidden": 5}, "dp_shard=8,ep=4", r"experts.down_proj.weight"),
    ],
)
def test_a12_experts_that_do_not_divide_are_refused(tmp_path, sizes, layout, message):
    with pytest.raises(LayoutError, match=message):
        Source(tmp_path / "hf", replace(SPARSE, **sizes)).cut(layout)
    assert not (tmp_path / "sharded").exists()


# -- A20: biases and small norms --------------------------------------------------------------


def test_a20_qkv_biases_follow_the_rows_of_the_weight(tmp_path):
    shards = Source(tmp_path / "hf", replace(DENSE, family="qwen2")).cut("tp=2")
    expected = by_rank(r0="q0..3 k0..1 v0..1", r1="q4..7 k2..3 v2..3")
    assert shards.rows(QKV) == shards.rows(QKV.replace("weight", "bias")) == expected


def test_a20_two_layers_of_biases_and_norms_are_all_there_once(tmp_path):
    config = replace(DENSE, family="qwen3", layers=2)
    sizes = {"q": 8, "k": 4, "v": 4, "o": 4}
    biases = {
        f"model.layers.{layer}.self_attn.{x}_proj.bias": (n,)
        for layer in range(2)
        for x, n in sizes.items()
    }
    source = Source(tmp_path / "hf", config, add=biases, attention_bias=True)
    shards = source.cut("tp=2")
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn."
        assert shards.rows(f"{at}qkv_proj.bias") == by_rank(
            r0="q0..3 k0..1 v0..1", r1="q4..7 k2..3 v2..3"
        )
        shards.check_owners(f"{at}o_proj.bias", [("o0..3", {0, 1})])
        shards.check_owners(f"{at}q_norm.weight", [("Q0..1", {0, 1})])
        shards.check_owners(f"{at}k_norm.weight", [("K0..1", {0, 1})])
    stored = sum(t.numel() for entries in shards.ranks.values() for t in entries.values())
    assert stored == sum(torch.Size(shape).numel() for shape in source.shapes.values())


def test_a20_mlp_biases_go_in_pairs_and_the_row_parallel_one_is_whole(tmp_path):
    at = "model.layers.0.mlp."
    add = {f"{at}{x}_proj.bias": (n,) for x, n in (("gate", 6), ("up", 6), ("down", 4))}
    shards = Source(tmp_path / "hf", DENSE, add=add, mlp_bias=True).cut("tp=2")
    pairs = {0: "g0 u0 g1 u1 g2 u2", 1: "g3 u3 g4 u4 g5 u5"}
    assert shards.rows(f"{at}gate_up_proj.bias") == pairs
    shards.check_owners(f"{at}down_proj.bias", [("d0..3", {0, 1})])


def test_a20_a_source_tensor_that_no_rule_consumes_is_listed(tmp_path):
    extra = "model.layers.0.self_attn.q_norm.weight"
    with pytest.raises(MappingError, match=re.escape(extra)):
        Source(tmp_path / "hf", DENSE, add={extra: (2,)}).cut()
    assert not (tmp_path / "sharded").exists()


# -- A04: vocabulary padding ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "layout", "expected"),
    [
        (50257, Topology(vocab_multiple=128), {0: (0, 50256)}),
        (50257, Topology(dp_shard=2, vocab_multiple=128), {0: (0, 25151), 1: (25152, 50256)}),
        (50257, Topology(tp=2, vocab_multiple=128), {0: (0, 25215), 1: (25216, 50256)}),
        (65535, Topology(tp=2), {0: (0, 32767), 1: (32768, 65534)}),
        (13, Topology(tp=2, vocab_multiple=4), {0: (0, 7), 1: (8, 12)}),
        (13, Topology(tp=4), {0: (0, 3), 1: (4, 7), 2: (8, 11), 3: (12, 12)}),
        (5, Topology(tp=4, vocab_multiple=4), {0: (0, 3), 1: (4, 4)}),
        (
            13,
            Topology(tp=2, dp_shard=2, vocab_multiple=4),
            {0: (0, 3), 1: (8, 11), 2: (4, 7), 3: (12, 12)},
        ),
        (13, Topology(tp=2, dp_shard=3), {0: (0, 2), 1: (7, 9), 2: (3, 5), 3: (10, 12), 4: (6, 6)}),
    ],
)
def test_a04_rows_are_cut_as_if_padded_and_padding_is_not_stored(tmp_path, vocab, layout, expected):
    shards = Source(tmp_path / "hf", replace(DENSE, vocab=vocab, intermediate=8)).cut(layout)
    for name, at in ((EMBEDDING, "e"), (HEAD, "h")):
        cut = {rank: rows(f"{at}{first}..{last}") for rank, (first, last) in expected.items()}
        assert shards.rows(name) == cut
        assert shards.manifest["tensors"][name]["shape"] == [vocab, 4]
    assert json.loads((shards.url / "config.json").read_text())["vocab_size"] == vocab


def test_a04_a_save_at_tp_2_reshards_to_tp_8_without_its_padding(tmp_path):
    config = replace(DENSE, heads=8, vocab=50257, intermediate=8)
    first = Source(tmp_path / "hf", config).cut(Topology(tp=2, vocab_multiple=128))
    layout = Topology(tp=8, vocab_multiple=128)
    d9d_ckpt.reshard(str(first.url), str(tmp_path / "eight"), layout=layout, workers=1)
    second = Shards(tmp_path / "eight", first.shapes)
    assert second.rows(EMBEDDING) == by_rank(
        r0="e0..6399", r1="e6400..12799", r2="e12800..19199", r3="e19200..25599",
        r4="e25600..31999", r5="e32000..38399", r6="e38400..44799", r7="e44800..50256",
    )  # fmt: skip


# -- A05: tied heads --------------------------------------------------------------------------


def test_a05_a_tied_head_is_stored_once_by_the_first_stage(tmp_path):
    """(d): only the embedding is in the file."""
    config = replace(DENSE, layers=2, tied=True)
    shards = Source(tmp_path / "hf", config).cut("pp=2")
    assert shards.rows(EMBEDDING) == by_rank(r0="e0..7")
    assert not shards.ranks_with(HEAD)
    assert HEAD not in shards.manifest["tensors"]
    nbytes = {
        rank: sum(t.numel() * t.element_size() for t in entries.values())
        for rank, entries in shards.ranks.items()
    }
    load = api.plan(str(shards.url), load=True, layout="pp=2")
    assert [r.bytes_read for r in load.ranks] == [nbytes[0], nbytes[1] + 8 * 4 * 8]


def test_a05_a_tied_head_that_is_stored_twice_and_equal_is_written_once(tmp_path):
    values = {HEAD: coded(0, (8, 4))}
    shards = Source(tmp_path / "hf", replace(DENSE, tied=True), values=values).cut()
    assert shards.rows(EMBEDDING) == by_rank(r0="e0..7")
    assert HEAD not in shards.manifest["tensors"]


def test_a05_a_tied_head_that_differs_is_refused_with_both_names_and_the_difference(tmp_path):
    other = coded(0, (8, 4))
    other[5, 2] += 3
    source = Source(tmp_path / "hf", replace(DENSE, tied=True), values={HEAD: other})
    with pytest.raises(MappingError, match=rf"{HEAD}.*{EMBEDDING}.*by up to 3"):
        source.cut()
    assert not (tmp_path / "sharded").exists()


def test_a05_an_untied_head_that_is_absent_is_refused(tmp_path):
    with pytest.raises(MappingError, match=rf"missing.*{HEAD}"):
        Source(tmp_path / "hf", DENSE, drop=[HEAD]).cut()
    assert not (tmp_path / "sharded").exists()


# -- pipeline stages --------------------------------------------------------------------------


def stages_of(shards, layers):
    """(ranks of each layer, of the embedding, of the final norm, of the head)."""
    of_layer = [
        {
            rank
            for rank, entries in shards.ranks.items()
            if any(name.startswith(f"model.layers.{layer}.") for name in entries)
        }
        for layer in range(layers)
    ]
    return of_layer, *(shards.ranks_with(name) for name in (EMBEDDING, NORM, HEAD))


@pytest.mark.parametrize(
    ("layout", "expected", "last"),
    [
        (Topology(pp=3), [0, 0, 0, 0, 1, 1, 1, 2, 2, 2], 2),
        (Topology(pp=4), [0, 0, 0, 1, 1, 1, 2, 2, 3, 3], 3),
        (Topology(pp=3, stages=(1, 7, 2)), [0, 1, 1, 1, 1, 1, 1, 1, 2, 2], 2),
        (Topology(pp=2, virtual=2), [0, 0, 0, 1, 1, 1, 0, 0, 1, 1], 1),
        (Topology(pp=2, virtual=2, order="v"), [0, 0, 0, 1, 1, 1, 1, 1, 0, 0], 0),
        (Topology(pp=2, virtual=2, stages=(1, 2, 3, 4)), [0, 1, 1, 0, 0, 0, 1, 1, 1, 1], 1),
    ],
)
def test_stages_hold_contiguous_layers_and_the_ends(tmp_path, layout, expected, last):
    shards = Source(tmp_path / "hf", replace(DENSE, layers=10)).cut(layout)
    layers, embedding, norm, head = stages_of(shards, 10)
    assert layers == [{rank} for rank in expected]
    assert (embedding, norm, head) == ({0}, {last}, {last})


def test_stages_are_whole_blocks_of_ranks(tmp_path):
    shards = Source(tmp_path / "hf", replace(DENSE, layers=3)).cut("pp=2,dp_shard=2")
    layers, embedding, norm, head = stages_of(shards, 3)
    assert layers == [{0, 1}, {0, 1}, {2, 3}]
    assert (embedding, norm, head) == ({0, 1}, {2, 3}, {2, 3})


def test_stage_counts_and_vocab_multiple_come_from_yaml(tmp_path):
    layout = tmp_path / "layout.yaml"
    layout.write_text("pp: 2\ntp: 2\nstages: [1, 3]\nvocab_multiple: 3\n")
    shards = Source(tmp_path / "hf", replace(DENSE, layers=4)).cut(str(layout))
    layers, *_ = stages_of(shards, 4)
    assert layers == [{0, 1}, {2, 3}, {2, 3}, {2, 3}]
    assert shards.rows(EMBEDDING) == by_rank(r0="e0..5", r1="e6..7")
    assert shards.rows(HEAD) == by_rank(r2="h0..5", r3="h6..7")


def test_numbers_of_layers_are_not_strings(tmp_path):
    """Layer 10 sorts before layer 2 as text; the codes say which layer each tensor is of."""
    shards = Source(tmp_path / "hf", replace(DENSE, layers=12)).cut("pp=6")
    for layer in range(12):
        name = QKV.replace("layers.0", f"layers.{layer}")
        assert shards.rows(name) == {layer // 2: rows("q0..3 k0..1 v0..1 q4..7 k2..3 v2..3")}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pp": 5}, "5 stages for 4 layers"),
        ({"pp": 2, "stages": (1, 2)}, "hold 3 layers, the model has 4"),
    ],
)
def test_stages_that_do_not_fit_the_layers_are_refused(tmp_path, keys, message):
    with pytest.raises(LayoutError, match=message):
        Source(tmp_path / "hf", replace(DENSE, layers=4)).cut(Topology(**keys))
    assert not (tmp_path / "sharded").exists()


# -- owners of what several ranks hold, and rank numbers ---------------------------------------


def test_ranks_are_numbered_pp_dp_replicate_dp_shard_cp_tp(tmp_path):
    """32 vocabulary rows: 16 to each tp rank, 4 of them to each of dp_shard x cp, 2 to a replica."""
    config = replace(DENSE, layers=2, hidden=WIDE, vocab=32)
    shards = Source(tmp_path / "hf", config).cut("pp=2,dp_replicate=2,dp_shard=2,cp=2,tp=2")
    first = [0, 16, 4, 20, 8, 24, 12, 28, 2, 18, 6, 22, 10, 26, 14, 30]
    assert shards.rows(EMBEDDING) == {rank: f"e{row} e{row + 1}" for rank, row in enumerate(first)}
    assert shards.rows(HEAD) == {16 + rank: f"h{row} h{row + 1}" for rank, row in enumerate(first)}


def test_ep_is_innermost_over_dp_shard_cp_and_tp(tmp_path):
    """The expert rank is the rank in its stage and replica, modulo ep."""
    config = replace(SPARSE, experts=8)
    shards = Source(tmp_path / "hf", config).cut("dp_shard=2,cp=2,tp=2,ep=4")
    experts = {rank: expert_pairs([2 * (rank % 4) + rank // 4]) for rank in range(8)}
    assert shards.rows(EXPERTS_UP) == experts


def test_replicated_bytes_from_64_kib_on_are_cut_over_all_holders(tmp_path):
    config = replace(DENSE, hidden=WIDE)
    shards = Source(tmp_path / "hf", config).cut("dp_replicate=2,tp=2")
    expected = by_rank(r0="n0..2047", r1="n2048..4095", r2="n4096..6143", r3="n6144..8191")
    assert shards.rows(NORM) == expected


def test_replicated_bytes_below_64_kib_go_whole_to_one_holder(tmp_path):
    config = replace(DENSE, hidden=WIDE - 1)
    shards = Source(tmp_path / "hf", config).cut("dp_replicate=2,tp=2")
    shards.check_owners(NORM, [("n0..8190", {0, 1, 2, 3})])


def test_rows_that_do_not_divide_leave_no_holder_without(tmp_path):
    """Rule: every rank writes its share; seven rows over four replicas are two each, one of them 1."""
    config = replace(DENSE, hidden=WIDE, vocab=7)
    shards = Source(tmp_path / "hf", config).cut("dp_replicate=4")
    found = shards.rows(EMBEDDING)
    assert " ".join(found[rank] for rank in range(4)) == rows("e0..6")
    assert sorted(len(text.split()) for text in found.values()) == [1, 2, 2, 2]


def test_small_boxes_go_to_the_holders_in_turn(tmp_path):
    shards = Source(tmp_path / "hf", replace(DENSE, layers=5)).cut("dp_replicate=3")
    counts = Counter(rank for rank, entries in shards.ranks.items() for _ in entries)
    total = len(shards.manifest["tensors"])
    assert sorted(counts.values()) == sorted(len(range(rank, total, 3)) for rank in range(3))
    assert all(len(shards.boxes(name)) == 1 for name in shards.manifest["tensors"])


def test_reshard_names_the_owners_that_convert_names(tmp_path):
    layout = "pp=2,dp_replicate=2,dp_shard=3,tp=2,ep=2"
    config = replace(SPARSE, layers=3, hidden=12)
    converted = Source(tmp_path / "hf", config).cut(layout)
    d9d_ckpt.convert(str(tmp_path / "hf"), str(tmp_path / "a"), layout="tp=4,cp=2,ep=2", workers=1)
    d9d_ckpt.reshard(str(tmp_path / "a"), str(tmp_path / "b"), layout=layout, workers=1)
    resharded = Shards(tmp_path / "b", converted.shapes)
    assert converted.ranks.keys() == resharded.ranks.keys()
    for rank, entries in converted.ranks.items():
        assert entries.keys() == resharded.ranks[rank].keys()
        assert all(torch.equal(t, resharded.ranks[rank][name]) for name, t in entries.items())


# -- manifest and files -----------------------------------------------------------------------


def test_a_rank_that_owns_nothing_writes_no_file(tmp_path):
    """Every tensor has at most four rows: with dp_shard 20, ceil-size chunks end early."""
    shards = Source(tmp_path / "hf", DENSE).cut("dp_shard=20")
    files = {path.name for path in (shards.url / shards.manifest["save_id"]).iterdir()}
    assert files == {f"rank-{rank:05d}.safetensors" for rank in range(16)}


LAYOUTS = [
    "pp=1",
    "pp=2,dp_shard=2,tp=2,ep=4",
    "dp_replicate=2,dp_shard=3,tp=2,ep=2",
    "pp=3,cp=2,tp=4,ep=2",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_manifest_describes_every_entry_of_every_file_and_no_other(tmp_path, layout):
    config = replace(SPARSE, layers=3, hidden=12)
    shards = Source(tmp_path / "hf", config).cut(layout)
    manifest, url = shards.manifest, shards.url
    covered = {}
    promised = {}
    for name, tensor in manifest["tensors"].items():
        covered[name] = torch.zeros(tensor["shape"], dtype=torch.int64)
        for number, chunk in enumerate(tensor["chunks"]):
            box = tuple(
                slice(a, a + n) for a, n in zip(chunk["start"], chunk["shape"], strict=True)
            )
            covered[name][box] += 1
            entry = name if len(tensor["chunks"]) == 1 else f"{name}#{number}"
            promised[chunk["file"], entry] = (tensor["dtype"], chunk)
    assert all((count == 1).all() for count in covered.values())
    found = {}
    for rank in shards.ranks:
        file = f"{manifest['save_id']}/rank-{rank:05d}.safetensors"
        raw = (url / file).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt", "save_id": manifest["save_id"]}
        for entry, value in header.items():
            dtype, chunk = promised[file, entry]
            begin, end = (8 + length + at for at in value["data_offsets"])
            assert (value["dtype"], value["shape"]) == (dtype, chunk["shape"])
            assert (chunk["offset"], chunk["nbytes"]) == (begin, end - begin)
            assert chunk["xxh3"] == [xxhash.xxh3_64_hexdigest(raw[begin:end])]
            found[file, entry] = (dtype, chunk)
        assert manifest["files"][file] == {
            "nbytes": len(raw),
            "header_xxh3": xxhash.xxh3_64_hexdigest(raw[: 8 + length]),
        }
    assert found == promised
    small = {name for name in manifest["files"] if "/" not in name}
    assert small == {"config.json"}
    assert {path.name for path in url.iterdir()} == small | {"manifest.json", manifest["save_id"]}


def test_checksums_are_one_per_mib_and_every_entry_lies_where_the_reference_reader_finds_it(
    tmp_path,
):
    config = replace(DENSE, hidden=WIDE, vocab=40)
    shards = Source(tmp_path / "hf", config).cut()
    [chunk] = shards.manifest["tensors"][EMBEDDING]["chunks"]
    assert chunk["nbytes"] == 40 * WIDE * 8
    raw = (shards.url / chunk["file"]).read_bytes()
    stored = raw[chunk["offset"] :][: chunk["nbytes"]]
    assert chunk["xxh3"] == [
        xxhash.xxh3_64_hexdigest(stored[at : at + 2**20]) for at in (0, 2**20, 2 * 2**20)
    ]
    with safe_open(shards.url / chunk["file"], "pt") as file:
        assert file.get_tensor(EMBEDDING).numpy().tobytes() == stored


def test_the_manifest_names_the_layout_the_family_and_the_config(tmp_path):
    source = Source(tmp_path / "hf", SPARSE)
    manifest = source.cut("dp_shard=2,tp=2,ep=4").manifest
    assert (manifest["format"], manifest["version"]) == ("d9d-sharded", 1)
    axes = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "ep": 4}
    assert axes.items() <= manifest["layout"].items()
    assert manifest["model"]["family"] == "qwen3_moe"
    assert manifest["model"]["config"] == json.loads((source.path / "config.json").read_text())
    assert list(manifest)[-1] == "self_xxh3"
