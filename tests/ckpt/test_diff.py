"""`diff` between formats: by the names that are there where they agree, else by those of a family."""

import pytest
import torch
from helpers.checkpoints import cli, convert, model, refused, write_hf, write_model

import d9d_ckpt
from d9d_ckpt import Checkpointer

NAMES = {"body.w": torch.arange(12.0).reshape(4, 3), "head.b": torch.tensor([1.5, -2.0])}
"""Tensors of no family that we know."""

MAPPING = "def same(c):\n    return dict(c.tensors)\n"


@pytest.fixture
def hf(tmp_path):
    """A Hugging Face directory of no family, without a config.json."""
    return write_hf(tmp_path / "hf", NAMES)


def mapped(src, dst, layout="dp_shard=2"):
    """``src`` sharded by a mapping of its user's, so that its manifest names no family."""
    file = dst.parent / "mapping.py"
    file.write_text(MAPPING)
    convert(src, dst, "sharded", "--layout", layout, "--mapping", f"{file}:same")
    return dst


def saved(path, tensors, **more):
    """A step of a trainer that gives no family."""
    with Checkpointer(path) as saver:
        saver.save(1, {"model": dict(tensors), **more}, blocking=True)
    return path


def changed(**by):
    """The tensors with something added to the first element of some."""
    out = {name: tensor.clone() for name, tensor in NAMES.items()}
    for name, amount in by.items():
        out[name.replace("_", ".")].view(-1)[0] += amount
    return out


def test_formats_are_compared_as_they_are_where_names_agree(hf, tmp_path):
    sharded = mapped(hf, tmp_path / "s")
    for pair in ((hf, sharded), (sharded, hf)):
        found = cli("diff", *pair, "--json")
        assert (found.code, found.err) == (0, "")
        assert found.json == {"equal": True, "only_in_a": [], "only_in_b": [], "different": []}
    assert cli("diff", hf, sharded).out == "equal\n"


def test_values_that_differ_are_named_whichever_side_has_them(hf, tmp_path):
    other = mapped(write_hf(tmp_path / "o", changed(body_w=0.25)), tmp_path / "s")
    for pair in ((hf, other), (other, hf)):
        found = cli("diff", *pair, "--json")
        assert found.code == 1
        (different,) = found.json["different"]
        assert different == {"name": "body.w", "max_abs": 0.25, "count": 1, "detail": ""}
        assert cli("diff", *pair, "--atol", 0.25).code == 0
        assert cli("diff", *pair, "--atol", 0.2).code == 1


def test_a_trainers_save_without_family_is_compared_by_its_weights(hf, tmp_path):
    """Moments have no place in a Hugging Face checkpoint; between two saves they are compared."""
    run = saved(tmp_path / "run", NAMES, optim={"exp_avg": {"body.w": torch.ones(4, 3)}})
    assert "optim.exp_avg.body.w" in d9d_ckpt.open(str(run)).tensors
    assert d9d_ckpt.diff(str(hf), str(run)).equal
    assert cli("diff", run, hf).code == 0
    bare = saved(tmp_path / "bare", NAMES)
    assert cli("diff", run, bare, "--json").json["only_in_a"] == ["optim.exp_avg.body.w"]


def test_moments_are_left_out_of_a_sharded_side_alone(tmp_path):
    src = write_hf(tmp_path / "hf", NAMES | {"optim.w": torch.ones(1)})
    run = saved(tmp_path / "run", NAMES)
    refused(cli("diff", src, run), 4, "1 names are on one side only (optim.w)")


def test_specs_that_differ_are_told(hf, tmp_path):
    run = saved(tmp_path / "run", NAMES | {"head.b": torch.zeros(3, dtype=torch.float64)})
    found = cli("diff", hf, run, "--json")
    assert found.code == 1
    (different,) = found.json["different"]
    assert different["name"] == "head.b"
    assert (different["max_abs"], different["count"]) == (None, None)
    assert different["detail"] == "F32 [2] against F64 [3]"


def test_names_that_differ_need_a_family(hf, tmp_path):
    run = saved(tmp_path / "run", {"body.w": NAMES["body.w"], "head.bias": NAMES["head.b"]})
    for pair in ((hf, run), (run, hf)):
        refused(
            cli("diff", *pair),
            4,
            f"{run}/step-00000001: its manifest names no model family",
            "2 names are on one side only (head.b, head.bias)",
        )


def test_names_that_differ_are_those_of_the_family(tmp_path):
    """Rows of a KV group lie q0 q1 k v on the training side: row 9 is the second of k of group 0."""
    made = model("llama")
    src = write_model(tmp_path / "hf", made)
    tensors = {
        name: tensor.read()
        for name, tensor in d9d_ckpt.open(
            str(convert(src, tmp_path / "s", "sharded", "--layout", "tp=1")["destination"])
        ).tensors.items()
    }
    qkv = "model.layers.1.self_attn.qkv_proj.weight"
    rows = made.config["head_dim"] * made.config["num_attention_heads"]
    per_group = rows // made.config["num_key_value_heads"]
    tensors[qkv][per_group + 1] += 4.0
    with Checkpointer(tmp_path / "run", family="llama", config=made.config) as saver:
        saver.save(1, {"model": tensors}, blocking=True)
    found = cli("diff", src, tmp_path / "run", "--json")
    assert found.code == 1
    (different,) = found.json["different"]
    assert different["name"] == "model.layers.1.self_attn.k_proj.weight"
    assert (different["max_abs"], different["count"]) == (4.0, made.config["hidden_size"])
    found = d9d_ckpt.diff(str(tmp_path / "s"), str(tmp_path / "run"))
    assert [d.name for d in found.different] == [qkv]
