"""`Checkpointer` over several ranks: one that fails, one that differs, and what the others hear of it."""

import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import KILLED, launch
from helpers.savers import writer_pid
from helpers.writers import until
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import d9d_ckpt
from d9d_ckpt import RNG, Checkpointer
from d9d_ckpt.checkpointer import load
from d9d_ckpt.errors import CkptError, MissingError
from d9d_ckpt.storage.local import LocalStore

pytestmark = pytest.mark.ranks

SILENCE = 3.0

READ_BACK = 2.0
"""Seconds between a failure's detection and its being raised on the last rank."""


def plain(**tensors):
    return {"model": dict(tensors)}


def sharded(value, rows=400_000):
    """Rows over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.full((rows,), float(value))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def outcome(step, *, after=None):
    """What a step raises, as text, and how long after ``after`` it did; no text for nothing."""
    began = after or time.monotonic()
    try:
        step()
    except CkptError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def meet(saver_root, name, world):
    """Wait for all ranks by way of files: the store of the process group is under test."""
    (saver_root / f"{name}.{os.getpid()}").touch()
    assert until(lambda: len(list(saver_root.glob(f"{name}.*"))) == world, 10)


# -- a rank that fails ---------------------------------------------------------------------------


def _killed_trainer(root, rank):
    with Checkpointer(root / "run", silence=SILENCE) as saver:
        saver.save(1, plain(w=sharded(1))).wait()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome(saver.save(2, plain(w=sharded(2))).wait), d9d_ckpt.open(
            str(root / "run")
        ).metadata["step"]


def test_d03_a_killed_trainer_is_named_on_every_other_rank(tmp_path):
    found = launch(3, partial(_killed_trainer, tmp_path), allow=frozenset({1}))
    assert found[1] is KILLED
    for rank in (0, 2):
        (text, seconds), latest = found[rank]
        assert "step-00000002: rank 1 has shown no sign of life for 3 s" in text
        assert seconds < SILENCE + READ_BACK
        assert latest == 1


def _stopped_trainer(root, victim, rank):
    with Checkpointer(root / "run", silence=SILENCE) as saver:
        saver.save(1, plain(w=sharded(1))).wait()
        meet(root, "saved", 3)
        if rank == victim:
            _stopped_for(SILENCE + 1.5)
        heard = outcome(saver.save(2, plain(w=sharded(2))).wait)
        meet(root, "heard", 3)
        return (
            heard,
            outcome(saver.save(3, plain(w=sharded(3))).wait)[0],
            saver.load(plain(w=sharded(0))).step,
        )


def _stopped_for(seconds):
    """Stop this process, whose child lets it go on."""
    me = os.getpid()
    child = os.fork()
    if not child:
        time.sleep(seconds)
        os.kill(me, signal.SIGCONT)
        os._exit(0)
    os.kill(me, signal.SIGSTOP)
    os.waitpid(child, 0)


@pytest.mark.parametrize("victim", [0, 1])
def test_d03_a_stopped_trainer_is_named_and_takes_part_again(tmp_path, victim):
    for rank, ((text, seconds), again, latest) in enumerate(
        launch(3, partial(_stopped_trainer, tmp_path, victim))
    ):
        assert f"rank {victim} has shown no sign of life for 3 s" in text, rank
        assert rank == victim or seconds < SILENCE + READ_BACK
        assert again == ""
        assert latest == 3


def _stopped_for_a_minute(root, rank):
    with Checkpointer(root / "run") as saver:
        saver.save(1, plain(w=sharded(1))).wait()
        meet(root, "saved", 2)
        if rank == 1:
            _stopped_for(60)
        return outcome(saver.save(2, plain(w=sharded(2))).wait)


def test_a_trainer_that_stands_still_for_a_minute_costs_no_save(tmp_path):
    """By the rule that holds unless another is asked for: five minutes of silence."""
    first, second = launch(2, partial(_stopped_for_a_minute, tmp_path), timeout=120)
    assert first[0] == second[0] == ""
    assert first[1] > 55


def _lost_behind_a_late_one(root, rank):
    """Rank 1 is late, but alive; rank 2 is dead."""
    with Checkpointer(root / "run", silence=SILENCE) as saver:
        saver.save(1, plain(w=sharded(1))).wait()
        meet(root, "saved", 3)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            time.sleep(SILENCE + READ_BACK + 2)
        return outcome(saver.save(2, plain(w=sharded(2))).wait)


def test_a_dead_rank_is_noticed_while_another_one_is_awaited(tmp_path):
    found = launch(3, partial(_lost_behind_a_late_one, tmp_path), allow=frozenset({2}))
    for text, seconds in found[:2]:
        assert "step-00000002: rank 2 has shown no sign of life for 3 s" in text
        assert seconds < SILENCE + READ_BACK


def _broken_writer(root, harm, rank):
    with Checkpointer(root / "run", silence=SILENCE) as saver:
        saver.save(1, plain(w=sharded(1))).wait()
        limit = harm(rank)
        heard = outcome(saver.save(2, plain(w=sharded(2))).wait)
        steps = sorted(p.name for p in (root / "run").iterdir()) if rank == 0 else None
        meet(root, "heard", 3)
        if limit:
            resource.prlimit(writer_pid(), resource.RLIMIT_FSIZE, limit)
        return heard, steps, outcome(saver.save(3, plain(w=sharded(3))).wait)[0]


def _stopped_writer(root, victim, rank):
    with Checkpointer(root / "run", silence=SILENCE) as saver:
        for step in (0, 1):  # Both slots are known to the writer then.
            saver.save(step, plain(w=sharded(1))).wait()
        pid = writer_pid()
        if rank == victim:
            os.kill(pid, signal.SIGSTOP)
        heard = outcome(saver.save(2, plain(w=sharded(2))).wait)
        meet(root, "heard", 3)
        return pid, heard, outcome(saver.save(2, plain(w=sharded(2))).wait)[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_writer_is_killed_and_named_on_every_rank(tmp_path, victim):
    found = launch(3, partial(_stopped_writer, tmp_path, victim))
    pid = found[victim][0]
    said = f"writer process {pid} has shown no sign of life for 3 s during prepare, and was killed"
    for _, (text, seconds), again in found:
        assert f"step-00000002: rank {victim}: {said}" in text
        assert seconds < SILENCE + 0.5 + READ_BACK
        assert again == ""
    assert d9d_ckpt.verify(str(tmp_path / "run")).ok


def _kill_while_writing(rank):
    """Rank 1's writer, which stands still so that it is at work then."""
    if rank == 1:
        pid = writer_pid()
        os.kill(pid, signal.SIGSTOP)
        if not os.fork():
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            os._exit(0)


def _fill_disk(rank):
    if rank != 1:
        return None
    return resource.prlimit(writer_pid(), resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_kill_while_writing, ["step-00000002", "rank 1", "died (signal 9)"]),
        (_fill_disk, ["rank 1", "rank-00001.safetensors", "errno 27"]),
    ],
)
def test_d03_a_broken_writer_is_told_on_every_rank_and_the_next_save_works(tmp_path, harm, words):
    for (text, seconds), steps, again in launch(3, partial(_broken_writer, tmp_path, harm)):
        assert [word for word in words if word not in text] == []
        assert seconds < 0.5 + READ_BACK
        assert steps in (None, ["step-00000001"])
        assert again == ""
    assert d9d_ckpt.verify(str(tmp_path / "run")).ok
    assert d9d_ckpt.open(str(tmp_path / "run")).metadata["step"] == 3


def _one_cannot(root, rank):
    """Rank 1 alone gives a state that cannot be saved; a failure that it alone has heard of."""
    with Checkpointer(root / "run", silence=10) as saver:
        bad = torch.zeros(1, device="meta") if rank == 1 else torch.zeros(1)
        first = outcome(lambda: saver.save(1, plain(w=bad), blocking=True))
        second = saver.save(2, plain(w=torch.full((1,), float(rank))))
        if rank == 1:
            assert until(lambda: second.done)
        third = outcome(lambda: saver.save(3, plain(w=torch.zeros(1))))
        fourth = outcome(lambda: saver.save(4, plain(w=torch.zeros(1)), blocking=True))
        fifth = outcome(lambda: saver.save(5, plain(w=torch.zeros(1)), blocking=True))
        return first, third[0], fourth[0], fifth[0]


def test_a_rank_that_takes_no_part_says_so_at_once(tmp_path):
    found = launch(2, partial(_one_cannot, tmp_path))
    assert "rank 1 takes no part in step 1: tensor 'w' is on the meta device" in found[0][0][0]
    assert found[0][0][1] < READ_BACK
    assert "meta device" in found[1][0][0]
    assert "differs from rank 0" in found[1][1]
    assert found[0][3] == found[1][3] == ""


class _Broken:
    """An object of a user's that cannot be put back."""

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise ValueError("not like this")


def _one_cannot_load(root, rank):
    with Checkpointer(root / "run", silence=10) as saver:
        w, broken = torch.zeros(4), _Broken()
        saver.save(1, plain(w=w) | {"broken": broken}, blocking=True)
        good = {"broken": {"a": 0}} if rank == 0 else {"broken": broken}
        refused = outcome(lambda: saver.load(plain(w=w) | good))
        missing = outcome(lambda: saver.load(plain(w=w), 2))
        short = torch.zeros(4 + rank)
        shape = outcome(lambda: saver.load(plain(w=short), 1))
        return refused, missing, shape


def test_a_load_that_fails_on_one_rank_fails_on_all(tmp_path):
    for outcomes in launch(2, partial(_one_cannot_load, tmp_path)):
        (refused, missing, shape) = (text for text, _ in outcomes)
        assert "rank 1: ValueError: not like this" in refused
        assert "step 2" in missing or "step-00000002" in missing
        assert "rank 1: tensor 'w': [4] in the checkpoint, [5] in the state" in shape
        assert max(seconds for _, seconds in outcomes) < READ_BACK


def _slowly(read, *args):
    """Tensors come late."""
    if args[0].endswith(".safetensors"):
        time.sleep(3)
    return read(LocalStore(), *args)


def _slow_reader(root, rank):
    """Reading takes rank 1 longer than the others wait for a sign of life."""
    w = torch.zeros(4)
    with Checkpointer(root / "run", silence=1.5) as saver:
        saver.save(1, plain(w=torch.ones(4)), blocking=True)
        if rank == 1:
            LocalStore.read_into = partial(_slowly, LocalStore.read_into)
        saver.load(plain(w=w))
    return w.tolist()


def test_a_rank_that_reads_for_long_is_not_lost(tmp_path):
    assert launch(2, partial(_slow_reader, tmp_path)) == [[1.0] * 4] * 2


def _slow_opener(root, slow, rank):
    """Finding the checkpoint takes one rank longer than the others wait for a sign of life."""
    w = torch.zeros(4)
    with Checkpointer(root / "run", silence=1.5) as saver:
        saver.save(1, plain(w=torch.ones(4)), blocking=True)
        if rank == slow:
            load.open_checkpoint = partial(_late, load.open_checkpoint)
        saver.load(plain(w=w))
    return w.tolist()


def _late(step, *args):
    time.sleep(3)
    return step(*args)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_opens_for_long_is_not_lost(tmp_path, slow):
    assert launch(2, partial(_slow_opener, tmp_path, slow)) == [[1.0] * 4] * 2


def _blind(root, rank):
    """Rank 1 does not see what rank 0 has found."""
    w = torch.zeros(4)
    with Checkpointer(root / "run", silence=10) as saver:
        saver.save(1, plain(w=w), blocking=True)
        if rank == 1:
            load.open_checkpoint = _not_there
        return outcome(lambda: saver.load(plain(w=w)))


def _not_there(store, url, step):
    raise MissingError(f"{url}: not here")


def test_a_checkpoint_that_one_rank_does_not_see_is_loaded_on_none(tmp_path):
    for text, seconds in launch(2, partial(_blind, tmp_path)):
        assert "step-00000001: not here" in text
        assert seconds < READ_BACK


# -- a rank that leaves --------------------------------------------------------------------------


def _leaving(root, how, saves, rank):
    """Rank 1 does not come to what the others do next; what they hear, and how soon after."""
    saver = Checkpointer(root / "run", silence=30)
    w = sharded(1, rows=10)
    for step in range(saves):
        saver.save(step, plain(w=w)).wait()
    meet(root, "saved", 3)
    if rank == 1:
        time.sleep(0.5)
        how(saver)
        meet(root, "heard", 3)
        return None
    heard = outcome(saver.save(7, plain(w=w)).wait)
    read = outcome(lambda: saver.load(plain(w=w)))[0]
    meet(root, "heard", 3)
    saver.close()
    return heard, read


def _by_exception(saver):
    with suppress(ZeroDivisionError), saver:
        _ = 1 / 0


def _by_close(saver):
    saver.close()


def _by_exception_without_group(saver):
    """The process group is gone before the exception comes to the checkpointer."""
    with suppress(ZeroDivisionError), saver:
        try:
            _ = 1 / 0
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("saves", [0, 2])
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        (_by_exception, "ZeroDivisionError: division by zero"),
        (_by_close, "its checkpointer was closed"),
        (_by_exception_without_group, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_rank_that_leaves_fails_the_others_at_once(tmp_path, how, cause, saves):
    found = launch(3, partial(_leaving, tmp_path, how, saves))
    for rank in (0, 2):
        (text, seconds), read = found[rank]
        assert f"step-00000007: rank 1 left: {cause}" in text
        assert seconds < 0.5 + READ_BACK
        assert f"rank 1 left: {cause}" in read


def _left_while_loading(root, rank):
    with Checkpointer(root / "run", silence=30) as saver:
        w = torch.zeros(4)
        saver.save(1, plain(w=w), blocking=True)
        if rank == 1:
            load.open_checkpoint = _interrupted
        began = time.monotonic()
        try:
            saver.load(plain(w=w))
        except BaseException as error:  # noqa: BLE001 - that of rank 1 is no CkptError
            saver.__exit__(type(error), error, None)
            return repr(error), time.monotonic() - began
    return "", 0.0


def _interrupted(store, url, step):
    raise KeyboardInterrupt


def test_a_rank_that_is_interrupted_in_a_load_fails_the_others_at_once(tmp_path):
    (first, seconds), (second, _) = launch(2, partial(_left_while_loading, tmp_path))
    assert "rank 1 left: KeyboardInterrupt" in first
    assert seconds < READ_BACK
    assert second == "KeyboardInterrupt()"


def test_a_rank_whose_script_ends_fails_the_others_at_once(tmp_path):
    """By an exception that nobody catches, with nothing closed."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import sys, time, torch
            import torch.distributed as dist
            from d9d_ckpt import Checkpointer
            from d9d_ckpt.errors import CkptError
            root, rank = sys.argv[1], int(sys.argv[2])
            dist.init_process_group(
                "gloo", store=dist.FileStore(root + "/store", 2), rank=rank, world_size=2
            )
            saver = Checkpointer(root + "/run", silence=50)
            state = {"model": {"w": torch.ones(10)}}
            saver.save(1, state).wait()
            if rank == 1:
                raise ValueError("of mine")
            try:
                saver.save(2, state).wait()
            except CkptError as error:
                print(error, end="")
        """)
    )
    ranks = [
        subprocess.Popen(  # noqa: S603 - a script of our own
            [sys.executable, script, tmp_path, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    (heard, errors), (_, why) = (rank.communicate(timeout=40) for rank in ranks)
    assert heard.endswith("step-00000002: rank 1 left: ValueError: of mine"), errors
    assert why.rstrip().endswith("ValueError: of mine")


def _forked(root, rank):
    """A process that a rank forks, and that ends as scripts do, is not the rank."""
    with Checkpointer(root / "run", silence=10) as saver:
        saver.save(1, plain(w=torch.zeros(4))).wait()
        if rank == 1:
            pid = os.fork()
            if not pid:
                saver.__exit__(KeyError, KeyError("mine"), None)
                os._exit(0)
            os.waitpid(pid, 0)
        return outcome(saver.save(2, plain(w=torch.zeros(4))).wait)[0]


def test_what_a_rank_forks_does_not_leave_for_it(tmp_path):
    assert launch(2, partial(_forked, tmp_path)) == ["", ""]


# -- ranks that differ ---------------------------------------------------------------------------


def _differing(root, rank):
    """Both ranks call their experts 0 and 1."""
    out = []
    experts = {f"experts.{n}.w": torch.full((3, 5), float(2 * rank + n)) for n in (0, 1)}
    for compare in (True, False):
        with Checkpointer(root / str(compare), compare_replicas=compare, silence=5) as saver:
            out.append(outcome(lambda s=saver: s.save(1, {"model": experts}, blocking=True))[0])
    return out


def test_a12_experts_numbered_from_zero_on_every_rank_are_refused(tmp_path):
    for refused, passed in launch(2, partial(_differing, tmp_path)):
        assert "tensor 'experts.0.w': rank 1 (" in refused
        assert "differs from rank 0 (" in refused
        assert passed == ""
    assert not (tmp_path / "True" / "step-00000001").exists()
    ckpt = d9d_ckpt.open(str(tmp_path / "False"))
    assert sorted(ckpt.tensors) == ["experts.0.w", "experts.1.w"]


def _steps_and_structures(root, rank):
    out = []
    with Checkpointer(root / "run", silence=5) as saver:
        w = torch.zeros(3)
        saver.save(1, plain(w=w), blocking=True)
        out.append(outcome(lambda: saver.save(2 + rank, plain(w=w), blocking=True))[0])
        more = {"only": torch.ones(2)} if rank == 1 else {}
        out.append(outcome(lambda: saver.save(4, plain(w=w, **more), blocking=True))[0])
        other = torch.zeros(3 + rank)
        out.append(outcome(lambda: saver.save(5, plain(w=other), blocking=True))[0])
        half = DTensor.from_local(
            torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False
        )
        part = plain(w=w, half=half) if rank == 0 else plain(w=w)
        out.append(outcome(lambda: saver.save(6, part, blocking=True))[0])
        out.append(outcome(lambda: saver.save(7, plain(w=w, half=half), blocking=True))[0])
    return out


def test_steps_and_structures_that_differ_are_planned_anew_or_refused(tmp_path):
    for steps, more, shape, part, good in launch(2, partial(_steps_and_structures, tmp_path)):
        assert "ranks save different steps (rank 0: 2, rank 1: 3)" in steps
        assert more == ""
        assert "tensor 'w' is F32 [4] on rank 1 and F32 [3] on rank 0" in shape
        assert "tensor 'half' [4]: the ranks hold 2 of its 4 elements" in part
        assert good == ""
    run = tmp_path / "run"
    assert sorted(p.name for p in run.iterdir()) == [f"step-{n:08d}" for n in (1, 4, 7)]
    assert set(d9d_ckpt.open(str(run / "step-00000004")).tensors) == {"w", "only"}


# -- what is exchanged ---------------------------------------------------------------------------


def _counted(root, rank):
    """Values that this rank puts into the store for each of three saves, and their bytes."""
    sent, put = [], dist.PrefixStore.set

    def counting(self, key, value):
        if "beat" not in key:
            sent.append(len(value))
        put(self, key, value)

    dist.PrefixStore.set = counting
    out = []
    with Checkpointer(root / "run") as saver:
        for step in (1, 2, 3):
            saver.save(step, plain(**{f"w{n}": torch.zeros(2) for n in range(300)})).wait()
            out.append((len(sent), sum(sent)))
            sent.clear()
    return out


def test_a_second_save_of_a_structure_exchanges_no_plan(tmp_path):
    for first, second, third in launch(2, partial(_counted, tmp_path)):
        assert second[0] == third[0] < first[0]
        assert first[1] - second[1] > 300 * 10


def _one_after_the_other(root, rank):
    """Checkpointers of one place in one process group hear nothing of each other."""
    steps = []
    for step in (1, 2, 3):
        with Checkpointer(root / "run", silence=5) as saver:
            w = torch.full((2,), float(step))
            saver.save(step, plain(w=w, **{f"x{step}": w.clone()}))
            steps.append(saver.load(plain(w=w), ignore=["x*"]).step)
            assert w.tolist() == [step, step]
    return steps


def test_checkpointers_of_one_place_do_not_hear_each_other(tmp_path):
    assert launch(2, partial(_one_after_the_other, tmp_path)) == [[1, 2, 3]] * 2


def _signalled(root, rank):
    with Checkpointer(root / "run") as saver:
        saver.save_on_signal(signal.SIGUSR1)
        out = []
        for step in range(6):
            if step == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            out.append(saver.due(step))
            dist.barrier()
    return out


def test_a_signal_on_one_rank_makes_one_step_due_on_all(tmp_path):
    one, other = launch(2, partial(_signalled, tmp_path))
    assert one == other == [False, False, False, False, True, True]


# -- state of many ranks -------------------------------------------------------------------------


def _draws():
    return torch.rand(2).tolist(), random.random()


def _rng_save(root, rank):
    torch.manual_seed(rank)
    random.seed(rank)
    with Checkpointer(root / "run") as saver:
        saver.save(1, {"rng": RNG({"tp": 1})}, blocking=True)
    return _draws()


def _rng_load(root, layout, rank):
    with warnings.catch_warnings(record=True) as caught, Checkpointer(root / "run") as saver:
        warnings.simplefilter("always")
        saver.load({"rng": RNG(layout)})
    return _draws(), [str(w.message) for w in caught if "seeded anew" in str(w.message)]


def test_d22_generators_go_on_where_they_were_or_are_seeded_anew_with_one_warning(tmp_path):
    expected = launch(2, partial(_rng_save, tmp_path))
    assert launch(2, partial(_rng_load, tmp_path, {"tp": 1})) == [(e, []) for e in expected]
    for world, layout in ((2, {"tp": 2}), (3, {"tp": 1})):
        found = launch(world, partial(_rng_load, tmp_path, layout))
        assert [len(warned) for _, warned in found] == [1] + [0] * (world - 1)
        assert "'world': 2" in found[0][1][0]
        draws = [draw for draw, _ in found]
        assert all(d not in expected for d in draws)
        assert len({str(d) for d in draws}) == world
        assert launch(world, partial(_rng_load, tmp_path, layout)) == found


def _stage(rank, lr):
    """A pipeline of two stages, each with its own layers and optimizer."""
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.weight, float(rank + 1))
    model = nn.ModuleDict({f"layer{rank}": layer})
    optim = torch.optim.AdamW(
        [
            {"params": [layer.weight], "lr": lr, "weight_decay": 0.5},
            {"params": [layer.bias], "lr": lr / 2},
        ]
    )
    for p in model.parameters():
        p.grad = torch.full_like(p, rank + 1.0)
    optim.step()
    return model, optim


def _pp_save(root, rank):
    model, optim = _stage(rank, 0.1 * (rank + 1))
    with Checkpointer(root / "run", unpadded={"layer1.bias": 1}) as saver:
        saver.save(1, {"model": model, "optim": optim, "step": 1}, blocking=True)


def _pp_load(root, rank):
    model, optim = _stage(1 - rank, 9.0)
    state = {"model": model, "optim": optim, "step": 0}
    with Checkpointer(root / "run", unpadded={"layer1.bias": 1}) as saver:
        report = saver.load(state)
        settings = [(g["lr"], g["weight_decay"]) for g in optim.param_groups]
        wrong = model if rank else nn.ModuleDict({"other": nn.Linear(2, 2)})
        refused = outcome(lambda: saver.load({"model": wrong, "step": 0}, ignore=["optim.*"]))[0]
    return sorted(report.loaded), settings, state["step"], refused


def test_d12_groups_of_a_pipeline_are_joined_and_come_apart_elsewhere(tmp_path):
    launch(2, partial(_pp_save, tmp_path))
    assert (
        len(d9d_ckpt.open(str(tmp_path / "run")).metadata["values"]["optim"]["param_groups"]) == 4
    )
    found = launch(2, partial(_pp_load, tmp_path))
    for rank, (loaded, settings, step, refused) in enumerate(found):
        stage, lr = 1 - rank, 0.1 * (2 - rank)
        assert all(f"layer{stage}." in name for name in loaded)
        assert len(loaded) == 8
        assert settings == [(lr, 0.5), (lr / 2, 0.01)]
        assert step == 1
        # Missing on rank 0, and no rank has a place for the layer that it should have had.
        assert "other.weight, other.bias" in refused
        assert "2 of its tensors have no place: layer1.bias, layer1.weight" in refused


def _padded(rows, value):
    """A vocabulary of 10, padded, and another tensor of as many rows, over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    emb, other = (
        DTensor.from_local(
            torch.full((rows // mesh.size(), 3), value), mesh, [Shard(0)], run_check=False
        )
        for _ in range(2)
    )
    return {"model": {"emb": emb, "other": other}}


def _unpadded_save(root, rank):
    with Checkpointer(root / "run", unpadded={"emb": 10}) as saver:
        saver.save(1, _padded(16, rank + 1.0), blocking=True)


def _unpadded_load(root, rank):
    state = _padded(12, 9.0)
    with Checkpointer(root / "run", unpadded={"emb": 10}) as saver:
        saver.load(state, ignore=["other"], allow_missing=["other"])
    return state["model"]["emb"].to_local()[:, 0].tolist()


def test_padding_of_a_sharded_vocabulary_is_no_data(tmp_path):
    """The last of four ranks holds padding alone."""
    launch(4, partial(_unpadded_save, tmp_path))
    ckpt = d9d_ckpt.open(str(tmp_path / "run"))
    assert (ckpt["emb"].shape, ckpt["other"].shape) == ((10, 3), (16, 3))
    expected = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0]
    assert launch(2, partial(_unpadded_load, tmp_path)) == [expected[:6], expected[6:]]
