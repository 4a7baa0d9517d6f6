"""Tensor parallelism with sequence parallelism: weights cut over tp, tokens cut between the blocks.

Column-parallel weights compute on the whole sequence, which is gathered before them; row-parallel ones
give partial sums, which are summed and scattered over the sequence after them. What is replicated works
on its own tokens or heads only, so its gradient is a partial sum over tp (`layers.weights.local`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from d9d_ckpt.layout.placement import Cut, Placement
from d9d_train.collectives import gather, reduce_scatter
from d9d_train.layers.embedding import Embedding
from d9d_train.layers.head import LMHead
from d9d_train.layers.linear import Linear
from d9d_train.mesh import Axis, Mesh
from d9d_train.parallel.roles import owners, padded

SEQUENCE = 1
"""Activations are [batch, sequence, ...]."""


def parallelize(model: nn.Module, placed: Mapping[str, Placement], mesh: Mesh) -> None:
    """Cut the parameters of a stage over tp, and let its tokens follow.

    Vocabularies are padded to a multiple of ``vocab_multiple`` x tp. Parameters may be on the meta
    device; their values are not kept.

    Args:
        model: A stage, all of whose parameters are whole.
        placed: The placement of each.
        mesh: This rank's.
    """
    topology = mesh.topology
    for name, _, _, parameter in list(owners(model)):
        cut = placed[name].cut
        shape = padded(tuple(parameter.shape), cut, topology)
        if cut.experts or (topology.tp == 1 and shape == tuple(parameter.shape)):
            continue
        empty = parameter.new_empty(shape)
        if topology.tp > 1:
            empty = _cut(empty, cut, mesh.dense["tp"])
        _replace(model, parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    if topology.tp > 1:
        _follow(model, placed, mesh.axis("tp"))


def _cut(whole: torch.Tensor, cut: Cut, mesh: DeviceMesh) -> DTensor:
    """An empty DTensor of the shape of ``whole``."""
    place: Any = Replicate() if cut.tp is None else Shard(cut.tp)
    shape = list(whole.shape)
    if cut.tp is not None:
        shape[cut.tp] //= mesh.size()
    return DTensor.from_local(
        whole.new_empty(shape),
        mesh,
        [place],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put ``new`` wherever ``old`` is: a tied parameter stays one."""
    for module in model.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, attribute, new)


def _follow(model: nn.Module, placed: Mapping[str, Placement], axis: Axis) -> None:
    """Gather the sequence before column-parallel modules and scatter it after row-parallel ones."""
    for path, module in list(model.named_modules()):
        if isinstance(module, Embedding):
            module.first_row = axis.rank * (module.weight.shape[0] // axis.size)
            _scatter_output(module, axis)
        elif isinstance(module, LMHead):
            module.vocab = axis
            _gather_input(module, axis)
        elif isinstance(module, Linear) and placed[f"{path}.weight"].cut.tp == 1:
            module.bias_scale = float(axis.rank == 0)
            _scatter_output(module, axis)
            _gather_input(model.get_submodule(path.rpartition(".")[0]), axis)


def _gather_input(module: nn.Module, axis: Axis) -> None:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather(args[0], SEQUENCE, axis), *args[1:]

    module.register_forward_pre_hook(hook)


def _scatter_output(module: nn.Module, axis: Axis) -> None:
    def hook(_: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(out, SEQUENCE, axis)

    module.register_forward_hook(hook)
