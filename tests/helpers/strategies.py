"""Random graphs as data, so that one program runs lazily, in eager torch, and over other leaves."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from d9d_ckpt.graph import build, ops
from d9d_ckpt.graph.build import LazyTensor
from d9d_ckpt.graph.pieces import Digit, Piece
from d9d_ckpt.layout.placement import Cut, Heads
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.tensors import Region, TensorSpec, dtype_from_torch

FLOATS = ("float64", "float32", "float16", "bfloat16")
BIJECTIONS = ("cat", "stack", "permute", "transpose", "reshape", "index_select")
MOVES = (*BIJECTIONS, "reshape", "split", "unbind", "narrow", "pad", "getitem", "to")
KINDS = ("rows", "columns", "replicated", "whole", "heads", "experts", "vocab", "scalar")
LARGEST = 4000
"""Elements of the largest tensor that a program may make."""

_MODULUS = 1 << 20


def seeded(examples: int) -> settings:
    """The same examples in every run, however slow the machine."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class Step(NamedTuple):
    """One op on earlier results of its program; a leaf has (dtype, shape) as arguments."""

    op: str
    inputs: tuple[int, ...]
    args: tuple[Any, ...]


Program = tuple[Step, ...]


def apply(step: Step, xs: Sequence[Any], lib: Any) -> Any:
    """One step on torch tensors (``lib`` is torch) or lazy ones (``lib`` is d9d_ckpt.graph.build)."""
    op, _, args = step
    x, eager = xs[0], lib is torch
    if op in ("cat", "stack"):
        return getattr(lib, op)(xs, *args)
    if op == "split":
        sizes, dim, pick = args
        return x.split(sizes if isinstance(sizes, int) else list(sizes), dim)[pick]
    if op == "unbind":
        return x.unbind(args[0])[args[1]]
    if op == "getitem":
        return x[args]
    if op in ("reshape", "permute"):
        return getattr(x, op)(args) if eager else getattr(x, op)(*args)
    if op == "pad" and eager:
        dim, before, after = args
        blanks = [x.new_zeros([*x.shape[:dim], n, *x.shape[dim + 1 :]]) for n in (before, after)]
        return torch.cat([blanks[0], x, blanks[1]], dim)
    if op == "index_select" and eager:
        return x.index_select(args[0], torch.tensor(args[1], dtype=torch.long, device=x.device))
    if op == "to" and eager:
        return x.to(getattr(torch, args[0])) if x.is_floating_point() else x
    return getattr(x, op)(*args)


def run(program: Program, leaf: Callable[[int, str, tuple[int, ...]], Any], lib: Any) -> Any:
    """The last result of ``program``; ``leaf`` makes leaf number ``n`` of a dtype and shape."""
    pool: list[Any] = []
    for n, step in enumerate(program):
        xs = [pool[i] for i in step.inputs]
        pool.append(leaf(n, *step.args) if step.op == "leaf" else apply(step, xs, lib))
    return pool[-1]


def lazily(program: Program, first: int = 0) -> LazyTensor:
    """The program as a graph, its leaves' sources numbered from ``first``."""

    def leaf(n: int, dtype: str, shape: tuple[int, ...]) -> LazyTensor:
        return LazyTensor(ops.leaf(first + n, TensorSpec(dtype_from_torch(dtype), shape)))

    return run(program, leaf, build)


def ids_of(n: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """An id for every element of leaf ``n``, unique over the program and never 0."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) + n * _MODULUS + 1).reshape(shape)


def values_of(n: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Values of leaf ``n``, never 0, that every narrower float rounds."""
    return (ids_of(n, dtype, shape) % 1009 / 7 + 1).to(getattr(torch, dtype))


def leaf_numbers(program: Program) -> list[int]:
    """Which steps are leaves."""
    return [n for n, step in enumerate(program) if step.op == "leaf"]


class _Writer:
    """Draws steps; keeps a meta tensor for each result so that the next step fits."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.steps: list[Step] = []
        self.metas: list[torch.Tensor] = []

    def leaf(self, dtype: str, shape: Sequence[int]) -> int:
        self.steps.append(Step("leaf", (), (dtype, tuple(shape))))
        self.metas.append(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
        return len(self.steps) - 1

    def step(self, op: str, inputs: Sequence[int], args: tuple[Any, ...]) -> None:
        step = Step(op, tuple(inputs), args)
        result = apply(step, [self.metas[i] for i in inputs], torch)
        if result.numel() <= LARGEST:
            self.steps.append(step)
            self.metas.append(result)

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def add(self, op: str, at: int, *, bijective: bool) -> None:
        x, draw = self.metas[at], self.draw
        shape, rank = tuple(x.shape), x.dim()
        if op == "to":
            self.step(op, [at], (draw(st.sampled_from(FLOATS)),))
        elif op == "reshape":
            self.step(op, [at], draw(reshapes(shape)))
        elif op == "permute":
            self.step(op, [at], tuple(draw(st.permutations(range(rank)))))
        elif op == "stack":
            parts = self.parts(at, [shape] * self.number(0, 3), fresh=bijective)
            self.step(op, parts, (self.number(0, rank),))
        elif op == "getitem":
            self.step(op, [at], tuple(draw(keys(n)) for n in shape[: self.number(0, rank)]))
        elif rank:
            self.along(op, at, self.number(0, rank - 1), bijective=bijective)

    def along(self, op: str, at: int, dim: int, *, bijective: bool) -> None:
        shape, rank, draw = tuple(self.metas[at].shape), self.metas[at].dim(), self.draw
        size = shape[dim]
        if op == "cat":
            shapes = [(*shape[:dim], n, *shape[dim + 1 :]) for n in draw(_FEW)]
            self.step(op, self.parts(at, shapes, fresh=bijective), (dim,))
        elif op == "transpose":
            self.step(op, [at], (dim, self.number(0, rank - 1)))
        elif op == "narrow":
            start = self.number(0, size)
            self.step(op, [at], (dim, start, self.number(min(1, size - start), size - start)))
        elif op == "pad":
            self.step(op, [at], (dim, self.number(0, 3), self.number(0, 3)))
        elif op == "index_select":
            self.step(op, [at], (dim, draw(indices(size, bijective=bijective))))
        elif op == "unbind" and size:
            self.step(op, [at], (dim, self.number(0, size - 1)))
        elif op == "split" and size:
            first = self.number(0, size)
            sizes = (first, size - first) if draw(st.booleans()) else max(first, 1)
            self.step(
                op, [at], (sizes, dim, 0 if first == size else draw(st.sampled_from((0, -1))))
            )

    def parts(self, at: int, shapes: Sequence[tuple[int, ...]], *, fresh: bool) -> list[int]:
        """Result ``at`` among new leaves, and itself again where leaves may repeat."""
        dtype = str(self.metas[at].dtype).removeprefix("torch.")
        again = not fresh and self.draw(st.booleans())
        others = [self.leaf(dtype, shape) for shape in shapes]
        return self.draw(st.permutations([at, *others, *([at] if again else [])]))


_FEW = st.lists(st.integers(0, 5), max_size=3)
_DIMS = st.sampled_from((2, 3, 1, 4, 5, 6, 7, 8, 2, 3, 4, 5, 6, 1, 0))


@st.composite
def programs(draw: st.DrawFn, *, bijective: bool = False, steps: int = 8) -> Program:
    """A random graph of every movement op and casts, or of those that can be reversed."""
    writer = _Writer(draw)
    writer.leaf(draw(st.sampled_from(FLOATS)), draw(st.lists(_DIMS, max_size=4)))
    names = BIJECTIONS if bijective else MOVES
    for op in draw(st.lists(st.sampled_from(names), min_size=2, max_size=steps)):
        last = len(writer.steps) - 1
        back = 0 if bijective else max(draw(st.integers(-2, min(2, last))), 0)
        writer.add(op, last - back, bijective=bijective)
        if draw(st.integers(0, 2)) == 2:  # an op shows its faults once digits run across its dims
            writer.step("reshape", [len(writer.steps) - 1], (writer.metas[-1].numel(),))
    return _ending(writer.steps)


def _ending(steps: list[Step]) -> Program:
    """Steps up to the last that is not a leaf: a refused step may leave its leaves behind."""
    while steps[-1].op == "leaf" and len(steps) > 1:
        steps.pop()
    return tuple(steps)


@st.composite
def reshapes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many elements, size-1 dims included."""
    rest, out = torch.Size(shape).numel(), []
    if not rest:
        return (*draw(st.permutations(shape)), 1)
    while rest > 1 and len(out) < 4:
        out.append(draw(st.sampled_from([n for n in range(2, rest + 1) if not rest % n][-12:])))
        rest //= out[-1]
    out += [rest] if rest > 1 else [1] * draw(st.integers(0, 2))
    return tuple(draw(st.permutations(out)))


@st.composite
def indices(draw: st.DrawFn, size: int, *, bijective: bool) -> tuple[int, ...]:
    """A permutation, strided runs, or any rows with repeats."""
    kind = draw(
        st.sampled_from(("shuffle", "stride") if bijective else ("shuffle", "stride", "any"))
    )
    if kind == "shuffle":
        return tuple(draw(st.permutations(range(size))))
    if kind == "stride":
        step = draw(st.integers(2, 3))
        return tuple(row for first in range(step) for row in range(first, size, step))
    return tuple(draw(st.lists(st.integers(0, size - 1), max_size=7))) if size else ()


@st.composite
def keys(draw: st.DrawFn, size: int) -> int | slice:
    """A basic index into ``size`` rows: a row, or a slice that may reach outside."""
    if size and draw(st.booleans()):
        return draw(st.integers(-size, size - 1))
    ends = st.none() | st.integers(-size - 1, size + 1)
    return slice(draw(ends), draw(ends))


@st.composite
def regions(draw: st.DrawFn, shape: Sequence[int]) -> Region:
    """The whole of ``shape``, or a box of it that may be empty."""
    if draw(st.integers(0, 3)) == 3:
        return Region.whole(shape)
    start = tuple(draw(st.integers(0, max(n - 1, 0))) for n in shape)
    free = [n - a for n, a in zip(shape, start, strict=True)]
    some = draw(st.integers(0, 9)) > 0
    return Region(start, tuple(draw(st.integers(min(1, n) * some, n)) for n in free))


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    """Any strided piece, whether or not a tensor has such."""
    digit = st.builds(Digit, st.integers(1, 7), st.integers(0, 30), st.integers(0, 50))
    digits = draw(st.lists(digit, max_size=3))
    return Piece(draw(st.integers(0, 60)), draw(st.integers(0, 9)), tuple(digits))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Degrees that can exist, pp left out: it never cuts a tensor."""
    few = st.integers(1, 4)
    replicate, shard, cp, tp = (draw(few) for _ in range(4))
    ranks = shard * cp * tp
    ep = draw(st.sampled_from([n for n in range(1, ranks + 1) if not ranks % n]))
    return Topology(
        1, replicate, shard, cp, tp, ep, vocab_multiple=draw(st.sampled_from((1, 3, 8)))
    )


@st.composite
def placed(draw: st.DrawFn, topology: Topology) -> tuple[tuple[int, ...], Cut]:
    """A shape, and a cut of it that ``topology`` allows."""
    size, units = st.integers(0, 9), st.integers(1, 4)
    kind = draw(st.sampled_from(KINDS))
    if kind == "rows":
        n = topology.tp * draw(units)
        return (n * draw(units), draw(size)), Cut(tp=0, units=n)
    if kind == "columns":
        n = topology.tp * draw(units)
        return (draw(size), n * draw(units)), Cut(tp=1, units=n)
    if kind == "replicated":
        return tuple(draw(st.lists(size, min_size=1, max_size=3))), Cut()
    if kind == "whole":
        return (draw(size), draw(size)), Cut(rows=False)
    if kind == "vocab":
        return (draw(st.integers(0, 40)), draw(units)), Cut(tp=0, vocab=True)
    if kind == "scalar":
        return (), Cut()
    if kind == "experts":
        dim = topology.efsdp * draw(units)
        return (topology.ep * draw(units), dim, draw(units)), Cut(experts=True)
    divisors = [n for n in range(1, topology.tp + 1) if not topology.tp % n]
    groups = draw(st.sampled_from(divisors) | units.map(lambda n: n * topology.tp))
    queries = draw(units) * max(topology.tp // groups, 1)
    heads = Heads(groups, queries, draw(units))
    rows = groups * (queries + 2) * heads.rows
    return (rows, draw(units)), Cut(tp=0, units=groups, heads=heads)
