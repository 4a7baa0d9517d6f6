"""Hugging Face directories: opened through their index, never through a glob."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from d9d_ckpt.errors import CorruptError, MissingError
from d9d_ckpt.formats.base import Opened
from d9d_ckpt.formats.safetensors import Header, read_header
from d9d_ckpt.storage.store import Store, join
from d9d_ckpt.tensors import BLOCK, Catalogue, Chunk, Entry, Region

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CHECKSUMS = "d9d_xxh3_1MiB"
"""Header metadata: 16 hex digits per block of each tensor, tensors in the order of their bytes."""

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|index\.json)")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_LARGEST_SMALL = 64 << 20
"""Files beside the weights above this are no tokenizer, config or code."""


def open_huggingface(store: Store, url: str) -> Opened:
    """A directory with an index or a single file, or one safetensors file by its own URL.

    Raises:
        MissingError: No weights, or files and tensors that the index promises are not there.
        CorruptError: Headers, index or config contradict themselves or each other.
    """
    if url.endswith(".safetensors"):
        headers = {url: read_header(store, url)}
        return Opened(url, "huggingface", _catalogue(headers), metadata=_metadata(headers))
    names = store.names(url)
    weight_map = _index(store, url) if INDEX in names else None
    files = sorted(set(weight_map.values())) if weight_map is not None else [_single(url, names)]
    if weight_map is not None:
        _check_present(url, weight_map, names)
    headers = {join(url, name): read_header(store, join(url, name)) for name in files}
    if weight_map is not None:
        _check_index(url, weight_map, headers)
    files_here = store.files(url)
    config = _json(store, join(url, "config.json")) if "config.json" in names else None
    others = [n for n in names if n.endswith((".safetensors", ".bin")) and n not in files]
    return Opened(
        url=url,
        format="huggingface",
        catalogue=_catalogue(headers),
        config=config,
        metadata=_metadata(headers),
        small=tuple(_small(files_here)),
        notes=tuple(_notes(others, files_here)),
    )


def _notes(others: Sequence[str], files: Mapping[str, int]) -> Iterator[str]:
    if others:
        yield f"not in the index and ignored: {', '.join(others)}"
    large = [n for n in files if files[n] > _LARGEST_SMALL and not _WEIGHTS.fullmatch(n)]
    if large:
        yield f"too large to go along: {', '.join(large)}"


def _index(store: Store, url: str) -> dict[str, str]:
    path = join(url, INDEX)
    weight_map = _json(store, path).get("weight_map")
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
    pickled = [n for n in names if n.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        raise MissingError(
            f"{url}: only pickled weights: {', '.join(pickled[:8])}; convert them to safetensors first"
        )
    raise MissingError(f"{url}: no checkpoint here: neither manifest.json, {INDEX} nor {SINGLE}")


def _check_present(url: str, weight_map: Mapping[str, str], names: Sequence[str]) -> None:
    here = set(names)
    missing = sorted({file for file in weight_map.values() if file not in here})
    if missing:
        tensors = sum(file not in here for file in weight_map.values())
        raise MissingError(
            f"{url}: {INDEX} names {len(missing)} files that are not there: {', '.join(missing[:8])}, "
            f"with {tensors} of {len(weight_map)} tensors; finish the download"
        )


def _check_index(url: str, weight_map: Mapping[str, str], headers: Mapping[str, Header]) -> None:
    lacking = [
        f"{name} in {file}"
        for name, file in weight_map.items()
        if name not in headers[join(url, file)].tensors
    ]
    if lacking:
        raise MissingError(
            f"{url}: {INDEX} promises {len(lacking)} tensors that their file's header lacks: "
            f"{', '.join(lacking[:8])}; index and files are of different saves: download both again"
        )
    stray = [
        f"{name} in {file.rsplit('/', 1)[-1]}"
        for file, header in headers.items()
        for name in header.tensors
        if weight_map.get(name) != file.rsplit("/", 1)[-1]
    ]
    if stray:
        raise CorruptError(
            f"{url}: {len(stray)} tensors are in a file's header where {INDEX} does not have them: "
            f"{', '.join(stray[:8])}; index and files are of different saves: download both again"
        )


def _catalogue(headers: Mapping[str, Header]) -> Catalogue:
    entries: dict[str, Entry] = {}
    for file, header in headers.items():
        digests = _digests(file, header)
        for name, (spec, offset) in header.tensors.items():
            chunk = Chunk(
                Region.whole(spec.shape), file, offset, spec.nbytes, "none", digests.get(name)
            )
            entries[name] = Entry(spec, (chunk,) if spec.nbytes else ())
    return Catalogue(entries)


def _metadata(headers: Mapping[str, Header]) -> dict[str, str]:
    """What the files say of themselves beyond format and checksums; of two values the last."""
    found: dict[str, str] = {}
    for header in headers.values():
        found |= header.metadata
    return {key: value for key, value in found.items() if key not in ("format", CHECKSUMS)}


def _digests(file: str, header: Header) -> dict[str, tuple[int, ...]]:
    text = header.metadata.get(CHECKSUMS)
    if text is None:
        return {}
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


def _small(files: Mapping[str, int]) -> list[str]:
    """Files that go along: config, tokenizer, code; no weights, nothing hidden, nothing huge."""
    return [
        name
        for name, nbytes in files.items()
        if not name.startswith(".") and not _WEIGHTS.fullmatch(name) and nbytes <= _LARGEST_SMALL
    ]


def _json(store: Store, url: str) -> dict[str, Any]:
    try:
        value = json.loads(store.read(url, 0, store.size(url)))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{url}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptError(f"{url}: not a JSON object")
    return value


def index_json(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The index of a written set of shards."""
    value = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
