"""One class per op of the kernel; every other movement op is a combinator of these (build.py).

Data movement never computes: an op maps pieces of its result to pieces of its inputs. `Cast` is
elementwise, so it commutes with movement and travels to the leaf with the piece.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import prod

from d9d_ckpt.errors import MappingError
from d9d_ckpt.graph.node import Leaf, Node
from d9d_ckpt.graph.pieces import Digit, Piece, cells, cut, row_major
from d9d_ckpt.tensors import DTYPES, DType, TensorSpec


def leaf(source: Hashable, spec: TensorSpec) -> Leaf:
    """A stored tensor."""
    return Leaf(spec, (), 1, source)


@dataclass(frozen=True, slots=True, eq=False)
class Zeros(Node):
    """A tensor of zeros: padding, never data."""


def zeros(spec: TensorSpec) -> Zeros:
    """Zeros of ``spec``."""
    return Zeros(spec, (), 0)


@dataclass(frozen=True, slots=True, eq=False)
class Reshape(Node):
    """Another shape over the same row-major order: the identity on addresses."""

    def pull(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
        yield 0, piece

    def inverse(self, output: Node) -> tuple[Node, ...]:
        return (reshape(output, self.inputs[0].shape),)


def reshape(x: Node, shape: tuple[int, ...]) -> Node:
    """``x`` in another shape of as many elements."""
    if any(n < 0 for n in shape) or prod(shape) != x.spec.numel:
        raise MappingError(f"cannot reshape {list(x.shape)} to {list(shape)}")
    return x if shape == x.shape else Reshape(TensorSpec(x.dtype, shape), (x,), x.width)


@dataclass(frozen=True, slots=True, eq=False)
class Cast(Node):
    """The same values in another floating dtype, rounded to nearest even."""

    def pull(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
        yield 0, piece

    def inverse(self, output: Node) -> tuple[Node, ...]:
        x = self.inputs[0]
        if x.dtype.bits >= self.dtype.bits:
            raise MappingError(
                f"cast of {x.dtype.name} to {self.dtype.name} drops bits, so the mapping cannot be "
                "reversed"
            )
        return (cast(output, x.dtype),)


def cast(x: Node, dtype: DType) -> Node:
    """``x`` as ``dtype``.

    Raises:
        MappingError: Either side is not floating point.
    """
    if dtype == x.dtype:
        return x
    if not (dtype.floating and x.dtype.floating):
        raise MappingError(f"cannot cast {x.dtype.name} to {dtype.name}: only floats are cast")
    return Cast(TensorSpec(dtype, x.shape), (x,), x.width)


@dataclass(frozen=True, slots=True, eq=False)
class Permute(Node):
    """Dims in another order.

    Attributes:
        order: Input dim of each output dim.
        runs: (output stride, input stride) of each run of dims that stay neighbours, outermost first.
    """

    order: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]

    def pull(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
        pieces = [piece]
        for out, _ in self.runs:
            if out > 1:
                pieces = [part for p in pieces for part in cut(p, out)]
        for p in pieces:
            base, rest = 0, p.base
            for out, into in self.runs:
                base += rest // out * into
                rest %= out
            yield 0, Piece(base, p.target, tuple(self._digit(d) for d in p.digits))

    def _digit(self, d: Digit) -> Digit:
        for out, into in self.runs:
            if d.address >= out:
                return Digit(d.count, d.address // out * into, d.stride)
        return d

    def inverse(self, output: Node) -> tuple[Node, ...]:
        back = [0] * len(self.order)
        for at, dim in enumerate(self.order):
            back[dim] = at
        return (permute(output, tuple(back)),)

    @property
    def form(self) -> Hashable:
        return ("Permute", self.spec, self.order)


def permute(x: Node, order: tuple[int, ...]) -> Node:
    """``x`` with output dim ``i`` taken from input dim ``order[i]``."""
    if sorted(order) != list(range(len(x.shape))):
        raise MappingError(f"{list(order)} is no order of the dims of {list(x.shape)}")
    shape = tuple(x.shape[dim] for dim in order)
    into, out = row_major(x.shape), row_major(shape)
    dims = [(dim, o) for dim, o in zip(order, out, strict=True) if x.shape[dim] != 1]
    runs = []
    for k, (dim, o) in enumerate(dims):
        after = dims[k + 1][0] if k + 1 < len(dims) else None
        if after is None or into[dim] != x.shape[after] * into[after]:
            runs.append((o, into[dim]))
    return Permute(TensorSpec(x.dtype, shape), (x,), x.width, order, tuple(runs))


def _rebase(p: Piece, period: int, wider: int, shift: int) -> Piece:
    """Addresses ``q * period + r`` as ``q * wider + r + shift``; ``p`` is cut by ``period``."""
    digits = tuple(
        d if d.address < period else Digit(d.count, d.address // period * wider, d.stride)
        for d in p.digits
    )
    return Piece(p.base // period * wider + p.base % period + shift, p.target, digits)


@dataclass(frozen=True, slots=True, eq=False)
class Narrow(Node):
    """The rows ``[start, start + length)`` of one dim."""

    dim: int
    start: int

    def pull(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
        x = self.inputs[0]
        inner = prod(x.shape[self.dim + 1 :])
        mine, whole, shift = (
            self.shape[self.dim] * inner,
            x.shape[self.dim] * inner,
            self.start * inner,
        )
        if mine == whole or prod(x.shape[: self.dim]) == 1:
            yield 0, Piece(piece.base + shift, piece.target, piece.digits)
            return
        for p in cut(piece, mine):
            yield 0, _rebase(p, mine, whole, shift)

    def inverse(self, output: Node) -> tuple[Node, ...]:
        raise MappingError(
            f"narrow of {list(self.inputs[0].shape)} to {list(self.shape)} drops elements, so the "
            "mapping cannot be reversed"
        )

    @property
    def form(self) -> Hashable:
        return ("Narrow", self.spec, self.dim, self.start)


def narrow(x: Node, dim: int, start: int, length: int) -> Node:
    """``x[start : start + length]`` along ``dim``."""
    size = x.shape[dim]
    if not (start >= 0 and length >= 0 and start + length <= size):
        raise MappingError(f"[{start}, {start + length}) is outside dim {dim} of {list(x.shape)}")
    if length == size:
        return x
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return Narrow(TensorSpec(x.dtype, shape), (x,), x.width, dim, start)


@dataclass(frozen=True, slots=True, eq=False)
class Cat(Node):
    """Inputs one after the other along ``dim``.

    Attributes:
        dim: The dim.
        bounds: Where each input starts, in elements of one block of ``dim``, and the end.
    """

    dim: int
    bounds: tuple[int, ...]

    def pull(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
        bounds, period = self.bounds, self.bounds[-1]
        outer = prod(self.shape[: self.dim])
        for part in cut(piece, period) if outer > 1 else (piece,):
            for k, p in cells(part, period, bounds):
                yield k, _rebase(p, period, bounds[k + 1] - bounds[k], -bounds[k])

    def inverse(self, output: Node) -> tuple[Node, ...]:
        out, start = [], 0
        for x in self.inputs:
            out.append(narrow(output, self.dim, start, x.shape[self.dim]))
            start += x.shape[self.dim]
        return tuple(out)

    @property
    def form(self) -> Hashable:
        return ("Cat", self.spec, self.dim)


def cat(xs: tuple[Node, ...], dim: int) -> Node:
    """``xs`` one after the other along ``dim``; empty ones take no part.

    Raises:
        MappingError: Dtypes, or sizes of another dim, differ.
    """
    first = xs[0]
    rest = first.shape[:dim], first.shape[dim + 1 :]
    for x in xs:
        if x.dtype != first.dtype or (x.shape[:dim], x.shape[dim + 1 :]) != rest:
            raise MappingError(
                f"cannot join {x.dtype.name} {list(x.shape)} to {first.dtype.name} "
                f"{list(first.shape)} along dim {dim}"
            )
    shape = (*rest[0], sum(x.shape[dim] for x in xs), *rest[1])
    xs = tuple(x for x in xs if x.shape[dim]) or xs[:1]
    if len(xs) == 1:
        return xs[0]
    inner, bounds = prod(rest[1]), [0]
    for x in xs:
        bounds.append(bounds[-1] + x.shape[dim] * inner)
    width = sum(x.width for x in xs)
    return Cat(TensorSpec(first.dtype, shape), xs, width, dim, tuple(bounds))


@dataclass(frozen=True, slots=True, eq=False)
class Index(Node):
    """``index_select``; rows at a constant step form one run.

    Attributes:
        dim: The dim that is indexed.
        index: The input row of each output row.
        bounds: Where each run starts, in elements of one block of ``dim``, and the end.
        runs: (first input row, step) of each run; step 0 repeats a row.
    """

    dim: int
    index: tuple[int, ...]
    bounds: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]

    def pull(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
        x = self.inputs[0]
        inner = prod(x.shape[self.dim + 1 :])
        mine, whole = self.bounds[-1], x.shape[self.dim] * inner
        outer = prod(x.shape[: self.dim])
        for part in cut(piece, mine) if outer > 1 else (piece,):
            for k, p in cells(part, mine, self.bounds):
                first, step = self.runs[k]
                for q in (p,) if step == 1 or inner == 1 else cut(p, inner):
                    block, row = divmod(q.base, mine)
                    row -= self.bounds[k]
                    base = block * whole + first * inner + row // inner * step * inner + row % inner
                    yield 0, Piece(base, q.target, self._digits(q, inner, mine, whole, step))

    @staticmethod
    def _digits(p: Piece, inner: int, mine: int, whole: int, step: int) -> tuple[Digit, ...]:
        out = []
        for n, w, t in p.digits:
            if w >= mine:
                out.append(Digit(n, w // mine * whole, t))
            elif w >= inner:
                out.append(Digit(n, w * step, t))
            else:
                out.append(Digit(n, w, t))
        return tuple(out)

    def inverse(self, output: Node) -> tuple[Node, ...]:
        rows = self.inputs[0].shape[self.dim]
        if sorted(self.index) != list(range(rows)):
            raise MappingError(
                f"index of {len(self.index)} rows into {rows} drops or repeats rows, so the mapping "
                "cannot be reversed"
            )
        back = [0] * rows
        for at, row in enumerate(self.index):
            back[row] = at
        return (index_select(output, self.dim, tuple(back)),)

    @property
    def form(self) -> Hashable:
        return ("Index", self.spec, self.dim, self.index)


def index_select(x: Node, dim: int, index: tuple[int, ...]) -> Node:
    """The rows ``index`` of ``dim``, in that order, repeats allowed."""
    if any(not 0 <= row < x.shape[dim] for row in index):
        raise MappingError(f"index reaches outside dim {dim} of {list(x.shape)}")
    inner, bounds, runs, at = prod(x.shape[dim + 1 :]), [0], [], 0
    while at < len(index):
        end, step = at + 1, 1
        if end < len(index) and index[end] >= index[at]:
            step = index[end] - index[at]
            while end < len(index) and index[end] - index[end - 1] == step:
                end += 1
        if end - at == 2 and step != 1:
            end, step = at + 1, 1  # two rows are no run: the next may start a longer one
        runs.append((index[at], step))
        bounds.append(end * inner)
        at = end
    shape = (*x.shape[:dim], len(index), *x.shape[dim + 1 :])
    return Index(TensorSpec(x.dtype, shape), (x,), x.width, dim, index, tuple(bounds), tuple(runs))


@dataclass(frozen=True, slots=True, eq=False)
class Dequantize(Node):
    """Quantised elements times the scale of their block, in float32: the one op that computes.

    Inputs are the stored weight [..., R, C] and its scales [..., ceil(R / block 0), ceil(C / block 1)].
    A piece passes through to the weight as it is and says which scales it needs.

    Attributes:
        block: Rows and columns under one scale.
    """

    block: tuple[int, int]

    def pull(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
        yield 0, piece

    def inverse(self, output: Node) -> tuple[Node, ...]:
        raise MappingError(f"dequantising {list(self.shape)} drops bits and cannot be reversed")

    @property
    def form(self) -> Hashable:
        return ("Dequantize", self.spec, self.block)


def dequantize(weight: Node, scale: Node, block: tuple[int, int]) -> Node:
    """``weight`` [..., R, C] times ``scale`` of each ``block``, as float32.

    Raises:
        MappingError: The scales do not fit the blocks, or either side is not stored in one piece.
    """
    *outer, rows, cols = weight.shape
    blocks = (*outer, -(-rows // block[0]), -(-cols // block[1]))
    if scale.shape != blocks:
        raise MappingError(
            f"scales have shape {list(scale.shape)}, expected {list(blocks)} for {list(weight.shape)} in "
            f"blocks of {block[0]} x {block[1]}"
        )
    if not isinstance(weight, Leaf) or not isinstance(scale, Leaf):
        raise MappingError("only tensors stored in one piece are dequantised")
    spec = TensorSpec(DTYPES["F32"], weight.shape)
    return Dequantize(spec, (weight, scale), 2, block)
