"""One measured command: whole-process wall time, processor time and peak memory."""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

TAIL_CHARS = 2000


class ChildError(RuntimeError):
    """A command ended badly, or was ended because it took too long."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a command cost.

    Attributes:
        wall_s: Seconds from just before the start to the end of the command.
        cpu_s: Processor seconds of the command and of the children it waited for.
        others_cpu_s: Processor seconds that the rest of the machine spent meanwhile.
        peak_rss: Bytes of the largest process among them; never below this process's own, with
            which a child starts.
        report: The last JSON object that the command printed, or an empty one.
    """

    wall_s: float
    cpu_s: float
    others_cpu_s: float
    peak_rss: int
    report: Mapping[str, Any]


def run_child(argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Run:
    """Runs a command to its end.

    Args:
        argv: The command.
        env: Its whole environment.
        timeout_s: After this many seconds the command and its descendants are killed.

    Returns:
        What it cost and what it reported.

    Raises:
        ChildError: The exit status is not 0, or the time ran out.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        busy = busy_s()
        start = time.perf_counter()
        child = subprocess.Popen(argv, env=dict(env), stdout=out, stderr=err)  # noqa: S603
        late = threading.Event()
        timer = threading.Timer(timeout_s, _end_late, (child.pid, late))
        timer.start()
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:
            _kill([child.pid, *descendants(child.pid)])
            child.wait()
            raise
        finally:
            timer.cancel()
        wall_s = time.perf_counter() - start
        busy = busy_s() - busy
        child.returncode = os.waitstatus_to_exitcode(status)
        if late.is_set():
            raise ChildError(_failure(f"ended after {timeout_s:.0f} s", argv, err))
        if child.returncode:
            raise ChildError(_failure(f"exit status {child.returncode}", argv, err))
        cpu_s = usage.ru_utime + usage.ru_stime
        others_cpu_s = max(busy - cpu_s, 0.0)
        return Run(wall_s, cpu_s, others_cpu_s, usage.ru_maxrss * 1024, _report(out))


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, wherever their sessions are (torchrun gives each worker its own)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _end_late(pid: int, late: threading.Event) -> None:
    late.set()
    _kill([pid, *descendants(pid)])


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def busy_s() -> float:
    """Processor seconds of the whole machine since it started, without idling and guests."""
    total = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _, _, irq, softirq, steal = map(int, total[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _report(out: IO[bytes]) -> dict[str, Any]:
    """The last line that is a JSON object, else the whole output if it is one."""
    out.seek(0)
    text = out.read().decode(errors="replace")
    for candidate in (*reversed(text.splitlines()), text):
        if not candidate.lstrip().startswith("{"):
            continue
        try:
            return dict(json.loads(candidate))
        except ValueError:
            continue
    return {}


def _failure(reason: str, argv: Sequence[str], err: IO[bytes]) -> str:
    """What happened on the first line, then the command and the end of its messages."""
    err.seek(0)
    tail = err.read().decode(errors="replace")[-TAIL_CHARS:].strip()
    last = tail.rpartition("\n")[2]
    return f"{reason}: {last}\n{' '.join(argv)}\n{tail}"
