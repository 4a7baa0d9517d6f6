"""Which format a URL holds."""

import re
from collections.abc import Mapping
from dataclasses import replace

from d9d_ckpt.errors import MissingError, RequestError, SourceError
from d9d_ckpt.formats.base import Opened
from d9d_ckpt.formats.huggingface import open_huggingface
from d9d_ckpt.formats.sharded import MANIFEST, open_sharded
from d9d_ckpt.storage.store import Store, join

_STEP = re.compile(r"step-(\d{8,})")


def open_checkpoint(store: Store, url: str, step: int | None = None) -> Opened:
    """The checkpoint at ``url``; of a run directory its step ``step``, or the latest whole one.

    Raises:
        SourceError: There is none, or it is incomplete or damaged.
    """
    if url.endswith(".safetensors"):
        return open_huggingface(store, url)
    names = store.names(url)
    steps = {int(m.group(1)): name for name in names if (m := _STEP.fullmatch(name))}
    if MANIFEST in names or not steps:
        if step is not None:
            raise RequestError(f"{url}: step {step} was asked for, and this is not a run directory")
        return open_sharded(store, url) if MANIFEST in names else open_huggingface(store, url)
    if step is None:
        return _latest(store, url, steps)
    if step not in steps:
        known = ", ".join(str(n) for n in sorted(steps))
        raise MissingError(f"{url}: no step {step}; there are {known}")
    path = join(url, steps[step])
    if MANIFEST not in store.names(path):
        raise MissingError(f"{path}: no manifest, so step {step} is incomplete")
    return open_sharded(store, path)


def _latest(store: Store, url: str, steps: Mapping[int, str]) -> Opened:
    """The highest step that is whole; those above it are named in its notes."""
    passed: list[str] = []
    for number in sorted(steps, reverse=True):
        path = join(url, steps[number])
        if MANIFEST not in store.names(path):
            passed.append(f"{steps[number]} is incomplete and passed over: it has no manifest")
            continue
        try:
            opened = open_sharded(store, path)
        except SourceError as error:
            passed.append(f"{steps[number]} is damaged and passed over: {error}")
            continue
        return replace(opened, notes=(*passed, *opened.notes))
    raise MissingError(f"{url}: none of its {len(steps)} steps is whole: {'; '.join(passed)}")
