"""The store behind a URL."""

import importlib
from pathlib import Path

from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.storage.store import Options, Store, is_local


def normalise(url: str) -> str:
    """``url`` with ``file://`` and the user's directory resolved: local paths come out absolute."""
    if url.startswith("file://"):
        url = url.removeprefix("file://")
    if not is_local(url):
        return url.rstrip("/")
    return str(Path(url).expanduser().absolute())


def store_for(url: str, options: Options) -> Store:
    """The store that holds ``url``, a result of `normalise`."""
    if is_local(url):
        return LocalStore()
    # fsspec takes a third of the start-up that a local command has in all.
    module = importlib.import_module("d9d_ckpt.storage.fsspec")
    store: Store = module.FsspecStore(url, options)
    return store
