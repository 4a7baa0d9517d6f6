"""Schedules by name, and programs from them; pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from d9d_ckpt.errors import LayoutError, UsageError
from d9d_ckpt.layout.topology import Topology
from d9d_train.parallel.pipeline.actions import Program, parse
from d9d_train.parallel.pipeline.check import check
from d9d_train.parallel.pipeline.communicate import with_communication
from d9d_train.parallel.pipeline.schedules.alternating import interleaved, one_f_one_b, zb1p
from d9d_train.parallel.pipeline.schedules.vees import dualpipev, zbv
from d9d_train.parallel.pipeline.schedules.waves import forward_only, gpipe, looped_bfs
from d9d_train.parallel.pipeline.uncollected import uncollected

Builder = Callable[[int, int, int], Program]
"""Computations from stages, ranks and micro-batches."""

BUILDERS: Mapping[str, Builder] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "zb1p": zb1p,
    "zbv": zbv,
    "dualpipev": dualpipev,
    "forward_only": forward_only,
}


@dataclass(frozen=True, slots=True)
class _Place:
    """How a schedule puts stages on ranks, as `Topology` says it: ``usual`` of them a rank, in ``order``."""

    usual: int = 1
    order: str = "loop"


_PLACES = {
    "interleaved": _Place(usual=2),
    "looped_bfs": _Place(usual=2),
    "zbv": _Place(usual=2, order="v"),
    "dualpipev": _Place(usual=2, order="v"),
}


def placement(name: str, stages_per_rank: int | None = None) -> tuple[int, str]:
    """The ``virtual`` and ``order`` of the `Topology` that a schedule is for.

    Args:
        name: One of `BUILDERS`.
        stages_per_rank: None for the schedule's usual number: 1, or 2 where it needs more.

    Raises:
        UsageError: There is no schedule of that name.
    """
    _builder(name)
    place = _PLACES.get(name, _Place())
    return place.usual if stages_per_rank is None else stages_per_rank, place.order


@uncollected()
def build(name: str, stages: int, ranks: int, microbatches: int) -> Program:
    """A schedule's program with its communication, proven to end.

    Args:
        name: One of `BUILDERS`.
        stages: Of the whole pipeline.
        ranks: Pipeline ranks.
        microbatches: Of a step.

    Raises:
        UsageError: There is no schedule of that name.
        LayoutError: The schedule cannot be made of these numbers.
    """
    built = with_communication(_builder(name)(stages, ranks, microbatches))
    check(built)
    return built


@uncollected()
def from_csv(text: str) -> Program:
    """The program that a CSV says, in torch's form, proven to end; messages are added if it has none.

    Raises:
        UsageError: A cell says no action.
        LayoutError: The program is not complete, or does not end.
    """
    given = parse(text)
    program = given if given.has_messages else with_communication(given)
    check(program)
    return program


def placement_of(program: Program) -> tuple[int, str]:
    """The ``virtual`` and ``order`` of the `Topology` that puts stages on the ranks of a program.

    Raises:
        LayoutError: None does.
    """
    ranks, rank_of = len(program.ranks), program.rank_of
    virtual, rest = divmod(program.stages, ranks)
    for order in ("loop", "v") if virtual and not rest else ():
        topology = Topology(pp=ranks, virtual=virtual, order=order)
        if all(topology.pipeline_rank(stage) == rank for stage, rank in rank_of.items()):
            return virtual, order
    raise LayoutError(
        f"pipeline: stages are on ranks {[rank_of[s] for s in sorted(rank_of)]}; expected them in a "
        "loop (0, 1, 0, 1) or in a V (0, 1, 1, 0), the same number on every rank"
    )


def _builder(name: str) -> Builder:
    if name not in BUILDERS:
        raise UsageError(f"pipeline: no schedule {name!r}; known: {', '.join(BUILDERS)}")
    return BUILDERS[name]
