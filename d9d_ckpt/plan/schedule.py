"""A unit of work as tasks: bounded reads, the copies between buffers, whole checksum blocks written."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from d9d_ckpt.errors import ResourceError
from d9d_ckpt.graph.pieces import Digit, Piece, cells
from d9d_ckpt.plan.assign import Unit
from d9d_ckpt.plan.plan import FROM, MOVE, SOURCE, TO, Movement, Plan
from d9d_ckpt.tensors import BLOCK, DType, format_bytes

_LARGEST_HULL = 32 << 20
"""Source bytes that one task holds at most: whole matrices and wide column cuts fit."""

_USUAL_HULL = 8 << 20
"""Source bytes that a task grows to by taking in neighbours; more would leave the caches."""

_DENSE = 0.98
"""A stretch is read through when this share of it is wanted."""

ZEROS = -1


class Read(NamedTuple):
    """Bytes of a source chunk to be put at ``at`` of the source buffer.

    ``shared``: its last block is only partly wanted here, so the next task wants it again.
    """

    source: int
    offset: int
    nbytes: int
    at: int
    shared: bool = False


class Move(NamedTuple):
    """One strided copy from the source buffer (``base``; ``ZEROS``: fill) into an output."""

    piece: Piece
    dtype: DType
    casts: tuple[DType, ...]
    fill: bool


class Output(NamedTuple):
    """Whole blocks of one target: where they start in it, and the moves that make them."""

    target: int
    start: int
    nbytes: int
    moves: tuple[Move, ...]


class Task(NamedTuple):
    """Read, move, write; nothing is kept afterwards.

    Attributes:
        reads: What is read, at offsets of one source buffer.
        outputs: What is written, each from moves within the buffer.
        verify: Sources to be checked in full first, because only parts of their blocks are read.
    """

    reads: tuple[Read, ...]
    outputs: tuple[Output, ...]
    verify: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Buffer sizes that follow from ``--memory``.

    Attributes:
        hull: Source bytes of one task, before rounding to blocks.
        source: Bytes of the source buffer.
        tile: Bytes of one output at most.
    """

    hull: int
    source: int
    tile: int


def limits(memory: int, threads: int = 1) -> Limits:
    """Buffers for ``memory`` bytes in flight over ``threads``.

    Raises:
        ResourceError: Not even the smallest buffers fit.
    """
    least = 8 * BLOCK
    each = memory // threads
    if each < least:
        raise ResourceError(
            f"--memory {format_bytes(memory)} leaves {format_bytes(each)} for each of {threads} "
            f"threads; at least {format_bytes(least)} each is needed"
        )
    hull = min(_LARGEST_HULL, each // 2 - 2 * BLOCK) // BLOCK * BLOCK
    return Limits(hull=hull, source=hull + 2 * BLOCK, tile=max(BLOCK, hull // 2 // BLOCK * BLOCK))


class _Bit(NamedTuple):
    """The part of one copy that falls into one tile: ``base`` in the source, ``target`` in the tile."""

    source: int
    piece: Piece
    move: Movement

    @property
    def item(self) -> int:
        """Bytes at the last address; 1 where the digits count bytes."""
        return self.move.dtype.itemsize if self.move.casts else 1

    @property
    def nbytes(self) -> int:
        return self.piece.numel * self.item

    @property
    def stop(self) -> int:
        return self.piece.base + self.piece.reach + self.item


@dataclass(slots=True)
class _Span:
    """A stretch of one source and how much of it is wanted."""

    low: int
    high: int
    wanted: int

    def joined(self, other: "_Span") -> "_Span":
        return _Span(
            min(self.low, other.low), max(self.high, other.high), self.wanted + other.wanted
        )

    def rounded(self, nbytes: int) -> "_Span":
        """To whole blocks of a chunk of ``nbytes``."""
        high = min(-(-self.high // BLOCK) * BLOCK, nbytes)
        return _Span(self.low // BLOCK * BLOCK, high, self.wanted)

    @property
    def dense(self) -> bool:
        return self.wanted >= _DENSE * (self.high - self.low)


@dataclass(slots=True)
class _Tile:
    """Whole blocks of one target with the bits that fill them."""

    target: int
    start: int
    nbytes: int
    bits: list[_Bit] = field(default_factory=list)
    spans: dict[int, _Span] = field(default_factory=dict)

    def add(self, bit: _Bit) -> None:
        self.bits.append(bit)
        if bit.source != ZEROS:
            span = _Span(bit.piece.base, bit.stop, bit.nbytes)
            known = self.spans.get(bit.source)
            self.spans[bit.source] = known.joined(span) if known else span

    @property
    def hull(self) -> int:
        return _bytes(self.spans)

    def order(self, plan: Plan) -> tuple[str, int]:
        if not self.spans:
            return "", 0
        first = max(self.spans, key=lambda s: self.spans[s].wanted)
        chunk = plan.sources[first]
        return chunk.file, chunk.offset + self.spans[first].low


def tasks(plan: Plan, unit: Unit, limit: Limits, *, exact: bool = False) -> Iterator[Task]:
    """The tasks of ``unit``, by source position; tiles that share source bytes share a task.

    Args:
        plan: The plan.
        unit: The part of it.
        limit: Buffer sizes.
        exact: Read only wanted bytes, so that a block read in part goes unchecked; else whole
            blocks are read wherever the source has checksums.
    """
    tiles = [tile for t in unit.targets for tile in _tiles(plan, t, unit, limit, exact=exact)]
    tiles.sort(key=lambda tile: tile.order(plan))
    group: list[_Tile] = []
    spans: dict[int, _Span] = {}
    for tile in tiles:
        joined = _joined(spans, tile.spans)
        if group and not _fits(group, spans, joined, tile, limit):
            yield _task(plan, group, spans, limit, exact=exact)
            group, joined = [], dict(tile.spans)
        group.append(tile)
        spans = joined
    if group:
        yield _task(plan, group, spans, limit, exact=exact)


def _joined(spans: dict[int, _Span], more: dict[int, _Span]) -> dict[int, _Span]:
    out = dict(spans)
    for source, span in more.items():
        out[source] = out[source].joined(span) if source in out else span
    return out


def _fits(
    group: Sequence[_Tile],
    spans: dict[int, _Span],
    joined: dict[int, _Span],
    tile: _Tile,
    limit: Limits,
) -> bool:
    """Whether ``tile`` belongs to the group: it shares source bytes, or all of it is small."""
    hull = _bytes(joined)
    own = max(_bytes(spans), tile.hull)
    if hull > limit.hull or hull > max(_USUAL_HULL, own + own // 4):
        return False
    shares = any(
        source in spans and span.low < spans[source].high and spans[source].low < span.high
        for source, span in tile.spans.items()
    )
    return shares or hull <= BLOCK and sum(t.nbytes for t in group) + tile.nbytes <= BLOCK


def _bytes(spans: dict[int, _Span]) -> int:
    return sum(s.high - s.low for s in spans.values())


def _tiles(plan: Plan, target: int, unit: Unit, limit: Limits, *, exact: bool) -> list[_Tile]:
    """The tiles of one target that fall to ``unit``."""
    total = plan.targets[target].nbytes
    blocks = -(-total // BLOCK)
    low = unit.part * blocks // unit.parts * BLOCK
    high = min((unit.part + 1) * blocks // unit.parts * BLOCK, total)
    tiles = _cut(plan, target, total, low, high, BLOCK)
    if any(t.hull > limit.hull for t in tiles):
        # Reading runs pays more the longer they are, and wider tiles have longer ones.
        tiles = _cut(plan, target, total, low, high, limit.tile)
    if not exact:
        for tile in tiles:
            for source, span in tile.spans.items():
                if plan.sources[source].xxh3 is not None:
                    tile.spans[source] = span.rounded(plan.sources[source].nbytes)
    return tiles


def _cut(plan: Plan, target: int, total: int, low: int, high: int, step: int) -> list[_Tile]:
    if low >= high:
        return []
    edges = list(range(low, high, step)) + [high]
    bounds = sorted({0, *edges, total})
    tiles = {a: _Tile(target, a, b - a) for a, b in zip(edges, edges[1:], strict=False)}
    for row in plan.rows[plan.starts[target] : plan.starts[target + 1]].tolist():
        move = plan.movements[row[MOVE]]
        digits = move.digits
        if not move.casts:
            digits = (*digits, Digit(move.dtype.itemsize, 1, 1))
        # Cells are cut on the target side.
        turned = Piece(row[TO], row[FROM], tuple(Digit(n, t, w) for n, w, t in digits))
        for cell, part in cells(turned, total, bounds):
            tile = tiles.get(bounds[cell])
            if tile is not None:
                piece = Piece(part.target, part.base - tile.start, part.turned().digits)
                tile.add(_Bit(row[SOURCE], piece.merged(), move))
    return list(tiles.values())


def _task(
    plan: Plan, group: Sequence[_Tile], spans: dict[int, _Span], limit: Limits, *, exact: bool
) -> Task:
    reads: list[Read] = []
    at, through, verify = 0, {}, []
    for source in sorted(spans, key=lambda s: (plan.sources[s].file, plan.sources[s].offset)):
        span = spans[source]
        checked = plan.sources[source].xxh3 is not None and not exact
        fits = at + span.high - span.low <= limit.source
        if fits and (checked or span.dense):
            shared = checked and any(_cuts_last_block(t, source, span.high) for t in group)
            reads.append(Read(source, span.low, span.high - span.low, at, shared))
            through[source] = at - span.low
            at += span.high - span.low
        elif checked:
            verify.append(source)
    outputs = []
    for tile in sorted(group, key=lambda t: (t.target, t.start)):
        moves = []
        for bit in tile.bits:
            if bit.source == ZEROS:
                moves.append(Move(bit.piece, bit.move.dtype, (), fill=True))
                continue
            shift = through.get(bit.source)
            if shift is not None:
                piece = Piece(bit.piece.base + shift, bit.piece.target, bit.piece.digits)
            else:
                piece = _staged(bit, at, reads)
                at += bit.nbytes
            moves.append(Move(piece, bit.move.dtype, bit.move.casts, fill=False))
        outputs.append(Output(tile.target, tile.start, tile.nbytes, tuple(moves)))
    return Task(tuple(reads), tuple(outputs), tuple(verify))


def _cuts_last_block(tile: _Tile, source: int, high: int) -> bool:
    stop = max((bit.stop for bit in tile.bits if bit.source == source), default=high)
    return high - BLOCK < stop < high


def _staged(bit: _Bit, at: int, reads: list[Read]) -> Piece:
    """Reads exactly the runs of ``bit`` to ``at``, packed in source order; the piece within the buffer."""
    ordered = bit.piece.turned().merged().turned().digits
    run, outer = bit.item, list(ordered)
    if outer and outer[-1].address == bit.item:
        run *= outer.pop().count
    offsets = np.array([bit.piece.base])
    for d in outer:
        offsets = (offsets[:, None] + np.arange(d.count) * d.address).reshape(-1)
    for number, offset in enumerate(offsets.tolist()):
        last = reads[-1] if reads else None
        if (
            last
            and last.source == bit.source
            and last.offset + last.nbytes == offset
            and last.at + last.nbytes == at + number * run
        ):
            reads[-1] = last._replace(nbytes=last.nbytes + run)
        else:
            reads.append(Read(bit.source, offset, run, at + number * run))
    packed, step = [], bit.item
    for d in reversed(ordered):
        packed.append(Digit(d.count, step, d.stride))
        step *= d.count
    return Piece(at, bit.piece.target, tuple(packed)).merged()
