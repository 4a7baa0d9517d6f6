"""The safetensors header: every lie refused with its reason, and what we write read by the reference."""

import json
import struct

import pytest
import torch
from helpers.strategies import seeded
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save, save_file

from d9d_ckpt.errors import CkptError, CorruptError, MappingError, MissingError
from d9d_ckpt.formats.safetensors import (
    MAX_HEADER,
    by_alignment,
    encode_header,
    parse_header,
    read_header,
)
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.tensors import DTYPES, TensorSpec

ONE = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def packed(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def reading(tmp_path):
    """Reads bytes as a file called model.safetensors."""
    store = LocalStore()
    path = tmp_path / "model.safetensors"

    def read(content):
        path.write_bytes(content)
        return read_header(store, str(path))

    yield read
    store.close()


@pytest.fixture
def refusing(reading):
    """The message with which bytes are refused; the reference reader refuses them as well."""

    def refuse(content):
        with pytest.raises(CorruptError) as error:
            reading(content)
        assert error.value.exit_code == 3
        assert "model.safetensors: " in str(error.value)
        with pytest.raises(SafetensorError):
            load(content)
        return str(error.value)

    return refuse


def test_a_file_of_the_reference_writer_is_read(reading):
    header = reading(
        save({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, {"k": "v"})
    )
    assert header.metadata == {"k": "v"}
    a, b = header.tensors["a"], header.tensors["b"]
    assert (a.spec, b.spec) == (TensorSpec(DTYPES["F32"], (2, 3)), TensorSpec(DTYPES["BF16"], (4,)))
    assert b.offset == a.offset + 24


def test_f03_a_cut_file_says_both_sizes_and_to_download_it_again(refusing):
    whole = packed(ONE, b"\0" * 8)
    message = refusing(whole[:-1])
    assert f"{len(whole) - 1} bytes, expected {len(whole)}" in message
    assert "download it again" in message


def test_f03_bytes_after_the_data_are_refused(refusing):
    whole = packed(ONE, b"\0" * 8)
    message = refusing(whole + b"\0\0")
    assert f"{len(whole) + 2} bytes, expected {len(whole)}" in message
    assert "after the data" in message


@pytest.mark.parametrize("size", [0, 2, 7])
def test_f03_files_too_short_for_a_header_length(refusing, size):
    message = refusing(b"\0" * size)
    assert f"{size} bytes, expected at least 8" in message
    assert "download it again" in message


def test_f03_a_header_longer_than_the_file(refusing):
    message = refusing(struct.pack("<Q", 1000) + b" " * 52)
    assert "60 bytes, expected at least 1008" in message
    assert "download it again" in message


F11 = {
    "short offsets": ({"a": entry("F32", (1,), (4, 0))}, 4, "invalid data_offsets"),
    "alias": ({"a": entry(), "b": entry()}, 4, "overlaps the tensor before it"),
    "hole": ({"a": entry(), "b": entry(offsets=(8, 12))}, 12, "leaves a hole before it"),
    "byte count": ({"a": entry("F32", (2,), (0, 4))}, 4, "needs 8 bytes, data_offsets hold 4"),
    "too many bytes": ({"a": entry("F32", (1,), (0, 8))}, 8, "needs 4 bytes, data_offsets hold 8"),
    "huge shape": (
        {"a": entry("F32", (2**40, 2**40), (0, 4))},
        4,
        "[1099511627776, 1099511627776]",
    ),
    "huge empty": ({"a": entry("F32", (2**40, 2**40, 0), (0, 0))}, 0, "shape"),
    "half a byte": ({"a": entry("F4", (3,), (0, 2))}, 2, "F4"),
    "negative dim": ({"a": entry("F32", (-1,), (0, 4))}, 4, r"no valid shape"),
    "unknown dtype": ({"a": entry("F99", (1,), (0, 99))}, 4, "unknown dtype 'F99'"),
    "start hole": ({"a": entry(offsets=(4, 8))}, 8, "leaves a hole before it"),
    "partial overlap": ({"a": entry(), "b": entry(offsets=(2, 6))}, 6, "overlaps"),
    "negative offset": ({"a": entry(offsets=(-4, 0))}, 4, "invalid data_offsets"),
    "three offsets": ({"a": entry(offsets=(0, 2, 4))}, 4, "invalid data_offsets"),
    "float offset": ({"a": entry(offsets=(0, 4.0))}, 4, "invalid data_offsets"),
    "true offset": ({"a": entry(shape=(1,), offsets=(0, True))}, 1, "invalid data_offsets"),
    "float dim": ({"a": entry(shape=(4.0,))}, 4, "no valid shape"),
    "true dim": ({"a": entry(shape=(True,), offsets=(0, 1))}, 1, "no valid shape"),
    "text shape": ({"a": entry() | {"shape": "4"}}, 4, "no valid shape"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, 4, "no valid shape"),
    "no offsets": ({"a": {"dtype": "U8", "shape": [4]}}, 4, "invalid data_offsets None"),
    "no dtype": ({"a": {"shape": [4], "data_offsets": [0, 4]}}, 4, "unknown dtype None"),
    "list dtype": ({"a": entry(["U8"])}, 4, "unknown dtype"),
    "number": ({"a": 4}, 4, "has no dtype, shape and data_offsets"),
    "empty inside": ({"a": entry(), "b": entry(shape=(0,), offsets=(2, 2))}, 4, "overlaps"),
}


@pytest.mark.parametrize(("header", "size", "reason"), F11.values(), ids=F11)
def test_f11_headers_that_lie_are_refused_with_tensor_and_reason(refusing, header, size, reason):
    message = refusing(packed(header, b"\0" * size))
    assert reason in message
    assert "tensor 'a'" in message or "tensor 'b'" in message


def test_f11_offsets_past_the_end_of_the_file(refusing):
    message = refusing(packed({"a": entry(shape=(100,), offsets=(0, 100))}, b"\0" * 4))
    assert "it was cut short" in message


def test_f11_headers_may_be_in_another_order_than_the_data(reading):
    header = {"b": entry(offsets=(4, 8)), "a": entry(offsets=(0, 4))}
    content = packed(header, bytes(range(8)))
    found = reading(content)
    assert list(found.tensors) == ["a", "b"]
    data = len(content) - 8
    assert [p.offset for p in found.tensors.values()] == [data, data + 4]
    assert load(content)["b"].tolist() == [4, 5, 6, 7]


def test_f11_space_before_the_brace_is_read_and_never_written(reading):
    found = reading(packed(b"  " + json.dumps(ONE).encode(), b"\0" * 8))
    assert list(found.tensors) == ["a"]
    raw, _ = encode_header([("a", TensorSpec(DTYPES["F32"], (2,)))], {})
    assert raw[8:9] == b"{"


def test_padding_after_the_json_is_read(reading):
    assert list(reading(packed(json.dumps(ONE).encode() + b" " * 9, b"\0" * 8)).tensors) == ["a"]


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b'"a"', b"{}{}", b"\xff\xfe{}", b"{\0}", b"nan", b"[" * 100_000],
    ids=lambda text: repr(text[:6]),
)
def test_headers_that_are_no_json_object(refusing, text):
    assert "the header is not" in refusing(packed(text))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_headers_in_another_encoding_than_utf_8(refusing, encoding):
    refusing(packed(json.dumps(ONE).encode(encoding), b"\0" * 8))


def test_a_header_of_no_tensors_is_a_file(reading):
    assert reading(packed({})).tensors == {}
    assert reading(packed({"__metadata__": {"k": "v"}})).metadata == {"k": "v"}


def test_a_key_that_appears_twice_is_refused(reading):
    one = json.dumps(entry())
    for text in (
        f'{{"a":{one},"a":{one}}}',
        '{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        '{"__metadata__":{"k":"v","k":"w"}}',
        '{"__metadata__":{},"__metadata__":{}}',
    ):
        with pytest.raises(CorruptError, match="a key appears twice"):
            reading(packed(text.encode(), b"\0" * 4))


@pytest.mark.parametrize("metadata", [{"k": 1}, {"k": None}, {"k": {}}, [], "pt"], ids=str)
def test_f04_metadata_that_is_not_strings_is_refused(reading, metadata):
    with pytest.raises(CorruptError, match="__metadata__ must map strings to strings"):
        reading(packed({"__metadata__": metadata, **ONE}, b"\0" * 8))


def test_f04_absent_and_empty_metadata_are_the_same(reading):
    for metadata in ({}, {"__metadata__": {}}, {"__metadata__": None}):
        assert reading(packed(metadata | ONE, b"\0" * 8)).metadata == {}


def test_a_name_that_is_no_unicode_is_refused(refusing):
    """JSON can spell half of a surrogate pair, which no UTF-8 header can hold."""
    text = '{"\\ud800":' + json.dumps(entry()) + "}"
    refusing(packed(text.encode(), b"\0" * 4))


def test_the_longest_header_is_read_and_one_byte_more_refused(reading, refusing):
    text = json.dumps(ONE).encode().ljust(MAX_HEADER)
    assert list(reading(packed(text, b"\0" * 8)).tensors) == ["a"]
    message = refusing(struct.pack("<Q", MAX_HEADER + 1) + b"{}")
    assert "header of 100000001 bytes, at most 100000000" in message


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"PK\x03\x04\x00\x00\x08\x08\x00\x00", "PyTorch zip"),
        (b"PK\x03\x04\x14\x00\x00\x00\x08\x00", "PyTorch zip"),
        (b"\x80\x02}q\x00X\x05\x00\x00\x00", "pickle"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "pickle"),
        (b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00", "pickle"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<html><body>404</body></html>", "HTML page"),
        (b"<!DOCTYPE html><html>", "HTML page"),
        (b"<!doctype html><html>", "HTML page"),
        (b"<HTML><HEAD>", "HTML page"),
        (b"GGUF\x03\x00\x00\x00\x00\x00", "GGUF"),
    ],
    ids=lambda v: repr(v[:12]) if isinstance(v, bytes) else "",
)
def test_f17_other_files_are_called_what_they_are(refusing, start, kind):
    for content in (start, start.ljust(4096, b"\0")):
        assert kind in refusing(content)


@pytest.mark.parametrize("length", [0x0280, 0x10280, 0x04034B50])
def test_f17_a_header_whose_length_looks_like_another_file_is_read(reading, length):
    """A header of 640 bytes starts with 80 02, as a pickle does; 67 MB of header with PK 03 04."""
    text = json.dumps(ONE).encode().ljust(length)
    assert list(reading(packed(text, b"\0" * 8)).tensors) == ["a"]


def test_f17_a_bogus_length_allocates_nothing(tmp_path):
    class Counting(LocalStore):
        read_bytes = 0

        def read(self, url, offset, nbytes):
            self.read_bytes += nbytes
            return super().read(url, offset, nbytes)

    path = tmp_path / "x.safetensors"
    for length in (2**63, 10**8 + 1, 10**8):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        store = Counting()
        with pytest.raises(CorruptError):
            read_header(store, str(path))
        assert store.read_bytes <= 64
        store.close()


def test_u04_an_absent_file_is_another_error_than_a_corrupt_one(tmp_path):
    with pytest.raises(MissingError, match=r"none\.safetensors: no such file") as error:
        read_header(LocalStore(), str(tmp_path / "none.safetensors"))
    assert error.value.exit_code == 3


def written(path, tensors, metadata=None):
    """A file of ``tensors`` with our header, each tensor's bytes at the offset it names."""
    placed = [(name, TensorSpec(_dtype(t), tuple(t.shape))) for name, t in tensors.items()]
    placed = by_alignment(placed)
    header, offsets = encode_header(placed, metadata or {})
    content = bytearray(header)
    for (name, _), offset in zip(placed, offsets, strict=True):
        assert len(content) == offset
        content += tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    path.write_bytes(content)
    return {name: (offset, spec) for (name, spec), offset in zip(placed, offsets, strict=True)}


def _dtype(tensor):
    name = str(tensor.dtype).removeprefix("torch.")
    return next(d for d in DTYPES.values() if d.torch == name)


TORCH_DTYPES = [d for d in DTYPES.values() if d.torch and d.bits % 8 == 0]


def sample(dtype, *shape):
    """Every bit pattern is a value: bytes counted up, read as ``dtype``."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(count) % (2 if dtype.name == "BOOL" else 251)).to(torch.uint8)
    return raw.view(getattr(torch, dtype.torch)).reshape(shape)


def same_bits(a, b):
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def test_files_with_our_header_open_in_the_reference_reader_aligned(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {f"{d.name}.{n}": sample(d, n) for d in TORCH_DTYPES for n in (1, 3)}
    placed = written(path, tensors, {"k": "v"})
    for offset, spec in placed.values():
        assert offset % spec.dtype.itemsize == 0
    assert min(offset for offset, _ in placed.values()) % 4096 == 0
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "k": "v"}
        assert set(file.keys()) == set(tensors)
    read = load_file(path)
    assert all(same_bits(read[name], t) for name, t in tensors.items())
    found = read_header(LocalStore(), str(path))
    assert {n: (p.offset, p.spec) for n, p in found.tensors.items()} == placed


def test_f04_every_output_says_pt_whatever_its_source_said(tmp_path):
    path = tmp_path / "x.safetensors"
    for metadata in ({}, {"format": "pt"}, {"format": "mlx", "k": "v"}):
        written(path, {"a": torch.ones(2)}, metadata)
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == metadata | {"format": "pt"}


def test_f15_empty_and_scalar_tensors_round_trip(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {
        "a": torch.zeros(0, 7),
        "b": torch.zeros(0),
        "s": torch.tensor(1.0),
        "k": torch.zeros(0, 0, 4, dtype=torch.bfloat16),
        "w": torch.ones(3, dtype=torch.float64),
    }
    placed = written(path, tensors)
    read = load_file(path)
    assert all(same_bits(read[name], t) for name, t in tensors.items())
    found = read_header(LocalStore(), str(path))
    assert {n: (p.offset, p.spec) for n, p in found.tensors.items()} == placed
    save_file(tensors, path)
    found = read_header(LocalStore(), str(path))
    assert {n: p.spec for n, p in found.tensors.items()} == {n: s for n, (_, s) in placed.items()}


NAMES = [
    "a/b",
    "../../x",
    "/abs",
    "模型.层.0",
    'q"\n',
    "k" * 300,
    "",
    "__metadata",
    "\\",
    "\u2028",
    "é",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda n: ascii(n[:8]))
def test_f13_names_round_trip_exactly(tmp_path, name):
    path = tmp_path / "x.safetensors"
    tensors = {name: torch.arange(3), "other": torch.ones(1)}
    written(path, tensors)
    assert load_file(path)[name].tolist() == [0, 1, 2]
    assert set(read_header(LocalStore(), str(path)).tensors) == set(tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_f13_the_reserved_name_is_refused_at_write():
    with pytest.raises(MappingError, match="'__metadata__' is reserved"):
        encode_header([("__metadata__", TensorSpec(DTYPES["U8"], (1,)))], {})


def test_a_header_above_the_readers_limit_is_not_written():
    """One name of 100 MB in place of a million tensors."""
    spec = TensorSpec(DTYPES["U8"], (1,))
    with pytest.raises(MappingError, match="above the limit of 100000000; lower --max-shard-size"):
        encode_header([("k" * MAX_HEADER, spec)], {})


def test_wider_elements_come_first_and_keep_their_order():
    names = [("a", "U8"), ("b", "F32"), ("c", "BF16"), ("d", "F32"), ("e", "F64")]
    specs = [(n, TensorSpec(DTYPES[d], (1,))) for n, d in names]
    assert [n for n, _ in by_alignment(specs)] == ["e", "b", "d", "c", "a"]


VALID = [
    json.dumps(
        {"__metadata__": {"format": "pt"}, "a": entry("F32", (1,)), "b": entry(offsets=(4, 8))}
    ),
    json.dumps(
        {"é": entry(), "e": entry(shape=(0, 3), offsets=(4, 4)), "s": entry("F32", (), (4, 8))}
    ),
    json.dumps(
        {"a": entry("F64", (1, 1), (0, 8)), "__metadata__": {}}, indent=1, ensure_ascii=False
    ),
]
SPLICES = [
    b"",
    b"-",
    b"0",
    b"9",
    b"1e2",
    b".5",
    b"null",
    b"true",
    b"NaN",
    b'"',
    b"[",
    b"]",
    b"{",
    b"}",
]
SPLICES += [
    b",",
    b":",
    b"\0",
    b"\xff",
    b"\\ud800",
    b"\\",
    b" ",
    b"9" * 25,
    b"9" * 5000,
    b"F16",
    b'"a":',
    b"[[]]",
]


@seeded(2500)
@given(st.sampled_from(VALID), st.data())
def test_any_mutation_of_a_header_is_read_or_refused_and_never_crashes(text, data):
    """What we accept, the reference accepts, and with the same tensors."""
    raw = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 4))] = data.draw(st.sampled_from(SPLICES))
    try:
        found = parse_header(bytes(raw), 8 + len(raw) + 8, "x.safetensors")
    except CkptError as error:
        assert str(error).startswith("x.safetensors: ")  # noqa: PT017
        return
    reference = load(packed(bytes(raw), b"\0" * 8))
    assert {n: tuple(t.shape) for n, t in reference.items()} == {
        n: p.spec.shape for n, p in found.tensors.items()
    }


@seeded(600)
@given(st.binary(max_size=60))
def test_any_bytes_as_a_header_are_read_or_refused(raw):
    try:
        parse_header(raw, 8 + len(raw), "x.safetensors")
    except CorruptError as error:
        assert str(error).startswith("x.safetensors: ")  # noqa: PT017
