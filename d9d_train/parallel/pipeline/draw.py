"""A simulated program as a table, as a timeline in text, and as a page with a picture."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from d9d_train.parallel.pipeline.actions import Action, Kind
from d9d_train.parallel.pipeline.lockstep import Span
from d9d_train.parallel.pipeline.simulate import Simulation

_COLOURS = {
    Kind.FORWARD: ("#6fa8dc", "forward"),
    Kind.BACKWARD: ("#7fc494", "backward"),
    Kind.INPUT: ("#a5d88f", "gradient of the input"),
    Kind.WEIGHT: ("#f1c26b", "gradient of the weights"),
}
_MOST_COLUMNS = 1000
"""Of a timeline in text."""

_WIDTH, _LEFT, _ROW = 1160, 56, 24
_DIGIT = 6.2
"""Pixels of a digit in a box; where they do not fit, they are left out."""
_TICKS = 10


def table(simulation: Simulation, title: str) -> str:
    """The figures of the whole program, then those of each rank."""
    has_bytes = any(simulation.peak_bytes)
    head = f"{'rank':>4} {'busy':>10} {'bubble':>8} {'peak micro-batches':>19}"
    lines = [_caption(simulation, title), head + (f" {'peak bytes':>18}" if has_bytes else "")]
    for rank, busy in enumerate(simulation.busy):
        peak, size = simulation.peak_microbatches[rank], simulation.peak_bytes[rank]
        line = f"{rank:>4} {busy:>10g} {simulation.idle(busy):>8.1%} {peak:>19.4g}"
        lines.append(line + (f" {size:>18,.0f}" if has_bytes else ""))
    return "\n".join(lines)


def timeline(simulation: Simulation) -> str:
    """A line a rank; a step to the right is as long as the shortest computation."""
    spans = [span for each in simulation.spans for span in each if span.end > span.start]
    unit = min((span.end - span.start for span in spans), default=1.0)
    short = simulation.program.stages == len(simulation.program.ranks)
    width = 1 + max((len(_label(span.action, short)) for span in spans), default=0)
    columns = width * round(simulation.makespan / unit)
    if columns > _MOST_COLUMNS:
        return f"(the timeline has {columns} columns; --html draws it)"
    lines = []
    for rank, each in enumerate(simulation.spans):
        line = ""
        for span in each:
            line = line.ljust(width * int(span.start / unit + 0.5)) + _label(span.action, short)
        lines.append(f"{rank:>4} |{line.ljust(columns)}|")
    return "\n".join(lines)


def page(simulation: Simulation, title: str) -> str:
    """A self-contained page: the picture, its legend, and the table."""
    caption = escape(_caption(simulation, title))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<style>
body {{ font: 14px/1.5 Helvetica, Arial, sans-serif; color: #222; margin: 32px auto; width: {_WIDTH}px; }}
figure {{ margin: 0; }} figcaption {{ margin: 8px 0 24px; }} svg text {{ font-family: inherit; }}
</style></head><body>
<figure>{picture(simulation)}<figcaption>{caption}</figcaption></figure>
<pre>{escape(table(simulation, title).partition(chr(10))[2])}</pre>
</body></html>
"""


def picture(simulation: Simulation) -> str:
    """An SVG: a row a rank, a box a computation; earlier stages of a rank are paler, pairs have a frame."""
    scale = (_WIDTH - _LEFT - 4) / (simulation.makespan or 1.0)
    rows = len(simulation.spans)
    height = _ROW * rows + 52
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-size="10" font-family="Helvetica, Arial, sans-serif">'
    )
    parts, pairs = [head], simulation.program.pairs
    for rank, spans in enumerate(simulation.spans):
        parts.append(f'<g transform="translate({_LEFT} {_ROW * rank})">')
        parts.append(f'<text x="-8" y="15" text-anchor="end" font-size="11">rank {rank}</text>')
        parts += _boxes(spans, scale)
        parts += _frames(spans, pairs, scale)
        parts.append("</g>")
    parts += _axis(simulation, scale, _ROW * rows)
    parts += _legend(simulation, _ROW * rows + 34)
    return "".join([*parts, "</svg>"])


def _boxes(spans: Sequence[Span], scale: float) -> Iterator[str]:
    """One path for all boxes of a look, so that a page of 100,000 opens; then their micro-batches."""
    stages = sorted({span.action.stage for span in spans})
    paths: dict[tuple[str, float], list[str]] = defaultdict(list)
    for span in spans:
        pale = 1 - 0.5 * (len(stages) - 1 - stages.index(span.action.stage)) / len(stages)
        paths[_COLOURS[span.action.kind][0], pale].append(_box(span.start, span.end, scale))
    for (colour, pale), boxes in paths.items():
        yield (
            f'<path d="{"".join(boxes)}" fill="{colour}" fill-opacity="{pale:.2f}" '
            'stroke="#fff" stroke-width="0.7"/>'
        )
    for span in spans:
        text = str(span.action.microbatch)
        if (span.end - span.start) * scale > _DIGIT * len(text) + 2:
            middle = (span.start + span.end) / 2 * scale
            yield f'<text x="{middle:.1f}" y="14.5" text-anchor="middle">{text}</text>'


def _frames(
    spans: Sequence[Span], pairs: frozenset[tuple[Action, Action]], scale: float
) -> Iterator[str]:
    frames = [
        _box(first.start, second.end, scale)
        for first, second in pairwise(spans)
        if not pairs.isdisjoint({(first.action, second.action), (second.action, first.action)})
    ]
    if frames:
        yield f'<path d="{"".join(frames)}" fill="none" stroke="#444" stroke-width="1.1"/>'


def _box(start: float, end: float, scale: float) -> str:
    return f"M{start * scale:.1f} 1h{(end - start) * scale:.1f}v{_ROW - 3}H{start * scale:.1f}z"


def _axis(simulation: Simulation, scale: float, top: int) -> Iterator[str]:
    yield (
        f'<path d="M{_LEFT} {top + 2}h{simulation.makespan * scale:.1f}" stroke="#888" fill="none"/>'
    )
    step = _round(simulation.makespan / _TICKS)
    for tick in range(int(simulation.makespan / step) + 1):
        x = _LEFT + tick * step * scale
        yield f'<path d="M{x:.1f} {top + 2}v4" stroke="#888"/>'
        yield f'<text x="{x:.1f}" y="{top + 16}" text-anchor="middle" fill="#555">{tick * step:.4g}</text>'


def _round(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20 and so on, or of their parts, that is at least so large."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least)


def _legend(simulation: Simulation, top: int) -> Iterator[str]:
    there = {span.action.kind for spans in simulation.spans for span in spans}
    x = _LEFT
    for kind, (colour, name) in _COLOURS.items():
        if kind in there:
            yield f'<rect x="{x}" y="{top}" width="12" height="12" fill="{colour}"/>'
            yield f'<text x="{x + 17}" y="{top + 10}" font-size="11">{kind}: {name}</text>'
            x += 175
    if simulation.program.pairs:
        yield (
            f'<rect x="{x}" y="{top}" width="12" height="12" fill="none" stroke="#444"/>'
            f'<text x="{x + 17}" y="{top + 10}" font-size="11">overlapped pair</text>'
        )


def _caption(simulation: Simulation, title: str) -> str:
    program = simulation.program
    return (
        f"{title}: {len(program.ranks)} ranks, {program.stages} stages, {program.microbatches} "
        f"micro-batches; makespan {simulation.makespan:g}, bubble {simulation.bubble:.1%}, at most "
        f"{max(simulation.peak_microbatches, default=0):g} micro-batches held"
    )


def _label(action: Action, short: bool) -> str:
    return f"{action.kind}{action.microbatch}" if short else str(action)
