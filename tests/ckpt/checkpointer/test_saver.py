"""`Checkpointer` in one process: what comes back, what is refused, and what is left of failures."""

import atexit
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch
from helpers.checkpoints import everything, model, training, write_model
from helpers.savers import writer_pid
from helpers.writers import children, descriptors, until
from torch import nn

import d9d_ckpt
from d9d_ckpt import Checkpointer, DataCursor
from d9d_ckpt.errors import (
    CorruptError,
    DestinationError,
    MappingError,
    MissingError,
    RequestError,
    SourceError,
    StorageError,
    UsageError,
)


class Scaler:
    """As torch's GradScaler has it: numbers that a state_dict hands out."""

    def __init__(self, scale=65536.0):
        self.scale, self.growth = scale, 0

    def state_dict(self):
        return {"scale": self.scale, "_growth_tracker": self.growth}

    def load_state_dict(self, state):
        self.scale, self.growth = state["scale"], state["_growth_tracker"]


class Trainer:
    """A module, AdamW, a scheduler, a scaler and where the data stands."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 2)
        self.scaler, self.cursor = Scaler(), DataCursor(64, 3)
        self.done = {"step": 0, "loss": [0.5, float("nan")]}

    @property
    def state(self):
        return {
            "model": self.model,
            "optim": self.optim,
            "sched": self.sched,
            "scaler": self.scaler,
            "data": self.cursor,
            "done": self.done,
        }

    def train(self):
        x = torch.linspace(-1, 1, 24).reshape(4, 6) + self.done["step"]
        self.optim.zero_grad()
        self.model(x).square().sum().backward()
        self.optim.step()
        self.sched.step()
        self.scaler.growth += 1
        self.cursor.advance(4)
        self.done["step"] += 1

    def tensors(self):
        state = self.optim.state_dict()["state"]
        slots = [state[n][slot] for n in sorted(state) for slot in sorted(state[n])]
        return [t.detach().clone() for t in (*self.model.state_dict().values(), *slots)]

    def same(self, other):
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return (
            all(torch.equal(a, b) for a, b in pairs)
            and self.optim.param_groups[0]["lr"] == other.optim.param_groups[0]["lr"]
            and self.sched.state_dict() == other.sched.state_dict()
            and self.scaler.state_dict() == other.scaler.state_dict()
            and self.cursor == other.cursor
            and self.done["step"] == other.done["step"]
        )


def plain(**tensors):
    """A state of a model's tensors."""
    return {"model": dict(tensors)}


@pytest.fixture
def tidy():
    """Nothing stays behind: no process, thread or descriptor."""
    threads = set(threading.enumerate())
    before = children(), descriptors()
    yield
    assert (children(), descriptors()) == before
    assert set(threading.enumerate()) <= threads


@pytest.fixture
def saver(tmp_path, tidy):
    with Checkpointer(tmp_path / "run") as saver:
        yield saver


# -- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "zstd:3"])
def test_a_trainer_goes_on_as_if_never_stopped(tmp_path, tidy, codec):
    one, other = Trainer(0), Trainer(1)
    for _ in range(3):
        one.train()
    with Checkpointer(tmp_path / "run", codec=codec) as saver:
        saver.save(3, one.state).wait()
        held = [id(p) for p in other.model.parameters()]
        report = saver.load(other.state)
    assert other.same(one)
    assert [id(p) for p in other.model.parameters()] == held
    assert (report.step, report.missing, report.unexpected, report.fresh) == (3, (), (), ())
    assert {"0.weight", "optim.exp_avg.2.bias", "optim.step.0.bias"} <= set(report.loaded)
    for trainer in (one, other):
        trainer.train()
    assert other.same(one)
    assert d9d_ckpt.verify(str(tmp_path / "run")).ok


def test_d23_a_save_after_a_load_has_the_values_of_the_steps_in_between(tmp_path, tidy):
    trainer, again = Trainer(0), Trainer(2)
    trainer.train()
    objects = trainer.state
    with Checkpointer(tmp_path / "run") as saver:
        saver.save(1, trainer.state)
        saver.load(trainer.state)
        assert all(objects[key] is value for key, value in trainer.state.items())
        trainer.train()
        saver.save(2, trainer.state)
        saver.load(again.state)
    assert again.same(trainer)
    assert again.done["step"] == 2


def test_tied_weights_are_stored_once_and_stay_tied(saver, tmp_path):
    def made(seed):
        torch.manual_seed(seed)
        net = nn.ModuleDict({"emb": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
        net["head"].weight = net["emb"].weight
        return net

    one, other = made(0), made(1)
    saver.save(1, {"model": one}, blocking=True)
    saver.load({"model": other})
    assert other["head"].weight is other["emb"].weight
    assert torch.equal(other["head"].weight, one["emb"].weight)
    assert list(d9d_ckpt.open(str(tmp_path / "run")).tensors) == ["emb.weight"]


def test_values_come_back_in_place_and_in_the_report(saver):
    saver.save(1, {"step": 7, "args": {"lr": 0.5, "betas": (0.9, 0.99)}}, blocking=True)
    state = {"step": 0, "args": {"lr": 0.0, "betas": None}}
    report = saver.load(state)
    assert state == {"step": 7, "args": {"lr": 0.5, "betas": (0.9, 0.99)}}
    assert report.extra == state


def test_d10_any_number_of_readers_goes_on_from_one_position(saver):
    cursor = DataCursor(64, 1)
    for _ in range(5):
        cursor.advance(8)
    saver.save(1, {"data": cursor}, blocking=True)
    taken = []
    for world in (2, 4, 8):
        here = DataCursor(64, 1)
        saver.load({"data": here})
        taken.append(sorted(n for rank in range(world) for n in here.share(rank, world, 8)))
    assert taken == [list(range(40, 48))] * 3
    for other in (DataCursor(63, 1), DataCursor(64, 2)):
        with pytest.raises(RequestError, match=r"data cursor: (length|seed) was \d+, is \d+ now"):
            saver.load({"data": other})
        assert other.consumed == 0
    with pytest.raises(RequestError, match="do not divide"):
        cursor.share(0, 3, 8)


def test_unpadded_rows_are_cut_and_zero_after_a_load(tmp_path, tidy):
    rows = {"emb.*": 10, "optim.exp_avg*.emb.weight": 10}

    def made(padded):
        net = nn.ModuleDict({"emb": nn.Embedding(padded, 4), "out": nn.Linear(4, 16)})
        nn.init.ones_(net["emb"].weight)
        optim = torch.optim.AdamW(net.parameters())
        net["emb"].weight.grad = torch.ones(padded, 4)
        optim.step()
        return net, optim

    (net, optim), (wide, moments) = made(12), made(16)
    with Checkpointer(tmp_path / "run", unpadded=rows) as saver:
        saver.save(1, {"model": net, "optim": optim}, blocking=True)
        saver.load({"model": wide, "optim": moments})
    stored = d9d_ckpt.open(str(tmp_path / "run"))
    assert stored["emb.weight"].shape == stored["optim.exp_avg.emb.weight"].shape == (10, 4)
    assert stored["out.weight"].shape == (16, 4)
    for mine, theirs in ((wide["emb"].weight, net["emb"].weight), *_slots(moments, optim)):
        assert torch.equal(mine[:10], theirs[:10])
        assert not mine[10:].any()


def _slots(a, b):
    """Moments of the first parameter of two optimizers."""
    one, other = (next(iter(o.state.values())) for o in (a, b))
    return [(one[key], other[key]) for key in ("exp_avg", "exp_avg_sq")]


def test_unpadded_that_fits_nothing_is_refused(tmp_path, tidy):
    state = plain(a=torch.ones(4, 2))
    for rows, message in (
        ({"b*": 2}, "matches no tensor"),
        ({"a": 5}, "'a' has 4 rows, .* says 5"),
    ):
        with (
            pytest.raises(RequestError, match=message),
            Checkpointer(tmp_path / "run", unpadded=rows) as saver,
        ):
            saver.save(1, state, blocking=True)
    assert not everything(tmp_path)


def test_a_hugging_face_checkpoint_fills_training_tensors(saver, tmp_path):
    made = model("qwen3_moe")
    source = write_model(tmp_path / "hf", made)
    expected = training(made)
    state = plain(**{name: torch.zeros_like(t) for name, t in expected.items()})
    report = saver.load(state, url=source)
    assert set(report.loaded) == set(expected)
    assert [n for n, t in expected.items() if not torch.equal(state["model"][n], t)] == []
    assert report.step is None
    first = next(iter(expected))
    with pytest.raises(MappingError, match="1 of its tensors have no place"):
        saver.load(plain(**{n: t for n, t in state["model"].items() if n != first}), url=source)


# -- strictness ----------------------------------------------------------------------------------


def test_d05_names_that_do_not_match_are_listed_in_full_or_named_by_rule(saver):
    saved = {"l.0.a": torch.ones(2), "l.0.b": torch.ones(3), "l.0.extra": torch.ones(1)}
    saver.save(1, {"model": saved}, blocking=True)
    live = {"l.0.a": torch.zeros(2), "l.0.b": torch.zeros(3), "l.0.c": torch.zeros(1)}
    state = {"model": live}
    with pytest.raises(MappingError) as caught:
        saver.load(state)
    for part in (
        "1 names of the state are not in it: l.0.c;",
        "1 of its tensors have no place: l.0.extra;",
        "is 'l.0.c' its 'l.0.extra'?",
    ):
        assert part in str(caught.value)
    with pytest.raises(MappingError, match=r"1 of its tensors have no place: l\.0\.extra"):
        saver.load(state, allow_missing=["l.0.c"])
    assert not any(t.any() for t in live.values())
    report = saver.load(state, allow_missing=["l.0.c"], ignore=["*.extra"])
    assert report.missing == ("l.0.c",)
    assert report.unexpected == ("l.0.extra",)
    assert report.loaded == ("l.0.a", "l.0.b")
    assert live["l.0.a"].all()
    assert not live["l.0.c"].any()
    rules = {"allow_missing": ["l.0.c"], "ignore": ["*.extra"]}
    for rule in rules:
        with pytest.raises(RequestError, match=rf"{rule}='q\*' matches no name"):
            saver.load(state, **{**rules, rule: ["q*"]})


def test_d05_extra_state_is_missing_only_by_a_rule(saver):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"amax": 1.5}

        def set_extra_state(self, state):
            self.amax = state["amax"]

    saver.save(1, {"model": nn.Sequential(nn.Linear(2, 2))}, blocking=True)
    state = {"model": nn.Sequential(Extra(2, 2))}
    with pytest.raises(MappingError, match=r"1 names .*: 0\._extra_state"):
        saver.load(state)
    assert saver.load(state, allow_missing=["*._extra_state"]).missing == ("0._extra_state",)


def test_d05_a_hundred_missing_names_are_all_listed(saver):
    saver.save(1, plain(a=torch.ones(1)), blocking=True)
    names = [f"w{n}" for n in range(100)]
    state = plain(a=torch.ones(1), **{name: torch.ones(1) for name in names})
    with pytest.raises(
        MappingError, match=f"100 names of the state are not in it: {', '.join(names)} "
    ):
        saver.load(state)


def test_d06_dtypes_change_only_when_asked_and_only_floats(saver):
    w = torch.tensor([0.1234568, 1.1234568, -3.0])
    saver.save(1, plain(w=w, n=torch.arange(3)), blocking=True)
    narrow, n = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(
        MappingError, match=r"'w': F32 in the checkpoint, BF16 in the state.*cast=True"
    ):
        saver.load(plain(w=narrow, n=n))
    assert not narrow.any()
    assert saver.load(plain(w=narrow, n=n), cast=True).cast == ("w",)
    assert torch.equal(narrow, w.bfloat16())
    for wrong in (plain(w=torch.zeros(3, dtype=torch.int32), n=n), plain(w=w, n=torch.zeros(3))):
        with pytest.raises(MappingError, match=r"'[wn]': .* only floats are cast"):
            saver.load(wrong, cast=True)
    with pytest.raises(MappingError, match=r"'w': \[3\] in the checkpoint, \[4\] in the state"):
        saver.load(plain(w=torch.zeros(4), n=n))


def test_d24_what_is_not_there_is_never_a_fresh_start(saver, tmp_path):
    state = plain(w=torch.zeros(2))
    with pytest.raises(SourceError):
        saver.load(state)
    (tmp_path / "run").mkdir()
    with pytest.raises(SourceError):
        saver.load(state)
    for step in (100, 200, 250):
        saver.save(step, plain(w=torch.full((2,), float(step))))
    saver.wait()
    with pytest.raises(MissingError, match="400"):
        saver.load(state, 400)
    assert not state["model"]["w"].any()
    assert saver.load(state, 100).step == 100
    assert state["model"]["w"].tolist() == [100, 100]
    assert saver.load(state).step == 250
    with pytest.raises(UsageError, match="newest"):
        saver.load(state, "newest")


def test_d24_an_optimizer_that_was_not_saved_is_fresh_only_by_a_rule(saver):
    trainer = Trainer(0)
    saver.save(1, {"model": trainer.model}, blocking=True)
    state = {"model": trainer.model, "optim": trainer.optim}
    with pytest.raises(MappingError, match="1 names of the state are not in it: optim"):
        saver.load(state)
    assert saver.load(state, allow_missing=["optim"]).missing == ("optim",)


# -- points in time ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "zstd:19"])
def test_d09_what_is_written_to_after_save_returns_is_not_in_the_file(tmp_path, tidy, codec):
    w, step = torch.zeros(2_000_000), torch.tensor(1.0)
    state = {"model": {"w": w}, "optim": {"step": step}, "args": {"n": 1}}
    with Checkpointer(tmp_path / "run", codec=codec) as saver:
        handle = saver.save(1, state)
        w.fill_(9)
        step.add_(1)
        state["args"]["n"] = 2
        handle.wait_snapshot()
        handle.wait()
        assert handle.done
        saver.load(state)
    assert not w.any()
    assert step == 1
    assert state["args"] == {"n": 1}


def test_d09_a_stopped_writer_changes_nothing_of_that(saver):
    saver.save(1, plain(w=torch.zeros(1))).wait()
    w = torch.zeros(500_000)
    os.kill(writer_pid(), signal.SIGSTOP)
    try:
        handle = saver.save(2, plain(w=w))
        w.fill_(9)
        with pytest.raises(TimeoutError):
            handle.wait(0.2)
    finally:
        os.kill(writer_pid(), signal.SIGCONT)
    handle.wait()
    saver.load(plain(w=w))
    assert not w.any()


def test_both_slots_busy_blocks_and_says_so(saver, caplog):
    state = plain(w=torch.zeros(1000))
    saver.save(1, state).wait()
    pid = writer_pid()
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
    try:
        saver.save(2, state)
        saver.save(3, state)
        assert not caplog.records
        timer.start()
        began = time.monotonic()
        saver.save(4, state)
        assert time.monotonic() - began > 0.3
    finally:
        timer.join()
    assert "both snapshots are still being written" in caplog.text
    saver.wait()


# -- steps ---------------------------------------------------------------------------------------


def steps(run):
    return sorted(int(p.name.removeprefix("step-")) for p in run.iterdir())


def test_d02_old_steps_go_after_a_newer_one_is_committed(tmp_path, tidy):
    run = tmp_path / "run"
    with Checkpointer(run, keep_last=2, keep_every=4) as saver:
        for step in range(1, 8):
            saver.save(step, plain(w=torch.full((2,), float(step))))
        saver.wait()
        assert steps(run) == [4, 6, 7]
        (run / "step-00000005").mkdir()
        (run / "step-00000005" / "mine").write_text("mine")
        saver.save(8, plain(w=torch.zeros(2)), blocking=True)
        assert steps(run) == [4, 5, 7, 8]


def test_d02_a_save_that_fails_deletes_nothing(tmp_path, tidy):
    run = tmp_path / "run"
    with Checkpointer(run, keep_last=1, check_finite=True) as saver:
        saver.save(1, plain(w=torch.zeros(2)), blocking=True)
        saver.save(2, plain(w=torch.tensor([1.0, float("nan")])))
        with pytest.raises(
            CorruptError, match=r"'w': 1 of 2 elements .* NaN or infinite at step 2"
        ):
            saver.wait()
        assert steps(run) == [1]


def test_a_whole_step_is_replaced_only_when_asked(saver, tmp_path):
    saver.save(1, plain(w=torch.zeros(2)), blocking=True)
    before = everything(tmp_path)
    with pytest.raises(DestinationError, match=r"step-00000001: .*holds a checkpoint already"):
        saver.save(1, plain(w=torch.ones(2)), blocking=True)
    assert everything(tmp_path) == before
    saver.save(1, plain(w=torch.ones(2)), blocking=True, overwrite=True)
    w = torch.zeros(2)
    saver.load(plain(w=w))
    assert w.all()
    assert steps(tmp_path / "run") == [1]


# -- failures ------------------------------------------------------------------------------------


def test_the_first_failure_is_raised_once_with_path_and_cause(saver):
    saver.save(1, plain(w=torch.zeros(2)), blocking=True)
    saver.save(1, plain(w=torch.zeros(2)))
    saver.save(2, plain(w=torch.zeros(2)))
    with pytest.raises(DestinationError, match="step-00000001"):
        saver.wait()
    saver.wait()
    saver.poll()
    handle = saver.save(1, plain(w=torch.zeros(2)))
    assert until(lambda: handle.done)
    with pytest.raises(DestinationError):
        saver.save(3, plain(w=torch.zeros(2)))
    handle = saver.save(1, plain(w=torch.zeros(2)))
    with pytest.raises(DestinationError):
        handle.wait()
    saver.save(4, plain(w=torch.zeros(2)), blocking=True)


@pytest.mark.parametrize("blocking", [False, True])
def test_warn_logs_and_trains_on(tmp_path, tidy, caplog, blocking):
    with Checkpointer(tmp_path / "run", on_error="warn", check_finite=True) as saver:
        saver.save(1, plain(w=torch.tensor([float("inf")])), blocking=blocking)
        saver.wait()
        saver.save(2, plain(w=torch.zeros(1)), blocking=True)
    assert "'w': 1 of 1 elements" in caplog.text
    assert steps(tmp_path / "run") == [2]


def test_modes_that_there_are_not_are_refused(tmp_path):
    for wrong in ({"on_error": "ignore"}, {"codec": "lz4"}, {"keep_last": 0}):
        with pytest.raises(UsageError):
            Checkpointer(tmp_path, **wrong)


def test_d03_a_full_disk_is_told_with_path_and_errno_and_the_next_save_succeeds(saver, tmp_path):
    state = plain(w=torch.ones(100_000))
    saver.save(1, state).wait()
    pid = writer_pid()
    limit = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(StorageError, match=r"step-00000002/.*safetensors: .*errno 27"):
        saver.save(2, state).wait()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    assert steps(tmp_path / "run") == [1]
    saver.save(2, state, blocking=True)
    assert saver.load(state).step == 2


def test_a_writer_that_is_killed_costs_that_save_alone(saver, tmp_path):
    state = plain(w=torch.ones(100_000))
    saver.save(1, state).wait()
    pid = writer_pid()
    os.kill(pid, signal.SIGSTOP)
    handle = saver.save(2, state)
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        StorageError, match=rf"step-00000002: .*writer process {pid} died \(signal 9\)"
    ):
        handle.wait()
    assert saver.load(state).step == 1
    saver.save(2, state, blocking=True)
    assert saver.load(state).step == 2
    assert steps(tmp_path / "run") == [1, 2]


def test_a_state_that_cannot_be_saved_is_raised_at_once(saver):
    with pytest.raises(RequestError, match="meta"):
        saver.save(1, plain(w=torch.zeros(1, device="meta")))
    saver.save(1, plain(w=torch.zeros(1)), blocking=True)


# -- lifecycle -----------------------------------------------------------------------------------


def test_leaving_waits_for_what_is_on_its_way(tmp_path, tidy):
    with Checkpointer(tmp_path / "run") as saver:
        saver.save(1, plain(w=torch.ones(1_000_000)))
    assert d9d_ckpt.verify(str(tmp_path / "run")).ok
    saver.close()
    with pytest.raises(UsageError, match="after close"):
        saver.save(2, plain(w=torch.ones(1)))


def test_an_exception_inside_is_not_masked_by_a_failed_save(tmp_path, tidy, caplog):
    bad = plain(w=torch.tensor([float("nan")]))

    def train(error=None):
        with Checkpointer(tmp_path / "run", check_finite=True) as saver:
            saver.save(1, bad)
            if error is not None:
                raise error

    with pytest.raises(KeyError, match="mine"):
        train(KeyError("mine"))
    assert "a save has failed as well" in caplog.text
    with pytest.raises(CorruptError, match="'w'"):
        train()


def test_many_checkpointers_leave_nothing(tmp_path, tidy):
    for step in range(3):
        with Checkpointer(tmp_path / "run") as saver:
            saver.save(step, plain(w=torch.ones(10)))
    assert steps(tmp_path / "run") == [0, 1, 2]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_the_tensors_of_a_save_that_is_over_are_let_go(tmp_path, tidy, blocking, value):
    """Though no other save follows, and whether or not it has failed."""
    with Checkpointer(tmp_path / "run", check_finite=True) as saver:
        tensor = torch.full((1000,), value)
        held = weakref.ref(tensor)
        text = ""
        try:
            saver.save(1, plain(w=tensor), blocking=blocking).wait()
        except CorruptError as error:
            text = str(error)
        assert ("NaN" in text) == (value != 1.0)
        del tensor
        assert until(lambda: gc.collect() >= 0 and held() is None)


def test_nothing_is_left_to_be_done_at_the_end_of_the_interpreter(tmp_path, tidy, monkeypatch):
    left, register = [], atexit.register
    monkeypatch.setattr(atexit, "register", lambda f: left.append(weakref.ref(f)) or register(f))
    for step in range(2):
        with Checkpointer(tmp_path / "run") as saver:
            saver.save(step, plain(w=torch.ones(10)))
    gc.collect()
    assert [drain() for drain in left] == [None, None]


def test_what_is_on_its_way_arrives_at_the_end_of_the_interpreter(tmp_path):
    """A script without a main guard and without close."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import sys, torch
            from d9d_ckpt import Checkpointer
            saver = Checkpointer(sys.argv[1])
            saver.save(1, {"model": {"w": torch.ones(1_000_000)}})
            print("over")
        """)
    )
    out = subprocess.run(  # noqa: S603 - a script of our own
        [sys.executable, script, tmp_path / "run"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (out.returncode, out.stdout, out.stderr) == (0, "over\n", "")
    assert d9d_ckpt.verify(str(tmp_path / "run")).ok


def test_a_signal_makes_a_save_due(saver):
    before = signal.getsignal(signal.SIGUSR1)
    try:
        saver.save_on_signal(signal.SIGUSR1)
        assert not saver.due(5)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert until(lambda: saver.due(6))
    finally:
        signal.signal(signal.SIGUSR1, before)
