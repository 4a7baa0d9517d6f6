"""An opened checkpoint: a mapping of lazy tensors, and the reader that executes them."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from d9d_ckpt.errors import CorruptError
from d9d_ckpt.formats.base import Extent, Opened
from d9d_ckpt.graph.build import LazyTensor
from d9d_ckpt.graph.mosaic import stored
from d9d_ckpt.graph.node import Node
from d9d_ckpt.models.select import missing
from d9d_ckpt.plan.assign import units
from d9d_ckpt.plan.lower import Request, lower
from d9d_ckpt.plan.schedule import limits, tasks
from d9d_ckpt.run.gather import Buffer
from d9d_ckpt.run.stream import Streamer
from d9d_ckpt.storage.opening import store_for
from d9d_ckpt.storage.store import Options, is_local
from d9d_ckpt.tensors import Region

if TYPE_CHECKING:
    import torch

_MEMORY = 256 << 20


class MemoryWriter:
    """Targets in one array, the only one there is."""

    def __init__(self, out: Buffer) -> None:
        self._out = out

    def write(self, target: int, start: int, view: memoryview) -> Extent | None:
        if target:
            raise CorruptError(f"a read has one target, not {target + 1}")
        self._out[start : start + len(view)] = np.frombuffer(view, np.uint8)
        return None


@dataclass(frozen=True)
class Reader:
    """Reads regions of expressions over stored chunks.

    Attributes:
        url: A URL of the store that holds the chunks.
        options: Its options.
        memory: Bytes of buffers.
    """

    url: str
    options: Options
    memory: int = _MEMORY

    def read_into(self, node: Node, region: Region, out: Buffer) -> int:
        """Fill ``out`` with the bytes of ``node[region]``, row-major; the bytes that were read."""
        plan = lower([Request("", node, (region,), (0,))])
        store = store_for(self.url, self.options)
        limit = limits(self.memory, remote=not is_local(self.url), encoded=plan.encoded)
        streamer = Streamer(plan, limit, store, MemoryWriter(out), digests=False)
        try:
            for unit in units(plan):
                for task in tasks(plan, unit, limit, exact=True):
                    streamer.run(task)
        finally:
            store.close()
        return streamer.bytes_read

    def __call__(self, node: Node, region: Region) -> "torch.Tensor":
        torch_: Any = importlib.import_module("torch")
        tensor: torch.Tensor = torch_.empty(region.shape, dtype=getattr(torch_, node.dtype.torch))
        if region.numel:
            self.read_into(node, region, tensor.reshape(-1).view(torch_.uint8).numpy())
        return tensor


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose metadata has been read.

    Attributes:
        opened: The metadata.
        reader: Who reads its tensors.
    """

    opened: Opened
    reader: Reader

    @property
    def format(self) -> str:
        """``huggingface`` or ``sharded``."""
        return self.opened.format

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Config, layout, step, save id and JSON values."""
        o = self.opened
        return {
            "url": o.url,
            "config": o.config,
            "family": o.family,
            "layout": o.layout.to_json() if o.layout else None,
            "step": o.step,
            "save_id": o.save_id,
            "values": o.values,
        }

    @cached_property
    def tensors(self) -> Mapping[str, LazyTensor]:
        """Every tensor by name; read-only, made when looked up."""
        return Tensors(self.opened, self.reader)

    def __getitem__(self, name: str) -> LazyTensor:
        """The tensor ``name``.

        Raises:
            MissingError: There is none; the message has the nearest names.
        """
        return self.tensors[name]


class Tensors(Mapping[str, LazyTensor]):
    """The tensors of a checkpoint, each described when it is looked up."""

    def __init__(self, opened: Opened, reader: Reader) -> None:
        self._entries, self._reader = opened.catalogue.entries, reader
        self._made: dict[str, LazyTensor] = {}

    def __getitem__(self, name: str) -> LazyTensor:
        made = self._made.get(name)
        if made is None:
            if name not in self._entries:
                raise missing(name, self._entries)
            made = LazyTensor(stored(name, self._entries[name]), self._reader)
            self._made[name] = made
        return made

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
