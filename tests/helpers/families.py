"""Tiny checkpoints of every family as torch tensors, and the mapping executed on them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from helpers.evaluate import evaluate

from d9d_ckpt.graph import ops
from d9d_ckpt.graph.node import Node
from d9d_ckpt.models.family import Mapped, to_huggingface, to_training
from d9d_ckpt.models.registry import family
from d9d_ckpt.tensors import TensorSpec, dtype_from_torch
from make_checkpoint import Config, config_json, tensors, tiny

DENSE = ("llama", "qwen2", "qwen3")
SPARSE = ("qwen3_moe", "mixtral")
Tensors = dict[str, torch.Tensor]


def small(name: str, **sizes: Any) -> Config:
    """The family's tiny model with two layers, and any size set."""
    return replace(tiny(name), **{"layers": 2, "vocab": 20, "dtype": "float32", **sizes})


def counted(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """A tensor of each shape, no two elements of all of them equal."""
    out, at = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        out[name] = torch.arange(at, at + count, dtype=torch.float64).reshape(shape)
        at += count
    return out


def checkpoint(config: Config) -> Tensors:
    """What the hub's checkpoint of ``config`` holds, with counted values."""
    return counted({t.name: t.shape for t in tensors(config)})


def nodes_of(stored: Tensors) -> dict[str, Node]:
    """A leaf for each tensor, its name as source."""
    return {
        name: ops.leaf(name, TensorSpec(dtype_from_torch(str(t.dtype)), tuple(t.shape)))
        for name, t in stored.items()
    }


def forward(config: Config, stored: Tensors, experts: str | None = None, **raw: Any) -> Mapped:
    """The training graph of a Hugging Face checkpoint; ``raw`` overrides keys of config.json."""
    of = family(config.family)
    layout = of.experts_layout(stored) if experts is None else experts
    return to_training(of, of.config(config_json(config) | raw), layout, nodes_of(stored))


def backward(config: Config, stored: Tensors, experts: str, **raw: Any) -> Mapped:
    """The Hugging Face graph of training tensors."""
    of = family(config.family)
    return to_huggingface(of, of.config(config_json(config) | raw), experts, nodes_of(stored))


def read(mapped: Mapped, stored: Tensors) -> Tensors:
    """Every target of a mapping, executed."""
    return {name: evaluate(node, stored) for name, node in mapped.nodes.items()}


def equal(a: Tensors, b: Tensors) -> bool:
    """Same names and the same values."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
