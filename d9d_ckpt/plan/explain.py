"""What a plan will cost each rank, exactly, before a byte moves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from d9d_ckpt.plan.plan import FROM, MOVE, SCALE, SOURCE, TARGET, Columns, Plan
from d9d_ckpt.plan.schedule import Limits
from d9d_ckpt.tensors import BLOCK


@dataclass(frozen=True)
class RankCost:
    """Bytes and requests of one rank.

    Attributes:
        rank: The rank.
        bytes_read: Source bytes that it reads.
        bytes_needed: Distinct source bytes that its regions are made of; scales and encoded chunks
            count whole, as they are read.
        bytes_written: Bytes that it stores or fills.
        requests: Ranges that it asks for.
        buffer_bytes: Its buffers.
    """

    rank: int
    bytes_read: int
    bytes_needed: int
    bytes_written: int
    requests: int
    buffer_bytes: int


def costs(plan: Plan, world: int, limit: Limits, *, whole_blocks: bool) -> list[RankCost]:
    """The cost of each of ``world`` ranks, when each reads for the targets that are its own.

    Args:
        plan: The plan.
        world: Ranks of the layout.
        limit: Buffer sizes.
        whole_blocks: Whether blocks of a source with checksums are read whole.
    """
    rank_of = np.array([t.rank for t in plan.targets] or [0], np.int64)
    written = np.bincount(
        rank_of[: len(plan.targets)],
        weights=[t.nbytes for t in plan.targets] if plan.targets else None,
        minlength=world,
    ).astype(np.int64)
    encoded = np.array([c.coding is not None for c in plan.sources] or [False], bool)
    real = plan.rows[:, SOURCE] >= 0
    needed, read, requests = (np.zeros(world, np.int64) for _ in range(3))
    owners, nbytes = _whole(plan, plan.rows[real], rank_of, encoded)
    for total, amount in ((needed, nbytes), (read, nbytes), (requests, np.ones_like(nbytes))):
        np.add.at(total, owners, amount)
    real &= ~encoded[plan.rows[:, SOURCE]]
    rows = plan.rows[real]
    if len(rows):
        ranks = rank_of[rows[:, TARGET]]
        checked = np.array([c.xxh3 is not None for c in plan.sources], bool)[rows[:, SOURCE]]
        alone = _alone(plan, rows, ranks)
        if whole_blocks:
            alone &= ~checked
        bytes_each = plan.row_bytes[real]
        runs = bytes_each // plan.row_runs[real]
        for total, amount in ((needed, bytes_each), (read, bytes_each), (requests, runs)):
            np.add.at(total, ranks[alone], amount[alone])
        if not alone.all():
            merged = _merged(_intervals(plan, rows[~alone], ranks[~alone]))
            np.add.at(needed, merged[:, 0], merged[:, 3] - merged[:, 2])
            if whole_blocks:
                merged = _merged(_rounded(plan, merged))
            np.add.at(read, merged[:, 0], merged[:, 3] - merged[:, 2])
            np.add.at(requests, merged[:, 0], 1)
    return [
        RankCost(r, int(read[r]), int(needed[r]), int(written[r]), int(requests[r]), limit.total)
        for r in range(world)
    ]


def amplification(ranks: Sequence[RankCost]) -> float:
    """Bytes read over distinct bytes needed, summed over ranks; 1.0 for nothing."""
    needed = sum(r.bytes_needed for r in ranks)
    return sum(r.bytes_read for r in ranks) / needed if needed else 1.0


def _whole(
    plan: Plan, rows: Columns, rank_of: Columns, encoded: npt.NDArray[np.bool_]
) -> tuple[Columns, Columns]:
    """The rank and the stored bytes of every source that a rank reads whole: scales and encoded ones."""
    parts = []
    for column, mine in ((SCALE, rows[:, SCALE] >= 0), (SOURCE, encoded[rows[:, SOURCE]])):
        parts.append(np.column_stack([rank_of[rows[mine, TARGET]], rows[mine, column]]))
    pairs = np.unique(np.concatenate(parts), axis=0)
    sizes = np.array([c.nbytes for c in plan.sources] or [0], np.int64)
    return pairs[:, 0], sizes[pairs[:, 1]]


def _alone(plan: Plan, rows: Columns, ranks: Columns) -> npt.NDArray[np.bool_]:
    """Copies that share no stretch of their source with another copy of their rank.

    Their bytes are distinct as they are; only the others need their runs laid out one by one.
    """
    repeats = np.array([any(not d.address for d in m.digits) for m in plan.movements], bool)
    order = np.lexsort((rows[:, FROM], rows[:, SOURCE], ranks))
    sources, owners = rows[order, SOURCE], ranks[order]
    start = rows[order, FROM]
    hulls = np.array([m.hull for m in plan.movements], np.int64)
    stop = start + hulls[rows[order, MOVE]]
    groups = np.zeros(len(rows), np.int64)
    groups[1:] = np.cumsum((sources[1:] != sources[:-1]) | (owners[1:] != owners[:-1]))
    shift = groups * (int(stop.max()) + 1)
    reach = np.maximum.accumulate(stop + shift)
    overlaps = np.zeros(len(rows), bool)
    overlaps[1:] = start[1:] + shift[1:] < reach[:-1]
    overlaps[:-1] |= overlaps[1:]
    out = np.empty(len(rows), bool)
    out[order] = ~overlaps
    alone: npt.NDArray[np.bool_] = out & ~repeats[rows[:, MOVE]]
    return alone


def _intervals(plan: Plan, rows: Columns, ranks: Columns) -> Columns:
    """[n, 4] of (rank, source, first, stop): the stretches of bytes that every copy reads."""
    parts = []
    for number in np.unique(rows[:, MOVE]).tolist():
        move = plan.movements[number]
        mine = rows[:, MOVE] == number
        item = move.dtype.itemsize
        digits = sorted((d for d in move.digits if d.address), key=lambda d: d.address)
        run, outer = item, list(digits)
        while outer and outer[0].address == run:
            run *= outer.pop(0).count
        first = rows[mine, FROM]
        keys = np.stack([ranks[mine], rows[mine, SOURCE]], 1)
        for d in outer:
            steps = np.arange(d.count) * d.address
            first = (first[:, None] + steps).reshape(-1)
            keys = np.repeat(keys, d.count, 0)
        parts.append(np.column_stack([keys, first, first + run]))
    return np.concatenate(parts)


def _merged(spans: Columns) -> Columns:
    """Overlapping and touching stretches joined."""
    spans = spans[np.lexsort((spans[:, 2], spans[:, 1], spans[:, 0]))]
    # Stretches of one (rank, source) are moved behind those of the one before, so that one running
    # maximum serves all.
    groups = np.zeros(len(spans), np.int64)
    groups[1:] = np.cumsum((spans[1:, :2] != spans[:-1, :2]).any(1))
    shift = groups * (int(spans[:, 3].max()) + 1)
    reach = np.maximum.accumulate(spans[:, 3] + shift)
    opens = np.ones(len(spans), bool)
    opens[1:] = spans[1:, 2] + shift[1:] > reach[:-1]
    out = spans[opens].copy()
    closing = np.append(np.flatnonzero(opens)[1:] - 1, len(spans) - 1)
    out[:, 3] = reach[closing] - shift[closing]
    return out


def _rounded(plan: Plan, spans: Columns) -> Columns:
    """Stretches of sources with checksums grown to whole blocks."""
    checked = np.array([c.xxh3 is not None for c in plan.sources], bool)[spans[:, 1]]
    nbytes = np.array([c.nbytes for c in plan.sources], np.int64)[spans[:, 1]]
    out = spans.copy()
    out[checked, 2] = spans[checked, 2] // BLOCK * BLOCK
    ends = np.minimum(-(-spans[checked, 3] // BLOCK) * BLOCK, nbytes[checked])
    out[checked, 3] = ends
    return out
