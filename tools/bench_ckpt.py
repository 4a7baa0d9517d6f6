"""Times the checkpoint engine against its peers, side by side in one run.

    python tools/bench_ckpt.py --size 4GiB --json figures.json
    python tools/bench_ckpt.py --size 256MiB --rounds 2 --only convert --peers copy,cp

Every figure is the whole process: start-up, imports, planning, checksums; for the saves and loads of
live state it is the call in a process that goes on. The sides of a section
take turns, forwards in one round and backwards in the next, so that drift meets them alike; what
they wrote is deleted between runs, outside the timed part. Peers:

- copy: two processes that copy the same bytes and hash them on the way, the floor
- cp: `cp -r` of the source
- dcp: torch's distributed checkpoint, two gloo ranks (one for partial loads)
- d9d: d9d 0.24, one process and two ranks under torchrun; it needs --peer-python

The section checksums has one peer, our own command with a hash that costs nothing: a conversion,
which hashes what it writes, and a reshard, which also hashes what it reads. The sections live-save and
live-load are `Checkpointer` in one process and in two gloo ranks; their sides take turns inside those
processes, and the first save, which finds no memory to write to again, is told by itself.

The directory defaults to memory (/dev/shm): that takes the disk out, and needs room for three
times the checkpoint.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bench_peers.child import ChildError, Run, run_child
from bench_peers.report import Result, Section, Side, figures, print_table, side_figures
from bench_peers.training_form import Tensor, share_bytes, training_tensors

TOOLS = Path(__file__).resolve().parent
HELPERS = TOOLS / "bench_peers"
WORKERS = 2
SOURCE_LAYOUT = "dp_shard=2,ep=2"
TARGET_LAYOUT = "tp=2,pp=2"
LOAD_RANK, LOAD_RANKS = 1, 4
SECTIONS = ("convert", "reshard", "load", "checksums", "live-save", "live-load")
CHECKSUMS = "checksums"
PEERS = ("copy", "cp", "dcp", "d9d")
PEAK_COPIES = 3.05
"""What the directory holds at most, in checkpoints: a source of ours, one of DCP's, one result."""
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
D9D_HINT = """\
d9d is not installed for --peer-python: this peer is skipped. To have it, in an environment apart:
    python -m venv PEER && PEER/bin/pip install torch safetensors pydantic tqdm numpy
    PEER/bin/pip install --no-deps d9d==0.24.0 torchdata optree triton
and give --peer-python PEER/bin/python. (To share this environment's torch instead of installing
another, write its site-packages path into a .pth file in PEER's site-packages.)"""


@dataclass(frozen=True, slots=True)
class Bench:
    """What every section needs to know.

    Attributes:
        root: A directory of this run's own.
        python: Interpreter of our side, of torch's and of the copy.
        peer_python: Interpreter that has d9d, or None.
        peers: Peers to run.
        rounds: Timed rounds of each section.
        timeout_s: Limit of each command.
        env: Environment of each command.
    """

    root: Path
    python: str
    peer_python: str | None
    peers: frozenset[str]
    rounds: int
    timeout_s: float
    env: dict[str, str]

    @property
    def hf(self) -> Path:
        return self.root / "hf"

    @property
    def sharded(self) -> Path:
        return self.root / "sharded"

    @property
    def unhashed(self) -> Path:
        return self.root / "unhashed"

    @property
    def dcp(self) -> Path:
        return self.root / "dcp"

    def run(self, argv: Sequence[str]) -> Run:
        return run_child(argv, self.env, self.timeout_s)

    def helper(self, script: str, *args: str | Path, python: str | None = None) -> tuple[str, ...]:
        return (python or self.python, str(HELPERS / script), *map(str, args))

    def ours(self, *args: str | Path, hashed: bool = True) -> tuple[str, ...]:
        command = ("-m", "d9d_ckpt") if hashed else (str(HELPERS / "unhashed.py"),)
        return (
            *(self.python, *command, *map(str, args)),
            *("--workers", str(WORKERS), "--quiet", "--json"),
        )


# -- the walk ---------------------------------------------------------------------------------


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, _terminated)
    root = Path(tempfile.mkdtemp(prefix="bench-ckpt-", dir=args.dir))
    results = []
    complete = False
    try:
        for result in run_sections(_bench(args, root), args):
            print_table(result)
            if result.section.name.startswith(CHECKSUMS):
                print(cost(result))
            results.append(result)
        complete = not any(result.failures for result in results)
    except ChildError as error:
        note(f"a step that the rest needs failed: {error}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps(summary(args, results), indent=1) + "\n")
    sys.exit(0 if complete else 1)


def run_sections(bench: Bench, args: argparse.Namespace) -> Iterator[Result]:
    """Makes each source when it is first needed, deletes it when it no longer is."""
    for name in ("live-save", "live-load"):
        if name in args.only:
            yield from (live_result(bench, args, name, ranks) for ranks in (1, WORKERS))
    if not args.only & {"convert", "reshard", "load", "checksums"}:
        return
    make_source(bench, args)
    if "convert" in args.only:
        yield run_section(bench, convert_section(bench))
    if "checksums" in args.only:
        yield run_section(bench, convert_checksums_section(bench))
    if not {"reshard", "load", "checksums"} & args.only:
        return
    note(f"making the {SOURCE_LAYOUT} sources")
    bench.run(convert_command(bench, bench.sharded))
    if "checksums" in args.only:
        bench.run(convert_command(bench, bench.unhashed, hashed=False))
        yield run_section(bench, reshard_checksums_section(bench))
        shutil.rmtree(bench.unhashed)
    if not {"reshard", "load"} & args.only:
        return
    if "dcp" in bench.peers:
        bench.run(bench.helper("dcp_peer.py", "make", bench.hf, bench.dcp))
    training = training_tensors(bench.hf)
    drop_source(bench)
    if "reshard" in args.only:
        yield run_section(bench, reshard_section(bench))
    if "load" in args.only:
        for cut in ("tp", "columns"):
            yield run_section(bench, load_section(bench, cut, training))


def run_section(bench: Bench, section: Section) -> Result:
    """Runs every side once a round; the order turns round with each (ABBA).

    Round 0 counts for nothing: it touches the pages that results will use and leaves imports
    compiled, which else the first side or the first round would pay for.
    """
    result = Result(section, {side.name: [] for side in section.sides})
    for number in range(bench.rounds + 1):
        for side in section.sides[:: 1 if number % 2 else -1]:
            if side.name in result.failures:
                continue
            try:
                run = run_side(bench, side, section)
            except ChildError as error:
                result.failures[side.name] = str(error)
                note(f"{section.name}: {side.name} failed: {error}")
                continue
            if number > 0:
                result.runs[side.name].append(run)
            note(f"{section.name} {number}/{bench.rounds}: {side.name} {run.wall_s:.2f} s")
    return result


def run_side(bench: Bench, side: Side, section: Section) -> Run:
    try:
        run = bench.run(side.argv)
        check(side, section, run)
    finally:
        if side.out is not None:
            shutil.rmtree(side.out, ignore_errors=True)
    return run


def check(side: Side, section: Section, run: Run) -> None:
    """A command that did less than the whole work is no figure."""
    if side.out is not None:
        done = tree_bytes(side.out)
    else:
        done = run.report.get("bytes_loaded", 0)
    if not 0.99 * section.nbytes < done < 1.05 * section.nbytes:
        raise ChildError(f"{side.name} made {done:,} bytes, expected {section.nbytes:,}")


# -- sections ---------------------------------------------------------------------------------


def make_source(bench: Bench, args: argparse.Namespace) -> None:
    if args.source is not None:
        bench.hf.symlink_to(args.source.resolve())
        return
    note(f"making a qwen3_moe checkpoint of {args.size}")
    script = str(TOOLS / "make_checkpoint.py")
    bench.run((bench.python, script, "qwen3_moe", str(bench.hf), "--size", args.size))


def drop_source(bench: Bench) -> None:
    if bench.hf.is_symlink():
        bench.hf.unlink()
    else:
        shutil.rmtree(bench.hf)


def convert_command(bench: Bench, out: Path, *, hashed: bool = True) -> tuple[str, ...]:
    argv = ("convert", bench.hf, out, "--to", "sharded", "--layout", SOURCE_LAYOUT)
    return bench.ours(*argv, hashed=hashed)


def reshard_command(
    bench: Bench, source: Path, out: Path, *, hashed: bool = True
) -> tuple[str, ...]:
    return bench.ours("reshard", source, out, "--layout", TARGET_LAYOUT, hashed=hashed)


def convert_section(bench: Bench) -> Section:
    out = bench.root / "out"
    sides = [Side("ours", "ours", convert_command(bench, out), out), *copies(bench, bench.hf, out)]
    if "d9d" in bench.peers and bench.peer_python:
        alone = bench.helper("d9d_peer.py", bench.hf, out, python=bench.peer_python)
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS))
        sides.append(Side("d9d, 1 process", "d9d", alone, out))
        sides.append(Side("d9d, 2 ranks", "d9d", (alone[0], *torchrun, *alone[1:]), out))
    return Section("convert", tree_bytes(bench.hf), tuple(sides))


def reshard_section(bench: Bench) -> Section:
    out = bench.root / "out"
    ours = reshard_command(bench, bench.sharded, out)
    sides = [Side("ours", "ours", ours, out), *copies(bench, bench.sharded, out)]
    if "dcp" in bench.peers:
        argv = bench.helper("dcp_peer.py", "reshard", bench.dcp, out)
        sides.append(Side("dcp, 2 ranks", "dcp", argv, out))
    return Section("reshard", tree_bytes(bench.sharded), tuple(sides))


def load_section(bench: Bench, cut: str, training: Mapping[str, Tensor]) -> Section:
    """One rank of four: its tensor-parallel share, then a column block of everything."""
    share = ("--cut", cut, "--rank", str(LOAD_RANK), "--ranks", str(LOAD_RANKS))
    sides = [Side("ours", "ours", bench.helper("ours_load.py", bench.sharded, *share))]
    if "dcp" in bench.peers:
        sides.append(Side("dcp", "dcp", bench.helper("dcp_peer.py", "load", bench.dcp, *share)))
    nbytes = share_bytes(training, cut, LOAD_RANK, LOAD_RANKS)
    return Section(f"load {cut}/{LOAD_RANKS}", nbytes, tuple(sides))


def convert_checksums_section(bench: Bench) -> Section:
    out = bench.root / "out"
    sides = (
        Side("ours", "ours", convert_command(bench, out), out),
        Side("unhashed", "unhashed", convert_command(bench, out, hashed=False), out),
    )
    return Section(f"{CHECKSUMS} of convert", tree_bytes(bench.hf), sides)


def reshard_checksums_section(bench: Bench) -> Section:
    out = bench.root / "out"
    unhashed = reshard_command(bench, bench.unhashed, out, hashed=False)
    sides = (
        Side("ours", "ours", reshard_command(bench, bench.sharded, out), out),
        Side("unhashed", "unhashed", unhashed, out),
    )
    return Section(f"{CHECKSUMS} of reshard", tree_bytes(bench.sharded), sides)


def cost(result: Result) -> str:
    """What checksums add to the time of the same command without them."""
    if not all(result.runs.values()):
        return f"{result.section.name}: not measured"
    ours, without = (side_figures(result, name) for name in ("ours", "unhashed"))
    parts = {
        "best": without.ratio_best,
        "median": without.ratio_median,
        "paired": without.ratio_paired,
        "processor time": ours.cpu_s / without.cpu_s,
    }
    shown = [f"{name} {ratio - 1:+.1%}" for name, ratio in parts.items() if ratio is not None]
    return f"{result.section.name} cost: {', '.join(shown)}"


def live_result(bench: Bench, args: argparse.Namespace, name: str, ranks: int) -> Result:
    """Runs of one child in which the sides take turns."""
    mode = name.removeprefix("live-")
    directory = bench.root / "live"
    argv = bench.helper("live_peer.py", mode, directory, "--size", args.size)
    report = bench.run((*argv, "--ranks", str(ranks), "--rounds", str(bench.rounds))).report
    shutil.rmtree(directory, ignore_errors=True)
    sides = tuple(Side(side, "dcp" if side == "dcp" else "ours", argv) for side in report["runs"])
    result = Result(Section(f"{name}, {ranks} ranks", report["bytes"], sides))
    for side, runs in report["runs"].items():
        result.runs[side] = [live_run(run) for run in runs]
        note(f"{result.section.name}: {side} first {report['first'][side]['wall_s']:.2f} s")
    return result


def live_run(found: Mapping[str, float]) -> Run:
    """A call as if it were a command; what the machine did beside it cannot be told apart."""
    read = {"bytes_read": found["bytes_read"]}
    return Run(found["wall_s"], found["cpu_s"], found["others_cpu_s"], int(found["peak_rss"]), read)


def copies(bench: Bench, src: Path, out: Path) -> Iterator[Side]:
    if "copy" in bench.peers:
        yield Side("copy", "copy", bench.helper("hashed_copy.py", src, out), out)
    if "cp" in bench.peers:
        yield Side("cp -r", "cp", ("cp", "-rL", f"{src}/.", str(out)), out)


def summary(args: argparse.Namespace, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "size": args.size if args.source is None else args.source.name,
        "rounds": args.rounds,
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "sections": figures(results),
    }


# -- set-up -----------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="4GiB", help="bytes of the checkpoint (%(default)s)")
    parser.add_argument("--source", type=Path, help="an HF Qwen3-MoE checkpoint to use instead")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where to work")  # noqa: S108
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", type=_names(SECTIONS), default=frozenset(SECTIONS))
    parser.add_argument("--peers", type=_names(PEERS), default=frozenset(PEERS))
    parser.add_argument("--python", default=sys.executable, help="interpreter with d9d_ckpt")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with d9d 0.24")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each command")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    need = PEAK_COPIES * (tree_bytes(args.source) if args.source else _size(args.size))
    free = shutil.disk_usage(args.dir).free
    if free < need:
        parser.error(f"{args.dir} has {free:,} bytes free, this needs {need:,.0f}")
    return args


def _names(known: tuple[str, ...]) -> Callable[[str], frozenset[str]]:
    def parse(text: str) -> frozenset[str]:
        names = frozenset(text.split(","))
        if unknown := names - set(known):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)} not among {', '.join(known)}")
        return names

    return parse


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)(?:([KMG]?)i?B)?", text)
    if match is None:
        raise SystemExit(f"--size {text}: give bytes, or a number with KiB, MiB or GiB")
    return int(match[1]) * UNITS[match[2] or ""]


def _bench(args: argparse.Namespace, root: Path) -> Bench:
    path = [os.environ.get("PYTHONPATH", ""), str(TOOLS.parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    peer_python = None
    if "d9d" in args.peers and "convert" in args.only:
        peer_python = args.peer_python if _has_d9d(args.peer_python) else None
        if peer_python is None:
            note(D9D_HINT)
    return Bench(root, args.python, peer_python, args.peers, args.rounds, args.timeout, env)


def _has_d9d(python: str) -> bool:
    probe = (python, "-c", "import d9d.model_state.io, triton")
    return subprocess.run(probe, capture_output=True, check=False, timeout=120).returncode == 0  # noqa: S603


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def tree_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
