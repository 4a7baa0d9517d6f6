"""The norm over ranks that hold shards, replicas and experts is the norm of the whole, in float64."""

import math

import pytest
import torch
from helpers.ranks import launch
from helpers.topologies import Meshes, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from d9d_ckpt.errors import LayoutError
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.models.family import EMBEDDING, HEAD
from d9d_train import rng
from d9d_train.optim.clip import clip_, replicas, total_norm

CPU = torch.device("cpu")
Values = dict[str, torch.Tensor]


def gradients(shapes: dict[str, tuple[int, ...]], scale: float = 1.0) -> Values:
    """Of very different sizes from one tensor to the next, so that each counts."""
    out = {}
    for number, (name, shape) in enumerate(shapes.items()):
        index = torch.arange(torch.Size(shape).numel()).reshape(shape)
        out[name] = rng.normal(1, rng.stream(name), index) * scale * 2.0 ** (number % 5 - 2)
    return out


def reference(grads: Values, max_norm: float) -> tuple[float, Values]:
    """What torch makes of all gradients on one process."""
    parameters = {name: nn.Parameter(torch.empty_like(grad)) for name, grad in grads.items()}
    for name, parameter in parameters.items():
        parameter.grad = grads[name].clone()
    norm = nn.utils.clip_grad_norm_(parameters.values(), max_norm)
    return norm.item(), {name: p.grad for name, p in parameters.items()}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("topology", "tied"),
    [
        (Topology(dp_shard=4, tp=2, ep=4), False),
        (Topology(dp_replicate=2, dp_shard=2, tp=2, ep=2), False),
        (Topology(dp_replicate=8), False),
        (Topology(dp_shard=2, cp=4, ep=1), False),
        (Topology(pp=2, dp_shard=2, cp=2), False),
        (Topology(pp=2, dp_shard=2, tp=2, ep=2), True),
    ],
    ids=["experts", "hsdp", "replicas", "uneven", "stages", "tied"],
)
def test_it_is_the_norm_of_the_whole_on_every_rank(topology: Topology, tied: bool) -> None:
    made = whole("qwen3_moe", vocab=20, tied=tied)
    placements, layers = made.mapped.placements, made.config.layers
    grads = gradients({name: tuple(t.shape) for name, t in made.tensors.items()})
    norm, clipped = reference(grads, 1.5)

    def work(rank: int) -> tuple[float, float, bool]:
        meshes = Meshes.make(topology, rank)
        here = [name for name in grads if meshes.holds(placements[name], layers)]
        local = {n: meshes.sharded(grads[n].clone(), placements[n].cut) for n in here}
        counts = {n: replicas(g, topology.stage_ranks) for n, g in local.items()}
        if tied and meshes.stage == topology.pp - 1:
            local[HEAD], counts[HEAD] = local.pop(EMBEDDING), 0
            counts.pop(EMBEDDING)
        found = total_norm(list(local.values()), [counts[n] for n in local], CPU)
        clip_(list(local.values()), found, 1.5)
        worst = 0.0
        for name, grad in local.items():
            source = EMBEDDING if tied and name == HEAD else name
            expected = meshes.sharded(clipped[source], placements[source].cut).to_local()
            if expected.numel():
                worst = max(
                    worst, ((grad.to_local() - expected).abs() / expected.abs()).max().item()
                )
        return found.item(), worst, any(not g.to_local().numel() for g in local.values())

    outcomes = launch(8, work)
    for found, worst, _ in outcomes:
        assert found == pytest.approx(norm, rel=1e-14, abs=0)
        assert worst < 1e-14
    assert len({found for found, _, _ in outcomes}) == 1
    assert norm > 1.5
    if topology.fsdp == 8:
        assert any(empty for _, _, empty in outcomes)


@pytest.mark.ranks
def test_dense_expert_and_plain_gradients_and_a_rank_without_any_mix() -> None:
    """Meshes that lack axes: fsdp alone, ep alone; rank 3 of another stage has no gradients."""
    grads = gradients({"rows": (5, 3), "experts": (4, 2), "plain": (7,)})
    norm, _ = reference(grads, 1.0)

    def work(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
        part = rank % 2
        rows = grads["rows"][3 * part : 3 * part + 3]
        dense = DTensor.from_local(
            rows, mesh["fsdp"], [Shard(0)], run_check=False, shape=(5, 3), stride=(3, 1)
        )
        experts = DTensor.from_local(
            grads["experts"].chunk(2)[part], mesh["fsdp"], [Shard(0)], run_check=False
        )
        held = [dense, experts, grads["plain"]] if rank < 2 else []
        return total_norm(held, [replicas(g, 2) for g in held], CPU).item()

    assert launch(4, work) == pytest.approx([norm] * 4, rel=1e-14, abs=0)


@pytest.mark.ranks
def test_replicas_follow_from_placements_and_missing_axes_replicate() -> None:
    def work(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        part = torch.ones(2, 2)
        both = DTensor.from_local(part, mesh, [Shard(0), Shard(1)], run_check=False)
        rows = DTensor.from_local(part, mesh, [Shard(0), Replicate()], run_check=False)
        alone = DTensor.from_local(part, mesh["tp"], [Shard(0)], run_check=False)
        with pytest.raises(LayoutError, match="a sum not yet made"):
            replicas(DTensor.from_local(part, mesh, [Shard(0), Partial()], run_check=False), 8)
        return [replicas(t, 8) for t in (both, rows, alone, part)]

    assert launch(4, work) == [[2, 4, 4, 8]] * 4


def test_one_process_clips_as_torch_does() -> None:
    grads = gradients({"a": (40, 30), "b": (17,), "c": (0, 3)})
    for max_norm in (1e-3, 1.0, 1e3, math.inf):
        norm, expected = reference(grads, max_norm)
        found = {name: grad.clone() for name, grad in grads.items()}
        total = total_norm(list(found.values()), [1, 1, 1], CPU)
        clip_(list(found.values()), total, max_norm)
        assert total.item() == pytest.approx(norm, rel=1e-15)
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-15, atol=0)


def test_gradients_below_the_bound_keep_their_bits() -> None:
    grads = gradients({"a": (40, 30)})
    before = grads["a"].clone()
    clip_([grads["a"]], total_norm([grads["a"]], [1], CPU), 1e6)
    assert torch.equal(grads["a"], before)


def test_large_float32_gradients_are_summed_in_float64() -> None:
    """A CPU would be off by 1.3% in float32, and infinite where squares are above 3e38."""
    grad = torch.full((1 << 24,), 0.3)
    exact = math.sqrt(1 << 24) * torch.tensor(0.3).double().item()
    assert total_norm([grad], [1], CPU).item() == pytest.approx(exact, rel=1e-9)
    assert total_norm([torch.full((4,), 1e30)], [1], CPU).item() == pytest.approx(2e30, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_and_mixed_gradients(dtype: torch.dtype) -> None:
    grads = gradients({"a": (40, 30), "b": (17,)})
    mixed = [grads["a"].to(dtype), grads["b"]]
    exact = torch.cat([g.double().flatten() for g in mixed]).norm()
    total = total_norm(mixed, [1, 1], CPU)
    assert total.item() == pytest.approx(exact.item(), rel=1e-14)
    clip_(mixed, total, exact.item() / 4)
    assert [g.dtype for g in mixed] == [dtype, torch.float64]
    assert torch.equal(mixed[0], grads["a"].to(dtype) * (1 / (4 + 4e-6 / exact)).to(dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_handed_on(bad: float) -> None:
    grads = [torch.ones(3), torch.tensor([1.0, bad])]
    total = total_norm(grads, [1, 1], CPU)
    assert not math.isfinite(total.item())
    clip_(grads, total, 1.0)
    assert not torch.isfinite(grads[1]).all()


def test_no_gradients_have_norm_zero() -> None:
    assert total_norm([], [], CPU).item() == 0
    assert total_norm([torch.ones(3)], [0], CPU).item() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gpu_sums_in_float64(dtype: torch.dtype) -> None:
    grads = [g.to(dtype) for g in gradients({"a": (400, 300), "b": (17,), "c": (0, 3)}).values()]
    there = [g.cuda() for g in grads]
    total = total_norm(there, [1, 1, 1], torch.device("cuda"))
    exact = total_norm(grads, [1, 1, 1], CPU)
    assert total.item() == pytest.approx(exact.item(), rel=1e-13)
    clip_(there, total, exact.item() / 4)
    clip_(grads, exact, exact.item() / 4)
    for a, b in zip(there, grads, strict=True):
        torch.testing.assert_close(a.cpu(), b)
