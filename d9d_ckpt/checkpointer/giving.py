"""A state on its way into a checkpoint."""

from typing import NamedTuple

import torch

from d9d_ckpt.checkpointer.base import Held
from d9d_ckpt.checkpointer.boxes import hold
from d9d_ckpt.checkpointer.names import Claims
from d9d_ckpt.tensors import Region, TensorSpec


class Giving:
    """Collects the tensors of a state under their names; what is one tensor is kept once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Held] = {}
        self.tied: dict[str, str] = {}
        self._claims = Claims()
        self._seen: dict[Memory, str] = {}

    def tensor(self, name: str, tensor: torch.Tensor, place: str) -> str:
        """Keep ``tensor`` under ``name``, which is returned; ``place`` is where it stands.

        Raises:
            MappingError: Another tensor has the name.
            RequestError: It cannot be stored.
        """
        self._claims.add(name, place)
        held = hold(name, tensor)
        first = self._seen.setdefault(memory(held), name)
        if first == name:
            self.tensors[name] = held
        else:
            self.tied[name] = first
        return name


class Memory(NamedTuple):
    """What two tensors share that are one: not a view that overlaps only."""

    storage: int
    offset: int
    strides: tuple[int, ...]
    local: torch.Size
    spec: TensorSpec
    box: Region | None


def memory(held: Held) -> Memory:
    """Where the elements of a tensor lie; by storage, since all empty shards have address 0."""
    local = held.local
    storage = local.untyped_storage()._cdata  # noqa: SLF001
    return Memory(
        storage, int(local.storage_offset()), local.stride(), local.shape, held.spec, held.box
    )
