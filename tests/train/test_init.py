"""First values: every rank's shard is the slice of what one process draws, bit for bit."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers.meshes import on_fake_ranks
from helpers.ranks import launch
from helpers.topologies import Meshes, Whole, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from d9d_ckpt.errors import LayoutError
from d9d_ckpt.layout.placement import Cut, Placement, held
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.models.family import EMBEDDING, HEAD
from d9d_train import rng
from d9d_train.parallel import init

ONE = Topology()
VOCAB = 19
"""Divides by no tp."""


def module(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module whose parameters have dotted names, all their values NaN."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        at = root
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(leaf, nn.Parameter(torch.full_like(tensor, torch.nan)))
    return root


def filled(
    tensors: Mapping[str, torch.Tensor],
    placed: Mapping[str, Placement],
    topology: Topology = ONE,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """The local tensors of a model of such parameters, filled."""
    model = module(tensors)
    given = {"rank": 0, "seed": 3, "std": 0.02, "vocab": VOCAB, **settings}
    init.fill(model, placed, topology, **given)
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }


def alone(made: Whole, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    tensors = {name: t.to(dtype) for name, t in made.tensors.items()}
    return filled(tensors, made.mapped.placements)


def padded(tensor: torch.Tensor, cut: Cut, topology: Topology) -> torch.Tensor:
    multiple = topology.vocab_multiple * topology.tp if cut.vocab else 1
    return torch.cat([tensor, tensor.new_empty(-len(tensor) % multiple, *tensor.shape[1:])])


def sharded(made: Whole, topology: Topology, rank: int) -> dict[str, torch.Tensor]:
    """The shards of all tensors that a rank draws."""
    meshes, placements = Meshes.make(topology, rank), made.mapped.placements
    tensors = {
        name: meshes.sharded(padded(tensor, placements[name].cut, topology), placements[name].cut)
        for name, tensor in made.tensors.items()
        if meshes.holds(placements[name], made.config.layers)
    }
    return filled(tensors, placements, topology, rank=rank)


@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("llama", Topology(tp=2, dp_shard=3)),
        ("llama", Topology(pp=2, dp_replicate=2, cp=2)),
        ("qwen2", Topology(tp=2, vocab_multiple=8, dp_shard=2)),
        ("qwen3_moe", Topology(dp_shard=2, tp=2, ep=2)),
        ("qwen3_moe", Topology(dp_shard=2, cp=2, tp=2, ep=4, vocab_multiple=4)),
        ("qwen3_moe", Topology(dp_shard=4, ep=1)),
    ],
    ids=["rows", "stages", "vocab", "experts", "experts-rows", "experts-whole"],
)
@pytest.mark.ranks
def test_every_shard_is_the_slice_of_what_one_process_draws(
    family: str, topology: Topology
) -> None:
    made = whole(family, vocab=VOCAB)
    expected = alone(made)
    drawn = on_fake_ranks(topology.world, lambda rank: sharded(made, topology, rank))
    assert {name for shards in drawn for name in shards} == expected.keys()
    for rank, shards in enumerate(drawn):
        for name, shard in shards.items():
            cut = made.mapped.placements[name].cut
            everything = padded(expected[name], cut, topology)
            everything[len(expected[name]) :] = 0
            at = rank % (topology.fsdp * topology.tp)
            boxes = held(tuple(everything.shape), cut, topology)[at]
            parts = [everything[tuple(map(slice, b.start, b.stop))] for b in boxes]
            assert torch.equal(shard, torch.cat(parts) if parts else shard[:0]), (rank, name)


@pytest.mark.ranks
def test_what_fully_shard_gathers_is_what_one_process_draws() -> None:
    """Through torch's own placements: uneven rows over fsdp, columns over tp, an empty shard."""
    shapes = {"a.weight": (7, 6), "b.weight": (3, 10), "c.weight": (10, 5), "d_norm.weight": (5,)}
    cuts = {"a.weight": Cut(), "b.weight": Cut(tp=1, units=2), "c.weight": Cut(tp=0, units=2)}
    placed = {name: Placement(0, cuts.get(name, Cut())) for name in shapes}
    tensors = {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}

    def work(rank: int) -> dict[str, torch.Tensor]:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
        model = module(tensors)
        for name, cut in cuts.items():
            if cut.tp is not None:
                owner = model.get_submodule(name.split(".")[0])
                local = owner.weight.detach().chunk(2, cut.tp)[rank % 2].contiguous()
                weight = DTensor.from_local(local, mesh["tp"], [Shard(cut.tp)], run_check=False)
                owner.weight = nn.Parameter(weight)
        fully_shard(model, mesh=mesh["fsdp"])
        topology = Topology(dp_shard=4, tp=2)
        init.fill(model, placed, topology, rank=rank, seed=3, std=0.02, vocab=VOCAB)
        return {name: p.detach().full_tensor() for name, p in model.named_parameters()}

    expected = filled(tensors, placed)
    for gathered in launch(8, work):
        assert gathered.keys() == expected.keys()
        assert all(torch.equal(gathered[name], expected[name]) for name in expected)


def test_values_follow_the_rules_and_the_counters() -> None:
    made = whole("qwen2", vocab=VOCAB)
    drawn = alone(made)
    assert any(name.endswith(".bias") for name in drawn)
    for name, tensor in drawn.items():
        if name.endswith(".bias"):
            expected = torch.zeros_like(tensor)
        elif "norm" in name:
            expected = torch.ones_like(tensor)
        else:
            index = torch.arange(tensor.numel()).reshape(tensor.shape)
            expected = rng.normal(3, rng.stream(name), index) * 0.02
        assert torch.equal(tensor, expected), name


def test_a_tied_head_of_another_stage_draws_what_the_embedding_draws() -> None:
    placement = Placement("first", Cut(tp=0, vocab=True), tied=True)
    weights = dict.fromkeys((EMBEDDING, HEAD), torch.empty(VOCAB, 4))
    drawn = filled(weights, dict.fromkeys(weights, placement))
    assert torch.equal(drawn[EMBEDDING], drawn[HEAD])
    untied = filled(weights, dict.fromkeys(weights, placement._replace(tied=False)))
    assert torch.equal(untied[EMBEDDING], drawn[EMBEDDING])
    assert not torch.equal(untied[HEAD], drawn[HEAD])


def test_a_narrower_dtype_holds_the_same_values_rounded() -> None:
    made = whole("llama", vocab=VOCAB)
    exact, single, half = (alone(made, d) for d in (torch.float64, torch.float32, torch.bfloat16))
    for name, values in exact.items():
        assert torch.equal(single[name], values.float())
        assert torch.equal(half[name], values.float().bfloat16())


def test_large_tensors_are_drawn_in_parts_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    made = whole("qwen3_moe", vocab=VOCAB)
    expected = alone(made)
    monkeypatch.setattr(init, "_DRAWN_BY_CPU", 100)
    assert all(torch.equal(t, expected[name]) for name, t in alone(made).items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_fills_the_same_bits(dtype: torch.dtype) -> None:
    made = whole("qwen3_moe", vocab=VOCAB)
    there = {name: t.to("cuda", dtype) for name, t in made.tensors.items()}
    expected = alone(made, dtype)
    for name, tensor in filled(there, made.mapped.placements).items():
        assert torch.equal(tensor.cpu(), expected[name]), name


def test_saved_buffers_start_at_zero_and_others_are_left() -> None:
    model = module({"router.weight": torch.empty(4, 2)})
    router = model.get_submodule("router")
    router.register_buffer("bias", torch.full((4,), torch.nan))
    router.register_buffer("angles", torch.arange(3.0), persistent=False)
    placed = {"router.weight": Placement(0)}
    init.fill(model, placed, ONE, rank=0, seed=0, std=1.0, vocab=VOCAB)
    assert torch.equal(router.bias, torch.zeros(4))
    assert torch.equal(router.angles, torch.arange(3.0))


@pytest.mark.parametrize(
    ("name", "shape", "cut", "topology", "message"),
    [
        (
            "a.weight",
            (8, 4),
            Cut(tp=0),
            Topology(dp_shard=2),
            r"a.weight: expected \[4, 4\] of \[8, 4\] on rank 1, found \[8, 4\]",
        ),
        (
            EMBEDDING,
            (24, 4),
            Cut(tp=0, vocab=True),
            Topology(tp=2),
            r"expected \[20, 4\], 19 rows padded to a multiple of 2, found \[24, 4\]",
        ),
        ("a.scale", (4,), Cut(), ONE, "a.scale: a vector that is neither norm nor bias"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    name: str, shape: tuple[int, ...], cut: Cut, topology: Topology, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        filled({name: torch.empty(shape)}, {name: Placement(0, cut)}, topology, rank=1)
