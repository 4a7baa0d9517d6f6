"""Byte planes: bytes written by hand, zstandard itself as the reader, and encodings that lie."""

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_ckpt.codecs.zstd import Zstd, decode, overhead, parse_codec
from d9d_ckpt.errors import UsageError


def decoded(stored, itemsize, nbytes):
    out = np.full(nbytes, 0xCC, np.uint8)
    decode(memoryview(stored), itemsize, out)
    return out.tobytes()


def frames(stored, itemsize):
    """The planes as they lie: lengths first."""
    lengths = np.frombuffer(stored[: 4 * itemsize], "<u4")
    at, out = 4 * itemsize, []
    for n in lengths:
        out.append(stored[at : at + n])
        at += n
    assert at == len(stored)
    return out


def test_planes_that_do_not_compress_are_stored_as_they_are():
    # 0x3f80, 0x4000, 0xc040: the low bytes 80 00 40, the high ones 3f 40 c0.
    view = memoryview(bytes.fromhex("803f004040c0"))
    stored = Zstd().encode(view, 2)
    assert stored == bytes.fromhex("03000000030000008000403f40c0")
    assert decoded(stored, 2, 6) == bytes(view)


def test_planes_that_compress_are_ordinary_zstd_frames_with_their_size():
    weights = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 0.02
    raw = weights.bfloat16().view(torch.uint8).numpy().tobytes()
    low, high = frames(Zstd().encode(memoryview(raw), 2), 2)
    assert low == raw[::2]
    assert len(high) < 0.5 * len(raw[1::2])
    assert zstandard.frame_content_size(high) == 5000
    assert zstandard.decompress(high) == raw[1::2]


@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        (torch.bfloat16, 0.70),
        (torch.float16, 0.90),
        (torch.float32, 0.86),
        (torch.float8_e4m3fn, 0.88),
    ],
)
def test_weights_get_smaller_in_every_floating_dtype(dtype, most):
    weights = torch.randn(1 << 17, generator=torch.Generator().manual_seed(1)) * 0.02
    raw = weights.to(dtype).view(torch.uint8).numpy().tobytes()
    assert len(Zstd().encode(memoryview(raw), dtype.itemsize)) < most * len(raw)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from((1, 2, 4, 8)),
    st.integers(1, 300),
    st.sampled_from((1, 2, 256)),
    st.integers(0, 2**32 - 1),
)
def test_any_bytes_come_back_and_take_no_more_than_the_lengths_besides(itemsize, n, values, seed):
    raw = np.random.default_rng(seed).integers(0, values, n * itemsize).astype(np.uint8).tobytes()
    stored = Zstd(3).encode(memoryview(raw), itemsize)
    assert len(stored) <= len(raw) + overhead(itemsize)
    assert decoded(stored, itemsize, len(raw)) == raw


def test_a_frame_that_promises_a_terabyte_allocates_nothing():
    # Magic, a descriptor with an 8-byte content size, a window, 1 TiB.
    lying = bytes.fromhex("28b52ffdc000") + (1 << 40).to_bytes(8, "little")
    stored = len(lying).to_bytes(4, "little") + lying
    with pytest.raises(ValueError, match="a plane of 1099511627776 bytes, expected 4096"):
        decoded(stored, 1, 4096)


ONES = Zstd().encode(memoryview(bytes(4096)), 1)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (b"", "left over|frame"),
        (ONES[:-1], "ends beyond"),
        (ONES + b"x", "1 bytes are left over"),
        (b"\x05\0\0\0hello", "not a zstd frame"),
        (b"\xff\xff\xff\xff" + ONES[4:], "ends beyond"),
        (Zstd().encode(memoryview(bytes(4095)), 1), "a plane of 4095 bytes, expected 4096"),
    ],
)
def test_what_is_no_encoding_is_refused_with_the_reason(stored, message):
    with pytest.raises(ValueError, match=message):
        decoded(stored, 1, 4096)


def test_a_flipped_bit_gives_other_bytes_or_a_refusal_and_nothing_else():
    raw = (torch.randn(700, generator=torch.Generator().manual_seed(2)) * 0.1).bfloat16()
    raw = raw.view(torch.uint8).numpy().tobytes()
    stored = Zstd().encode(memoryview(raw), 2)
    outcomes = {"other bytes": 0, "refused": 0}
    for bit in range(8 * len(stored)):
        bad = bytearray(stored)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            found = decoded(bytes(bad), 2, len(raw))
        except ValueError:
            outcomes["refused"] += 1
        else:
            outcomes["other bytes"] += len(found) == len(raw)
    assert sum(outcomes.values()) == 8 * len(stored)
    assert min(outcomes.values()) > 100


@pytest.mark.parametrize(("text", "level"), [("zstd", 1), ("zstd:1", 1), ("zstd:22", 22)])
def test_codecs_by_name(text, level):
    assert parse_codec(text) == Zstd(level)
    assert parse_codec("none") is None


@pytest.mark.parametrize(
    "text", ["", "zip", "zstd:", "zstd:0", "zstd:23", "zstd:x", "none:1", "ZSTD"]
)
def test_other_codecs_are_refused_with_what_there_is(text):
    with pytest.raises(UsageError, match="zstd"):
        parse_codec(text)
