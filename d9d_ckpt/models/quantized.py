"""Block-scaled weights of Hugging Face checkpoints: which scale belongs to which weight."""

from collections.abc import Mapping
from typing import Any

from d9d_ckpt.errors import MappingError
from d9d_ckpt.graph import ops
from d9d_ckpt.graph.node import Leaf, Node
from d9d_ckpt.tensors import DType, brief

_SUFFIXES = ("_scale_inv", "_scale", ".scale", "_scales")
"""How files name the scale of ``X``: DeepSeek and Qwen, compressed-tensors, DeepSeek V3.2, others."""

QUANTIZED = ("F8_", "F6_", "F4")
"""How the names of dtypes begin that mean nothing without a scale."""

_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
_BLOCK = (128, 128)
_LARGEST_BLOCK = 1 << 20


def dequantized(
    nodes: Mapping[str, Node], config: Mapping[str, Any], dtype: DType
) -> dict[str, Node]:
    """``nodes`` with every fp8 weight times its scales as ``dtype``, rounded once, and no scales.

    Args:
        nodes: The tensors of a Hugging Face checkpoint.
        config: Its config.json, for the block size.
        dtype: A floating dtype.

    Raises:
        MappingError: A weight without a scale or with two, a scale without an fp8 weight, scales of
            another shape than the blocks make, or a quantisation that is not known.
    """
    block = _block(config)
    scale_of = _scales(nodes)
    used = set(scale_of.values())
    out: dict[str, Node] = {}
    for name, node in nodes.items():
        if name in used:
            continue
        if node.dtype.name not in _FP8:
            if node.dtype.name.startswith(QUANTIZED):
                raise MappingError(f"tensor {name!r}: {node.dtype.name} is not dequantised yet")
            out[name] = node
            continue
        if len(node.shape) < 2:
            raise MappingError(f"tensor {name!r}: fp8 of shape {list(node.shape)} is no matrix")
        if name not in scale_of:
            raise MappingError(
                f"tensor {name!r} is {node.dtype.name} and has no scale ({name}_scale_inv, "
                f"{name}_scale): its values are unknown; look for the missing file"
            )
        scale = nodes[scale_of[name]]
        try:
            values = ops.dequantize(node, _shaped(scale, node), _fitting(scale, node, block))
        except MappingError as error:
            raise MappingError(f"tensor {name!r} with {scale_of[name]!r}: {error}") from error
        out[name] = ops.cast(values, dtype)
    return out


def _block(config: Mapping[str, Any]) -> tuple[int, int]:
    quantization = config.get("quantization_config")
    size = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if size is None:
        return _BLOCK
    if (
        not isinstance(size, list)
        or len(size) != 2
        or any(type(n) is not int or not 1 <= n <= _LARGEST_BLOCK for n in size)
    ):
        raise MappingError(f"config.json: weight_block_size must be two sizes, not {brief(size)}")
    return size[0], size[1]


def _scales(nodes: Mapping[str, Node]) -> dict[str, str]:
    """Weight to the name of its scale."""
    out: dict[str, str] = {}
    for name in nodes:
        for suffix in _SUFFIXES:
            weight = name.removesuffix(suffix)
            if suffix == ".scale" and weight != name and weight not in nodes:
                weight += ".weight"
            if weight == name or weight not in nodes:
                continue
            if nodes[weight].dtype.name not in _FP8:
                raise MappingError(
                    f"tensor {name!r} scales {weight!r}, which is {nodes[weight].dtype.name}, not fp8; "
                    "is it scaled already?"
                )
            if weight in out:
                raise MappingError(
                    f"tensor {weight!r} has two scales: {out[weight]!r} and {name!r}"
                )
            out[weight] = name
            break
    return out


def _fitting(scale: Node, weight: Node, block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns under one scale: one for all, one a row, or blocks."""
    rows, cols = weight.shape[-2:]
    if scale.spec.numel == 1:
        return rows, cols
    if scale.shape[-2:] == (rows, 1):
        return 1, cols
    return block


def _shaped(scale: Node, weight: Node) -> Node:
    """A scale that is one number, with as many dims as its weight."""
    if scale.spec.numel == 1 and isinstance(scale, Leaf):
        return ops.leaf(scale.source, scale.spec._replace(shape=(1,) * len(weight.shape)))
    return scale
