"""Rows of class architecture: what fusing, cutting, tying and dropping do to hand-written weights."""

import json
import os

import pytest
import torch
from helpers.checkpoints import (
    SINGLE,
    Model,
    cli,
    convert,
    equal,
    everything,
    fused,
    manifest,
    model,
    read_hf,
    read_ranks,
    read_sharded,
    refused,
    same,
    training,
    write_hf,
    write_model,
    write_raw,
)

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")


def sharded(src, dst, layout, *argv):
    return cli("convert", src, dst, "--to", "sharded", "--layout", layout, "--workers", 1, *argv)


def rows(*labels):
    """A matrix whose rows carry their labels: ``q1`` row 0 is 110, row 1 is 111, k0 is 200 and so on."""
    out = []
    for label in labels:
        kind, number = label[0], int(label[1:])
        out.append(100.0 * (1 + "qkvgu".index(kind)) + 10 * number)
    return out


def column(values, width=2):
    return torch.tensor(values).reshape(-1, 1).repeat(1, width)


def layout_file(path, **values):
    path.write_text(json.dumps(values))
    return path


# -- experts -----------------------------------------------------------------------------------


def small_experts():
    """E=4, F=6, H=8 with distinct values, written by hand in the split layout."""
    made = model("qwen3_moe", layers=1)
    at = "model.layers.0.mlp.experts."
    for e in range(4):
        made.tensors[f"{at}{e}.gate_proj.weight"] = torch.full((6, 8), 100.0 + e)
        made.tensors[f"{at}{e}.up_proj.weight"] = torch.full((6, 8), 200.0 + e)
        made.tensors[f"{at}{e}.down_proj.weight"] = torch.full((8, 6), 300.0 + e)
    return made


def test_a01_list_and_fused_experts_load_to_the_same_bits(tmp_path):
    made = small_experts()
    both = {"list": made, "fused": fused(made)}
    found = {}
    for name, m in both.items():
        src = write_model(tmp_path / name, m)
        convert(src, tmp_path / f"{name}.s", "sharded", "--layout", "ep=2,dp_shard=2")
        found[name] = read_sharded(tmp_path / f"{name}.s")
    assert equal(found["list"], found["fused"])
    pairs = found["list"]["model.layers.0.mlp.experts.gate_up_proj.weight"]
    assert pairs.shape == (4, 12, 8)
    for e in range(4):
        assert (pairs[e, 0::2] == 100.0 + e).all()
        assert (pairs[e, 1::2] == 200.0 + e).all()
    down = found["list"]["model.layers.0.mlp.experts.down_proj.weight"]
    assert [down[e].unique().item() for e in range(4)] == [300.0, 301.0, 302.0, 303.0]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("kept", ["split", "fused"])
@pytest.mark.parametrize("wanted", ["split", "fused", None])
@pytest.mark.parametrize("through", ["sharded", "directly"])
def test_a01_export_writes_exactly_the_chosen_layout(tmp_path, family, kept, wanted, through):
    made = model(family)
    forms = {"split": made, "fused": fused(made)}
    src = write_model(tmp_path / "src", forms[kept], shards=2)
    if through == "sharded":
        convert(src, tmp_path / "s", "sharded", "--layout", "tp=2,ep=2")
        src = tmp_path / "s"
    argv = ("--hf-experts", wanted) if wanted else ()
    convert(src, tmp_path / "dst", "huggingface", "--max-shard-size", 3000, *argv)
    assert equal(read_hf(tmp_path / "dst"), forms[wanted or kept].tensors)
    index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(forms[wanted or kept].tensors)


def test_a01_fused_layout_keeps_gate_rows_before_up_rows(tmp_path):
    src = write_model(tmp_path / "src", small_experts())
    convert(src, tmp_path / "dst", "huggingface", "--hf-experts", "fused")
    found = read_hf(tmp_path / "dst")["model.layers.0.mlp.experts.gate_up_proj"]
    for e in range(4):
        assert (found[e, 0:6] == 100.0 + e).all()
        assert (found[e, 6:12] == 200.0 + e).all()


def test_a01_an_expert_that_is_not_there_is_named(tmp_path):
    made = small_experts()
    del made.tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    src = write_model(tmp_path / "src", made)
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, "experts.2.up_proj.weight", "missing")
    assert not (tmp_path / "x").exists()


def test_a01_both_layouts_at_once_are_refused(tmp_path):
    made = small_experts()
    src = write_model(tmp_path / "src", Model(made.tensors | fused(made).tensors, made.config))
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, "experts.0.gate_proj.weight", "no rule")


def test_a01_dense_families_have_no_experts_to_lay_out(tmp_path):
    src = write_model(tmp_path / "src", model("llama"))
    result = cli("convert", src, tmp_path / "x", "--to", "huggingface", "--hf-experts", "fused")
    refused(result, 4, "llama", "no experts")


def test_a12_experts_have_global_ids_and_contiguous_owners(tmp_path):
    src = write_model(tmp_path / "src", small_experts())
    convert(src, tmp_path / "s", "sharded", "--layout", "dp_shard=2,ep=2")
    name = "model.layers.0.mlp.experts.down_proj.weight"
    chunks = manifest(tmp_path / "s")["tensors"][name]["chunks"]
    assert [(c["start"], c["shape"]) for c in chunks] == [
        ([0, 0, 0], [2, 8, 6]),
        ([2, 0, 0], [2, 8, 6]),
    ]
    ranks = read_ranks(tmp_path / "s")
    for r in (0, 1):
        mine = ranks[r][f"{name}#{r}"]
        assert [mine[e].unique().item() for e in range(2)] == [300.0 + 2 * r, 301.0 + 2 * r]
    convert(tmp_path / "s", tmp_path / "hf", "huggingface")
    ids = {n.split(".")[5] for n in read_hf(tmp_path / "hf") if ".experts." in n}
    assert ids == {"0", "1", "2", "3"}


def test_a12_more_than_ten_layers_and_experts_are_in_numeric_order(tmp_path):
    made = model("qwen3_moe", layers=12, experts=12)
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "s", "sharded", "--layout", "dp_shard=3,ep=3,pp=4")
    assert equal(read_sharded(tmp_path / "s"), training(made))
    ranks = read_ranks(tmp_path / "s")
    stage = {int(n.split(".")[2]): r // 3 for r, t in ranks.items() for n in t if ".layers." in n}
    assert stage == {layer: layer // 3 for layer in range(12)}


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("dp_shard=8,ep=8", ("ep=8", "4 experts")),
        ("dp_shard=3,ep=3", ("ep=3", "4 experts")),
        ("tp=2,ep=4", ("ep=4", "2")),
    ],
)
def test_a12_ep_that_does_not_divide_is_refused(tmp_path, layout, words):
    src = write_model(tmp_path / "src", small_experts())
    refused(sharded(src, tmp_path / "x", layout), 4, *words)
    assert not (tmp_path / "x").exists()


def test_a09_square_experts_are_oriented_by_family_and_format(tmp_path):
    """E=2, H=F=4, counted: the shape could not tell which dim is which."""
    made = model("qwen3_moe", layers=1, hidden=4, heads=2, kv_heads=2, head_dim=2, experts=2,
                 moe_intermediate=4)  # fmt: skip
    at = "model.layers.0.mlp.experts."
    names = [n for n in made.tensors if n.startswith(at)]
    for n in names:
        del made.tensors[n]
    gate_up = torch.arange(64.0).reshape(2, 8, 4)
    down = torch.arange(100.0, 132.0).reshape(2, 4, 4)
    for name, tensor in (
        (f"{at}gate_up_proj", gate_up),
        (f"{at}down_proj", down),
        ("model.layers.0.mlp.gate.weight", torch.ones(2, 4)),
    ):
        made.tensors[name] = tensor
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=1")
    found = read_sharded(tmp_path / "s")
    pairs = found[f"{at}gate_up_proj.weight"]
    # Expert 0: gate rows are 0..3, 4..7, 8..11, 12..15; up rows begin at 16.
    assert pairs[0].tolist() == [
        [0, 1, 2, 3], [16, 17, 18, 19], [4, 5, 6, 7], [20, 21, 22, 23],
        [8, 9, 10, 11], [24, 25, 26, 27], [12, 13, 14, 15], [28, 29, 30, 31],
    ]  # fmt: skip
    assert pairs[1, 0].tolist() == [32, 33, 34, 35]
    assert pairs[1, 1].tolist() == [48, 49, 50, 51]
    assert torch.equal(found[f"{at}down_proj.weight"], down)
    convert(tmp_path / "s", tmp_path / "hf", "huggingface", "--hf-experts", "split")
    split = read_hf(tmp_path / "hf")
    assert split[f"{at}1.down_proj.weight"].tolist() == down[1].tolist()
    assert split[f"{at}1.up_proj.weight"].tolist() == gate_up[1, 4:].tolist()


def test_a09_exchanged_dims_are_refused_where_the_shape_tells(tmp_path):
    made = fused(small_experts())
    name = "model.layers.0.mlp.experts.down_proj"
    made.tensors[name] = made.tensors[name].transpose(1, 2)
    src = write_model(tmp_path / "src", made)
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, name, "[4, 6, 8]", "[4, 8, 6]", "exchanged")


# -- attention and MLP -------------------------------------------------------------------------


def hand_written(kv=2, width=6):
    """nq=4, head_dim=2: every row of q, k, v, gate and up carries its name."""
    made = model("llama", layers=1, head_dim=2, kv_heads=kv, heads=4, hidden=8, intermediate=width)
    at = "model.layers.0."
    for x, heads in (("q", 4), ("k", kv), ("v", kv)):
        values = [rows(f"{x}{h}")[0] + r for h in range(heads) for r in range(2)]
        made.tensors[f"{at}self_attn.{x}_proj.weight"] = column(values, 8)
    for x, name in (("g", "gate"), ("u", "up")):
        values = [rows(f"{x}{n}")[0] for n in range(width)]
        made.tensors[f"{at}mlp.{name}_proj.weight"] = column(values, 8)
    return made


def of_rank(path, rank, stem):
    """Labels of a rank's rows of a tensor, in the order of its chunks."""
    entries = {n: t for n, t in read_ranks(path)[rank].items() if n.partition("#")[0] == stem}
    ordered = sorted(entries, key=lambda n: int(n.partition("#")[2] or 0))
    values = torch.cat([entries[n][:, 0] for n in ordered]).tolist()
    return [f"{'qkvgu'[int(v) // 100 - 1]}{int(v) % 100 // 10}" for v in values]


QKV = "model.layers.0.self_attn.qkv_proj.weight"
GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"


def twice(*labels):
    return [x for label in labels for x in (label, label)]


def test_a02_fused_rows_go_kv_group_by_kv_group(tmp_path):
    src = write_model(tmp_path / "src", hand_written())
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=1")
    assert of_rank(tmp_path / "s", 0, QKV) == twice("q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1")
    convert(src, tmp_path / "s2", "sharded", "--layout", "tp=2")
    assert of_rank(tmp_path / "s2", 0, QKV) == twice("q0", "q1", "k0", "v0")
    assert of_rank(tmp_path / "s2", 1, QKV) == twice("q2", "q3", "k1", "v1")


def test_a02_tp_beyond_the_kv_heads_stores_replicated_kv_once(tmp_path):
    made = hand_written(width=8)
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=4")
    stored = [of_rank(tmp_path / "s", r, QKV) for r in range(4)]
    assert sorted(x for s in stored for x in s) == sorted(
        twice("q0", "q1", "q2", "q3", "k0", "k1", "v0", "v1")
    )
    for r in range(4):
        assert [x for x in stored[r] if x[0] == "q"] == twice(f"q{r}")
        assert {x for x in stored[r] if x[0] in "kv"} <= {f"k{r // 2}", f"v{r // 2}"}
    convert(tmp_path / "s", tmp_path / "hf", "huggingface")
    assert equal(read_hf(tmp_path / "hf"), made.tensors)


@pytest.mark.parametrize("layout", ["tp=1", "tp=2", "tp=4", "dp_shard=8", "tp=2,dp_shard=3"])
def test_a02_every_tp_gives_the_huggingface_rows_back(tmp_path, layout):
    made = hand_written(kv=4, width=8)
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "s", "sharded", "--layout", layout)
    convert(tmp_path / "s", tmp_path / "hf", "huggingface")
    assert equal(read_hf(tmp_path / "hf"), made.tensors)


@pytest.mark.parametrize("tp", [3, 8])
def test_a02_tp_that_cannot_place_the_heads_is_refused_with_the_numbers(tmp_path, tp):
    src = write_model(tmp_path / "src", hand_written())
    refused(sharded(src, tmp_path / "x", f"tp={tp}"), 4, f"tp={tp}", "model.layers.0.")
    assert not (tmp_path / "x").exists()


def test_a03_gate_and_up_rows_go_in_pairs(tmp_path):
    src = write_model(tmp_path / "src", hand_written())
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2")
    assert of_rank(tmp_path / "s", 0, GATE_UP) == ["g0", "u0", "g1", "u1", "g2", "u2"]
    assert of_rank(tmp_path / "s", 1, GATE_UP) == ["g3", "u3", "g4", "u4", "g5", "u5"]
    convert(tmp_path / "s", tmp_path / "hf", "huggingface")
    assert equal(read_hf(tmp_path / "hf"), hand_written().tensors)


def test_a03_odd_width_is_refused_even_though_twice_of_it_divides(tmp_path):
    src = write_model(tmp_path / "src", model("llama", intermediate=3))
    text = refused(sharded(src, tmp_path / "x", "tp=2"), 4, "tp=2", "mlp.", "divide")
    assert "3 units" in text
    assert not (tmp_path / "x").exists()


def test_a03_row_parallel_weights_are_cut_by_columns(tmp_path):
    made = hand_written()
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2")
    for name, width in (("self_attn.o_proj.weight", 4), ("mlp.down_proj.weight", 3)):
        full = made.tensors[f"model.layers.0.{name}"]
        for r, entries in read_ranks(tmp_path / "s").items():
            part = entries[f"model.layers.0.{name}#{r}"]
            assert torch.equal(part, full[:, r * width : (r + 1) * width])


def interleaved(heads, dim):
    """Rows of half-split RoPE heads as an interleaved consumer would want them."""
    return [
        h * dim + p * (dim // 2) + i for h in range(heads) for i in range(dim // 2) for p in (0, 1)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a14_huggingface_to_huggingface_never_permutes(tmp_path, family):
    width = {"moe_intermediate": 8} if family in ("qwen3_moe", "mixtral") else {}
    made = model(family, heads=4, kv_heads=2, head_dim=4, intermediate=8, **width)
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "copy", "huggingface")
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=4,dp_shard=2")
    assert (
        cli("reshard", tmp_path / "s", tmp_path / "s2", "--layout", "pp=2", "--workers", 1).code
        == 0
    )
    convert(tmp_path / "s2", tmp_path / "back", "huggingface")
    for path in ("copy", "back"):
        assert equal(read_hf(tmp_path / path), made.tensors)
    assert interleaved(2, 4) == [0, 2, 1, 3, 4, 6, 5, 7]
    q = read_hf(tmp_path / "back")["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(q[:8], q[:8][interleaved(2, 4)])


def test_a20_biases_and_norms_come_through_counted_and_placed(tmp_path):
    made = model("llama")
    config = made.config | {"attention_bias": True, "mlp_bias": True}
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, count in (
            ("self_attn.q_proj", 16), ("self_attn.k_proj", 8), ("self_attn.v_proj", 8),
            ("self_attn.o_proj", 8), ("mlp.gate_proj", 6), ("mlp.up_proj", 6), ("mlp.down_proj", 8),
        ):  # fmt: skip
            seed = len(made.tensors) * 1000.0
            made.tensors[f"{at}{name}.bias"] = torch.arange(seed, seed + count)
    src = write_hf(tmp_path / "src", made.tensors, config)
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2")
    found = read_sharded(tmp_path / "s")
    q, k, v = (made.tensors[f"model.layers.0.self_attn.{x}_proj.bias"] for x in "qkv")
    fused_bias = torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]])
    assert torch.equal(found["model.layers.0.self_attn.qkv_proj.bias"], fused_bias)
    ranks = read_ranks(tmp_path / "s")
    assert torch.equal(ranks[1]["model.layers.0.self_attn.qkv_proj.bias#1"], fused_bias[16:])
    gate, up = (made.tensors[f"model.layers.0.mlp.{x}_proj.bias"] for x in ("gate", "up"))
    assert torch.equal(
        found["model.layers.0.mlp.gate_up_proj.bias"], torch.stack([gate, up], 1).flatten()
    )
    owners = [r for r in ranks if "model.layers.0.self_attn.o_proj.bias" in ranks[r]]
    assert len(owners) == 1
    convert(tmp_path / "s", tmp_path / "hf", "huggingface")
    assert equal(read_hf(tmp_path / "hf"), made.tensors)


@pytest.mark.parametrize(("family", "added"), [("qwen2", 6), ("qwen3", 4)])
def test_a20_family_extras_are_as_many_out_as_in(tmp_path, family, added):
    made = model(family)
    assert len(made.tensors) == len(model("llama").tensors) + added
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2")
    report = convert(tmp_path / "s", tmp_path / "hf", "huggingface")
    assert report["tensors"] == len(made.tensors)
    assert equal(read_hf(tmp_path / "hf"), made.tensors)
    for name in ("q_norm", "k_norm"):
        entry = manifest(tmp_path / "s")["tensors"].get(f"model.layers.0.self_attn.{name}.weight")
        assert entry is None or len(entry["chunks"]) == 1


@pytest.mark.parametrize("name", ["self_attn.q_proj.bias", "self_attn.q_norm.weight", "x.weight"])
def test_a20_a_tensor_without_a_rule_stops_the_run(tmp_path, name):
    made = model("llama")
    made.tensors[f"model.layers.1.{name}"] = torch.ones(16)
    src = write_model(tmp_path / "src", made)
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, f"model.layers.1.{name}", "no rule", "llama")
    assert not (tmp_path / "x").exists()


# -- vocabulary --------------------------------------------------------------------------------


def with_vocab(rows_, **sizes):
    sizes = {
        "layers": 1,
        "hidden": 8,
        "heads": 8,
        "kv_heads": 1,
        "head_dim": 1,
        "intermediate": 8,
    } | sizes
    return model("llama", vocab=rows_, dtype="bfloat16", **sizes)


def vocab_rows(path, name):
    """(first row, rows) that each rank stores of a table."""
    out = {}
    for c in manifest(path)["tensors"][name]["chunks"]:
        out[int(c["file"].partition("rank-")[2][:5])] = (c["start"][0], c["shape"][0])
    return out


@pytest.mark.parametrize(("tp", "each"), [(2, 25216), (8, 6400)])
def test_a04_padded_rows_per_rank(tmp_path, tp, each):
    src = write_model(tmp_path / "src", with_vocab(50257))
    layout = layout_file(tmp_path / "l.yaml", tp=tp, vocab_multiple=128)
    convert(src, tmp_path / "s", "sharded", "--layout", layout)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert manifest(tmp_path / "s")["tensors"][name]["shape"] == [50257, 8]
        expected = {r: (r * each, min(each, 50257 - r * each)) for r in range(tp)}
        assert vocab_rows(tmp_path / "s", name) == expected


def test_a04_resharding_and_export_drop_the_padding(tmp_path):
    made = with_vocab(50257)
    src = write_model(tmp_path / "src", made)
    two, eight = (layout_file(tmp_path / f"{n}.yaml", tp=n, vocab_multiple=128) for n in (2, 8))
    convert(src, tmp_path / "s2", "sharded", "--layout", two)
    assert (
        cli("reshard", tmp_path / "s2", tmp_path / "s8", "--layout", eight, "--workers", 1).code
        == 0
    )
    convert(tmp_path / "s8", tmp_path / "hf", "huggingface")
    found = read_hf(tmp_path / "hf")
    assert found["model.embed_tokens.weight"].shape == found["lm_head.weight"].shape == (50257, 8)
    assert equal(found, made.tensors)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 50257


def test_a04_divisor_one_pads_to_tp_alone(tmp_path):
    src = write_model(
        tmp_path / "src", with_vocab(65535, hidden=2, heads=2, kv_heads=2, intermediate=2)
    )
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2")
    expected = {0: (0, 32768), 1: (32768, 32767)}
    assert vocab_rows(tmp_path / "s", "model.embed_tokens.weight") == expected


def test_a04_tied_tables_too(tmp_path):
    made = with_vocab(13, tied=True)
    src = write_model(tmp_path / "src", made)
    layout = layout_file(tmp_path / "l.yaml", tp=4, vocab_multiple=4)
    convert(src, tmp_path / "s", "sharded", "--layout", layout)
    # 13 rows padded to 16: four ranks of 4, the last of which stores one.
    assert [n for _, n in sorted(vocab_rows(tmp_path / "s", "model.embed_tokens.weight").values())] == [
        4, 4, 4, 1,
    ]  # fmt: skip
    convert(tmp_path / "s", tmp_path / "hf", "huggingface")
    assert equal(read_hf(tmp_path / "hf"), made.tensors)


# -- tied heads --------------------------------------------------------------------------------

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tied(head=None):
    made = model("llama", tied=True)
    if head is not None:
        made.tensors[HEAD] = head(made.tensors[EMBEDDING])
    return made


def test_a05_two_equal_tensors_are_stored_once_and_that_is_reported(tmp_path):
    src = write_model(tmp_path / "src", tied(lambda t: t.clone()))
    report = convert(src, tmp_path / "s", "sharded", "--layout", "pp=2")
    assert report["dropped"] == [HEAD]
    assert HEAD not in manifest(tmp_path / "s")["tensors"]
    report = convert(tmp_path / "s", tmp_path / "hf", "huggingface")
    assert equal(read_hf(tmp_path / "hf"), tied().tensors)
    total = sum(t.nbytes for t in tied().tensors.values())
    assert report["bytes_written"] == total


def test_a05_two_different_tensors_are_an_error_with_their_difference(tmp_path):
    src = write_model(tmp_path / "src", tied(lambda t: t + torch.eye(10, 8) * 0.5))
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, HEAD, EMBEDDING, "0.5", "tie_word_embeddings")
    assert not (tmp_path / "x").exists()


def test_a05_tied_tensors_of_two_dtypes_are_an_error(tmp_path):
    src = write_model(tmp_path / "src", tied(lambda t: t.bfloat16()))
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, HEAD, EMBEDDING, "tie_word_embeddings")


def test_a05_only_the_embedding_of_a_tied_model_is_enough(tmp_path):
    made = tied()
    src = write_model(tmp_path / "src", made)
    report = convert(src, tmp_path / "s", "sharded", "--layout", "pp=2,tp=2")
    assert report["dropped"] == []
    assert equal(read_sharded(tmp_path / "s"), training(made))
    owners = {
        r for r, t in read_ranks(tmp_path / "s").items() for n in t if n.startswith(EMBEDDING)
    }
    assert owners == {0, 1}


def test_a05_an_untied_model_needs_its_head(tmp_path):
    made = model("llama")
    del made.tensors[HEAD]
    src = write_model(tmp_path / "src", made)
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, HEAD, "missing")


def test_a05_a_tied_head_is_read_by_the_last_stage_as_well(tmp_path):
    src = write_model(tmp_path / "src", tied())
    found = cli("plan", src, "--load", "--layout", "pp=2", "--json").json
    table = 10 * 8 * 4
    layer = sum(t.nbytes for n, t in tied().tensors.items() if ".layers.0." in n)
    norm = 8 * 4
    assert [r["bytes_written"] for r in found["ranks"]] == [table + layer, layer + norm + table]


# -- names -------------------------------------------------------------------------------------


def renamed(made, rename):
    return Model({rename(n): t for n, t in made.tensors.items()}, made.config)


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: f"_orig_mod.module.{n}",
        lambda n: f"module._orig_mod.{n}",
        lambda n: n.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn."),
        lambda n: n.replace("model.", "model._fsdp_wrapped_module.", 1),
        lambda n: n.replace(".weight", "._orig_mod.weight"),
    ],
    ids=["compiled", "ddp", "checkpointed", "fsdp", "inside"],
)
def test_a06_wrapper_parts_are_taken_off_anywhere(tmp_path, rename):
    made = model("llama")
    src = write_model(tmp_path / "src", renamed(made, rename))
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2")
    assert equal(read_sharded(tmp_path / "s"), training(made))
    convert(tmp_path / "s", tmp_path / "hf", "huggingface")
    assert equal(read_hf(tmp_path / "hf"), made.tensors)


def test_a06_two_names_that_become_one_must_be_equal(tmp_path):
    made = model("llama")
    name = "model.norm.weight"
    made.tensors[f"_orig_mod.{name}"] = made.tensors[name].clone()
    src = write_model(tmp_path / "same", made)
    assert sharded(src, tmp_path / "s", "tp=1").code == 0
    made.tensors[f"_orig_mod.{name}"] += 1
    src = write_model(tmp_path / "other", made)
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, f"'_orig_mod.{name}'", f"'{name}'", "differ")
    assert not (tmp_path / "x").exists()


def test_a06_parts_are_whole_parts(tmp_path):
    made = model("llama")
    made.tensors["model.layers.0.module_x.weight"] = torch.ones(2)
    src = write_model(tmp_path / "src", made)
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, "model.layers.0.module_x.weight")


def test_a07_flat_shards_and_placeholders_are_recognised(tmp_path):
    made = model("llama")
    table = made.tensors[EMBEDDING]
    made.tensors[EMBEDDING] = table.flatten()[:20]
    made.tensors["model.norm.weight"] = torch.zeros(0)
    made.tensors[HEAD] = torch.zeros(0)
    src = write_model(tmp_path / "src", made)
    text = refused(
        sharded(src, tmp_path / "x", "tp=1"),
        4,
        f"{EMBEDDING} has shape [20], expected [10, 8]; looks like an un-gathered ZeRO-3/FSDP shard",
        "model.norm.weight has shape [0], expected [8]; looks like a ZeRO-3 placeholder",
        f"{HEAD} has shape [0], expected [10, 8]; looks like an un-gathered ZeRO-3/FSDP shard",
    )
    assert text.count("consolidate") == 3
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["model.layers.0._flat_param", "_fsdp_wrapped_module._flat_param"])
def test_a07_flat_parameters_are_recognised_by_name(tmp_path, name):
    src = write_hf(tmp_path / "src", {name: torch.ones(100)}, model("llama").config)
    refused(
        sharded(src, tmp_path / "x", "tp=1"), 4, "_flat_param", "FSDP flat vector", "consolidate"
    )


def test_a10_layers_beyond_the_count_are_refused_by_name(tmp_path):
    made = model("llama", layers=4)
    extra = model("llama", layers=5).tensors
    names = [n for n in extra if ".layers.4." in n]
    made.tensors.update({n: extra[n] for n in names})
    src = write_model(tmp_path / "src", made, shards=2)
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, *names, f"{len(names)} tensors match no rule")
    assert not (tmp_path / "x").exists()
    report = convert(src, tmp_path / "copy", "huggingface")
    assert report["tensors"] == len(made.tensors)
    assert equal(read_hf(tmp_path / "copy"), made.tensors)


def test_a10_mtp_tensors_are_refused_by_name_and_nothing_is_dropped(tmp_path):
    made = model("llama")
    made.tensors.update({"mtp.fc.weight": torch.ones(2, 2), "mtp.norm.weight": torch.ones(2)})
    src = write_model(tmp_path / "src", made)
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, "mtp.fc.weight", "mtp.norm.weight")


def test_a22_recomputable_buffers_are_dropped_by_rule_and_reported(tmp_path):
    made = model("llama")
    names = [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(2)]
    full = made.tensors | {n: torch.tensor([1.0, 0.1]) for n in names}
    src = write_hf(tmp_path / "src", full, made.config)
    report = convert(src, tmp_path / "s", "sharded", "--layout", "tp=2", "--dtype", "bfloat16")
    assert sorted(report["dropped"]) == names
    text = cli("convert", src, tmp_path / "s2", "--to", "sharded", "--layout", "tp=2").out
    assert f"dropped by rule: {names[0]}, {names[1]}" in text
    assert equal(read_sharded(tmp_path / "s2"), training(made))
    provenance = manifest(tmp_path / "s")["provenance"]
    assert sorted(provenance["dropped"]) == names


def test_a22_buffers_that_are_kept_are_never_cast_below_f32(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    full = model("llama").tensors | {name: torch.tensor([1.0, 0.1])}
    src = write_hf(tmp_path / "src", full, model("llama").config)
    report = convert(src, tmp_path / "hf", "huggingface", "--dtype", "bfloat16")
    found = read_hf(tmp_path / "hf")[name]
    assert report["kept_fp32"] == [name]
    assert same(found, torch.tensor([1.0, 0.1]))
    assert found[0].item() == 1.0


EXTRA = "model.layers.0.self_attn.core_attention._extra_state"


def test_a25_extra_state_passes_by_a_named_rule_and_is_listed(tmp_path):
    made = model("llama")
    full = made.tensors | {
        EXTRA: torch.zeros(16, dtype=torch.uint8),
        f"{EXTRA}/shard_0_16": torch.ones(3),
    }
    src = write_hf(tmp_path / "src", full, made.config)
    report = convert(src, tmp_path / "s", "sharded", "--layout", "tp=2")
    assert sorted(report["dropped"]) == [EXTRA, f"{EXTRA}/shard_0_16"]
    assert equal(read_sharded(tmp_path / "s"), training(made))


def test_a25_a_missing_weight_is_not_hidden_by_extra_state(tmp_path):
    made = model("llama")
    full = made.tensors | {EXTRA: torch.zeros(16, dtype=torch.uint8)}
    del full["model.norm.weight"]
    src = write_hf(tmp_path / "src", full, made.config)
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, "model.norm.weight", "missing")


# -- quantised weights -------------------------------------------------------------------------


def quantised(suffix, dtype=torch.float32, scale_shape=(1, 1)):
    made = model("llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    made.tensors[name] = made.tensors[name].to(torch.float8_e4m3fn)
    made.tensors[name.removesuffix(".weight") + suffix] = torch.full(scale_shape, 0.5, dtype=dtype)
    return made, name


@pytest.mark.parametrize("suffix", [".weight_scale_inv", ".weight_scale", ".scale", ".weight_odd"])
def test_a08_fp8_weights_are_never_cast_or_fused_without_their_scales(tmp_path, suffix):
    made, name = quantised(suffix)
    src = write_model(tmp_path / "src", made)
    for argv in ((), ("--dtype", "bfloat16")):
        result = sharded(src, tmp_path / "x", "tp=1", *argv)
        refused(result, 4, name)
        assert not (tmp_path / "x").exists()


def test_a08_fp8_weights_without_any_scale_are_refused_by_name(tmp_path):
    made = model("llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    made.tensors[name] = made.tensors[name].to(torch.float8_e4m3fn)
    src = write_model(tmp_path / "src", made)
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, name)


@pytest.mark.parametrize("argv", [(), ("--dtype", "bfloat16"), ("--dtype", "float32")])
def test_a08_pass_through_keeps_weight_and_scale_bit_exact(tmp_path, argv):
    made, name = quantised(".weight_scale_inv")
    scale = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "hf", "huggingface", "--max-shard-size", 1000, *argv)
    found = read_hf(tmp_path / "hf")
    assert same(found[name], made.tensors[name])
    assert same(found[scale], made.tensors[scale])
    assert len(found) == len(made.tensors)


def fp8_model(scale=None, suffix=".weight_scale_inv"):
    """q and k of 256 x 256 in fp8 under 128 x 128 blocks, all else bf16; and what they stand for."""
    made = model("llama", layers=1, hidden=256, heads=4, kv_heads=4, head_dim=64, dtype="bfloat16")
    drawn = torch.Generator().manual_seed(8)
    plain = dict(made.tensors)
    for x in "qk":
        stem = f"model.layers.0.self_attn.{x}_proj"
        w = (torch.randn(256, 256, generator=drawn) * 50).to(torch.float8_e4m3fn)
        s = torch.rand(2, 2, generator=drawn) + 0.01 if scale is None else scale
        made.tensors[f"{stem}.weight"] = w
        made.tensors[f"{stem}{suffix}"] = s
        if s.shape == (2, 2):
            blocks = s.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            plain[f"{stem}.weight"] = (w.float() * blocks).bfloat16()
    return made, Model(plain, made.config)


@pytest.mark.parametrize(
    "suffix", [".weight_scale_inv", ".weight_scale", ".scale"], ids=["inv", "scale", "short"]
)
def test_a08_dequantised_is_weight_times_the_scale_of_its_block_rounded_once(tmp_path, suffix):
    made, plain = fp8_model(suffix=suffix)
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "hf", "huggingface", "--dequantize")
    assert equal(read_hf(tmp_path / "hf"), plain.tensors)
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2,dp_shard=3", "--dequantize")
    assert equal(read_sharded(tmp_path / "s"), training(plain))


def test_a08_one_scale_of_one_half_by_hand(tmp_path):
    made, _ = fp8_model(torch.full((2, 2), 0.5))
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "hf", "huggingface", "--dequantize", "--dtype", "float32")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert same(read_hf(tmp_path / "hf")[name], made.tensors[name].float() * 0.5)


@pytest.mark.parametrize("fault", ["absent", "shape", "for-bf16", "unknown"])
def test_a08_scales_that_do_not_fit_stop_dequantising(tmp_path, fault):
    name = "model.layers.0.self_attn.q_proj.weight"
    made, _ = fp8_model(torch.ones(2, 3) if fault == "shape" else None)
    if fault == "absent":
        del made.tensors[f"{name}_scale_inv"]
    if fault == "unknown":
        made.tensors[f"{name}_odd"] = made.tensors.pop(f"{name}_scale_inv")
    if fault == "for-bf16":
        made.tensors[name] = made.tensors[name].to(torch.bfloat16)
    src = write_model(tmp_path / "src", made)
    for to in (("huggingface",), ("sharded", "--layout", "tp=2")):
        result = cli("convert", src, tmp_path / "x", "--to", *to, "--dequantize", "--workers", 1)
        refused(result, result.code, "[2, 3]" if fault == "shape" else name)
        assert result.code in (3, 4)
        assert not (tmp_path / "x").exists()


# -- config ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"hidden_size": 16}, EMBEDDING),
        ({"intermediate_size": 12}, "model.layers.0.mlp.gate_proj.weight"),
        ({"head_dim": 8}, "model.layers.0.self_attn.q_proj.weight"),
        ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight"),
        ({"vocab_size": 11}, HEAD),
    ],
)
def test_a24_sizes_are_checked_against_the_tensors(tmp_path, change, name):
    made = model("llama")
    src = write_hf(tmp_path / "src", made.tensors, made.config | change)
    shape = list(made.tensors[name].shape)
    refused(
        sharded(src, tmp_path / "x", "tp=1"),
        4,
        f"{name} has shape {shape}, expected",
        "config.json",
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [({"num_hidden_layers": 1}, ".layers.1."), ({"num_hidden_layers": 3}, ".layers.2.")],
)
def test_a24_layer_count_is_checked_against_the_tensors(tmp_path, change, word):
    made = model("llama")
    src = write_hf(tmp_path / "src", made.tensors, made.config | change)
    refused(sharded(src, tmp_path / "x", "tp=1"), 4, word)


def test_a24_null_never_overrides_a_value(tmp_path):
    made = model("llama", heads=2, kv_heads=2, head_dim=4)
    nulls = dict.fromkeys(
        ("head_dim", "num_key_value_heads", "num_experts", "architectures", "text_config")
    )
    config = made.config | nulls | {"num_local_experts": None}
    src = write_hf(tmp_path / "src", made.tensors, config)
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2")
    assert equal(read_sharded(tmp_path / "s"), training(made))
    convert(tmp_path / "s", tmp_path / "hf", "huggingface")
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == config


@pytest.mark.parametrize(
    "drop", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"]
)
def test_a24_a_size_that_is_missing_is_named(tmp_path, drop):
    made = model("llama")
    config = {k: v for k, v in made.config.items() if k != drop}
    src = write_hf(tmp_path / "src", made.tensors, config)
    refused(sharded(src, tmp_path / "x", "tp=1"), 3, "config.json", drop, "missing")


@pytest.mark.parametrize("value", [0, -1, "8", 8.0, True, [8]])
def test_a24_a_size_that_is_no_size_is_named(tmp_path, value):
    made = model("llama")
    src = write_hf(tmp_path / "src", made.tensors, made.config | {"hidden_size": value})
    refused(sharded(src, tmp_path / "x", "tp=1"), 3, "config.json", "hidden_size", repr(value))


@pytest.mark.parametrize("family", FAMILIES)
def test_a24_other_files_go_through_byte_for_byte(tmp_path, family):
    src = write_model(tmp_path / "src", model(family))
    (src / "config.json").write_bytes((src / "config.json").read_bytes() + b"\r\n  \n")
    (src / "tokenizer.json").write_bytes(b'{"b": 1,\r\n "a": 2}')
    (src / "modeling_custom.py").write_bytes(b"x = 1\r\n")
    before = {n: c for n, c in everything(src).items() if n != SINGLE}
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2")
    convert(tmp_path / "s", tmp_path / "hf", "huggingface")
    assert {n: c for n, c in everything(tmp_path / "hf").items() if n != SINGLE} == before
    assert sorted(os.listdir(tmp_path / "hf")) == sorted([*before, SINGLE])


def test_a24_number_of_experts_has_two_names(tmp_path):
    made = model("qwen3_moe", layers=1)
    config = {k: v for k, v in made.config.items() if k != "num_experts"} | {"num_local_experts": 4}
    src = write_hf(tmp_path / "src", made.tensors, config)
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=1")
    assert equal(read_sharded(tmp_path / "s"), training(made))


def test_d25_a_world_that_is_no_multiple_of_pp_tp_ep_can_be_valid(tmp_path):
    """8 ranks, TP2 PP2 EP4: ep spans dp_shard x tp = 4 of each stage."""
    made = model("qwen3_moe")
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "s", "sharded", "--layout", "pp=2,dp_shard=2,tp=2,ep=4")
    assert equal(read_sharded(tmp_path / "s"), training(made))
    assert (
        cli("reshard", tmp_path / "s", tmp_path / "one", "--layout", "pp=1", "--workers", 1).code
        == 0
    )
    assert set(read_ranks(tmp_path / "one")) == {0}


def test_f16_a_broken_header_stops_every_family(tmp_path):
    made = model("llama")
    src = write_hf(tmp_path / "src", {}, made.config)
    write_raw(src / SINGLE, {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4))
    refused(sharded(src, tmp_path / "x", "tp=1"), 3, SINGLE, "'a'", "needs 8 bytes")
