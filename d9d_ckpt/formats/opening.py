"""Which format a URL holds."""

import re

from d9d_ckpt.errors import MissingError, RequestError
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
    if step is not None and step not in steps:
        known = ", ".join(str(n) for n in sorted(steps))
        raise MissingError(f"{url}: no step {step}; there are {known}")
    for number in [step] if step is not None else sorted(steps, reverse=True):
        path = join(url, steps[number])
        if MANIFEST in store.names(path):
            return open_sharded(store, path)
        if step is not None:
            raise MissingError(f"{path}: no manifest, so step {step} is incomplete")
    raise MissingError(f"{url}: none of its {len(steps)} steps has a manifest: all are incomplete")
