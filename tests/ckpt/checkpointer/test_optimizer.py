import pytest
import torch
from helpers.meshes import fake_rank, fresh_mesh
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from d9d_ckpt.checkpointer.base import Saved
from d9d_ckpt.checkpointer.state import flatten, take_in
from d9d_ckpt.errors import MappingError, UsageError
from d9d_ckpt.tensors import DTYPES, Region, TensorSpec


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.b = nn.Linear(2, 1)
        self.idle = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.b(self.a(x).tanh())


def train(model, *optimizers, steps=1):
    for n in range(steps):
        loss = model(torch.arange(6, dtype=torch.float32).view(2, 3) + n).square().sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def copied(flat):
    return {name: held.local.clone() for name, held in flat.tensors.items()}


def saved_of(flat):
    return Saved({n: held.spec for n, held in flat.tensors.items()}, flat.values, flat.tied)


def load(state, saved, tensors):
    intake = take_in(state, saved)
    for name, held in intake.tensors.items():
        held.local.copy_(tensors[saved.tied.get(name, name)])
    intake.finish()
    return intake


def resumed(state, into):
    """``into`` after a load of ``state``; what was saved, and the intake."""
    flat = flatten(state)
    return load(into, saved_of(flat), copied(flat))


def twin(make):
    torch.manual_seed(0)
    model = Tiny()
    return model, make(model)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


NAMES = ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_state_is_named_by_slot_and_parameter():
    model, optimizer = twin(adamw)
    train(model, optimizer)
    flat = flatten({"model": model, "optim": optimizer})
    slots = ["step", "exp_avg", "exp_avg_sq"]
    expected = [f"optim.{slot}.{name}" for name in NAMES for slot in slots]
    assert [n for n in flat.tensors if n.startswith("optim.")] == expected
    assert flat.tensors["optim.step.a.bias"].local.item() == 1
    assert flat.tensors["optim.exp_avg.a.weight"].spec.shape == (2, 3)


def test_settings_are_kept_by_parameter_name_without_what_is_local():
    model, optimizer = twin(adamw)
    (group,) = flatten({"model": model, "optim": optimizer}).values["optim"]["param_groups"]
    assert group == {
        "params": ["idle", *NAMES],
        "lr": 0.1,
        "betas": {"$tuple": [0.9, 0.999]},
        "eps": 1e-8,
        "weight_decay": 0.01,
        "amsgrad": False,
        "maximize": False,
        "decoupled_weight_decay": True,
    }


def test_d23_a_fresh_optimizer_goes_on_as_the_saved_one_would():
    model, optimizer = twin(adamw)
    train(model, optimizer, steps=2)
    other, fresh = twin(adamw)
    before = list(other.parameters())
    intake = resumed({"model": model, "optim": optimizer}, {"model": other, "optim": fresh})
    train(model, optimizer, steps=3)
    train(other, fresh, steps=3)
    for p, q, same in zip(model.parameters(), other.parameters(), before, strict=True):
        assert torch.equal(p, q)
        assert q is same
    assert intake.fresh == ("optim.*.idle",)
    assert (intake.missing, intake.unexpected) == ((), ())


def test_d23_state_that_exists_is_filled_and_stays_the_same_object():
    model, optimizer = twin(adamw)
    train(model, optimizer)
    other, live = twin(adamw)
    train(other, live, steps=4)
    tensors = {id(t) for state in live.state.values() for t in state.values()}
    resumed({"model": model, "optim": optimizer}, {"model": other, "optim": live})
    assert {id(t) for state in live.state.values() for t in state.values()} == tensors
    assert live.state[other.a.weight]["step"].item() == 1
    # load, step, save: the second save has what the step made.
    train(other, live)
    again = flatten({"model": other, "optim": live})
    assert again.tensors["optim.step.a.weight"].local.item() == 2
    assert torch.equal(again.tensors["a.weight"].local, other.a.weight)


def test_d23_masters_are_state_by_their_own_names():
    weight = nn.Linear(2, 2).to(torch.bfloat16)
    masters = {name: p.detach().float() for name, p in weight.named_parameters()}
    for master in masters.values():
        master.requires_grad_().grad = torch.ones_like(master)
    optimizer = torch.optim.AdamW(masters.values())
    optimizer.step()
    names = flatten({"model": weight, "master": masters, "optim": optimizer}).tensors
    assert {"weight", "master.weight", "optim.exp_avg.master.weight"} <= names.keys()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("AdamW", {"amsgrad": True}),
        ("AdamW", {"fused": True}),
        ("AdamW", {"lr": torch.tensor(0.1), "foreach": False}),
        ("Adafactor", {}),
        ("RMSprop", {"centered": True, "momentum": 0.1}),
        ("NAdam", {}),
        ("ASGD", {}),
        ("Rprop", {}),
        ("LBFGS", {}),
    ],
)
def test_torchs_optimizers_go_on_as_if_never_stopped(kind, options):
    def make(model):
        return getattr(torch.optim, kind)(model.parameters(), **options)

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = twin(make)
    step(model, optimizer)
    step(model, optimizer)
    other, fresh = twin(make)
    resumed({"model": model, "optim": optimizer}, {"model": other, "optim": fresh})
    step(model, optimizer)
    step(other, fresh)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def grouped(model, order):
    """Groups A (decay 0.1, lr 1e-3), B (decay 0.1, lr 1e-4) and an empty C, in some order."""
    groups = {
        "A": {"params": [model.a.weight, model.a.bias], "lr": 1e-3, "max_lr": 1e-3},
        "B": {"params": [model.b.weight, model.b.bias], "lr": 1e-4, "max_lr": 1e-4},
        "C": {"params": [], "betas": (0.5, 0.5), "max_lr": 7.0},
    }
    return torch.optim.AdamW([groups[name] for name in order], weight_decay=0.1)


def settings(optimizer, parameter):
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]):
            return group["lr"], group["max_lr"], group["weight_decay"], group["betas"]
    raise AssertionError


def test_d12_groups_are_matched_by_parameter_names_in_any_order():
    model, optimizer = twin(lambda m: grouped(m, "ABC"))
    other, live = twin(lambda m: grouped(m, "CBA"))
    for group in live.param_groups:
        group["params"].reverse()
        if group["params"]:
            group.update(lr=0.0, max_lr=0.0, weight_decay=0.0, betas=(0.0, 0.0))
    resumed({"model": model, "optim": optimizer}, {"model": other, "optim": live})
    for name in NAMES:
        p, q = model.get_parameter(name), other.get_parameter(name)
        assert settings(optimizer, p) == settings(live, q)
    # The empty group keeps what it was built with, and a step does not stumble over it.
    assert (live.param_groups[0]["betas"], live.param_groups[0]["max_lr"]) == ((0.5, 0.5), 7.0)
    train(other, live)


def test_d12_parameters_of_one_group_with_two_settings_are_refused_before_anything_changes():
    model, optimizer = twin(lambda m: grouped(m, "ABC"))
    other, live = twin(adamw)
    flat = flatten({"model": model, "optim": optimizer})
    with pytest.raises(MappingError, match=r"'a\.weight' and 'b\.weight' .*lr 0\.001 and 0\.0001"):
        take_in({"model": other, "optim": live}, saved_of(flat))
    assert live.param_groups[0]["lr"] == 0.1


def test_d12_settings_that_are_tensors_keep_their_tensor():
    def make(value):
        return lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(value), foreach=False)

    model, optimizer = twin(make(0.25))
    flat = flatten({"model": model, "optim": optimizer})
    assert flat.tensors["optim.lr.idle"].local.item() == 0.25
    assert flat.values["optim"]["param_groups"][0]["lr"] == {"$tensor": "optim.lr.idle"}

    other, live = twin(make(0.5))
    lr = live.param_groups[0]["lr"]
    load({"model": other, "optim": live}, saved_of(flat), copied(flat))
    assert live.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
    assert not live.state

    third, plain = twin(adamw)
    load({"model": third, "optim": plain}, saved_of(flat), copied(flat))
    assert type(plain.param_groups[0]["lr"]) is float
    assert plain.param_groups[0]["lr"] == 0.25

    resumed({"model": third, "optim": adamw(third)}, {"model": other, "optim": live})
    assert live.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.1)


def by_stage(lrs):
    """An optimizer with a group and an lr tensor for each half of the model."""
    return lambda m: torch.optim.AdamW(
        [
            {"params": list(part.parameters()), "lr": torch.tensor(lr)}
            for part, lr in zip((m.a, m.b), lrs, strict=True)
        ],
        foreach=False,
    )


def test_d12_equal_tensors_of_two_saved_groups_fit_one_group():
    model, optimizer = twin(by_stage((0.25, 0.25)))
    other, live = twin(adamw)
    resumed({"model": model, "optim": optimizer}, {"model": other, "optim": live})
    assert live.param_groups[0]["lr"] == 0.25


def test_d12_unequal_tensors_of_two_saved_groups_do_not():
    model, optimizer = twin(by_stage((0.25, 0.5)))
    other, live = twin(adamw)
    with pytest.raises(MappingError, match=r"'a\.weight' and 'b\.weight' .*lr"):
        resumed({"model": model, "optim": optimizer}, {"model": other, "optim": live})
    assert live.param_groups[0]["lr"] == 0.1


def test_d20_dense_and_expert_optimizers_are_one_and_come_apart_again():
    def pair(model):
        return [
            torch.optim.AdamW(model.a.parameters(), lr=0.1),
            torch.optim.AdamW(model.b.parameters(), lr=0.2),
        ]

    model, both = twin(pair)
    train(model, *both)
    flat = flatten({"model": model, "optim": both})
    assert "optim.exp_avg.b.weight" in flat.tensors

    other, single = twin(lambda m: torch.optim.AdamW([*m.b.parameters()], lr=0.0))
    intake = load({"model": other, "optim": single}, saved_of(flat), copied(flat))
    assert single.param_groups[0]["lr"] == 0.2
    assert torch.equal(
        single.state[other.b.weight]["exp_avg"], both[1].state[model.b.weight]["exp_avg"]
    )
    assert set(intake.unexpected) == {
        f"optim.{slot}.a.{leaf}"
        for slot in ("step", "exp_avg", "exp_avg_sq")
        for leaf in ("weight", "bias")
    }

    third, live = twin(pair)
    load({"model": third, "optim": live}, saved_of(flat), copied(flat))
    assert [opt.param_groups[0]["lr"] for opt in live] == [0.1, 0.2]
    train(model, *both)
    train(third, *live)
    assert torch.equal(model.b.weight, third.b.weight)


def test_d24_an_optimizer_that_was_not_saved_is_missing():
    model, optimizer = twin(adamw)
    intake = take_in({"model": model, "optim": optimizer}, saved_of(flatten({"model": model})))
    assert intake.missing == ("optim",)


def test_d24_state_that_was_not_saved_is_fresh_even_where_there_is_some():
    model, optimizer = twin(adamw)
    other, live = twin(adamw)
    train(other, live)
    intake = resumed({"model": model, "optim": optimizer}, {"model": other, "optim": live})
    assert intake.fresh == tuple(f"optim.*.{name}" for name in ["idle", *NAMES])
    assert not live.state[other.a.weight]


def test_d24_a_slot_that_was_not_saved_is_missing():
    model, optimizer = twin(adamw)
    train(model, optimizer)
    other, live = twin(lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True))
    train(other, live)
    flat = flatten({"model": model, "optim": optimizer})
    intake = take_in({"model": other, "optim": live}, saved_of(flat))
    assert intake.missing == tuple(f"optim.max_exp_avg_sq.{name}" for name in NAMES)


def test_frozen_parameters_have_no_state_to_start_anew():
    model, optimizer = twin(adamw)
    for m in (model, other := Tiny()):
        m.idle.requires_grad_(requires_grad=False)
    train(model, optimizer)
    intake = resumed({"model": model, "optim": optimizer}, {"model": other, "optim": adamw(other)})
    assert intake.fresh == ()


def test_a_parameter_of_no_module_is_refused_with_group_and_shape():
    model, optimizer = twin(adamw)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5, 7))]})
    with pytest.raises(UsageError, match=r"optim: a parameter of group 1, \[5, 7\]"):
        flatten({"model": model, "optim": optimizer})


@pytest.mark.parametrize("where", ["optim", "nested"])
def test_a_raw_state_dict_is_refused(where):
    _, optimizer = twin(adamw)
    raw = optimizer.state_dict()
    state = {"optim": raw} if where == "optim" else {"run": {"parts": [raw]}}
    with pytest.raises(UsageError, match="pass the optimizer itself"):
        flatten(state)


def test_parameters_of_several_modules_have_the_path_of_theirs():
    actor, critic = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], momentum=0.9)
    actor(critic(torch.ones(1))).backward()
    optimizer.step()
    flat = flatten({"model": actor, "critic": critic, "optim": optimizer})
    assert "optim.momentum_buffer.weight" in flat.tensors
    assert "optim.momentum_buffer.critic.weight" in flat.tensors


def test_slots_are_made_as_saved_and_as_torch_makes_them():
    model = nn.Linear(3, 2)
    spec = {
        "weight": TensorSpec(DTYPES["F32"], (2, 3)),
        "optim.exp_avg.weight": TensorSpec(DTYPES["BF16"], (2, 3)),
        "optim.row.weight": TensorSpec(DTYPES["F32"], (2,)),
        "optim.step.weight": TensorSpec(DTYPES["F32"], ()),
    }
    optimizer = torch.optim.AdamW([model.weight])
    values = {"optim": {"param_groups": [{"params": ["weight"], "lr": 0.5}]}}
    intake = take_in({"model": model, "optim": optimizer}, Saved(spec, values))
    assert not optimizer.state
    intake.finish()
    state = optimizer.state[model.weight]
    assert (state["exp_avg"].dtype, state["exp_avg"].shape) == (torch.bfloat16, (2, 3))
    assert (state["row"].shape, state["step"].shape) == ((2,), ())
    assert intake.missing == ("bias",)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("flag", ["fused", "capturable", "foreach"])
def test_on_a_gpu_slots_are_made_where_torch_makes_them(flag):
    def state(model):
        optimizer = torch.optim.AdamW(model.parameters(), **{flag: True})
        return {"model": model, "optim": optimizer}

    old, new = (state(nn.Linear(3, 2, device="cuda")) for _ in range(2))
    old["model"](torch.ones(3, device="cuda")).sum().backward()
    old["optim"].step()
    resumed(old, new)
    for p, q in zip(old["model"].parameters(), new["model"].parameters(), strict=True):
        for slot, tensor in old["optim"].state[p].items():
            there = new["optim"].state[q][slot]
            assert there.device == tensor.device
            assert torch.equal(there, tensor)


def sharded_linear(rows):
    mesh = fresh_mesh(2)
    model = nn.Linear(3, rows, bias=False)
    whole = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    return model


@pytest.mark.parametrize("rank", [0, 1])
def test_d04_slots_of_sharded_parameters_are_made_with_their_placements(rank):
    spec = {
        "weight": TensorSpec(DTYPES["F32"], (5, 3)),
        "optim.exp_avg.weight": TensorSpec(DTYPES["F32"], (5, 3)),
        "optim.row.weight": TensorSpec(DTYPES["F32"], (5,)),
        "optim.step.weight": TensorSpec(DTYPES["F32"], ()),
    }
    values = {"optim": {"param_groups": [{"params": ["weight"]}]}}
    with fake_rank(rank, 2):
        model = sharded_linear(5)
        optimizer = torch.optim.AdamW(model.parameters())
        intake = take_in({"model": model, "optim": optimizer}, Saved(spec, values))
        intake.finish()
        state = optimizer.state[model.weight]
        box = Region((3 * rank, 0), (3 - rank, 3))
        assert intake.tensors["optim.exp_avg.weight"].box == box
        assert intake.tensors["optim.row.weight"].box == Region((0,), (5,))
        assert state["exp_avg"].placements == (Shard(0),)
        assert isinstance(state["row"], DTensor)
        assert state["row"].placements == (Replicate(),)
        assert type(state["step"]) is torch.Tensor


@pytest.mark.parametrize("rank", [0, 1])
def test_plain_slots_of_the_local_shape_are_shards(rank):
    with fake_rank(rank, 2):
        model = sharded_linear(5)
        optimizer = torch.optim.AdamW(model.parameters())
        local = torch.ones(3 - rank, 3)
        optimizer.state[model.weight] = {"mine": local, "step": torch.tensor(1.0)}
        held = flatten({"model": model, "optim": optimizer}).tensors["optim.mine.weight"]
    assert held.spec.shape == (5, 3)
    assert held.box == Region((3 * rank, 0), (3 - rank, 3))
    held.local.fill_(7)
    assert local.unique().item() == 7
