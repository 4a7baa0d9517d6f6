"""Rows of class file through the command line: broken weight files, and the modes of new ones."""

import json
import os
import stat

import pytest
import torch
from helpers.checkpoints import (
    INDEX,
    SINGLE,
    cli,
    convert,
    equal,
    everything,
    manifest,
    model,
    read_hf,
    refused,
    write_hf,
    write_model,
    write_raw,
)
from safetensors.torch import save_file

ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def one_tensor(path):
    path.mkdir()
    save_file({"a": torch.arange(4.0)}, path / SINGLE)
    return path / SINGLE


@pytest.mark.parametrize("to", [("huggingface",), ("sharded", "--layout", "tp=1")])
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda raw: raw[:-1], "cut short: download it again"),
        (lambda raw: raw + b"\0\0", "after the data"),
        (lambda _: b"", "0 bytes"),
        (lambda raw: raw[:2], "2 bytes"),
        (lambda raw: (1000).to_bytes(8, "little") + raw[8:60], "cut short: download it again"),
    ],
    ids=["short", "long", "empty", "two-bytes", "header-beyond"],
)
def test_f03_cut_files_are_refused_with_both_sizes(tmp_path, to, change, word):
    file = one_tensor(tmp_path / "src")
    raw = file.read_bytes()
    file.write_bytes(change(raw))
    size = file.stat().st_size
    result = cli("convert", file.parent, tmp_path / "x", "--to", *to)
    text = refused(result, 3, str(file), f"{size} bytes, expected", word)
    if size in (len(raw) - 1, len(raw) + 2):
        assert f"expected {len(raw)} " in text
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"PK\x03\x04" + bytes(100), "PyTorch zip"),
        (b"\x80\x02}q\x00." + bytes(100), "pickle"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"<html><body>403</body></html>", "HTML page"),
        (b"<!DOCTYPE html><html></html>", "HTML page"),
        (b"GGUF" + bytes(100), "GGUF"),
    ],
    ids=["zip", "pickle", "lfs", "html", "doctype", "gguf"],
)
def test_f17_what_is_no_safetensors_file_is_named(tmp_path, content, word):
    src = tmp_path / "src"
    src.mkdir()
    (src / SINGLE).write_bytes(content)
    for result in (cli("inspect", src), cli("convert", src, tmp_path / "x", "--to", "huggingface")):
        refused(result, 3, str(src / SINGLE), word)
    assert not (tmp_path / "x").exists()


def test_f17_a_bogus_length_allocates_nothing(tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    (src / SINGLE).write_bytes(b"\xff" * 7 + b"\x7f" + bytes(100))
    refused(cli("inspect", src), 3, "not a safetensors file")


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"x": ENTRY | {"data_offsets": [16, 0]}}, 16, ("'x'", "data_offsets")),
        ({"x": ENTRY, "y": ENTRY}, 16, ("'y'", "overlaps")),
        ({"x": ENTRY, "y": ENTRY | {"data_offsets": [20, 36]}}, 36, ("'y'", "hole")),
        ({"x": ENTRY | {"shape": [8]}}, 16, ("'x'", "needs 32 bytes")),
        ({"x": ENTRY | {"shape": [1 << 40, 1 << 40]}}, 16, ("'x'",)),
        ({"x": ENTRY | {"shape": [-4]}}, 16, ("'x'", "-4")),
        ({"x": ENTRY | {"dtype": "F99"}}, 16, ("'x'", "F99")),
        ({"x": ENTRY | {"data_offsets": [0, 16.0]}}, 16, ("'x'", "data_offsets")),
        ({"x": 3}, 0, ("'x'",)),
        ([], 0, ("header",)),
    ],
    ids=[
        "reversed",
        "alias",
        "hole",
        "size",
        "overflow",
        "negative",
        "dtype",
        "float",
        "kind",
        "list",
    ],
)
def test_f11_headers_that_lie_are_refused(tmp_path, header, data, words):
    src = tmp_path / "src"
    src.mkdir()
    write_raw(src / SINGLE, header, bytes(data))
    result = cli("convert", src, tmp_path / "x", "--to", "huggingface")
    refused(result, 3, str(src / SINGLE), *words)
    assert not (tmp_path / "x").exists()


def test_f11_header_order_need_not_be_offset_order(tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    values = torch.arange(8.0)
    write_raw(
        src / SINGLE,
        {"b": ENTRY | {"data_offsets": [16, 32]}, "a": ENTRY},
        values.numpy().tobytes(),
    )
    convert(src, tmp_path / "x", "huggingface")
    assert equal(read_hf(tmp_path / "x"), {"a": values[:4], "b": values[4:]})


# -- modes -------------------------------------------------------------------------------------


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def modes(path):
    """Modes of files and of directories, by what they are."""
    files = {stat.S_IMODE(f.stat().st_mode) for f in path.rglob("*") if f.is_file()}
    directories = {stat.S_IMODE(d.stat().st_mode) for d in (path, *path.rglob("*")) if d.is_dir()}
    return files, directories


@pytest.mark.parametrize("to", ["huggingface", "sharded"])
@pytest.mark.parametrize(("mask", "file"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_f09_new_files_follow_the_umask(tmp_path, umask, to, mask, file):
    src = write_model(tmp_path / "src", model("llama"))
    umask(mask)
    layout = ("--layout", "tp=2") if to == "sharded" else ("--max-shard-size", 2000)
    convert(src, tmp_path / "a" / "dst", to, *layout)
    assert modes(tmp_path / "a" / "dst") == ({file}, {0o777 & ~mask})


@pytest.mark.parametrize("size", ["5GB", 2000])
def test_f09_overwriting_keeps_the_mode(tmp_path, umask, size):
    umask(0o022)
    src = write_model(tmp_path / "src", model("llama"))
    dst = tmp_path / "dst"
    convert(src, dst, "huggingface", "--max-shard-size", size)
    for file in dst.iterdir():
        file.chmod(0o640)
    convert(src, dst, "huggingface", "--max-shard-size", size, "--overwrite")
    assert modes(dst)[0] == {0o640}


def test_f09_a_sharded_checkpoint_that_replaces_another_has_one_mode(tmp_path, umask):
    umask(0o022)
    src = write_model(tmp_path / "src", model("llama"))
    dst = tmp_path / "dst"
    convert(src, dst, "sharded", "--layout", "tp=2")
    for file in dst.rglob("*"):
        file.chmod(0o640 if file.is_file() else 0o750)
    convert(src, dst, "sharded", "--layout", "tp=2", "--overwrite")
    assert len(modes(dst)[0]) == 1


# -- the whole way -----------------------------------------------------------------------------


def test_f16_the_source_is_never_changed(tmp_path):
    src = write_model(tmp_path / "src", model("qwen3_moe"), shards=3)
    before = everything(src)
    times = {f.name: f.stat().st_mtime_ns for f in src.iterdir()}
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2,ep=2")
    convert(src, tmp_path / "hf", "huggingface")
    cli("verify", src)
    cli("diff", src, tmp_path / "s")
    assert everything(src) == before
    assert {f.name: f.stat().st_mtime_ns for f in src.iterdir()} == times


def test_f08_the_index_of_a_pipeline_has_the_tensors_of_every_rank(tmp_path):
    made = model("llama", layers=3)
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "s", "sharded", "--layout", "pp=3,tp=2")
    files = {c["file"] for e in manifest(tmp_path / "s")["tensors"].values() for c in e["chunks"]}
    assert len(files) == 6
    convert(tmp_path / "s", tmp_path / "hf", "huggingface", "--max-shard-size", 3000)
    weight_map = json.loads((tmp_path / "hf" / INDEX).read_text())["weight_map"]
    assert set(weight_map) == set(made.tensors)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_f05_a_destination_holds_nothing_else_afterwards(tmp_path, shards):
    src = write_hf(tmp_path / "src", {f"t{n}": torch.full((2,), float(n)) for n in range(5)})
    convert(src, tmp_path / "x", "huggingface", "--max-shard-size", -(-5 // shards) * 8)
    names = sorted(os.listdir(tmp_path / "x"))
    assert not [n for n in names if n.startswith(".")]
    assert len(names) == (1 if shards == 1 else shards + 1)


def test_f05_a_variant_beside_the_weights_is_left_alone(tmp_path):
    """An EMA set with an index of its own is no part of what is replaced."""
    old = {f"t{n}": torch.full((4,), float(n)) for n in range(4)}
    dst = write_hf(tmp_path / "dst", old, shards=2)
    ema = [f"ema-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for n, name in enumerate(ema):
        write_hf(tmp_path / name, {f"t{n}": torch.ones(1)})
        (tmp_path / name / SINGLE).rename(dst / name)
    (dst / "ema.safetensors.index.json").write_text("{}")
    before = everything(dst)
    new = {name: t + 10 for name, t in old.items()}
    convert(write_hf(tmp_path / "src", new), dst, "huggingface", "--overwrite")
    assert equal(read_hf(dst), new)
    after = everything(dst)
    kept = (*ema, "ema.safetensors.index.json")
    assert {n: after[n] for n in kept} == {n: before[n] for n in kept}
    assert sorted(after) == sorted((*kept, SINGLE))


# -- checksums ---------------------------------------------------------------------------------


def test_d08_a_file_of_another_step_with_the_same_size_is_named(tmp_path):
    made = [tmp_path / name for name in ("a", "b")]
    for number, path in enumerate(made):
        src = write_hf(tmp_path / f"src{number}", {"w": torch.full((300_000,), float(number))})
        convert(src, path, "huggingface")
    sizes = {(path / SINGLE).stat().st_size for path in made}
    assert len(sizes) == 1
    head, data = ((path / SINGLE).read_bytes() for path in made)
    length = 8 + int.from_bytes(head[:8], "little")
    (made[0] / SINGLE).write_bytes(head[:length] + data[length:])
    result = cli("verify", made[0], "--json")
    assert result.code == 1
    damaged = result.json["damaged"]
    assert [(d["file"], d["tensor"]) for d in damaged] == [
        (SINGLE, f"w at byte {length}"),
        (SINGLE, f"w at byte {length + 2**20}"),
    ]
    assert all(d["expected"] != d["found"] for d in damaged)
    refused(cli("convert", made[0], tmp_path / "x", "--to", "huggingface"), 3, SINGLE, "damaged")


def test_d08_verification_without_anything_to_verify_by_is_a_failure(tmp_path):
    src = write_hf(tmp_path / "src", {"w": torch.ones(4)})
    result = cli("verify", src, "--json")
    assert result.code == 1
    assert not result.json["ok"]
    assert result.json["reason"] == "no checksums recorded"
