"""Compressed checkpoints: equal bit for bit, smaller, read in part, resumed, and damaged."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from helpers.checkpoints import cli, convert, flip, manifest, read_file, refused
from safetensors import safe_open
from safetensors.torch import save_file

import d9d_ckpt
import make_checkpoint
from d9d_ckpt.codecs.zstd import overhead
from d9d_ckpt.run.checkpoint import Reader
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.tensors import BLOCK, Region

LAYOUT = ("--layout", "tp=2,dp_shard=2")
ZSTD = ("--codec", "zstd")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("compressed") / "hf"
    config = make_checkpoint.sized("llama", "24MiB")
    make_checkpoint.write(config, path, seed=5, max_shard_size=10**9, sparse=False)
    return path


@pytest.fixture(scope="module")
def packed(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "z"
    convert(source, out, "sharded", *LAYOUT, *ZSTD)
    return out


def chunks_of(path):
    return [c for e in manifest(path)["tensors"].values() for c in e["chunks"]]


@pytest.mark.parametrize(
    "layout", ["tp=4", "pp=2,tp=2", "dp_replicate=2,dp_shard=3", "dp_shard=2,cp=2"]
)
@pytest.mark.parametrize("workers", [1, 3])
def test_any_layout_there_and_back_is_bit_equal(source, tmp_path, layout, workers):
    convert(source, tmp_path / "a", "sharded", "--layout", layout, *ZSTD, workers=workers)
    assert cli("verify", tmp_path / "a").code == 0
    result = cli(
        "reshard", tmp_path / "a", tmp_path / "b", *LAYOUT, "--codec", "zstd:3", "--verify"
    )
    assert result.code == 0
    convert(tmp_path / "b", tmp_path / "c", "huggingface", workers=workers)
    assert json.loads(cli("diff", source, tmp_path / "c", "--json").out)["equal"]
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "c" / name).read_bytes() == (source / name).read_bytes()


def test_one_worker_or_many_write_the_same_bytes(source, tmp_path):
    for workers in (1, 3):
        convert(source, tmp_path / str(workers), "sharded", *LAYOUT, *ZSTD, workers=workers)
    one, many = (
        {
            f.name: f.read_bytes()
            for f in (tmp_path / n / manifest(tmp_path / n)["save_id"]).iterdir()
        }
        for n in ("1", "3")
    )
    headers = {8 + int.from_bytes(content[:8], "little") for content in one.values()}
    assert one.keys() == many.keys()
    assert len(headers) == 1  # of one length, and of one save id each
    (length,) = headers
    assert all(one[name][length:] == many[name][length:] for name in one)


def test_files_open_in_the_reference_reader_and_are_smaller(packed, source):
    stored = 0
    for name in manifest(packed)["files"]:
        if "/" in name:
            with safe_open(packed / name, "pt") as file:
                assert {file.get_tensor(n).dtype for n in file.keys()} == {torch.uint8}  # noqa: SIM118
            stored += (packed / name).stat().st_size
    raw = sum(t.nbytes for t in read_file(source / "model.safetensors").values())
    assert stored < 0.72 * raw
    for c in chunks_of(packed):
        assert c["codec"] == "zstd"
        assert c["nbytes"] <= 2 * np.prod(c["shape"]) + overhead(2)


def test_what_does_not_compress_takes_no_more_than_its_headers(tmp_path):
    random = torch.randint(-(2**31), 2**31 - 1, (4, BLOCK // 4), dtype=torch.int32)
    src = tmp_path / "src"
    from_mapping(src, {"w": random}, tmp_path)
    report = convert(src, tmp_path / "z", "sharded", *plain(tmp_path), *ZSTD)
    chunks = chunks_of(tmp_path / "z")
    assert report["bytes_written"] == random.nbytes + len(chunks) * overhead(4)
    assert max(len(c["xxh3"]) for c in chunks) == 2  # a whole block and the lengths before it
    assert cli("verify", tmp_path / "z").code == 0
    assert torch.equal(d9d_ckpt.open(str(tmp_path / "z"))["w"].read(), random)


def from_mapping(path, tensors, scratch):
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (scratch / "m.py").write_text("def f(c):\n    return dict(c.tensors)\n")


def plain(scratch):
    return ("--mapping", f"{scratch}/m.py:f", "--layout", "dp_shard=2")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int16, torch.int64, torch.float64,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    ],
)  # fmt: skip
def test_every_dtype_comes_back(tmp_path, dtype):
    values = (torch.randn(1500, 7, generator=torch.Generator().manual_seed(3)) * 9).to(dtype)
    scalar, empty = values[3, 2].clone(), values[:0].clone()
    from_mapping(tmp_path / "src", {"w": values, "s": scalar, "e": empty}, tmp_path)
    convert(tmp_path / "src", tmp_path / "z", "sharded", *plain(tmp_path), *ZSTD)
    found = {n: t.read() for n, t in d9d_ckpt.open(str(tmp_path / "z")).tensors.items()}
    for name, want in (("w", values), ("s", scalar), ("e", empty)):
        assert found[name].dtype == dtype
        assert (
            found[name].numpy(force=True).tobytes() == want.numpy().tobytes()
            if (dtype.itemsize > 1 or not dtype.is_floating_point)
            else torch.equal(found[name].view(torch.uint8), want.view(torch.uint8))
        )


def test_a_partial_read_takes_the_planes_of_its_own_chunks_alone(tmp_path):
    weight = torch.randn(9000, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    from_mapping(tmp_path / "src", {"w": weight}, tmp_path)
    convert(tmp_path / "src", tmp_path / "z", "sharded", *plain(tmp_path), *ZSTD)
    ckpt = d9d_ckpt.open(str(tmp_path / "z"))
    chunks = ckpt.opened.catalogue.entries["w"].chunks
    assert len(chunks) == 10
    for start, length in ((0, 1), (4499, 2), (8997, 3), (5, 3000)):
        region = Region((start, 0), (length, 512))
        out = np.empty(region.numel * 2, np.uint8)
        read = Reader(str(tmp_path / "z"), {}).read_into(ckpt["w"].node, region, out)
        assert read == sum(c.nbytes for c in chunks if c.region.intersect(region))
        assert out.tobytes() == weight[start : start + length].view(torch.uint8).numpy().tobytes()


def test_chunks_hold_a_block_at_most(packed):
    assert max(2 * np.prod(c["shape"]) for c in chunks_of(packed)) <= BLOCK


# -- damage ------------------------------------------------------------------------------------


@pytest.fixture
def copy(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "copy")
    return tmp_path / "copy"


def test_d08_a_flipped_bit_of_a_compressed_chunk_is_named(copy, tmp_path):
    name, entry = next((n, e) for n, e in manifest(copy)["tensors"].items() if "down" in n)
    chunk = entry["chunks"][2]
    flip(copy / chunk["file"], chunk["offset"] + chunk["nbytes"] - 5)
    result = cli("verify", copy, "--json")
    assert result.code == 1
    (bad,) = result.json["damaged"]
    assert (bad["file"], bad["tensor"].partition(" ")[0]) == (chunk["file"], name)
    refused(
        cli("convert", copy, tmp_path / "x", "--to", "huggingface"), 3, chunk["file"], "damaged"
    )


def reseal(path, value):
    """Another manifest that is whole."""
    value.pop("self_xxh3")
    body = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    seal = xxhash.xxh3_64_hexdigest(body).encode()
    (path / "manifest.json").write_bytes(body + b',"self_xxh3":"' + seal + b'"}\n')


def norm_of(value):
    """The first chunk of a small tensor."""
    return value["tensors"]["model.norm.weight"]["chunks"][0]


def test_d08_bytes_that_do_not_decode_are_named_though_their_checksum_is_right(copy, tmp_path):
    value = manifest(copy)
    chunk = norm_of(value)
    file = copy / chunk["file"]
    raw = bytearray(file.read_bytes())
    raw[chunk["offset"]] += 1  # the length of the first plane
    file.write_bytes(raw)
    stored = bytes(raw[chunk["offset"] : chunk["offset"] + chunk["nbytes"]])
    chunk["xxh3"] = [xxhash.xxh3_64_hexdigest(stored)]
    reseal(copy, value)
    result = cli("convert", copy, tmp_path / "x", "--to", "huggingface")
    refused(result, 3, chunk["file"], str(chunk["offset"]), "do not decode")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("nbytes", [0, 8, 1 << 20])
def test_f11_an_encoded_chunk_of_an_impossible_size_is_refused(copy, nbytes):
    value = manifest(copy)
    norm_of(value)["nbytes"] = nbytes
    reseal(copy, value)
    refused(cli("inspect", copy), 3, "manifest.json", "model.norm.weight", f"{nbytes} bytes")


def test_f11_an_encoded_chunk_larger_than_a_block_is_refused(copy):
    value = manifest(copy)
    entry = value["tensors"]["model.norm.weight"]
    entry["shape"] = norm_of(value)["shape"] = [BLOCK]
    del entry["chunks"][1:]
    reseal(copy, value)
    refused(cli("inspect", copy), 3, "model.norm.weight", f"at most {BLOCK}")


# -- the command -------------------------------------------------------------------------------


def test_a_hugging_face_target_is_not_compressed(source, tmp_path):
    result = cli("convert", source, tmp_path / "x", "--to", "huggingface", *ZSTD)
    refused(result, 2, "--codec zstd", "sharded")


def test_memory_stays_within_the_bound(source, tmp_path):
    for argv in (
        ("convert", source, tmp_path / "a", "--to", "sharded", *LAYOUT, *ZSTD),
        ("reshard", tmp_path / "a", tmp_path / "b", "--layout", "tp=4", *ZSTD),
    ):
        assert cli(*argv, "--memory", "10MiB", "--workers", 2).code == 0
    assert cli("diff", tmp_path / "a", tmp_path / "b").code == 0
    refused(
        cli("reshard", tmp_path / "a", tmp_path / "c", "--layout", "tp=4", "--memory", "9MiB"),
        4,
        "--memory 9.0 MiB",
    )


# -- resume ------------------------------------------------------------------------------------


def killed(source: Path, target: Path, writes: int, **settings):
    """A conversion whose process is gone, without a word, at its ``writes``-th write."""
    pid = os.fork()
    if pid == 0:
        original, count = LocalStore.write, [0]

        def write(self, url, offset, view):
            count[0] += 1
            if count[0] == writes:
                original(self, url, offset, view[: len(view) // 2])
                os._exit(9)
            original(self, url, offset, view)

        LocalStore.write = write
        asked = {"to": "sharded", "layout": LAYOUT[1], "codec": "zstd", "workers": 1} | settings
        d9d_ckpt.convert(str(source), str(target), **asked)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("writes", [2, 12, 25])
def test_u03_a_killed_conversion_goes_on_behind_its_last_whole_chunk(
    source, packed, tmp_path, writes
):
    killed(source, tmp_path / "out", writes)
    resumed = {"to": "sharded", "layout": LAYOUT[1], "codec": "zstd", "resume": True}
    killed(source, tmp_path / "out", max(2, writes // 2), **resumed)
    report = d9d_ckpt.convert(str(source), str(tmp_path / "out"), **resumed)
    total = sum(c["nbytes"] for c in chunks_of(tmp_path / "out"))
    assert total - report.bytes_written >= {2: 0, 12: 2 << 20, 25: 3 << 20}[writes]
    assert d9d_ckpt.diff(str(source), str(tmp_path / "out")).equal
    assert d9d_ckpt.verify(str(tmp_path / "out")).ok
    assert [n for n in os.listdir(tmp_path / "out") if n.startswith(".d9d")] == []
    # What the reference reader makes of every file: no holes, no tails.
    for name in manifest(tmp_path / "out")["files"]:
        if "/" in name:
            read_file(tmp_path / "out" / name)
    assert total == sum(c["nbytes"] for c in chunks_of(packed))


def test_u03_another_codec_is_another_request(source, tmp_path):
    killed(source, tmp_path / "out", 9)
    result = cli("convert", source, tmp_path / "out", "--to", "sharded", *LAYOUT, "--resume")
    refused(result, 4, "--codec was zstd, is none now")
