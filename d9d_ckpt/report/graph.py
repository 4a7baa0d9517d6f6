"""One tensor's graph as an indented tree and as Graphviz."""

from collections.abc import Iterator, Mapping

from d9d_ckpt.graph.node import Leaf, Node
from d9d_ckpt.graph.ops import Cat, Index, Narrow, Permute
from d9d_ckpt.tensors import Chunk

_SHOWN = 6
"""Inputs of one node that the tree shows; an expert stack has hundreds alike."""


def as_text(name: str, node: Node, names: Mapping[int, str]) -> str:
    """The tree of ``node``, the target first, its sources indented below."""
    lines = [f"{name}: {_spec(node)}"]
    lines.extend(_lines(node, names, 1))
    return "\n".join(lines)


def _lines(node: Node, names: Mapping[int, str], depth: int) -> Iterator[str]:
    indent = "  " * depth
    yield f"{indent}{_label(node, names)} -> {_spec(node)}"
    if len(node.inputs) <= _SHOWN:
        for x in node.inputs:
            yield from _lines(x, names, depth + 1)
        return
    for x in node.inputs[: _SHOWN - 1]:
        yield from _lines(x, names, depth + 1)
    yield f"{indent}  ... {len(node.inputs) - _SHOWN} more inputs"
    yield from _lines(node.inputs[-1], names, depth + 1)


def as_dot(name: str, node: Node, names: Mapping[int, str]) -> str:
    """The graph for Graphviz; shared nodes appear once."""
    numbers: dict[Node, int] = {}
    lines = ["digraph {", "  rankdir=LR;", "  node [shape=box, fontname=monospace];"]
    todo = [node]
    while todo:
        at = todo.pop()
        if at in numbers:
            continue
        numbers[at] = len(numbers)
        todo.extend(at.inputs)
    for at, number in numbers.items():
        label = _quoted(f"{_label(at, names)}\n{_spec(at)}")
        lines.append(f"  n{number} [label={label}];")
        lines.extend(f"  n{numbers[x]} -> n{number};" for x in at.inputs)
    lines.append(f"  target [label={_quoted(name)}, style=bold];")
    lines.append(f"  n{numbers[node]} -> target;")
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _spec(node: Node) -> str:
    return f"{node.dtype.name} {list(node.shape)}"


def _label(node: Node, names: Mapping[int, str]) -> str:
    if isinstance(node, Leaf):
        chunk = node.source
        if not isinstance(chunk, Chunk):
            return "leaf"
        file = chunk.file.rsplit("/", 1)[-1]
        return f"read {names.get(id(chunk), '?')} from {file} at {chunk.offset}"
    if isinstance(node, Permute):
        return f"permute {list(node.order)}"
    if isinstance(node, Narrow):
        return f"narrow dim {node.dim} [{node.start}, {node.start + node.shape[node.dim]})"
    if isinstance(node, Cat):
        return f"cat of {len(node.inputs)} along dim {node.dim}"
    if isinstance(node, Index):
        return f"index dim {node.dim} by {len(node.index)} rows in {len(node.runs)} runs"
    return type(node).__name__.lower()
