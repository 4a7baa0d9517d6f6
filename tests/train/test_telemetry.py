"""Metrics and where they go, FLOPs, profiles, and the last actions of all ranks."""

import gzip
import io
import json
import math
import os
import signal
import sys
import threading
import time
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import KILLED, launch

from d9d_ckpt.errors import StorageError, UsageError
from d9d_ckpt.models.config import ModelConfig
from d9d_train import telemetry
from d9d_train.telemetry import (
    Capture,
    JsonLines,
    LastActions,
    MetricsConfig,
    Progress,
    flops_per_token,
    open_tracker,
    peak_flops,
    peak_memory,
)

CPU = torch.device("cpu")


def model(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, **more):
    return ModelConfig(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, **more)


@pytest.mark.parametrize(
    ("config", "experts", "seq_len", "giga"),
    [
        (model(16, 2048, 32, 8, 64, 8192, 128256, tied=True), 0, 8192, 9.025),
        (model(28, 3072, 24, 8, 128, 8192, 128256, tied=True), 0, 8192, 23.503),
        (
            model(16, 1024, 16, 8, 64, 0, 151936, tied=True, experts=64, moe_intermediate=768),
            8, 4096, 3.456,
        ),
    ],
)  # fmt: skip
def test_flops_are_those_that_peers_are_measured_by(config, experts, seq_len, giga):
    flops = flops_per_token(config, experts_per_token=experts, seq_len=seq_len)
    assert round(flops / 1e9, 3) == giga


def test_flops_by_hand():
    # Attention 8 x 4 x (2 x 2 + 2 x 1) = 192 a layer; dense 3 x 8 x 5 = 120; sparse 2 x 3 x 8 x 3 +
    # 8 x 4 = 176; head 7 x 8 = 56; scores 6 x 3 x 2 x 4 x 10 = 1440.
    config = model(3, 8, 2, 1, 4, 5, 7, experts=4, moe_intermediate=3, dense_layers=frozenset({1}))
    expected = 6 * (3 * 192 + 120 + 2 * 176 + 56) + 1440
    assert flops_per_token(config, experts_per_token=2, seq_len=10) == expected


def test_a_cpu_has_no_peak():
    assert peak_flops(CPU, MetricsConfig(peak_flops=1e12)) is None
    assert peak_memory(CPU) is None


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_keeps_all_digits_and_is_flushed(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    tracker = JsonLines(str(path), 0)
    loss = math.pi * 1e-7
    tracker.log(1, {"loss": loss, "mfu": None, "tokens": 12, "grad_norm": float("nan")})
    (line,) = written(path)
    assert line == {"step": 1, "loss": loss, "mfu": None, "tokens": 12, "grad_norm": None}
    tracker.close()


def test_a_resume_does_not_double_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(str(path), 0)
    for step in range(1, 6):
        first.log(step, {"run": 1})
        if step == 3:
            first.log(step, {"validation": 1})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 6, "ru')
    second = JsonLines(str(path), 3)
    second.log(4, {"run": 2})
    second.close()
    assert [(line["step"], line.get("run")) for line in written(path)] == [
        (1, 1), (2, 1), (3, 1), (3, None), (4, 2)
    ]  # fmt: skip
    JsonLines(str(path), 0).close()
    assert path.read_bytes() == b""


def test_a_line_that_was_cut_short_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    JsonLines(str(path), 9).close()
    assert path.read_text() == '{"step": 1}\n'


def test_another_file_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(UsageError, match=r"b'dear diary.*' is no line of metrics"):
        JsonLines(str(path), 0)
    assert path.read_text() == "dear diary\n"
    with pytest.raises(StorageError, match=r"metrics\.jsonl"):
        JsonLines(str(tmp_path), 0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def tracker(config, **more):
    return open_tracker(config, **{"resumed": 0, "steps": 9, "settings": {}, **more})


def test_a_terminal_gets_one_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    line = tracker(MetricsConfig())
    line.log(1, {"loss": 3.14159, "tokens_per_s": 12345.6, "mfu": None})
    line.log(2, {"loss": 3.0})
    line.close()
    assert sys.stderr.getvalue().split("\r\033[K")[1:] == [
        "step 1 of 9  loss 3.142  tokens_per_s 12,346",
        "step 2 of 9  loss 3\n",
    ]


def test_anything_else_gets_the_first_line_the_last_and_one_every_ten_seconds(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    seconds = iter([100.0, 109.9, 110.0, 110.1])
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: next(seconds))
    plain = tracker(MetricsConfig(), steps=4)
    for step in range(1, 5):
        plain.log(step, {"loss": 3.0})
    plain.close()
    assert sys.stderr.getvalue() == "".join(f"step {n} of 4  loss 3\n" for n in (1, 3, 4))


class Recorder:
    """Stands for a writer of TensorBoard, or a run of W&B, and notes its calls."""

    def __init__(self, *args, **kwargs):
        self.calls = [("init", args, kwargs)]

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def test_tensorboard(monkeypatch):
    made = []
    module = types.SimpleNamespace(
        SummaryWriter=lambda *a, **k: made.append(Recorder(*a, **k)) or made[0]
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    board = tracker(MetricsConfig(tensorboard="runs"), resumed=3)
    board.log(4, {"loss": 2.0, "mfu": None})
    board.close()
    assert made[0].calls == [
        ("init", ("runs",), {"purge_step": 4}),
        ("add_scalar", ("loss", 2.0, 4), {}),
        ("flush", (), {}),
        ("close", (), {}),
    ]


def test_wandb(monkeypatch):
    made = []
    module = types.SimpleNamespace(init=lambda **k: made.append(Recorder(**k)) or made[0])
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = tracker(MetricsConfig(wandb="project"), settings={"train": {"steps": 9}})
    run.log(4, {"loss": 2.0, "mfu": None})
    run.close()
    assert made[0].calls == [
        (
            "init", (),
            {
                "project": "project", "id": None, "resume": "allow",
                "config": {"train": {"steps": 9}},
            },
        ),
        ("log", ({"loss": 2.0},), {"step": 4}),
        ("finish", (), {}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "module", "package"),
    [("tensorboard", "torch.utils.tensorboard", "tensorboard"), ("wandb", "wandb", "wandb")],
)
def test_a_missing_package_is_named(monkeypatch, key, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        UsageError, match=rf"metrics\.{key}: the package {package} is not installed"
    ):
        tracker(MetricsConfig(**{key: "x"}))


def captured(folder, steps, **more):
    return Capture(
        MetricsConfig(profile_steps=steps, profile_folder=str(folder), **more), rank=3, device=CPU
    )


def test_a_profile_is_of_the_steps_asked_for(tmp_path):
    capture = captured(tmp_path / "deep", (2, 3))
    for step in range(1, 6):
        with capture.around(step):
            torch.ones(8 * step) + 1
    (path,) = (tmp_path / "deep").iterdir()
    assert path.name == "rank3.step3.trace.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event["name"] == "aten::add" for event in events) == 2


def test_a_failure_leaves_the_profile_so_far(tmp_path):
    capture = captured(tmp_path, (2, 9))
    with capture.around(2):
        torch.ones(8)
    with pytest.raises(RuntimeError, match="no more"), capture.around(3):
        raise RuntimeError("no more")
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.step3.trace.json.gz"]


def test_captures_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(UsageError, match="needs a GPU"):
        captured(tmp_path, (1, 2), memory_snapshot=True)
    with pytest.raises(UsageError, match=r"profile_steps \[3, 2\]: expected \[first, last\]"):
        MetricsConfig(profile_steps=(3, 2))


def test_progress_in_words():
    progress = Progress()
    assert str(progress) == "step 0, start"
    progress.begin(12)
    assert str(progress) == "step 12, begin"
    progress.at("backward of stage 1", 3)
    assert str(progress) == "step 12, micro-batch 3, backward of stage 1"
    progress.at("clip")
    assert str(progress) == "step 12, clip"


def _failing(rank):
    """Rank 2 fails while 0 and 1 wait for it, as they would in a step; rank 3 was killed."""
    progress = Progress()
    store = dist.distributed_c10d._get_default_store()
    try:
        with LastActions(store, progress, rank=rank, world=4, period=0.05):
            progress.begin(7)
            if rank == 3:
                progress.at("reading")
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.5)
            progress.at("forward of stage 0", 1)
            if rank == 2:
                torch.ones(2).view(3)
            dist.monitored_barrier(timeout=timedelta(seconds=3))
    except RuntimeError as error:
        return error.__notes__
    return None


@pytest.mark.ranks
def test_the_message_of_a_rank_that_fails_has_the_last_actions_of_all():
    outcomes = launch(4, _failing, allow=frozenset({3}))
    assert outcomes[3] is KILLED
    assert outcomes[2][0].splitlines() == [
        "last actions:",
        "  ranks 0-2: step 7, micro-batch 1, forward of stage 0",
        "  rank 3: step 7, reading",
    ]


def tcp_store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))


def test_actions_are_written_while_the_store_is_waited_in():
    store, mine, theirs = tcp_store(), Progress(), Progress()
    waiting = threading.Thread(target=store.wait, args=(["released"],))
    waiting.start()
    try:
        theirs.at("stuck")
        with LastActions(store.clone(), theirs, rank=1, world=6, period=0.05):
            note = note_of(LastActions(store, mine, rank=0, world=6, period=0.05))
    finally:
        store.clone().set("released", "")
        waiting.join()
    assert note.splitlines()[1:] == [
        "  rank 0: step 0, start",
        "  rank 1: step 0, stuck",
        "  ranks 2-5: no word",
    ]


def note_of(actions):
    """What is added to an error that leaves the context."""
    with pytest.raises(ValueError, match="wrong") as error, actions:
        raise ValueError("wrong")
    (note,) = error.value.__notes__
    return note


def test_a_store_that_is_gone_is_said_to_be():
    actions = LastActions(tcp_store(), Progress(), rank=1, world=2, period=0.01)

    def lost(*_):
        raise RuntimeError("connection reset")

    actions._store = types.SimpleNamespace(set=lost, check=lost)
    assert note_of(actions) == "rank 1: step 0, start; no word from the others: connection reset"


def test_ranks_are_told_in_spans():
    store = tcp_store()
    for rank in range(6):
        progress = Progress()
        progress.at("a" if rank in (0, 1, 3) else "b")
        with LastActions(store, progress, rank=rank, world=6, period=0.01) as actions:
            pass
    assert actions.everyone().splitlines()[1:] == [
        "  ranks 0-1, 3: step 0, a",
        "  ranks 2, 4-5: step 0, b",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captures_and_peaks_of_a_gpu(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    config = MetricsConfig(
        profile_steps=(1, 1), profile_folder=str(tmp_path), memory_snapshot=True, peak_flops=5e14
    )
    peak_memory(device)
    with Capture(config, rank=0, device=device).around(1):
        held = torch.ones(1 << 20, device=device)
    assert {path.name for path in tmp_path.iterdir()} == {
        "rank0.step1.trace.json.gz", "rank0.step1.memory.pickle"
    }  # fmt: skip
    assert peak_memory(device) >= held.nbytes
    assert peak_flops(device, config) == 5e14
