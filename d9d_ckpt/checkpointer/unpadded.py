"""Rows that only pad a live tensor: never stored, zero again after a load."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch

from d9d_ckpt.checkpointer.base import Held
from d9d_ckpt.errors import RequestError
from d9d_ckpt.tensors import Region, TensorSpec


def cut(tensors: Mapping[str, Held], rows: Mapping[str, int]) -> dict[str, Held]:
    """``tensors`` with those that ``rows`` names, by glob, cut to so many rows.

    Raises:
        RequestError: A tensor has fewer rows.
    """
    return {name: _cut(held, rows_of(name, rows)) for name, held in tensors.items()}


def unmatched(tensors: Iterable[str], rows: Mapping[str, int]) -> frozenset[str]:
    """Globs that match no tensor here; another stage of a pipeline may have it."""
    names = list(tensors)
    return frozenset(g for g in rows if not any(fnmatchcase(name, g) for name in names))


def check_matched(heard: Iterable[frozenset[str]]) -> None:
    """What was `unmatched` on every rank is a mistake.

    Raises:
        RequestError: A glob matches no tensor on any of them.
    """
    for glob in sorted(frozenset.intersection(*heard)):
        raise RequestError(f"unpadded={glob!r} matches no tensor; drop it, or correct it")


def rows_of(name: str, rows: Mapping[str, int]) -> int | None:
    """To how many rows a tensor is cut; None for all."""
    return next((count for glob, count in rows.items() if fnmatchcase(name, glob)), None)


def _cut(held: Held, rows: int | None) -> Held:
    shape = held.spec.shape
    if rows is None or not shape:
        return held
    if shape[0] < rows:
        raise RequestError(f"tensor {held.name!r} has {shape[0]} rows, unpadded= says {rows}")
    spec = TensorSpec(held.spec.dtype, (rows, *shape[1:]))
    if held.box is None:
        return held._replace(spec=spec)
    start = held.box.start[0]
    left = max(0, min(held.box.shape[0], rows - start))
    if not left:
        return held._replace(spec=spec, box=None, local=held.local[:0])
    box = Region(held.box.start, (left, *held.box.shape[1:]))
    return held._replace(spec=spec, box=box, local=held.local[:left])


def clear_padding(whole: Held, stored: Held) -> None:
    """Set the rows of a live tensor beyond those that are stored to zero."""
    if whole.box is not None:
        kept = 0 if stored.box is None else stored.box.shape[0]
        with torch.no_grad():
            whole.local[kept:].zero_()
