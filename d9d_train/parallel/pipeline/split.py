"""The backward pass of a stage, whole or in two parts: its input's gradient, then its weights'."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from d9d_kernels import gradmask

_LEAF = "torch::autograd::AccumulateGrad"
_COMPILED = "CompiledFunctionBackward"


def splits(stage: nn.Module) -> bool:
    """Whether a stage lets its backward pass be split: none of its modules says ``whole_backward = True``.

    What is recomputed should say it: each part would recompute all of it.
    """
    return not any(getattr(module, "whole_backward", False) for module in stage.modules())


_Group = tuple[list[Node], list[Any]]
"""Joints, and the leaves of all weights that hang on them."""


class Graph:
    """What a forward pass leaves for its backward pass, which is `whole`, or `inputs` and then `weights`.

    The nodes between output and input, the spine, give the input's gradient, and built-in operations on
    it compute nothing else meanwhile. Those that a weight hangs on, the joints, run once more for it, from
    the gradients that came to them the first time; `gradmask` tells Functions which part it is. Between
    the two, tensors that other nodes of the spine had saved are free.

    Where one joint of a weight lies behind another, the spine between them would run twice, so `inputs`
    gives that weight's gradient too. What is compiled gives all of its gradients at once: with it in the
    graph, `inputs` is a whole backward pass and `weights` is empty. A stage without an input owes nobody a
    gradient, so it is the other way round: `inputs` is empty, `weights` is whole.

    The output itself is not kept, so that its memory is free once it is sent.

    Args:
        hidden: The stage's input, a leaf; None at the first stage.
        split: Whether the pass is to come in two parts.
    """

    def __init__(self, hidden: torch.Tensor | None, *, split: bool) -> None:
        self._hidden = hidden
        self._out: GradientEdge | None = None
        self._saved = _Saved() if split and hidden is not None else None
        self._joints: list[_Joint] = []
        self._postponed: torch.Tensor | None = None

    def recording(self) -> AbstractContextManager[None]:
        """Surrounds the forward pass."""
        if self._saved is None:
            return nullcontext()
        return saved_tensors_hooks(self._saved.pack, self._saved.unpack)

    def end(self, out: torch.Tensor) -> None:
        """The forward pass gave this."""
        self._out = get_gradient_edge(out) if out.requires_grad else None

    def whole(self, grad: torch.Tensor) -> None:
        """The gradients of input and weights, from that of the output."""
        out, self._out = self._out, None
        if out is not None:
            torch.autograd.backward(out, grad)

    def inputs(self, grad: torch.Tensor) -> None:
        """The gradient of the input alone."""
        if self._hidden is None:
            self._postponed = grad
            return
        cut = None
        if self._saved is not None and self._out is not None:
            cut = _cut(self._out.node, get_gradient_edge(self._hidden).node)
        if cut is None:
            self.whole(grad)
        else:
            self._first(cut, grad)

    def weights(self) -> None:
        """The gradients of the weights, after `inputs`."""
        grad, self._postponed = self._postponed, None
        if grad is not None:
            self.whole(grad)
        while self._joints:
            self._joints.pop().run()

    def take(self) -> torch.Tensor | None:
        """The gradient of the input; None when the output does not depend on it."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            return None
        grad, hidden.grad = hidden.grad, None  # what is left of the graph holds the leaf
        return grad

    def _first(self, cut: "_Cut", grad: torch.Tensor) -> None:
        assert self._saved is not None and self._out is not None and self._hidden is not None  # noqa: S101, PT018 - for the type checker
        joints = [_Joint(nodes, leaves, cut.spine) for nodes, leaves in cut.groups]
        handles = [handle for joint in joints for handle in joint.watch(self._saved)]
        self._saved.recording = True
        try:
            with gradmask.only(cut.spine.__contains__):
                wanted = [self._hidden, *cut.early]
                torch.autograd.backward(self._out, grad, inputs=wanted, retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        self._saved.free()
        self._out, self._joints = None, joints


class _Kept:
    """A tensor that a node saved."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor


class _Saved:
    """Lets go of what a first part has read, other than in joints; a retained graph would hold all of it."""

    def __init__(self) -> None:
        self.recording = False
        self._joints: set[int] = set()  # threads of the engine that are in one
        self._read: list[_Kept] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(self, tensor: torch.Tensor) -> _Kept:
        """What a node holds; an output with its own node would never be free."""
        return _Kept(tensor.detach())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unpack(self, kept: _Kept) -> torch.Tensor:
        """What a node reads: in a joint for the first time, elsewhere for the only one."""
        if kept.tensor is None:
            raise RuntimeError(
                "what one part of a split backward pass read is read by the next; a module that computes "
                "again what it needs, or reads it by itself, has to say whole_backward = True"
            )
        if self.recording and get_ident() not in self._joints:
            self._read.append(kept)
        return kept.tensor

    def enter(self) -> None:
        """A joint begins."""
        self._joints.add(get_ident())

    def leave(self) -> None:
        """A joint is done."""
        self._joints.discard(get_ident())

    def free(self) -> None:
        """The first part is over."""
        self.recording = False
        for kept in self._read:
            kept.tensor = None
        self._read.clear()


class _Joint:
    """Nodes of the spine with weights in common, which run a second time, for these alone."""

    def __init__(self, nodes: Sequence[Node], leaves: Sequence[Any], spine: set[Node]) -> None:
        self._nodes = nodes
        self._weights = [leaf.variable for leaf in leaves]
        self._past = {node for joint in nodes for node in _behind(joint) if node in spine}
        self._grads: dict[Node, tuple[torch.Tensor | None, ...]] = {}

    def watch(self, saved: _Saved) -> Iterator[RemovableHandle]:
        """Hooks that keep what the nodes are given and read."""
        for node in self._nodes:
            yield node.register_prehook(partial(self._enter, node, saved))
            yield node.register_hook(lambda *_: saved.leave())

    def _enter(self, node: Node, saved: _Saved, grads: tuple[torch.Tensor | None, ...]) -> None:
        self._grads[node] = grads
        saved.enter()

    def run(self) -> None:
        """Add to the gradients of the weights."""
        given = [
            (GradientEdge(node, index), grad)
            for node, grads in self._grads.items()
            for index, grad in enumerate(grads)
            if grad is not None
        ]
        if not given:
            return
        edges, grads = zip(*given, strict=True)
        # Hooks of tensors have seen these gradients; what they give for them again does not count.
        handles = [node.register_prehook(partial(_same, own)) for node, own in self._grads.items()]
        try:
            with gradmask.only(lambda node: node not in self._past):
                torch.autograd.backward(edges, grads, inputs=self._weights)
        finally:
            for handle in handles:
                handle.remove()


def _same(grads: tuple[torch.Tensor | None, ...], _: object) -> tuple[torch.Tensor | None, ...]:
    return grads


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a graph is cut.

    Attributes:
        spine: The nodes that lead to the input, or to an early weight.
        early: Weights whose gradients come with that of the input.
        groups: Joints with weights in common, and these weights, disjoint from those of other groups.
    """

    spine: set[Node]
    early: list[torch.Tensor]
    groups: list[_Group]


def _cut(out: Node, hidden: Node) -> _Cut | None:
    """The cut of the graph behind an output; None where it has to run at once."""
    order = _ordered(out)
    if any(node.name() == _COMPILED for node in order):
        return None
    spine: set[Node] = set()
    leaves: dict[Node, dict[Node, None]] = {}  # of each node, beside the spine; ordered sets
    for node in order:
        behind = _behind(node)
        if node is hidden or any(n in spine for n in behind):
            spine.add(node)
        leaves[node] = {leaf: None for n in behind if n not in spine for leaf in leaves[n]}
        if node.name() == _LEAF and node is not hidden:
            leaves[node] = {node: None}
    if out not in spine:
        return None
    groups = _grouped({node: leaves[node] for node in order if node in spine and leaves[node]})
    early = [leaf for nodes, weights in groups if _chained(nodes, spine) for leaf in weights]
    spine.update(node for node in order if not leaves[node].keys().isdisjoint(early))
    late = [group for group in groups if group[1][0] not in spine]
    return _Cut(spine, [leaf.variable for leaf in early], late)


def _ordered(root: Node) -> list[Node]:
    """A node and all behind it, each after those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((n, False) for n in _behind(node))
    return order


def _behind(node: Node) -> list[Node]:
    return [n for n, _ in node.next_functions if n is not None]


def _grouped(joints: dict[Node, dict[Node, None]]) -> list[_Group]:
    """Joints that have a weight in common, together, with all of their weights."""
    group_of: dict[Node, _Group] = {}
    groups: dict[int, _Group] = {}
    for node, leaves in joints.items():
        group: _Group = ([node], [n for n in leaves if n not in group_of])
        for leaf in leaves:
            other = group_of.get(leaf)
            if other is not None and groups.pop(id(other), None) is not None:
                group[0].extend(other[0])
                group[1].extend(other[1])
        groups[id(group)] = group
        group_of.update(dict.fromkeys(group[1], group))
    return list(groups.values())


def _chained(nodes: Sequence[Node], spine: set[Node]) -> bool:
    """Whether one of these lies behind another."""
    wanted, seen = set(nodes), set()
    stack = [n for node in nodes for n in _behind(node)] if len(nodes) > 1 else []
    while stack:
        node = stack.pop()
        if node in wanted:
            return True
        if node in spine and node not in seen:
            seen.add(node)
            stack.extend(_behind(node))
    return False
