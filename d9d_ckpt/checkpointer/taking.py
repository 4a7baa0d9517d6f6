"""A checkpoint on its way into a state."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from d9d_ckpt.checkpointer import values
from d9d_ckpt.checkpointer.base import Held, Saved
from d9d_ckpt.checkpointer.boxes import hold
from d9d_ckpt.checkpointer.giving import Memory, memory
from d9d_ckpt.checkpointer.names import Claims
from d9d_ckpt.errors import MappingError, RequestError
from d9d_ckpt.tensors import DType

_CPU = torch.device("cpu")


class Taking:
    """Collects what a state wants of a checkpoint, and what is to be done once that was read.

    Attributes:
        saved: The checkpoint.
        tensors: To be filled, under names that the checkpoint has.
        missing: Names of the state that it has not.
        fresh: Optimizer state that starts anew.
        used: Its tensors that have a place in the state.
    """

    def __init__(self, saved: Saved) -> None:
        self.saved = saved
        self.tensors: dict[str, Held] = {}
        self.missing: list[str] = []
        self.fresh: list[str] = []
        self.used: set[str] = set()
        self._claims = Claims()
        self._seen: dict[Memory, str] = {}
        self._new: dict[str, torch.Tensor] = {}
        self._steps: list[Callable[[], object]] = []
        self._last: list[Callable[[], object]] = []

    def owner(self, name: str) -> str | None:
        """The tensor of the checkpoint that ``name`` stands for."""
        owner = self.saved.tied.get(name, name)
        return owner if owner in self.saved.specs else None

    def want(self, name: str, tensor: torch.Tensor, place: str) -> bool:
        """Fill ``tensor`` with what is saved as ``name``; whether there is any.

        A tensor that has several names in the state is filled once, from the first name that is
        saved; others that are saved apart must be equal to it.

        Raises:
            MappingError: Another tensor of the state has the name.
            RequestError: A tensor that cannot be filled.
        """
        self._claims.add(name, place)
        held = hold(name, tensor)
        _check_fillable(held)
        owner = self.owner(name)
        first = self._seen.setdefault(memory(held), name)
        if first not in self.tensors:
            if owner is None:
                self._miss(name, first)
                return False
            self._seen[memory(held)] = name
            self._found(name, owner, held)
            if first != name:
                self.missing.remove(first)
        elif owner is not None and owner != self.owner(first):
            self._compare(name, owner, held, self.tensors[first])
        return True

    def new(
        self, name: str, like: torch.Tensor | None = None, device: torch.device = _CPU
    ) -> torch.Tensor | None:
        """A tensor that what is saved as ``name`` is read into; None, and missing, if nothing is.

        It lies on ``device``, whole, unless ``like`` is a DTensor, whose placements it then has.
        """
        owner = self.owner(name)
        if owner is None:
            self._miss(name, name)
            return None
        if name not in self._new:
            spec = self.saved.specs[owner]
            dtype = torch_dtype(spec.dtype)
            if isinstance(like, DTensor):
                tensor: torch.Tensor = torch.empty_like(like.detach(), dtype=dtype)
            else:
                tensor = torch.empty(spec.shape, dtype=dtype, device=device)
            self._found(name, owner, hold(name, tensor))
            self._new[name] = tensor
        return self._new[name]

    def rebuild(
        self,
        json: Any,
        put: Callable[[Any], object],
        like: Mapping[str, torch.Tensor] | None = None,
        device: torch.device = _CPU,
    ) -> None:
        """Decode a value with the tensors in it, and ``put`` it in place once they were read.

        Raises:
            CorruptError: ``json`` is no value.
        """
        names = list(values.tensors_in(json))
        found = {name: self.new(name, (like or {}).get(name), device) for name in names}
        value = values.decode(json, found.__getitem__)
        if all(tensor is not None for tensor in found.values()):
            self.later(lambda: put(value))

    def later(self, step: Callable[[], object], *, last: bool = False) -> None:
        """Do ``step`` once all was read; ``last``: after the others."""
        (self._last if last else self._steps).append(step)

    def finish(self) -> None:
        """Do what was left for later."""
        with torch.no_grad():
            for step in (*self._steps, *self._last):
                step()

    def _found(self, name: str, owner: str, held: Held) -> None:
        self.tensors[name] = held
        self.used.add(owner)

    def _miss(self, name: str, first: str) -> None:
        """Report a name; a tensor with several names once, under its first."""
        if name == first:
            self.missing.append(name)

    def _compare(self, name: str, owner: str, held: Held, first: Held) -> None:
        copy = held._replace(local=torch.empty_like(held.local))
        self._found(name, owner, copy)

        def check() -> None:
            if not _same_bits(copy.local, first.local):
                raise MappingError(
                    f"{first.name!r} and {name!r} are one tensor in the state and differ in the checkpoint; "
                    "untie them in the model, or ignore one of the two"
                )

        self.later(check)


def torch_dtype(dtype: DType) -> torch.dtype:
    """What torch calls ``dtype``."""
    found: torch.dtype = getattr(torch, dtype.torch)
    return found


def _check_fillable(held: Held) -> None:
    """Refuse an expanded tensor, whose elements share their memory."""
    for size, stride in zip(held.local.shape, held.local.stride(), strict=True):
        if size > 1 and not stride:
            raise RequestError(
                f"tensor {held.name!r} {list(held.spec.shape)} is an expanded view, which cannot be filled; "
                "give what it expands, or a clone()"
            )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*flat)
