"""Hugging Face directories: what counts as the checkpoint, what is refused, what a written one looks like."""

import json
import os

import pytest
import torch
import xxhash
from helpers.checkpoints import (
    INDEX,
    SINGLE,
    cli,
    convert,
    equal,
    everything,
    metadata,
    model,
    read_file,
    read_hf,
    refused,
    same,
    write_hf,
    write_index,
    write_model,
    write_raw,
)
from safetensors.torch import save_file

import d9d_ckpt
from d9d_ckpt.errors import CorruptError, MissingError
from d9d_ckpt.formats.huggingface import CHECKSUMS, HEADER_CHECKSUM, open_huggingface
from d9d_ckpt.storage.local import LocalStore

ODD_NAMES = ("a/b", "../../x", "/abs", "模型.层.0", 'q"\n', "k" * 300, "#", "a#0")


def ten():
    return {f"t{n}": torch.full((2, 3), float(n)) for n in range(10)}


def moved(src, dst, *argv):
    return cli("convert", src, dst, "--to", "huggingface", "--workers", 1, *argv)


def whole_mapping(path):
    """A --mapping that keeps every tensor of the source under its own name."""
    path.write_text("def whole(ckpt):\n    return dict(ckpt.tensors)\n")
    return f"{path}:whole"


# -- which files count -------------------------------------------------------------------------


def test_f01_index_names_missing_shard(tmp_path):
    src = write_hf(tmp_path / "src", ten(), shards=3)
    gone = src / "model-00002-of-00003.safetensors"
    gone.unlink()
    for result in (moved(src, tmp_path / "dst"), cli("inspect", src)):
        refused(result, 3, gone.name, INDEX, "3 of 10 tensors", str(src))
    assert not (tmp_path / "dst").exists()


def test_f01_header_lacks_a_mapped_tensor(tmp_path):
    src = write_hf(tmp_path / "src", ten(), shards=3)
    weight_map = json.loads((src / INDEX).read_text())["weight_map"]
    file = "model-00002-of-00003.safetensors"
    write_index(src, weight_map | {"mtp.fc.weight": file})
    refused(moved(src, tmp_path / "dst"), 3, "mtp.fc.weight", file, "1 tensors")
    assert not (tmp_path / "dst").exists()


def test_f01_header_has_a_tensor_that_the_index_puts_elsewhere(tmp_path):
    src = write_hf(tmp_path / "src", ten(), shards=2)
    weight_map = json.loads((src / INDEX).read_text())["weight_map"]
    del weight_map["t4"]
    write_index(src, weight_map)
    refused(moved(src, tmp_path / "dst"), 3, "t4", weight_map["t2"], INDEX)


def test_f01_no_tensor_byte_is_read_before_the_refusal(tmp_path, monkeypatch):
    src = write_hf(tmp_path / "src", ten(), shards=3)
    (src / "model-00002-of-00003.safetensors").unlink()
    read = LocalStore.read

    def watched(self, url, offset, nbytes):
        assert not url.endswith(".safetensors")
        return read(self, url, offset, nbytes)

    monkeypatch.setattr(LocalStore, "read", watched)
    with pytest.raises(MissingError):
        d9d_ckpt.open(str(src))


class _Shuffled(LocalStore):
    """Lists directories in an order of its own."""

    def __init__(self, order):
        super().__init__()
        self._order = order

    def names(self, url):
        return self._order(os.listdir(url))


def as_found(names):
    return names


def backwards(names):
    return sorted(names, reverse=True)


@pytest.mark.parametrize("order", [sorted, backwards, as_found])
def test_f02_only_indexed_files_count_in_any_directory_order(tmp_path, order):
    good = ten()
    src = write_hf(tmp_path / "src", good, shards=2)
    stale = write_hf(tmp_path / "stale", {n: t + 100 for n, t in good.items()}, shards=4)
    extra = [f.name for f in stale.glob("*.safetensors")]
    for name in extra:
        (stale / name).rename(src / name)
    save_file({"tok_embeddings.weight": torch.ones(2)}, src / "consolidated.safetensors")
    opened = open_huggingface(_Shuffled(order), str(src))
    assert sorted(opened.catalogue.entries) == sorted(good)
    used = {c.file.rsplit("/", 1)[-1] for e in opened.catalogue.entries.values() for c in e.chunks}
    assert used == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    (note,) = opened.notes
    assert all(name in note for name in (*extra, "consolidated.safetensors"))


def test_f02_values_come_from_indexed_files_and_the_report_names_the_ignored(tmp_path):
    good = ten()
    src = write_hf(tmp_path / "src", good, shards=2)
    save_file({n: t + 100 for n, t in good.items()}, src / "model-00001-of-00004.safetensors")
    save_file({"other": torch.ones(2)}, src / "consolidated.safetensors")
    report = convert(src, tmp_path / "dst", "huggingface")
    assert equal(read_hf(tmp_path / "dst"), good)
    assert report["notes"] == [
        "not in the index and ignored: consolidated.safetensors, model-00001-of-00004.safetensors"
    ]
    assert sorted(os.listdir(tmp_path / "dst")) == [SINGLE]


def test_f02_two_complete_sets_without_index_are_ambiguous(tmp_path):
    src = write_hf(tmp_path / "src", ten(), shards=2)
    write_hf(src, ten(), shards=4)
    (src / INDEX).unlink()
    refused(moved(src, tmp_path / "dst"), 3, "ambiguous weight sets", INDEX)
    assert not (tmp_path / "dst").exists()


def test_f02_one_set_without_index_is_refused(tmp_path):
    src = write_hf(tmp_path / "src", ten(), shards=2)
    (src / INDEX).unlink()
    refused(moved(src, tmp_path / "dst"), 3, "shards without their index", INDEX)


def test_f02_single_file_wins_over_others_which_are_named(tmp_path):
    src = write_hf(tmp_path / "src", ten())
    save_file({"other": torch.ones(2)}, src / "consolidated.safetensors")
    report = convert(src, tmp_path / "dst", "huggingface")
    assert equal(read_hf(tmp_path / "dst"), ten())
    assert "consolidated.safetensors" in report["notes"][0]


def test_f19_pickled_shards_without_an_index_are_refused_by_name(tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    for name in names:
        torch.save({name[15:18]: torch.ones(2)}, src / name)
    refused(moved(src, tmp_path / "dst"), 3, *names, "pytorch_model.bin.index.json")


def test_f19_bin_beside_safetensors_is_ignored_with_a_note(tmp_path):
    src = write_hf(tmp_path / "src", ten(), shards=2)
    torch.save({n: t + 100 for n, t in ten().items()}, src / "pytorch_model.bin")
    (src / "pytorch_model.bin.index.json").write_text("{}")
    report = convert(src, tmp_path / "dst", "huggingface")
    assert equal(read_hf(tmp_path / "dst"), ten())
    assert "pytorch_model.bin" in report["notes"][0]
    assert sorted(os.listdir(tmp_path / "dst")) == [SINGLE]


def test_f19_a_pickle_is_never_executed(tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    (src / "pytorch_model.bin").write_bytes(
        b"cos\nsystem\n(S'touch " + os.fsencode(src) + b"/x'\ntR."
    )
    refused(moved(src, tmp_path / "dst"), 3, "pytorch_model.bin")
    assert sorted(os.listdir(src)) == ["pytorch_model.bin"]


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/x", "a/b.safetensors", "", "..", 3]
)
def test_f13_index_never_leads_out_of_the_directory(tmp_path, file):
    src = write_hf(tmp_path / "src", ten(), shards=2)
    write_index(src, {"t0": file})
    refused(cli("inspect", src), 3, INDEX, "t0")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_damaged_index_is_refused(tmp_path, text):
    src = write_hf(tmp_path / "src", ten(), shards=2)
    (src / INDEX).write_text(text)
    refused(moved(src, tmp_path / "dst"), 3, INDEX)


def test_a_single_file_opens_by_its_own_url(tmp_path):
    src = write_hf(tmp_path / "src", ten(), shards=2)
    ckpt = d9d_ckpt.open(str(src / "model-00001-of-00002.safetensors"))
    assert sorted(ckpt.tensors) == ["t0", "t2", "t4", "t6", "t8"]
    assert torch.equal(ckpt["t4"].read(), ten()["t4"])


# -- what is written ---------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"format": "pt", "k": "v"}, {"format": "np"}, None, {}])
def test_f04_every_written_file_has_format_pt(tmp_path, given):
    src = tmp_path / "src"
    src.mkdir()
    if given is None:
        save_file(ten(), src / SINGLE)
    else:
        write_raw(
            src / SINGLE,
            {"__metadata__": given, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
            bytes(8),
        )
    convert(src, tmp_path / "dst", "huggingface", "--max-shard-size", 48)
    files = sorted((tmp_path / "dst").glob("*.safetensors"))
    assert files
    for file in files:
        assert metadata(file)["format"] == "pt"
        assert all(type(v) is str for v in metadata(file).values())


def test_f04_other_metadata_keys_are_kept(tmp_path):
    src = write_hf(tmp_path / "src", {"a": torch.ones(2)}, metadata={"format": "pt", "k": "v"})
    convert(src, tmp_path / "dst", "huggingface")
    found = metadata(tmp_path / "dst" / SINGLE)
    assert not found.pop(HEADER_CHECKSUM).strip("0123456789abcdef")
    assert {k: v for k, v in found.items() if k != CHECKSUMS} == {"format": "pt", "k": "v"}
    assert cli("verify", tmp_path / "dst").code == 0


def test_f04_stale_checksums_of_the_source_are_not_carried_over(tmp_path):
    convert(write_hf(tmp_path / "a", ten()), tmp_path / "b", "huggingface")
    convert(tmp_path / "b", tmp_path / "c", "huggingface", "--dtype", "bfloat16")
    assert cli("verify", tmp_path / "c").code == 0
    assert metadata(tmp_path / "b" / SINGLE) != metadata(tmp_path / "c" / SINGLE)


@pytest.mark.parametrize("value", [{"format": "pt", "n": 3}, {"x": {"y": "z"}}, ["pt"], "pt"])
def test_f04_metadata_that_is_no_string_map_is_refused(tmp_path, value):
    src = tmp_path / "src"
    src.mkdir()
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write_raw(src / SINGLE, {"__metadata__": value, "a": entry}, bytes(8))
    refused(moved(src, tmp_path / "dst"), 3, SINGLE, "__metadata__")
    assert not (tmp_path / "dst").exists()


def test_f04_sharded_files_have_format_pt_and_the_save_id(tmp_path):
    src = write_model(tmp_path / "src", model("llama"))
    report = convert(src, tmp_path / "dst", "sharded", "--layout", "tp=2,pp=2")
    assert report["format"] == "sharded"
    save_id = json.loads((tmp_path / "dst" / "manifest.json").read_text())["save_id"]
    files = sorted((tmp_path / "dst" / save_id).iterdir())
    assert [f.name for f in files] == [f"rank-0000{n}.safetensors" for n in range(4)]
    for file in files:
        assert metadata(file) == {"format": "pt", "save_id": save_id}


def test_f08_index_has_every_tensor_and_the_bytes_on_disk(tmp_path):
    made = model("llama")
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "s", "sharded", "--layout", "pp=2")
    convert(tmp_path / "s", tmp_path / "dst", "huggingface", "--max-shard-size", 2000)
    index = json.loads((tmp_path / "dst" / INDEX).read_text())
    assert sorted(index["weight_map"]) == sorted(made.tensors)
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert files == [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    total = sum(t.nbytes for f in files for t in read_file(tmp_path / "dst" / f).values())
    assert index["metadata"]["total_size"] == total == sum(t.nbytes for t in made.tensors.values())


def test_f08_a_tensor_above_the_shard_size_has_a_file_of_its_own(tmp_path):
    weights = {"small": torch.ones(2), "large": torch.ones(100), "after": torch.ones(3)}
    src = write_hf(tmp_path / "src", weights)
    convert(src, tmp_path / "dst", "huggingface", "--max-shard-size", 16)
    index = json.loads((tmp_path / "dst" / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) == 3
    assert equal(read_hf(tmp_path / "dst"), weights)


def test_data_is_aligned_to_its_elements(tmp_path):
    weights = {
        "b": torch.ones(3, dtype=torch.uint8),
        "h": torch.ones(5, dtype=torch.bfloat16),
        "d": torch.ones(7, dtype=torch.float64),
        "f": torch.ones(3),
    }
    src = write_hf(tmp_path / "src", weights)
    convert(src, tmp_path / "dst", "huggingface")
    raw = (tmp_path / "dst" / SINGLE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, t in weights.items():
        assert (8 + length + header[name]["data_offsets"][0]) % t.itemsize == 0
    assert raw[8:9] == b"{"


def test_f13_odd_names_round_trip_and_are_never_paths(tmp_path):
    weights = {name: torch.full((4, 2), float(n)) for n, name in enumerate(ODD_NAMES)}
    src = write_hf(tmp_path / "in" / "src", weights)
    mapping = whole_mapping(tmp_path / "keep.py")
    sharded, back = tmp_path / "in" / "s", tmp_path / "in" / "back"
    convert(src, sharded, "sharded", "--layout", "dp_shard=1", "--mapping", mapping)
    convert(sharded, back, "huggingface", "--mapping", mapping)
    assert equal(read_hf(back), weights)
    assert sorted(os.listdir(tmp_path / "in")) == ["back", "s", "src"]
    assert sorted(os.listdir(tmp_path)) == ["in", "keep.py"]
    assert cli("verify", back).code == 0


def test_f13_the_reserved_name_is_refused_at_write(tmp_path):
    src = write_hf(tmp_path / "src", {"a": torch.ones(2)})
    (tmp_path / "m.py").write_text("def f(c):\n    return {'__metadata__': c['a']}\n")
    result = moved(src, tmp_path / "dst", "--mapping", f"{tmp_path}/m.py:f")
    refused(result, 4, "__metadata__", "reserved")
    assert not (tmp_path / "dst").exists()


def test_f13_names_that_no_utf8_can_hold_are_corrupt(tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    header = b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    write_raw(src / SINGLE, header, bytes(4))
    assert moved(src, tmp_path / "dst").code == 3
    assert not (tmp_path / "dst").exists()


def empties():
    return {
        "a": torch.zeros(0, 7),
        "b": torch.zeros(0),
        "s": torch.tensor(1.0),
        "k": torch.zeros(0, 0, 4, dtype=torch.bfloat16),
        "w": torch.ones(2, 2),
    }


def test_f15_empty_and_scalar_tensors_survive_a_conversion(tmp_path):
    src = write_hf(tmp_path / "src", empties())
    report = convert(src, tmp_path / "dst", "huggingface")
    assert report["tensors"] == 5
    assert equal(read_hf(tmp_path / "dst"), empties())
    raw = (tmp_path / "dst" / SINGLE).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    for name in ("a", "b", "k"):
        begin, end = header[name]["data_offsets"]
        assert begin == end


def test_f15_empty_tensors_are_in_the_index_of_several_files(tmp_path):
    src = write_hf(tmp_path / "src", empties())
    convert(src, tmp_path / "dst", "huggingface", "--max-shard-size", 4)
    assert sorted(json.loads((tmp_path / "dst" / INDEX).read_text())["weight_map"]) == [*"abksw"]
    assert equal(read_hf(tmp_path / "dst"), empties())


def test_f15_a_checkpoint_of_empty_tensors_alone(tmp_path):
    only = {n: t for n, t in empties().items() if not t.numel()}
    convert(write_hf(tmp_path / "src", only), tmp_path / "dst", "huggingface")
    assert equal(read_hf(tmp_path / "dst"), only)


def test_f15_empty_and_scalar_tensors_survive_resharding(tmp_path):
    mapping = whole_mapping(tmp_path / "keep.py")
    src = write_hf(tmp_path / "src", empties())
    convert(src, tmp_path / "s2", "sharded", "--layout", "dp_shard=2", "--mapping", mapping)
    for n in (4, 1):
        last, dst = tmp_path / f"s{2 if n == 4 else 4}", tmp_path / f"s{n}"
        assert cli("reshard", last, dst, "--layout", f"dp_shard={n}", "--workers", 1).code == 0
    ckpt = d9d_ckpt.open(str(tmp_path / "s1"))
    assert equal({n: t.read() for n, t in ckpt.tensors.items()}, empties())
    convert(tmp_path / "s4", tmp_path / "hf", "huggingface", "--mapping", mapping)
    assert equal(read_hf(tmp_path / "hf"), empties())


def test_f15_a_scalar_is_stored_once(tmp_path):
    src = write_hf(tmp_path / "src", empties())
    mapping = whole_mapping(tmp_path / "keep.py")
    convert(src, tmp_path / "s", "sharded", "--layout", "dp_shard=3", "--mapping", mapping)
    tensors = json.loads((tmp_path / "s" / "manifest.json").read_text())["tensors"]
    assert [len(tensors[n]["chunks"]) for n in "abksw"] == [0, 0, 0, 1, 2]


def test_f15_slices_of_scalars_and_empties(tmp_path):
    ckpt = d9d_ckpt.open(str(write_hf(tmp_path / "src", empties())))
    assert ckpt["s"].read().item() == 1.0
    assert ckpt["a"][:, 2:4].read().shape == (0, 2)
    assert ckpt["w"][1:1].read().shape == (0, 2)


def test_f16_views_are_written_as_their_own_bytes(tmp_path):
    x = torch.arange(8.0).reshape(4, 2)
    src = write_hf(tmp_path / "src", {"x": x, "big": torch.zeros(1000, 1000)})
    before = everything(src)
    (tmp_path / "m.py").write_text(
        "def f(c):\n"
        "    x = c['x']\n"
        "    return {'t': x.transpose(0, 1), 'a': x[:3], 'b': x[2:], 'c': x, 'd': x,"
        " 'row': c['big'][:1]}\n"
    )
    convert(src, tmp_path / "dst", "huggingface", "--mapping", f"{tmp_path}/m.py:f")
    found = read_hf(tmp_path / "dst")
    wanted = {"t": x.t(), "a": x[:3], "b": x[2:], "c": x, "d": x, "row": torch.zeros(1, 1000)}
    assert equal(found, wanted)
    assert (tmp_path / "dst" / SINGLE).stat().st_size < 16_000
    assert everything(src) == before


# -- replacing what is there -------------------------------------------------------------------


def files(path):
    return sorted(os.listdir(path))


def shard_names(count):
    return [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]


def overwritten(tmp_path, old, new_size):
    """``old`` shards of version 1 replaced by version 2, among files that are not ours."""
    dst = write_hf(tmp_path / "dst", {n: t + 100 for n, t in ten().items()}, shards=old)
    (dst / "notes.txt").write_text("mine")
    save_file({"ema": torch.ones(2)}, dst / "model.ema.safetensors")
    src = write_hf(tmp_path / "src", ten())
    convert(src, dst, "huggingface", "--overwrite", "--max-shard-size", new_size)
    assert equal(read_hf(dst), ten())
    ckpt = d9d_ckpt.open(str(dst))
    assert equal({n: t.read() for n, t in ckpt.tensors.items()}, ten())
    assert (dst / "notes.txt").read_text() == "mine"
    assert torch.equal(read_file(dst / "model.ema.safetensors")["ema"], torch.ones(2))
    return set(files(dst)) - {"notes.txt", "model.ema.safetensors"}


def test_f05_single_file_replaced_by_shards(tmp_path):
    assert overwritten(tmp_path, 1, 48) == {INDEX, *shard_names(5)}


def test_f05_shards_replaced_by_a_single_file(tmp_path):
    assert overwritten(tmp_path, 3, "1MB") == {SINGLE}


def test_f05_shards_replaced_by_fewer(tmp_path):
    assert overwritten(tmp_path, 5, 120) == {INDEX, *shard_names(2)}


def test_f05_shards_replaced_by_more(tmp_path):
    assert overwritten(tmp_path, 2, 24) == {INDEX, *shard_names(10)}


def test_f05_shards_replaced_by_as_many(tmp_path):
    """The old ones keep their names until the new index counts, so the new ones have others."""
    names = overwritten(tmp_path, 5, 48) - {INDEX}
    (save,) = {name.removeprefix("model-").rsplit("-", 3)[0] for name in names}
    assert names == {name.replace("model", f"model-{save}", 1) for name in shard_names(5)}
    convert(
        tmp_path / "src", tmp_path / "dst", "huggingface", "--overwrite", "--max-shard-size", 48
    )
    assert set(files(tmp_path / "dst")) >= {INDEX, *shard_names(5)}


def test_f05_a_used_directory_is_refused_without_overwrite(tmp_path):
    dst = write_hf(tmp_path / "dst", ten())
    before = everything(dst)
    src = write_hf(tmp_path / "src", ten(), shards=2)
    refused(moved(src, dst), 4, str(dst), "not empty", "--overwrite")
    assert everything(dst) == before


def test_f05_sharded_replaced_by_huggingface_and_back(tmp_path):
    made = model("llama")
    src, dst = write_model(tmp_path / "src", made), tmp_path / "dst"
    convert(src, dst, "sharded", "--layout", "tp=2")
    convert(src, dst, "huggingface", "--overwrite")
    assert files(dst) == ["config.json", SINGLE]
    assert d9d_ckpt.open(str(dst)).format == "huggingface"
    convert(src, dst, "sharded", "--layout", "tp=2", "--overwrite")
    assert d9d_ckpt.open(str(dst)).format == "sharded"
    assert SINGLE not in files(dst)
    first = d9d_ckpt.open(str(dst)).opened.save_id
    convert(src, dst, "sharded", "--layout", "pp=2", "--overwrite")
    assert first not in files(dst)
    assert len(files(dst)) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (INDEX, "{broken"),
        (INDEX, '{"weight_map": {"a": ["x"]}}'),
        (INDEX, '{"weight_map": [1]}'),
        ("manifest.json", "[]"),
        ("manifest.json", "{broken"),
    ],
)
def test_f05_a_damaged_checkpoint_can_be_replaced_or_is_refused_plainly(tmp_path, name, text):
    src = write_hf(tmp_path / "src", ten())
    dst = write_hf(tmp_path / "dst", {n: t + 100 for n, t in ten().items()}, shards=2)
    (dst / name).write_text(text)
    result = moved(src, dst, "--overwrite")
    if result.code:
        assert result.code in (3, 4)
        refused(result, result.code, name)
    else:
        assert equal(read_hf(dst), ten())


def test_f05_overwrite_never_deletes_what_is_no_weight_file(tmp_path):
    dst = write_hf(tmp_path / "dst", ten(), shards=2)
    (dst / "notes.txt").write_text("mine")
    write_index(dst, {"a": "notes.txt"})
    moved(write_hf(tmp_path / "src", ten()), dst, "--overwrite")
    assert (dst / "notes.txt").read_text() == "mine"


def test_f05_source_file_inside_the_destination_is_refused(tmp_path):
    dst = write_hf(tmp_path / "dst", ten())
    before = everything(dst)
    refused(moved(dst / SINGLE, dst, "--overwrite"), 4, "same")
    assert everything(dst) == before


# -- checksums of our own files ----------------------------------------------------------------


def test_verify_accepts_what_we_wrote_and_says_that_others_have_no_checksums(tmp_path):
    src = write_hf(tmp_path / "src", ten(), shards=2)
    result = cli("verify", src, "--json")
    assert (result.code, result.json["ok"]) == (1, False)
    assert result.json["reason"] == "no checksums recorded"
    convert(src, tmp_path / "dst", "huggingface", "--max-shard-size", 120)
    result = cli("verify", tmp_path / "dst", "--json")
    assert (result.code, result.json["ok"], result.json["reason"]) == (0, True, None)
    assert (result.json["bytes"], result.json["chunks"]) == (240, 10)


@pytest.mark.parametrize("text", ["00", "x" * 160, "0" * 176])
def test_a_checksum_list_of_the_wrong_form_is_corrupt(tmp_path, text):
    marks = {"format": "pt", HEADER_CHECKSUM: "0" * 16, CHECKSUMS: text}
    file = write_hf(tmp_path / "src", ten(), metadata=marks) / SINGLE
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    own = xxhash.xxh3_64_hexdigest(raw[8:end]).encode()
    mark = f'"{HEADER_CHECKSUM}":"'.encode()
    file.write_bytes(raw.replace(mark + b"0" * 16, mark + own, 1))
    with pytest.raises(CorruptError, match=CHECKSUMS):
        d9d_ckpt.open(str(tmp_path / "src"))


def test_d08_a_changed_name_in_the_header_of_a_single_file_is_damage(tmp_path):
    convert(write_hf(tmp_path / "src", ten()), tmp_path / "dst", "huggingface")
    file = tmp_path / "dst" / SINGLE
    file.write_bytes(file.read_bytes().replace(b'"t3"', b'"tx"', 1))
    refused(cli("verify", tmp_path / "dst"), 3, SINGLE, "not the checksum of the header")


@pytest.mark.parametrize("key", [CHECKSUMS, HEADER_CHECKSUM])
def test_d08_checksums_whose_key_is_damaged_are_not_taken_for_none(tmp_path, key):
    convert(write_hf(tmp_path / "src", ten()), tmp_path / "dst", "huggingface")
    file = tmp_path / "dst" / SINGLE
    file.write_bytes(file.read_bytes().replace(key.encode(), key.replace("d9d", "d9e").encode(), 1))
    refused(cli("verify", tmp_path / "dst"), 3, SINGLE)


def test_d08_flipped_bit_in_our_huggingface_file(tmp_path):
    big = {"w": torch.arange(600_000.0), "v": torch.arange(300_000.0)}
    convert(write_hf(tmp_path / "src", big), tmp_path / "dst", "huggingface")
    file = tmp_path / "dst" / SINGLE
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    order = json.loads(raw[8:start])
    at = {n: start + order[n]["data_offsets"][0] for n in big}
    raw[at["w"] + 1_200_000] ^= 4
    raw[at["v"] + 5] ^= 4
    file.write_bytes(raw)
    result = cli("verify", tmp_path / "dst", "--json")
    assert result.code == 1
    assert sorted((d["file"], d["tensor"]) for d in result.json["damaged"]) == [
        (SINGLE, f"v at byte {at['v']}"),
        (SINGLE, f"w at byte {at['w'] + (1 << 20)}"),
    ]
    assert all(len(d["expected"]) == 16 != d["found"] for d in result.json["damaged"])
    refused(moved(tmp_path / "dst", tmp_path / "x"), 3, SINGLE, "damaged", "verify")
    assert not (tmp_path / "x").exists()


def test_other_files_go_along_and_weights_of_other_kinds_do_not(tmp_path):
    made = model("llama")
    src = write_model(tmp_path / "src", made)
    kept = {
        "tokenizer.json": b'{"a": 1}',
        "tokenizer.model": bytes(range(256)),
        "chat_template.jinja": b"{{x}}\r\n",
        "modeling_x.py": b"print()",
        "README.md": b"\xff\xfe",
    }
    for name, content in kept.items():
        (src / name).write_bytes(content)
    for name in ("model.gguf", "flax_model.msgpack", "tf_model.h5", ".gitattributes", "x.onnx"):
        (src / name).write_bytes(b"x")
    (src / "original").mkdir()
    for to, layout in (("sharded", ("--layout", "tp=2")), ("huggingface", ())):
        convert(src, tmp_path / to, to, *layout)
        found = {n: c for n, c in everything(tmp_path / to).items() if n in kept}
        assert found == kept
        names = {n for n in os.listdir(tmp_path / to) if n not in kept} - {"config.json", SINGLE}
        assert not {n for n in names if n.endswith(("gguf", "msgpack", "h5", "onnx"))}
        assert ".gitattributes" not in names


def test_same_reads_every_dtype(tmp_path):
    bits = torch.randint(
        0, 256, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    names = [
        "bool",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
    weights = {n: bits.view(getattr(torch, n)) if n != "bool" else bits > 9 for n in names}
    src = write_hf(tmp_path / "src", weights)
    convert(src, tmp_path / "dst", "huggingface", "--max-shard-size", 200)
    found = read_hf(tmp_path / "dst")
    assert all(same(found[n], t) for n, t in weights.items())
