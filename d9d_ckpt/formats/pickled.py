"""Files of torch.save (.bin, .pt, .pth), zip or legacy: their tensors as chunks, nothing executed.

Storages lie uncompressed in the file, one after the other, so that a tensor is a range of bytes, or
a strided view of one, that the engine reads like any other. Only the pickle is read here.
"""

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import NamedTuple

from d9d_ckpt.errors import CorruptError, MissingError, RequestError, SourceError
from d9d_ckpt.formats.safetensors import kind_of_file
from d9d_ckpt.formats.unpickler import (
    MAX_PICKLE,
    Cursor,
    Storage,
    Strided,
    kind_of,
    unpickle,
)
from d9d_ckpt.storage.store import Store
from d9d_ckpt.tensors import Chunk, DType, Entry, Region, TensorSpec, dtype_from_torch

SUFFIXES = (".bin", ".pt", ".pth")
"""What such files are called."""

_ZIP = b"PK\x03\x04"
_MAX_DIRECTORY = 8 << 20
"""Bytes of a zip directory: some 80,000 storages; each costs 1 KB to list, whatever its name."""

_LOCAL = struct.Struct("<4s4xH16xHH")
"""Signature, method, and the lengths of name and extra field in a local header."""

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_COUNT = struct.Struct("<q")
"""How a legacy file begins, and the elements of a storage ahead of its bytes."""

_NESTED = ("model", "state_dict", "module")
"""Where a training checkpoint keeps its weights, in the order of preference."""

_MAX_DIMS = 64
_MAX_ELEMENTS = 1 << 60
_NAMED = 8
_MAX_SHOWN = 80
"""Names that one note shows, and characters of each."""


class Pickled(NamedTuple):
    """The tensors of a file, and what a reader should be told of it."""

    entries: dict[str, Entry]
    notes: tuple[str, ...]


class _Saved(NamedTuple):
    """A file whose pickle has been read.

    Attributes:
        value: What was saved.
        locate: The first byte of each of some storages, by key.
    """

    value: object
    locate: Callable[[Iterable[Storage]], Mapping[str, int]]


def read_pickled(store: Store, url: str) -> Pickled:
    """The tensors that ``url`` holds by name.

    Raises:
        SourceError: It is no file of torch.save, contradicts itself, or needs code to be read.
    """
    size = store.size(url)
    start = store.read(url, 0, min(size, 32))
    zipped = start.startswith(_ZIP)
    if not zipped and (kind := kind_of_file(start)) is not None and start[0] != 0x80:
        raise CorruptError(f"{url}: this is {kind}")
    saved = _zipped(store, url, size) if zipped else _legacy(store, url, size)
    tensors, notes = _state_dict(saved.value, url)
    views = {name: _checked(name, t, url) for name, t in tensors.items()}
    places = saved.locate(t.storage for t in tensors.values())
    return Pickled({name: _entry(v, places, url) for name, v in views.items()}, notes)


# -- zip ---------------------------------------------------------------------------------------


class _Window:
    """A file as `zipfile` wants it; it asks for the end and the directory, no more."""

    def __init__(self, store: Store, url: str, size: int) -> None:
        self._store, self._url, self._size, self._at = store, url, size, 0

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(offset + (0, self._at, self._size)[whence], 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, nbytes: int = -1, /) -> bytes:
        left = max(self._size - self._at, 0)
        nbytes = left if nbytes < 0 else min(nbytes, left)
        if nbytes > _MAX_DIRECTORY:
            raise CorruptError(
                f"{self._url}: a zip directory of {nbytes} bytes, at most {_MAX_DIRECTORY} are read"
            )
        out = self._store.read(self._url, self._at, nbytes)
        self._at += nbytes
        return out


def _zipped(store: Store, url: str, size: int) -> _Saved:
    """A zip of ``ROOT/data.pkl`` and ``ROOT/data/KEY``, none compressed."""
    members = _members(store, url, size)
    root = next((name.split("/", 1)[0] for name in members), "")

    def content(name: str, limit: int) -> bytearray:
        info = members.get(f"{root}/{name}")
        if info is None:
            raise CorruptError(
                f"{url}: this zip file has no {name}, so it is no file of torch.save"
            )
        if info.file_size > limit:
            raise CorruptError(f"{url}: {name} of {info.file_size} bytes, at most {limit} are read")
        # Not `Store.read`, which may hold what it has read twice for a moment.
        raw = bytearray(info.file_size)
        store.read_into(url, _data_offsets(store, url, size, [info])[0], [memoryview(raw)])
        if zlib.crc32(raw) != info.CRC:
            raise CorruptError(f"{url}: {name} is damaged: its checksum does not hold")
        return raw

    raw = content("data.pkl", MAX_PICKLE)
    if f"{root}/byteorder" in members and content("byteorder", 16) != b"little":
        raise SourceError(f"{url}: big-endian tensors; save them on a little-endian machine")
    storages: dict[str, Storage] = {}
    value = unpickle(Cursor(lambda at, n: bytes(raw[at : at + n]), 0, len(raw), url), storages)

    def locate(wanted: Iterable[Storage]) -> dict[str, int]:
        infos = {}
        for storage in wanted:
            info = members.get(f"{root}/data/{storage.key}")
            if info is None or info.file_size != storage.nbytes:
                found = "is missing" if info is None else f"has {info.file_size}"
                raise CorruptError(
                    f"{url}: storage {storage.key!r} {found}, expected {storage.nbytes} bytes"
                )
            infos[storage.key] = info
        return dict(zip(infos, _data_offsets(store, url, size, list(infos.values())), strict=True))

    return _Saved(value, locate)


def _members(store: Store, url: str, size: int) -> dict[str, zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(_Window(store, url, size)) as found:
            infos = found.infolist()
    except CorruptError:  # a ValueError as well, and the truth already
        raise
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        ValueError,
        struct.error,
        OverflowError,
    ) as error:
        raise CorruptError(
            f"{url}: not a whole zip file ({error}); it was cut short or damaged: fetch it again"
        ) from error
    members = {info.filename: info for info in infos}
    if len(members) != len(infos):
        raise CorruptError(f"{url}: two members of this zip file have one name")
    return members


def _data_offsets(store: Store, url: str, size: int, infos: list[zipfile.ZipInfo]) -> list[int]:
    """Where the bytes of each member begin: behind a local header with a length of its own."""
    for info in infos:
        stored = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
        if not stored or info.compress_size != info.file_size:
            raise SourceError(
                f"{url}: {info.filename!r} is compressed or encrypted, which torch.save never does; "
                "save it again with torch.save"
            )
        if not 0 <= info.header_offset <= size - _LOCAL.size:
            raise CorruptError(f"{url}: {info.filename!r} lies outside the file")
    headers = bytearray(_LOCAL.size * len(infos))
    if infos:
        offsets = [info.header_offset for info in infos]
        store.read_runs(url, offsets, _LOCAL.size, memoryview(headers))
    out = []
    for info, header in zip(infos, _LOCAL.iter_unpack(headers), strict=True):
        magic, method, name, extra = header
        at = info.header_offset + _LOCAL.size + name + extra
        if magic != _ZIP or method != zipfile.ZIP_STORED:
            raise CorruptError(f"{url}: the header of {info.filename!r} contradicts the directory")
        if at + info.file_size > size:
            raise CorruptError(f"{url}: {info.filename!r} reaches beyond the file of {size} bytes")
        out.append(at)
    return out


# -- legacy ------------------------------------------------------------------------------------


def _legacy(store: Store, url: str, size: int) -> _Saved:
    """Five pickles (magic, version, machine, value, keys), then for each key a count and its bytes."""
    cursor = Cursor(lambda at, n: store.read(url, at, n), 0, min(size, MAX_PICKLE), url)
    storages: dict[str, Storage] = {}
    if unpickle(cursor, {}) != _MAGIC:
        raise CorruptError(
            f"{url}: a pickle, and not one of torch.save; save the tensors with torch.save or as "
            "safetensors"
        )
    version, machine = unpickle(cursor, {}), unpickle(cursor, {})
    if version != _PROTOCOL or not isinstance(machine, dict):
        raise CorruptError(f"{url}: not the layout of torch.save, {_PROTOCOL}, that is known")
    if machine.get("little_endian") is not True:
        raise SourceError(f"{url}: big-endian tensors; save them on a little-endian machine")
    value, keys = unpickle(cursor, storages), unpickle(cursor, {})
    if not isinstance(keys, list) or len(set(map(str, keys))) != len(keys):
        raise CorruptError(f"{url}: the pickle does not list its storages")
    places, at = {}, cursor.position
    for key in keys:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None:
            raise CorruptError(f"{url}: storage {_short(key)} belongs to no tensor")
        places[storage.key] = at + _COUNT.size
        at += _COUNT.size + storage.nbytes
        if at > size:
            raise CorruptError(
                f"{url}: {size} bytes, expected at least {at} for storage {key!r}; it was cut short: "
                "fetch it again"
            )
    if storages.keys() != places.keys():
        raise CorruptError(f"{url}: {len(storages)} storages in use and {len(places)} stored")
    _check_counts(store, url, storages, places)
    return _Saved(value, lambda _: places)


def _check_counts(
    store: Store, url: str, storages: Mapping[str, Storage], places: Mapping[str, int]
) -> None:
    counts = bytearray(_COUNT.size * len(places))
    if places:
        offsets = [at - _COUNT.size for at in places.values()]
        store.read_runs(url, offsets, _COUNT.size, memoryview(counts))
    for key, (count,) in zip(places, _COUNT.iter_unpack(counts), strict=True):
        if count != storages[key].elements:
            raise CorruptError(
                f"{url}: storage {key!r} has {count} elements, expected {storages[key].elements}"
            )


# -- tensors -----------------------------------------------------------------------------------


def _state_dict(value: object, url: str) -> tuple[dict[str, Strided], tuple[str, ...]]:
    """Names and tensors, from the top or from one of the usual keys below it; the rest in notes."""
    if not isinstance(value, dict):
        raise MissingError(f"{url}: holds a {kind_of(value)}, expected a dict of tensors by name")
    notes = []
    top: dict[object, object] = value
    found = next(((key, top[key]) for key in _NESTED if _has_tensors(top.get(key))), None)
    if found is not None and isinstance(found[1], dict):
        left = {key: v for key, v in top.items() if key != found[0]}
        notes.append(f"{_file(url)}: the weights are those under {found[0]!r}" + _left_out(left))
        top = found[1]
    tensors: dict[str, Strided] = {}
    others = {}
    for name, v in top.items():
        if not isinstance(v, Strided):
            others[name] = v
        elif isinstance(name, str):
            tensors[name] = v
        else:
            raise CorruptError(f"{url}: a tensor is named by {_short(name)}, expected a string")
    if not tensors:
        keys = ", ".join(_short(key) for key in list(top)[:_NAMED])
        raise MissingError(
            f"{url}: no tensors by name, neither at the top ({keys or 'empty'}) nor under "
            f"{', '.join(_NESTED)}"
        )
    if others:
        notes.append(f"{_file(url)}: no tensors" + _left_out(others))
    return tensors, tuple(notes)


def _has_tensors(value: object) -> bool:
    return isinstance(value, dict) and any(isinstance(v, Strided) for v in value.values())


def _left_out(values: Mapping[object, object]) -> str:
    if not values:
        return ""
    shown = [f"{_short(key)} ({kind_of(v)})" for key, v in list(values.items())[:_NAMED]]
    more = len(values) - len(shown)
    return f"; left out: {', '.join(shown)}" + (f" and {more} more" if more else "")


def _short(key: object) -> str:
    return repr(key if isinstance(key, int | float | None) else str(key)[:_MAX_SHOWN])


def _file(url: str) -> str:
    return url.rsplit("/", 1)[-1]


class _View(NamedTuple):
    """A checked tensor; ``start`` and ``nbytes`` are what it spans of its storage."""

    key: str
    spec: TensorSpec
    start: int
    nbytes: int
    strides: tuple[int, ...] | None


def _checked(name: str, t: Strided, url: str) -> _View:
    what = f"{url}: tensor {name!r}, {t.dtype} {list(t.shape)[:_MAX_DIMS]}"
    if t.conjugated:
        raise SourceError(f"{what}, is a conjugate that was not computed; resolve_conj() it first")
    try:
        dtype: DType = dtype_from_torch(t.dtype)
        itemsize = dtype.itemsize
    except RequestError as error:
        raise SourceError(f"{what}, cannot be stored: {error}") from error
    numbers = (t.offset, *t.shape, *t.strides)
    if len(t.shape) != len(t.strides) or len(t.shape) > _MAX_DIMS:
        raise CorruptError(f"{what}, has {len(t.strides)} strides")
    if min(numbers) < 0 or max(numbers) > _MAX_ELEMENTS:
        raise CorruptError(f"{what}, has no valid shape, strides and offset")
    spec = TensorSpec(dtype, t.shape)
    if not spec.numel:
        if prod(n or 1 for n in t.shape) > _MAX_ELEMENTS:
            raise CorruptError(f"{what}, has no valid shape")
        return _View(t.storage.key, spec, 0, 0, None)
    span = _span(t, what)
    if (t.offset + span) * itemsize > t.storage.nbytes:
        raise CorruptError(
            f"{what}, strides {list(t.strides)}, needs {span} elements from {t.offset}, and its storage "
            f"{t.storage.key!r} has {t.storage.nbytes // itemsize}"
        )
    strides = None if _is_row_major(t) else t.strides
    return _View(t.storage.key, spec, t.offset * itemsize, span * itemsize, strides)


def _span(t: Strided, what: str) -> int:
    """Elements from the first to the last one; all between belong to one index or to none."""
    span = 1
    for stride, size in sorted((w, n) for n, w in zip(t.shape, t.strides, strict=True) if n > 1):
        if stride < span:
            raise SourceError(
                f"{what}, is a view whose elements overlap (strides {list(t.strides)}); make it "
                "contiguous() before it is saved"
            )
        span += (size - 1) * stride
    return span


def _is_row_major(t: Strided) -> bool:
    expected = 1
    for size, stride in zip(reversed(t.shape), reversed(t.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _entry(view: _View, places: Mapping[str, int], url: str) -> Entry:
    if not view.nbytes:
        return Entry(view.spec, ())
    region = Region.whole(view.spec.shape)
    at = places[view.key] + view.start
    return Entry(view.spec, (Chunk(region, url, at, view.nbytes, strides=view.strides),))
