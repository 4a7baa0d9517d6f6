"""Which format a URL holds."""

from collections.abc import Mapping
from dataclasses import replace

from d9d_ckpt.errors import MissingError, RequestError, SourceError
from d9d_ckpt.formats.base import Opened
from d9d_ckpt.formats.huggingface import is_file, open_huggingface
from d9d_ckpt.formats.sharded import MANIFEST, open_sharded
from d9d_ckpt.formats.steps import open_step, step_directories, why_not
from d9d_ckpt.storage.store import Store, join


def open_checkpoint(store: Store, url: str, step: int | None = None) -> Opened:
    """The checkpoint at ``url``; of a run directory its step ``step``, or the latest whole one.

    Raises:
        SourceError: There is none, or it is incomplete or damaged.
    """
    if is_file(store, url):
        return open_huggingface(store, url)
    names = store.names(url)
    steps = step_directories(names)
    if MANIFEST in names or not steps:
        if step is not None:
            raise RequestError(f"{url}: step {step} was asked for, and this is not a run directory")
        return open_sharded(store, url) if MANIFEST in names else open_huggingface(store, url)
    if step is None:
        return _latest(store, url, steps)
    if step not in steps:
        known = ", ".join(str(n) for n in sorted(steps))
        raise MissingError(f"{url}: no step {step}; there are {known}")
    return open_step(store, join(url, steps[step]), step)


def _latest(store: Store, url: str, steps: Mapping[int, str]) -> Opened:
    """The highest step that is whole; those above it are named in its notes."""
    passed: list[str] = []
    for number in sorted(steps, reverse=True):
        path = join(url, steps[number])
        try:
            opened = open_step(store, path, number)
        except SourceError as error:
            passed.append(f"{steps[number]} is passed over: {why_not(error, path)}")
            continue
        return replace(opened, notes=(*passed, *opened.notes))
    raise MissingError(f"{url}: none of its {len(steps)} steps is whole: {'; '.join(passed)}")
