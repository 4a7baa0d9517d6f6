"""The ranks of a topology as device meshes: one set of ranks, three views."""

from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from d9d_ckpt.errors import LayoutError
from d9d_ckpt.layout.topology import Topology


@dataclass(frozen=True)
class Axis:
    """One mesh axis as a layer sees it.

    Attributes:
        size: Ranks along it.
        rank: This rank's place along it.
        group: Their process group.
    """

    size: int
    rank: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Mesh:
    """This rank's place in a topology.

    Attributes:
        topology: Degrees of the six axes.
        device: Device type: ``cpu`` or ``cuda``.
    """

    topology: Topology
    device: str

    @property
    def torch_device(self) -> torch.device:
        """This rank's device."""
        if self.device == "cpu":
            return torch.device("cpu")
        return torch.device(self.device, torch.accelerator.current_device_index())

    @cached_property
    def dense(self) -> DeviceMesh:
        """(pp, dp_replicate, fsdp = dp_shard x cp, tp): where dense parameters live."""
        t = self.topology
        return self._view(pp=t.pp, dp_replicate=t.dp_replicate, fsdp=t.fsdp, tp=t.tp)

    @cached_property
    def expert(self) -> DeviceMesh:
        """(pp, dp_replicate, efsdp, ep): where experts live."""
        t = self.topology
        return self._view(pp=t.pp, dp_replicate=t.dp_replicate, efsdp=t.efsdp, ep=t.ep)

    @cached_property
    def batch(self) -> DeviceMesh:
        """(pp, dp = dp_replicate x dp_shard, cp, tp): which tokens a rank works on."""
        t = self.topology
        return self._view(pp=t.pp, dp=t.dp_replicate * t.dp_shard, cp=t.cp, tp=t.tp)

    def axis(self, name: str) -> Axis:
        """An axis of any of the views.

        Args:
            name: ``pp``, ``dp_replicate``, ``fsdp``, ``tp``, ``efsdp``, ``ep``, ``dp`` or ``cp``.
        """
        for view in (self.dense, self.expert, self.batch):
            if name in (view.mesh_dim_names or ()):
                return Axis(view[name].size(), view.get_local_rank(name), view.get_group(name))
        raise KeyError(name)

    def _view(self, **axes: int) -> DeviceMesh:
        return init_device_mesh(self.device, tuple(axes.values()), mesh_dim_names=tuple(axes))


@cache
def mesh_of(topology: Topology, device: str) -> Mesh:
    """The mesh of the running process group; one per topology, since groups are never given back.

    Raises:
        LayoutError: The topology has more or fewer ranks than were started.
    """
    started = dist.get_world_size()
    if topology.world != started:
        degrees = (topology.pp, topology.dp_replicate, topology.dp_shard, topology.cp, topology.tp)
        raise LayoutError(
            "mesh: pp x dp_replicate x dp_shard x cp x tp = "
            f"{' x '.join(map(str, degrees))} = {topology.world} ranks, but {started} were started"
        )
    return Mesh(topology, device)
