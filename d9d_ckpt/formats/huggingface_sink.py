"""Writing a Hugging Face directory: shards under temporary names, the index last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from d9d_ckpt.codecs.checksum import to_hex
from d9d_ckpt.formats.base import Arrangement, Digests, OutFile, Record
from d9d_ckpt.formats.huggingface import CHECKSUMS, INDEX, SINGLE, index_json
from d9d_ckpt.formats.safetensors import by_alignment, encode_header
from d9d_ckpt.tensors import BLOCK, Target, TensorSpec


@dataclass(frozen=True)
class HuggingFaceSink:
    """Lays a checkpoint out as the hub has it, checksums in each file's metadata.

    Attributes:
        save_id: Marks temporary names.
        max_shard_size: Bytes of tensors in a file at most, unless one tensor is larger.
        metadata: String metadata for every file.
    """

    save_id: str
    max_shard_size: int
    metadata: Mapping[str, str]

    @property
    def plain_headers(self) -> bool:
        return False

    def arrange(self, targets: Sequence[Target]) -> Arrangement:
        shards = self._shards(targets)
        files = []
        places: list[tuple[int, int]] = [(0, 0)] * len(targets)
        for number, members in enumerate(shards):
            name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) == 1:
                name = SINGLE
            ordered = by_alignment([(n, targets[n].spec) for n in members])
            members = [n for n, _ in ordered]
            entries = [(targets[n].name, targets[n].spec) for n in members]
            blank = {
                **self.metadata,
                CHECKSUMS: "0" * 16 * sum(_blocks(spec) for _, spec in entries),
            }
            header, offsets = encode_header(entries, blank)
            for n, offset in zip(members, offsets, strict=True):
                places[n] = (number, offset)
            nbytes = len(header) + sum(spec.nbytes for _, spec in entries)
            files.append(OutFile(name, f".{self.save_id}.{name}", header, nbytes, tuple(members)))
        return Arrangement(tuple(files), tuple(places))

    def header(self, arrangement: Arrangement, file: int, digests: Digests) -> bytes:
        out = arrangement.files[file]
        text = "".join(to_hex(x) for n in out.targets for x in digests[n])
        key = f'"{CHECKSUMS}":"'
        return out.header.replace(f"{key}{'0' * len(text)}".encode(), f"{key}{text}".encode(), 1)

    def record_name(self, arrangement: Arrangement) -> str:
        return INDEX if len(arrangement.files) > 1 else SINGLE

    def record(
        self,
        targets: Sequence[Target],
        arrangement: Arrangement,
        digests: Digests,
        small: Mapping[str, bytes],
    ) -> Record | None:
        if len(arrangement.files) == 1:
            return None
        weight_map = {
            targets[n].name: file.name for file in arrangement.files for n in file.targets
        }
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


def _blocks(spec: TensorSpec) -> int:
    return -(-spec.nbytes // BLOCK)
