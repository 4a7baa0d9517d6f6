"""Rows travel to the ranks of their experts and back, gradients with them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import launch
from torch.distributed.tensor import DTensor, Shard

from d9d_ckpt.errors import LayoutError
from d9d_ckpt.layout.topology import Topology
from d9d_train.layers.moe import Experts, MoE, Router
from d9d_train.mesh import Axis, Mesh, mesh_of
from d9d_train.parallel import expert
from d9d_train.parallel.expert import Exchange

WIDTH = 5

LOADS = {
    "even": [[2] * 8] * 4,
    "uneven": [[3, 0, 1, 4, 0, 0, 2, 1], [0, 0, 5, 1, 1, 1, 0, 0], [1] * 8, [0, 2, 0, 2, 0, 2, 0, 9]],
    "one rank has nothing": [[1, 2, 3, 4, 5, 6, 7, 8], [0] * 8, [2] * 8, [1] * 8],
    "all to one rank": [[0, 0, 3, 2, 0, 0, 0, 0], [0, 0, 0, 7, 0, 0, 0, 0], [0] * 8, [0, 0, 1, 0] + [0] * 4],
    "nothing at all": [[0] * 8] * 4,
}  # fmt: skip
"""Rows of 8 experts, by rank."""


def exchange_of(rank: int) -> Exchange:
    return Exchange(Axis(dist.get_world_size(), rank, dist.group.WORLD))


def tagged(counts: list[int], rank: int) -> torch.Tensor:
    """[R, WIDTH]: rows that say their expert, rank and number."""
    rows = [[e, rank, i, 0, 0] for e, count in enumerate(counts) for i in range(count)]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, WIDTH)


@pytest.mark.ranks
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("ep", [2, 4])
def test_rows_come_by_expert_then_rank_then_as_they_were(load: str, ep: int) -> None:
    counts = LOADS[load]

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
        exchange, rows = exchange_of(rank), tagged(counts[rank], rank)
        arrived, local, ticket = exchange.there(rows, torch.tensor(counts[rank]))
        return arrived, local, torch.equal(exchange.back(arrived, ticket), rows)

    held = 8 // ep
    for rank, (arrived, local, same) in enumerate(launch(ep, work)):
        experts = range(rank * held, (rank + 1) * held)
        expected = [
            [e, source, i, 0, 0]
            for e in experts
            for source in range(ep)
            for i in range(counts[source][e])
        ]
        assert arrived.tolist() == expected
        assert local.tolist() == [sum(counts[s][e] for s in range(ep)) for e in experts]
        assert same


@pytest.mark.ranks
@pytest.mark.parametrize("load", LOADS)
def test_gradients_travel_with_their_rows(load: str) -> None:
    """Each expert multiplies by its own number, so a row of another's would show; bit for bit."""
    counts = LOADS[load]

    def work(rank: int) -> tuple[bool, bool]:
        torch.manual_seed(rank)
        exchange, count = exchange_of(rank), torch.tensor(counts[rank])
        rows = torch.randn(sum(counts[rank]), WIDTH, dtype=torch.float64, requires_grad=True)
        slope = torch.randn_like(rows)
        factors = torch.arange(1.0, 9.0, dtype=torch.float64)
        arrived, local, ticket = exchange.there(rows, count)
        mine = factors.view(4, -1)[rank].repeat_interleave(local)
        out = exchange.back(arrived * mine[:, None], ticket)
        out.backward(slope)
        expected = factors.repeat_interleave(count)[:, None]
        return torch.equal(out, rows * expected), torch.equal(rows.grad, slope * expected)

    assert launch(4, work) == [(True, True)] * 4


@pytest.mark.ranks
def test_counts_are_exchanged_once_and_rows_once_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    inner = dist.all_to_all_single

    def counted(out: torch.Tensor, x: torch.Tensor, *args: Any, **more: Any) -> Any:
        sizes.append(tuple(x.shape))
        return inner(out, x, *args, **more)

    monkeypatch.setattr(dist, "all_to_all_single", counted)

    def work(rank: int) -> list[tuple[int, ...]]:
        exchange, rows = exchange_of(rank), tagged([2] * 8, rank)
        arrived, _, ticket = exchange.there(rows, torch.tensor([2] * 8))
        exchange.back(arrived, ticket)
        return sizes

    assert launch(2, work) == [[(8,), (16, WIDTH), (16, WIDTH)]] * 2


def moe(experts: int = 8, routed: int = 8) -> MoE:
    layer = MoE(Router(WIDTH, routed, 2, normalize=True), Experts(experts, WIDTH, 3)).double()
    torch.manual_seed(0)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    return layer


def whole_gradient(weight: torch.nn.Parameter, mesh: Mesh) -> torch.Tensor:
    """The sum over all ranks of a gradient, a shard of which may be theirs."""
    assert weight.grad is not None
    if not isinstance(weight, DTensor):
        return summed(weight.grad, mesh.axis("dp").group)
    local = summed(weight.grad.to_local(), mesh.axis("efsdp").group)
    parts = [torch.empty_like(local) for _ in range(mesh.topology.ep)]
    dist.all_gather(parts, local, group=mesh.axis("ep").group)
    return torch.cat(parts)


def summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.clone()
    dist.all_reduce(out, group=group)
    return out


@pytest.mark.ranks
@pytest.mark.parametrize("choices", [None, (0, 1)], ids=["routed", "all to one rank"])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_layer_over_ranks_is_the_layer_of_one_process(
    ep: int, choices: tuple[int, int] | None
) -> None:
    def work(rank: int) -> dict[str, float]:
        mesh = mesh_of(Topology(dp_shard=4, ep=ep), "cpu")
        torch.manual_seed(1)
        x, slope = torch.randn(2, 4, 3, WIDTH, dtype=torch.float64)
        one, layer = moe(), moe()
        if choices is not None:
            one.replay = torch.tensor([choices] * 12)
            layer.replay = one.replay[:3]
        whole, mine = (part.clone().requires_grad_() for part in (x, x[rank : rank + 1]))
        expected = one(whole)
        expected.backward(slope)
        expert.parallelize(layer, mesh)
        got = layer(mine)
        got.backward(slope[rank : rank + 1])
        pairs = {"y": (got, expected[rank]), "x": (mine.grad, whole.grad[rank])}
        for (name, weight), reference in zip(
            layer.named_parameters(), one.parameters(), strict=True
        ):
            pairs[name] = whole_gradient(weight, mesh), reference.grad
        return {
            name: ((a - b).abs().max() / b.abs().max()).item() for name, (a, b) in pairs.items()
        }

    for errors in launch(4, work):
        assert len(errors) == 5
        assert max(errors.values()) < 1e-14, errors


@pytest.mark.ranks
def test_weights_become_shards_of_all_experts_wherever_they_are() -> None:
    def work(rank: int) -> list[bool]:
        mesh = mesh_of(Topology(dp_shard=4, ep=2), "cpu")
        real, empty, whole = moe(), moe().to("meta"), moe()
        for layer in (real, empty):
            expert.parallelize(layer, mesh)
        held = slice(4 * (rank % 2), 4 * (rank % 2) + 4)
        checks = []
        for shard, meta, all_of_it in zip(
            real.experts.parameters(),
            empty.experts.parameters(),
            whole.experts.parameters(),
            strict=True,
        ):
            checks += [
                torch.equal(shard.to_local(), all_of_it[held]),
                meta.to_local().is_meta and shard.shape == meta.shape == all_of_it.shape,
                shard.placements == meta.placements == (Shard(0),),
                shard.device_mesh.mesh_dim_names == ("ep",),
            ]
        return checks

    assert launch(4, work) == [[True] * 8] * 4


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("experts", "routed", "complaint"),
    [
        (7, 7, "mlp: 7 experts do not divide over ep=2"),
        (4, 8, r"mlp.experts.gate_up_proj.weight: \[4, 6, 5\] holds 4 experts.*among 8"),
    ],
)
def test_experts_that_do_not_fit_are_refused_with_the_numbers(
    experts: int, routed: int, complaint: str
) -> None:
    def work(rank: int) -> None:
        mesh = mesh_of(Topology(dp_shard=2, ep=2), "cpu")
        model = torch.nn.ModuleDict({"mlp": moe(experts, routed)})
        with pytest.raises(LayoutError, match=complaint):
            expert.parallelize(model, mesh)

    launch(2, work)
