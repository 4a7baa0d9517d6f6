"""A mesh of one process, over which the peers shard as we do."""

import os
import socket
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def name_rank() -> None:
    """Set what torchrun would: the only rank of a world of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )


def join(device: str) -> None:
    """Start the process group of one."""
    name_rank()
    dist.init_process_group("gloo" if device == "cpu" else "nccl")


def shard_on_one(model: nn.Module, layers: Iterable[nn.Module], device: str) -> None:
    """FSDP2 by layer: float32 parameters, gradients and states; bf16 computation."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": init_device_mesh(device, (1,)), "mp_policy": policy}
    for unit in (*layers, model):
        fully_shard(unit, reshard_after_forward=False, **options)
