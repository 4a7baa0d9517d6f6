"""Tiny checkpoints written and read without d9d_ckpt, and its command line called in process."""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from d9d_ckpt.cli import main
from make_checkpoint import config_json, tensors, tiny

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Tensors = dict[str, torch.Tensor]


class Result(NamedTuple):
    """What a command has left: exit code and the two streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        return json.loads(self.out)


def cli(*argv: object) -> Result:
    """One command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(a) for a in argv])
    return Result(code, out.getvalue(), err.getvalue())


def convert(src: object, dst: object, to: str, *argv: object, workers: int = 1) -> dict[str, Any]:
    """A conversion that must succeed; its JSON report."""
    result = cli("convert", src, dst, "--to", to, "--json", "--workers", workers, *argv)
    assert result.code == 0, result.err
    return result.json


def refused(result: Result, code: int, *words: str) -> str:
    """The one-line message of a refusal, which must name ``words``."""
    assert result.code == code, result
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("d9d-ckpt: ")
    missing = [word for word in words if word not in lines[0]]
    assert not missing, (missing, lines[0])
    return lines[0]


class Model(NamedTuple):
    """Tensors with the names of the hub, and the config beside them."""

    tensors: Tensors
    config: dict[str, Any]


_SMALL = {
    "layers": 2,
    "hidden": 8,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 4,
    "intermediate": 6,
    "vocab": 10,
    "dtype": "float32",
}
_SPARSE = {"experts": 4, "moe_intermediate": 6}


def model(family: str, **sizes: Any) -> Model:
    """The smallest model of a family; no two elements are equal as long as the dtype tells them apart."""
    config = tiny(family)
    sparse = _SPARSE if config.experts else {}
    config = replace(config, **_SMALL | sparse | sizes)
    out, at = {}, 0
    for t in tensors(config):
        count = torch.Size(t.shape).numel()
        values = torch.arange(at + 1, at + count + 1).reshape(t.shape)
        out[t.name] = values.to(getattr(torch, config.dtype))
        at += count
    return Model(out, config_json(config))


def write_hf(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    *,
    shards: int = 1,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """A Hugging Face directory; with ``shards`` files and their index when that is above one."""
    path.mkdir(parents=True, exist_ok=True)
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        name = SINGLE if shards == 1 else f"{stem}-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard::shards]
        save_file(
            {n: weights[n].contiguous().clone() for n in mine},
            path / name,
            {"format": "pt"} if metadata is None else dict(metadata) or None,
        )
        weight_map |= dict.fromkeys(mine, name)
    if shards > 1:
        write_index(path, weight_map)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def write_model(path: Path, made: Model, *, shards: int = 1) -> Path:
    """`write_hf` of a `Model`."""
    return write_hf(path, made.tensors, made.config, shards=shards)


def write_index(path: Path, weight_map: Mapping[str, str]) -> None:
    """An index as the hub has it."""
    value = {"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}
    (path / INDEX).write_text(json.dumps(value))


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with any header and any data, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def read_file(path: Path) -> Tensors:
    """One file through the reference reader."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def metadata(path: Path) -> dict[str, str] | None:
    """The string metadata of one file."""
    with safe_open(path, "pt") as file:
        return file.metadata()


def read_hf(path: Path) -> Tensors:
    """A Hugging Face directory through its index and the reference reader."""
    if not (path / INDEX).exists():
        return read_file(path / SINGLE)
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    files = {name: read_file(path / name) for name in sorted(set(weight_map.values()))}
    assert sorted(weight_map) == sorted(n for f in files.values() for n in f)
    return {name: files[file][name] for name, file in weight_map.items()}


def manifest(path: Path) -> dict[str, Any]:
    """The manifest of a sharded checkpoint."""
    return json.loads((path / "manifest.json").read_text())


def read_ranks(path: Path) -> dict[int, Tensors]:
    """What each rank's files of a sharded checkpoint hold, by entry name."""
    out: dict[int, Tensors] = {}
    for file in sorted((path / manifest(path)["save_id"]).glob("*.safetensors")):
        out.setdefault(int(file.name[5:10]), {}).update(read_file(file))
    return out


def read_sharded(path: Path) -> Tensors:
    """Every tensor of a sharded checkpoint, put together by its manifest."""
    found, out = manifest(path), {}
    files = {n: read_file(path / n) for n in found["files"] if "/" in n}
    for name, entry in found["tensors"].items():
        chunks = entry["chunks"]
        parts = {c["file"]: files[c["file"]] for c in chunks}
        dtype = next((p.dtype for f in parts.values() for n, p in f.items()), torch.float32)
        whole = torch.zeros(entry["shape"], dtype=dtype)
        for number, c in enumerate(chunks):
            entries = files[c["file"]]
            part = entries[name] if len(chunks) == 1 else entries[f"{name}#{number}"]
            whole = whole.to(part.dtype)
            where = zip(c["start"], c["shape"], strict=True)
            whole[tuple(slice(a, a + n) for a, n in where)] = part
        out[name] = whole
    return out


def equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Same names, dtypes, shapes and bits."""
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)) for t in (a, b)]
    return torch.equal(*(t.view(torch.uint8) for t in flat))


def training(made: Model) -> Tensors:
    """The training tensors of a split checkpoint, in eager torch and without any code of ours."""
    left, config = dict(made.tensors), made.config
    out: Tensors = {}
    groups = config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for part in ("weight", "bias"):
            if f"{at}self_attn.q_proj.{part}" in left:
                q, k, v = (left.pop(f"{at}self_attn.{x}_proj.{part}") for x in "qkv")
                rows = [x.chunk(groups) for x in (q, k, v)]
                out[f"{at}self_attn.qkv_proj.{part}"] = torch.cat(
                    [x for group in zip(*rows, strict=True) for x in group]
                )
        if f"{at}mlp.gate_proj.weight" in left:
            gate, up = (left.pop(f"{at}mlp.{x}_proj.weight") for x in ("gate", "up"))
            out[f"{at}mlp.gate_up_proj.weight"] = _pairs(gate, up)
        for stem, names in (
            ("mlp", ("gate_proj", "up_proj", "down_proj")),
            ("block_sparse_moe", ("w1", "w3", "w2")),
        ):
            if f"{at}{stem}.experts.0.{names[0]}.weight" in left:
                out |= _experts(left, at, stem, names)
    return out | left


def _experts(left: Tensors, at: str, stem: str, names: Sequence[str]) -> Tensors:
    count = sum(n.startswith(f"{at}{stem}.experts.") for n in left) // 3
    gates, ups, downs = (
        [left.pop(f"{at}{stem}.experts.{e}.{n}.weight") for e in range(count)] for n in names
    )
    return {
        f"{at}mlp.router.weight": left.pop(f"{at}{stem}.gate.weight"),
        f"{at}mlp.experts.gate_up_proj.weight": torch.stack(
            [_pairs(g, u) for g, u in zip(gates, ups, strict=True)]
        ),
        f"{at}mlp.experts.down_proj.weight": torch.stack(downs),
    }


def _pairs(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack([row for pair in zip(gate, up, strict=True) for row in pair])


def fused(made: Model) -> Model:
    """A split mixture as transformers 5 stores it: all gate rows, then all up rows, no ``.weight``."""
    left, out = dict(made.tensors), {}
    names = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
    for layer in range(made.config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for stem, (g, u, d) in zip(("mlp", "block_sparse_moe"), names, strict=True):
            if f"{at}{stem}.experts.0.{g}.weight" not in left:
                continue
            count = sum(n.startswith(f"{at}{stem}.experts.") for n in left) // 3
            gates, ups, downs = (
                [left.pop(f"{at}{stem}.experts.{e}.{n}.weight") for e in range(count)]
                for n in (g, u, d)
            )
            out[f"{at}mlp.gate.weight"] = left.pop(f"{at}{stem}.gate.weight")
            pairs = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
            out[f"{at}mlp.experts.gate_up_proj"] = torch.stack(pairs)
            out[f"{at}mlp.experts.down_proj"] = torch.stack(downs)
    return Model(left | out, made.config)


def flip(path: Path, *offsets: int) -> None:
    """One bit changed at each of ``offsets``; negative ones count from the end."""
    raw = bytearray(path.read_bytes())
    for offset in offsets:
        raw[offset] ^= 1
    path.write_bytes(raw)


def everything(path: Path) -> dict[str, bytes]:
    """Every file below ``path`` with its content, hidden ones included."""
    files: Iterable[Path] = path.rglob("*")
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(files) if f.is_file()}
