"""Two parts of a backward pass under FSDP2: gradients of one process, reduced once, at the end of a step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import launch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from d9d_train.batch import Batch
from d9d_train.layers.weights import local
from d9d_train.mesh import Axis
from d9d_train.parallel.fsdp import synchronise, units
from d9d_train.parallel.pipeline.actions import parse
from d9d_train.parallel.pipeline.communicate import with_communication
from d9d_train.parallel.pipeline.run import Executor
from d9d_train.parallel.pipeline.sharded import perform, weights

SIZE, LENGTH, WIDTH, MICROBATCHES, SCALE = 2, 3, 8, 4, 0.125
STAGES, UNITS = 2, 3

SPLIT = """0F0,0F1,0I0,0F2,0I1,0W1,0F3,0W0,0I2,0I3,0W2,0W3
1F0,1I0,1F1,1I1,1F2,1W0,1I2,1F3,1W2,1W1,1I3,1W3"""
ENDS_WHOLE = """0F0,0F1,0I0,0F2,0I1,0F3,0W1,0I2,0W0,0W2,0B3
1F0,1I0,1F1,1I1,1W0,1F2,1B2,1F3,1W1,1B3"""
EXPLICIT = """0UNSHARD,0F0,0F1,0I0,0F2,0I1,0W1,0RESHARD,0F3,0W0,0I2,0W2,0B3,0REDUCE_GRAD
1F0,1I0,1F1,1I1,1F2,1RESHARD,1W0,1I2,1F3,1UNSHARD,1W2,1W1,1I3,1W3,1REDUCE_GRAD"""
PROGRAMS = {"split": SPLIT, "ends-whole": ENDS_WHOLE, "explicit": EXPLICIT}
WHOLE = """0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3
1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"""
IN_A_ROW = """0F0,0F1,0F2,0F3,0I0,0I1,0I2,0I3,0W0,0W1,0W2,0W3
1F0,1F1,1F2,1F3,1I0,1I1,1I2,1I3,1W0,1W1,1W2,1W3"""


class Unmasked(torch.autograd.Function):
    """Computes all that it can whenever it is called, for which it reads its weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.flatten(0, 1).T @ grad.flatten(0, 1)


class Experts(nn.Module):
    """A unit of its own; what it gives comes straight from a weight, so its hook runs in both parts."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.flatten(0, 1)) @ local(self.rows)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.up = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.rms_norm(x, (WIDTH,), local(self.gain))
        return x + self.experts(torch.tanh(Unmasked.apply(h, local(self.up)))).view_as(x)


class Stage(nn.Module):
    """Without an input it makes one; the last gives a sum."""

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.last = index == STAGES - 1
        self.bias, self.phase = (nn.Parameter(torch.randn(WIDTH)) for _ in "ab")
        self.layer = Layer()
        self.to(dtype)

    def forward(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        bias = local(self.bias)
        x = drawn(batch).to(bias.dtype) if hidden is None else hidden
        x = self.layer(x + bias) * torch.cos(local(self.phase))
        return x.square().sum() if self.last else x


def drawn(batch: Batch) -> torch.Tensor:
    torch.manual_seed(int(batch.samples[0]))
    return torch.randn(SIZE, LENGTH, WIDTH, dtype=torch.float64)


def microbatch(number: int) -> Batch:
    tokens = torch.zeros(SIZE, LENGTH, dtype=torch.int64)
    samples = torch.full((SIZE,), number)
    return Batch(tokens, tokens, torch.arange(LENGTH), tokens, samples, packed=False)


def alone(microbatches: int) -> list[Stage]:
    """Stages with the gradients of a step."""
    stages = [Stage(index, torch.float64) for index in range(STAGES)]
    for number in range(microbatches):
        x = None
        for stage in stages:
            x = stage(x, microbatch(number))
        (x * SCALE).backward()
    return stages


class Reducing(DefaultReduceScatter):
    """Counts reductions."""

    count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().__call__(*args, **kwargs)


class Gathering(DefaultAllGather):
    """Counts gathers."""

    count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().__call__(*args, **kwargs)


def sharded(index: int, mesh: DeviceMesh, dtype: torch.dtype, *, reshard: bool) -> Stage:
    """Dense parameters replicated over tp and sharded over fsdp, those of experts sharded over both."""
    stage, policy = Stage(index, torch.float64), MixedPrecisionPolicy(dtype, torch.float64)
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if "tp" in mesh.mesh_dim_names and not isinstance(module, Experts):
                whole = distribute_tensor(parameter.detach(), mesh["tp"], [Replicate()])
                module.register_parameter(name, nn.Parameter(whole))
    both = mesh["fsdp", "tp"]._flatten() if "tp" in mesh.mesh_dim_names else mesh["fsdp"]
    fully_shard(stage.layer.experts, mesh=both, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(stage.layer, mesh=mesh["fsdp"], mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(stage, mesh=mesh["fsdp"], mp_policy=policy, reshard_after_forward=False)
    for unit in units(stage):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return stage


def step(
    text: str, mesh: DeviceMesh, *, dtype: torch.dtype = torch.float64, reshard: bool = False
) -> tuple[Stage, int, int]:
    """A step of a program by all ranks, each data rank with micro-batches of its own.

    Returns:
        The stage of this rank; how often its units were reduced, and how often gathered.
    """
    pp, program = mesh.get_local_rank("pp"), with_communication(parse(text))
    ranks = program.microbatches * (dist.get_rank() % (mesh.size() // STAGES))
    stage = sharded(pp, mesh, dtype, reshard=reshard)

    def spec(batch: Batch) -> tuple[Sequence[int], torch.dtype]:
        return (SIZE, LENGTH, WIDTH), dtype

    executor = Executor(
        {pp: stage},
        program,
        Axis(STAGES, pp, mesh.get_group("pp")),
        spec,
        on_first=lambda _: synchronise(stage, last=False, reshard=reshard),
        on_last_backward=lambda _: synchronise(stage, last=True, reshard=reshard),
        on_weights=lambda _, last: weights(stage, last=last, reshard=reshard),
        on_stage=lambda action: perform(stage, action),
    )
    reducing, gathering = Reducing(), Gathering()
    for unit in units(stage):
        unit.set_custom_reduce_scatter(reducing)
        unit.set_custom_all_gather(gathering)
    executor.step([microbatch(ranks + i) for i in range(program.microbatches)], SCALE)
    return stage, reducing.count, gathering.count


def check(text: str, mesh: DeviceMesh, *, reshard: bool) -> None:
    stage, reduced, gathered = step(text, mesh, reshard=reshard)
    assert reduced == UNITS
    if not reshard and text is not EXPLICIT:
        assert gathered == UNITS
    whole = alone(mesh.size() // STAGES * MICROBATCHES)[mesh.get_local_rank("pp")]
    expected = dict(whole.named_parameters())
    for name, parameter in stage.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found, wanted = parameter.grad.full_tensor(), expected[name].grad
        assert (found - wanted).abs().max() <= 1e-14 * wanted.abs().max(), name


@pytest.mark.ranks
@pytest.mark.parametrize("reshard", [False, True])
def test_gradients_are_those_of_one_process_and_reduced_once(reshard: bool) -> None:
    def work(_: int) -> None:
        mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pp", "fsdp"))
        for text in PROGRAMS.values():
            check(text, mesh, reshard=reshard)

    launch(4, work)


@pytest.mark.ranks
def test_partial_gradients_of_tensor_parallel_weights_and_experts_of_another_mesh() -> None:
    def work(_: int) -> None:
        mesh = init_device_mesh("cpu", (STAGES, 2, 2), mesh_dim_names=("pp", "fsdp", "tp"))
        for text in PROGRAMS.values():
            check(text, mesh, reshard=text is SPLIT)

    launch(8, work)


@pytest.mark.ranks
def test_gradients_of_narrow_weights_add_up_in_the_dtype_of_the_sum() -> None:
    """Several micro-batches in a row give the bits that whole backward passes give."""

    def work(_: int) -> None:
        mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pp", "fsdp"))
        texts = WHOLE, IN_A_ROW
        split, whole = (
            dict(step(t, mesh, dtype=torch.bfloat16)[0].named_parameters()) for t in texts
        )
        for name, parameter in split.items():
            assert torch.equal(parameter.grad.to_local(), whole[name].grad.to_local()), name

    launch(4, work)
