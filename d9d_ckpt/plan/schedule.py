"""A unit of work as tasks: bounded reads, the copies between buffers, whole checksum blocks written."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from d9d_ckpt.errors import ResourceError
from d9d_ckpt.graph.pieces import Digit, Piece, cells
from d9d_ckpt.plan.assign import Span, Unit
from d9d_ckpt.plan.plan import FROM, MOVE, SCALE, SOURCE, TO, Movement, Plan
from d9d_ckpt.tensors import BLOCK, format_bytes

_LARGEST_HULL = 32 << 20
"""Source bytes that one task holds at most: whole matrices and wide column cuts fit."""

_LARGEST_TILE = 128 << 20

_USUAL_HULL = 8 << 20
"""Source bytes that a task grows to by taking in neighbours; more would leave the caches."""

_MOST_KEPT = 16

_SWEEP = 8 << 20
"""Window of a sweep."""

_ENCODED = 2 * BLOCK
"""Room for an encoded block, which may be a little larger than the block itself."""

_SWEPT_GAP = 8 << 10
"""Bytes that can be passed over in the time of one more request, 1.6 us at 5 GB/s."""

_REQUEST = 8 << 20
"""Bytes of a request to a remote store; larger ones gain nothing."""

_REMOTE_GAP = 512 << 10
"""Bytes that a remote store sends in the time that one more request takes it."""

_DENSE = 0.98
"""A stretch is read through when this share of it is wanted."""

_STRAIGHT_BYTES = 64 << 10
_STRAIGHT_RUN = 2 << 10
"""From these sizes a scattering read costs less than a read and a copy."""

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


class Pack(NamedTuple):
    """Separate runs of a source chunk to be put side by side in the source buffer.

    Attributes:
        source: The chunk.
        piece: From the chunk's bytes to the buffer's, innermost run last.
        sweep: Read through all that lies between the runs instead of each by itself; encoded chunks
            always.
    """

    source: int
    piece: Piece
    sweep: bool


class Move(NamedTuple):
    """One strided copy from the source buffer into an output.

    Attributes:
        piece: From the buffer's bytes to the output's.
        how: What else happens to the elements.
        fill: Nothing is copied: zeros.
        origin: The same digits with the addresses in the source chunk.
        scales: For quantised elements, where their scales lie in the buffer.
    """

    piece: Piece
    how: Movement
    fill: bool
    origin: Piece
    scales: int


class Scatter(NamedTuple):
    """Bytes that lie together in a source chunk and go straight to their places in an output.

    The piece's addresses count from ``offset``.
    """

    source: int
    offset: int
    nbytes: int
    piece: Piece


class Output(NamedTuple):
    """Whole blocks of one target: where they start in it, and the moves and reads that make them."""

    target: int
    start: int
    nbytes: int
    moves: tuple[Move, ...]
    direct: tuple[Scatter, ...] = ()


class Task(NamedTuple):
    """Read, move, write; nothing is kept afterwards.

    Attributes:
        reads: What is read, at offsets of one source buffer.
        packs: Separate runs that are read to the same buffer, behind the reads.
        outputs: What is written, each from moves within the buffer.
        verify: Sources to be checked in full first, because only parts of their blocks are read.
    """

    reads: tuple[Read, ...]
    packs: tuple[Pack, ...]
    outputs: tuple[Output, ...]
    verify: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Buffer sizes that follow from ``--memory``.

    Attributes:
        hull: Source bytes of one task, before rounding to blocks.
        source: Bytes of the source buffer.
        tile: Bytes of one output at most: of transposes whose source does not fit.
        sweep: Bytes of the window of a sweep.
        kept: Verified blocks that may be kept for the next task.
        batch: Bytes up to which tiles that share nothing are read together: a block on local
            paths, a request's worth on stores where every request costs milliseconds.
        encoded: Bytes of the buffer for what is read to be decoded.
        gap: Bytes between two reads that are read through.
    """

    hull: int
    source: int
    tile: int
    sweep: int
    kept: int
    batch: int = BLOCK
    encoded: int = 0
    gap: int = 0

    @property
    def total(self) -> int:
        """All of it, pending small writes included."""
        read = self.source + self.sweep + self.encoded + self.gap
        return read + self.tile + (self.kept + 1) * BLOCK


def limits(
    memory: int,
    threads: int = 1,
    *,
    remote: bool = False,
    encoded: bool = False,
    part: int = 0,
) -> Limits:
    """Buffers for ``memory`` bytes in flight over ``threads``.

    Args:
        memory: Bytes in all.
        threads: Threads that share them.
        part: Bytes that each thread holds besides, of what it sends.
        remote: Whether requests to the source cost milliseconds, so that few large ones are better.
        encoded: Whether chunks of the source are encoded.

    Raises:
        ResourceError: Not even the smallest buffers fit.
    """
    least = 8 * BLOCK
    room = (_REQUEST if remote else _ENCODED) if encoded else 0
    gap = _REMOTE_GAP if remote else 0
    each = memory // threads - part - room - gap
    if each < least:
        raise ResourceError(
            f"--memory {format_bytes(memory)} leaves {format_bytes(max(each, 0))} for each of {threads} "
            f"threads; at least {format_bytes(least)} each is needed"
        )
    kept = min(_MOST_KEPT, each // 16 // BLOCK)
    sweep = min(_SWEEP, each // 8 // BLOCK * BLOCK)
    spare = each - sweep - (kept + 1) * BLOCK
    tile = min(_LARGEST_TILE, max(BLOCK, spare // 2 // BLOCK * BLOCK - 2 * BLOCK))
    hull = min(_LARGEST_HULL, (spare - tile) // BLOCK * BLOCK - 2 * BLOCK)
    source = max(hull, tile) + 2 * BLOCK
    batch = min(_REQUEST, hull // 2) if remote else BLOCK
    return Limits(hull, source, tile, sweep, kept, batch, room, gap)


class _Bit(NamedTuple):
    """The part of one copy that falls into one tile: ``base`` in the source, ``target`` in the tile."""

    source: int
    piece: Piece
    move: Movement
    scale: int

    @property
    def item(self) -> int:
        """Bytes at the last address; 1 where the digits count bytes."""
        return self.move.dtype.itemsize if self.move.computed else 1

    @property
    def nbytes(self) -> int:
        return self.piece.numel * self.item

    @property
    def stop(self) -> int:
        return self.piece.base + self.piece.reach + self.item

    @property
    def straight(self) -> bool:
        """Whether it can be read to its place: together at the source, in long runs at the target."""
        if self.move.computed or self.nbytes < _STRAIGHT_BYTES:
            return False
        inner = self.piece.digits[-1]
        long = inner.stride == 1 and inner.address == 1 and inner.count >= _STRAIGHT_RUN
        return long and self.stop - self.piece.base == self.nbytes


@dataclass(slots=True)
class _Span:
    """A stretch of one source, how much of it is wanted, and where the last wanted byte ends."""

    low: int
    high: int
    wanted: int
    stop: int

    def joined(self, other: "_Span") -> "_Span":
        return _Span(
            min(self.low, other.low),
            max(self.high, other.high),
            self.wanted + other.wanted,
            max(self.stop, other.stop),
        )

    def rounded(self, low: int, high: int) -> "_Span":
        """To whole blocks, as far as they lie in ``[low, high)``."""
        return _Span(
            max(self.low // BLOCK * BLOCK, low),
            min(-(-self.high // BLOCK) * BLOCK, high),
            self.wanted,
            self.stop,
        )

    @property
    def size(self) -> int:
        return self.high - self.low

    @property
    def dense(self) -> bool:
        return self.wanted >= _DENSE * self.size


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
            span = _Span(bit.piece.base, bit.stop, bit.nbytes, bit.stop)
            known = self.spans.get(bit.source)
            self.spans[bit.source] = known.joined(span) if known else span

    def want(self, source: int, nbytes: int) -> None:
        """All of a source: the scales of quantised bits."""
        self.spans[source] = _Span(0, nbytes, nbytes, nbytes)

    @property
    def hull(self) -> int:
        return sum(span.size for span in self.spans.values())

    def order(self, plan: Plan) -> tuple[str, int]:
        if not self.spans:
            return "", 0
        first = max(self.spans, key=lambda s: self.spans[s].wanted)
        chunk = plan.sources[first]
        return chunk.file, chunk.offset + self.spans[first].low


class _Group:
    """Tiles of one task."""

    def __init__(self, limit: Limits) -> None:
        self.tiles: list[_Tile] = []
        self.spans: dict[int, _Span] = {}
        self._limit, self._hull, self._written = limit, 0, 0

    def take(self, tile: _Tile) -> bool:
        """Add ``tile`` if it shares source bytes with the group, or if both are small."""
        joined, growth, shares = {}, 0, False
        for source, span in tile.spans.items():
            known = self.spans.get(source)
            if known is None:
                joined[source] = span
                growth += span.size
            else:
                shares = shares or (span.low < known.high and known.low < span.high)
                joined[source] = known.joined(span)
                growth += joined[source].size - known.size
        if self.tiles and not self._fits(tile, self._hull + growth, shares=shares):
            return False
        self.tiles.append(tile)
        self.spans |= joined
        self._hull += growth
        self._written += tile.nbytes
        return True

    @property
    def remote(self) -> bool:
        """Whether few large requests are better than reads straight to their places."""
        return self._limit.batch > BLOCK

    def holds(self, span: _Span, at: int, left: int) -> bool:
        """Whether the source buffer has room for ``span`` at ``at`` and ``left`` bytes behind it."""
        return at + span.size + left <= self._limit.source

    def _fits(self, tile: _Tile, hull: int, *, shares: bool) -> bool:
        if not shares:
            batch = self._limit.batch
            return hull <= batch and self._written + tile.nbytes <= batch
        own = max(self._hull, tile.hull)
        return hull <= self._limit.hull and hull <= max(_USUAL_HULL, own + own // 4)


def tasks(plan: Plan, unit: Unit, limit: Limits, *, exact: bool = False) -> Iterator[Task]:
    """The tasks of ``unit``, by source position; tiles that share source bytes share a task.

    Args:
        plan: The plan.
        unit: The part of it.
        limit: Buffer sizes.
        exact: Read only wanted bytes, so that a block read in part goes unchecked; else whole
            blocks are read wherever the source has checksums.
    """
    tiles = [tile for span in unit.spans for tile in _tiles(plan, span, limit, exact=exact)]
    tiles.sort(key=lambda tile: tile.order(plan))
    group = _Group(limit)
    for tile in tiles:
        if not group.take(tile):
            yield _task(plan, group, exact=exact)
            group = _Group(limit)
            group.take(tile)
    if group.tiles:
        yield _task(plan, group, exact=exact)


def _tiles(plan: Plan, span: Span, limit: Limits, *, exact: bool) -> list[_Tile]:
    """The tiles of one span."""
    tiles = _cut(plan, span, BLOCK)
    if any(t.hull > limit.hull for t in tiles):
        # Reading runs pays more the longer they are, and wider tiles have longer ones.
        wide = max(BLOCK, limit.tile // _narrowing(plan, span.target) // BLOCK * BLOCK)
        tiles = _cut(plan, span, wide)
    for tile in tiles:
        for source, stretch in tile.spans.items():
            bounds = _block_bounds(plan, source, exact=exact)
            if bounds is not None:
                tile.spans[source] = stretch.rounded(*bounds)
    return tiles


def _block_bounds(plan: Plan, source: int, *, exact: bool) -> tuple[int, int] | None:
    """The stretch of a source that is read in whole blocks; None: nothing of it is checked.

    That is all of one with checksums, or, where only wanted bytes are read, the one stretch that is
    wanted whole. An encoded source is one block, which decodes as a whole.
    """
    chunk = plan.sources[source]
    if chunk.coding is not None:
        return 0, chunk.extent
    if chunk.xxh3 is None:
        return None
    return plan.stretches.get(source) if exact else (0, chunk.nbytes)


def _narrowing(plan: Plan, target: int) -> int:
    """Source bytes that one byte of a target takes at most: casts may halve or quarter them."""
    rows = plan.rows[plan.starts[target] : plan.starts[target + 1], MOVE]
    widest = max((plan.movements[m].dtype.itemsize for m in rows.tolist()), default=1)
    return max(1, -(-widest // plan.targets[target].spec.dtype.itemsize))


def _cut(plan: Plan, span: Span, step: int) -> list[_Tile]:
    target, low, high = span
    total = plan.targets[target].nbytes
    if low >= high:
        return []
    edges = [*range(low, high, step), high]
    bounds = sorted({0, *edges, total})
    tiles = {a: _Tile(target, a, b - a) for a, b in pairwise(edges)}
    for row in plan.rows[plan.starts[target] : plan.starts[target + 1]].tolist():
        move = plan.movements[row[MOVE]]
        digits = move.digits
        if not move.computed:
            digits = (*digits, Digit(move.dtype.itemsize, 1, 1))
        # Cells are cut on the target side.
        turned = Piece(row[TO], row[FROM], tuple(Digit(n, t, w) for n, w, t in digits))
        for cell, part in cells(turned, total, bounds):
            tile = tiles.get(bounds[cell])
            if tile is not None:
                piece = Piece(part.target, part.base - tile.start, part.turned().digits)
                tile.add(_Bit(row[SOURCE], piece.merged(), move, row[SCALE]))
                if row[SCALE] >= 0:
                    tile.want(row[SCALE], plan.sources[row[SCALE]].extent)
    return list(tiles.values())


def _task(plan: Plan, group: _Group, *, exact: bool) -> Task:
    reads: list[Read] = []
    packs: list[Pack] = []
    at, through, verify = 0, {}, []
    straight = set() if group.remote else _straight(plan, group)
    left = sum(span.wanted for source, span in group.spans.items() if source not in straight)
    scales = {bit.scale for tile in group.tiles for bit in tile.bits}
    for source in sorted(group.spans, key=_in_file_order(plan, scales)):
        if source in straight:
            continue
        span = group.spans[source]
        checked = _block_bounds(plan, source, exact=exact) is not None
        if group.holds(span, at, left - span.wanted) and (checked or span.dense):
            left -= span.wanted
            shared = checked and span.high - BLOCK < span.stop < span.high
            reads.append(Read(source, span.low, span.size, at, shared))
            through[source] = at - span.low
            at += span.size
        elif checked:
            verify.append(source)
    outputs = []
    for tile in sorted(group.tiles, key=lambda t: (t.target, t.start)):
        moves, direct = [], []
        for bit in tile.bits:
            if bit.source in straight:
                piece = Piece(0, bit.piece.target, bit.piece.digits)
                direct.append(Scatter(bit.source, bit.piece.base, bit.nbytes, piece))
                continue
            if bit.source == ZEROS:
                moves.append(Move(bit.piece, bit.move, fill=True, origin=bit.piece, scales=0))
                continue
            shift = through.get(bit.source)
            if shift is not None:
                origin = bit.piece
                piece = Piece(origin.base + shift, origin.target, origin.digits)
            else:
                encoded = plan.sources[bit.source].coding is not None
                pack, piece, origin = _packed(bit, at, exact=exact, encoded=encoded)
                packs.append(pack)
                at += bit.nbytes
            beside = through[bit.scale] if bit.scale >= 0 else 0
            moves.append(Move(piece, bit.move, fill=False, origin=origin, scales=beside))
        outputs.append(Output(tile.target, tile.start, tile.nbytes, tuple(moves), tuple(direct)))
    swept = {pack.source for pack in packs if pack.sweep}
    verify = [source for source in verify if source not in swept]
    return Task(tuple(reads), tuple(packs), tuple(outputs), tuple(verify))


def _in_file_order(plan: Plan, scales: set[int]) -> Callable[[int], tuple[bool, str, int]]:
    """Sources by their place in the files, scales first: what needs them is never staged."""

    def key(source: int) -> tuple[bool, str, int]:
        chunk = plan.sources[source]
        return source not in scales, chunk.file, chunk.offset

    return key


def _straight(plan: Plan, group: _Group) -> set[int]:
    """Sources of the group that need no buffer: nothing to verify or decode, every bit straight."""
    out = {
        source
        for source in group.spans
        if plan.sources[source].xxh3 is None and plan.sources[source].coding is None
    }
    for tile in group.tiles:
        for bit in tile.bits:
            out.discard(bit.scale)
            if not bit.straight:
                out.discard(bit.source)
    return out


def _packed(bit: _Bit, at: int, *, exact: bool, encoded: bool) -> tuple[Pack, Piece, Piece]:
    """The runs of ``bit`` put side by side at ``at``, in source order.

    Returns:
        The pack, the piece from the buffer to the output, and the same digits with their addresses
        in the source.
    """
    ordered = bit.piece.turned().merged().turned().digits
    inner, steps, step = bit.item, [], bit.item
    for d in reversed(ordered):
        inner = step * d.count if d.address == step == inner else inner
        steps.append(step)
        step *= d.count
    steps.reverse()
    chunk_to_buffer = tuple(
        Digit(d.count, d.address, n) for d, n in zip(ordered, steps, strict=True)
    )
    if bit.item > 1:
        chunk_to_buffer += (Digit(bit.item, 1, 1),)
    piece = Piece(bit.piece.base, at, chunk_to_buffer).merged()
    runs = bit.nbytes // inner
    close = runs > 1 and runs * _SWEPT_GAP > bit.stop - bit.piece.base
    sweep = encoded or (close and not exact)
    moved = Piece(
        at,
        bit.piece.target,
        tuple(Digit(d.count, n, d.stride) for d, n in zip(ordered, steps, strict=True)),
    )
    origin = Piece(bit.piece.base, bit.piece.target, ordered)
    # Only what is computed element by element asks for the origin, digit by digit.
    return (
        Pack(bit.source, piece, sweep),
        moved if bit.move.computed else moved.merged(),
        origin,
    )
