"""Saves, conversions and prunes under a fault at every I/O operation in turn, and what is left then.

    python tools/fault_drill.py                     # 13 minutes, every place and command in turns
    python tools/fault_drill.py --seconds 100
    python tools/fault_drill.py --all --part 1/8    # every fault of an eighth of them
    python tools/fault_drill.py --peer dcp          # torch's DCP through the same faults of a disk

Each command runs in a child process on a small checkpoint; the k-th operation of a kind goes wrong.
On the local disk that is an `os` call of any of its processes (tools/drill/syscalls.py), on S3 a
request that passes a proxy before rclone or moto (objects.py), elsewhere a call of an fsspec file
system that lacks something (shims.py). After each fault it is checked that

- what has a record opens, verifies, and holds the expected tensors bit for bit;
- the checkpoint that was there before is there, or the new one; source and neighbours are untouched;
- the command ended within 30 s, with success or a CkptError;
- of several ranks, that what ends a save on one is raised on all, at once, with rank, path and cause
  (team.py);
- the same command again, with --resume or --overwrite where its refusal tells so, succeeds and
  leaves the checkpoint and nothing else.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

import torch

from drill import children, dcp, objects, saves, scenes, shims, team
from drill.board import Board, Fault
from drill.places import Local, Place
from drill.scenes import Result, Scene, Trees, Violation

PLACES = ("local", "rclone", "moto", *(s.protocol for s in shims.SHIMS))
COLUMNS = ("place", "operation", "fault")
KINDS = ("unloadable", "harmed", "hang", "leftover", "crash")
_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of our own is made in it
_TURNS = {"local": 10, "rclone": 1, "moto": 1}
_BEGUN_AT = 6
"""The write at which the run is killed that `resume` goes on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is drilled.

    Attributes:
        places: Names of places.
        operations: Names of operations; none for all.
        peer: ``dcp`` in place of the engine, or None.
        part: Which of how many parts of all faults.
        seconds: How long at most, each job; None for no limit.
        faults: How many at most, each job; None for no limit.
        seed: Of the order.
        where: Where directories are made; None for memory, where there is such a place.
    """

    places: Sequence[str] = PLACES
    operations: Sequence[str] = ()
    peer: str | None = None
    part: tuple[int, int] = (0, 1)
    seconds: float | None = None
    faults: int | None = None
    seed: int = 0
    where: Path | None = None


@dataclass
class Report:
    """Everything that was injected.

    Attributes:
        results: One each.
        missed: Faults whose operation did not come.
        seconds: In all.
    """

    results: list[Result] = field(default_factory=list)
    missed: int = 0
    seconds: float = 0.0

    @property
    def violations(self) -> list[Violation]:
        """What must not be."""
        return [v for r in self.results for v in r.violations]

    def count(self, kind: str) -> int:
        """Faults with a violation of a kind."""
        return sum(any(v.kind == kind for v in r.violations) for r in self.results)


# -- places -------------------------------------------------------------------------------------


@contextlib.contextmanager
def prepared(wanted: Wanted) -> Iterator[list[Scene]]:
    """Every scene of the places, recorded; servers run and directories are there meanwhile."""
    where = wanted.where or (_MEMORY if _MEMORY.is_dir() else None)
    with tempfile.TemporaryDirectory(prefix="d9d-drill-", dir=where) as directory:
        root = Path(directory).resolve()
        board = Board()
        with contextlib.ExitStack() as stack:
            places = [stack.enter_context(_opened(name, root, board)) for name in wanted.places]
            if wanted.peer:
                yield [s.recorded() for s in dcp.scenes(root, places[0], board)]
                return
            made = children.run(partial(scenes.make_trees, root / "trees"), 120)
            if made.how != "done":
                raise RuntimeError(f"the drill's checkpoints: {made}")
            found = [s for place in places for s in _scenes(place, board, made.value, wanted)]
            if not found:
                raise ValueError(f"no operation {wanted.operations} at {wanted.places}")
            yield found


@contextlib.contextmanager
def _opened(name: str, root: Path, board: Board) -> Iterator[Place]:
    base = root / name / "place"
    base.mkdir(parents=True)
    shim = {s.protocol: s for s in shims.SHIMS}.get(name)
    if shim is not None:
        yield shims.Shim(shim, base, board)
    elif name == "local":
        yield Local(base, board)
    else:
        with objects.served(name, root / name, board) as bucket:
            yield bucket


def _scenes(place: Place, board: Board, trees: Trees, wanted: Wanted) -> Iterator[Scene]:
    for name in ("raw", "sharded"):
        place.send(trees.path(name), name)
    place.send(trees.path("sharded"), scenes.NEXT_DOOR)
    saving = (*saves.operations(trees), *team.operations(trees, board))
    for operation in (*scenes.OPERATIONS, *saving):
        if wanted.operations and operation.name not in wanted.operations:
            continue
        if operation.before == "begun" and place.disk:
            first = Scene(place, board, trees, scenes.OPERATIONS[0])
            scenes.begun(first, "begun", _BEGUN_AT)
        if place.disk or not operation.disk:
            yield Scene(place, board, trees, operation).recorded()


# -- running ------------------------------------------------------------------------------------


def run(wanted: Wanted, jobs: int) -> Report:
    """The faults of ``wanted``, shared among ``jobs`` processes."""
    started = time.monotonic()
    parts = [
        replace(wanted, part=(wanted.part[0] + wanted.part[1] * job, wanted.part[1] * jobs))
        for job in range(jobs)
    ]
    # A job forks on its own: it must have no threads, which a pool of a spawning parent has none of.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        reports = pool.map(_job, parts, chunksize=1)
    return Report(
        [result for report in reports for result in report.results],
        sum(report.missed for report in reports),
        time.monotonic() - started,
    )


def _job(wanted: Wanted) -> Report:
    torch.set_num_threads(1)
    children.adopt()
    started = time.monotonic()
    report = Report()
    with prepared(wanted) as found:
        for scene, fault in _drawn(found, wanted)[: wanted.faults]:
            if wanted.seconds is not None and time.monotonic() - started > wanted.seconds:
                break
            result = scene.drill(fault)
            if result is None:
                report.missed += 1
            else:
                report.results.append(result)
    return report


def _drawn(found: Sequence[Scene], wanted: Wanted) -> list[tuple[Scene, Fault]]:
    """The faults of this part in random order, the scenes in turns.

    Where time is short, each scene has its share, and the disk, whose faults take 0.1 s, more of it
    than the object stores, where they take 2 s.
    """
    number, parts = wanted.part
    drawn: list[tuple[float, Scene, Fault]] = []
    for scene in found:
        faults = scene.faults()
        Random(f"{wanted.seed} {scene.place.name} {scene.operation.name}").shuffle(faults)
        pace = _TURNS.get(scene.place.name, 2) * scene.operation.share
        drawn += [(n / pace, scene, fault) for n, fault in enumerate(faults[number::parts])]
    drawn.sort(key=lambda item: item[0])
    return [(scene, fault) for _, scene, fault in drawn]


# -- the table ----------------------------------------------------------------------------------


def table(report: Report, columns: Sequence[str] = COLUMNS) -> str:
    """Results by ``columns``, as Markdown, with totals."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in report.results:
        groups.setdefault(tuple(_cell(result, c) for c in columns), []).append(result)
    head = [*columns, "injected", "done", "refused", "killed", *KINDS]
    lines = [_line(head), _line(["---"] * len(columns) + ["---:"] * (len(head) - len(columns)))]
    lines += [_line([*key, *_figures(members)]) for key, members in sorted(groups.items())]
    lines.append(_line(["all", *[""] * (len(columns) - 1), *_figures(report.results)]))
    return "\n".join(lines)


def _cell(result: Result, column: str) -> str:
    return result.fault.effect if column == "fault" else str(getattr(result, column))


def _figures(results: Sequence[Result]) -> list[int]:
    how = Counter(r.how for r in results)
    wrong = [sum(any(v.kind == kind for v in r.violations) for r in results) for kind in KINDS]
    return [len(results), how["done"], how["refused"], how["killed"], *wrong]


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--place", action="append", choices=PLACES, help="default: all")
    parser.add_argument("--operation", action="append", metavar="NAME", help="default: all")
    parser.add_argument("--peer", choices=["dcp"], help="what is drilled in place of the engine")
    parser.add_argument("--part", default="1/1", metavar="N/M", help="the N-th of M parts")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds", type=float, default=780.0, help="stop after that long (default 780)"
    )
    length.add_argument("--all", action="store_true", help="every fault, however long it takes")
    parser.add_argument("--seed", type=int, default=0, help="of the order (default 0)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dir", type=Path, help="where to work (default: /dev/shm)")
    parser.add_argument(
        "--by", nargs="+", choices=COLUMNS, default=COLUMNS, help="what has a row (default: each)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    part, parts = map(int, args.part.split("/"))
    places = ["local"] if args.peer else args.place or PLACES
    wanted = Wanted(
        places=places,
        operations=args.operation or (),
        peer=args.peer,
        part=(part - 1, parts),
        seconds=None if args.all else args.seconds,
        seed=args.seed,
        where=args.dir,
    )
    report = run(wanted, args.jobs)
    print(table(report, args.by))
    for v in report.violations:
        print(f"{v.kind}: {v.place}: {v.operation}: {v.fault}: {v.detail}", file=sys.stderr)
    counts = ", ".join(f"{report.count(kind)} {kind}" for kind in KINDS)
    slowest = max((r.seconds for r in report.results), default=0.0)
    print(
        f"{len(report.results)} faults ({report.missed} did not come to be), {counts}; "
        f"{report.seconds:.0f} s, slowest run {slowest:.1f} s"
    )
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
