"""Shared memory of a slot."""

import gc
import os

import numpy as np
import pytest
from helpers.writers import descriptors

from d9d_ckpt.checkpointer.staging import Lent, Live, Staging


@pytest.fixture
def slot():
    made = Staging()
    yield made
    made.close()


def lent(slot):
    return Lent.map(os.dup(slot.fd), slot.nbytes)


def test_it_grows_and_keeps_what_it_holds(slot):
    assert slot.nbytes == 0
    assert not slot.reserve(0)
    assert slot.reserve(10)
    slot.view[:10] = np.arange(10)
    before = slot.view
    assert not slot.reserve(slot.nbytes)
    assert slot.reserve(slot.nbytes + 1)
    assert slot.view[:10].tolist() == list(range(10))
    slot.view[3] = 77
    assert before[3] == 77


def test_the_other_side_sees_it_and_cannot_write(slot):
    slot.reserve(100)
    other = lent(slot)
    slot.view[5] = 9
    assert other.view[5] == 9
    with pytest.raises(TypeError):
        other.view[5] = 1
    with open(other.path, "rb") as file:
        assert file.read(6)[5] == 9
    other.close()


def test_nothing_is_left():
    before = descriptors()
    slot = Staging()
    slot.reserve(1 << 20)
    other = lent(slot)
    slot.reserve(5 << 20)
    # Of no name that could be left behind: nothing but descriptors leads to it.
    assert os.fstat(slot.fd).st_nlink == 0
    other.close()
    slot.close()
    slot.close()
    del other, slot
    gc.collect()
    assert descriptors() == before


def test_a_mapping_that_fails_leaves_no_descriptor(slot):
    before = descriptors()
    with pytest.raises(ValueError, match="empty file"):
        Lent.map(os.dup(slot.fd), 0)
    assert descriptors() == before


def test_live_bytes_are_found_by_the_addresses_of_a_slot():
    parts = [np.arange(n, n + size, dtype=np.uint8) for n, size in ((0, 5), (100, 64), (200, 1))]
    live = Live([0, 64, 128], [memoryview(part) for part in parts])
    assert bytes(live.read(0, 5)) == bytes(range(5))
    assert bytes(live.read(2, 2)) == bytes([2, 3])
    assert bytes(live.read(64, 64)) == bytes(range(100, 164))
    assert bytes(live.read(127, 1)) == bytes([163])
    assert bytes(live.read(128, 1)) == bytes([200])
    parts[1][3] = 7
    assert live.read(67, 1)[0] == 7
