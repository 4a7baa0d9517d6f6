"""torch's Distributed Checkpoint through the drill of the local disk."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import make_checkpoint
from d9d_ckpt.errors import StorageError
from drill import children
from drill.board import Board
from drill.places import Place
from drill.scenes import (
    NEXT_DOOR,
    NOTES,
    SIZE,
    Operation,
    Prints,
    Scene,
    Spot,
    Trees,
    prints,
)

Tensors = dict[str, torch.Tensor]


def scenes(root: Path, place: Place, board: Board) -> list[Scene]:
    """Saving into an empty place, over another checkpoint, and loading."""
    weights = {name: _weights(root / name, seed) for seed, name in enumerate(("new", "old"))}
    trees = Trees(root / "trees", {name: prints(found) for name, found in weights.items()})
    for name, found in weights.items():
        made = children.run(partial(_save, found, "", str(trees.path(name))))
        if made.how != "done":
            raise RuntimeError(f"DCP: {made}")
        (trees.path(name) / NOTES).write_text("mine")
    place.send(trees.path("new"), "new")
    place.send(trees.path("old"), NEXT_DOOR)
    either = (Spot("", ("new", "old"), must=True, end="new"),)
    same = (Spot("", ("new",), must=True, end="new"),)
    saving, loading = partial(_save, weights["new"]), partial(_load, trees.prints["new"])
    operations = (
        Operation("DCP save", saving, "new", None, (Spot("", ("new",), must=False, end="new"),)),
        Operation("DCP save over another", saving, "new", "old", either),
        Operation("DCP load", loading, "new", "new", same),
    )
    shared: dict[str, Any] = {"records": (".metadata",), "read": _read}
    return [Scene(place, board, trees, replace(o, **shared)) for o in operations]


def _weights(directory: Path, seed: int) -> Tensors:
    make_checkpoint.write(make_checkpoint.sized("llama", SIZE), directory, seed=seed)
    return dict(load_file(directory / "model.safetensors"))


def _save(weights: Tensors, source: str, destination: str, **_: Any) -> None:
    del source
    with _refusing():
        save(weights, storage_writer=FileSystemWriter(destination), no_dist=True)


def _load(expected: Prints, source: str, destination: str, **_: Any) -> None:
    """Loads the destination, which faults find there."""
    del source
    if _read(destination, {}) != expected:
        raise AssertionError("other tensors were loaded than are there")


def _read(url: str, options: Mapping[str, Any]) -> Prints:
    """What DCP finds, whatever its shapes are."""
    del options
    with _refusing():
        reader = FileSystemReader(url)
        stored = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(m.size, dtype=m.properties.dtype)
            for name, m in stored.items()
            if isinstance(m, TensorStorageMetadata)
        }
        load(state, storage_reader=reader, no_dist=True)
    return prints(state)


@contextmanager
def _refusing() -> Iterator[None]:
    """DCP's errors are of any kind, a BaseException of its own among them; each is a refusal."""
    try:
        yield
    except BaseException as error:
        raise StorageError(f"{type(error).__name__}: {error}") from error
