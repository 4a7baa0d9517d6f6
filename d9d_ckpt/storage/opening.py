"""The store behind a URL."""

import importlib
import os
from pathlib import Path

from d9d_ckpt.errors import UsageError
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.storage.store import ObjectStore, Options, is_local


def normalise(url: str | os.PathLike[str]) -> str:
    """``url`` with ``file://`` and the user's directory resolved: local paths come out absolute."""
    url = os.fspath(url)
    if url.startswith("file://"):
        url = url.removeprefix("file://")
    try:
        url.encode()
        if not is_local(url):
            return url.rstrip("/")
        path = Path(url).expanduser().absolute()
        path.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"{url!r:.200}: no place: {error}") from error
    return str(path)


def store_for(url: str, options: Options) -> LocalStore | ObjectStore:
    """The store that holds ``url``, a result of `normalise`."""
    if is_local(url):
        return LocalStore()
    # fsspec takes a third of the start-up that a local command has in all, s3fs more than all of it.
    store: ObjectStore
    if url.startswith("s3://"):
        try:
            store = importlib.import_module("d9d_ckpt.storage.s3").S3Store(options)
        except ImportError as error:
            raise UsageError(f"{url}: {error}; install d9d-ckpt[s3]") from error
    else:
        store = importlib.import_module("d9d_ckpt.storage.fsspec").FsspecStore(url, options)
    return store
