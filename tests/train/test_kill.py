"""A run that is killed goes on from a whole step, and ends as if nothing had happened, to the bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.kills import SAME, WHERE, lives
from helpers.ranks import launch
from helpers.runs import Place, farthest, told_apart

from d9d_ckpt.api import list_steps
from d9d_train.build import train
from d9d_train.config import load_config

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]

STEPS = 12

CONFIG = f"""\
[model]
family = "llama"
vocab_size = 61
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
[mesh]
dp_shard = 2
[train]
steps = {STEPS}
global_batch = 4
seq_len = 32
deterministic = true
[checkpoint]
url = "run"
every = 1
[metrics]
jsonl = "metrics.jsonl"
"""


def test_kills_leave_no_trace(tmp_path: Path):
    steps = 16
    whole, place = Place(tmp_path / "whole"), Place(tmp_path / "killed")
    whole.train(steps, WHERE, SAME)
    began = []
    for life in lives(place, steps, random.Random(3)):
        began.append(life.began)
        assert life.whole >= life.began
        if len(began) == 2:
            break
    assert began == sorted(began)
    place.train(steps, WHERE, SAME)
    assert farthest(whole, place) == 0
    assert told_apart(whole, place) == 0


class Command:
    """``python -m d9d_train train`` under torchrun, in a directory of its own."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(CONFIG)
        self.folder, self.metrics = folder, folder / "metrics.jsonl"
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
        trainer = "-m", "d9d_train", "train", "config.toml"
        self.process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, *torchrun, *trainer, *overrides],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, step: int) -> None:
        """Return when a step has been told of."""
        deadline = time.monotonic() + 120
        while self.told() < step:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, "no step in two minutes"
            time.sleep(0.01)

    def told(self) -> int:
        """Steps that have been told of."""
        return self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0

    def ranks(self) -> list[int]:
        """Processes of the ranks."""
        return children(self.process.pid)

    def kill(self) -> None:
        """Kill torchrun, ranks and writers, all at once."""
        everything = [self.process.pid]
        for pid in everything:
            everything += children(pid)
        for pid in everything:
            os.kill(pid, signal.SIGKILL)

    def end(self) -> tuple[int, str]:
        """Its exit code and what it said, when it is over."""
        _, said = self.process.communicate(timeout=120)
        return self.process.returncode, said


def children(pid: int) -> list[int]:
    """Processes that any thread of one has started."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def losses(metrics: Path) -> list[float]:
    """Of all steps."""
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def whole_steps(folder: Path) -> list[int]:
    """Steps of a run from which one can go on."""
    return [step.step for step in list_steps(str(folder / "run")).steps if step.complete]


def test_the_command_survives_a_kill_of_everything(tmp_path: Path):
    command = Command(tmp_path)
    command.until(4)
    command.kill()
    command.end()
    assert 4 <= command.told() < STEPS
    again = Command(tmp_path)
    code, said = again.end()
    assert code == 0, said
    elsewhere = f"metrics.jsonl={tmp_path}/whole.jsonl"
    whole = load_config(str(tmp_path / "config.toml"), ["checkpoint.url=", elsewhere])
    launch(2, lambda rank: train(whole))
    assert losses(again.metrics) == losses(tmp_path / "whole.jsonl")


@pytest.mark.parametrize("saving", [True, False], ids=["with checkpoints", "without"])
def test_sigterm_ends_every_rank_well(saving: bool, tmp_path: Path):
    command = Command(tmp_path, "train.steps=100000", *(() if saving else ("checkpoint.url=",)))
    command.until(3)
    ranks = command.ranks()
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGTERM)
    code, said = command.end()
    assert code == 0, said
    assert "stopped by a signal after step" in said
    assert (tmp_path / "run").exists() == saving
    if saving:
        assert whole_steps(tmp_path)[-1] == command.told()


def test_torchruns_sigterm_saves_while_a_save_is_in_flight(tmp_path: Path):
    command = Command(tmp_path, "train.steps=100000")
    command.until(5)
    ranks = command.ranks()
    command.process.send_signal(signal.SIGTERM)
    code, said = command.end()
    # torchrun itself reports the signal; the ranks have ended by themselves.
    assert code != 0
    assert len(ranks) == 2
    assert "stopped by a signal after step" in said
    assert whole_steps(tmp_path)[-1] == command.told()
