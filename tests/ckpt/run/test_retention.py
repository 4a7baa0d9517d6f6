"""Which steps go: decided purely; and a deletion that stops anywhere, looked at by a reader."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from helpers.checkpoints import (
    convert,
    equal,
    everything,
    flip,
    manifest,
    model,
    read_sharded,
    training,
    write_model,
)
from helpers.strategies import seeded
from hypothesis import given
from hypothesis import strategies as st

import d9d_ckpt
from d9d_ckpt import api
from d9d_ckpt.errors import MissingError, RequestError, StorageError, UsageError
from d9d_ckpt.formats.claim import CLAIM, SAVE, UNREADABLE, Claim, read_claim
from d9d_ckpt.formats.steps import _RANK, read_run, step_directories
from d9d_ckpt.run.execute import new_save_id
from d9d_ckpt.run.retention import Candidate, Policy, decide, prune
from d9d_ckpt.storage.local import LocalStore

HOST = socket.gethostname()


def named(step):
    return f"step-{step:08}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    src = write_model(root / "src", model("llama"))
    (src / "tokenizer.json").write_text("{}")
    convert(src, root / "dst", "sharded", "--layout", "tp=2,pp=2")
    return root / "dst"


@pytest.fixture
def run(saved, tmp_path):
    """Makes a run directory of whole steps."""

    def make(*steps, name="run"):
        for step in steps:
            shutil.copytree(saved, tmp_path / name / named(step))
        return tmp_path / name

    return make


def claimed(path, host=HOST, pid=None, **more):
    mark = {"save_id": "x", "host": host, "pid": pid or os.getpid(), "time": 1.0} | more
    (path / CLAIM).write_text(json.dumps(mark))


def gone_pid():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def half_written(path, pid):
    """What a killed writer leaves: its claim and some of its files, no manifest."""
    (path / "manifest.json").unlink()
    for small in ("config.json", "tokenizer.json"):
        (path / small).unlink()
    claimed(path, pid=pid)


# -- the decision ------------------------------------------------------------------------------

CANDIDATES = st.lists(
    st.builds(
        lambda step, complete, abandoned, blocked: Candidate(
            step, named(step), complete, abandoned, blocked
        ),
        st.integers(0, 40),
        st.booleans(),
        st.booleans(),
        st.sampled_from([None, None, None, "claimed"]),
    ),
    unique_by=lambda c: c.step,
)
POLICIES = st.builds(Policy, st.integers(1, 6), st.none() | st.integers(1, 9))


@seeded(300)
@given(CANDIDATES, POLICIES)
def test_every_step_is_deleted_kept_or_skipped_with_a_reason(steps, policy):
    d = decide(steps, policy)
    skipped = [s.name for s in d.skipped]
    found = [*map(named, d.delete), *map(named, d.keep), *skipped]
    assert sorted(found) == sorted(s.name for s in steps)
    assert all(s.reason for s in d.skipped)
    assert list(d.delete) == sorted(d.delete)


@seeded(300)
@given(CANDIDATES, POLICIES)
def test_the_latest_whole_step_and_the_unknown_are_never_deleted(steps, policy):
    delete = decide(steps, policy).delete
    whole = [s.step for s in steps if s.complete]
    assert not whole or max(whole) not in delete
    for s in steps:
        if s.step in delete:
            assert s.blocked is None
            assert s.complete or (s.abandoned and s.step < max(whole))


@seeded(300)
@given(CANDIDATES, POLICIES)
def test_keep_last_and_keep_every_are_exact(steps, policy):
    d = decide(steps, policy)
    whole = sorted((s for s in steps if s.complete), key=lambda s: s.step)
    newest = whole[-policy.keep_last :]
    wanted = {s.step for s in newest}
    wanted |= {s.step for s in whole if policy.keep_every and s.step % policy.keep_every == 0}
    assert set(d.keep) == wanted
    assert set(d.delete) >= {s.step for s in whole if s.step not in wanted and not s.blocked}


@seeded(100)
@given(CANDIDATES, POLICIES)
def test_a_second_decision_finds_nothing_more_to_do(steps, policy):
    d = decide(steps, policy)
    left = [s for s in steps if s.step not in d.delete]
    assert decide(left, policy).delete == ()
    assert decide(left, policy).keep == d.keep


@pytest.mark.parametrize("policy", [(0, None), (-1, None), (1, 0), (1, -5)])
def test_a_policy_that_keeps_nothing_is_refused(policy):
    with pytest.raises(UsageError, match="--keep"):
        Policy(*policy)


# -- names and claims --------------------------------------------------------------------------


def test_step_directories_have_one_spelling_per_number():
    names = ["step-00000500", "step-123456789", "step-0123456789", "step-500", "step-00000500x",
             "step-\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668", "xstep-00000001", "step-"]  # fmt: skip
    assert step_directories(names) == {500: "step-00000500", 123456789: "step-123456789"}


def test_the_patterns_of_ours_are_those_that_the_writer_uses(saved):
    assert SAVE.fullmatch(new_save_id())
    save = saved / manifest(saved)["save_id"]
    assert all(_RANK.fullmatch(n) for n in os.listdir(save))
    assert _RANK.fullmatch("rank-00003-00002.safetensors")
    assert not _RANK.fullmatch("rank-best.safetensors")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"host": "a"}', '{"host": 1, "pid": 2, "time": 3}',
     '{"host": "a", "pid": -1, "time": 3}', '{"host": "a", "pid": true, "time": 3}',
     '{"host": "a", "pid": 1, "time": "x"}', '{"host": "a", "pid": 1, "time": 1, "prune": [1]}',
     "\xff", "[" * 100_000],
)  # fmt: skip
def test_a_damaged_claim_names_nobody(tmp_path, text):
    file = tmp_path / CLAIM
    file.write_bytes(text.encode("latin-1"))
    assert read_claim(LocalStore(), str(file)) == UNREADABLE
    assert read_claim(LocalStore(), str(tmp_path / "none")) is None


def test_a_claim_reads_back(tmp_path):
    for claim in (Claim("a", 3, 1.5), Claim("a", 3, 1.5, ("config.json",))):
        (tmp_path / CLAIM).write_bytes(claim.encode())
        assert read_claim(LocalStore(), str(tmp_path / CLAIM)) == claim


# -- listing -----------------------------------------------------------------------------------


def test_d01_list_names_the_first_missing_or_short_file(run):
    root = run(500, 600, 700, 800, 900, 1000)
    save = manifest(root / named(500))["save_id"]
    (root / named(600) / save / "rank-00002.safetensors").unlink()
    short = root / named(700) / save / "rank-00001.safetensors"
    short.write_bytes(short.read_bytes()[:100])
    (root / named(800) / "tokenizer.json").write_bytes(b"")
    flip(root / named(900) / "manifest.json", 300)
    (root / named(1000) / "manifest.json").unlink()
    found = api.list_steps(str(root))
    reasons = {s.step: s.reason for s in found.steps}
    assert found.latest == 500
    assert reasons[500] is None
    assert reasons[600].startswith(f"{save}/rank-00002.safetensors: ")
    assert "100 bytes" in reasons[700]
    assert "rank-00001" in reasons[700]
    assert reasons[800].startswith("tokenizer.json: 0 bytes")
    assert "manifest.json" in reasons[900]
    assert reasons[1000] == "no manifest"
    assert [s.layout["tp"] if s.layout else None for s in found.steps] == [2, 2, 2, 2, None, None]
    assert found.steps[0].contents.nbytes == sum(map(len, everything(root / named(500)).values()))
    assert not any(s.contents.unknown for s in found.steps[:4])
    # Pointer-free discovery is the same everywhere.
    opened = d9d_ckpt.open(str(root)).opened
    assert opened.url == str(root / named(500))
    assert [n.split()[0] for n in opened.notes[:2]] == [named(1000), named(900)]


def test_a_run_that_is_none(saved, tmp_path):
    with pytest.raises(MissingError, match="no such run directory"):
        api.list_steps(str(tmp_path / "typo"))
    with pytest.raises(RequestError, match="is a checkpoint"):
        api.list_steps(str(saved))
    (tmp_path / "empty").mkdir()
    assert api.list_steps(str(tmp_path / "empty")).latest is None
    (tmp_path / "empty" / named(5)).write_text("a file")
    (tmp_path / "empty" / named(6)).symlink_to("nowhere")
    found = api.list_steps(str(tmp_path / "empty"))
    assert [(s.step, s.complete) for s in found.steps] == [(6, False)]
    assert found.others == (named(5),)


def test_an_empty_step_goes_and_a_file_of_that_name_stays(run):
    root = run(300)
    (root / named(100)).mkdir()
    (root / named(200)).write_text("mine")
    assert api.prune(str(root), keep_last=1).deleted == (100,)
    assert sorted(os.listdir(root)) == [named(200), named(300)]


@pytest.mark.parametrize("gone", [CLAIM, "save", "manifest.json", "all"])
def test_a_step_that_changes_while_it_is_listed_is_no_error(run, monkeypatch, gone):
    root = run(100, 200)
    path = root / named(100)
    claimed(path)
    target = {"save": path / manifest(path)["save_id"], "all": path}.get(gone, path / gone)
    names = LocalStore.names

    def vanishing(self, url):
        found = names(self, url)
        if url == str(path):
            LocalStore().delete(str(target))
        return found

    monkeypatch.setattr(LocalStore, "names", vanishing)
    found = api.list_steps(str(root))
    assert found.steps[0].complete == (gone == CLAIM)
    assert found.latest == 200


# -- what goes and what stays ------------------------------------------------------------------


def test_keep_last_and_keep_every_on_disk(run):
    root = run(100, 200, 300, 400, 500, 600)
    size = sum(map(len, everything(root / named(100)).values()))
    found = api.prune(str(root), keep_last=2, keep_every=300)
    assert (found.deleted, found.kept) == ((100, 200, 400), (300, 500, 600))
    assert (found.skipped, found.bytes, found.dry_run) == ((), 3 * size, False)
    assert sorted(os.listdir(root)) == [named(s) for s in (300, 500, 600)]
    assert api.list_steps(str(root)).latest == 600


def test_a_dry_run_says_the_same_and_touches_nothing(run):
    root = run(100, 200, 300)
    claimed(root / named(100), pid=gone_pid())
    (root / named(200) / "notes.txt").write_text("mine")
    before = everything(root)
    said = api.prune(str(root), keep_last=1, dry_run=True)
    assert everything(root) == before
    done = api.prune(str(root), keep_last=1)
    assert (said.deleted, said.bytes, said.removed) == (done.deleted, done.bytes, done.removed)
    gone = {f"{r.name}/{f}" for r in done.removed for f in r.files}
    assert everything(root).keys() == before.keys() - gone


def test_d02_retention_counts_whole_steps_and_leaves_newer_ones_alone(run):
    """keep_last=1; 500 is durable, 1000 is being written, 1500 is in flight."""
    root = run(500, 1000, 1500)
    manifests = {s: (root / named(s) / "manifest.json").read_bytes() for s in (1000, 1500)}
    for step in (1000, 1500):
        half_written(root / named(step), os.getpid())
    before = everything(root)
    assert api.prune(str(root), keep_last=1).deleted == ()
    assert everything(root) == before
    (root / named(1000) / "manifest.json").write_bytes(manifests[1000])
    for small in ("config.json", "tokenizer.json"):
        (root / named(1000) / small).write_bytes(before[f"{named(500)}/{small}"])
    (root / named(1000) / CLAIM).unlink()
    found = api.prune(str(root), keep_last=1)
    assert (found.deleted, found.kept) == ((500,), (1000,))
    assert [s.name for s in found.skipped] == [named(1500)]
    assert sorted(os.listdir(root)) == [named(1000), named(1500)]
    assert d9d_ckpt.open(str(root)).opened.url == str(root / named(1000))


def test_d27_what_has_no_mark_of_ours_is_never_deleted(run, tmp_path):
    """A copy by an outside tool that has not got to the manifest yet, and unknown things in the root."""
    root = run(100, 200, 300)
    (root / named(100) / "manifest.json").unlink()
    (root / "step-best").mkdir()
    (root / "step-best" / "x").write_text("mine")
    (root / "tensorboard").mkdir()
    (root / "metrics.jsonl").write_text("{}")
    before = everything(root)
    found = api.prune(str(root), keep_last=2)
    assert found.deleted == ()
    assert {s.name for s in found.skipped} == {
        named(100), "step-best", "tensorboard", "metrics.jsonl",
    }  # fmt: skip
    assert everything(root) == before
    assert (root / "tensorboard").is_dir()
    # A whole step is whole by its manifest alone, wherever it was copied.
    shutil.copytree(root, tmp_path / "copy")
    assert api.list_steps(str(tmp_path / "copy")).latest == 300


def test_d27_a_run_copied_to_an_object_store_and_back(run, tmp_path):
    root = run(100, 200, 300)
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/d27", recursive=True)
    memory.rm_file(f"/d27/{named(200)}/manifest.json")
    memory.pipe_file(f"/d27/{named(100)}/notes.txt", b"mine")
    found = api.list_steps("memory://d27")
    assert [s.complete for s in found.steps] == [True, False, True]
    assert found.latest == 300
    before = set(memory.find("/d27"))
    assert api.prune("memory://d27", keep_last=1, dry_run=True).deleted == (100,)
    assert set(memory.find("/d27")) == before
    assert api.prune("memory://d27", keep_last=1).deleted == (100,)
    left = {n for n in before if f"/{named(100)}/" not in n} | {f"/d27/{named(100)}/notes.txt"}
    assert set(memory.find("/d27")) == left
    memory.get("/d27", str(tmp_path / "back"), recursive=True)
    assert d9d_ckpt.open(str(tmp_path / "back")).opened.url == str(tmp_path / "back" / named(300))
    memory.rm("/d27", recursive=True)


def test_an_abandoned_older_step_goes_and_a_newer_one_stays(run):
    root = run(100, 200, 300)
    pid = gone_pid()
    for step in (100, 300):
        half_written(root / named(step), pid)
    found = api.prune(str(root), keep_last=5)
    assert (found.deleted, found.kept) == ((100,), (200,))
    assert [(s.name, "newer" in s.reason) for s in found.skipped] == [(named(300), True)]
    assert sorted(os.listdir(root)) == [named(200), named(300)]


def test_without_a_whole_step_nothing_goes(run):
    root = run(100, 200)
    for step in (100, 200):
        half_written(root / named(step), gone_pid())
    before = everything(root)
    assert api.prune(str(root), keep_last=1).deleted == ()
    assert everything(root) == before


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("mark", ["here", "elsewhere", "torn", "forbidden"])
def test_a_claim_that_may_live_is_never_touched(run, whole, mark):
    root = run(100, 200)
    if not whole:
        half_written(root / named(100), 1)
    claimed(
        root / named(100),
        host="elsewhere" if mark == "elsewhere" else HOST,
        pid={"here": os.getppid(), "elsewhere": gone_pid(), "torn": 1, "forbidden": 1}[mark],
    )
    if mark == "torn":
        (root / named(100) / CLAIM).write_text('{"host"')
    before = everything(root)
    found = api.prune(str(root), keep_last=1)
    assert found.deleted == ()
    assert found.skipped[0].name == named(100)
    assert "claimed by" in found.skipped[0].reason
    assert everything(root) == before


def test_a_step_claimed_after_it_was_listed_stays(run):
    root = run(100, 200)
    store = LocalStore()
    listing = read_run(store, str(root))
    claimed(root / named(100), host="elsewhere")
    before = everything(root)
    found = prune(store, listing, Policy(1), dry_run=False)
    assert found.deleted == ()
    assert "just now" in found.skipped[0].reason
    assert everything(root) == before


def test_a_file_that_came_after_the_listing_stays(run):
    root = run(100, 200)
    store = LocalStore()
    listing = read_run(store, str(root))
    mine = root / named(100) / manifest(root / named(100))["save_id"] / "mine.txt"
    mine.write_text("mine")
    assert prune(store, listing, Policy(1), dry_run=False).deleted == (100,)
    assert list(everything(root / named(100)).values()) == [b"mine"]


def test_unknown_files_in_a_step_stay_and_are_named(run):
    root = run(100, 200)
    save = manifest(root / named(100))["save_id"]
    mine = {"notes.txt": "mine", f"{save}/rank-best.safetensors": "mine", "plots/a.png": "mine"}
    for name, text in mine.items():
        (root / named(100) / name).parent.mkdir(exist_ok=True)
        (root / named(100) / name).write_text(text)
    found = api.prune(str(root), keep_last=1)
    assert found.deleted == (100,)
    assert set(found.removed[0].left) == {"notes.txt", f"{save}/rank-best.safetensors", "plots"}
    assert everything(root / named(100)) == {k: v.encode() for k, v in mine.items()}
    again = api.prune(str(root), keep_last=1)
    assert again.deleted == ()
    assert again.skipped[0].name == named(100)


def test_the_files_of_an_older_save_in_the_step_go_as_well(run):
    root = run(100, 200)
    other = root / named(100) / "20200101T000000-0123abcd"
    other.mkdir()
    (other / "rank-00000.safetensors").write_bytes(b"x" * 10)
    (root / named(100) / ".d9d-config.json.tmp").write_bytes(b"x")
    assert api.prune(str(root), keep_last=1).deleted == (100,)
    assert os.listdir(root) == [named(200)]


def test_links_are_not_followed(run, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "elsewhere")
    shutil.copytree(saved, tmp_path / "data")
    root = run(200, 300, 400, 500)
    (root / named(100)).symlink_to(tmp_path / "elsewhere")
    (root / named(900)).symlink_to(named(200))
    save = manifest(saved)["save_id"]
    shutil.rmtree(root / named(300) / save)
    (root / named(300) / save).symlink_to(tmp_path / "data" / save)
    before = everything(tmp_path / "elsewhere"), everything(tmp_path / "data")
    assert api.list_steps(str(root)).latest == 900
    found = api.prune(str(root), keep_last=1)
    assert (everything(tmp_path / "elsewhere"), everything(tmp_path / "data")) == before
    assert (found.deleted, found.kept) == ((400,), (500,))
    reasons = {s.name: s.reason for s in found.skipped}
    assert set(reasons) == {named(s) for s in (100, 200, 300, 900)}
    assert named(900) in reasons[named(200)]
    assert api.list_steps(str(root)).latest == 900


@pytest.mark.parametrize("change", ["version", "format"])
def test_a_manifest_of_others_is_never_deleted(run, change):
    """Not even beside the claim of a dead writer: a newer release may call it whole."""
    root = run(100, 200)
    file = root / named(100) / "manifest.json"
    value = json.loads(file.read_text()) | {"version": 2} if change == "version" else {"mine": 1}
    file.write_text(json.dumps(value))
    claimed(root / named(100), pid=gone_pid())
    before = everything(root)
    found = api.prune(str(root), keep_last=1)
    assert (found.deleted, found.skipped[0].name) == ((), named(100))
    assert everything(root) == before


def test_an_unreadable_store_is_an_error_and_not_an_incomplete_step(run, monkeypatch):
    root = run(100, 200)
    files = LocalStore.files
    save = manifest(root / named(200))["save_id"]

    def denied(self, url):
        if url.endswith(f"{named(200)}/{save}"):
            raise StorageError("denied")
        return files(self, url)

    monkeypatch.setattr(LocalStore, "files", denied)
    with pytest.raises(StorageError, match="denied"):
        api.prune(str(root), keep_last=1)
    assert sorted(os.listdir(root)) == [named(100), named(200)]


# -- crashes -----------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone at this call."""


class Dying:
    """A store whose n-th call, or what comes after it, never happens."""

    def __init__(self, call, *, before):
        self._inner, self._left, self._before = LocalStore(), call, before

    def __getattr__(self, name):
        method = getattr(self._inner, name)

        def called(*args):
            self._left -= 1
            if self._left == 0 and self._before:
                raise Killed
            result = method(*args)
            if self._left == 0:
                raise Killed
            return result

        return called


@pytest.mark.parametrize("before", [True, False])
def test_d02_a_prune_killed_at_any_call_leaves_no_harm_and_a_rerun_finishes(
    run, tmp_path, monkeypatch, before
):
    wanted = training(model("llama"))
    writer, pruner = gone_pid(), gone_pid()
    for call in range(1, 200):
        root = run(100, 200, 300, 400, name=f"run{call}")
        half_written(root / named(100), writer)
        (root / named(200) / "notes.txt").write_text("mine")
        keep = everything(root / named(400))
        files = set(everything(root / named(300)))
        store, ended = Dying(call, before=before), False
        with monkeypatch.context() as patched, contextlib.suppress(Killed):
            patched.setattr(os, "getpid", lambda: pruner)
            prune(store, read_run(store, str(root)), Policy(1), dry_run=False)
            ended = True
        assert everything(root / named(400)) == keep
        for step in (100, 200, 300):
            _looks_right(root / named(step), files, wanted)
        assert d9d_ckpt.open(str(root)).opened.url == str(root / named(400))
        api.prune(str(root), keep_last=1)
        assert everything(root).keys() == {f"{named(200)}/notes.txt"} | {
            f"{named(400)}/{name}" for name in keep
        }, call
        assert sorted(os.listdir(root)) == [named(200), named(400)], call
        if ended:
            assert call > 20
            return
        shutil.rmtree(root)
    pytest.fail("never ended")


def _looks_right(path: Path, files, wanted):
    """A step that says it is whole has every file, with its bits."""
    if (path / "manifest.json").exists():
        assert set(everything(path)) - {CLAIM, "notes.txt"} == files
        assert equal(read_sharded(path), wanted)


def test_a_prune_that_failed_is_finished_by_the_same_process(run, monkeypatch):
    """A trainer prunes after each save: one refusal of the store must not block a step for good."""
    root = run(100, 200)
    delete = LocalStore.delete

    def refused(self, url):
        if url.endswith("config.json"):
            raise StorageError("refused")
        delete(self, url)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "delete", refused)
        with pytest.raises(StorageError):
            api.prune(str(root), keep_last=1)
    assert "no manifest" in api.list_steps(str(root)).steps[0].reason
    assert api.prune(str(root), keep_last=1).deleted == (100,)
    assert os.listdir(root) == [named(200)]
