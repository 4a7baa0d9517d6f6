"""Several processes: the same bytes whatever their number, one cause when one fails, nothing left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import (
    cli,
    convert,
    equal,
    everything,
    flip,
    manifest,
    model,
    read_hf,
    read_sharded,
    refused,
    training,
    write_hf,
    write_model,
)

ROOT = Path(__file__).parents[3]


def chunks(path):
    """All of a manifest that does not depend on the save's identity."""
    found = manifest(path)
    text = json.dumps(found["tensors"]).replace(found["save_id"], "ID")
    return text, {n.replace(found["save_id"], "ID"): f["nbytes"] for n, f in found["files"].items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A mixture of 60 MB: more than one unit of work."""
    made = model("qwen3_moe", layers=2, hidden=512, moe_intermediate=512, experts=16, vocab=4000,
                 dtype="bfloat16")  # fmt: skip
    return write_model(tmp_path_factory.mktemp("src") / "src", made, shards=3), made


@pytest.mark.parametrize("to", ["sharded", "huggingface"])
def test_any_number_of_workers_writes_the_same_bytes(tmp_path, source, to, monkeypatch):
    src, made = source
    monkeypatch.setattr("d9d_ckpt.plan.assign._UNIT", 4 << 20)
    found = []
    for workers in (1, 2, 3):
        dst = tmp_path / str(workers)
        layout = ("--layout", "pp=2,tp=2,ep=2") if to == "sharded" else ("--hf-experts", "fused")
        report = convert(src, dst, to, *layout, workers=workers)
        assert report["ranks"] == workers
        assert report["bytes_read"] == report["bytes_written"] == report["bytes_source"]
        found.append(chunks(dst) if to == "sharded" else everything(dst))
    assert found[0] == found[1] == found[2]
    if to == "sharded":
        assert equal(read_sharded(tmp_path / "3"), training(made))


def test_more_workers_than_work(tmp_path):
    src = write_hf(tmp_path / "src", {"w": torch.ones(4)})
    assert convert(src, tmp_path / "x", "huggingface", workers=16)["ranks"] == 1
    assert equal(read_hf(tmp_path / "x"), {"w": torch.ones(4)})


def test_d03_a_worker_that_fails_ends_all_with_its_cause(tmp_path, source):
    src, _ = source
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2")
    file = sorted((tmp_path / "s" / manifest(tmp_path / "s")["save_id"]).iterdir())[1]
    flip(file, -5)
    started = time.monotonic()
    result = cli("convert", tmp_path / "s", tmp_path / "x", "--to", "huggingface", "--workers", 3)
    refused(result, 3, file.name, "damaged")
    assert time.monotonic() - started < 10
    assert not (tmp_path / "x").exists()


def test_d03_a_worker_that_is_killed_is_noticed(tmp_path, source, monkeypatch):
    src, _ = source
    monkeypatch.setattr(
        "d9d_ckpt.run.workers._work", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    )
    result = cli("convert", src, tmp_path / "x", "--to", "huggingface", "--workers", 2)
    refused(result, 5, "worker process", "died")
    assert not (tmp_path / "x").exists()


def test_a_bug_in_a_worker_does_not_hang(tmp_path, source, monkeypatch):
    src, _ = source

    def broken(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("d9d_ckpt.run.workers._work", broken)
    result = cli("convert", src, tmp_path / "x", "--to", "huggingface", "--workers", 2)
    refused(result, 5, "worker process")
    assert not (tmp_path / "x").exists()


SLOWLY = """
import sys, time
from d9d_ckpt.cli import main
from d9d_ckpt.storage.local import LocalStore
write = LocalStore.write
LocalStore.write = lambda *args: (time.sleep(0.1), write(*args))[1]
sys.exit(main(sys.argv[1:]))
"""


@contextlib.contextmanager
def running(dst, src, workers):
    """A conversion in the middle of its writes, each of which takes 0.1 s; ended at the latest here."""
    argv = ("convert", src, dst, "--to", "sharded", "--layout", "tp=2", "--memory", "8MiB")
    run = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", SLOWLY, *map(str, argv), "--workers", str(workers)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 30
        while not list(dst.glob("*/*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        assert run.poll() is None, run.communicate()
        yield run
    finally:
        run.kill()
        run.wait()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("whole_group", [False, True])
def test_an_interrupted_conversion_leaves_nothing_and_exits_130(
    tmp_path, source, workers, whole_group
):
    dst = tmp_path / "a" / "dst"
    with running(dst, source[0], workers) as run:
        (os.killpg if whole_group else os.kill)(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=10)
    assert run.returncode == 130
    assert "Traceback" not in err
    assert "interrupted" in err
    assert out == ""
    assert not dst.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_conversion_leaves_nothing(tmp_path, source, number):
    """What a scheduler sends before it takes the machine, and torchrun to the other ranks."""
    dst = tmp_path / "dst"
    with running(dst, source[0], 2) as run:
        run.send_signal(number)
        _, err = run.communicate(timeout=10)
    assert run.returncode != 0
    assert "Traceback" not in err
    assert not dst.exists()


# -- several ranks under a launcher ------------------------------------------------------------


def torchrun(*argv, setup=None):
    """Two ranks; ``setup`` runs before each rank's command, with $RANK set."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
    ]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    if setup is None:
        command += ["-m", "d9d_ckpt"]
    else:
        script = f'{setup}; exec "{sys.executable}" -m d9d_ckpt "$@"'
        command += ["--no-python", "bash", "-c", script, "rank"]
    begun = time.monotonic()
    done = subprocess.run(  # noqa: S603
        [*command, *map(str, argv)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done, time.monotonic() - begun


@pytest.mark.ranks
def test_two_ranks_write_what_one_process_writes(tmp_path, source):
    src, _ = source
    convert(src, tmp_path / "one", "sharded", "--layout", "pp=2,tp=2,ep=2")
    argv = (
        "convert",
        src,
        tmp_path / "two",
        "--to",
        "sharded",
        "--layout",
        "pp=2,tp=2,ep=2",
        "--json",
    )
    done, _ = torchrun(*argv)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["ranks"] == 2
    assert json.loads(line)["bytes_written"] == json.loads(line)["bytes_source"]
    assert chunks(tmp_path / "one") == chunks(tmp_path / "two")
    assert cli("verify", tmp_path / "two").code == 0


@pytest.mark.ranks
def test_f08_two_ranks_write_one_index_of_all_tensors(tmp_path, source):
    src, made = source
    convert(src, tmp_path / "s", "sharded", "--layout", "pp=2")
    argv = (
        "convert",
        tmp_path / "s",
        tmp_path / "hf",
        "--to",
        "huggingface",
        "--max-shard-size",
        "20MB",
    )
    done, _ = torchrun(*argv, "--quiet")
    assert done.returncode == 0, done.stderr
    assert equal(read_hf(tmp_path / "hf"), made.tensors)
    assert not [n for n in os.listdir(tmp_path / "hf") if n.startswith(".")]


@pytest.mark.ranks
def test_d03_a_destination_that_rank_0_cannot_write_ends_both_ranks(tmp_path, source):
    src, _ = source
    (tmp_path / "file").write_text("mine")
    dst = tmp_path / "file" / "below"
    done, seconds = torchrun("convert", src, dst, "--to", "sharded", "--layout", "tp=2")
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("d9d-ckpt: ")]
    assert len(told) == 2, done.stderr
    assert all(str(dst) in line and "Not a directory" in line for line in told)
    assert seconds < 60


@pytest.mark.ranks
def test_d03_a_rank_that_cannot_write_ends_both_ranks_with_its_cause(tmp_path, source):
    src, _ = source
    dst = tmp_path / "dst"
    done, seconds = torchrun(
        "convert", src, dst, "--to", "sharded", "--layout", "tp=2",
        setup='if [ "$RANK" = 1 ]; then ulimit -f 1; fi',
    )  # fmt: skip
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("d9d-ckpt: write ")]
    assert len(told) >= 1
    assert all("errno 27" in line and str(dst) in line for line in told)
    assert seconds < 60
    assert not dst.exists(), sorted(everything(dst))


@pytest.mark.ranks
def test_d03_a_refusal_is_told_by_every_rank_and_nothing_is_left(tmp_path, source):
    src, _ = source
    dst = tmp_path / "dst"
    done, _ = torchrun("convert", src, dst, "--to", "sharded", "--layout", "tp=3")
    assert done.returncode != 0
    assert "tp=3" in done.stderr
    assert not dst.exists()
