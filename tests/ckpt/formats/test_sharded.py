"""Our format: golden files, independent readers, the manifest's seal, and damage of every kind."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
import zstandard
from helpers.checkpoints import (
    cli,
    convert,
    equal,
    everything,
    flip,
    manifest,
    model,
    read_file,
    read_hf,
    read_ranks,
    read_sharded,
    refused,
    training,
    write_hf,
    write_model,
)
from safetensors import safe_open

import d9d_ckpt

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
TORCH = {"BF16": torch.bfloat16, "F32": torch.float32}
BLOCK = 1 << 20


def seal(body: bytes) -> bytes:
    """A manifest without its last key, sealed as the format says."""
    return body + b',"self_xxh3":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


def reseal(path: Path, **changes: object) -> None:
    """Another manifest that is whole."""
    value = manifest(path) | changes
    value.pop("self_xxh3")
    body = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    (path / "manifest.json").write_bytes(seal(body))


def rank_files(path: Path) -> list[Path]:
    return sorted((path / manifest(path)["save_id"]).iterdir())


@pytest.fixture
def dense(tmp_path):
    src = write_model(tmp_path / "src", model("llama"))
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2,pp=2")
    return tmp_path / "s"


# -- golden files: these checkpoints exist out there and must stay readable --------------------


def by_the_description(path: Path) -> dict[str, torch.Tensor]:
    """A reader written from what the format says: json, xxhash and plain file reads."""
    raw = (path / "manifest.json").read_bytes()
    found = json.loads(raw)
    assert (found["format"], found["version"]) == ("d9d-sharded", 1)
    assert raw == seal(raw.rpartition(b',"self_xxh3":')[0])
    out = {}
    for name, entry in found["tensors"].items():
        out[name] = torch.full(entry["shape"], torch.nan, dtype=TORCH[entry["dtype"]])
        for c in entry["chunks"]:
            data = (path / c["file"]).read_bytes()[c["offset"] : c["offset"] + c["nbytes"]]
            blocks = [data[at : at + found["block"]] for at in range(0, len(data), found["block"])]
            assert c["xxh3"] == [xxhash.xxh3_64_hexdigest(b) for b in blocks]
            if c["codec"] == "zstd":
                data = joined(data, out[name].dtype.itemsize, math.prod(c["shape"]))
            part = torch.frombuffer(bytearray(data), dtype=out[name].dtype).reshape(c["shape"])
            box = (slice(a, a + n) for a, n in zip(c["start"], c["shape"], strict=True))
            out[name][tuple(box)] = part
    for name, file in found["files"].items():
        content = (path / name).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little") if "/" in name else len(content)
        assert len(content) == file["nbytes"]
        assert xxhash.xxh3_64_hexdigest(content[:end]) == file["header_xxh3"]
    return out


def joined(stored: bytes, itemsize: int, count: int) -> bytes:
    """The elements of an encoded chunk, by the description."""
    at, planes = 4 * itemsize, []
    for k in range(itemsize):
        length = int.from_bytes(stored[4 * k : 4 * k + 4], "little")
        plane = stored[at : at + length]
        planes.append(plane if length == count else zstandard.decompress(plane))
        at += length
    return bytes(plane[i] for i in range(count) for plane in planes)


@pytest.mark.parametrize("name", ["dense", "moe", "zstd"])
def test_golden_v1_reads_bit_equal(name):
    expected = read_file(GOLDEN / f"{name}.safetensors")
    ckpt = d9d_ckpt.open(str(GOLDEN / name))
    assert equal({n: t.read() for n, t in ckpt.tensors.items()}, expected)
    assert equal(by_the_description(GOLDEN / name), expected)
    if name != "zstd":
        assert equal(read_sharded(GOLDEN / name), expected)


@pytest.mark.parametrize("name", ["dense", "moe", "zstd"])
def test_golden_v1_verifies(name):
    result = cli("verify", GOLDEN / name, "--json")
    assert (result.code, result.json["ok"], result.json["damaged"]) == (0, True, [])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dense", {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2, "ep": 1}),
        ("moe", {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep": 2}),
    ],
)
def test_golden_v1_describes_itself(name, layout):
    found = cli("inspect", GOLDEN / name, "--json").json
    assert (found["format"], found["layout"]) == ("sharded", layout)
    assert found["model"] == {"dense": "llama", "moe": "qwen3_moe"}[name]
    assert found["save_id"] == manifest(GOLDEN / name)["save_id"]
    assert found["files"] == {"dense": 4, "moe": 2}[name]
    config = json.loads((GOLDEN / name / "config.json").read_text())
    assert d9d_ckpt.open(str(GOLDEN / name)).metadata["config"] == config


@pytest.mark.parametrize("name", ["dense", "moe", "zstd"])
def test_golden_v1_converts_and_reshards(name, tmp_path):
    expected = read_file(GOLDEN / f"{name}.safetensors")
    convert(GOLDEN / name, tmp_path / "hf", "huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    made = type(model("llama"))(read_hf(tmp_path / "hf"), config)
    assert equal(training(made), expected)
    result = cli("reshard", GOLDEN / name, tmp_path / "s", "--layout", "dp_shard=3", "--workers", 1)
    assert result.code == 0
    assert equal(read_sharded(tmp_path / "s"), expected)


# -- the manifest ------------------------------------------------------------------------------


def test_a_new_checkpoint_follows_the_description(dense):
    assert equal(by_the_description(dense), training(model("llama")))


def test_manifest_keys_and_order(dense):
    found = manifest(dense)
    keys = list(found)
    assert keys[:2] == ["format", "version"]
    assert keys[-1] == "self_xxh3"
    assert {"save_id", "step", "layout", "model", "tensors", "values", "files", "provenance"} < set(
        keys
    )
    chunk = found["tensors"]["model.norm.weight"]["chunks"][0]
    assert set(chunk) == {"start", "shape", "file", "offset", "nbytes", "codec", "xxh3"}
    assert set(found["model"]) >= {"family", "config"}


def test_chunks_cover_every_tensor_once(dense):
    for name, entry in manifest(dense)["tensors"].items():
        count = torch.zeros(entry["shape"], dtype=torch.int)
        for c in entry["chunks"]:
            box = (slice(a, a + n) for a, n in zip(c["start"], c["shape"], strict=True))
            count[tuple(box)] += 1
        assert (count == 1).all(), name


def test_entries_are_named_by_tensor_and_chunk(dense):
    found = manifest(dense)
    for file in rank_files(dense):
        names = {
            n for n, e in found["tensors"].items() for c in e["chunks"] if file.name in c["file"]
        }
        assert {n.partition("#")[0] for n in read_file(file)} == names
    assert set(read_ranks(dense)) == {0, 1, 2, 3}


def test_a_rank_that_owns_nothing_writes_no_file(tmp_path):
    src = write_hf(tmp_path / "src", {"w": torch.ones(5, 2)})
    (tmp_path / "m.py").write_text("def f(c):\n    return dict(c.tensors)\n")
    mapping = ("--mapping", f"{tmp_path}/m.py:f")
    convert(src, tmp_path / "s", "sharded", "--layout", "dp_shard=4", *mapping)
    # ceil(5 / 4) = 2 rows each: ranks 0, 1 and 2 hold 2, 2, 1 rows, rank 3 none.
    assert [f.name[:10] for f in rank_files(tmp_path / "s")] == [f"rank-0000{n}" for n in range(3)]
    shapes = [list(t.shape) for r in read_ranks(tmp_path / "s").values() for t in r.values()]
    assert shapes == [[2, 2], [2, 2], [1, 2]]


@pytest.mark.parametrize("version", [0, 2, 17, "1", None])
def test_an_unknown_version_is_refused_with_its_number(dense, version, tmp_path):
    reseal(dense, version=version)
    for result in (
        cli("inspect", dense),
        cli("convert", dense, tmp_path / "x", "--to", "huggingface"),
    ):
        refused(result, 3, "manifest.json", f"version {version!r}", "version 1")
    assert not (tmp_path / "x").exists()


def test_an_edited_manifest_breaks_its_seal(dense):
    raw = (dense / "manifest.json").read_bytes()
    (dense / "manifest.json").write_bytes(raw.replace(b'"step":null', b'"step":1234'))
    refused(cli("inspect", dense), 3, "manifest.json", "checksum", "damaged or edited")


@pytest.mark.parametrize("keep", [0, 1, 0.5, -1, -3])
def test_a_cut_manifest_is_refused(dense, keep):
    raw = (dense / "manifest.json").read_bytes()
    size = int(len(raw) * keep) if isinstance(keep, float) else keep
    (dense / "manifest.json").write_bytes(raw[:size])
    # Only the line's end may go: the object is whole without it.
    if size != -1:
        refused(cli("inspect", dense), 3, "manifest.json")


@pytest.mark.parametrize("text", [b"[]", b"null", b'"x"', b'{"format": "other"}', b"{" * 100_000])
def test_what_is_no_manifest_is_refused(dense, text):
    (dense / "manifest.json").write_bytes(text)
    refused(cli("inspect", dense), 3, "manifest.json")


@pytest.mark.parametrize(
    "name", ["../other/x.safetensors", "/etc/passwd", "a/../../x", "./x", "a//b", "", ".."]
)
def test_f13_a_manifest_never_leads_out_of_its_directory(dense, name):
    files = manifest(dense)["files"]
    reseal(dense, files=files | {name: {"nbytes": 1, "header_xxh3": "0" * 16}})
    refused(cli("inspect", dense), 3, "manifest.json", "no file inside")


@pytest.mark.parametrize("save_id", ["../../other", "..", ".", "", "/etc", "a/b", "x\0", "x" * 300])
def test_f13_a_save_id_never_leads_out_of_the_directory(dense, save_id):
    reseal(dense, save_id=save_id)
    refused(cli("inspect", dense), 3, "manifest.json", "save_id")


def change_chunk(path, **changes):
    tensors = manifest(path)["tensors"]
    tensors["model.norm.weight"]["chunks"][0].update(changes)
    reseal(path, tensors=tensors)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", -1),
        ("offset", 1 << 40),
        ("nbytes", 12),
        ("nbytes", -32),
        ("shape", [9]),
        ("shape", [-8]),
        ("shape", [8, 1]),
        ("start", [1]),
        ("start", []),
        ("codec", "lzma"),
        ("xxh3", []),
        ("xxh3", ["0" * 16] * 2),
        ("xxh3", ["no digits"]),
        ("file", "nowhere.safetensors"),
        ("offset", 4.5),
        ("offset", "8"),
    ],
)
def test_f11_a_chunk_that_lies_is_refused(dense, key, value):
    change_chunk(dense, **{key: value})
    refused(cli("inspect", dense), 3, "manifest.json")


@pytest.mark.parametrize("changes", [{"start": [0], "shape": [4], "nbytes": 16}])
def test_a_tensor_that_its_chunks_do_not_cover_is_refused(dense, tmp_path, changes):
    change_chunk(dense, **changes)
    result = cli("convert", dense, tmp_path / "x", "--to", "huggingface")
    refused(result, 3, "model.norm.weight", "exactly once")


@pytest.mark.parametrize(
    "key", ["tensors", "files", "layout", "model", "save_id", "step", "values"]
)
def test_a_manifest_without_a_key_is_refused(dense, key):
    value = manifest(dense)
    del value[key], value["self_xxh3"]
    body = json.dumps(value, separators=(",", ":")).encode()[:-1]
    (dense / "manifest.json").write_bytes(seal(body))
    refused(cli("inspect", dense), 3, "manifest.json", key)


# -- damage ------------------------------------------------------------------------------------


def test_d01_without_a_manifest_there_is_no_checkpoint(dense):
    (dense / "manifest.json").unlink()
    refused(cli("inspect", dense), 3, "no checkpoint here", "manifest.json")


def test_d01_a_missing_rank_file_is_named(dense, tmp_path):
    gone = rank_files(dense)[3]
    gone.unlink()
    for result in (
        cli("convert", dense, tmp_path / "x", "--to", "huggingface"),
        cli("inspect", dense),
        cli("verify", dense),
    ):
        refused(result, 3, gone.name, "incomplete")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("size", [0, 0.5, -1])
def test_d01_a_short_rank_file_is_named_with_both_sizes(dense, tmp_path, size):
    file = rank_files(dense)[1]
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * size) if isinstance(size, float) else size])
    result = cli("convert", dense, tmp_path / "x", "--to", "huggingface")
    refused(result, 3, file.name, str(len(raw)), f"{file.stat().st_size} bytes")
    assert not (tmp_path / "x").exists()


def test_d01_an_empty_small_file_is_named(dense):
    (dense / "config.json").write_bytes(b"")
    refused(cli("inspect", dense), 3, "config.json", "0 bytes")


def run_directory(tmp_path):
    src = write_model(tmp_path / "src", model("llama"))
    for step in (500, 1000):
        convert(src, tmp_path / "run" / f"step-{step:08}", "sharded", "--layout", "tp=2,pp=2")
    return tmp_path / "run"


def test_d01_latest_is_the_highest_step_with_a_manifest(tmp_path):
    run = run_directory(tmp_path)
    first, second = (manifest(run / f"step-{s:08}")["save_id"] for s in (500, 1000))
    assert d9d_ckpt.open(str(run)).opened.save_id == second
    before = everything(run / "step-00000500")
    (run / "step-00001000" / "manifest.json").unlink()
    rank = run / "step-00001000" / second / "rank-00003.safetensors"
    rank.unlink()
    assert cli("inspect", run, "--json").json["save_id"] == first
    refused(cli("inspect", run, "--step", 1000), 3, "step 1000", "incomplete")
    refused(cli("inspect", run, "--step", 750), 3, "no step 750", "500, 1000")
    assert everything(run / "step-00000500") == before


def test_d01_a_run_without_a_whole_step_is_refused(tmp_path):
    run = run_directory(tmp_path)
    for step in run.iterdir():
        (step / "manifest.json").unlink()
    refused(cli("inspect", run), 3, str(run), "incomplete")


def test_d01_a_damaged_manifest_of_the_last_step_is_passed_over(tmp_path):
    run = run_directory(tmp_path)
    file = run / "step-00001000" / "manifest.json"
    file.write_bytes(file.read_bytes()[:200])
    first = manifest(run / "step-00000500")["save_id"]
    result = cli("inspect", run, "--json")
    assert result.code == 0, result.err
    assert result.json["save_id"] == first
    refused(cli("inspect", run, "--step", 1000), 3, "step-00001000", "manifest.json")


def test_d01_the_step_that_was_passed_over_is_named(tmp_path):
    run = run_directory(tmp_path)
    (run / "step-00001000" / "manifest.json").unlink()
    assert any("step-00001000" in note for note in cli("inspect", run, "--json").json["notes"])


def test_d07_a_file_of_another_save_is_refused_by_name(dense, tmp_path):
    other = {n: t + 1 for n, t in model("llama").tensors.items()}
    src = write_hf(tmp_path / "src2", other, model("llama").config)
    convert(src, tmp_path / "b", "sharded", "--layout", "tp=2,pp=2")
    mine, foreign = rank_files(dense)[1], rank_files(tmp_path / "b")[1]
    assert mine.stat().st_size == foreign.stat().st_size
    shutil.copy(foreign, mine)
    result = cli("convert", dense, tmp_path / "x", "--to", "huggingface")
    refused(result, 3, mine.name, manifest(dense)["save_id"], "another save")
    assert not (tmp_path / "x").exists()
    result = cli("verify", dense, "--json")
    assert result.code == 1
    damaged = result.json["damaged"]
    assert {d["file"].rsplit("/", 1)[-1] for d in damaged} == {mine.name}
    assert None in [d["tensor"] for d in damaged]


@pytest.fixture
def large(tmp_path):
    """Two tensors of several blocks over two ranks, written by a mapping."""
    weights = {"w": torch.arange(1_000_000.0), "v": torch.arange(800_000.0).reshape(4, -1)}
    (tmp_path / "m.py").write_text("def f(c):\n    return dict(c.tensors)\n")
    mapping = ("--mapping", f"{tmp_path}/m.py:f")
    src = write_hf(tmp_path / "src", weights)
    convert(src, tmp_path / "s", "sharded", "--layout", "dp_shard=2", *mapping)
    return tmp_path / "s"


def chunk_of(path, name, number):
    return manifest(path)["tensors"][name]["chunks"][number]


def test_d08_verify_lists_every_bad_block(large):
    bad = []
    for name, number, block in (("w", 0, 0), ("w", 1, 1), ("v", 1, 0)):
        c = chunk_of(large, name, number)
        start = c["offset"] + block * BLOCK
        flip(large / c["file"], start + 1000)
        bad.append((c["file"], f"{name} at byte {start}", c["xxh3"][block]))
    result = cli("verify", large, "--json")
    assert result.code == 1
    assert result.json["ok"] is False
    found = [(d["file"], d["tensor"], d["expected"]) for d in result.json["damaged"]]
    assert sorted(found) == sorted(bad)
    assert all(
        d["found"] != d["expected"] and len(d["found"]) == 16 for d in result.json["damaged"]
    )
    text = cli("verify", large).out
    assert all(file in text and where in text for file, where, _ in bad)


@pytest.mark.parametrize("command", [("convert", "--to", "huggingface"), ("reshard",)])
def test_d08_a_flipped_bit_stops_conversion_and_nothing_is_left(large, tmp_path, command):
    c = chunk_of(large, "w", 1)
    flip(large / c["file"], c["offset"] + BLOCK + 70_000)
    layout = () if "--to" in command else ("--layout", "dp_shard=3")
    mapping = ("--mapping", f"{tmp_path}/m.py:f")
    for workers in (1, 2):
        result = cli(
            command[0], large, tmp_path / "x", *command[1:], *layout, *mapping, "--workers", workers
        )
        refused(result, 3, c["file"], str(c["offset"] + BLOCK), c["xxh3"][1], "verify")
        assert not (tmp_path / "x").exists()


def test_d08_diff_does_not_compare_damaged_bytes(large):
    c = chunk_of(large, "w", 1)
    flip(large / c["file"], c["offset"] + BLOCK + 70_000)
    refused(cli("diff", large, large), 3, c["file"])


def test_d08_reading_a_whole_tensor_verifies_all_of_its_blocks(large):
    c = chunk_of(large, "w", 1)
    flip(large / c["file"], c["offset"] + BLOCK + 70_000)
    ckpt = d9d_ckpt.open(str(large))
    with pytest.raises(d9d_ckpt.CkptError, match="damaged"):
        ckpt["w"].read()


def test_d08_reading_other_blocks_is_not_disturbed(large):
    c = chunk_of(large, "w", 1)
    flip(large / c["file"], c["offset"] + BLOCK + 70_000)
    part = d9d_ckpt.open(str(large))["w"][100:400_000].read()
    assert torch.equal(part, torch.arange(100.0, 400_000.0))


def test_d08_a_damaged_header_and_a_damaged_block_are_both_listed(dense):
    first, second = rank_files(dense)[:2]
    flip(first, 30)
    flip(second, -1)
    flip(dense / "config.json", 3)
    result = cli("verify", dense, "--json")
    assert result.code == 1
    files = [d["file"].rsplit("/", 1)[-1] for d in result.json["damaged"]]
    assert sorted(files) == ["config.json", first.name, second.name]


def test_d08_a_damaged_header_length_does_not_hide_other_damage(dense):
    first, second = rank_files(dense)[:2]
    flip(first, 7)
    flip(second, -1)
    result = cli("verify", dense, "--json")
    assert result.code == 1, result.err
    files = [d["file"].rsplit("/", 1)[-1] for d in result.json["damaged"]]
    assert sorted(files) == [first.name, second.name]


def test_d08_a_damaged_header_stops_conversion(dense, tmp_path):
    flip(rank_files(dense)[2], 30)
    result = cli("convert", dense, tmp_path / "x", "--to", "huggingface")
    refused(result, 3, rank_files(dense)[2].name)
    assert not (tmp_path / "x").exists()


# -- names -------------------------------------------------------------------------------------


def test_d05_missing_and_unexpected_tensors_are_listed_together(tmp_path):
    made = model("llama")
    del made.tensors["model.layers.1.mlp.up_proj.weight"]
    made.tensors["model.layers.1.mlp.extra.weight"] = torch.ones(2)
    src = write_model(tmp_path / "src", made)
    result = cli("convert", src, tmp_path / "x", "--to", "sharded", "--layout", "tp=1")
    refused(
        result,
        4,
        "model.layers.1.mlp.up_proj.weight (nearest: model.layers.0.mlp.up_proj.weight, ",
        "1 tensors that llama needs are missing",
        "1 tensors match no rule of llama: model.layers.1.mlp.extra.weight",
    )
    assert not (tmp_path / "x").exists()


def test_d05_a_sharded_checkpoint_that_lacks_a_tensor_is_refused(dense, tmp_path):
    tensors = manifest(dense)["tensors"]
    del tensors["model.norm.weight"]
    reseal(dense, tensors=tensors)
    refused(
        cli("convert", dense, tmp_path / "x", "--to", "huggingface"),
        4,
        "model.norm.weight",
        "missing",
    )


def test_d05_unknown_name_through_python_has_the_nearest(dense):
    ckpt = d9d_ckpt.open(str(dense))
    with pytest.raises(d9d_ckpt.CkptError, match=r"model\.layers\.0\.mlp\.gate_up_proj\.weight"):
        ckpt["model.layers.0.mlp.gate_proj.weight"]


def test_f04_every_rank_file_opens_in_the_reference_reader(dense):
    for file in rank_files(dense):
        with safe_open(file, "pt") as opened:
            assert len(opened.keys()) > 0
