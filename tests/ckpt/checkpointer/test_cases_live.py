"""Cases of live state that need a whole save and load: what is on disk, and what goes on from it."""

import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.checkpoints import cli, manifest, read_file, refused
from helpers.ranks import launch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import d9d_ckpt
from d9d_ckpt import RNG, Checkpointer, DataCursor
from d9d_ckpt.errors import MappingError, RequestError, SourceError


@pytest.fixture
def saver(tmp_path):
    with Checkpointer(tmp_path / "run") as made:
        yield made


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


# -- D04: other world sizes ----------------------------------------------------------------------


SHAPES = {"a": (8, 2), "b": (6, 2), "c": (3, 2), "d": (1, 5), "e": (0, 4)}


def _values(offset):
    out, at = {}, offset
    for name, shape in SHAPES.items():
        count = torch.Size(shape).numel()
        out[name] = torch.arange(at, at + count, dtype=torch.float32).reshape(shape)
        at += 100
    return out


def _dp(offset):
    """Parameters over all ranks, and an Adam that has taken a step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.ParameterDict(
        {
            n: nn.Parameter(distribute_tensor(t, mesh, [Shard(0)]))
            for n, t in _values(offset).items()
        }
    )
    optim = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
    for n, p in model.items():
        p.grad = distribute_tensor(torch.full(SHAPES[n], 1.0 + offset), mesh, [Shard(0)])
    optim.step()
    return model, optim


def _moments(model, optim):
    out = {}
    for name, p in model.items():
        out[name] = whole(p).tolist()
        for slot in ("exp_avg", "exp_avg_sq"):
            out[f"{slot} {name}"] = whole(optim.state[p][slot]).tolist()
        out[f"step {name}"] = optim.state[p]["step"].item()
    return out


def _dp_save(root, rank):
    model, optim = _dp(1)
    optim.step()
    with Checkpointer(root, silence=10) as saver:
        saver.save(1, {"model": model, "optim": optim}, blocking=True)
    return _moments(model, optim)


def _dp_load(root, rank):
    model, optim = _dp(5)
    with Checkpointer(root, silence=10) as saver:
        report = saver.load({"model": model, "optim": optim})
    assert (report.missing, report.unexpected) == ((), ())
    return _moments(model, optim)


@pytest.mark.ranks
def test_d04_uneven_and_empty_parameters_with_their_moments_on_any_number_of_ranks(tmp_path):
    expected = launch(4, partial(_dp_save, tmp_path))[0]
    assert expected["step a"] == 2
    stored = d9d_ckpt.open(str(tmp_path))
    assert stored["optim.exp_avg.d"].read().tolist() == expected["exp_avg d"]
    assert stored["e"].shape == (0, 4)
    for world in (1, 2, 3, 8):
        assert launch(world, partial(_dp_load, tmp_path)) == [expected] * world


def _tp(value):
    """A replicated norm and a row-parallel weight of six columns, which four ranks do not divide."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "norm": distribute_tensor(torch.arange(5.0) + value, mesh, [Replicate()]),
        "rows": distribute_tensor(torch.arange(24.0).reshape(4, 6) + value, mesh, [Shard(1)]),
    }


def _tp_save(root, rank):
    with Checkpointer(root, silence=10) as saver:
        saver.save(1, {"model": _tp(0.5)}, blocking=True)


def _tp_load(root, rank):
    state = {"model": _tp(9.0)}
    with Checkpointer(root, silence=10) as saver:
        saver.load(state)
    return {name: whole(t).tolist() for name, t in state["model"].items()}


@pytest.mark.ranks
def test_d04_replicas_and_row_parallel_weights_on_any_tp(tmp_path):
    launch(2, partial(_tp_save, tmp_path))
    chunks = manifest(tmp_path / "step-00000001")["tensors"]["norm"]["chunks"]
    assert sum(chunk["shape"][0] for chunk in chunks) == 5
    expected = {
        "norm": (torch.arange(5.0) + 0.5).tolist(),
        "rows": (torch.arange(24.0).reshape(4, 6) + 0.5).tolist(),
    }
    for world in (1, 4):
        assert launch(world, partial(_tp_load, tmp_path)) == [expected] * world


def _drifted(root, rank):
    state = {"model": {"norm": _tp(float(rank))["norm"]}}
    local = state["model"]["norm"].to_local()
    local.copy_(torch.arange(5.0) + rank)
    try:
        with Checkpointer(root, silence=10) as saver:
            saver.save(1, state, blocking=True)
    except d9d_ckpt.errors.CorruptError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_d04_replicas_that_have_drifted_apart_are_not_saved(tmp_path):
    for text in launch(2, partial(_drifted, tmp_path)):
        assert "tensor 'norm': rank 1 (" in text
        assert "differs from rank 0 (" in text
    assert not (tmp_path / "step-00000001").exists()


# -- D09: points in time -------------------------------------------------------------------------


def test_d09_the_snapshot_is_let_go_of_before_the_save_is_said_to_be_over(saver):
    free = []
    for step in (1, 2, 3):
        handle = saver.save(step, {"model": {"w": torch.ones(100_000)}})
        handle._future.add_done_callback(lambda _: free.append(saver._free.qsize()))
        handle.wait()
    assert free == [2, 2, 2]


# -- D10: a position of another kind -------------------------------------------------------------


def test_d10_a_position_that_lacks_what_it_counts_is_refused(saver):
    saver.save(1, {"data": {"consumed": 10, "rank": 3}}, blocking=True)
    cursor = DataCursor(64, 1, consumed=5)
    message = "data cursor: the saved position has no length, seed, only consumed, rank"
    with pytest.raises(RequestError, match=message):
        saver.load({"data": cursor})
    assert cursor.consumed == 5


# -- D20: dense and expert optimizers ------------------------------------------------------------


EXPERTS = 4


class Stages:
    """Two dense layers and four experts, which are the second stage's; an optimizer for each kind."""

    def __init__(self, pp, ep, seed):
        rank = dist.get_rank()
        world = init_device_mesh("cpu", (pp, ep), mesh_dim_names=("pp", "ep"))
        stage, mesh = rank // ep, world["ep"]
        torch.manual_seed(seed)
        dense = {f"dense{n}": torch.randn(3, 2, dtype=torch.float64) for n in range(2)}
        experts = torch.randn(EXPERTS, 2, 3, dtype=torch.float64)
        self.model = nn.ParameterDict()
        for n, (name, value) in enumerate(dense.items()):
            if n * pp // 2 == stage:
                self.model[name] = nn.Parameter(distribute_tensor(value, mesh, [Replicate()]))
        mine = []
        if stage == pp - 1:
            self.model["experts"] = nn.Parameter(distribute_tensor(experts, mesh, [Shard(0)]))
            mine = [self.model["experts"]]
        groups = [{"params": [p for n, p in self.model.items() if n != "experts"], "lr": 0.1}]
        # A stage without experts has the second optimizer all the same, over a group of none.
        self.optim = [
            torch.optim.AdamW(groups, foreach=False),
            torch.optim.AdamW([{"params": mine, "lr": 0.2}], foreach=False),
        ]

    @property
    def state(self):
        return {"model": self.model, "optim": self.optim}

    def train(self, steps, lr=None):
        for optim in self.optim:
            for group in optim.param_groups:
                group["lr"] = lr or group["lr"]
            for p in (p for group in optim.param_groups for p in group["params"]):
                grad = torch.arange(p.numel(), dtype=p.dtype).reshape(p.shape) / 7 - 1
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements)
            for _ in range(steps):
                optim.step()

    def found(self):
        """Tensors, moments, steps and rates by name."""
        out = {}
        for optim in self.optim:
            for group in optim.param_groups:
                for p in group["params"]:
                    name = next(n for n, q in self.model.items() if q is p)
                    slots = {slot: whole(t).tolist() for slot, t in optim.state[p].items()}
                    out[name] = whole(p).tolist(), slots, group["lr"]
        return out


def _stages_save(root, rank):
    trainer = Stages(2, 2, 0)
    trainer.train(2, 0.05)
    with Checkpointer(root, silence=10) as saver:
        saver.save(2, trainer.state, blocking=True)
    return trainer.found()


def _stages_load(root, pp, ep, rank):
    trainer = Stages(pp, ep, 1)
    with Checkpointer(root, silence=10) as saver:
        report = saver.load(trainer.state)
    assert (report.missing, report.fresh) == ((), ())
    here = trainer.found()
    trainer.train(3)
    return here, trainer.found()


def _uninterrupted(rank):
    trainer = Stages(1, 1, 0)
    trainer.train(2, 0.05)
    before = trainer.found()
    trainer.train(3)
    return before, trainer.found()


@pytest.mark.ranks
def test_d20_experts_and_dense_go_on_at_any_ep_and_pp(tmp_path):
    ((before, after),) = launch(1, _uninterrupted)
    for rank, found in enumerate(launch(4, partial(_stages_save, tmp_path))):
        assert found.keys() == ({"dense0"} if rank < 2 else {"dense1", "experts"})
    stored = d9d_ckpt.open(str(tmp_path))
    for slot in ("exp_avg", "exp_avg_sq"):
        for e in range(EXPERTS):
            found = stored[f"optim.{slot}.experts"][e : e + 1].read()[0].tolist()
            assert found == before["experts"][1][slot][e], (slot, e)
    for pp, ep in ((2, 1), (2, 4), (1, 2), (1, 1)):
        seen = set()
        for here, there in launch(pp * ep, partial(_stages_load, tmp_path, pp, ep)):
            seen |= here.keys()
            for name in here:
                # The rate that was changed after the optimizers were made, and one step count.
                assert here[name][2] == 0.05, name
                assert here[name][1]["step"] == 2.0, name
                assert here[name] == before[name], (pp, ep, name)
                assert there[name] == after[name], (pp, ep, name)
        assert seen == {"dense0", "dense1", "experts"}


# -- D22: random numbers -------------------------------------------------------------------------


class Epoch:
    """64 samples in an order that is drawn at the start, and a dropout."""

    def __init__(self, seed):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.cursor, self.rng = DataCursor(64, 3), RNG({"tp": 1})
        self.order = torch.zeros(64, dtype=torch.int64)

    @property
    def state(self):
        return {"order": self.order, "data": self.cursor, "rng": self.rng}

    def start(self):
        self.order.copy_(torch.randperm(64))

    def take(self, count):
        """Samples and the masks that dropout draws for them."""
        at = self.cursor.share(0, 1, count)
        self.cursor.advance(count)
        masks = [nn.functional.dropout(torch.ones(8), 0.5).tolist() for _ in at]
        return self.order[list(at)].tolist(), masks, [random.random() for _ in at], np.random.rand()


def test_d22_an_epoch_goes_on_in_its_middle_with_the_same_order_and_masks(saver):
    one = Epoch(1)
    one.start()
    first = one.take(20)
    saver.save(20, one.state, blocking=True)
    expected = one.take(44)
    other = Epoch(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saver.load(other.state)
    assert other.take(44) == expected
    assert sorted([*first[0], *expected[0]]) == list(range(64))


# -- D23: masters --------------------------------------------------------------------------------


class Masters:
    """A bf16 model, fp32 copies of its parameters, and an optimizer over those."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Linear(5, 3).to(torch.bfloat16)
        self.masters = {n: p.detach().float() for n, p in self.model.named_parameters()}
        for master in self.masters.values():
            master.requires_grad_()
        self.optim = torch.optim.AdamW(self.masters.values(), lr=0.001)

    @property
    def state(self):
        return {"model": self.model, "master": self.masters, "optim": self.optim}

    def train(self):
        """A step that is below what bf16 resolves."""
        for name, p in self.model.named_parameters():
            self.masters[name].grad = torch.full(p.shape, 0.5)
        self.optim.step()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.masters[name])

    def agree(self):
        return all(
            torch.equal(p, self.masters[n].bfloat16()) for n, p in self.model.named_parameters()
        )


def test_d23_masters_are_those_of_the_save_and_the_first_step_uses_them(saver):
    one, other = Masters(0), Masters(1)
    one.train()
    saver.save(1, one.state, blocking=True)
    held = {n: id(t) for n, t in other.masters.items()}
    saver.load(other.state)
    assert {n: id(t) for n, t in other.masters.items()} == held
    assert other.agree()
    # They hold more than the parameters do, and that was not rounded away.
    assert not torch.equal(other.masters["weight"], other.model.weight.float())
    for trainer in (one, other):
        trainer.train()
    for n, master in one.masters.items():
        assert torch.equal(other.masters[n], master)
    saver.save(2, other.state, blocking=True)
    again = Masters(2)
    saver.load(again.state)
    assert all(torch.equal(again.masters[n], other.masters[n]) for n in other.masters)


def test_d23_masters_that_were_not_saved_are_missing_never_stale_in_silence(saver):
    one, other = Masters(0), Masters(1)
    saver.save(1, {"model": one.model}, blocking=True)
    with pytest.raises(
        MappingError, match=r"3 names of the state .*: master\.weight, master\.bias, optim"
    ):
        saver.load(other.state)
    report = saver.load(other.state, allow_missing=["master.*", "optim"])
    assert report.missing == ("master.weight", "master.bias", "optim")
    assert torch.equal(other.model.weight, one.model.weight)
    assert not other.agree()


# -- D25: files of ranks that are not there ------------------------------------------------------


def _of_eight(root, rank):
    mesh = init_device_mesh("cpu", (8,))
    w = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)])
    with Checkpointer(root, silence=20, files={"config.json": b"{}"}) as saver:
        for step in (1, 2):
            saver.save(step, {"model": {"w": w}, "rng": RNG()}, blocking=True)


@pytest.mark.ranks
def test_d25_d22_the_ranks_whose_files_are_missing_are_named(tmp_path, caplog):
    launch(8, partial(_of_eight, tmp_path))
    step = tmp_path / "step-00000002"
    files = sorted(step.glob("*/rank-*.safetensors"))
    assert len(files) == 8
    state = {"model": {"w": torch.zeros(16)}}
    for rank, words in ((3, "found 7: missing rank 3;"), (6, "found 6: missing rank 3, 6;")):
        files[rank].unlink()
        expected = (
            f"{files[3]}: the manifest names this file and it is not there; expected 8 files, "
        )
        with Checkpointer(tmp_path) as saver, pytest.raises(SourceError) as caught:
            saver.load(state, 2)
        assert expected + words in str(caught.value)
        refused(cli("inspect", step), 3, expected + words, "incomplete")
    (step / "config.json").unlink()
    assert "expected 8 files" in cli("inspect", step).err
    # It never was a whole step: the one before it is.
    with Checkpointer(tmp_path) as saver:
        assert saver.load(state, ignore=["rng*"]).step == 1
    assert state["model"]["w"].tolist() == list(range(16))
    (record,) = caplog.records
    assert "step-00000002 is passed over: " in record.message
    assert "missing rank 3, 6" in record.message


# -- A06: wrappers -------------------------------------------------------------------------------


def _net(value):
    net = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)]), "module": nn.Linear(2, 1)})
    for p in net.parameters():
        nn.init.constant_(p, value)
    return net


def _wrapped(value):
    net = _net(value)
    net["layers"][0] = checkpoint_wrapper(net["layers"][0])
    return nn.DataParallel(torch.compile(net, backend="eager"))


@pytest.mark.parametrize(("one", "other"), [(_wrapped, _net), (_net, _wrapped)])
def test_a06_no_wrapper_gets_into_a_file_and_any_is_loaded_into(saver, tmp_path, one, other):
    net, live = one(1.0), other(0.0)
    optim, fresh = (torch.optim.SGD(n.parameters(), momentum=0.9) for n in (net, live))
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optim.step()
    saver.save(1, {"model": net, "optim": optim}, blocking=True)
    names = {"layers.0.weight", "layers.0.bias", "module.weight", "module.bias"}
    slots = {f"optim.momentum_buffer.{name}" for name in names}
    assert set(d9d_ckpt.open(str(tmp_path / "run")).tensors) == names | slots
    saver.load({"model": live, "optim": fresh})
    for p, q in zip(net.parameters(), live.parameters(), strict=True):
        assert torch.equal(p, q)
        assert fresh.state[q]["momentum_buffer"].all()


@pytest.mark.parametrize(
    "key",
    [
        "_orig_mod.module.model.layers.0.x",
        "module._orig_mod.model.layers.0.x",
        "model.layers.0._checkpoint_wrapped_module.x",
        "_fsdp_wrapped_module.model.layers._fsdp_wrapped_module.0.x",
    ],
)
def test_a06_tensors_with_prefixes_are_saved_and_loaded_without(saver, tmp_path, key):
    saver.save(1, {"model": {key: torch.ones(2)}}, blocking=True)
    assert list(d9d_ckpt.open(str(tmp_path / "run")).tensors) == ["model.layers.0.x"]
    for other in (key, "model.layers.0.x"):
        x = torch.zeros(2)
        saver.load({"model": {other: x}})
        assert x.all()


# -- F16: views ----------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("case", ["t", "overlap", "tied", "row"])
def test_f16_what_is_written_of_a_view_are_its_own_bytes(saver, tmp_path, case, blocking):
    x, big = torch.arange(8.0).reshape(4, 2), torch.zeros(1000, 1000)
    tensors = {
        "t": {"t": x.t()},
        "overlap": {"a": x[:3], "b": x[2:]},
        "tied": {"a": x, "b": x},
        "row": {"row": big[:1]},
    }[case]
    nbytes = {"t": 32, "overlap": 40, "tied": 32, "row": 4000}[case]
    saver.save(1, {"model": tensors}, blocking=blocking).wait()
    step = tmp_path / "run" / "step-00000001"
    (file,) = step.glob("*/*.safetensors")
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size - 8 - header == nbytes
    found = read_file(file)
    assert found.keys() == (tensors.keys() if case != "tied" else {"a"})
    assert all(torch.equal(found[n], tensors[n]) for n in found)
    # Nothing of it was changed, and each view is filled by itself.
    assert x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    live = {name: torch.zeros(t.shape) for name, t in tensors.items()}
    saver.load({"model": live})
    assert all(torch.equal(live[n], t) for n, t in tensors.items())
