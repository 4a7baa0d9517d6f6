"""First values of a model, each a function of (seed, name, element): equal on every topology."""

from collections.abc import Mapping
from math import prod

import torch
from torch import nn

from d9d_ckpt.errors import LayoutError
from d9d_ckpt.layout.placement import Cut, Placement, held
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.models.family import EMBEDDING
from d9d_ckpt.tensors import Region
from d9d_train import rng
from d9d_train.optim.shards import shard
from d9d_train.parallel.roles import padded

_DRAWN = 1 << 21
"""Elements drawn at once: the numbers behind them take a few times 16 MiB, however large the model."""

_DRAWN_BY_CPU = 1 << 15
"""These stay in a cache, and on one thread: 24 ns an element, against 158 at 2**19."""


@torch.no_grad()
def fill(
    model: nn.Module,
    placed: Mapping[str, Placement],
    topology: Topology,
    *,
    rank: int,
    seed: int,
    std: float,
    vocab: int,
) -> None:
    """Set this rank's shard of every parameter.

    Matrices are normal, norms one, biases zero, and so are vocabulary rows that are padding. A tied
    head draws what its embedding draws. Buffers that are saved start at zero; others are their
    layers' own.

    Args:
        model: A stage on a real device, whose values are of no account.
        placed: The placement of every parameter.
        topology: Whose shards the parameters are.
        rank: This rank in it.
        seed: Of the run.
        std: Standard deviation of matrices, ``initializer_range`` in a config.json.
        vocab: Vocabulary rows without padding.

    Raises:
        LayoutError: A local tensor of another shape than the topology gives it, or a vector that is
            neither norm nor bias.
    """
    for name, parameter in model.named_parameters():
        placement, shape = placed[name], tuple(parameter.shape)
        if placement.cut.vocab:
            shape = (vocab, *shape[1:])
        local, boxes = _shard(name, parameter, shape, placement.cut, topology, rank)
        if name.endswith(".bias"):
            local.zero_()
        elif _is_norm(name):
            local.fill_(1)
        elif len(shape) > 1:
            stream = rng.stream(EMBEDDING if placement.tied else name)
            _draw(local, boxes, shape, seed, stream, std)
        else:
            raise LayoutError(f"{name}: a vector that is neither norm nor bias has no first values")
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved:
            buffer.zero_()


def _is_norm(name: str) -> bool:
    return "norm" in name.rpartition(".")[0].rpartition(".")[2]


def _shard(
    name: str,
    parameter: torch.Tensor,
    shape: tuple[int, ...],
    cut: Cut,
    topology: Topology,
    rank: int,
) -> tuple[torch.Tensor, tuple[Region, ...]]:
    """The local tensor, and what its rows are of a global one of ``shape``, its padding left out."""
    local, live = shard(parameter), padded(shape, cut, topology)
    if live != tuple(parameter.shape):
        multiple = topology.vocab_multiple * topology.tp if cut.vocab else 1
        raise LayoutError(
            f"{name}: expected {list(live)}, {shape[0]} rows padded to a multiple of {multiple}, "
            f"found {list(parameter.shape)}"
        )
    at = rank % (topology.fsdp * topology.tp)
    whole = held(live, cut, topology)[at]
    rows = sum(box.shape[0] for box in whole)
    expected = (rows, *whole[0].shape[1:]) if whole else (0,)
    if tuple(local.shape) != expected and (rows or local.numel()):
        raise LayoutError(
            f"{name}: expected {list(expected)} of {list(live)} on rank {rank}, found "
            f"{list(local.shape)}; the model is parallelised for another topology"
        )
    return local, held(shape, cut, topology)[at]


def _draw(
    local: torch.Tensor,
    boxes: tuple[Region, ...],
    shape: tuple[int, ...],
    seed: int,
    stream: int,
    std: float,
) -> None:
    """Normal values for what the boxes cover, zero below."""
    row, most = 0, _DRAWN_BY_CPU if local.is_cpu else _DRAWN
    for box in boxes:
        rows = local.narrow(0, row, box.shape[0])
        for slab in box.slabs(most):
            values = rng.normal(seed, stream, _index(slab, shape, local.device)) * std
            # By way of float32, as a cast of float64 to bfloat16 goes anyway on some devices.
            part = values.to(torch.promote_types(local.dtype, torch.float32))
            _part(rows, slab.within(box)).copy_(part)
        row += box.shape[0]
    local[row:].zero_()


def _index(box: Region, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Row-major index in a tensor of ``shape`` of each element of a box, int64 of the box's shape."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        stride = prod(shape[dim + 1 :])
        along = torch.arange(start, start + length, device=device) * stride
        index = index.unsqueeze(-1) + along
    return index


def _part(tensor: torch.Tensor, box: Region) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
