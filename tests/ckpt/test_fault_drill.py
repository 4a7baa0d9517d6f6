"""A part of tools/fault_drill.py: a hundred faults, and never a lost or a broken checkpoint."""

import os
import signal
import time

import pytest

import fault_drill
from d9d_ckpt.errors import StorageError
from drill import children, team
from drill.board import Board, Fault
from drill.power import Power
from drill.scenes import Result, Scene, Violation
from drill.syscalls import Disk

FAULTS = 50
"""For each of two jobs; 80 seconds on two quiet cores."""


@pytest.mark.s3
def test_faults_everywhere_leave_whole_checkpoints_and_nothing_else():
    report = fault_drill.run(fault_drill.Wanted(faults=FAULTS), jobs=2)
    assert report.violations == []
    assert len(report.results) + report.missed == 2 * FAULTS
    assert report.missed < FAULTS / 2
    assert {r.place for r in report.results} == set(fault_drill.PLACES)
    assert "save of four ranks" in {r.operation for r in report.results}
    assert {r.how for r in report.results} == {"done", "refused", "killed"}
    assert {r.fault.effect for r in report.results} >= {"kill", "EIO", "short", "ENOSPC", "torn"}


def test_dcp_goes_through_the_same_faults_and_loses_checkpoints():
    wanted = fault_drill.Wanted(places=["local"], peer="dcp", faults=25)
    report = fault_drill.run(wanted, jobs=2)
    assert len(report.results) > 25
    assert report.count("harmed") > 0
    assert {v.operation for v in report.violations if v.kind == "harmed"} == {
        "DCP save over another"
    }


# -- the drill itself: what it would not see, it could not count -----------------------------------


def test_a_child_that_hangs_is_ended_with_all_that_it_started():
    children.adopt()

    def hang():
        if os.fork():
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    ended = children.run(hang, seconds=0.5)
    assert ended.how == "hung"
    assert ended.seconds < 5


@pytest.mark.parametrize(
    ("error", "how"), [(StorageError("no"), "refused"), (OSError("no"), "crashed")]
)
def test_only_our_own_errors_are_refusals(error, how):
    def fail():
        raise error

    ended = children.run(fail)
    assert ended.how == how
    assert "no" in ended.text


def test_a_child_that_dies_is_killed():
    assert children.run(lambda: os.kill(os.getpid(), signal.SIGKILL)).how == "killed"


def disk(path, kind, number, effect):
    """What becomes of a file that is written, made durable and renamed under a fault; and hits."""
    board = Board()

    def work():
        Disk(str(path), board, Fault(kind, number, effect)).install()
        fd = os.open(f"{path}/a", os.O_WRONLY | os.O_CREAT)
        written = os.write(fd, b"12345678")
        os.fsync(fd)
        os.close(fd)
        os.rename(f"{path}/a", f"{path}/b")
        return written

    ended = children.run(work)
    return ended, {p.name: p.read_bytes() for p in path.iterdir()}, board


@pytest.mark.parametrize(
    ("kind", "effect", "how", "left"),
    [
        ("write", "kill", "killed", {"a": b""}),
        ("write", "torn", "killed", {"a": b"1234"}),
        ("write", "short", "done", {"b": b"1234"}),
        ("fsync", "EIO", "crashed", {"a": b"12345678"}),
        ("rename", "EIO", "crashed", {"a": b"12345678"}),
        ("rename", "kill", "killed", {"a": b"12345678"}),
        ("create", "ENOSPC", "crashed", {}),
        ("close", "EIO", "crashed", {"a": b"12345678"}),
    ],
)
def test_faults_of_a_disk_do_what_they_say(tmp_path, kind, effect, how, left):
    ended, found, board = disk(tmp_path, kind, 1, effect)
    assert (ended.how, found, board.hits) == (how, left, 1)


def test_a_power_loss_takes_back_what_was_not_synced(tmp_path):
    out = tmp_path / "root" / "out"
    (out / "d").mkdir(parents=True)
    (out / "old").write_bytes(b"old")
    power = Power(tmp_path / "root", "out", tmp_path / "aside")
    power.begin()
    (out / "old").write_bytes(b"overwritten")
    (out / "synced").write_bytes(b"synced")
    power.synced(out / "synced")
    (out / "unsynced").write_bytes(b"unsynced")
    power.synced(out)
    (out / "synced").rename(out / "renamed")
    (out / "d" / "lost").write_bytes(b"lost")
    power.fail()
    power.come_back()
    found = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert found == {"old": b"old", "synced": b"synced", "unsynced": b""}
    assert (out / "d").is_dir()
    assert not (tmp_path / "aside").exists()


def test_a_power_loss_takes_a_directory_that_its_parent_does_not_know(tmp_path):
    (tmp_path / "root").mkdir()
    power = Power(tmp_path / "root", "out", tmp_path / "aside")
    power.begin()
    (tmp_path / "root" / "out").mkdir()
    power.synced(tmp_path / "root" / "out")
    power.fail()
    power.come_back()
    assert not (tmp_path / "root" / "out").exists()


class Tree:
    """A place whose files are given."""

    def __init__(self, *names):
        self.files = lambda _: dict.fromkeys(names, 0)


SAVES = "20260101T000000-0000000a", "20260102T000000-0000000b"


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ((f"{SAVES[0]}/rank", f"model-{SAVES[0]}-1"), False),
        ((f"{SAVES[0]}/rank", "model-1"), False),
        ((f"{SAVES[0]}/rank", f"{SAVES[1]}/rank", "model-1"), True),
        ((f"{SAVES[0]}/rank", "model-1", f"model-{SAVES[1]}-1"), True),
        ((f"{SAVES[0]}/rank",), True),
    ],
)
def test_what_two_saves_leave_is_no_clean_place(names, left):
    scene = Scene(Tree(*names), None, None, None, clean=("SAVE/rank", "model-1"))
    assert bool(scene._left()) == left


def test_calls_elsewhere_are_neither_counted_nor_harmed(tmp_path):
    (tmp_path / "in").mkdir()
    board = Board()

    def work():
        Disk(str(tmp_path / "in"), board, Fault("create", 1, "kill")).install()
        os.close(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT))

    assert children.run(work).how == "done"
    assert (board.hits, board.counts) == (0, {})


def test_a_full_disk_stays_full_and_a_dead_one_dead(tmp_path):
    for effect, kinds in (("ENOSPC", ["mkdir"]), ("dead disk", ["mkdir", "stat"])):
        board = Board()

        def work(effect=effect, board=board):
            Disk(str(tmp_path), board, Fault("mkdir", 1, effect)).install()
            return [failed(os.mkdir, tmp_path / "a"), failed(os.mkdir, tmp_path / "a"),
                    failed(os.stat, tmp_path)]  # fmt: skip

        assert children.run(work).value == [True, True, "stat" in kinds]


def test_a_disk_that_is_full_for_one_process_takes_what_others_write(tmp_path):
    board = Board()

    def work():
        Disk(str(tmp_path), board, Fault("mkdir", 1, "full")).install()
        code = 0
        if not os.fork():
            code = not (failed(os.mkdir, tmp_path / "a") and failed(os.mkdir, tmp_path / "a"))
            os._exit(code)
        code = os.wait()[1]
        os.mkdir(tmp_path / "a")
        return code

    children.adopt()
    assert children.run(work).value == 0


DIED = "/run/step-00000004: rank 2: writer process 5 died (signal 9) during write"


def told(board, fault, **ranks):
    """What is wrong with what four ranks say, all refused at once but for those given."""
    at = board.when + 0.5
    every = {f"r{n}": team.Word("refused", DIED, at + n / 10) for n in range(4)} | ranks
    words = {int(name[1:]): word for name, word in every.items() if word is not None}
    try:
        team._check(words, board, fault, "/run")
    except children.Verdict as verdict:
        return verdict.how
    return None


def test_ranks_that_hear_late_or_too_little_are_counted():
    board, fault = Board(), Fault("write", 1, "kill writer")
    board.rank = 2
    board.hit()
    assert told(board, fault) is None
    assert told(board, fault, r0=None) == "crashed"
    assert told(board, fault, r0=team.Word("done", "", board.when)) == "crashed"
    assert told(board, fault, r3=team.Word("refused", "rank 2: died", board.when)) == "crashed"
    assert told(board, fault, r3=team.Word("refused", DIED, board.when + 2.9)) == "hung"
    late = {f"r{n}": team.Word("refused", DIED, board.when + 4) for n in range(4)}
    assert told(board, fault, **late) == "hung"


def test_what_a_failed_save_of_ranks_leaves_is_counted(tmp_path):
    board, fault = Board(), Fault("write", 1, "kill writer")
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "part").touch()
    team._check_left(str(tmp_path), set(), board, fault)  # Rank 0's writer cannot clean up.
    board.rank = 1
    board.hit()
    with pytest.raises(children.Verdict, match="step-00000004/part"):
        team._check_left(str(tmp_path), set(), board, fault)


def failed(call, path):
    """Whether a call was refused."""
    try:
        call(path)
    except OSError:
        return True
    return False


def test_the_table_counts_faults_by_what_became_of_them():
    made = [
        (Fault("write", 1, "kill"), "killed", ()),
        (Fault("write", 2, "EIO"), "refused", ("harmed", "harmed", "leftover")),
        (Fault("read", 1, "EIO"), "refused", ()),
    ]
    results = [
        Result(
            "local", "prune", f, how, 0.1, tuple(Violation(k, "local", "prune", f, "") for k in v)
        )
        for f, how, v in made
    ]
    assert fault_drill.table(fault_drill.Report(results), ["place", "fault"]).splitlines()[2:] == [
        "| local | EIO | 2 | 0 | 2 | 0 | 0 | 1 | 0 | 1 | 0 |",
        "| local | kill | 1 | 0 | 0 | 1 | 0 | 0 | 0 | 0 | 0 |",
        "| all |  | 3 | 0 | 2 | 1 | 0 | 1 | 0 | 1 | 0 |",
    ]


def test_counters_are_exact_over_processes():
    board = Board()

    def work():
        for _ in range(4):
            if not os.fork():
                for _ in range(500):
                    board.count("write")
                os._exit(0)

    children.adopt()
    assert children.run(work).how == "done"
    assert board.counts == {"write": 2000}
