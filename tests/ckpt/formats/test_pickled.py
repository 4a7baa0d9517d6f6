"""Files of torch.save against torch itself, and against everything that a pickle can try."""

import argparse
import io
import json
import os
import pickle
import random
import resource
import struct
import subprocess
import sys
import zipfile

import pytest
import torch
from helpers.checkpoints import (
    SINGLE,
    cli,
    convert,
    equal,
    model,
    read_file,
    read_hf,
    read_sharded,
    refused,
    same,
    training,
    write_hf,
    write_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import d9d_ckpt
from d9d_ckpt.errors import CkptError, CorruptError, MissingError, SourceError
from d9d_ckpt.formats.pickled import read_pickled
from d9d_ckpt.storage.local import LocalStore

INDEX = "pytorch_model.bin.index.json"
BIN = "pytorch_model.bin"
FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def save(path, value, zipped=True, protocol=2):
    torch.save(value, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    return path


def read(path):
    found = d9d_ckpt.open(str(path))
    return {name: lazy.read() for name, lazy in found.tensors.items()}


def look(path):
    store = LocalStore()
    try:
        return read_pickled(store, str(path))
    finally:
        store.close()


def zip_of(pickled, storages=(), method=zipfile.ZIP_STORED, **others):
    """A file of torch.save around any pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        file.writestr("archive/data.pkl", pickled)
        for name, content in others.items():
            file.writestr(f"archive/{name}", content)
        for key, content in dict(storages).items():
            file.writestr(f"archive/data/{key}", content)
    return out.getvalue()


def legacy_of(pickled, keys=(), data=b""):
    machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    head = [pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, machine)]
    return b"".join([*head, pickled, pickle.dumps(list(keys), 2), data])


def view(
    offset=0, shape=(2, 3), strides=(3, 1), count=6, storage="FloatStorage", key="0", place="cpu"
):
    """The pickle of {"w": one float tensor} with any numbers."""

    def integers(values):
        return b"(" + b"".join(integer(v) for v in values) + b"t"

    def integer(v):
        raw = v.to_bytes(16, "little", signed=True)
        return b"\x8a\x10" + raw

    def text(v):
        return b"X" + struct.pack("<I", len(v)) + v.encode()

    pid = b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text(key) + text(place)
    args = b"(" + pid + integer(count) + b"tQ" + integer(offset) + integers(shape)
    args += integers(strides) + b"\x89}t"
    return b"\x80\x02}" + text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n" + args + b"Rs."


FLOATS = {"0": struct.pack("<6f", *range(6))}


# -- values ------------------------------------------------------------------------------------

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]


@FORMATS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_dtype_is_read_as_torch_reads_it(tmp_path, zipped, protocol):
    raw = torch.arange(1, 65, dtype=torch.uint8)
    made = {str(d): raw.clone().view(d) for d in DTYPES if d != torch.bool}
    made["torch.bool"] = raw % 3 == 0
    assert equal(read(save(tmp_path / "a.pt", made, zipped, protocol)), made)


def views():
    x = torch.arange(24.0).reshape(4, 6)
    y = torch.arange(120, dtype=torch.int16).reshape(2, 3, 4, 5)
    return {
        "whole": x,
        "transposed": x.t(),
        "rows": x[1:3],
        "columns": x[:, 2:],
        "block": x[1:3, 1:4],
        "steps": x[::2, ::3],
        "row": x[1],
        "column": x[:, 1],
        "scalar": x[2, 3],
        "last": x[3, 5],
        "both": x[1:, ::2].t(),
        "permuted": y.permute(2, 0, 3, 1),
        "cut": y.permute(3, 1, 0, 2)[1:4, :, :, 1:3],
        "ones": y[:, :1].permute(3, 2, 1, 0),
        "new": x[:, None, 3:, None],
        "diagonal": x.diagonal(),
        "none": x[:0],
        "nothing": torch.empty(3, 0, 2),
        "zero-d": torch.tensor(7),
        "parameter": torch.nn.Parameter(x),
        "buffer": torch.nn.Buffer(torch.ones(2)),
        "fp8": x.to(torch.float8_e4m3fn).t(),
        "bits": (x > 3)[:, ::2],
        "pairs": torch.arange(6).to(torch.complex64)[::2],
        "one": x[:, :1].expand(4, 1),
    }


@FORMATS
def test_f16_views_of_shared_storages_come_out_as_torch_reads_them(tmp_path, zipped):
    expected = {name: t.detach() for name, t in views().items()}
    src = save(tmp_path / "a.pt", views(), zipped)
    assert equal(read(src), expected)
    report = convert(src, tmp_path / "out", "huggingface")
    assert equal(read_hf(tmp_path / "out"), expected)
    assert report["tensors"] == len(expected)
    (tmp_path / "m.py").write_text("def whole(ckpt):\n    return dict(ckpt.tensors)\n")
    argv = ("--layout", "dp_shard=3", "--mapping", f"{tmp_path}/m.py:whole")
    convert(src, tmp_path / "sharded", "sharded", *argv, workers=2)
    assert equal(read_sharded(tmp_path / "sharded"), expected)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_chain_of_views_is_read_as_torch_reads_it(tmp_path_factory, data):
    x = torch.arange(120).reshape(2, 3, 4, 5)
    for _ in range(data.draw(st.integers(0, 5))):
        dim = data.draw(st.integers(0, x.ndim - 1))
        match data.draw(st.sampled_from(["permute", "slice", "step", "select", "unsqueeze"])):
            case "permute":
                x = x.permute(data.draw(st.permutations(range(x.ndim))))
            case "slice":
                start = data.draw(st.integers(0, x.shape[dim] - 1))
                length = data.draw(st.integers(1, x.shape[dim] - start))
                x = x.narrow(dim, start, length)
            case "step":
                x = x[(slice(None),) * dim + (slice(None, None, data.draw(st.integers(1, 3))),)]
            case "select" if x.ndim > 1:
                x = x.select(dim, data.draw(st.integers(0, x.shape[dim] - 1)))
            case "unsqueeze":
                x = x.unsqueeze(dim)
    path = save(tmp_path_factory.mktemp("v") / "a.pt", {"x": x}, data.draw(st.booleans()))
    assert same(read(path)["x"], x)


def test_a_slice_reads_only_what_it_spans(tmp_path):
    x = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    save(tmp_path / "a.pt", {"x": x[:, :8], "row": x[5]})
    found = look(tmp_path / "a.pt").entries
    assert found["row"].chunks[0].nbytes == 4096
    assert found["x"].chunks[0].nbytes == 4 * (1023 * 1024 + 8)


@FORMATS
@pytest.mark.parametrize("x", [torch.ones(1).expand(3), torch.arange(9).unfold(0, 4, 1)])
def test_overlapping_elements_are_refused_by_name(tmp_path, zipped, x):
    save(tmp_path / "a.pt", {"fine": torch.ones(2), "lapped": x}, zipped)
    refused(cli("inspect", tmp_path / "a.pt"), 3, "'lapped'", "overlap", "contiguous()")


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(2, dtype=torch.complex128), ("'x'", "complex128")),
        (torch.ones(2, dtype=torch.complex64).conj(), ("'x'", "resolve_conj")),
        (torch.ones(2).to_sparse(), ("_rebuild_sparse_tensor",)),
        (torch.empty(2, device="meta"), ("_rebuild_meta_tensor_no_storage",)),
    ],
    ids=["complex128", "conjugate", "sparse", "meta"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_no_plain_numbers_are_refused(tmp_path, x, words):
    save(tmp_path / "a.pt", {"x": x})
    refused(cli("inspect", tmp_path / "a.pt"), 3, *words)


def test_state_dict_of_a_module_with_its_metadata(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    assert equal(read(save(tmp_path / "a.pth", net.state_dict())), dict(net.state_dict()))


def test_a_storage_of_python_2_strings(tmp_path):
    """Text as U and the dict as pairs, which Python 2 wrote."""
    raw = view().replace(b"X\x01\x00\x00\x00w", b"U\x01w")
    (tmp_path / "a.bin").write_bytes(zip_of(raw, FLOATS))
    assert read(tmp_path / "a.bin")["w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


# -- which tensors, which files ----------------------------------------------------------------


@FORMATS
@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
def test_f19_nested_state_dict_is_found_and_the_rest_is_said(tmp_path, zipped, key):
    weights = {"a": torch.ones(2), "b": torch.zeros(3)}
    optimizer = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}
    value = {"epoch": 3, key: weights | {"extra": 1}, "optimizer": optimizer}
    src = save(tmp_path / "a.pt", value, zipped)
    assert equal(read(src), weights)
    notes = " ".join(cli("inspect", src, "--json").json["notes"])
    for word in (f"'{key}'", "'optimizer' (dict)", "'epoch' (int)", "'extra' (int)"):
        assert word in notes


@pytest.mark.parametrize("value", [[torch.ones(2)], torch.ones(2), {}, {"a": 1}, 3])
def test_what_has_no_tensors_by_name_is_refused(tmp_path, value):
    save(tmp_path / "a.pt", value)
    refused(cli("inspect", tmp_path / "a.pt"), 3, "tensors by name")


def test_a_tensor_named_by_a_number_is_refused(tmp_path):
    refused(cli("inspect", save(tmp_path / "a.pt", {0: torch.ones(2)})), 3, "named by 0")


def pickled_model(path, made, shards, zipped=True):
    """The layout that transformers wrote before safetensors."""
    path.mkdir()
    names = list(made.tensors)
    (path / "config.json").write_text(json.dumps(made.config))
    if shards == 1:
        save(path / BIN, made.tensors, zipped)
        return path
    weight_map = {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin"
        mine = names[shard::shards]
        save(path / file, {n: made.tensors[n] for n in mine}, zipped)
        weight_map |= dict.fromkeys(mine, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@FORMATS
@pytest.mark.parametrize("shards", [1, 3])
def test_f19_pickled_model_converts_as_the_safetensors_one_does(tmp_path, zipped, shards):
    made = model("qwen3")
    src = pickled_model(tmp_path / "bin", made, shards, zipped)
    safe = write_model(tmp_path / "safe", made, shards=2)
    layout = ("--layout", "tp=2,pp=2")
    for name, of in (("a", src), ("b", safe)):
        convert(of, tmp_path / name, "sharded", *layout)
    assert equal(read_sharded(tmp_path / "a"), training(made))
    assert equal(read_sharded(tmp_path / "a"), read_sharded(tmp_path / "b"))
    assert cli("diff", src, safe, "--json").json["equal"] is True
    assert cli("diff", src, tmp_path / "a", "--json").json["equal"] is True
    convert(src, tmp_path / "hf", "huggingface")
    assert equal(read_hf(tmp_path / "hf"), made.tensors)
    assert (tmp_path / "hf" / "config.json").exists()


def test_inspect_plan_and_graph_of_a_pickled_model(tmp_path):
    made = model("llama")
    src = pickled_model(tmp_path / "src", made, 2)
    found = cli("inspect", src, "--json").json
    assert (found["format"], found["tensors"], found["files"]) == (
        "huggingface",
        len(made.tensors),
        2,
    )
    planned = cli("plan", src, "--layout", "tp=2", "--json").json
    nbytes = sum(t.nbytes for t in made.tensors.values())
    assert planned["bytes_read"] == planned["bytes_source"] == nbytes
    name = "model.layers.0.self_attn.qkv_proj.weight"
    result = cli("graph", src, "--layout", "tp=1", "--tensor", name)
    assert "pytorch_model-0000" in result.out, result
    refused(cli("inspect", src / "gone.bin"), 3, "gone.bin")


def test_tied_head_of_one_storage_is_stored_once(tmp_path):
    made = model("llama")
    tied = made.tensors | {"lm_head.weight": made.tensors["model.embed_tokens.weight"]}
    config = made.config | {"tie_word_embeddings": True}
    src = pickled_model(tmp_path / "src", made._replace(tensors=tied, config=config), 1)
    convert(src, tmp_path / "dst", "sharded", "--layout", "pp=2")
    assert "lm_head.weight" not in read_sharded(tmp_path / "dst")


def test_f19_any_safetensors_file_wins_over_pickled_ones(tmp_path):
    made = model("llama")
    src = pickled_model(tmp_path / "src", made, 2)
    write_hf(src, {"other": torch.ones(2)})
    assert list(d9d_ckpt.open(str(src)).tensors) == ["other"]


def test_index_and_pickled_shards_are_checked_both_ways(tmp_path):
    made = model("llama")
    src = pickled_model(tmp_path / "src", made, 2)
    index = json.loads((src / INDEX).read_text())
    weight_map = index["weight_map"]
    name, file = next(iter(weight_map.items()))
    for change, words in (
        ({"ghost": file}, ("ghost", INDEX)),
        ({name: "pytorch_model-00002-of-00002.bin"}, (name, INDEX)),
        ({name: "gone.bin"}, ("gone.bin", INDEX)),
        ({name: "../x.bin"}, ("../x.bin",)),
    ):
        (src / INDEX).write_text(json.dumps({"weight_map": weight_map | change}))
        refused(cli("inspect", src), 3, *words)


def test_one_pickled_file_of_any_name_counts_and_several_do_not(tmp_path):
    save(tmp_path / "weights.pth", {"a": torch.ones(2)})
    assert list(d9d_ckpt.open(str(tmp_path)).tensors) == ["a"]
    save(tmp_path / "more.pt", {"a": torch.ones(2)})
    refused(cli("inspect", tmp_path), 3, "weights.pth", "more.pt", BIN)
    save(tmp_path / BIN, {"b": torch.ones(2)})
    assert list(d9d_ckpt.open(str(tmp_path)).tensors) == ["b"]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<html><body>403</body></html>", "HTML page"),
        (b"GGUF" + bytes(100), "GGUF"),
        (b"", "pickle"),
        (b"\x00" * 50, "opcode 0x00"),
        (pickle.dumps({"a": 1}), "not one of torch.save"),
        (zip_of(b"N.")[:-10], "not a whole zip file"),
    ],
    ids=["lfs", "html", "gguf", "empty", "zeros", "pickle", "cut"],
)
def test_f17_what_is_no_file_of_torch_save_is_named(tmp_path, content, word):
    (tmp_path / BIN).write_bytes(content)
    refused(cli("inspect", tmp_path), 3, BIN, word)


def test_torch_is_not_imported_to_look(tmp_path):
    src = save(tmp_path / "a.pt", views())
    code = (
        "import sys, d9d_ckpt; c = d9d_ckpt.open(sys.argv[1]); "
        "sys.exit('torch' in sys.modules or len(c.tensors) < 9)"
    )
    command = [sys.executable, "-c", code, str(src)]
    assert subprocess.run(command, check=False).returncode == 0  # noqa: S603


# -- hostile files -----------------------------------------------------------------------------


class Executed:
    """What a pickle would do if it were run."""

    def __init__(self, function, *args):
        self._made = function, args

    def __reduce__(self):
        return self._made


def evil(path):
    touch = f"touch {path}"
    call = f"S'{touch}'\n".encode()
    return {
        "os.system": b"cos\nsystem\n(" + call + b"tR.",
        "posix.system": pickle.dumps(Executed(os.system, touch), 2),
        "builtins.eval": pickle.dumps(Executed(eval, f"open({str(path)!r}, 'w')"), 4),
        "__builtin__.eval": pickle.dumps(Executed(eval, f"open({str(path)!r}, 'w')"), 2),
        "argparse.Namespace": pickle.dumps(argparse.Namespace(lr=1), 2),
        "subprocess.Popen": b"(isubprocess\nPopen\n.",
        "torch.load": b"ctorch\nload\n.",
        "torch.storage._load_from_bytes": b"ctorch.storage\n_load_from_bytes\n.",
        "torch._utils.__import__": b"\x80\x04\x8c\x0ctorch._utils\x8c\x0a__import__\x93.",
        "extension class 7": b"\x80\x02\x82\x07.",
        "extension class 258": b"\x80\x02\x83\x02\x01.",
        "extension class 1": b"\x80\x02\x84\x01\x00\x00\x00.",
    }


@FORMATS
@pytest.mark.parametrize("name", evil(""))
def test_f19_code_is_refused_by_the_name_of_its_class(tmp_path, zipped, name):
    proof = tmp_path / "proof"
    raw = evil(proof)[name]
    src = tmp_path / "a.bin"
    src.write_bytes(zip_of(raw) if zipped else legacy_of(raw))
    for result in (cli("inspect", src), cli("convert", src, tmp_path / "x", "--to", "huggingface")):
        refused(result, 3, str(src), name)
    with pytest.raises(SourceError):
        look(src)
    assert not proof.exists()


def test_a_pickle_that_is_the_whole_file_is_not_run_either(tmp_path):
    (tmp_path / BIN).write_bytes(evil(tmp_path / "proof")["os.system"])
    refused(cli("inspect", tmp_path), 3, "os.system")
    assert os.listdir(tmp_path) == [BIN]


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"ctorch\nfloat32\n)R.", "torch.float32"),
        (b"ctorch.nn.parameter\nParameter\n)R.", "Parameter"),
        (b"K\x01)R.", "call of a int"),
        (b"ctorch\nTensor\n}b.", "state for 'torch.Tensor'"),
        (b"K\x01}b.", "state for a int"),
        (b"ctorch\nTensor\n)\x81.", "instance"),
        (b"(ctorch\nTensor\no.", "instance"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "_rebuild_tensor_v2"),
        (
            b"ctorch._tensor\n_rebuild_from_type_v2\n(ccollections\nOrderedDict\nctorch\nTensor\n)NtR.",
            "_from_type",
        ),
        (b"ccollections\nOrderedDict\n]K\x01a\x85R.", "OrderedDict"),
        (b"(X\x07\x00\x00\x00storageK\x01tQ.", "storage"),
        (b"N0.", "opcode 0x30"),
        (b"I1\n.", "opcode 0x49"),
        (b"R.", "value expected"),
        (b"(N" + b"t" * 3, "mark expected"),
        (b"h\x09.", "value 9"),
        (b"}])s.", "key that is a list"),
        (b"})Ns.", "key that is a tuple"),
        (b"}(Nu.", "keys and values"),
        (b"K\x01K\x02a.", "not a list"),
        (b"X\xff\xff\xff\xff.", "4294967295 more bytes"),
        (b"\x8d" + b"\xff" * 8 + b".", "more bytes"),
        (b"X\x01\x00\x00\x00\xff.", "UTF-8"),
        (b"c" + b"a" * 400 + b"\n.", "256 bytes"),
        (b"\x80\x09.", "protocol 9"),
        (b"(" * 2000 + b".", "nested"),
        (b"]" * 2_000_000 + b".", "stack"),
        (b"N" * 2_000_000 + b".", "stack"),
        (b"N" + b"\x94" * 2_000_000 + b".", "objects"),
        (b"", "more bytes"),
    ],
)
def test_a_broken_pickle_is_refused(tmp_path, raw, word):
    for content in (zip_of(raw), legacy_of(raw)):
        (tmp_path / "a.bin").write_bytes(content)
        with pytest.raises(CorruptError) as caught:
            look(tmp_path / "a.bin")
        if content.startswith(b"PK") or raw:
            assert word in str(caught.value)


def test_deep_and_circular_values_are_no_trouble(tmp_path):
    deep = b"N" + b"\x85" * 40_000 + b"0"
    for raw in (b"}X\x05\x00\x00\x00modelh\x00s.", b"}q\x00X\x05\x00\x00\x00modelh\x00s."):
        (tmp_path / "a.bin").write_bytes(zip_of(raw))
        with pytest.raises(SourceError):
            look(tmp_path / "a.bin")
    (tmp_path / "a.bin").write_bytes(zip_of(b"}X\x01\x00\x00\x00a" + deep[:-1] + b"s."))
    with pytest.raises(MissingError, match="no tensors"):
        look(tmp_path / "a.bin")


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("numbers", "word"),
    [
        ({"offset": 1}, "storage"),
        ({"shape": (3, 3)}, "storage"),
        ({"strides": (30, 1)}, "storage"),
        ({"offset": -1}, "offset"),
        ({"shape": (-2, 3)}, "shape"),
        ({"strides": (-3, 1)}, "strides"),
        ({"strides": (3,)}, "strides"),
        ({"strides": (0, 1)}, "overlap"),
        ({"shape": (HUGE, 3)}, "shape"),
        ({"shape": (1 << 40, 1 << 40, 0), "strides": (0, 0, 0)}, "shape"),
        ({"shape": (1 << 59, 1), "strides": (1, 1)}, "storage"),
        ({"shape": (1,) * 100, "strides": (1,) * 100}, "strides"),
        ({"offset": HUGE * 4}, "offset"),
        ({"count": 7}, "24"),
        ({"count": HUGE}, "24"),
        ({"count": -6}, "storage"),
        ({"key": "1"}, "'1' is missing"),
        ({"key": "../data.pkl"}, "missing"),
        ({"storage": "DoubleStorage"}, "24"),
    ],
)
def test_numbers_are_checked_against_the_file(tmp_path, numbers, word):
    (tmp_path / "a.bin").write_bytes(zip_of(view(**numbers), FLOATS))
    with pytest.raises(SourceError, match=word):
        look(tmp_path / "a.bin")


def test_the_same_numbers_are_checked_in_a_legacy_file(tmp_path):
    src = tmp_path / "a.bin"
    data = struct.pack("<q", 6) + FLOATS["0"]
    src.write_bytes(legacy_of(view(), ["0"], data))
    assert read(src)["w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    for keys, stored, word in (
        (["0"], data[:-1], "cut short"),
        (["0"], struct.pack("<q", 5) + FLOATS["0"], "5 elements"),
        ([], data, "1 storages in use"),
        (["0", "0"], data, "list its storages"),
        (["1"], data, "no tensor"),
        ([3], data, "no tensor"),
        ({}, data, "1 storages"),
    ):
        src.write_bytes(legacy_of(view(), keys, stored))
        with pytest.raises(CorruptError, match=word):
            look(src)
    src.write_bytes(legacy_of(view(count=HUGE), ["0"], data))
    with pytest.raises(CorruptError, match="cut short"):
        look(src)


def test_a_zip_that_torch_would_not_write_is_refused(tmp_path):
    src = tmp_path / "a.bin"
    good = zip_of(view(), FLOATS, byteorder="little")
    src.write_bytes(good)
    assert len(read(src)) == 1
    flipped = bytearray(good)
    flipped[good.index(b"storage") + 1] ^= 1
    twice = io.BytesIO(good)
    with zipfile.ZipFile(twice, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("archive/data/0", FLOATS["0"])
    header = good.index(b"PK\x03\x04", 4)
    for content, word in (
        (zip_of(view(), FLOATS, byteorder="big"), "big-endian"),
        (zip_of(view(), FLOATS, zipfile.ZIP_DEFLATED), "compressed"),
        (zip_of(view(), {"0": FLOATS["0"][:-1]}), "23"),
        (bytes(flipped), "checksum"),
        (twice.getvalue(), "one name"),
        (good[:header] + b"QK" + good[header + 2 :], "contradicts"),
        (b"PK\x03\x04" + b"PK\x05\x06" + bytes(18), "data.pkl"),
    ):
        src.write_bytes(content)
        with pytest.raises(SourceError, match=word):
            look(src)


def test_big_endian_legacy_file_is_refused(tmp_path):
    raw = legacy_of(view(), ["0"], struct.pack("<q", 6) + FLOATS["0"])
    at = raw.index(b"little_endian")
    (tmp_path / "a.bin").write_bytes(raw[:at] + raw[at:].replace(b"\x88", b"\x89", 1))
    with pytest.raises(SourceError, match="big-endian"):
        look(tmp_path / "a.bin")


def test_zip64_offsets_are_read(tmp_path):
    """A member behind a hole of 5 GiB, so that its place takes 64 bits."""
    src, hole = tmp_path / "a.bin", 5 << 30
    with src.open("wb") as raw, zipfile.ZipFile(raw, "w") as file:
        file.writestr("archive/data.pkl", view())
        raw.seek(hole)
        file.start_dir = hole
        file.writestr("archive/data/0", FLOATS["0"])
    with zipfile.ZipFile(src) as file:
        assert file.getinfo("archive/data/0").header_offset == hole
    assert read(src)["w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def seeds(path):
    value = {"model": views(), "optimizer": [1, 2.5, None, ("x", 1 << 40)], "step": 7}
    save(path, value)
    whole = path.read_bytes()
    save(path, value, zipped=False)
    legacy = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as file:
        members = {name.removeprefix("seed/"): file.read(name) for name in file.namelist()}
    stored = {n.removeprefix("data/"): m for n, m in members.items() if n.startswith("data/")}
    return [
        lambda rng: mutated(rng, whole),
        lambda rng: mutated(rng, legacy),
        lambda rng: zip_of(mutated(rng, members["data.pkl"]), stored),
    ]


def mutated(rng, raw):
    out = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at, n = rng.randrange(len(out)), rng.randrange(1, 9)
        match rng.randrange(5):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at : at + n] = rng.randbytes(n)
            case 2:
                del out[at : at + n]
            case 3:
                out[at:at] = rng.choice(
                    [out[at : at + 64], b"\xff" * n, b"cos\nsystem\n", b"\x81R"]
                )
            case 4:
                del out[at:]
                out += b"." if rng.random() < 0.5 else b""
        out = out or bytearray(b"\x80")
    return bytes(out)


def test_2000_mutations_raise_nothing_but_ours_and_stay_inside_the_file(tmp_path):
    rng = random.Random(3)
    makers = seeds(tmp_path / "seed.pt")
    src, fine = tmp_path / "a.bin", 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(2000):
        src.write_bytes(makers[number % len(makers)](rng))
        try:
            entries = look(src).entries
        except CkptError:
            continue
        fine += 1
        size = src.stat().st_size
        for entry in entries.values():
            assert all(c.offset >= 0 and c.offset + c.nbytes <= size for c in entry.chunks)
    assert 0 < fine < 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "seed.pt"]


def test_reference_reader_opens_what_was_converted(tmp_path):
    src = save(tmp_path / "a.pt", views())
    convert(src, tmp_path / "out", "huggingface")
    assert read_file(tmp_path / "out" / SINGLE).keys() == views().keys()
