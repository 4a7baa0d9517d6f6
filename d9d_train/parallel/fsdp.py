"""Sharded and replicated data parallelism: FSDP2, with sums in place of means."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import Shard

from d9d_ckpt.layout.topology import Topology
from d9d_train.layers.moe import Experts
from d9d_train.mesh import Mesh
from d9d_train.models.decoder import CausalLM


def parallelize(
    model: CausalLM,
    mesh: Mesh,
    *,
    compute: torch.dtype,
    reduce: torch.dtype,
    reshard: bool,
) -> None:
    """Shard a stage's parameters: dense ones over fsdp, experts over efsdp; both replicated over dp_replicate.

    Gradients are summed over those ranks and divided by nothing: the loss is a sum over tokens that is
    already divided by their global count.

    Args:
        model: A stage; tp and ep have cut it already.
        mesh: This rank's.
        compute: Dtype of gathered parameters and of activations.
        reduce: Dtype in which gradients are summed.
        reshard: Free gathered parameters between forward and backward.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    dense = partial(fully_shard, mesh=_shards(mesh.dense, "fsdp"), mp_policy=policy)
    # Rows come in the compute dtype; their weights stay as wide as the router made them.
    sparse = partial(
        fully_shard,
        mesh=_shards(mesh.expert, "efsdp"),
        mp_policy=replace(policy, cast_forward_inputs=False),
    )
    for module in list(model.modules()):
        if isinstance(module, Experts):
            place = partial(_expert_shard, mesh.topology)
            sparse(module, reshard_after_forward=reshard, shard_placement_fn=place)
    for layer in model.model.layers.values():
        dense(layer, reshard_after_forward=reshard)
    dense(model, reshard_after_forward=False)
    topology = mesh.topology
    for unit in units(model):
        shards = topology.efsdp if isinstance(unit, Experts) else topology.fsdp
        if shards * topology.dp_replicate == 1:
            unit.set_custom_reduce_scatter(_Alone())
        else:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


class _Alone(ReduceScatter):
    """Gradients of a rank that shares nothing: the buffer that they are cast into is the result.

    FSDP2 asks for the input and for the output of each reduction in turn, of one size where there is one
    rank, and copies the first to the second; the same tensor twice spares 8 bytes a parameter.
    """

    def __init__(self) -> None:
        self._input: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A new tensor for the input, then the same one for the output."""
        given, self._input = self._input, None
        if given is None:
            given = self._input = torch.empty(*size, dtype=dtype, device=device)
        return given

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum over one rank."""
        output_tensor.copy_(input_tensor)


def _shards(view: DeviceMesh, shard: str) -> DeviceMesh:
    """The mesh that FSDP2 takes: (replicate, shard), or (shard,) when nothing is replicated."""
    return view["dp_replicate", shard] if view["dp_replicate"].size() > 1 else view[shard]


def _expert_shard(topology: Topology, weight: nn.Parameter) -> Shard:
    """Whole experts where there are enough for efsdp, else their rows (`d9d_ckpt.layout.placement.held`)."""
    return Shard(0 if weight.shape[0] // topology.ep >= topology.efsdp else 1)


def units(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules that are gathered as one."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def synchronise(model: nn.Module, *, last: bool, reshard: bool) -> None:
    """What the next backward passes of a stage do.

    Args:
        model: The stage.
        last: They are the last of a step: gradients are reduced, and what is gathered is freed.
        reshard: Free what is gathered after any backward pass.
    """
    assert isinstance(model, FSDPModule)  # noqa: S101 - for the type checker
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last or reshard)
