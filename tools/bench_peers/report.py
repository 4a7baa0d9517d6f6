"""What a comparison is, its figures and its table."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_peers.child import Run


@dataclass(frozen=True, slots=True)
class Side:
    """One command of a comparison.

    Attributes:
        name: As printed.
        peer: `ours`, or the peer that this is a variant of.
        argv: The command.
        out: What it writes, deleted after each run; None for a load.
    """

    name: str
    peer: str
    argv: tuple[str, ...]
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """Sides that do the same work on the same number of bytes.

    Attributes:
        name: As printed.
        nbytes: Bytes that each side has to make or load.
        sides: Ours first.
    """

    name: str
    nbytes: int
    sides: tuple[Side, ...]


@dataclass(slots=True)
class Result:
    """Runs of a section's sides, in the order in which they were made."""

    section: Section
    runs: dict[str, list[Run]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


# -- figures ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """One side's figures; ratios are ours / this side's, below 1 where ours is faster.

    Attributes:
        best_s: Least wall time.
        median_s: Median wall time.
        spread: (most - least) / median.
        cpu_s: Median processor time.
        others: Median of the cores that everything else on the machine kept busy meanwhile: a
            figure far above 0 says that the times are not to be trusted.
        peak_rss: Most bytes of the largest process, over all runs.
        inner_s: Median of the time that the command gives for its work, without start-up.
        amplification: Bytes read / bytes needed, where the command counts them.
        ratio_best: Of the best times.
        ratio_median: Of the medians.
        ratio_paired: Median over rounds of the ratio within the round.
    """

    best_s: float
    median_s: float
    spread: float
    cpu_s: float
    others: float
    peak_rss: int
    inner_s: float | None
    amplification: float | None
    ratio_best: float | None
    ratio_median: float | None
    ratio_paired: float | None


def side_figures(result: Result, name: str) -> Figures:
    runs, ours = result.runs[name], result.runs["ours"]
    walls = [run.wall_s for run in runs]
    ours_walls = [run.wall_s for run in ours]
    median = statistics.median(walls)
    read = runs[-1].report.get("bytes_read")
    inner = [run.report["seconds"] for run in runs if "seconds" in run.report]
    paired = [a / b for a, b in zip(ours_walls, walls, strict=False)]
    return Figures(
        best_s=min(walls),
        median_s=median,
        spread=(max(walls) - min(walls)) / median,
        cpu_s=statistics.median(run.cpu_s for run in runs),
        others=statistics.median(run.others_cpu_s / run.wall_s for run in runs),
        peak_rss=max(run.peak_rss for run in runs),
        inner_s=statistics.median(inner) if inner else None,
        amplification=read / result.section.nbytes if read else None,
        ratio_best=min(ours_walls) / min(walls) if ours else None,
        ratio_median=statistics.median(ours_walls) / median if ours else None,
        ratio_paired=statistics.median(paired) if ours else None,
    )


def faster_variants(result: Result) -> dict[str, str]:
    """The side that stands for each peer: its variant with the least best time."""
    chosen: dict[str, str] = {}
    best: dict[str, float] = {}
    for side in result.section.sides:
        if not result.runs[side.name]:
            continue
        least = min(run.wall_s for run in result.runs[side.name])
        if least < best.get(side.peer, float("inf")):
            chosen[side.peer], best[side.peer] = side.name, least
    return chosen


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """All that was measured, section by section, for a JSON file."""
    return {result.section.name: _section_figures(result) for result in results}


def _section_figures(result: Result) -> dict[str, Any]:
    faster = faster_variants(result)
    sides = {
        side.name: {
            **asdict(side_figures(result, side.name)),
            "runs": [asdict(run) for run in result.runs[side.name]],
        }
        for side in result.section.sides
        if result.runs[side.name]
    }
    return {
        "bytes": result.section.nbytes,
        "ratios": {
            peer: {key: sides[name][key] for key in ("ratio_best", "ratio_median", "ratio_paired")}
            for peer, name in faster.items()
            if peer != "ours"
        },
        "sides": sides,
        "failures": result.failures,
    }


# -- table ------------------------------------------------------------------------------------

HEADER = (
    f"{'side':<16}{'best s':>8}{'median':>8}{'spread':>8}{'GB/s':>7}{'cpu s':>8}{'others':>8}{'inner s':>9}"
    f"{'RSS MiB':>9}{'read x':>8}   ours/side: {'best':>6}{'median':>8}{'paired':>8}"
)


def print_table(result: Result) -> None:
    print(f"\n{result.section.name}: {result.section.nbytes / 1e9:.3f} GB")
    print(HEADER)
    faster = faster_variants(result)
    for side in result.section.sides:
        if result.runs[side.name]:
            print(_row(result, side, is_faster=faster[side.peer] == side.name))
        if side.name in result.failures:
            print(f"{side.name:<16}  failed: {result.failures[side.name].splitlines()[0]}")
    sys.stdout.flush()


def _row(result: Result, side: Side, *, is_faster: bool) -> str:
    got = side_figures(result, side.name)
    row = (
        f"{side.name:<16}{got.best_s:>8.2f}{got.median_s:>8.2f}{got.spread:>8.0%}"
        f"{result.section.nbytes / got.best_s / 1e9:>7.2f}{got.cpu_s:>8.2f}{got.others:>8.2f}"
        f"{_cell(got.inner_s, 9)}{got.peak_rss / 2**20:>9.0f}{_cell(got.amplification, 8)}"
    )
    if side.peer == "ours" or got.ratio_best is None:
        return row
    ratios = f"{got.ratio_best:>6.2f}{_cell(got.ratio_median, 8)}{_cell(got.ratio_paired, 8)}"
    return f"{row}{'':>14}{ratios}{'' if is_faster else '  (its slower variant)'}"


def _cell(value: float | None, width: int) -> str:
    return f"{'-' if value is None else format(value, '.2f'):>{width}}"
