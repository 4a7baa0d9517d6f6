"""What a family says about where a tensor goes, and the boxes that follow for every rank.

Everything here is a function of shape, placement and topology, so equal tensors share the result.
"""

from functools import lru_cache
from typing import NamedTuple

from d9d_ckpt.errors import LayoutError
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.tensors import Region

SMALL = 64 << 10
"""Replicated boxes of fewer bytes go whole to one owner."""


class Heads(NamedTuple):
    """The units of a fused qkv tensor: ``groups`` times (``queries`` q heads, k, v) of ``rows`` each."""

    groups: int
    queries: int
    rows: int


class Cut(NamedTuple):
    """How one tensor is cut inside a pipeline stage.

    Attributes:
        tp: The dim that tp cuts; None replicates over tp.
        units: Logical units along that dim, which tp must divide; 0: the dim has none.
        heads: For fused qkv, whose units may be replicated when tp exceeds the KV heads.
        experts: Dim 0 counts experts, which ep and efsdp cut in place of tp and fsdp.
        vocab: Dim 0 is a vocabulary, cut as if padded.
        rows: Whether fsdp cuts dim 0.
    """

    tp: int | None = None
    units: int = 1
    heads: Heads | None = None
    experts: bool = False
    vocab: bool = False
    rows: bool = True


class Placement(NamedTuple):
    """Where one tensor goes.

    Attributes:
        stage: Layer index, or ``first`` or ``last`` for what comes before and after the layers.
        cut: How it is cut inside its stage.
        tied: Stored by the first stage and read by the last as well.
    """

    stage: int | str
    cut: Cut = Cut()
    tied: bool = False


REPLICATED = Cut()


class Share(NamedTuple):
    """A box that is stored once, and the ranks that hold it.

    Attributes:
        box: The part of the tensor.
        ranks: Its holders, as ranks within the pipeline rank, ascending.
        part: Which of them stores it; None where holders take such boxes in turn.
    """

    box: Region
    ranks: tuple[int, ...]
    part: int | None

    def owner(self, turn: int) -> int:
        """The holder that stores it, for the ``turn``-th tensor of the checkpoint."""
        return self.ranks[turn % len(self.ranks) if self.part is None else self.part]


def chunk(total: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of piece ``index`` by torch's rule: ceil-size pieces, the last short or empty."""
    size = -(-total // parts)
    start = min(index * size, total)
    return start, min(size, total - start)


@lru_cache(maxsize=256)
def held(shape: tuple[int, ...], cut: Cut, topology: Topology) -> tuple[tuple[Region, ...], ...]:
    """The boxes of a tensor that each (fsdp, tp) rank of its stage holds, in local row order.

    The local tensor is their concatenation along dim 0. Index ``fsdp_i * tp + tp_i``; replicas
    over dp_replicate hold the same.

    Raises:
        LayoutError: A unit would be cut, or a dim does not divide.
    """
    ranks = topology.fsdp * topology.tp
    if not shape:
        return ((Region((), ()),),) * ranks
    if cut.experts:
        return tuple(_expert_boxes(shape, topology, flat) for flat in range(ranks))
    out = []
    for flat in range(ranks):
        fsdp_i, tp_i = divmod(flat, topology.tp)
        boxes = _tp_boxes(shape, cut, topology, tp_i)
        if cut.rows:
            boxes = _rows(boxes, topology.fsdp, fsdp_i)
        out.append(tuple(b for b in (_clip(b, shape[0]) for b in boxes) if b.numel))
    return tuple(out)


def _tp_boxes(shape: tuple[int, ...], cut: Cut, topology: Topology, tp_i: int) -> list[Region]:
    tp, whole = topology.tp, Region.whole(shape)
    if cut.vocab:
        multiple = topology.vocab_multiple * tp
        rows = -(-shape[0] // multiple) * multiple // tp
        return [Region((tp_i * rows, *whole.start[1:]), (rows, *shape[1:]))]
    if cut.tp is None or tp == 1:
        return [whole]
    if cut.heads is not None and tp > cut.heads.groups:
        return _replicated_heads(whole, cut.heads, tp, tp_i)
    if cut.tp >= len(shape):
        raise LayoutError(f"{list(shape)}: has no dim {cut.tp} for tp={tp} to cut")
    if cut.units % tp or shape[cut.tp] % tp:
        units = cut.units or shape[cut.tp]
        raise LayoutError(
            f"{list(shape)}: tp={tp} does not divide the {units} units of dim {cut.tp} "
            f"(size {shape[cut.tp]}); choose another tp"
        )
    size = shape[cut.tp] // tp
    return [whole.narrow(cut.tp, tp_i * size, size)]


def _replicated_heads(whole: Region, heads: Heads, tp: int, tp_i: int) -> list[Region]:
    """Tp over more ranks than KV heads: a slice of the group's q heads, then its k, then its v."""
    groups, queries, rows = heads
    if tp % groups or groups * queries % tp:
        raise LayoutError(
            f"{list(whole.shape)}: tp={tp} must divide the {groups} KV heads, or be "
            f"a multiple of them that divides the {groups * queries} q heads"
        )
    per_group = tp // groups
    group, piece = divmod(tp_i, per_group)
    base, part = group * (queries + 2) * rows, queries // per_group * rows
    return [
        whole.narrow(0, base + piece * part, part),
        whole.narrow(0, base + queries * rows, rows),
        whole.narrow(0, base + (queries + 1) * rows, rows),
    ]


def _rows(boxes: list[Region], parts: int, index: int) -> list[Region]:
    """The ``index``-th chunk of the concatenation of ``boxes`` along dim 0."""
    start, length = chunk(sum(b.shape[0] for b in boxes), parts, index)
    out = []
    for b in boxes:
        low, high = max(start, 0), min(start + length, b.shape[0])
        if low < high:
            out.append(b.narrow(0, low, high - low))
        start -= b.shape[0]
    return out


def _clip(box: Region, rows: int) -> Region:
    """``box`` without the vocabulary rows that are padding."""
    start = min(box.start[0], rows)
    length = min(box.start[0] + box.shape[0], rows) - start
    return Region((start, *box.start[1:]), (length, *box.shape[1:]))


def _expert_boxes(shape: tuple[int, ...], topology: Topology, flat: int) -> tuple[Region, ...]:
    ep, efsdp = topology.ep, topology.efsdp
    efsdp_i, ep_i = divmod(flat, ep)
    experts = shape[0]
    if experts % ep:
        raise LayoutError(f"{list(shape)}: ep={ep} does not divide its {experts} experts")
    local = Region.whole(shape).narrow(0, ep_i * (experts // ep), experts // ep)
    if experts // ep >= efsdp:
        return tuple(b for b in [local.narrow(0, *chunk(experts // ep, efsdp, efsdp_i))] if b.numel)
    if len(shape) < 2 or shape[1] % efsdp:
        raise LayoutError(
            f"{list(shape)}: {experts // ep} experts a rank are fewer than "
            f"dp_shard x cp x tp / ep = {efsdp}, which must then divide dim 1"
        )
    size = shape[1] // efsdp
    return (local.narrow(1, efsdp_i * size, size),)


@lru_cache(maxsize=256)
def shares(
    shape: tuple[int, ...], itemsize: int, cut: Cut, topology: Topology
) -> tuple[Share, ...]:
    """Every box of a tensor that is stored, each element in exactly one of them.

    What several ranks hold is cut along dim 0 over them, so that each stores its share; boxes
    under 64 KiB go whole to one of them in turn.
    """
    holders: dict[Region, list[int]] = {}
    for flat, boxes in enumerate(held(shape, cut, topology)):
        for box in boxes:
            holders.setdefault(box, []).append(flat)
    stride = topology.fsdp * topology.tp
    out: list[Share] = []
    for box, flats in holders.items():
        ranks = tuple(rep * stride + flat for rep in range(topology.dp_replicate) for flat in flats)
        out += divided(box, ranks, itemsize)
    return tuple(sorted(out))


def divided(box: Region, ranks: tuple[int, ...], itemsize: int) -> list[Share]:
    """What each of the holders of a box stores of it."""
    if len(ranks) == 1:
        return [Share(box, ranks, 0)]
    if not box.shape or box.numel * itemsize < SMALL:
        return [Share(box, ranks, None)]
    out = []
    for part in range(len(ranks)):
        low, high = (box.shape[0] * k // len(ranks) for k in (part, part + 1))
        if low < high:
            out.append(Share(box.narrow(0, low, high - low), ranks, part))
    return out
