"""Our format: ordinary safetensors files under a save id, and the manifest that makes them exist."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from d9d_ckpt.codecs import zstd
from d9d_ckpt.codecs.checksum import digest, to_hex
from d9d_ckpt.errors import CkptError, CorruptError, LayoutError, MissingError, UsageError
from d9d_ckpt.formats.base import Opened
from d9d_ckpt.formats.safetensors import MAX_HEADER
from d9d_ckpt.formats.untrusted import is_text, may_go_along, parse_json, read_object
from d9d_ckpt.layout.topology import Topology, layout_from
from d9d_ckpt.storage.store import Store, join
from d9d_ckpt.tensors import BLOCK, Catalogue, Chunk, Coding, Entry, Region, TensorSpec, spec_of

MANIFEST = "manifest.json"
FORMAT = "d9d-sharded"
VERSION = 1
_SEAL = b',"self_xxh3":"'
_SAVE_ID = re.compile(r"(?!\.{1,2}$)[^/\0]{1,200}")
"""It is looked into, so it must not lead anywhere else."""

_RANK_FILE = re.compile(r"/rank-(\d{5,})(-\d{5,})?\.safetensors", re.ASCII)
"""The file of a rank, or one of its files."""

_MOST_RANKS = 20
"""Missing ranks in a message."""

_DEEPEST = 256
"""Levels of JSON: a config that may be read may also be kept here, deeper inside."""


@dataclass(frozen=True)
class Manifest:
    """What a manifest says, ready to be written.

    Attributes:
        save_id: Identity of the save; its files lie in a directory of that name.
        step: Training step, or None.
        layout: Topology of the files.
        family: Model family, or None for a mapping of the user's.
        config: The parsed config.json, or None.
        experts: How the Hugging Face source stored experts.
        entries: Tensors; chunk files are relative to the checkpoint.
        files: Rank files and small files: {name: (bytes, digest)}.
        values: JSON state.
        metadata: String metadata of the Hugging Face source's files.
        provenance: Where it came from.
    """

    save_id: str
    step: int | None
    layout: Topology
    family: str | None
    config: Mapping[str, Any] | None
    experts: str
    entries: Mapping[str, Entry]
    files: Mapping[str, tuple[int, int]]
    values: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The file, sealed by a digest of itself."""
        value = {
            "format": FORMAT,
            "version": VERSION,
            "save_id": self.save_id,
            "step": self.step,
            "layout": self.layout.to_json(),
            "model": {"family": self.family, "config": self.config, "hf_experts": self.experts},
            "block": BLOCK,
            "tensors": {name: _tensor_json(entry) for name, entry in self.entries.items()},
            "values": self.values,
            "metadata": self.metadata,
            "files": {
                name: {"nbytes": nbytes, "header_xxh3": to_hex(xxh3)}
                for name, (nbytes, xxh3) in self.files.items()
            },
            "provenance": self.provenance,
        }
        body = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
        return body + _SEAL + to_hex(digest(body)).encode() + b'"}\n'


def _tensor_json(entry: Entry) -> dict[str, Any]:
    return {
        "dtype": entry.spec.dtype.name,
        "shape": entry.spec.shape,
        "chunks": [
            {
                "start": c.region.start,
                "shape": c.region.shape,
                "file": c.file,
                "offset": c.offset,
                "nbytes": c.nbytes,
                "codec": c.coding.codec if c.coding is not None else "none",
                "xxh3": [to_hex(x) for x in c.xxh3 or ()],
            }
            for c in entry.chunks
        ],
    }


def open_sharded(store: Store, url: str) -> Opened:
    """A checkpoint with a manifest; every file it names must be there at its size.

    Raises:
        MissingError: A file is not there.
        CorruptError: The manifest is damaged, of another version, or contradicts a file.
    """
    return check_sizes(partial(listed, store), read_manifest(store, url))


def read_manifest(store: Store, url: str) -> Opened:
    """What a manifest says, without a look at the files that it names.

    Raises:
        MissingError: There is none.
        CorruptError: It is damaged, or of another version.
    """
    path = join(url, MANIFEST)
    raw = store.read(path, 0, store.size(path))
    value = _sealed(raw, path)
    try:
        _check_kinds(value, path)
        files = _files(value["files"], path)
        catalogue = _catalogue(value["tensors"], url, files, path)
        return Opened(
            url=url,
            format="sharded",
            catalogue=catalogue,
            config=value["model"]["config"],
            family=value["model"]["family"],
            experts=value["model"]["hf_experts"],
            layout=_layout(value["layout"], path),
            step=value["step"],
            save_id=value["save_id"],
            small=tuple(name for name in files if "/" not in name),
            values=value["values"],
            metadata=value["metadata"],
            files=files,
        )
    except CkptError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptError(
            f"{path}: {type(error).__name__} {error}: not a valid manifest"
        ) from error


def _sealed(raw: bytes, path: str) -> dict[str, Any]:
    try:
        value = parse_json(raw, levels=_DEEPEST, flat=("tensors", "files"))
    except ValueError as error:
        raise CorruptError(f"{path}: not valid JSON, the manifest is damaged: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise CorruptError(f"{path}: not a {FORMAT} manifest")
    if value.get("version") != VERSION:
        raise CorruptError(
            f"{path}: version {value.get('version')!r}, this release reads version {VERSION}; "
            "upgrade d9d-ckpt"
        )
    body, _, end = raw.rpartition(_SEAL)
    found = to_hex(digest(body))
    if end.rstrip() != f'{found}"}}'.encode():
        raise CorruptError(
            f"{path}: its own checksum is {value.get('self_xxh3')!r}, its content has {found!r}: it "
            "was damaged or edited"
        )
    return value


def _check_kinds(value: Mapping[str, Any], path: str) -> None:
    """Values that are passed on as they are must be of the kind that they are used as."""
    model, metadata = value["model"], value["metadata"]
    none = type(None)
    for what, found, kinds in (
        ("save_id", value["save_id"], (str,)),
        ("step", value["step"], (int, none)),
        ("values", value["values"], (dict,)),
        ("metadata", metadata, (dict,)),
        ("model config", model["config"], (dict, none)),
        ("model family", model["family"], (str, none)),
    ):
        if type(found) not in kinds:
            raise CorruptError(f"{path}: {what} cannot be {found!r:.80}")
    save_id = value["save_id"]
    if not _SAVE_ID.fullmatch(save_id):
        raise CorruptError(f"{path}: save_id {save_id!r:.80} is no name of a directory")
    if any(type(v) is not str for v in metadata.values()):
        raise CorruptError(f"{path}: metadata must map strings to strings")
    if model["hf_experts"] not in ("", "split", "fused"):
        raise CorruptError(f"{path}: hf_experts {model['hf_experts']!r:.80} is not known")
    if value["block"] != BLOCK:
        raise CorruptError(f"{path}: blocks of {value['block']!r:.80} bytes, expected {BLOCK}")


def _layout(value: Mapping[str, Any], path: str) -> Topology:
    try:
        return layout_from(value, path)
    except UsageError as error:
        raise CorruptError(str(error)) from error
    except LayoutError as error:
        raise CorruptError(f"{path}: {error}") from error


def _files(value: Mapping[str, Any], path: str) -> dict[str, tuple[int, int]]:
    out = {}
    for name, entry in value.items():
        parts = name.split("/")
        if "\0" in name or not is_text(name) or any(p in ("", ".", "..") for p in parts):
            raise CorruptError(f"{path}: {name!r} is no file inside the checkpoint")
        if len(parts) == 1 and (name == MANIFEST or not may_go_along(name)):
            raise CorruptError(f"{path}: {name!r} is no name of a file beside the weights")
        nbytes = entry["nbytes"]
        if type(nbytes) is not int or nbytes < 0:
            raise CorruptError(f"{path}: {name!r} cannot have {nbytes!r} bytes")
        out[name] = (nbytes, int(entry["header_xxh3"], 16))
    return out


def _catalogue(
    tensors: Mapping[str, Any], url: str, files: Mapping[str, tuple[int, int]], path: str
) -> Catalogue:
    urls = {name: join(url, name) for name in files}
    entries = {}
    for name, value in tensors.items():
        spec = spec_of(name, value["dtype"], value["shape"], path)
        chunks = tuple(_chunk(c, spec, urls) for c in value["chunks"])
        for c, file in zip(chunks, value["chunks"], strict=True):
            _check_chunk(name, spec, c, files[file["file"]][0], path)
        stored = sum(c.region.numel for c in chunks)
        if stored != spec.numel:
            raise CorruptError(
                f"{path}: tensor {name!r}: its chunks do not cover {list(spec.shape)} exactly once: "
                f"they hold {stored} of {spec.numel} elements"
            )
        entries[name] = Entry(spec, chunks)
    return Catalogue(entries)


def _chunk(value: Mapping[str, Any], spec: TensorSpec, urls: Mapping[str, str]) -> Chunk:
    region = Region(tuple(value["start"]), tuple(value["shape"]))
    if type(value["offset"]) is not int or type(value["nbytes"]) is not int:
        raise ValueError(f"offset {value['offset']!r} and nbytes {value['nbytes']!r} of a chunk")
    if len(region.start) != len(spec.shape):
        raise ValueError(f"a chunk of {len(region.start)} dims in a tensor of {len(spec.shape)}")
    coding = None
    if value["codec"] != "none":
        nbytes = TensorSpec(spec.dtype, region.shape).nbytes
        coding = Coding(value["codec"], max(1, spec.dtype.bits // 8), nbytes)
    xxh3 = tuple(int(x, 16) for x in value["xxh3"])
    return Chunk(region, urls[value["file"]], value["offset"], value["nbytes"], coding, xxh3)


def _check_chunk(name: str, spec: TensorSpec, c: Chunk, size: int, path: str) -> None:
    inside = all(
        type(a) is int and type(n) is int and a >= 0 and n > 0 and a + n <= total
        for a, n, total in zip(c.region.start, c.region.shape, spec.shape, strict=True)
    )
    if not inside:
        raise CorruptError(f"{path}: tensor {name!r} has a chunk outside of {list(spec.shape)}")
    least = most = TensorSpec(spec.dtype, c.region.shape).nbytes
    if c.coding is not None:
        if c.coding.codec != zstd.NAME:
            raise CorruptError(f"{path}: tensor {name!r} has unknown codec {c.coding.codec!r}")
        if spec.dtype.bits % 8 or most > BLOCK:
            raise CorruptError(
                f"{path}: tensor {name!r} has an encoded chunk of {most} bytes of "
                f"{spec.dtype.name}, expected whole bytes and at most {BLOCK}"
            )
        head = zstd.overhead(c.coding.itemsize)
        least, most = head + 1, head + most
    if not least <= c.nbytes <= most or not 0 <= c.offset <= size - c.nbytes:
        raise CorruptError(
            f"{path}: tensor {name!r} has a chunk of {c.nbytes} bytes at {c.offset} in a file of "
            f"{size}, expected {most} bytes{' at most' if least < most else ''} inside it"
        )
    if c.xxh3 is None or len(c.xxh3) != -(-c.nbytes // BLOCK):
        raise CorruptError(f"{path}: tensor {name!r} has a chunk without its checksums")


FilesIn = Callable[[str], Mapping[str, int]]
"""Names and sizes of the files in a directory: one request on an object store, where a look at each
file would be one for every file."""


def check_sizes(files_in: FilesIn, opened: Opened) -> Opened:
    """``opened`` with the places of its small files; every file must be there at its size.

    Raises:
        MissingError: One is not there.
        CorruptError: One has another size.
    """
    folders = {name.rpartition("/")[0] for name in opened.files} | {opened.save_id or ""}
    here: dict[str, int] = {}
    for folder in sorted(folders):
        found = files_in(join(opened.url, folder) if folder else opened.url)
        here |= {f"{folder}/{name}" if folder else name: size for name, size in found.items()}
    inside = frozenset(n for n in opened.small if f"{opened.save_id}/{n}" in here)
    opened = replace(opened, inside=inside)
    sizes = {
        name: here.get(opened.place(name).removeprefix(f"{opened.url}/")) for name in opened.files
    }
    gone = [name for name, size in sizes.items() if size is None]
    if gone:
        raise MissingError(_incomplete(opened, gone))
    for name, (nbytes, _) in opened.files.items():
        if sizes[name] != nbytes:
            raise CorruptError(
                f"{opened.place(name)}: {sizes[name]} bytes, the manifest says {nbytes}; the checkpoint "
                "is damaged"
            )
    return opened


def _incomplete(opened: Opened, gone: Sequence[str]) -> str:
    """What is said of files that are not there: of those of ranks, how many there are, and whose."""
    told = f"{opened.place(gone[0])}: the manifest names this file and it is not there"
    expected = sum(1 for name in opened.files if _RANK_FILE.search(name))
    found = [match for name in gone if (match := _RANK_FILE.search(name))]
    if found:
        ranks = sorted({int(match[1]) for match in found})
        shown = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if ranks[_MOST_RANKS:] else "")
        told += f"; expected {expected} files, found {expected - len(found)}: missing rank {shown}"
    return f"{told}; the checkpoint is incomplete"


def listed(store: Store, url: str) -> dict[str, int]:
    """Names and sizes of files; none where there is no directory, or something has just vanished."""
    try:
        return store.files(url)
    except MissingError:
        return {}


def header_digest(store: Store, url: str) -> int:
    """The digest of a rank file's header, length prefix included; of the prefix if it is impossible."""
    prefix = store.read(url, 0, 8)
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER, store.size(url) - 8):
        return digest(prefix)
    return digest(store.read(url, 0, 8 + length))


def file_digest(store: Store, opened: Opened, name: str) -> int:
    """The digest that the manifest keeps of a file: its header, or all of a small file."""
    url = opened.place(name)
    if "/" in name:
        return header_digest(store, url)
    return digest(store.read(url, 0, store.size(url)))


def check_files(store: Store, opened: Opened) -> None:
    """Every header and small file must be the one that the manifest describes, and config.json read.

    Raises:
        CorruptError: One is of another save, or damaged.
    """
    for name, expected, found in damaged_files(store, opened, list(opened.files)):
        raise CorruptError(
            f"{opened.place(name)}: checksum {to_hex(found)}, the manifest of save "
            f"{opened.save_id} says {to_hex(expected)}; the file is of another save, or damaged"
        )
    if "config.json" in opened.small:
        read_object(store, opened.place("config.json"))


def damaged_files(store: Store, opened: Opened, names: Sequence[str]) -> list[tuple[str, int, int]]:
    """(name, expected, found) of files whose header or content is not the one of this save."""
    out = []
    for name in names:
        expected, found = opened.files[name][1], file_digest(store, opened, name)
        if expected != found:
            out.append((name, expected, found))
    return out
