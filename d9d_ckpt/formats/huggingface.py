"""Hugging Face directories: opened through their index, never through a glob."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from d9d_ckpt.codecs.checksum import digest, to_hex
from d9d_ckpt.errors import CorruptError, MissingError
from d9d_ckpt.formats.base import Opened
from d9d_ckpt.formats.pickled import SUFFIXES, read_pickled
from d9d_ckpt.formats.safetensors import Header, read_header
from d9d_ckpt.formats.untrusted import WEIGHTS, is_text, may_go_along, read_object
from d9d_ckpt.storage.store import Store, join
from d9d_ckpt.tensors import BLOCK, Catalogue, Chunk, Entry, Region

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLED_SINGLE = "pytorch_model.bin"
CHECKSUMS = "d9d_xxh3_1MiB"
"""Header metadata: 16 hex digits per block of each tensor, tensors in the order of their bytes."""

HEADER_CHECKSUM = "d9d_xxh3_header"
"""Header metadata: 16 hex digits over the header's JSON, taken with zeros in their own place."""

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(?:safetensors|bin|pt|pth)")
_LARGEST_SMALL = 64 << 20
"""Files beside the weights above this are no tokenizer, config or code."""


class _File(NamedTuple):
    """What one weight file holds."""

    entries: dict[str, Entry]
    metadata: Mapping[str, str]
    notes: tuple[str, ...] = ()


def open_huggingface(store: Store, url: str) -> Opened:
    """A directory with an index or a single file, or one weight file by its own URL.

    Raises:
        MissingError: No weights, or files and tensors that the index promises are not there.
        CorruptError: Files, index or config contradict themselves or each other.
    """
    if is_file(store, url):
        return _opened(url, {url: _read(store, url)})
    names = store.names(url)
    index = _which_index(names)
    weight_map = _weight_map(store, join(url, index)) if index else None
    files = sorted(set(weight_map.values())) if weight_map is not None else [_single(url, names)]
    if weight_map is not None:
        _check_present(url, index, weight_map, names)
    found = {join(url, name): _read(store, join(url, name)) for name in files}
    if weight_map is not None:
        _check_index(url, index, weight_map, found)
    files_here = store.files(url)
    config = read_object(store, join(url, "config.json")) if "config.json" in names else None
    others = [n for n in names if n.endswith((".safetensors", ".bin")) and n not in files]
    opened = _opened(url, found)
    return replace(
        opened,
        config=config,
        small=tuple(_small(files_here)),
        notes=(*opened.notes, *_notes(others, files_here, names)),
    )


def is_file(store: Store, url: str) -> bool:
    """Whether ``url`` is one weight file by its name, and not a directory of such a name."""
    return url.endswith(".safetensors") or (url.endswith(SUFFIXES) and not store.names(url))


def _read(store: Store, url: str) -> _File:
    if url.endswith(SUFFIXES):
        pickled = read_pickled(store, url)
        return _File(pickled.entries, {}, pickled.notes)
    header = read_header(store, url)
    return _File(_entries(url, header), header.metadata)


def _opened(url: str, files: Mapping[str, _File]) -> Opened:
    """All tensors of ``files``, and what these say beyond format and checksums; of two the last."""
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    for file in files.values():
        entries |= file.entries
        metadata |= file.metadata
    return Opened(
        url=url,
        format="huggingface",
        catalogue=Catalogue(entries),
        metadata={
            k: text
            for k, text in metadata.items()
            if k not in ("format", CHECKSUMS, HEADER_CHECKSUM)
        },
        notes=tuple(note for file in files.values() for note in file.notes),
    )


def _notes(others: Sequence[str], files: Mapping[str, int], names: Sequence[str]) -> Iterator[str]:
    if others:
        yield f"not in the index and ignored: {_shown(others)}"
    unnamed = [n for n in files if not is_text(n)]
    if unnamed:
        yield f"left out, as their names are not UTF-8: {_shown(unnamed)}"
    large = [n for n in files if files[n] > _LARGEST_SMALL and not WEIGHTS.fullmatch(n)]
    if large:
        yield f"too large to go along: {_shown(large)}"
    directories = [n for n in names if n not in files and not n.startswith(".")]
    if directories:
        yield f"directories do not go along: {_shown(directories)}"


def _shown(names: Sequence[str]) -> str:
    return ", ".join(name.encode(errors="backslashreplace").decode() for name in names)


def _which_index(names: Sequence[str]) -> str:
    """The index that counts, or nothing; any safetensors file wins over an index of pickles."""
    if INDEX in names:
        return INDEX
    pickled = PICKLED_INDEX in names and not any(n.endswith(".safetensors") for n in names)
    return PICKLED_INDEX if pickled else ""


def _weight_map(store: Store, path: str) -> dict[str, str]:
    weight_map = read_object(store, path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptError(f"{path}: weight_map must map tensor names to files")
    for name, file in weight_map.items():
        if type(file) is not str or "/" in file or file in ("", ".", "..") or "\0" in file:
            raise CorruptError(
                f"{path}: tensor {name!r} is mapped to {file!r}, which is no file name"
            )
    return weight_map


def _single(url: str, names: Sequence[str]) -> str:
    if SINGLE in names:
        return SINGLE
    found = [n for n in names if n.endswith(".safetensors")]
    if len(found) == 1 and not _SHARD.fullmatch(found[0]):
        return found[0]
    if found:
        sets = {m.group(1, 3) for n in found if (m := _SHARD.fullmatch(n))}
        what = "ambiguous weight sets" if len(sets) != 1 else "shards without their index"
        raise MissingError(
            f"{url}: {what}: {', '.join(found[:8])}; expected {INDEX}, which says which files count"
        )
    return _single_pickled(url, names)


def _single_pickled(url: str, names: Sequence[str]) -> str:
    if PICKLED_SINGLE in names:
        return PICKLED_SINGLE
    found = [n for n in names if n.endswith(SUFFIXES)]
    if len(found) == 1 and not _SHARD.fullmatch(found[0]):
        return found[0]
    if found:
        raise MissingError(
            f"{url}: no safetensors, and nothing says which pickled weights count: "
            f"{', '.join(found[:8])}; expected {PICKLED_INDEX} or {PICKLED_SINGLE}"
        )
    raise MissingError(f"{url}: no checkpoint here: neither manifest.json, {INDEX} nor {SINGLE}")


def _check_present(
    url: str, index: str, weight_map: Mapping[str, str], names: Sequence[str]
) -> None:
    here = set(names)
    missing = sorted({file for file in weight_map.values() if file not in here})
    if missing:
        tensors = sum(file not in here for file in weight_map.values())
        raise MissingError(
            f"{url}: {index} names {len(missing)} files that are not there: {', '.join(missing[:8])}, "
            f"with {tensors} of {len(weight_map)} tensors; finish the download"
        )


def _check_index(
    url: str, index: str, weight_map: Mapping[str, str], files: Mapping[str, _File]
) -> None:
    lacking = [
        f"{name} in {file}"
        for name, file in weight_map.items()
        if name not in files[join(url, file)].entries
    ]
    if lacking:
        raise MissingError(
            f"{url}: {index} promises {len(lacking)} tensors that their file's header lacks: "
            f"{', '.join(lacking[:8])}; index and files are of different saves: download both again"
        )
    stray = [
        f"{name} in {file.rsplit('/', 1)[-1]}"
        for file, found in files.items()
        for name in found.entries
        if weight_map.get(name) != file.rsplit("/", 1)[-1]
    ]
    if stray:
        raise CorruptError(
            f"{url}: {len(stray)} tensors are in a file's header where {index} does not have them: "
            f"{', '.join(stray[:8])}; index and files are of different saves: download both again"
        )


def _entries(file: str, header: Header) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    digests = _digests(file, header)
    for name, (spec, offset) in header.tensors.items():
        whole = Region.whole(spec.shape)
        chunk = Chunk(whole, file, offset, spec.nbytes, xxh3=digests.get(name))
        entries[name] = Entry(spec, (chunk,) if spec.nbytes else ())
    return entries


def _digests(file: str, header: Header) -> dict[str, tuple[int, ...]]:
    text, own = header.metadata.get(CHECKSUMS), header.metadata.get(HEADER_CHECKSUM)
    if text is None and own is None:
        return {}
    if text is None or own is None or seal(header.raw) != header.raw:
        raise CorruptError(
            f"{file}: {HEADER_CHECKSUM} is {own!r}, which is not the checksum of the header: it was "
            "damaged or edited"
        )
    counts = {name: -(-spec.nbytes // BLOCK) for name, (spec, _) in header.tensors.items()}
    if len(text) != 16 * sum(counts.values()):
        raise CorruptError(
            f"{file}: {CHECKSUMS} holds {len(text)} digits, expected {16 * sum(counts.values())}"
        )
    try:
        values = [int(text[at : at + 16], 16) for at in range(0, len(text), 16)]
    except ValueError:
        raise CorruptError(f"{file}: {CHECKSUMS} is not hexadecimal") from None
    out, at = {}, 0
    for name, count in counts.items():
        out[name] = tuple(values[at : at + count])
        at += count
    return out


def seal(raw: bytes) -> bytes:
    """The JSON of a header with its own checksum in its place."""
    before, key, after = raw.partition(f'"{HEADER_CHECKSUM}":"'.encode())
    if not key:
        return raw
    blank = before + key + b"0" * 16 + after[16:]
    return before + key + to_hex(digest(blank)).encode() + after[16:]


def _small(files: Mapping[str, int]) -> list[str]:
    """Files that go along: config, tokenizer, code; no weights, nothing hidden, nothing huge."""
    return [n for n, nbytes in files.items() if may_go_along(n) and nbytes <= _LARGEST_SMALL]


def index_json(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The index of a written set of shards."""
    value = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
