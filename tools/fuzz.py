"""Mutated checkpoints through every command: only a CkptError may come out, and nothing may get out.

    python tools/fuzz.py --inputs 50000 --dir /dev/shm/fuzz
    python tools/fuzz.py --only 1234 --keep      # one input again, with its traceback and its files

Tiny checkpoints of every format are mutated (tools/fuzz_mutations.py), written, and given in this
process to one or two of open, inspect, plan, read, convert, reshard, verify, diff and an overwrite.
After each input it is checked that

- nothing but a CkptError was raised, with an exit code that fits, and within bounded time;
- no file changed but those of the destination: not the source, and not the canaries that lie where
  `../`, absolute names and links lead;
- a refusal left nothing, and kept what it was to replace; a success left what opens, here and in the
  reference reader;
- memory never grew by more than the input's own bytes and a constant.

An input depends on --seed and its own number alone.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

import make_checkpoint
from d9d_ckpt import api, cli
from d9d_ckpt.errors import CkptError, MissingError
from d9d_ckpt.report import inspect
from fuzz_mutations import CONFIG, INDEX, LAYOUTS, MANIFEST, SINGLE, Tree, mutate

PEAK = 300 << 20
"""Bytes that the process may ever have resident."""
SLACK = 64 << 20
"""Bytes by which one input may raise the peak, beside its own."""
SECONDS = 5.0
"""Bound on one input."""
HARD = 60.0
"""Seconds after which one that does not even see the bound is ended with its stack."""


_M_MMAP_THRESHOLD = -3


class HungError(BaseException):
    """An input took longer than its bound; no `except Exception` may swallow it."""


@dataclass
class Failure:
    """Something that must not be.

    Attributes:
        number: The input.
        kind: ``crash``, ``escape``, ``hang``, ``memory``, ``exit code`` or ``leftover``.
        detail: What happened.
        changes: What had been done to the input.
        trace: The traceback of a crash.
    """

    number: int
    kind: str
    detail: str
    changes: list[str]
    trace: str = ""


@dataclass
class Report:
    """The figures of a run."""

    seed: int
    inputs: int = 0
    operations: int = 0
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    slowest: int = 0
    peak_rss: int = 0
    by_operation: Counter[str] = field(default_factory=Counter)
    by_refusal: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def count(self, kind: str) -> int:
        return sum(f.kind == kind for f in self.failures)


@dataclass(frozen=True)
class Seed:
    """A good checkpoint: its files, and where it lies as the other side of a comparison."""

    name: str
    files: dict[str, bytes]
    path: Path


class Arena:
    """The directories of a run: sources, destinations, and canaries around them.

    ``root/outer/inner`` holds src and dst; everything above and beside them must never change.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.inner = root / "outer" / "inner"
        self.src, self.dst = self.inner / "src", self.inner / "dst"
        self.layout = self.inner / "layout.yaml"
        self.outside = root / "outside" / "canary"
        self.inner.mkdir(parents=True)
        self.outside.parent.mkdir()
        self.seeds = _seeds(root / "good")
        self._plant()

    def _plant(self) -> None:
        for place in (self.inner, self.inner.parent, self.root):
            (place / "canary").write_bytes(b"canary")
            (place / SINGLE).write_bytes(b"canary")
        self.outside.write_bytes(b"canary")
        self._around = snapshot(self.root, (self.src, self.dst, self.layout))

    def escapes(self) -> list[str]:
        """What has changed outside of source and destination since the beginning."""
        found = changed(self._around, snapshot(self.root, (self.src, self.dst, self.layout)))
        if found:
            self._plant()
        return found

    def clear(self) -> None:
        for path in (self.src, self.dst):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


Snapshot = dict[str, tuple[Any, ...]]


def snapshot(root: Path, without: Sequence[Path] = (), *, times: bool = True) -> Snapshot:
    """Every name under ``root`` with its kind, and identity and times of a file, or its content."""
    out: Snapshot = {}
    skipped = {str(p) for p in without}
    todo = [str(root)]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for e in entries:
                if e.path in skipped:
                    continue
                found = e.stat(follow_symlinks=False)
                key: tuple[Any, ...] = (found.st_mode,)
                if e.is_symlink():
                    key += (os.readlink(e.path),)
                elif e.is_dir():
                    todo.append(e.path)
                elif times or not e.is_file():
                    key += (found.st_size, found.st_mtime_ns, found.st_ino)
                else:
                    key += (Path(e.path).read_bytes(),)
                out[e.path] = key
    return out


def changed(before: Snapshot, after: Snapshot) -> list[str]:
    return sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))


# -- good checkpoints -------------------------------------------------------------------------


def _seeds(root: Path) -> list[Seed]:
    """Every format, dense and sparse, tens of KB each."""
    small: dict[str, Any] = {
        "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "intermediate": 12,
        "vocab": 20,
    }  # fmt: skip
    models = {
        "llama": small,
        "qwen3": small | {"tied": True},
        "mixtral": small | {"experts": 4, "moe_intermediate": 6, "layers": 1},
        "qwen3_moe": small | {"experts": 4, "moe_intermediate": 6, "layout": "fused"},
    }
    made = []
    for family, sizes in models.items():
        config = make_checkpoint.sized(family, "tiny", **sizes)
        plain, ours, theirs = (root / f"{family}-{kind}" for kind in ("hub", "sharded", "hf"))
        with _little_data():
            make_checkpoint.write(
                config, plain, max_shard_size=8000 if family == "llama" else 10**9
            )
        layout = "tp=2,dp_shard=2" + (",ep=2" if "experts" in sizes else "")
        codec = "zstd" if family in ("qwen3", "mixtral") else "none"
        api.convert(str(plain), str(ours), to="sharded", layout=layout, workers=1, codec=codec)
        api.convert(str(ours), str(theirs), to="huggingface", max_shard_size=6000, workers=1)
        made += [plain, ours, theirs]
    run = root / "run"
    for step in (10, 20):
        shutil.copytree(root / "llama-sharded", run / f"step-{step:08d}")
    made.append(run)
    made += [
        _pickled(root / "llama-hub", root / f"llama-{kind}", kind) for kind in ("zip", "legacy")
    ]
    return [Seed(path.name, contents(path), path) for path in made]


@contextlib.contextmanager
def _little_data() -> Iterator[None]:
    """A smaller block of random data, which would be most of this process's memory."""
    whole, make_checkpoint.BLOCK = make_checkpoint.BLOCK, 1 << 16
    try:
        yield
    finally:
        make_checkpoint.BLOCK = whole


def _pickled(source: Path, path: Path, kind: str) -> Path:
    """The same weights as torch.save has them; one of them is a view that is not contiguous."""
    path.mkdir()
    tensors = {
        name: tensor
        for file in sorted(source.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    tensors["model.norm.weight"] = torch.stack([tensors["model.norm.weight"]] * 2, 1)[:, 0]
    shutil.copyfile(source / CONFIG, path / CONFIG)
    torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "zip")
    return path


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }


def write_tree(tree: Tree, root: Path) -> None:
    """The mutated directory; names that the file system refuses are left out."""
    root.mkdir()
    for name, raw in tree.files.items():
        with contextlib.suppress(OSError, ValueError):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
    for name, target in tree.links.items():
        with contextlib.suppress(OSError, ValueError):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(target)
    for name in tree.pipes:
        with contextlib.suppress(OSError, ValueError):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            os.mkfifo(root / name)


# -- operations -------------------------------------------------------------------------------


@dataclass
class Case:
    """One mutated input, on disk."""

    number: int
    arena: Arena
    seed: Seed
    tree: Tree
    rng: Random
    url: str

    @property
    def source(self) -> str:
        return self.url

    def layout(self) -> str:
        """The layout's text, or the YAML file that holds it."""
        text = self.tree.layout
        if "=" in text.split(":", maxsplit=1)[0] or not text:
            return text
        self.arena.layout.write_bytes(text.encode(errors="surrogatepass"))
        return str(self.arena.layout)


def _inspect(case: Case) -> None:
    inspect.as_text(inspect.as_json(api.open(case.source).opened, ("*",)))


def _command(case: Case) -> None:
    """The command line itself: what it prints must be printable."""
    argv = case.rng.choice(
        (
            ["inspect", case.source, "--tensors", "*"],
            ["inspect", case.source, "--json"],
            ["plan", case.source, "--layout", case.layout()],
            ["plan", case.source, "--to", "huggingface", "--json"],
            ["verify", case.source, "--quiet", "--workers", "1"],
            ["diff", case.source, str(case.seed.path)],
        )
    )
    signals = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with printable():
            code = cli.main(argv)
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
    if code not in (0, 1, 2, 3, 4, 5):
        raise AssertionError(f"exit code {code} of {argv[0]}")


@contextlib.contextmanager
def printable() -> Iterator[None]:
    """Standard output and error as a terminal has them: UTF-8, and strict as to output."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def _plan(case: Case) -> None:
    api.plan(case.source, to="sharded", layout=case.layout(), load=case.rng.random() < 0.5)


def _plan_back(case: Case) -> None:
    api.plan(
        case.source, to="huggingface", hf_experts=case.rng.choice((None, None, "split", "fused"))
    )


def _read(case: Case) -> None:
    checkpoint = api.open(case.source)
    names = list(checkpoint.tensors)
    for name in case.rng.sample(names, min(3, len(names))):
        tensor = checkpoint[name]
        if tensor.shape and tensor.shape[0]:
            tensor[:1].read()
        tensor.read()


def _convert(case: Case) -> None:
    to = case.rng.choice(("sharded", "huggingface"))
    layout = case.layout() if to == "sharded" else None
    options: dict[str, Any] = case.rng.choice(({}, {}, {"dtype": "float32"}, {"dequantize": True}))
    if to == "huggingface":
        options = options | case.rng.choice(({}, {"max_shard_size": 4000}, {"hf_experts": "split"}))
    api.convert(case.source, str(case.arena.dst), to=to, layout=layout, workers=1, **options)


def _reshard(case: Case) -> None:
    api.reshard(case.source, str(case.arena.dst), layout=case.layout(), workers=1)


def _verify(case: Case) -> None:
    found = api.verify(case.source, workers=1)
    if case.tree.flipped and found.ok and case.seed.name.endswith("sharded"):
        raise AssertionError("a flipped bit was not seen by verify")


def _diff(case: Case) -> None:
    others = [s for s in case.arena.seeds if s.name.split("-")[0] == case.seed.name.split("-")[0]]
    api.diff(case.source, str(case.rng.choice(others).path))


def _overwrite(case: Case) -> None:
    """A good source over the mutated checkpoint."""
    to = case.rng.choice(("sharded", "huggingface"))
    layout = LAYOUTS[0] if to == "sharded" else None
    size = case.rng.choice(("5GB", 4000))
    api.convert(
        str(case.seed.path), str(case.arena.dst), to=to, layout=layout, workers=1, overwrite=True,
        max_shard_size=size,
    )  # fmt: skip


def _list(case: Case) -> None:
    api.list_steps(case.source)


def _prune(case: Case) -> None:
    """Of a copy of the mutated run directory."""
    api.prune(str(case.arena.dst), keep_last=1)


def _url(case: Case) -> None:
    """Places that are none, to read from and to write to."""
    url = case.rng.choice(
        ("a\0b", "~nobody-of-this-name/x", "x" * 5000, "\ud800", "", "/", "nothing://x", "file://", "::",
         "memory://nothing", str(case.arena.outside), f"{case.url}/../src/./", f"{case.url}/{SINGLE}/x")
    )  # fmt: skip
    if case.rng.random() < 0.5:
        api.open(url)
    elif url not in ("", "/", "::", "x" * 5000) and str(case.arena.src) not in url:
        api.convert(str(case.seed.path), url, to="sharded", layout="tp=1", workers=1)


OPERATIONS: dict[str, tuple[int, Callable[[Case], None]]] = {
    "inspect": (6, _inspect),
    "command": (8, _command),
    "plan": (12, _plan),
    "plan back": (8, _plan_back),
    "read": (10, _read),
    "convert": (16, _convert),
    "reshard": (10, _reshard),
    "verify": (8, _verify),
    "diff": (8, _diff),
    "overwrite": (6, _overwrite),
    "list": (2, _list),
    "prune": (3, _prune),
    "url": (2, _url),
}
_WAITING = (f".d9d-{CONFIG}.tmp", f".d9d-{MANIFEST}.tmp", ".d9d-claim")
_WRITING = ("convert", "reshard", "overwrite", "prune")


# -- one input --------------------------------------------------------------------------------


def run_input(arena: Arena, report: Report, number: int, *, keep: bool = False) -> None:
    """One input: mutated, written, given to the engine, and checked."""
    rng = Random(f"{report.seed}:{number}")
    seed = rng.choice(arena.seeds)
    tree = Tree(dict(seed.files), layout=rng.choice(LAYOUTS))
    mutate(tree, rng, str(arena.outside))
    arena.clear()
    write_tree(tree, arena.src)
    case = Case(number, arena, seed, tree, rng, str(arena.src))
    if rng.random() < 0.05 and (arena.src / SINGLE).is_file():
        case.url = str(arena.src / SINGLE)
    before = snapshot(arena.src)
    started, peak = time.monotonic(), _peak()
    opens = _guarded(case, report, "open", lambda c: api.open(c.url))
    for name in _chosen(rng, opens=opens):
        _one(case, report, name)
    seconds = time.monotonic() - started
    if changed(before, snapshot(arena.src)):
        _fail(case, report, "escape", f"source changed: {changed(before, snapshot(arena.src))}")
    if escapes := arena.escapes():
        _fail(case, report, "escape", f"changed outside of the destination: {escapes}")
    if _peak() - peak > tree.nbytes + SLACK and number:
        _fail(case, report, "memory", f"peak grew from {peak >> 20} to {_peak() >> 20} MiB")
    if seconds > report.slowest_s:
        report.slowest_s, report.slowest = seconds, number
    report.inputs += 1
    if not keep:
        arena.clear()


def _chosen(rng: Random, *, opens: bool) -> list[str]:
    if not opens and rng.random() < 0.6:
        return []
    names = list(OPERATIONS)
    weights = [weight for weight, _ in OPERATIONS.values()]
    return rng.choices(names, weights, k=2 if opens and rng.random() < 0.4 else 1)


def _one(case: Case, report: Report, name: str) -> None:
    """One operation, and the state of its destination after it."""
    arena, writing = case.arena, name in _WRITING
    if writing and (arena.dst.is_symlink() or arena.dst.exists()):
        shutil.rmtree(arena.dst)
    if name in ("overwrite", "prune"):
        write_tree(case.tree, arena.dst)
        # Links may wait for what is written.
        for waiting in case.rng.choice(((), _WAITING, _WAITING[:1], _WAITING[1:2])):
            with contextlib.suppress(OSError):
                (arena.dst / waiting).symlink_to(arena.outside)
    before = snapshot(arena.inner, (arena.src,), times=False)
    done = _guarded(case, report, name, OPERATIONS[name][1])
    if not writing:
        return
    if name == "prune":
        return
    if done:
        _check_written(case, report, name)
        return
    left = changed(before, snapshot(arena.inner, (arena.src,), times=False))
    # Temporary names are ours wherever they are: a refusal may clean them away.
    ours = {str(arena.dst), str(arena.layout), *(str(arena.dst / name) for name in _WAITING)}
    left = [p for p in left if p not in ours]
    if left:
        _fail(case, report, "leftover", f"{name} was refused and left {left}")


def _check_written(case: Case, report: Report, name: str) -> None:
    """A destination that was said to be complete opens, is whole, and is valid for others."""
    dst = case.arena.dst
    names = os.listdir(dst)
    try:
        if not any(record in names for record in (MANIFEST, INDEX, SINGLE)):
            raise MissingError("no record")  # noqa: TRY301
        opened = api.open(str(dst)).opened
        files = {c.file for e in opened.catalogue.entries.values() for c in e.chunks}
        for file in files:
            with safe_open(file, framework="np"):
                pass
        if not api.verify(str(dst), workers=1).ok and opened.catalogue.nbytes:
            raise MissingError("verify finds it damaged")  # noqa: TRY301
    except Exception as error:  # noqa: BLE001
        detail = f"{name} succeeded and left what is no checkpoint: {type(error).__name__} {error}"
        _fail(case, report, "leftover", detail)


def _guarded(case: Case, report: Report, name: str, function: Callable[[Case], object]) -> bool:
    """Whether an operation succeeded; anything but a CkptError of a fitting kind is a failure."""
    report.operations += 1
    report.by_operation[name] += 1
    faulthandler.dump_traceback_later(HARD, exit=True, file=2)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        function(case)
    except CkptError as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        report.refused += 1
        report.by_refusal[type(error).__name__] += 1
        _check_refusal(case, report, name, error)
        return False
    except HungError:
        _fail(case, report, "hang", f"{name} took more than {SECONDS} s", traceback.format_exc())
        return False
    except Exception as error:  # noqa: BLE001
        signal.setitimer(signal.ITIMER_REAL, 0)
        detail = f"{name}: {type(error).__name__}: {str(error)[:300]}"
        _fail(case, report, "crash", detail, traceback.format_exc())
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    report.accepted += 1
    return True


def _check_refusal(case: Case, report: Report, name: str, error: CkptError) -> None:
    """The exit code blames the source or its fit to the request, and the options only if they changed."""
    fitting = {3} if name == "open" else {3, 4}
    if any(change.startswith("layout") for change in case.tree.changes):
        fitting |= {2, 4} if name != "open" else set()
    if case.tree.odd:
        fitting |= {4, 5}
    if name in ("url", "overwrite", "list", "prune"):
        fitting |= {2, 3, 4, 5}
    if error.exit_code not in fitting:
        detail = f"{name}: {type(error).__name__} ({error.exit_code}): {str(error)[:300]}"
        _fail(case, report, "exit code", detail, traceback.format_exc())
    if len(str(error)) > 64 * 1024:
        _fail(case, report, "memory", f"{name}: a message of {len(str(error))} characters")


def _fail(case: Case, report: Report, kind: str, detail: str, trace: str = "") -> None:
    changes = [case.seed.name, *case.tree.changes]
    report.failures.append(Failure(case.number, kind, detail, changes, trace))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _hung(*_: object) -> None:
    raise HungError


def _give_back() -> None:
    """Let glibc return freed buffers: it learns not to, and thousands of runs fragment its heap."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 256 << 10)


def run(root: Path, seed: int, numbers: Sequence[int], *, keep: bool = False) -> Report:
    """Every input of ``numbers``, in directories under ``root``."""
    report = Report(seed)
    started = time.monotonic()
    before = signal.signal(signal.SIGALRM, _hung)
    _give_back()
    try:
        arena = Arena(root)
        api.open(str(arena.seeds[0].path))["model.norm.weight"].read()  # torch is no input's fault
        for number in numbers:
            run_input(arena, report, number, keep=keep)
    finally:
        signal.signal(signal.SIGALRM, before)
    report.seconds = time.monotonic() - started
    report.peak_rss = _peak()
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", type=int, help="one input, by its number")
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--keep", action="store_true", help="leave the last input's files")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    numbers = range(args.first, args.first + args.inputs)
    if args.only is not None:
        numbers = range(args.only, args.only + 1)
    if args.dir is not None:
        args.dir.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="d9d-fuzz-", dir=args.dir)).resolve()
    try:
        report = run(root / "arena", args.seed, numbers, keep=args.keep)
    finally:
        if args.keep:
            print(f"left in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)
    print_report(report, traces=args.only is not None)
    if args.json:
        args.json.write_text(json.dumps(as_json(report), indent=1) + "\n")
    return 1 if report.failures or report.peak_rss > PEAK else 0


def as_json(report: Report) -> dict[str, Any]:
    """The figures, and what failed."""
    return vars(report) | {"failures": [asdict(f) for f in report.failures]}


def print_report(report: Report, *, traces: bool) -> None:
    seen: Counter[str] = Counter()
    for f in report.failures:
        line = f.trace.strip().splitlines()
        where = line[-3].strip() if len(line) > 3 else f.detail[:60]
        seen[f"{f.kind} {where} {f.detail.split(':')[0]}"] += 1
        if traces or seen[f"{f.kind} {where} {f.detail.split(':')[0]}"] <= 2:
            print(f"input {f.number}: {f.kind}: {f.detail}\n    {where}")
            for change in f.changes:
                print(f"    - {change[:300]!r}")
            if traces:
                print(f.trace)
    for what, count in seen.most_common():
        print(f"{count:6d}  {what}")
    kinds = ", ".join(
        f"{report.count(k)} {k}"
        for k in ("crash", "escape", "hang", "memory", "exit code", "leftover")
    )
    print(
        f"{report.inputs} inputs, {report.operations} operations ({report.accepted} accepted, "
        f"{report.refused} refused); {kinds}; peak {report.peak_rss >> 20} MiB; "
        f"{report.seconds:.1f} s, slowest input {report.slowest_s:.2f} s (number {report.slowest})"
    )


if __name__ == "__main__":
    sys.exit(main())
