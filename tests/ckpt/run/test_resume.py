"""A run that is killed goes on where it stopped; a run of something else is refused."""

import json
import os
import socket
from pathlib import Path

import pytest

import d9d_ckpt
import make_checkpoint
from d9d_ckpt.errors import DestinationError
from d9d_ckpt.storage.local import LocalStore

LAYOUT = "tp=2,dp_shard=2"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume") / "hf"
    config = make_checkpoint.sized("llama", "24MiB")
    make_checkpoint.write(config, path, seed=5, max_shard_size=10**9, sparse=False)
    return path


def killed(source: Path, target: Path, writes: int, **settings) -> None:
    """A conversion whose process is gone, without a word, at its ``writes``-th write."""
    pid = os.fork()
    if pid == 0:
        original, count = LocalStore.write, [0]

        def write(self, url, offset, view):
            count[0] += 1
            if count[0] == writes:
                os._exit(9)
            original(self, url, offset, view)

        LocalStore.write = write
        d9d_ckpt.convert(str(source), str(target), workers=1, **settings)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def sharded(source: Path, target: Path, **settings):
    return d9d_ckpt.convert(
        str(source), str(target), to="sharded", layout=LAYOUT, workers=1, **settings
    )


@pytest.mark.parametrize("to", ["sharded", "huggingface"])
@pytest.mark.parametrize("writes", [1, 4, 14])
def test_u03_a_killed_conversion_goes_on_where_it_stopped(source, tmp_path, to, writes):
    settings = {"to": to, "layout": LAYOUT} if to == "sharded" else {"to": to}
    killed(source, tmp_path / "out", writes, **settings)
    assert not (tmp_path / "out" / "manifest.json").exists()
    report = d9d_ckpt.convert(str(source), str(tmp_path / "out"), resume=True, **settings)
    spared = report.bytes_source - report.bytes_written
    assert spared >= {1: 0, 4: 1, 14: 4 << 20}[writes]
    assert d9d_ckpt.diff(str(source), str(tmp_path / "out")).equal
    assert d9d_ckpt.verify(str(tmp_path / "out")).ok
    assert [n for n in os.listdir(tmp_path / "out") if n.startswith(".d9d")] == []


def test_u03_finished_blocks_are_checked_before_they_are_kept(source, tmp_path):
    killed(source, tmp_path / "out", 14, to="sharded", layout=LAYOUT)
    (save,) = [p for p in (tmp_path / "out").iterdir() if p.is_dir()]
    for file in save.iterdir():
        size = file.stat().st_size
        file.write_bytes(b"\xff" * size)
    report = sharded(source, tmp_path / "out", resume=True)
    assert report.bytes_written == report.bytes_source
    assert d9d_ckpt.diff(str(source), str(tmp_path / "out")).equal


def test_u03_killed_twice_and_resumed_with_more_workers(source, tmp_path):
    killed(source, tmp_path / "out", 6, to="sharded", layout=LAYOUT)
    killed(source, tmp_path / "out", 6, to="sharded", layout=LAYOUT, resume=True)
    report = d9d_ckpt.convert(
        str(source), str(tmp_path / "out"), to="sharded", layout=LAYOUT, workers=2, resume=True
    )
    assert report.bytes_source - report.bytes_written >= 4 << 20
    assert d9d_ckpt.diff(str(source), str(tmp_path / "out")).equal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "tp=4"}, r"--layout was .*\"tp\": 2.*is now|--layout was .*, is .* now"),
        ({"dtype": "float32"}, "--dtype was keep, is float32 now"),
    ],
)
def test_u03_another_request_is_refused_with_what_changed(source, tmp_path, change, message):
    killed(source, tmp_path / "out", 4, to="sharded", layout=LAYOUT)
    before = sorted(p.name for p in (tmp_path / "out").rglob("*"))
    asked = {"to": "sharded", "layout": LAYOUT, "resume": True} | change
    with pytest.raises(DestinationError, match=message):
        d9d_ckpt.convert(str(source), str(tmp_path / "out"), **asked)
    assert sorted(p.name for p in (tmp_path / "out").rglob("*")) == before


def test_u03_another_source_content_is_refused(source, tmp_path):
    copy = tmp_path / "hf"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    killed(copy, tmp_path / "out", 4, to="sharded", layout=LAYOUT)
    config = make_checkpoint.sized("llama", "24MiB", tied=True)
    for file in copy.iterdir():
        file.unlink()
    make_checkpoint.write(config, copy, seed=6, max_shard_size=10**9, sparse=False)
    with pytest.raises(DestinationError, match="content of the source was"):
        sharded(copy, tmp_path / "out", resume=True)


def test_u03_a_run_that_may_be_alive_is_not_taken_over(source, tmp_path):
    killed(source, tmp_path / "out", 4, to="sharded", layout=LAYOUT)
    claim = tmp_path / "out" / ".d9d-claim"
    value = json.loads(claim.read_text())
    for host, pid in ((socket.gethostname(), os.getppid()), ("another-host", value["pid"])):
        claim.write_text(json.dumps(value | {"host": host, "pid": pid}))
        with pytest.raises(DestinationError, match=r"may still be writing.*--take-over"):
            sharded(source, tmp_path / "out", resume=True)
    sharded(source, tmp_path / "out", resume=True, take_over=True)
    assert d9d_ckpt.diff(str(source), str(tmp_path / "out")).equal


def test_resume_of_nothing_is_a_first_run_and_of_something_else_is_refused(source, tmp_path):
    report = sharded(source, tmp_path / "new", resume=True)
    assert report.bytes_written == report.bytes_source
    with pytest.raises(DestinationError, match="no interrupted run to resume"):
        sharded(source, tmp_path / "new", resume=True)
