"""A model's training tensors as the DTensors that each rank of a topology holds."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from helpers.families import checkpoint, forward, read, small
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from d9d_ckpt.layout.placement import Cut, held
from d9d_ckpt.layout.topology import Topology
from make_checkpoint import Config, config_json


@dataclass(frozen=True)
class Whole:
    """All of a model: tensors under their training names, and how a family cuts them."""

    config: Config

    @cached_property
    def mapped(self) -> Any:
        return forward(self.config, checkpoint(self.config))

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return read(self.mapped, checkpoint(self.config))

    @property
    def json(self) -> dict[str, Any]:
        return config_json(self.config)


def whole(family: str, **sizes: Any) -> Whole:
    return Whole(small(family, **sizes))


@dataclass(frozen=True)
class Meshes:
    """The meshes of one topology: dense and expert views of the same ranks."""

    topology: Topology
    dense: DeviceMesh
    expert: DeviceMesh
    rank: int

    @classmethod
    def make(cls, t: Topology, rank: int) -> "Meshes":
        dense = init_device_mesh(
            "cpu", (t.pp, t.dp_replicate, t.fsdp, t.tp), mesh_dim_names=("pp", "rep", "fsdp", "tp")
        )
        expert = init_device_mesh(
            "cpu",
            (t.pp, t.dp_replicate, t.efsdp, t.ep),
            mesh_dim_names=("pp", "rep", "efsdp", "ep"),
        )
        return cls(t, dense["rep", "fsdp", "tp"], expert["rep", "efsdp", "ep"], rank)

    @property
    def stage(self) -> int:
        return self.rank // self.topology.stage_ranks

    def holds(self, placement: Any, layers: int) -> bool:
        """Whether a tensor is on this rank's pipeline stage."""
        t = self.topology
        stages = {placement.stage}
        if placement.tied:
            stages.add("last")
        mine = {
            "first": t.pipeline_rank(0),
            "last": t.pipeline_rank(t.pp - 1),
            **dict(enumerate(t.pipeline_rank_of_layers(layers))),
        }
        return self.stage in {mine[stage] for stage in stages}

    def sharded(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """The DTensor that this rank holds; its bytes by the family's table, not by torch."""
        t = self.topology
        if not tensor.dim():
            return tensor.clone()
        flat = self.rank % (t.fsdp * t.tp)
        boxes = held(tuple(tensor.shape), cut, t)[flat]
        parts = [tensor[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] for box in boxes]
        local = torch.cat(parts) if parts else self._empty(tensor, cut)
        mesh = self.expert if cut.experts else self.dense
        return DTensor.from_local(
            local.clone(),
            mesh,
            self._placements(tensor, cut),
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _empty(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        t = self.topology
        width = list(tensor.shape)
        if cut.tp not in (None, 0):
            width[cut.tp] //= t.tp
        return tensor.new_empty(0, *width[1:])

    def _placements(self, tensor: torch.Tensor, cut: Cut) -> list[Placement]:
        t = self.topology
        if cut.experts:
            rows = tensor.shape[0] // t.ep >= t.efsdp
            inner = (
                _StridedShard(0, split_factor=t.ep)
                if rows and t.ep > 1
                else Shard(0 if rows else 1)
            )
            return [Replicate(), inner, Shard(0)]
        if cut.tp is None or t.tp == 1:
            return [Replicate(), Shard(0), Replicate()]
        if cut.tp == 0:
            return [Replicate(), _StridedShard(0, split_factor=t.tp), Shard(0)]
        return [Replicate(), Shard(0), Shard(cut.tp)]


def state_of(made: Whole, meshes: Meshes, *, offset: float = 0.0) -> dict[str, torch.Tensor]:
    """What this rank holds of a model; ``offset`` is added to every element."""
    out = {}
    for name, tensor in made.tensors.items():
        placement = made.mapped.placements[name]
        if meshes.holds(placement, made.config.layers):
            out[name] = meshes.sharded(tensor + offset, placement.cut)
    return out
