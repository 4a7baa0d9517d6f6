"""AdamW: torch's own bits on plain tensors, the same on shards, and state that a checkpoint fills."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.ranks import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from d9d_ckpt import Checkpointer
from d9d_ckpt.errors import MappingError
from d9d_train import rng
from d9d_train.optim.adamw import AdamW, decays

SHAPES = {
    "embed_tokens.weight": (23, 7),
    "norm.weight": (7,),
    "proj.weight": (5, 33),
    "proj.bias": (5,),
    "experts.weight": (3, 4, 5),
}
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
RATES = [1e-2, 5e-3, 2e-2, 1e-3]
Values = dict[str, torch.Tensor]


def values(draw: int, dtype: torch.dtype = torch.float64) -> Values:
    """Parameters (draw 0) or the gradients of a step."""
    out = {}
    for name, shape in SHAPES.items():
        index = torch.arange(torch.Size(shape).numel()).reshape(shape)
        out[name] = rng.normal(draw, rng.stream(name), index).to(dtype)
    return out


def ours(parameters: Values, **settings: object) -> AdamW:
    given = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY, **settings}
    return AdamW({n: nn.Parameter(p.clone()) for n, p in parameters.items()}, **given)


def theirs(parameters: Values, **kind: bool) -> tuple[torch.optim.AdamW, Values]:
    copies = {n: nn.Parameter(p.clone()) for n, p in parameters.items()}
    groups = [
        {"params": [p for n, p in copies.items() if p.dim() > 1]},
        {"params": [p for n, p in copies.items() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, eps=EPS, weight_decay=DECAY, **kind), copies


def train(optim: AdamW, rates: list[float], *, first: int = 1) -> Values:
    for number, lr in enumerate(rates, first):
        for name, grad in values(number).items():
            parameter = optim.parameters[name]
            parameter.grad = grad.to(parameter)
        optim.step(lr)
    return {n: p.detach() for n, p in optim.parameters.items()}


def train_theirs(optim: torch.optim.AdamW, parameters: Values, rates: list[float]) -> Values:
    for number, lr in enumerate(rates, 1):
        for name, grad in values(number).items():
            parameters[name].grad = grad.to(parameters[name])
        for group in optim.param_groups:
            group["lr"] = lr
        optim.step()
    return {n: p.detach() for n, p in parameters.items()}


def equal(a: Values, b: Values) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_bits_are_those_of_the_fused_adamw_of_torch(dtype: torch.dtype) -> None:
    start = values(0, dtype)
    expected = train_theirs(*theirs(start, fused=True), RATES)
    found = train(ours(start), RATES)
    assert equal(found, expected)
    assert not equal(found, start)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gpu_has_the_bits_of_the_fused_adamw_of_torch(dtype: torch.dtype) -> None:
    start = {name: value.cuda() for name, value in values(0, dtype).items()}
    expected = train_theirs(*theirs(start, fused=True), RATES)
    assert equal(train(ours(start), RATES), expected)


def test_in_float64_it_is_the_formula_that_torch_loops_over() -> None:
    start = values(0)
    expected = train_theirs(*theirs(start, foreach=False), RATES)
    found = train(ours(start), RATES)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_the_first_step_by_hand() -> None:
    """Moments cancel: the step is lr times the sign of the gradient, after the decay."""
    optim = AdamW(
        {"a.weight": nn.Parameter(torch.tensor([[1.0, 2.0]], dtype=torch.float64))},
        betas=BETAS,
        eps=1e-30,
        weight_decay=0.5,
    )
    weight = optim.parameters["a.weight"]
    weight.grad = torch.tensor([[0.25, -4.0]], dtype=torch.float64)
    optim.step(0.1)
    expected = torch.tensor([[1 - 0.05 - 0.1, 2 - 0.1 + 0.1]], dtype=torch.float64)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(optim.slots["exp_avg"]["a.weight"], 0.1 * weight.grad)
    torch.testing.assert_close(optim.slots["exp_avg_sq"]["a.weight"], 0.05 * weight.grad**2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_follow_float32_masters(dtype: torch.dtype) -> None:
    start = values(0, dtype)
    optim = ours(start)
    exact = {n: p.float() for n, p in start.items()}
    reference, copies = theirs(exact, fused=True)
    for number, lr in enumerate(RATES, 1):
        for name, grad in values(number, dtype).items():
            optim.parameters[name].grad = grad
            copies[name].grad = grad.float()
        for group in reference.param_groups:
            group["lr"] = lr
        optim.step(lr)
        reference.step()
    masters = optim.slots["master"]
    assert equal(masters, {n: p.detach() for n, p in copies.items()})
    assert equal(
        {n: p.detach() for n, p in optim.parameters.items()},
        {n: m.to(dtype) for n, m in masters.items()},
    )
    assert {t.dtype for slot in optim.slots.values() for t in slot.values()} == {torch.float32}


def test_wide_parameters_have_no_masters() -> None:
    assert set(ours(values(0)).slots) == {"exp_avg", "exp_avg_sq"}


def test_masters_take_parameters_that_were_loaded_alone() -> None:
    optim = ours(values(0, torch.bfloat16))
    with torch.no_grad():
        optim.parameters["proj.weight"].fill_(3)
    optim.take_masters()
    assert torch.equal(optim.slots["master"]["proj.weight"], torch.full((5, 33), 3.0))


def test_matrices_and_experts_decay_alone() -> None:
    found = {name: decays(name, torch.empty(shape)) for name, shape in SHAPES.items()}
    assert found == {
        "embed_tokens.weight": True,
        "norm.weight": False,
        "proj.weight": True,
        "proj.bias": False,
        "experts.weight": True,
    }
    assert not decays("experts.gate_up_proj.bias", torch.empty(3, 4))


def test_what_is_exempt_does_not_decay() -> None:
    optim = ours(values(0), exempt={"embed_tokens.weight"}, weight_decay=0.5)
    for parameter in optim.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optim.step(0.5)
    for name, start in values(0).items():
        shrunk = 0.75 if name in ("proj.weight", "experts.weight") else 1.0
        assert torch.equal(optim.parameters[name].detach(), start * shrunk), name


def test_state_is_there_before_the_first_step_and_continues_a_run() -> None:
    start = values(0, torch.float32)
    whole, first = ours(start), ours(start)
    train(whole, RATES)
    train(first, RATES[:2])
    second = ours({n: p.detach() for n, p in first.parameters.items()})
    kept = dict(second.slots["exp_avg"])
    second.load_state_dict(first.state_dict())
    assert all(second.slots["exp_avg"][name] is tensor for name, tensor in kept.items())
    assert second.steps == 2
    assert equal(
        train(second, RATES[2:], first=3), {n: p.detach() for n, p in whole.parameters.items()}
    )


def test_a_checkpoint_names_state_by_parameter_and_fills_it_in_place(tmp_path: Path) -> None:
    optim, fresh = (ours(values(0, torch.bfloat16)) for _ in range(2))
    train(optim, RATES[:2])
    checkpointer = Checkpointer(tmp_path.as_uri())
    checkpointer.save(2, {"optim": optim}).wait()
    (manifest,) = tmp_path.rglob("manifest.json")
    stored = json.loads(manifest.read_text())["tensors"]
    assert stored.keys() == {
        f"optim.{s}.{n}" for s in ("exp_avg", "exp_avg_sq", "master") for n in SHAPES
    }
    checkpointer.load({"optim": fresh})
    assert fresh.steps == 2
    for slot in ("exp_avg", "exp_avg_sq", "master"):
        assert equal(fresh.slots[slot], optim.slots[slot])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("exp_avg_sq"), "optim.exp_avg_sq.embed_tokens.weight: missing"),
        (lambda state: state["exp_avg"].pop("proj.bias"), "optim.exp_avg.proj.bias: missing"),
    ],
)
def test_state_that_lacks_something_is_refused(
    change: Callable[[dict[str, Values]], object], message: str
) -> None:
    state = ours(values(0)).state_dict()
    change(state)
    with pytest.raises(MappingError, match=message):
        ours(values(0)).load_state_dict(state)


def test_a_parameter_without_a_gradient_is_an_error_and_nothing_has_moved() -> None:
    optim = ours(values(0))
    for name in ("embed_tokens.weight", "norm.weight", "proj.weight", "experts.weight"):
        optim.parameters[name].grad = torch.ones_like(optim.parameters[name])
    with pytest.raises(RuntimeError, match=r"proj\.bias: has no gradient"):
        optim.step(0.1)
    assert optim.steps == 0
    assert equal({n: p.detach() for n, p in optim.parameters.items()}, values(0))


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_shards_take_the_steps_of_the_whole(dtype: torch.dtype) -> None:
    """Rows over fsdp, uneven and empty (3 or 5 over 4); columns over tp; a vector replicated over tp."""
    cuts = {"proj.weight": None, "experts.weight": Shard(2), "embed_tokens.weight": Shard(0)}
    shapes = {name: SHAPES[name] for name in SHAPES}
    shapes |= {"experts.weight": (3, 4, 6), "embed_tokens.weight": (22, 7)}

    def drawn(draw: int) -> Values:
        out = {}
        for name, shape in shapes.items():
            index = torch.arange(torch.Size(shape).numel()).reshape(shape)
            out[name] = rng.normal(draw, rng.stream(name), index).to(dtype)
        return out

    def work(rank: int) -> tuple[Values, Values, bool]:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
        model = nn.Module()
        for name, value in drawn(0).items():
            place = cuts.get(name) or Replicate()
            part = value.chunk(2, place.dim)[rank % 2] if place.is_shard() else value
            whole = DTensor.from_local(part.contiguous(), mesh["tp"], [place], run_check=False)
            model.register_parameter(name.replace(".", "_"), nn.Parameter(whole))
        fully_shard(model, mesh=mesh["fsdp"])
        parameters = {name: model.get_parameter(name.replace(".", "_")) for name in shapes}
        optim = AdamW(parameters, betas=BETAS, eps=EPS, weight_decay=DECAY)
        for number, lr in enumerate(RATES, 1):
            for name, grad in drawn(number).items():
                optim.parameters[name].grad = _like(grad, parameters[name], rank)
            optim.step(lr)
        alike = all(
            t.placements == parameters[name].placements
            and t.device_mesh == parameters[name].device_mesh
            for slot in optim.slots.values()
            for name, t in slot.items()
        )
        gathered = {n: p.detach().full_tensor() for n, p in parameters.items()}
        moments = {n: m.full_tensor() for n, m in optim.slots["exp_avg_sq"].items()}
        return gathered, moments, alike

    reference = AdamW(
        {n: nn.Parameter(p) for n, p in drawn(0).items()}, betas=BETAS, eps=EPS, weight_decay=DECAY
    )
    for number, lr in enumerate(RATES, 1):
        for name, grad in drawn(number).items():
            reference.parameters[name].grad = grad
        reference.step(lr)
    wide = torch.promote_types(dtype, torch.float32)
    near = (
        {"rtol": 1e-14, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-6}
    )
    for gathered, moments, alike in launch(8, work):
        assert alike
        for name, parameter in reference.parameters.items():
            torch.testing.assert_close(gathered[name], parameter.detach(), **near)
            assert moments[name].dtype == wide
            torch.testing.assert_close(moments[name], reference.slots["exp_avg_sq"][name])


def _like(whole: torch.Tensor, parameter: DTensor, rank: int) -> DTensor:
    """A gradient sharded as its parameter: tp first, then rows over fsdp."""
    fsdp, tp = divmod(rank, 2)
    last = parameter.placements[-1]
    part = whole.chunk(2, last.dim)[tp] if last.is_shard() else whole
    size = -(-len(part) // 4)
    local = part[fsdp * size : (fsdp + 1) * size].contiguous()
    assert isinstance(parameter.placements[0], Shard | _StridedShard)
    assert local.shape == parameter.to_local().shape
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
