"""This rank's stages of a model: built empty, cut over every axis, then given memory."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.models.family import EMBEDDING, HEAD, placements_of
from d9d_ckpt.models.registry import family_of
from d9d_train.layers.dropout import Dropout
from d9d_train.layers.moe import MoE
from d9d_train.layers.recompute import Mode, checkpointed
from d9d_train.mesh import Axis, Mesh
from d9d_train.models.config import Options, read_config
from d9d_train.models.decoder import CausalLM, Stage
from d9d_train.models.registry import build
from d9d_train.optim.shards import shard
from d9d_train.parallel import context, expert, fsdp, tensor
from d9d_train.parallel.init import fill
from d9d_train.parallel.roles import check, roles


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How stages are cut and computed.

    Attributes:
        context: Flavour of context parallelism.
        stored: Dtype of parameters.
        compute: Dtype of computation.
        reshard: Free gathered parameters between forward and backward.
        recompute: Activation checkpointing.
        compile: Compile the layers.
        balance: Weight of the balance loss of one sequence.
    """

    context: str
    stored: torch.dtype
    compute: torch.dtype
    reshard: bool
    recompute: Mode = "none"
    compile: bool = False
    balance: float = 0.0


def build_stages(
    raw: Mapping[str, Any], mesh: Mesh, options: Options, parallel: Parallel, *, seed: int
) -> dict[int, CausalLM]:
    """The stages of this pipeline rank, with first values.

    Args:
        raw: The model's config.json.
        mesh: This rank's.
        options: What the run asks of the model.
        parallel: How it is cut.
        seed: Of first values, which are the same on every topology.

    Raises:
        LayoutError: The axes do not divide the model, with the numbers.
    """
    layers, rank = read_config(raw).sizes.layers, mesh.axis("pp").rank
    return {
        index: _built(raw, stage, mesh, options, parallel, seed=seed)
        for index, stage in stages_of(mesh.topology, layers, rank).items()
    }


def stages_of(topology: Topology, layers: int, rank: int) -> dict[int, Stage]:
    """What each stage of a pipeline rank holds, by the index of the stage.

    Args:
        topology: The axes, with the stages of a rank.
        layers: Of the model.
        rank: Along pp.
    """
    counts = topology.layers_per_stage(layers)
    firsts = (0, *itertools.accumulate(counts))
    last = len(counts) - 1
    return {
        index: Stage(
            first=index == 0, last=index == last, layers=range(firsts[index], firsts[index + 1])
        )
        for index in range(len(counts))
        if topology.pipeline_rank(index) == rank
    }


def _built(
    raw: Mapping[str, Any],
    stage: Stage,
    mesh: Mesh,
    options: Options,
    parallel: Parallel,
    *,
    seed: int,
) -> CausalLM:
    family = family_of(raw)
    with torch.device("meta"):
        model = build(raw, stage, options).to(parallel.stored)
    config = model.config
    placed = roles(model, placements_of(family, config.sizes))
    check(model, placed, mesh.topology)
    expert.parallelize(model, mesh)
    tensor.parallelize(model, placed, mesh)
    context.parallelize(model, mesh.axis("cp"), parallel.context)
    _cut_sequences(model, mesh, parallel.balance)
    for layer in model.model.layers.values():
        checkpointed(layer, parallel.recompute)
        if parallel.compile:
            _compile(layer)
    fsdp.parallelize(
        model, mesh, compute=parallel.compute, reduce=parallel.stored, reshard=parallel.reshard
    )
    model.to_empty(device=mesh.torch_device)
    fill(
        model,
        placed,
        mesh.topology,
        rank=dist.get_rank(),
        seed=seed,
        std=config.initializer_range,
        vocab=config.sizes.vocab,
    )
    return model


def _compile(layer: nn.Module) -> None:
    """Compile a layer, or what surrounds its experts, which are kernels and FSDP units of their own."""
    mlp = layer.get_submodule("mlp")
    if isinstance(mlp, MoE):
        layer.get_submodule("self_attn").compile()
        mlp.router.compile()
    else:
        layer.compile()


def _cut_sequences(model: nn.Module, mesh: Mesh, balance: float) -> None:
    """Tell what looks at single tokens over which axes a sequence is cut."""
    cut = tuple(axis for name in ("cp", "tp") if (axis := mesh.axis(name)).size > 1)
    tp = mesh.axis("tp")
    for module in model.modules():
        if isinstance(module, MoE):
            module.reduce_axes, module.balance = cut, balance
        elif isinstance(module, Dropout):
            module.tokens = tp if tp.size > 1 else None


def named_parameters(stages: Mapping[int, CausalLM]) -> dict[str, nn.Parameter]:
    """The parameters of this rank's stages, by the names that a checkpoint knows them by.

    Of a tied model both of whose ends are here, in different stages, the embedding: see `follow_tied`.
    """
    out: dict[str, nn.Parameter] = {}
    for _, stage in sorted(stages.items()):
        for name, parameter in stage.named_parameters():
            out.setdefault(saved_name(name, tied=stage.config.sizes.tied), parameter)
    return out


def saved_tensors(stages: Mapping[int, CausalLM]) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers, by the names that a checkpoint knows them by."""
    out: dict[str, torch.Tensor] = {}
    for _, stage in sorted(stages.items()):
        for name, value in stage.state_dict(keep_vars=True).items():
            out.setdefault(saved_name(name, tied=stage.config.sizes.tied), value.detach())
    return out


def saved_name(name: str, *, tied: bool) -> str:
    """The name of a parameter in a checkpoint: a tied head is the embedding."""
    return EMBEDDING if tied and name == HEAD else name


def sum_tied(stages: Mapping[int, CausalLM], mesh: Mesh) -> None:
    """Add up the gradients of embedding and tied head where these are in different stages.

    Two pipeline ranks hold the same shard and exchange its gradient. The sum of two does not depend on
    their order, so the copies stay equal to the bit. On one rank the embedding takes both.
    """
    topology, pp = mesh.topology, mesh.axis("pp")
    ends = topology.pipeline_rank(0), topology.pipeline_rank(topology.pp * topology.virtual - 1)
    here = _tied_ends(stages)
    if len(here) == _BOTH:
        embedding, head = here
        shard(_grad(embedding)).add_(shard(_grad(head)))
        head.grad = None
    elif here and ends[0] != ends[1]:
        _add(shard(_grad(here[0])), ends[1 - ends.index(pp.rank)], pp)


@torch.no_grad()
def follow_tied(stages: Mapping[int, CausalLM]) -> None:
    """Give a tied head of another stage on this rank the values of the embedding, after these changed."""
    here = _tied_ends(stages)
    if len(here) == _BOTH:
        embedding, head = here
        shard(head).copy_(shard(embedding))


_BOTH = 2


def _tied_ends(stages: Mapping[int, CausalLM]) -> list[nn.Parameter]:
    """Embedding and head of a tied model, as far as they are here and not one parameter."""
    found = []
    for _, stage in sorted(stages.items()):
        if stage.config.sizes.tied:
            found += [
                end.weight for end in (stage.model.embed_tokens, stage.lm_head) if end is not None
            ]
    return list(dict.fromkeys(found))


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None  # noqa: S101 - the loss reaches both ends
    return parameter.grad


def _add(mine: torch.Tensor, peer: int, axis: Axis) -> None:
    theirs = torch.empty_like(mine)
    messages = [
        dist.P2POp(dist.isend, mine, group=axis.group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=axis.group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    mine += theirs
