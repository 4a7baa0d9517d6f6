"""The kind of destination that a store makes of a URL."""

from collections.abc import Mapping

from d9d_ckpt.formats.existing import Superseded
from d9d_ckpt.run.bucket import Bucket
from d9d_ckpt.run.directory import Directory
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.storage.store import ObjectStore


def destination(
    store: LocalStore | ObjectStore,
    url: str,
    old: Superseded,
    work: Mapping[str, str],
    *,
    again: bool = False,
) -> Directory | Bucket:
    """Where ``work`` is written: files of this machine, or objects."""
    if isinstance(store, LocalStore):
        return Directory(store, url, old, work, again)
    return Bucket(store, url, old, work, again)
