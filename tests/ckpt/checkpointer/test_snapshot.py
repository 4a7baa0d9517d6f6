"""Where the bytes of a save come from: one copy in a slot, or the live tensors under its addresses."""

import pytest
import torch

from d9d_ckpt.checkpointer.snapshot import Snapshots, in_place, offsets_of
from d9d_ckpt.checkpointer.staging import Staging
from d9d_ckpt.checkpointer.state import flatten


def tensors_of(**tensors):
    return flatten({"model": tensors}).tensors


def several():
    return {
        "w": torch.arange(6.0).reshape(2, 3),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    }


@pytest.fixture
def slot():
    made = Staging()
    yield made
    made.close()


def test_every_tensor_begins_at_a_multiple_of_64_and_what_is_empty_nowhere():
    held = tensors_of(w=torch.zeros(17), none=torch.zeros(0), b=torch.zeros(1), c=torch.zeros(16))
    assert offsets_of(held.values()) == ({"w": 0, "b": 128, "c": 192}, 256)
    assert offsets_of([]) == ({}, 0)


def test_live_tensors_have_the_addresses_and_bytes_of_a_slot(slot):
    held = tensors_of(**several())
    snapshot, live = in_place(held)
    assert snapshot.offsets == Snapshots().take(held, slot).offsets
    for name, at in snapshot.offsets.items():
        nbytes = held[name].local.nbytes
        assert bytes(live.read(at, nbytes)) == slot.view[at : at + nbytes].tobytes(), name


def test_live_tensors_are_not_copied_and_a_slot_is(slot):
    w = torch.zeros(4)
    held = tensors_of(w=w)
    _, live = in_place(held)
    snapshot = Snapshots().take(held, slot)
    snapshot.wait()
    w.fill_(1)
    assert bytes(live.read(0, 16)) == torch.ones(4).numpy().tobytes()
    assert not slot.view[:16].any()


def test_a_view_is_live_as_far_as_it_shows():
    x = torch.arange(20.0).reshape(5, 4)
    snapshot, live = in_place(tensors_of(rows=x[2:4], row=x[1]))
    rows, row = (live.read(snapshot.offsets[n], k) for n, k in (("rows", 32), ("row", 16)))
    assert bytes(rows) == x[2:4].numpy().tobytes()
    assert bytes(row) == x[1].numpy().tobytes()


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(3, 2).t(),
        torch.zeros(3, 4)[:, 1:],
        torch.zeros(2).expand(3, 2),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, dtype=torch.complex64).conj().imag,
    ],
    ids=["transposed", "columns", "expanded", "conj", "neg"],
)
def test_one_tensor_whose_bytes_do_not_lie_together_makes_all_be_copied(odd, slot):
    held = tensors_of(plain=torch.ones(3), odd=odd)
    assert in_place(held) is None
    snapshot = Snapshots().take(held, slot)
    at, local = snapshot.offsets["odd"], held["odd"].local
    copy = torch.empty(local.shape, dtype=local.dtype).copy_(local)
    assert slot.view[at : at + copy.nbytes].tobytes() == copy.numpy().tobytes()


def test_a_state_without_tensors_is_live_as_well_and_has_a_slot(slot):
    snapshot, live = in_place({})
    assert (snapshot.offsets, live.views) == ({}, [])
    assert Snapshots().take({}, slot).offsets == {}
    assert slot.nbytes


def test_a_slot_keeps_its_size_and_grows_when_more_comes(slot):
    snapshots = Snapshots()
    snapshots.take(tensors_of(w=torch.ones(1 << 20)), slot)
    size = slot.nbytes
    snapshots.take(tensors_of(w=torch.zeros(3)), slot)
    assert slot.nbytes == size
    snapshots.take(tensors_of(w=torch.ones(2 << 20)), slot)
    assert slot.nbytes >= 8 << 20
    assert slot.view[: 8 << 20].view("<f4").min() == 1
    snapshots.release(slot)
    assert slot.nbytes == 0
