"""Writing our format: one or more files per owning rank, under the save id, and the manifest."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from d9d_ckpt.codecs import zstd
from d9d_ckpt.codecs.checksum import digest
from d9d_ckpt.errors import MappingError
from d9d_ckpt.formats.base import Arrangement, Content, OutFile, Record
from d9d_ckpt.formats.safetensors import by_alignment, encode_header
from d9d_ckpt.formats.sharded import MANIFEST, Manifest
from d9d_ckpt.tensors import DTYPES, Chunk, Coding, Entry, Target, TensorSpec

_LARGEST_FILE = 1 << 30
"""Bytes of a rank file: several files let several workers write one rank."""


@dataclass(frozen=True)
class ShardedSink:
    """Lays a checkpoint out by rank.

    Attributes:
        manifest: All of the manifest but tensors and files.
        specs: Every tensor, those without elements included.
        columns: Where chunks are encoded: the targets that one worker writes, each column to files of
            its own, since nobody knows beforehand where in a file a chunk will begin.
    """

    manifest: Manifest
    specs: Mapping[str, TensorSpec]
    columns: Sequence[Sequence[int]] | None = None

    @property
    def save_id(self) -> str:
        return self.manifest.save_id

    @property
    def plain_headers(self) -> bool:
        return True

    def arrange(self, targets: Sequence[Target]) -> Arrangement:
        files: list[OutFile] = []
        places: list[tuple[int, int]] = [(0, 0)] * len(targets)
        for rank, parts in sorted(self._parts(targets).items()):
            for part, members in enumerate(parts):
                suffix = f"-{part + 1:05d}" if len(parts) > 1 else ""
                name = f"{self.save_id}/rank-{rank:05d}{suffix}.safetensors"
                if self.columns is None:
                    file, offsets = self._plain(name, targets, members)
                else:
                    file, offsets = self._encoded(name, targets, members)
                for number, offset in zip(file.targets, offsets, strict=True):
                    places[number] = (len(files), offset)
                files.append(file)
        return Arrangement(tuple(files), tuple(places))

    def header(self, content: Content, file: int) -> bytes:
        out = content.arrangement.files[file]
        if self.columns is None:
            return out.header
        order = sorted(out.targets, key=lambda n: content.extent(n).offset)
        entries = [
            (_entry_name(content.targets[n]), _stored(content.extent(n).nbytes)) for n in order
        ]
        return encode_header(entries, self._metadata, room=len(out.header))[0]

    def record_name(self, arrangement: Arrangement) -> str:
        return MANIFEST

    def record(self, content: Content) -> Record | None:
        arrangement, small = content.arrangement, content.small
        chunks: dict[str, list[Chunk]] = {name: [] for name in self.specs}
        for number, target in enumerate(content.targets):
            file = arrangement.files[arrangement.places[number][0]].name
            offset, nbytes = content.extent(number)
            coding, digests = self._coding(target), content.digests[number]
            chunk = Chunk(target.box, file, offset, nbytes, coding, digests)
            chunks[target.name].append(chunk)
        entries = {name: Entry(spec, tuple(chunks[name])) for name, spec in self.specs.items()}
        files = {
            f.name: (content.nbytes(number), digest(self.header(content, number)))
            for number, f in enumerate(arrangement.files)
        }
        files |= {name: (len(text), digest(text)) for name, text in small.items()}
        manifest = replace(self.manifest, entries=entries, files=files)
        return Record(MANIFEST, manifest.encode())

    @property
    def _metadata(self) -> dict[str, str]:
        return {"save_id": self.save_id}

    def _coding(self, target: Target) -> Coding | None:
        if self.columns is None:
            return None
        return Coding(zstd.NAME, target.spec.dtype.itemsize, target.nbytes)

    def _parts(self, targets: Sequence[Target]) -> dict[int, list[list[int]]]:
        """The targets of each rank, by file."""
        if self.columns is None:
            whole = _by_rank(targets, range(len(targets)))
            return {rank: _split(targets, numbers) for rank, numbers in whole.items()}
        out: dict[int, list[list[int]]] = {}
        for column in self.columns:
            for rank, numbers in _by_rank(targets, column).items():
                out.setdefault(rank, []).append(numbers)
        return out

    def _plain(
        self, name: str, targets: Sequence[Target], members: Sequence[int]
    ) -> tuple[OutFile, list[int]]:
        """A file whose layout is known, and the first byte of each of its targets."""
        ordered = by_alignment([(n, targets[n].spec) for n in members])
        numbers = tuple(n for n, _ in ordered)
        entries = [(_entry_name(t), _spec(t)) for t in map(targets.__getitem__, numbers)]
        _check_names(name, entries)
        header, offsets = encode_header(entries, self._metadata)
        end = len(header) + sum(spec.nbytes for _, spec in entries)
        return OutFile(name, name, header, end, numbers), offsets

    def _encoded(
        self, name: str, targets: Sequence[Target], members: Sequence[int]
    ) -> tuple[OutFile, list[int]]:
        """A file with room for the header of whatever its targets will take."""
        entries = []
        for target in map(targets.__getitem__, members):
            most = target.nbytes + zstd.overhead(target.spec.dtype.itemsize)
            entries.append((_entry_name(target), _stored(most)))
        _check_names(name, entries)
        total = sum(spec.nbytes for _, spec in entries)
        room = len(encode_header(entries, self._metadata, start=total)[0])
        return OutFile(name, name, bytes(room), room, tuple(members)), [room] * len(members)


def _check_names(file: str, entries: Sequence[tuple[str, TensorSpec]]) -> None:
    if len({name for name, _ in entries}) < len(entries):
        raise MappingError(f"{file}: two entries would have one name; '#' in a tensor name clashes")


def _entry_name(target: Target) -> str:
    return target.name if target.parts == 1 else f"{target.name}#{target.part}"


def _spec(target: Target) -> TensorSpec:
    return TensorSpec(target.spec.dtype, target.box.shape)


def _stored(nbytes: int) -> TensorSpec:
    """What any reader sees of an encoded chunk."""
    return TensorSpec(DTYPES["U8"], (nbytes,))


def _by_rank(targets: Sequence[Target], numbers: Iterable[int]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for number in numbers:
        out.setdefault(targets[number].rank, []).append(number)
    return out


def _split(targets: Sequence[Target], numbers: Sequence[int]) -> list[list[int]]:
    """``numbers`` in files of about equal bytes, none much above the largest."""
    total = sum(targets[n].nbytes for n in numbers)
    size = total / max(1, -(-total // _LARGEST_FILE))
    parts: list[list[int]] = [[]]
    done = 0
    for n in numbers:
        if parts[-1] and done + targets[n].nbytes / 2 > size * len(parts):
            parts.append([])
        parts[-1].append(n)
        done += targets[n].nbytes
    return parts
