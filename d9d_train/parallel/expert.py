"""Expert parallelism: each rank keeps some of the experts, and rows travel to theirs and back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from d9d_ckpt.errors import LayoutError
from d9d_train.collectives import all_to_all
from d9d_train.layers.moe import MoE
from d9d_train.mesh import Axis, Mesh
from d9d_train.parallel.roles import owners


@dataclass(frozen=True)
class Ticket:
    """How rows came, so that they find their way back.

    Attributes:
        sent: Rows that went to each rank.
        received: Rows that came from each rank.
        arrival: [rows received] int64: by place in the order by expert, the place in the order of arrival.
        place: Its inverse.
    """

    sent: list[int]
    received: list[int]
    arrival: torch.Tensor
    place: torch.Tensor


@dataclass(frozen=True)
class Exchange:
    """Rows to the ranks of their experts and back, by all-to-all.

    Nothing is divided: an expert's gradient is the sum over the tokens of all ranks.

    Attributes:
        axis: ep, which divides the experts; rank r keeps the r-th part of them.
    """

    axis: Axis

    def there(
        self, rows: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Ticket]:
        """Bring rows to their experts.

        The host waits for the device once, for the number of rows that each pair of ranks exchanges.

        Args:
            rows: [R, H], sorted by expert.
            counts: [E] int64, rows of each expert.

        Returns:
            Rows [R', H] for this rank's experts, sorted by expert, then by the rank that they came from,
            then as there; how many each of the experts has [E / ep]; and the ticket for `back`.
        """
        by_source = all_to_all(counts, None, None, self.axis).view(self.axis.size, -1)
        mine = counts.view(self.axis.size, -1)
        sent, received = torch.stack([mine, by_source]).sum(2).tolist()
        arrival, place = (_moved(sizes, sum(received)) for sizes in (by_source.T, by_source))
        arrived = all_to_all(rows, sent, received, self.axis)
        ticket = Ticket(sent, received, arrival, place)
        return _permuted(arrived, arrival, place), by_source.sum(0), ticket

    def back(self, rows: torch.Tensor, ticket: Ticket) -> torch.Tensor:
        """[R, H], in the order in which they went `there`."""
        arrived = _permuted(rows, ticket.place, ticket.arrival)
        return all_to_all(arrived, ticket.received, ticket.sent, self.axis)


def parallelize(model: nn.Module, mesh: Mesh) -> None:
    """Cut the experts of a stage over ep, and let their rows travel.

    Parameters may be on the meta device. With one rank along ep, nothing changes.

    Args:
        model: A stage whose experts are whole.
        mesh: This rank's.

    Raises:
        LayoutError: The experts do not divide over ep, or a weight is not one slice for each of them.
    """
    axis = mesh.axis("ep")
    if axis.size == 1:
        return
    for name, module in model.named_modules():
        if not isinstance(module, MoE):
            continue
        experts = module.router.weight.shape[0]
        if experts % axis.size:
            raise LayoutError(
                f"{name}: {experts} experts do not divide over ep={axis.size}; "
                "use an ep that divides them"
            )
        for path, owner, attribute, weight in owners(module.experts):
            if weight.shape[0] != experts:
                raise LayoutError(
                    f"{name}.experts.{path}: {list(weight.shape)} holds {weight.shape[0]} experts, "
                    f"but the router chooses among {experts}"
                )
            setattr(owner, attribute, _cut(weight, mesh.expert["ep"], axis))
        module.exchange = Exchange(axis)


def _cut(weight: nn.Parameter, mesh: DeviceMesh, axis: Axis) -> nn.Parameter:
    """This rank's experts, as a shard of all."""
    held = weight.shape[0] // axis.size
    local = weight.detach().narrow(0, axis.rank * held, held).clone()
    shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return nn.Parameter(shard, requires_grad=weight.requires_grad)


def _moved(sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows] int64: the place of each row when blocks that lie by (a, b) are ordered by (b, a).

    Args:
        sizes: [A, B] int64, rows of each block.
        rows: Their sum, known to the host.
    """
    distance = _firsts(sizes.T).T - _firsts(sizes)
    moves = distance.flatten().repeat_interleave(sizes.flatten(), output_size=rows)
    return moves + torch.arange(rows, device=sizes.device)


def _firsts(sizes: torch.Tensor) -> torch.Tensor:
    """[A, B] int64: the first row of each block, blocks lying by (a, b)."""
    flat = sizes.flatten()
    return (flat.cumsum(0) - flat).view(sizes.shape)


class _Permuted(torch.autograd.Function):
    """Rows in another order; indexing alone would scatter with atomics in backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def _permuted(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return _Permuted.apply(rows, order, inverse)  # type: ignore[no-untyped-call, no-any-return]
