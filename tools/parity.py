"""Every topology beside one process in float64: losses, norms, gradients, and what steps make of them.

    python tools/parity.py                              # all of them: some minutes on 2 cores
    python tools/parity.py --only cp=8 --json out.json  # those whose line has these words in it
    python tools/parity.py --schedules                  # every schedule x micro-batches on pipelines

Each topology trains two steps on forked gloo ranks, with the code and the config of a real run (packed
documents, dropout, balance loss and balance bias, clipping). Compared are the loss and the norm of each
step, every rank's shard of every gradient, and parameters and buffers after the steps. The table shows
the largest differences, relative to the largest element of a tensor, and where the largest of all is.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

from helpers.axes import EIGHT, PIPELINES, SIX, config_of, schedules
from helpers.trainers import (
    BOUND,
    Difference,
    Trained,
    alone,
    difference,
    documents,
    spread,
    spread_all,
)

SECONDS = 180.0
"""Bound on one topology."""


@dataclass(frozen=True)
class Outcome:
    """What became of a topology.

    Attributes:
        line: The topology.
        seconds: What it took.
        found: None if it failed.
        error: Why it failed.
    """

    line: str
    seconds: float
    found: Difference | None
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether it is within the bound."""
        return self.found is not None and self.found.worst <= BOUND


class Parity:
    """Topologies beside one process each model, which runs once."""

    def __init__(self, tokens: str) -> None:
        self._tokens = tokens
        self._alone: dict[str, Trained] = {}

    def of(self, line: str) -> Outcome:
        """Run a topology and compare."""
        begun = time.perf_counter()
        try:
            made = config_of(line, self._tokens)
            found, error = difference(made, self._whole(line), spread(made, SECONDS)), ""
        except Exception as failure:  # noqa: BLE001 - told in the table; the others go on
            found, error = None, str(failure)
        return Outcome(line, time.perf_counter() - begun, found, error)

    def of_all(self, lines: Sequence[str]) -> Iterator[Outcome]:
        """Run one pipeline's schedules in one launch, and compare each."""
        begun = time.perf_counter()
        many = [config_of(line, self._tokens) for line in lines]
        runs = spread_all(many)
        seconds = (time.perf_counter() - begun) / len(lines)
        for line, made, ranks in zip(lines, many, runs, strict=True):
            yield Outcome(line, seconds, difference(made, self._whole(line), ranks))

    def _whole(self, line: str) -> Trained:
        model = line.split()[0]
        if model not in self._alone:
            self._alone[model] = alone(config_of(model, self._tokens))
        return self._alone[model]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="part of a topology's line")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--schedules", action="store_true", help="pipelines, each schedule of theirs"
    )
    args = parser.parse_args(argv)
    lines = [line for line in (PIPELINES if args.schedules else EIGHT + SIX) if args.only in line]
    if not lines:
        parser.error(f"no topology has {args.only!r} in its line")
    begun = time.perf_counter()
    print(f"{'loss':>8} {'norm':>8} {'gradient':>8} {'value':>8} {'s':>5}  topology: furthest off")
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        parity = Parity(documents(Path(folder) / "tokens.bin"))
        for line in lines:
            found = parity.of_all(schedules(line)) if args.schedules else [parity.of(line)]
            for outcome in found:
                outcomes.append(outcome)
                print(told(outcome), flush=True)
    missed = [outcome for outcome in outcomes if not outcome.good]
    seconds = time.perf_counter() - begun
    worst = max((o.found.worst for o in outcomes if o.found), default=float("nan"))
    print(
        f"{len(outcomes)} topologies, {len(missed)} beyond {BOUND:.0e}, worst {worst:.1e}, "
        f"{seconds:.0f} s"
    )
    if args.json:
        args.json.write_text(json.dumps(as_json(outcomes, seconds), indent=1) + "\n")
    return 1 if missed else 0


def told(outcome: Outcome) -> str:
    """A row of the table."""
    mark = "" if outcome.good else "  MISSED"
    if outcome.found is None:
        return f"{'failed':>35} {outcome.seconds:5.1f}  {outcome.line}{mark}\n{outcome.error}"
    found = outcome.found
    figures = " ".join(
        f"{figure:8.1e}" for figure in (found.loss, found.norm, found.gradient, found.value)
    )
    return f"{figures} {outcome.seconds:5.1f}  {outcome.line}: {found.where}{mark}"


def as_json(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """The figures."""
    return {
        "bound": BOUND,
        "seconds": seconds,
        "topologies": [asdict(outcome) | {"good": outcome.good} for outcome in outcomes],
    }


if __name__ == "__main__":
    sys.exit(main())
