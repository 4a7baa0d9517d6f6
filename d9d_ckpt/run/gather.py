"""Strided copies between byte buffers, at the widest item that fits, and casts by torch."""

import importlib
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from d9d_ckpt.graph.pieces import Digit, Piece
from d9d_ckpt.tensors import DType

Buffer = npt.NDArray[np.uint8]

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


def cast(source: Buffer, out: Buffer, piece: Piece, dtype: DType, casts: tuple[DType, ...]) -> None:
    """As `copy`, through ``casts``; the piece's addresses step over whole elements.

    Rounding is torch's: to nearest, ties to even.
    """
    torch = importlib.import_module("torch")
    item, last = dtype.itemsize, casts[-1].itemsize
    dense, packed = [Digit(item, 1, 1)], [Digit(last, 1, 1)]
    into, to = item, last
    for n, a, s in reversed(piece.digits):
        dense.append(Digit(n, a, into))
        packed.append(Digit(n, to, s))
        into, to = into * n, to * n
    values = np.empty(into, np.uint8)
    copy(source, values, Piece(piece.base, 0, tuple(dense[::-1])).merged())
    tensor = torch.from_numpy(values).view(getattr(torch, dtype.torch))
    for step in casts:
        tensor = tensor.to(getattr(torch, step.torch))
    result = tensor.view(torch.uint8).numpy()
    copy(result, out, Piece(0, piece.target, tuple(packed[::-1])).merged())
