"""The safetensors header: read with every check, written as the reference reader wants it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from d9d_ckpt.errors import CorruptError, MappingError
from d9d_ckpt.storage.store import Store
from d9d_ckpt.tensors import TensorSpec, spec_of

MAX_HEADER = 100_000_000
"""Bytes of JSON that the reference reader accepts."""

ALIGN = 4096
"""Data starts at a multiple of this, so that blocks of 1 MiB are page-aligned writes."""

_KINDS = (
    (b"PK\x03\x04", "a PyTorch zip file; call it .bin or .pt to have it read as one"),
    *(
        (
            bytes([0x80, protocol]),
            "a Python pickle; call it .bin or .pt to have it read as a file of torch.save",
        )
        for protocol in range(2, 6)
    ),
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself; run git lfs pull"),
    (b"<html", "an HTML page, not the file itself; download it again"),
    (b"<!DOC", "an HTML page, not the file itself; download it again"),
    (b"<!doc", "an HTML page, not the file itself; download it again"),
    (b"GGUF", "a GGUF file, which is not supported"),
)


class Placed(NamedTuple):
    """One tensor of a file: its spec and where its bytes begin, from the start of the file."""

    spec: TensorSpec
    offset: int


class Header(NamedTuple):
    """A parsed header: tensors in the order of their bytes, the string metadata, and the JSON itself."""

    tensors: dict[str, Placed]
    metadata: dict[str, str]
    raw: bytes


def read_header(store: Store, url: str) -> Header:
    """The header of a safetensors file, checked in full.

    Raises:
        CorruptError: Not a safetensors file, or one that contradicts itself.
    """
    size = store.size(url)
    start = store.read(url, 0, min(size, 32))
    length = int.from_bytes(start[:8], "little")
    if size < 8 or length > min(MAX_HEADER, size - 8):
        # Only then: the length of a valid header may be spelt like another kind's first bytes.
        kind = kind_of_file(start)
        if kind is not None:
            raise CorruptError(f"{url}: this is {kind}")
    if size < 8:
        raise CorruptError(
            f"{url}: {size} bytes, expected at least 8 for a safetensors header; download it again"
        )
    if length > MAX_HEADER:
        raise CorruptError(
            f"{url}: header of {length} bytes, at most {MAX_HEADER} are valid; this is not a "
            "safetensors file"
        )
    if 8 + length > size:
        raise CorruptError(
            f"{url}: {size} bytes, expected at least {8 + length} for its header; it was cut short: "
            "download it again"
        )
    return parse_header(store.read(url, 8, length), size, url)


def kind_of_file(start: bytes) -> str | None:
    """What a file with these first bytes is, where it is something known and no safetensors file."""
    known = (kind for magic, kind in _KINDS if start.lower().startswith(magic.lower()))
    return next(known, None)


def parse_header(raw: bytes, size: int, url: str) -> Header:
    """The header ``raw`` of a file of ``size`` bytes.

    Raises:
        CorruptError: Any contradiction, with the tensor and the reason.
    """
    try:
        parsed = json.loads(raw.decode(), object_pairs_hook=_unique)
        if b"\\u" in raw:
            # Only an escape can spell half a character, which no UTF-8 header can hold.
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{url}: the header is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise CorruptError(f"{url}: the header is not a JSON object")
    metadata = _metadata(parsed.pop("__metadata__", None), url)
    data, found = 8 + len(raw), []
    seen: dict[Any, tuple[TensorSpec, int]] = {}
    for name, entry in parsed.items():
        spec, begin, end = _entry(name, entry, url, seen)
        found.append((begin, end, name, spec))
    found.sort()
    at = 0
    for begin, end, name, _ in found:
        if begin != at:
            fault = "overlaps the tensor before it" if begin < at else "leaves a hole before it"
            raise CorruptError(f"{url}: tensor {name!r} at bytes [{begin}, {end}) {fault}, at {at}")
        at = end
    if data + at != size:
        short = data + at > size
        raise CorruptError(
            f"{url}: {size} bytes, expected {data + at} (8 + header {len(raw)} + data {at}); "
            + ("it was cut short: download it again" if short else "it has bytes after the data")
        )
    placed = {name: Placed(spec, data + begin) for begin, _, name, spec in found}
    return Header(placed, metadata, raw)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key appears twice")
    return out


def _metadata(value: object, url: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or any(type(v) is not str for v in value.values()):
        raise CorruptError(f"{url}: __metadata__ must map strings to strings")
    return value


def _entry(
    name: str, entry: object, url: str, seen: dict[Any, tuple[TensorSpec, int]]
) -> tuple[TensorSpec, int, int]:
    """Spec, begin and end of one tensor; ``seen`` has the specs checked so far, which repeat."""
    if not isinstance(entry, dict):
        raise CorruptError(f"{url}: tensor {name!r} has no dtype, shape and data_offsets")
    dtype, shape = entry.get("dtype"), entry.get("shape")
    key = None
    if isinstance(dtype, str) and isinstance(shape, list) and set(map(type, shape)) <= {int}:
        key = dtype, tuple(shape)
    if key not in seen:
        spec = spec_of(name, dtype, shape, url)
        seen[key] = spec, spec.nbytes
    spec, nbytes = seen[key]
    offsets = entry.get("data_offsets")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or type(offsets[0]) is not int
        or type(offsets[1]) is not int
        or not 0 <= offsets[0] <= offsets[1]
    ):
        raise CorruptError(f"{url}: tensor {name!r} has invalid data_offsets {offsets!r}")
    if offsets[1] - offsets[0] != nbytes:
        raise CorruptError(
            f"{url}: tensor {name!r}, {spec.dtype.name} {list(spec.shape)}, needs {nbytes} bytes, "
            f"data_offsets hold {offsets[1] - offsets[0]}"
        )
    return spec, offsets[0], offsets[1]


def encode_header(
    tensors: Iterable[tuple[str, TensorSpec]],
    metadata: Mapping[str, str],
    *,
    room: int = 0,
    start: int = 0,
) -> tuple[bytes, list[int]]:
    """Header bytes, length prefix included, and the file offset of each tensor in the given order.

    Tensors lie without gaps; give them by descending item size and every one is aligned.

    Args:
        tensors: Names and specs.
        metadata: Strings for ``__metadata__``.
        room: Bytes that the header has at least.
        start: Where the first tensor begins, in place of 0, to find the room for larger numbers.

    Raises:
        MappingError: The reserved name, or a header above the reader's limit.
    """
    entries: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    at, begins = start, []
    for name, spec in tensors:
        if name == "__metadata__":
            raise MappingError("tensor name '__metadata__' is reserved by safetensors; rename it")
        entries[name] = {
            "dtype": spec.dtype.name,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        begins.append(at)
        at += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    length = max(room, -(-(8 + len(text)) // ALIGN) * ALIGN) - 8
    if length > MAX_HEADER:
        raise MappingError(
            f"a file header of {length} bytes is above the limit of {MAX_HEADER}; lower --max-shard-size"
        )
    header = length.to_bytes(8, "little") + text.ljust(length)
    return header, [len(header) + begin for begin in begins]


T = TypeVar("T")


def by_alignment(tensors: Sequence[tuple[T, TensorSpec]]) -> list[tuple[T, TensorSpec]]:
    """Tensors with wider elements first, so that each starts at a multiple of its item size."""
    return sorted(tensors, key=lambda item: -item[1].dtype.bits)
