"""Writing a Hugging Face directory: shards under temporary names, the index last."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from d9d_ckpt.codecs.checksum import to_hex
from d9d_ckpt.formats.base import Arrangement, Content, OutFile, Record
from d9d_ckpt.formats.huggingface import (
    CHECKSUMS,
    HEADER_CHECKSUM,
    INDEX,
    SINGLE,
    index_json,
    seal,
)
from d9d_ckpt.formats.safetensors import by_alignment, encode_header
from d9d_ckpt.tensors import BLOCK, Target, TensorSpec


@dataclass(frozen=True)
class HuggingFaceSink:
    """Lays a checkpoint out as the hub has it, checksums in each file's metadata.

    Attributes:
        save_id: Marks temporary names.
        max_shard_size: Bytes of tensors in a file at most, unless one tensor is larger.
        metadata: String metadata for every file.
        taken: Names that files of a checkpoint have which stays until this one is complete.
    """

    save_id: str
    max_shard_size: int
    metadata: Mapping[str, str]
    taken: Collection[str] = ()

    @property
    def plain_headers(self) -> bool:
        return False

    def arrange(self, targets: Sequence[Target]) -> Arrangement:
        shards = self._shards(targets)
        files = []
        places: list[tuple[int, int]] = [(0, 0)] * len(targets)
        for number, (name, members) in enumerate(
            zip(self._names(len(shards)), shards, strict=True)
        ):
            ordered = by_alignment([(n, targets[n].spec) for n in members])
            members = [n for n, _ in ordered]
            entries = [(targets[n].name, targets[n].spec) for n in members]
            blank = {
                **self.metadata,
                HEADER_CHECKSUM: "0" * 16,
                CHECKSUMS: "0" * 16 * sum(_blocks(spec) for _, spec in entries),
            }
            header, offsets = encode_header(entries, blank)
            for n, offset in zip(members, offsets, strict=True):
                places[n] = (number, offset)
            nbytes = len(header) + sum(spec.nbytes for _, spec in entries)
            files.append(OutFile(name, f".{self.save_id}.{name}", header, nbytes, tuple(members)))
        return Arrangement(tuple(files), tuple(places))

    def _names(self, count: int) -> list[str]:
        """The hub's names, or, where those are taken, names that only an index tells of."""
        if count == 1 and SINGLE not in self.taken:
            return [SINGLE]
        usual, unique = (
            [f"{stem}-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
            for stem in ("model", f"model-{self.save_id}")
        )
        return unique if set(usual) & set(self.taken) or count == 1 else usual

    def header(self, content: Content, file: int) -> bytes:
        out = content.arrangement.files[file]
        text = "".join(to_hex(x) for n in out.targets for x in content.digests[n])
        key = f'"{CHECKSUMS}":"'
        full = out.header.replace(f"{key}{'0' * len(text)}".encode(), f"{key}{text}".encode(), 1)
        return full[:8] + seal(full[8:])

    def record_name(self, arrangement: Arrangement) -> str:
        return SINGLE if _single(arrangement) else INDEX

    def record(self, content: Content) -> Record | None:
        files, targets = content.arrangement.files, content.targets
        if _single(content.arrangement):
            return None
        weight_map = {targets[n].name: file.name for file in files for n in file.targets}
        return Record(INDEX, index_json(weight_map, sum(t.nbytes for t in targets)))

    def _shards(self, targets: Sequence[Target]) -> list[list[int]]:
        shards: list[list[int]] = [[]]
        filled = 0
        for number, target in enumerate(targets):
            if shards[-1] and filled + target.nbytes > self.max_shard_size:
                shards.append([])
                filled = 0
            shards[-1].append(number)
            filled += target.nbytes
        return shards


def _single(arrangement: Arrangement) -> bool:
    """Whether a file makes the checkpoint by itself."""
    return [file.name for file in arrangement.files] == [SINGLE]


def _blocks(spec: TensorSpec) -> int:
    return -(-spec.nbytes // BLOCK)
