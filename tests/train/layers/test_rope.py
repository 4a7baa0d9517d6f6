"""Angles against transformers' to the bit, and positions that restart with each document."""

from typing import Any

import pytest
import torch
from helpers.decoders import CASES, batch_of, tokens_of
from helpers.references import reference

from d9d_train.layers.rope import Rope
from d9d_train.models.config import read_config

ROPES = [name for name in CASES if name.startswith("llama")]


def angles(config: dict[str, Any], length: int, documents=None, dtype=torch.float32):
    batch = batch_of(tokens_of(1, length), documents)
    return read_config(config).rope.angles(batch, dtype)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", [8, 40])
def test_angles_are_those_of_transformers_to_the_bit(name, length):
    rotary = reference(CASES[name], torch.float32).model.rotary_emb
    cos, sin = rotary(torch.zeros(()), torch.arange(length)[None])
    found = angles(CASES[name], length)
    half = cos.shape[-1] // 2
    assert torch.equal(found.cos, cos[0, :, :half])
    assert torch.equal(found.sin, sin[0, :, :half])


@pytest.mark.parametrize("name", ROPES)
def test_angles_of_a_document_are_those_it_has_alone(name):
    packed = angles(CASES[name], 60, [[7, 40, 13]])
    start = 0
    for length in (7, 40, 13):
        alone = angles(CASES[name], length)
        assert torch.equal(packed.cos[0, start : start + length], alone.cos)
        assert torch.equal(packed.sin[0, start : start + length], alone.sin)
        start += length


def test_angles_are_computed_in_float32_or_wider():
    for dtype, wide in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        assert angles(CASES["llama-yarn"], 8, dtype=dtype).cos.dtype == wide


def test_llama3_by_hand():
    # Wavelengths of dim 4 and theta 100 are 2 pi and 20 pi = 62.8; of 64 positions, 62.8 is between
    # 64 / 4 and 64 / 1, and 6.3 is kept.
    rope = Rope(dim=4, theta=100.0, kind="llama3", factor=8.0, trained=64, low=1.0, high=4.0)
    batch = batch_of(tokens_of(1, 2))
    turned = torch.acos(rope.angles(batch, torch.float64).cos[1])
    smooth = (64 / 62.83185307179586 - 1) / 3
    expected = [1.0, (1 - smooth) * 0.1 / 8 + smooth * 0.1]
    torch.testing.assert_close(turned, torch.tensor(expected, dtype=torch.float64))
