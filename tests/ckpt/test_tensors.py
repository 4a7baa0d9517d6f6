"""Dtypes, specs, boxes and sizes."""

import itertools
import subprocess
import sys

import pytest
import torch
from helpers.strategies import regions, seeded
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from d9d_ckpt.errors import CkptError, CorruptError, RequestError
from d9d_ckpt.tensors import (
    DTYPES,
    Catalogue,
    Chunk,
    Entry,
    Region,
    TensorSpec,
    dtype_from_torch,
    format_bytes,
    parse_bytes,
    spec_of,
)

NAMED = [d for d in DTYPES.values() if d.torch]


@pytest.mark.parametrize("dtype", NAMED, ids=lambda d: d.name)
def test_a_dtype_is_the_one_that_torch_and_safetensors_call_so(dtype):
    of_torch = getattr(torch, dtype.torch)
    assert dtype_from_torch(dtype.torch) is dtype_from_torch(str(of_torch)) is dtype
    header = save({"x": torch.zeros(8, dtype=torch.uint8).view(of_torch)})
    assert f'"dtype":"{dtype.name}"'.encode() in header
    if dtype.bits % 8 == 0:
        assert dtype.itemsize == of_torch.itemsize
    assert dtype.floating == (dtype.name in ("F16", "BF16", "F32", "F64"))


@pytest.mark.parametrize("name", ["F4", "F6_E2M3", "F6_E3M2"])
def test_packed_elements_have_no_bytes_of_their_own(name):
    with pytest.raises(RequestError, match=f"dtype {name} packs"):
        assert DTYPES[name].itemsize


@pytest.mark.parametrize("name", ["int3", "", "torch.", "F32", "float"])
def test_dtypes_that_torch_does_not_have_are_refused(name):
    with pytest.raises(RequestError, match=r"unknown dtype .*; known: bfloat16"):
        dtype_from_torch(name)


@pytest.mark.parametrize(
    ("dtype", "shape", "numel", "nbytes"),
    [
        ("F32", (), 1, 4),
        ("BF16", (3, 5), 15, 30),
        ("F64", (0, 7), 0, 0),
        ("F4", (4, 3), 12, 6),
        ("F4", (3,), 3, 2),
        ("F6_E2M3", (4,), 4, 3),
        ("U8", (2**40, 2**40), 2**80, 2**80),
    ],
    ids=str,
)
def test_sizes_of_a_spec(dtype, shape, numel, nbytes):
    spec = TensorSpec(DTYPES[dtype], shape)
    assert (spec.numel, spec.nbytes) == (numel, nbytes)


def cells(region):
    return set(
        itertools.product(*(range(a, b) for a, b in zip(region.start, region.stop, strict=True)))
    )


@seeded(300)
@given(st.data(), st.lists(st.integers(0, 5), max_size=3))
def test_intersection_is_that_of_the_elements(data, shape):
    a, b = data.draw(regions(shape)), data.draw(regions(shape))
    shared = a.intersect(b)
    assert shared == b.intersect(a)
    assert (cells(shared) if shared else set()) == cells(a) & cells(b)
    assert len(cells(a)) == a.numel
    if shared:
        assert (
            Region(tuple(map(sum, zip(a.start, shared.within(a).start, strict=True))), shared.shape)
            == shared
        )


def test_narrow_counts_from_the_start_of_the_box():
    assert Region((10, 20), (5, 6)).narrow(1, 2, 3) == Region((10, 22), (5, 3))
    assert Region((10, 20), (5, 6)).narrow(0, 4, 1) == Region((14, 20), (1, 6))
    assert Region.whole((5, 6)).narrow(0, 0, 0).numel == 0


def test_the_box_of_a_scalar_is_one_element():
    whole = Region.whole(())
    assert (whole, whole.numel, whole.stop) == (Region((), ()), 1, ())
    assert whole.intersect(whole) == whole


def test_a_catalogue_counts_its_chunks():
    spec = TensorSpec(DTYPES["F32"], (4,))
    chunks = tuple(Chunk(Region((a,), (2,)), "f", a * 4, 8) for a in (0, 2))
    assert Catalogue({"a": Entry(spec, chunks), "b": Entry(spec, chunks[:1])}).nbytes == 24


def test_a_spec_from_metadata():
    assert spec_of("a", "F32", [2, 0], "f") == TensorSpec(DTYPES["F32"], (2, 0))
    for dtype in ("f32", "F99", None, 3, ["F32"], {}):
        with pytest.raises(CorruptError, match="f: tensor 'a' has unknown dtype"):
            spec_of("a", dtype, [2], "f")
    for shape in (None, 2, "2", (2,), [2.0], [-1], [True], [[2]], {}):
        with pytest.raises(CorruptError, match="f: tensor 'a' has no valid shape"):
            spec_of("a", "F32", shape, "f")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (1 << 52, "4096.0 TiB"),
    ],
    ids=str,
)
def test_bytes_for_people(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("128MiB", 128 << 20),
        ("5GB", 5 * 10**9),
        (" 1.5 gib ", 3 << 29),
        ("2kb", 2000),
        ("2KiB", 2048),
        ("7b", 7),
        ("1TB", 10**12),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_that_people_write(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "0", "-1", "1.2.3", "5GiBs", "5 parsecs", "nan", "inf", "-inf", "1e999", "0.5"],
)
def test_what_is_no_size_is_an_error_of_ours(text):
    with pytest.raises(CkptError, match="is not a size"):
        parse_bytes(text)


def test_u03_the_mark_of_a_catalogue_is_the_same_in_every_process():
    program = (
        "from d9d_ckpt.tensors import *\n"
        "spec = TensorSpec(DTYPES['BF16'], (4,))\n"
        "chunks = (Chunk(Region((0,), (2,)), 'f', 0, 4), Chunk(Region((2,), (2,)), 'f', 4, 4, xxh3=(7,)))\n"
        "print(Catalogue({'w': Entry(spec, chunks)}).mark)\n"
    )
    command = [sys.executable, "-c", program]
    found = {subprocess.check_output(command) for _ in range(3)}  # noqa: S603
    assert len(found) == 1
