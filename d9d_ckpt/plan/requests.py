"""Mapped tensors and a topology to requests: which box of what is wanted, by which rank."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

from d9d_ckpt.errors import LayoutError, MappingError
from d9d_ckpt.layout.placement import Cut, Placement, held, shares
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.models.family import Mapped
from d9d_ckpt.plan.lower import Request
from d9d_ckpt.tensors import Region


def whole_requests(mapped: Mapped) -> list[Request]:
    """Every tensor in one piece, as Hugging Face stores it."""
    return [
        Request(name, node, (Region.whole(node.shape),), (0,))
        for name, node in mapped.nodes.items()
    ]


def stored_requests(
    mapped: Mapped, topology: Topology, *, largest: int | None = None
) -> list[Request]:
    """Every box that is stored, with the rank that stores it; each element once.

    Args:
        mapped: The tensors.
        topology: The layout.
        largest: Bytes of a box at most; None leaves a rank's share in one piece.
    """
    place = _Placing(mapped, topology)
    out = []
    for turn, (name, node) in enumerate(sorted(mapped.nodes.items())):
        first, cut, _ = place.of(name)
        itemsize = node.dtype.itemsize
        with _naming(name):
            boxes = shares(node.shape, itemsize, cut, topology)
        regions: list[Region] = []
        ranks: list[int] = []
        for share in boxes:
            most = share.box.numel if largest is None else largest // itemsize
            slabs = list(share.box.slabs(most))
            regions += slabs
            ranks += [first + share.owner(turn)] * len(slabs)
        out.append(Request(name, node, tuple(regions), ranks))
    order = {name: at for at, name in enumerate(mapped.nodes)}
    return sorted(out, key=lambda request: order[request.name])


def held_requests(mapped: Mapped, topology: Topology) -> list[Request]:
    """Every box that each rank holds in memory after a load, replicas included."""
    place = _Placing(mapped, topology)
    out = []
    for name, node in mapped.nodes.items():
        first, cut, last = place.of(name)
        with _naming(name):
            by_flat = held(node.shape, cut, topology)
        stride = topology.fsdp * topology.tp
        regions: list[Region] = []
        ranks: list[int] = []
        for base in dict.fromkeys((first, last)):
            for replica in range(topology.dp_replicate):
                for flat, boxes in enumerate(by_flat):
                    regions += boxes
                    ranks += [base + replica * stride + flat] * len(boxes)
        out.append(Request(name, node, tuple(regions), ranks))
    return out


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Refusals of the layout know shapes; the reader wants the tensor as well."""
    try:
        yield
    except LayoutError as error:
        raise LayoutError(f"tensor {name!r} {error}") from error


class _Placing:
    """First rank of the pipeline rank of a tensor, how it is cut, and who else reads it."""

    def __init__(self, mapped: Mapped, topology: Topology) -> None:
        self._placements: Mapping[str, Placement] = mapped.placements
        self._topology = topology
        self._layer_ranks = topology.pipeline_rank_of_layers(mapped.layers) if mapped.layers else ()
        stages = topology.pp * topology.virtual
        self._ends = {
            "first": topology.pipeline_rank(0),
            "last": topology.pipeline_rank(stages - 1),
        }
        self._check_overrides(mapped)

    def of(self, name: str) -> tuple[int, Cut, int]:
        placement = self._placements.get(name)
        override = self._override(name)
        if placement is None:
            placement = self._unplaced(name, override)
        elif override is not None:
            placement = placement._replace(cut=_cut(name, override))
        stage = self._stage(placement.stage, override)
        last = self._ends["last"] if placement.tied else stage
        size = self._topology.stage_ranks
        return stage * size, placement.cut, last * size

    def _stage(self, stage: int | str, override: Mapping[str, int] | None) -> int:
        if override is not None and "pp" in override:
            return override["pp"]
        return self._ends[stage] if isinstance(stage, str) else self._layer_ranks[stage]

    def _override(self, name: str) -> Mapping[str, int] | None:
        for glob, dims in self._topology.tensors:
            if fnmatchcase(name, glob):
                return dict(dims)
        return None

    def _unplaced(self, name: str, override: Mapping[str, int] | None) -> Placement:
        """Rows over dp_shard x cp; the other axes need the layout file to name a dim."""
        named = set(override or ())
        for axis in ("pp", "tp", "ep"):
            degree = getattr(self._topology, axis)
            if degree > 1 and axis not in named:
                raise LayoutError(
                    f"tensor {name!r}: no family places it on {axis}={degree}; give --model, or a "
                    f"layout file with tensors: {{{name!r}: {{{axis}: DIM}}}}"
                )
        return Placement("first", _cut(name, override or {}))

    def _check_overrides(self, mapped: Mapped) -> None:
        for glob, dims in self._topology.tensors:
            if not any(fnmatchcase(name, glob) for name in mapped.nodes):
                raise MappingError(f"layout: tensors[{glob!r}] matches no tensor")
            if dict(dims).get("pp", 0) >= self._topology.pp:
                raise LayoutError(
                    f"layout: tensors[{glob!r}] names a stage beyond pp={self._topology.pp}"
                )


def _cut(name: str, dims: Mapping[str, int]) -> Cut:
    for axis, only in (("ep", 0), ("dp_shard", 0), ("cp", 0)):
        if dims.get(axis, only) != only:
            raise LayoutError(f"tensor {name!r}: {axis} can only cut dim {only}, not {dims[axis]}")
    return Cut(tp=dims.get("tp"), units=0, experts="ep" in dims)
