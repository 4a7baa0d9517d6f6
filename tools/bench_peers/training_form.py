"""The training side of a Qwen3-MoE checkpoint, as far as the peers need it: names, shapes, cuts."""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1}

_QKV = re.compile(r"(.*\.self_attn)\.[qkv]_proj\.weight")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")
_ROUTER = re.compile(r"(.*\.mlp)\.gate\.weight")
_ROWS = re.compile(r"(.*(qkv_proj|gate_up_proj|embed_tokens)|lm_head)\.weight")
_COLUMNS = re.compile(r".*(o_proj|down_proj)\.weight")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and safetensors dtype name of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """What the safetensors files of a directory hold, from their headers."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found |= {name: Tensor(e["dtype"], tuple(e["shape"])) for name, e in header.items()}
    return found


def training_tensors(folder: Path) -> dict[str, Tensor]:
    """The same bytes under training names: q, k and v in one tensor, experts stacked."""
    found: dict[str, Tensor] = {}
    experts: dict[str, int] = {}
    for name, tensor in stored_tensors(folder).items():
        rows, *rest = tensor.shape
        if match := _QKV.fullmatch(name):
            target = f"{match[1]}.qkv_proj.weight"
            rows += found[target].shape[0] if target in found else 0
            found[target] = Tensor(tensor.dtype, (rows, *rest))
        elif match := _EXPERT.fullmatch(name):
            target = f"{match[1]}.{'down' if match[2] == 'down' else 'gate_up'}_proj.weight"
            experts[target] = experts.get(target, 0) + 1
            found[target] = tensor
        elif match := _ROUTER.fullmatch(name):
            found[f"{match[1]}.router.weight"] = tensor
        else:
            found[name] = tensor
    return found | {name: _stack(found[name], name, count) for name, count in experts.items()}


def _stack(one: Tensor, name: str, count: int) -> Tensor:
    rows, columns = one.shape
    if ".gate_up_proj." in name:
        return Tensor(one.dtype, (count // 2, 2 * rows, columns))
    return Tensor(one.dtype, (count, rows, columns))


def cut_dim(name: str, shape: tuple[int, ...], cut: str) -> int | None:
    """The dim that a rank's share is cut on, None for a replica.

    Args:
        name: Training name.
        shape: Whole shape.
        cut: "rows" and "columns" cut that dim of everything that has it; "tp" is tensor
            parallelism: experts and column-parallel weights by rows, row-parallel ones by columns.
    """
    if cut == "rows":
        return 0
    if cut == "columns":
        return 1 if len(shape) > 1 else None
    if ".experts." in name or _ROWS.fullmatch(name):
        return 0
    return 1 if _COLUMNS.fullmatch(name) else None


def share(shape: tuple[int, ...], dim: int | None, rank: int, ranks: int) -> tuple[slice, ...]:
    """A rank's region by torch's chunk rule: ceil-size pieces, the last ones short or empty."""
    region = [slice(0, size) for size in shape]
    if dim is not None:
        step = -(-shape[dim] // ranks)
        begin = min(rank * step, shape[dim])
        region[dim] = slice(begin, min(begin + step, shape[dim]))
    return tuple(region)


def share_bytes(tensors: Mapping[str, Tensor], cut: str, rank: int, ranks: int) -> int:
    """Bytes of a rank's share of all tensors."""
    total = 0
    for name, tensor in tensors.items():
        region = share(tensor.shape, cut_dim(name, tensor.shape, cut), rank, ranks)
        count = prod(part.stop - part.start for part in region)
        total += count * DTYPE_BYTES[tensor.dtype]
    return total
