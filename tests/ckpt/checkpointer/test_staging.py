"""Shared memory of a slot."""

import gc
import os

import numpy as np
import pytest
from helpers.writers import descriptors

from d9d_ckpt.checkpointer.staging import Lent, Staging


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
