"""Writing our format: one or more files per owning rank, under the save id, and the manifest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from d9d_ckpt.codecs.checksum import digest
from d9d_ckpt.errors import MappingError
from d9d_ckpt.formats.base import Arrangement, Digests, OutFile, Record
from d9d_ckpt.formats.safetensors import by_alignment, encode_header
from d9d_ckpt.formats.sharded import MANIFEST, Manifest
from d9d_ckpt.tensors import Chunk, Entry, Target, TensorSpec

_LARGEST_FILE = 1 << 30
"""Bytes of a rank file: several files let several workers write one rank."""


@dataclass(frozen=True)
class ShardedSink:
    """Lays a checkpoint out by rank.

    Attributes:
        manifest: All of the manifest but tensors and files.
        specs: Every tensor, those without elements included.
    """

    manifest: Manifest
    specs: Mapping[str, TensorSpec]

    @property
    def save_id(self) -> str:
        return self.manifest.save_id

    @property
    def plain_headers(self) -> bool:
        return True

    def arrange(self, targets: Sequence[Target]) -> Arrangement:
        by_rank: dict[int, list[int]] = {}
        for number, target in enumerate(targets):
            by_rank.setdefault(target.rank, []).append(number)
        files: list[OutFile] = []
        places: list[tuple[int, int]] = [(0, 0)] * len(targets)
        for rank, numbers in sorted(by_rank.items()):
            parts = _parts(targets, numbers)
            for part, members in enumerate(parts):
                suffix = f"-{part + 1:05d}" if len(parts) > 1 else ""
                name = f"{self.manifest.save_id}/rank-{rank:05d}{suffix}.safetensors"
                ordered = by_alignment([(n, targets[n].spec) for n in members])
                members = [n for n, _ in ordered]
                entries = [
                    (_entry_name(t), TensorSpec(t.spec.dtype, t.box.shape))
                    for t in map(targets.__getitem__, members)
                ]
                if len({entry for entry, _ in entries}) < len(entries):
                    raise MappingError(
                        f"{name}: two entries would have one name; '#' in a tensor name clashes"
                    )
                header, offsets = encode_header(entries, {"save_id": self.manifest.save_id})
                for number, offset in zip(members, offsets, strict=True):
                    places[number] = (len(files), offset)
                end = len(header) + sum(spec.nbytes for _, spec in entries)
                files.append(OutFile(name, name, header, end, tuple(members)))
        return Arrangement(tuple(files), tuple(places))

    def header(self, arrangement: Arrangement, file: int, digests: Digests) -> bytes:
        return arrangement.files[file].header

    def record_name(self, arrangement: Arrangement) -> str:
        return MANIFEST

    def record(
        self,
        targets: Sequence[Target],
        arrangement: Arrangement,
        digests: Digests,
        small: Mapping[str, bytes],
    ) -> Record:
        chunks: dict[str, list[Chunk]] = {name: [] for name in self.specs}
        for number, target in enumerate(targets):
            file, offset = arrangement.places[number]
            chunks[target.name].append(
                Chunk(
                    target.box,
                    arrangement.files[file].name,
                    offset,
                    target.nbytes,
                    "none",
                    digests[number],
                )
            )
        entries = {name: Entry(spec, tuple(chunks[name])) for name, spec in self.specs.items()}
        files = {f.name: (f.nbytes, digest(f.header)) for f in arrangement.files}
        files |= {name: (len(content), digest(content)) for name, content in small.items()}
        manifest = replace(self.manifest, entries=entries, files=files)
        return Record(MANIFEST, manifest.encode())


def _entry_name(target: Target) -> str:
    return target.name if target.parts == 1 else f"{target.name}#{target.part}"


def _parts(targets: Sequence[Target], numbers: Sequence[int]) -> list[list[int]]:
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
