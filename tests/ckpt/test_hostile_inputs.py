"""What tools/fuzz.py found, each at its smallest."""

import json
import os

import pytest
import xxhash
from helpers.checkpoints import INDEX, cli, convert, model, refused, write_model

from d9d_ckpt.errors import CorruptError, LayoutError, UsageError
from d9d_ckpt.graph.mosaic import stored
from d9d_ckpt.layout.topology import layout_from, parse_layout
from d9d_ckpt.tensors import DTYPES, Chunk, Entry, Region, TensorSpec, brief
from fuzz_mutations import _spiral


@pytest.fixture
def hf(tmp_path):
    return write_model(tmp_path / "hf", model("llama"))


@pytest.fixture
def ours(hf, tmp_path):
    convert(hf, tmp_path / "ours", "sharded", "--layout", "tp=2")
    return tmp_path / "ours"


def seal(value):
    value.pop("self_xxh3", None)
    body = json.dumps(value, separators=(",", ":")).encode()[:-1]
    return body + b',"self_xxh3":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


def edit(path, keys, value):
    """The manifest with ``value`` at ``keys``, sealed again."""
    file = path / "manifest.json"
    whole = json.loads(file.read_text())
    inner = whole
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    file.write_bytes(seal(whole))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("model", "config"), []),
        (("model", "config"), "{}"),
        (("model", "family"), ["llama"]),
        (("model", "hf_experts"), "../x"),
        (("save_id",), 7),
        (("step",), True),
        (("step",), "7"),
        (("values",), []),
        (("values",), {"a": "\ud800"}),
        (("metadata",), {"a": 1}),
        (("metadata",), None),
        (("block",), 4096),
        (("layout", "tp"), "2"),
        (("layout", "tp"), 0),
        (("layout", "nobody"), 1),
        (("files", "config.json", "nbytes"), -1),
        (("files", "config.json", "nbytes"), 605.0),
        (("files", "\ud800"), {"nbytes": 0, "header_xxh3": "0"}),
        (("files", "manifest.json"), {"nbytes": 0, "header_xxh3": "0"}),
        (("files", "model.safetensors"), {"nbytes": 0, "header_xxh3": "0"}),
        (("files", INDEX), {"nbytes": 0, "header_xxh3": "0"}),
        (("files", ".d9d-claim"), {"nbytes": 0, "header_xxh3": "0"}),
        (("tensors", "\ud800"), {"dtype": "F32", "shape": [0], "chunks": []}),
        (("tensors", "a"), {"dtype": "F32", "shape": [0, 2**70], "chunks": []}),
        (("tensors", "a"), {"dtype": "F32", "shape": [1] * 65, "chunks": []}),
        (("tensors", "a"), {"dtype": "F32", "shape": [2], "chunks": []}),
    ],
)
def test_a_sealed_manifest_is_checked_for_what_it_says(ours, tmp_path, keys, value):
    edit(ours, keys, value)
    refused(cli("inspect", ours), 3, "manifest.json")
    refused(cli("reshard", ours, tmp_path / "x", "--layout", "tp=1"), 3, "manifest.json")
    assert not (tmp_path / "x").exists()


def test_nothing_may_follow_the_seal_of_a_manifest(ours):
    file = ours / "manifest.json"
    file.write_bytes(file.read_bytes().rstrip()[:-1] + b',"tensors":{}}\n')
    refused(cli("inspect", ours), 3, "its own checksum")


@pytest.mark.parametrize("depth", [300, 100_000])
def test_values_nested_too_deeply_are_refused(ours, depth):
    file = ours / "manifest.json"
    body = file.read_bytes().rpartition(b',"self_xxh3":"')[0]
    body = body.replace(b'"values":{}', b'"values":{"a":' + b"[" * depth + b"]" * depth + b"}")
    seal_ = b',"self_xxh3":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'
    file.write_bytes(body + seal_)
    refused(cli("inspect", ours), 3, "nested deeper than")


def test_a_config_that_may_be_read_may_also_be_kept(hf, tmp_path):
    config = json.loads((hf / "config.json").read_text())
    text = json.dumps(config | {"deep": 0})
    (hf / "config.json").write_text(text.replace('"deep": 0', '"deep": ' + "[" * 60 + "]" * 60))
    convert(hf, tmp_path / "x", "sharded", "--layout", "tp=1")
    convert(tmp_path / "x", tmp_path / "y", "huggingface")


@pytest.mark.parametrize(
    "text", [b"[]", b"{", b'{"a": "\\ud800"}', b'{"a": ' + b"[" * 400 + b"]" * 400 + b"}"]
)
def test_a_small_config_of_a_sealed_manifest_must_be_one(ours, tmp_path, text):
    (ours / "config.json").write_bytes(text)
    entry = {"nbytes": len(text), "header_xxh3": xxhash.xxh3_64_hexdigest(text)}
    edit(ours, ("files", "config.json"), entry)
    for to in (("huggingface",), ("sharded", "--layout", "tp=1")):
        refused(cli("convert", ours, tmp_path / "x", "--to", *to), 3, "config.json")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("text", [b'{"a": "\\udcff"}', b'{"a": ' + b"[" * 400 + b"]" * 400 + b"}"])
def test_a_config_that_cannot_be_written_again_is_refused(hf, tmp_path, text):
    (hf / "config.json").write_bytes(text)
    refused(
        cli("convert", hf, tmp_path / "x", "--to", "sharded", "--layout", "tp=1"), 3, "config.json"
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("num_hidden_layers", 10**12, 3),
        ("num_hidden_layers", 60_000, 4),
        ("hidden_size", 10**4000, 3),
        ("head_dim", 10**30, 3),
    ],
    ids=["layers", "layers for the tensors", "digits", "bits"],
)
def test_sizes_that_no_model_has_are_refused_at_once(hf, key, value, code):
    config = json.loads((hf / "config.json").read_text()) | {key: value}
    (hf / "config.json").write_text(json.dumps(config))
    refused(cli("plan", hf, "--layout", "tp=1"), code, "config.json")


@pytest.mark.parametrize(("count", "code"), [(None, 4), (10**9, 4)])
def test_experts_must_be_some_and_no_more_than_there_are_elements(tmp_path, count, code):
    made = model("mixtral")
    config = made.config | {"num_local_experts": count}
    hf = write_model(tmp_path / "hf", made._replace(config=config))
    refused(cli("plan", hf, "--layout", "tp=1"), code, "experts")


def test_a_file_whose_name_is_not_utf8_is_left_out(hf, tmp_path):
    try:
        (hf / os.fsdecode(b"\xff.json")).write_text("{}")
    except OSError:
        pytest.skip("this file system takes no such name")
    convert(hf, tmp_path / "x", "sharded", "--layout", "tp=1")
    result = cli("inspect", hf)
    assert "left out, as their names are not UTF-8: \\udcff.json" in result.out
    result.out.encode()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("tp=" + "9" * 5000, UsageError),
        ("tp=99999999999999", LayoutError),
        ("tp=1000,dp_shard=1000", LayoutError),
    ],
)
def test_a_layout_of_more_ranks_than_there_are_is_refused(text, error):
    with pytest.raises(error):
        parse_layout(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pp", 16**6000),
        ("stages", [16**6000]),
        ("tensors", {"*": {"tp": 16**6000}}),
        ("tensors", {"*": {"tp": 64}}),
    ],
    ids=["degree", "stages", "dim", "dim 64"],
)
def test_numbers_too_long_to_print_do_not_break_the_message(key, value):
    with pytest.raises((UsageError, LayoutError), match=key):
        layout_from({key: value}, "x")


def test_a_message_does_not_write_out_what_aliases_share():
    value: list[object] = [1, 1]
    for _ in range(40):
        value = [value, value, value]
    assert len(brief(value)) < 2000
    with pytest.raises(UsageError):
        layout_from({"stages": value}, "x")


def test_chunks_that_interlock_without_end_are_refused():
    boxes = list(_spiral(401))
    chunks = tuple(Chunk(Region(at, shape), "f", 0, shape[0] * shape[1]) for at, shape in boxes)
    entry = Entry(TensorSpec(DTYPES["U8"], (401, 401)), chunks)
    with pytest.raises(CorruptError, match="interlock"):
        stored("a", entry)


def test_nothing_takes_the_place_of_a_run_directory(ours, hf, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    ours.rename(run / "step-00000010")
    result = cli("convert", hf, run, "--to", "huggingface", "--overwrite")
    refused(result, 4, "run directory")
    assert os.listdir(run) == ["step-00000010"]
