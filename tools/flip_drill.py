"""Flips random bits of checkpoints, one at a time: each must be caught, and its file named.

    python tools/flip_drill.py --flips 1000 --seed 1 --json flips.json

A small model is written in both formats, with tensors of several blocks, several weight files and
files beside them, also compressed, and as one Hugging Face file. Of each, that many bits are flipped
and flipped back, every other one anywhere in all bytes, the rest in each kind of place in turn: a
manifest is one byte in a hundred and must not go untested. After each flip

- `verify` must list exactly the one file, and the tensor with the block where the bit lies in one,
  or refuse to open the checkpoint with the file in the message;
- a conversion, which reads everything, must be refused with the file in the message.

`sharded` promises this of every bit, a Hugging Face directory of every bit of its weight files. No
checksum covers the files beside those, whose form is the hub's: of config, tokenizer and index the
table says how often they were found to contradict themselves.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import make_checkpoint
from d9d_ckpt import api
from d9d_ckpt.errors import CkptError
from d9d_ckpt.formats.huggingface import CHECKSUMS, INDEX
from d9d_ckpt.formats.sharded import MANIFEST
from d9d_ckpt.tensors import BLOCK

WEIGHTS = "weights"
LENGTH = "header length"
HEADER = "header"
SUMS = "header checksums"
PADDING = "header padding"
SMALL = "small files"
PROMISED = {
    "sharded": (WEIGHTS, LENGTH, HEADER, PADDING, MANIFEST, SMALL),
    "zstd": (WEIGHTS, LENGTH, HEADER, PADDING, MANIFEST, SMALL),
    "huggingface": (WEIGHTS, LENGTH, HEADER, SUMS, PADDING),
    "one hf file": (WEIGHTS, LENGTH, HEADER, SUMS, PADDING),
}
"""Places of which every bit must be caught and named."""

SHOWN = 20
"""Misses that are printed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes ``start`` to ``stop`` of a file, relative to the checkpoint, and the tensor there."""

    kind: str
    file: str
    start: int
    stop: int
    tensor: str | None = None


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of a file, and what lies there."""

    place: Place
    at: int
    bit: int


@dataclass(frozen=True, slots=True)
class Miss:
    """A flip that was not caught, or not named, and what was said instead."""

    format: str
    kind: str
    file: str
    at: int
    bit: int
    by: str
    said: str


@dataclass
class Report:
    """The figures of a run; keys of the counters are (format, kind of place)."""

    flips: Counter[tuple[str, str]] = field(default_factory=Counter)
    verified: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    misses: list[Miss] = field(default_factory=list)

    @property
    def broken(self) -> list[Miss]:
        """Misses where the format promises none."""
        return [m for m in self.misses if m.kind in PROMISED[m.format]]


def main() -> int:
    args = _arguments()
    root = Path(tempfile.mkdtemp(prefix="flip-drill-", dir=args.dir))
    try:
        report = run(root, args.flips, args.seed)
    finally:
        shutil.rmtree(root)
    print(table(report))
    for miss in report.broken[:SHOWN]:
        print(f"missed: {miss}")
    if args.json:
        args.json.write_text(json.dumps(as_json(report, args.flips, args.seed), indent=1) + "\n")
    return 1 if report.broken else 0


def run(root: Path, flips: int, seed: int) -> Report:
    """Flip that many bits of a checkpoint of each format under ``root``."""
    report = Report()
    for path, form in checkpoints(root):
        for flip in drawn(places(path), flips, Random(f"{seed} {form}")):
            key = form, flip.place.kind
            file = path / flip.place.file
            report.flips[key] += 1
            toggle(file, flip)
            said = {"verify": verify(path, flip), "convert": convert(path, form)}
            toggle(file, flip)
            report.verified[key] += said["verify"] is None
            named = said["convert"] is not None and flip.place.file in said["convert"]
            report.refused[key] += named
            wrong = {
                "verify": said["verify"],
                "convert": None if named else said["convert"] or "done",
            }
            report.misses += [
                Miss(form, flip.place.kind, flip.place.file, flip.at, flip.bit, by, text)
                for by, text in wrong.items()
                if text is not None
            ]
        if not api.verify(str(path), workers=1).ok:
            raise SystemExit(f"{path}: damaged although every bit was flipped back")
    return report


# -- what is flipped ---------------------------------------------------------------------------


def checkpoints(root: Path) -> list[tuple[Path, str]]:
    """5 MB in each form, embedding and head of two blocks and a half."""
    source, *made = (root / name for name in ("source", "sharded", "zstd", "hf", "single"))
    config = replace(make_checkpoint.tiny("qwen3"), layers=2, vocab=20000)
    make_checkpoint.write(config, source)
    layout = "pp=2,tp=2"
    wanted: tuple[dict[str, Any], ...] = (
        {"to": "sharded", "layout": layout},
        {"to": "sharded", "layout": layout, "codec": "zstd"},
        {"to": "huggingface", "max_shard_size": "3MB"},
        {"to": "huggingface"},
    )
    for path, want in zip(made, wanted, strict=True):
        api.convert(str(source), str(path), workers=1, **want)
    return list(zip(made, PROMISED, strict=True))


def places(path: Path) -> list[Place]:
    """All bytes of a checkpoint, each in one place."""
    opened = api.open(str(path)).opened
    inside: dict[str, list[Place]] = {}
    for name, entry in opened.catalogue.entries.items():
        for c in entry.chunks:
            file = c.file.removeprefix(f"{path}/")
            inside.setdefault(file, []).append(
                Place(WEIGHTS, file, c.offset, c.offset + c.nbytes, name)
            )
    out: list[Place] = []
    for found in sorted(p for p in path.rglob("*") if p.is_file()):
        file = str(found.relative_to(path))
        if file in inside:
            out += [*_header(file, found), *inside[file]]
        else:
            kind = file if file in (MANIFEST, INDEX) else SMALL
            out.append(Place(kind, file, 0, found.stat().st_size))
    return out


def _header(file: str, path: Path) -> Iterator[Place]:
    with path.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        raw = content.read(length)
    end = 8 + len(raw.rstrip())
    yield Place(LENGTH, file, 0, 8)
    key = f'"{CHECKSUMS}":"'.encode()
    if key in raw:
        first = 8 + raw.index(key) + len(key)
        last = 8 + raw.index(b'"', first - 8)
        yield Place(HEADER, file, 8, first)
        yield Place(SUMS, file, first, last)
        yield Place(HEADER, file, last, end)
    else:
        yield Place(HEADER, file, 8, end)
    yield Place(PADDING, file, end, 8 + length)


def drawn(among: Sequence[Place], count: int, random: Random) -> Iterator[Flip]:
    """Bits in turn from all bytes alike, and from one kind of place after the other."""
    kinds = sorted({place.kind for place in among})
    for number in range(count):
        kind = kinds[number // 2 % len(kinds)]
        chosen = [p for p in among if p.kind == kind] if number % 2 else among
        place = random.choices(chosen, [p.stop - p.start for p in chosen])[0]
        yield Flip(place, random.randrange(place.start, place.stop), random.randrange(8))


def toggle(path: Path, flip: Flip) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, flip.at)
        os.pwrite(fd, bytes([byte ^ 1 << flip.bit]), flip.at)
    finally:
        os.close(fd)


# -- what is said of it ------------------------------------------------------------------------


def verify(path: Path, flip: Flip) -> str | None:
    """None when the flip was named, and nothing else; what was said otherwise."""
    place = flip.place
    try:
        found = api.verify(str(path), workers=1)
    except CkptError as error:
        return None if place.file in str(error) else str(error)
    files = [d.file for d in found.damaged]
    # A wrong checksum cannot be told from a wrong block: the block that it is of is named.
    if files == [place.file] and (place.kind == SUMS or found.damaged[0].tensor == _block(flip)):
        return None
    return found.reason or f"{len(found.damaged)} damaged: {found.damaged[:2]}"


def _block(flip: Flip) -> str | None:
    """How `verify` names the block that the bit lies in."""
    place = flip.place
    if place.tensor is None:
        return None
    return f"{place.tensor} at byte {flip.at - (flip.at - place.start) % BLOCK}"


def convert(path: Path, form: str) -> str | None:
    """The refusal of a conversion to the other format; None when there was none."""
    out = path.parent / "out"
    to = "huggingface" if form in ("sharded", "zstd") else "sharded"
    layout = "dp_shard=2" if to == "sharded" else None
    try:
        api.convert(str(path), str(out), to=to, layout=layout, workers=1)
    except CkptError as error:
        return str(error)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return None


# -- figures -----------------------------------------------------------------------------------


def table(report: Report) -> str:
    """Caught and named by each, place by place."""
    lines = [f"{'format':<12} {'place':<30} {'flips':>6} {'verify':>7} {'read':>6}"]
    for key, flips in sorted(report.flips.items()):
        form, kind = key
        note = "" if kind in PROMISED[form] else "  not promised"
        lines.append(
            f"{form:<12} {kind:<30} {flips:>6} {report.verified[key]:>7} {report.refused[key]:>6}{note}"
        )
    for form, kinds in PROMISED.items():
        keys = [(form, kind) for kind in kinds]
        sums = [sum(c[k] for k in keys) for c in (report.flips, report.verified, report.refused)]
        lines.append(f"{form:<12} {'promised':<30} {sums[0]:>6} {sums[1]:>7} {sums[2]:>6}")
    return "\n".join(lines)


def as_json(report: Report, flips: int, seed: int) -> dict[str, Any]:
    """All figures, and every miss."""
    kinds = [
        {
            "format": key[0],
            "place": key[1],
            "promised": key[1] in PROMISED[key[0]],
            "flips": count,
            "verify": report.verified[key],
            "read": report.refused[key],
        }
        for key, count in sorted(report.flips.items())
    ]
    misses = [asdict(m) for m in report.misses]
    return {"flips": flips, "seed": seed, "places": kinds, "misses": misses}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=1000, help="of each format (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="where to work")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
