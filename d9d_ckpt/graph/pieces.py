"""Strided pieces over row-major addresses, and the two ways of cutting them.

A piece is a set of elements of a tensor in row-major order together with where they go:

    base + sum_k j_k * address_k   ->   target + sum_k j_k * stride_k,   0 <= j_k < count_k

Reshape does not touch such a piece, and every other movement op maps it to a few pieces of its
inputs once it is cut at the op's own boundaries: by radix (``cut``) or by irregular bounds
(``cells``). The same two functions later tile copies to buffers and checksum blocks.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple


class Digit(NamedTuple):
    """One loop of a piece: ``count`` steps of ``address`` on one side and ``stride`` on the other."""

    count: int  # type: ignore[assignment] # tuple.count is not wanted here
    address: int
    stride: int


class Piece(NamedTuple):
    """Elements at ``base`` plus the digits' addresses, bound for ``target`` plus their strides."""

    base: int
    target: int
    digits: tuple[Digit, ...]

    @property
    def numel(self) -> int:
        """Elements moved."""
        total = 1
        for d in self.digits:
            total *= d.count
        return total

    @property
    def reach(self) -> int:
        """Distance from the first to the last address."""
        return sum((d.count - 1) * d.address for d in self.digits)

    def turned(self) -> "Piece":
        """The same piece with its two sides exchanged."""
        return Piece(self.target, self.base, tuple(Digit(n, t, w) for n, w, t in self.digits))

    def merged(self) -> "Piece":
        """Digits in descending order of stride, neighbours that continue each other joined."""
        out: list[Digit] = []
        for d in sorted(self.digits, key=_outermost_first):
            if d.count == 1:
                continue
            last = out[-1] if out else None
            if last and last.address == d.count * d.address and last.stride == d.count * d.stride:
                out[-1] = Digit(last.count * d.count, d.address, d.stride)
            else:
                out.append(d)
        return Piece(self.base, self.target, tuple(out))


def _outermost_first(d: Digit) -> tuple[int, int]:
    return -d.stride, -d.address


def row_major(shape: Sequence[int]) -> list[int]:
    """Strides, in elements, of a dense row-major tensor of ``shape``."""
    out, step = [0] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        out[dim] = step
        step *= shape[dim]
    return out


def _step(piece: Piece, digit: Digit, first: int, count: int, *outer: Digit) -> Piece:
    """The steps ``[first, first + count)`` of ``digit``, with ``outer`` digits added."""
    digits = tuple(d for d in piece.digits if d is not digit) + outer
    if count > 1:
        digits += (Digit(count, digit.address, digit.stride),)
    return Piece(piece.base + first * digit.address, piece.target + first * digit.stride, digits)


def cut(piece: Piece, period: int) -> list[Piece]:
    """Pieces whose low digits, those whose address ``period`` does not divide, never cross a multiple.

    Afterwards an address splits into ``divmod(address, period)`` digit by digit, without carries.
    """
    offset, reach, largest = piece.base % period, 0, None
    for d in piece.digits:
        if d.address % period:
            reach += (d.count - 1) * d.address
            if largest is None or d.address > largest.address:
                largest = d
    if largest is None or offset + reach < period:
        return [piece]
    count, width, _ = largest
    inner = reach - (count - 1) * width
    parts: list[Piece] = []
    cycle = period // gcd(width, period)
    if count > cycle:
        # Steps repeat their phase after `cycle`; whole cycles become one digit of their own.
        head = 0
        if period % width == 0 and offset % width + inner < width:
            head = (cycle - offset // width) % cycle
        cycles = (count - head) // cycle
        if head or cycles:
            if head:
                parts += cut(_step(piece, largest, 0, head), period)
            if cycles == 1:
                parts += cut(_step(piece, largest, head, cycle), period)
            elif cycles:
                loop = Digit(cycles, width * cycle, largest.stride * cycle)
                parts += cut(_step(piece, largest, head, cycle, loop), period)
            done = head + cycles * cycle
            if done < count:
                parts += cut(_step(piece, largest, done, count - done), period)
            return parts
    done = 0
    while done < count:
        phase = (offset + done * width) % period
        fits = 1 if phase + inner >= period else (period - 1 - inner - phase) // width + 1
        fits = min(fits, count - done)
        parts += cut(_step(piece, largest, done, fits), period)
        done += fits
    return parts


def cells(piece: Piece, period: int, bounds: Sequence[int]) -> Iterator[tuple[int, Piece]]:
    """``(cell, piece)`` pairs that each lie in one cell ``[bounds[k], bounds[k + 1])`` of every period.

    ``bounds`` runs from 0 to ``period``; digits that ``period`` divides are left whole, so the
    piece must have been ``cut`` by it, or span one period only.
    """
    offset, reach, largest = piece.base % period, 0, None
    for d in piece.digits:
        if d.address < period:
            reach += (d.count - 1) * d.address
            if largest is None or d.address > largest.address:
                largest = d
    cell = bisect_right(bounds, offset) - 1
    if largest is None or offset + reach < bounds[cell + 1]:
        yield cell, piece
        return
    count, width, _ = largest
    inner = reach - (count - 1) * width
    done = 0
    while done < count:
        phase = offset + done * width
        cell = bisect_right(bounds, phase, cell) - 1
        room = bounds[cell + 1] - phase
        if inner >= room:
            yield from cells(_step(piece, largest, done, 1), period, bounds)
            done += 1
        else:
            fits = min(count - done, (room - 1 - inner) // width + 1) if width else count
            yield cell, _step(piece, largest, done, fits)
            done += fits
