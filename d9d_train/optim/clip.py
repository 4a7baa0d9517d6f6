"""The norm of all gradients, whatever ranks hold of them, and scaling them down to a bound."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from d9d_ckpt.errors import LayoutError
from d9d_train.optim.shards import shard


def replicas(tensor: torch.Tensor, ranks: int) -> int:
    """How many of ``ranks`` hold what this one holds of a tensor.

    Args:
        tensor: A parameter or its gradient; a plain tensor is whole on every rank.
        ranks: Those of one pipeline rank; axes that the tensor's mesh lacks replicate it.

    Raises:
        LayoutError: A gradient that ranks have yet to sum.
    """
    if not isinstance(tensor, DTensor):
        return ranks
    shards = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_partial():
            raise LayoutError(
                f"a gradient of {list(tensor.shape)} is {placement} on its mesh, a sum not yet made; "
                "it has no norm before it is reduced"
            )
        shards *= 1 if placement.is_replicate() else size
    return ranks // shards


@torch.no_grad()
def total_norm(
    grads: Sequence[torch.Tensor], replicas: Sequence[int], device: torch.device
) -> torch.Tensor:
    """The 2-norm of the gradients of all ranks as one vector, without waiting for the device.

    Every rank of the world calls it, one without gradients too. In float64 throughout: one scalar a
    tensor costs nothing, and float32 sums on a CPU are 0.5% wrong at 2**26 elements.

    Args:
        grads: This rank's; of DTensors the local shard counts.
        replicas: How many ranks hold the same shard as this one, per gradient; 0 leaves it out, as
            the second copy of a tied head.
        device: Where the answer is wanted.

    Returns:
        A float64 scalar on every rank; NaN or inf if any gradient is.
    """
    counted = [(shard(g), n) for g, n in zip(grads, replicas, strict=True) if n]
    held = [(g, n) for g, n in counted if g.numel()]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if held:
        norms = torch._foreach_norm([g for g, _ in held], 2, dtype=torch.float64)  # noqa: SLF001
        squares = torch._foreach_mul(norms, norms)  # noqa: SLF001
        torch._foreach_div_(squares, [float(n) for _, n in held])
        total += torch.stack(squares).sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_(grads: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients by ``max_norm / norm`` where that is below 1, without waiting for the device.

    A norm that is not finite makes them NaN or zero: the caller skips the step.

    Args:
        grads: This rank's.
        norm: Their `total_norm`.
        max_norm: The bound.
    """
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in map(shard, grads):
        if grad.numel():
            by_dtype.setdefault(grad.dtype, []).append(grad)
    for dtype, alike in by_dtype.items():
        torch._foreach_mul_(alike, scale.to(dtype))
