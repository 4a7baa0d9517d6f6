"""One copy of the local tensors into a staging slot: on return on CPU, behind a guard on a GPU."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from d9d_ckpt.checkpointer.base import Held
from d9d_ckpt.checkpointer.staging import Live, Staging

_cuda: Any = torch.cuda
"""Untyped in part."""

_ALIGN = 64
"""First bytes of tensors in a slot: what every element type and vector unit wants."""


@dataclass(frozen=True)
class Snapshot:
    """A state at one point in time.

    Attributes:
        offsets: First byte of each tensor's local part in the slot.
        events: One per GPU whose copies may still be under way.
    """

    offsets: Mapping[str, int]
    events: tuple[Any, ...] = ()

    def wait(self) -> None:
        """Return when the copy is complete."""
        for event in self.events:
            event.synchronize()

    def guard(self) -> None:
        """Make what is enqueued from now on wait for the copy, without waiting here."""
        for event in self.events:
            _cuda.current_stream(event.device).wait_event(event)


def offsets_of(tensors: Iterable[Held]) -> tuple[dict[str, int], int]:
    """First byte of each tensor that is here, and the bytes of all."""
    out: dict[str, int] = {}
    at = 0
    for held in tensors:
        if held.box is not None:
            out[held.name] = at
            at += -(-held.local.nbytes // _ALIGN) * _ALIGN
    return out, at


def in_place(tensors: Mapping[str, Held]) -> tuple[Snapshot, Live] | None:
    """The local tensors themselves, for a save that is over before they change.

    None where one of them is on a GPU or its bytes do not lie together.
    """
    offsets, _ = offsets_of(tensors.values())
    locals_ = [tensors[name].local for name in offsets]
    if not all(_is_plain(local) for local in locals_):
        return None
    return Snapshot(offsets), Live(list(offsets.values()), [_bytes(local) for local in locals_])


def _is_plain(local: torch.Tensor) -> bool:
    is_marked = local.is_conj() or local.is_neg()
    return local.device.type == "cpu" and local.is_contiguous() and not is_marked


def _bytes(local: torch.Tensor) -> memoryview:
    raw: Any = local.view(-1).view(torch.uint8).numpy()
    return memoryview(raw)


class Snapshots:
    """Takes snapshots into slots; pins the slots where a GPU copies to them."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._pinned: set[int] = set()

    def take(self, tensors: Mapping[str, Held], slot: Staging) -> Snapshot:
        """Copy every local tensor into ``slot``, which grows as needed and keeps its size."""
        offsets, total = offsets_of(tensors.values())
        total = max(total, 1)  # A state of values alone has a slot as well.
        devices = {tensors[name].local.device for name in offsets} - {torch.device("cpu")}
        if total > slot.nbytes:
            self._unpin(slot)
            slot.reserve(total)
        if devices:
            self._pin(slot)
        staged = torch.from_numpy(slot.view)
        with torch.no_grad():
            for device in devices:
                self._stream(device).wait_stream(_cuda.current_stream(device))
            for name, offset in offsets.items():
                self._copy(tensors[name].local, staged, offset)
        return Snapshot(offsets, tuple(self._recorded(device) for device in devices))

    def _copy(self, local: torch.Tensor, staged: torch.Tensor, offset: int) -> None:
        target = staged[offset : offset + local.nbytes].view(local.dtype).view(local.shape)
        if local.device.type == "cpu":
            target.copy_(local)
            return
        with _cuda.stream(self._stream(local.device)):
            target.copy_(local, non_blocking=True)
            # The allocator must not hand the memory out again before it has been read.
            local.record_stream(self._stream(local.device))

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = _cuda.Stream(device)
        return self._streams[device]

    def _recorded(self, device: torch.device) -> Any:
        event = _cuda.Event()
        event.record(self._stream(device))
        return event

    def _pin(self, slot: Staging) -> None:
        """Page-lock the slot: 55 GB/s from an H200, where pageable memory gets 16.

        Where that is refused, copies are slower and complete before they return: still right.
        """
        address = slot.view.ctypes.data
        if address not in self._pinned:
            refused = int(_cuda.cudart().cudaHostRegister(address, slot.nbytes, 0))
            if not refused:
                self._pinned.add(address)

    def _unpin(self, slot: Staging) -> None:
        address = slot.view.ctypes.data
        if address in self._pinned:
            self._pinned.remove(address)
            _cuda.cudart().cudaHostUnregister(address)

    def release(self, slot: Staging) -> None:
        """Let go of a slot that no copy is under way to."""
        self._unpin(slot)
        slot.close()
