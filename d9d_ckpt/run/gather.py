"""Strided copies between byte buffers, at the widest item that fits, and casts by torch."""

import importlib
from math import gcd, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from d9d_ckpt.graph.pieces import Digit, Piece, cut, row_major
from d9d_ckpt.graph.pushdown import Scaling
from d9d_ckpt.plan.schedule import Move
from d9d_ckpt.tensors import DType

Buffer = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_LANES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}

_SQUARE = 64
"""Side of the blocks of a transposing copy: 64 x 64 x 2 bytes of both sides stay in the L1 cache."""


def copy(source: Buffer, out: Buffer, piece: Piece) -> None:
    """``out`` at the piece's target addresses from ``source`` at its bases, all in bytes."""
    width = _width(piece)
    shape, into, to = [], [], []
    for n, a, s in piece.digits:
        if a == 1 and s == 1:
            if n > width:
                shape.append(n // width)
                into.append(width)
                to.append(width)
        else:
            shape.append(n)
            into.append(a)
            to.append(s)
    lane = _LANES[width]
    left = np.ndarray(shape, lane, out, piece.target, to)
    right = np.ndarray(shape, lane, source, piece.base, into)
    if len(shape) > 1 and into[-1] != width:
        _transpose(left, right, into)
    else:
        np.copyto(left, right)


def _width(piece: Piece) -> int:
    """The widest of 8, 4, 2, 1 bytes that divides every address of the copy.

    Buffers themselves start at multiples of 16, as numpy and torch allocate them.
    """
    common = gcd(8, piece.base, piece.target)
    packed = False
    for n, a, s in piece.digits:
        if a == 1 and s == 1:
            common, packed = gcd(common, n), True
        else:
            common = gcd(common, a, s)
    return common if packed else 1


def _transpose(left: npt.NDArray[Any], right: npt.NDArray[Any], strides: list[int]) -> None:
    """Copies whose innermost dims are exchanged, in squares that stay in the cache."""
    inner = min(range(len(strides)), key=lambda k: strides[k] or 1 << 62)
    last = left.ndim - 1
    if inner == last or left.shape[inner] < _SQUARE or left.shape[last] < _SQUARE:
        np.copyto(left, right)
        return
    left, right = np.moveaxis(left, inner, -2), np.moveaxis(right, inner, -2)
    for p in range(0, left.shape[-2], _SQUARE):
        for q in range(0, left.shape[-1], _SQUARE):
            square = (..., slice(p, p + _SQUARE), slice(q, q + _SQUARE))
            np.copyto(left[square], right[square])


def compute(source: Buffer, out: Buffer, move: Move) -> None:
    """As `copy`, through scales and casts; the piece's addresses step over whole elements.

    Rounding is torch's: to nearest, ties to even.
    """
    torch = importlib.import_module("torch")
    piece, how = move.piece, move.how
    item = how.dtype.itemsize
    shape = [d.count for d in piece.digits]
    values = np.empty(prod(shape) * item, np.uint8)
    dense = [
        Digit(d.count, d.address, s * item)
        for d, s in zip(piece.digits, row_major(shape), strict=True)
    ]
    copy(source, values, Piece(piece.base, 0, (*dense, Digit(item, 1, 1))).merged())
    tensor = torch.from_numpy(values).view(getattr(torch, how.dtype.torch))
    if how.scaling is not None:
        floats = _scaled(tensor.to(torch.float32).numpy(), source, move, how.scaling)
        tensor = torch.from_numpy(floats)
    for step in how.casts:
        tensor = tensor.to(getattr(torch, step.torch))
    result = tensor.view(torch.uint8).numpy()
    last = len(result) // max(prod(shape), 1)
    packed = [
        Digit(d.count, s * last, d.stride)
        for d, s in zip(piece.digits, row_major(shape), strict=True)
    ]
    copy(result, out, Piece(0, piece.target, (*packed, Digit(last, 1, 1))).merged())


def _scaled(dense: Floats, source: Buffer, move: Move, scaling: Scaling) -> Floats:
    """Dense values of a piece, in digit order, times the scale of each one's block."""
    rows, cols = scaling.shape[-2:]
    high, wide = -(-rows // scaling.block[0]), -(-cols // scaling.block[1])
    count = prod(scaling.shape[:-2]) * high * wide
    scales = _floats(
        source[move.scales : move.scales + count * scaling.dtype.itemsize], scaling.dtype
    )
    out = np.empty_like(dense)
    item = move.how.dtype.itemsize
    steps = row_major([d.count for d in move.origin.digits])
    digits = tuple(
        Digit(d.count, d.address // item, step)
        for d, step in zip(move.origin.digits, steps, strict=True)
    )
    for part in cut(Piece(move.origin.base // item, 0, digits), cols):
        first_row, first_col = divmod(part.base, cols)
        r = _grid(first_row, [(d.count, d.address // cols) for d in part.digits])
        c = _grid(first_col, [(d.count, d.address % cols) for d in part.digits])
        blocks = (r // rows * high + r % rows // scaling.block[0]) * wide + c // scaling.block[1]
        shape, strides = [d.count for d in part.digits], [4 * d.stride for d in part.digits]
        left = np.ndarray(shape, np.float32, dense, 4 * part.target, strides)
        into = np.ndarray(shape, np.float32, out, 4 * part.target, strides)
        np.multiply(left, np.take(scales, blocks), out=into)
    return out


def _grid(first: int, steps: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """``first`` plus every step of every digit; digits that do not count stay of size 1."""
    out = np.full((1,) * len(steps), first, np.int64)
    for dim, (count, step) in enumerate(steps):
        if step:
            shape = [1] * len(steps)
            shape[dim] = count
            out = out + (np.arange(count) * step).reshape(shape)
    return out


def _floats(raw: Buffer, dtype: DType) -> Floats:
    torch = importlib.import_module("torch")
    values: Floats = (
        torch.from_numpy(raw.copy()).view(getattr(torch, dtype.torch)).to(torch.float32).numpy()
    )
    return values
