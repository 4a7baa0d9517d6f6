"""Written rank files, opened with safetensors alone, against rows and owners written by hand.

Sources are tiny Hugging Face checkpoints whose elements say where they are from. A label such as
``q3`` is row 3 of q_proj, ``2g0`` row 0 of expert 2's gate, ``o1[2:4]`` columns 2 and 3 of o_proj's
row 1; ``q0..2`` is short for ``q0 q1 q2``.
"""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import d9d_ckpt
from d9d_ckpt.errors import CorruptError, LayoutError, MappingError
from d9d_ckpt.layout.topology import Topology
from make_checkpoint import Config, config_json, tensors

ROW, TENSOR = 2**16, 2**34
"""What a row and a tensor count for in an element; float64 holds the sum exactly."""

WIDE = 8192
"""Columns of which one row of float64 is 64 KiB, the least that is cut over its owners."""

LETTERS = {
    "embed_tokens": "e", "lm_head": "h", "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
    "gate_proj": "g", "up_proj": "u", "down_proj": "d", "w1": "g", "w3": "u", "w2": "d", "gate": "r",
    "q_norm": "Q", "k_norm": "K", "input_layernorm": "a", "post_attention_layernorm": "b", "norm": "n",
}  # fmt: skip

AT = "model.layers.0."
QKV = AT + "self_attn.qkv_proj.weight"
GATE_UP = AT + "mlp.gate_up_proj.weight"
EXPERTS_UP = AT + "mlp.experts.gate_up_proj.weight"
EXPERTS_DOWN = AT + "mlp.experts.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"

DENSE = Config(
    family="llama", layers=1, hidden=4, heads=4, kv_heads=2, head_dim=2, intermediate=6, vocab=8,
    dtype="float32",
)  # fmt: skip
SPARSE = replace(DENSE, family="qwen3_moe", experts=4, moe_intermediate=6, experts_per_token=2)


# -- sources ----------------------------------------------------------------------------------


class Source:
    """A Hugging Face checkpoint written by safetensors, its elements coded."""

    def __init__(self, path, config, *, fused=False, drop=(), add=None, values=None, **raw):
        shapes = {t.name: t.shape for t in tensors(config)} | (add or {})
        self.path, self.names = path, list(shapes)
        stored = {
            name: coded(number, shape)
            for number, (name, shape) in enumerate(shapes.items())
            if name not in drop
        }
        stored |= values or {}
        path.mkdir()
        save_file(fuse(stored) if fused else stored, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config_json(config) | raw))

    def cut(self, layout="", **settings):
        url = self.path.with_name(f"{self.path.name}-sharded")
        d9d_ckpt.convert(
            str(self.path), str(url), to="sharded", layout=layout, workers=1, **settings
        )
        return Shards(url, self.names)


def coded(number, shape):
    rows = torch.arange(shape[0], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1)) * ROW
    return number * TENSOR + rows + torch.arange(shape[1] if len(shape) > 1 else 1)


def fuse(split):
    """As transformers 5 keeps experts: [E, 2F, H] of gate rows, then up rows, and [E, H, F]."""
    out, experts = {}, {}
    for name, tensor in split.items():
        at, found, rest = name.partition(".mlp.experts.")
        if not found:
            out[name] = tensor
        else:
            expert, part, _ = rest.split(".")
            experts.setdefault(at, {})[int(expert), part] = tensor
    for at, parts in experts.items():
        count = len(parts) // 3
        out[f"{at}.mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in range(count)]
        )
        out[f"{at}.mlp.experts.down_proj"] = torch.stack(
            [parts[e, "down_proj"] for e in range(count)]
        )
    return out


# -- what was written -------------------------------------------------------------------------


class Shards:
    """A sharded checkpoint's rank files and manifest, read without d9d_ckpt."""

    def __init__(self, url, names):
        self.url, self.source_names = url, names
        self.manifest = json.loads((url / "manifest.json").read_bytes())
        self.folder = url / self.manifest["save_id"]
        self.ranks = {number(path): load_file(path) for path in sorted(self.folder.iterdir())}

    def stored(self, name):
        """[(chunk number, rank, tensor)], in the order of the chunks."""
        found = []
        for rank, entries in self.ranks.items():
            for entry, tensor in entries.items():
                stem, _, chunk = entry.partition("#")
                if stem == name:
                    found.append((int(chunk or 0), rank, tensor))
        return sorted(found, key=lambda item: item[0])

    def rows(self, name):
        """{rank: its rows of the tensor, in the order of its chunks}."""
        out = {}
        for _, rank, tensor in self.stored(name):
            out.setdefault(rank, []).extend(labels(tensor, name, self.source_names))
        return {rank: " ".join(rows) for rank, rows in sorted(out.items())}

    def owners(self, name):
        """{the rows of a chunk: the rank that stores it}; a chunk that is stored twice fails."""
        out = {}
        for _, rank, tensor in self.stored(name):
            rows = " ".join(labels(tensor, name, self.source_names))
            assert rows not in out
            out[rows] = rank
        return out


def number(path: Path) -> int:
    return int(re.fullmatch(r"rank-(\d{5})\.safetensors", path.name)[1])


def labels(tensor, target, names):
    """The rows of a stored box; every element is read, and its layer must be its target's."""
    flat = tensor.to(torch.int64)
    flat = flat.reshape(-1, flat.shape[-1] if flat.dim() > 1 else 1)
    first, last = flat[:, 0], flat[:, -1]
    assert torch.equal(flat, first[:, None] + torch.arange(flat.shape[1])), target
    out = []
    for code, end in zip(first.tolist(), last.tolist(), strict=True):
        name, row, column = names[code // TENSOR], code % TENSOR // ROW, code % ROW
        assert layer_of(name) == layer_of(target)
        whole = column == 0 and (tensor.dim() == 1 or end % ROW == widths[name] - 1)
        span = "" if whole else f"[{column}:{end % ROW + 1}]"
        out.append(f"{letter(name)}{row}{span}")
    return out


def layer_of(name):
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def letter(name):
    *_, module, _ = name.split(".")
    expert = re.search(r"\.experts\.(\d+)\.", name)
    return (expert[1] if expert else "") + LETTERS[module]


def rows(text):
    """``q0..2 k0`` written out: ``q0 q1 q2 k0``."""
    out = []
    for item in text.split():
        stem, dots, last = item.partition("..")
        head, first = re.fullmatch(r"(\d*[a-zA-Z])(\d+)(?:\[.*)?", stem).groups()
        end = int(last) if dots else int(first)
        out += [f"{head}{n}" for n in range(int(first), end + 1)] if dots else [item]
    return " ".join(out)
