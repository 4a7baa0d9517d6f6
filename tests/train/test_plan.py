"""What a plan says of ranks against ranks that were built, and at sizes that nobody builds."""

import json
import time
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from helpers.decoders import raw
from helpers.ranks import launch

from d9d_ckpt.errors import LayoutError, RequestError
from d9d_train.config import Config, MeshConfig, PipelineConfig, TrainConfig
from d9d_train.mesh import mesh_of
from d9d_train.models.config import Options
from d9d_train.models.registry import build
from d9d_train.optim.shards import shard
from d9d_train.parallel.stages import Parallel, build_stages, named_parameters
from d9d_train.plan import RankNeeds, RunNeeds, plan

BIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
"""Qwen3-235B-A22B."""


def config(
    model: dict[str, Any],
    mesh: MeshConfig | None = None,
    pipeline: PipelineConfig | None = None,
    **train: Any,
) -> Config:
    mesh, pipeline = mesh or MeshConfig(), pipeline or PipelineConfig()
    share = mesh.readers * pipeline.microbatches
    keys = {"steps": 1, "global_batch": share, "seq_len": 16 * mesh.cp * mesh.tp} | train
    given = {("family" if k == "model_type" else k): v for k, v in model.items()}
    return Config(model=given, mesh=mesh, pipeline=pipeline, train=TrainConfig(**keys))


def needs(model: dict[str, Any], *args: Any, **train: Any) -> RunNeeds:
    return plan(config(model, *args, **train), model)


# -- parameters --------------------------------------------------------------------------------

MOE = raw("qwen3_moe", num_hidden_layers=4, num_experts=8)
MESHES = {
    "one": (MOE, MeshConfig()),
    "the example": (MOE, MeshConfig(pp=2, dp_shard=2, tp=2, ep=4)),
    "more expert shards than experts": (MOE, MeshConfig(dp_shard=4, cp=2, ep=2)),
    "experts cut within": (
        raw("qwen3_moe", num_experts=2, mlp_only_layers=[1]),
        MeshConfig(dp_shard=4),
    ),
    "uneven rows": (raw("qwen3"), MeshConfig(dp_replicate=2, dp_shard=3)),
    "padded and tied over stages": (
        raw("llama", vocab_size=50, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        MeshConfig(pp=2, tp=2, stages=(2, 1), vocab_multiple=7),
    ),
    "tied on one stage": (
        raw("llama", tie_word_embeddings=True),
        MeshConfig(dp_shard=2, cp=2, tp=2),
    ),
}


def held_by(rank: int, model: dict[str, Any], mesh: MeshConfig) -> int:
    """Elements of the shards of a rank that builds its stages."""
    stages = build_stages(
        model,
        mesh_of(mesh.topology, "cpu"),
        Options(),
        Parallel(context="all_gather", stored=torch.float32, compute=torch.float32, reshard=True),
        seed=0,
    )
    return sum(shard(parameter).numel() for parameter in named_parameters(stages).values())


@pytest.mark.ranks
@pytest.mark.parametrize("name", MESHES)
def test_parameters_of_every_rank_are_those_of_ranks_that_were_built(name: str) -> None:
    model, mesh = MESHES[name]
    built = launch(mesh.topology.world, lambda rank: held_by(rank, model, mesh))
    found = needs(model, mesh)
    assert [rank.parameters for rank in found.ranks] == built
    assert [rank.rank for rank in found.ranks] == list(range(mesh.topology.world))


@pytest.mark.parametrize("name", MESHES)
def test_parameters_of_the_model_are_those_of_its_modules(name: str) -> None:
    model, mesh = MESHES[name]
    with torch.device("meta"):
        whole = build(model)
    assert needs(model, mesh).parameters == sum(p.numel() for p in whole.parameters())


def test_shards_add_up_to_the_model() -> None:
    found = needs(MOE, MeshConfig(dp_shard=4, cp=2, ep=4))
    assert sum(rank.parameters for rank in found.ranks) == found.parameters


# -- memory ------------------------------------------------------------------------------------


def test_states_follow_from_parameters_and_dtype() -> None:
    for dtype, stored in (("bfloat16", 4), ("float32", 4), ("float64", 8)):
        for rank in needs(MOE, MeshConfig(dp_shard=2), dtype=dtype).ranks:
            assert rank.weights == rank.gradients == rank.parameters * stored
            assert rank.optimizer == 2 * rank.weights
            parts = [rank.weights, rank.gradients, rank.optimizer, rank.gathered, rank.unreduced]
            assert rank.memory == sum(parts) + rank.activations


def test_all_is_gathered_unless_it_is_freed_between_uses() -> None:
    dense = raw("qwen3", num_hidden_layers=8)
    with torch.device("meta"):
        model = build(dense)
    whole = sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers["0"].parameters())
    mesh = MeshConfig(dp_shard=4)
    kept = needs(dense, mesh, PipelineConfig(microbatches=2), dtype="bfloat16")
    freed = needs(dense, mesh, dtype="bfloat16")
    assert kept.ranks[0].gathered == whole * 2
    assert freed.ranks[0].gathered == (whole - 6 * layer) * 2
    # Gradients of several micro-batches wait for their sum in the dtype of the parameters.
    assert kept.ranks[0].unreduced == whole * 4
    assert freed.ranks[0].unreduced == (whole - 6 * layer) * 4


def first(*args: Any, **train: Any) -> RankNeeds:
    rank: RankNeeds = needs(BIG, *args, **train).ranks[0]
    return rank


def test_an_expert_more_for_each_token_is_kept() -> None:
    """Its input and output rows, gate, up and their product, in each of 94 layers."""
    mesh = MeshConfig(dp_shard=8, ep=8)
    more = dict(BIG, num_experts_per_tok=9)
    eight = needs(BIG, mesh, seq_len=64, dtype="bfloat16").ranks[0].activations
    nine = plan(config(BIG, mesh, seq_len=64, dtype="bfloat16"), more).ranks[0].activations
    assert nine - eight == 64 * 94 * (2 * 4096 + 3 * 1536) * 2


def test_recomputation_keeps_less() -> None:
    mesh = MeshConfig(dp_shard=8, ep=8)
    kept = [
        first(mesh, seq_len=4096, recompute=mode, dtype="bfloat16").activations
        for mode in ("none", "selective", "layer")
    ]
    assert kept[0] > kept[1] > 2 * kept[2]


def test_a_schedule_decides_how_many_micro_batches_wait() -> None:
    mesh = MeshConfig(pp=4, stages=(24, 24, 23, 23))
    one, five = PipelineConfig(microbatches=1), PipelineConfig(microbatches=5)
    all_at_once = replace(five, schedule="gpipe")

    def middle(pipeline: PipelineConfig, stage: int) -> int:
        ranks = needs(BIG, mesh, pipeline, seq_len=64).ranks
        return int(ranks[stage].activations)

    assert middle(five, 0) == 4 * middle(one, 0)
    assert middle(five, 1) == 3 * middle(one, 1)
    assert middle(five, 3) == middle(one, 3)
    assert middle(all_at_once, 3) == 5 * middle(one, 3)
    # Without stages to fill, one at a time.
    assert first(MeshConfig(), five, seq_len=64).activations == (
        first(MeshConfig(), one, seq_len=64).activations
    )


def test_axes_that_cut_tokens_and_heads_divide_what_is_kept() -> None:
    dense = raw("qwen3", vocab_size=64)
    one = needs(dense, seq_len=96).ranks[0].activations
    tp = needs(dense, MeshConfig(tp=2), seq_len=96).ranks[0].activations
    cp = needs(dense, MeshConfig(cp=2), seq_len=96).ranks[0].activations
    assert one / 2 < tp < one
    assert one / 2 < cp < one


# -- any world ---------------------------------------------------------------------------------


def test_a_large_model_on_many_ranks_is_planned_at_once() -> None:
    mesh = MeshConfig(pp=4, dp_shard=64, tp=4, ep=32)
    begun = time.process_time()
    found = plan(config(BIG, mesh, PipelineConfig(microbatches=8), seq_len=4096), BIG, 2048)
    assert time.process_time() - begun < 3
    assert found.parameters == 235_093_634_560
    assert len(found.ranks) == found.topology.world == 2048
    assert max(r.parameters for r in found.ranks) < found.parameters // 1024 * 1.05


def test_a_larger_world_repeats_the_mesh() -> None:
    mesh = MeshConfig(pp=2, dp_replicate=2, tp=2)
    own = needs(MOE, mesh)
    more = plan(config(MOE, mesh), MOE, 24)
    assert (more.topology.dp_replicate, more.topology.world) == (6, 24)
    assert (own.global_batch, more.global_batch) == (2, 6)
    same = [f.name for f in fields(RankNeeds) if f.name != "rank"]
    for here, there in zip(own.fullest, more.fullest, strict=True):
        assert [getattr(here, key) for key in same] == [getattr(there, key) for key in same]
    assert plan(config(MOE, mesh), MOE, 4).topology.dp_replicate == 1


@pytest.mark.parametrize("world", [-4, 0, 2, 6, 9])
def test_a_world_that_is_no_multiple_is_refused(world: int) -> None:
    with pytest.raises(
        LayoutError, match=rf"^world {world} is no multiple of .* 2 x 1 x 1 x 2 = 4"
    ):
        plan(config(MOE, MeshConfig(pp=2, tp=2)), MOE, world)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (MeshConfig(pp=5), "layout: pp x virtual = 5 stages for 4 layers"),
        (
            MeshConfig(pp=2, stages=(2, 3)),
            r"layout: stages \[2, 3\] hold 5 layers, the model has 4",
        ),
        (MeshConfig(tp=4), "tp=4 is above the 2 KV heads"),
        (MeshConfig(dp_shard=3, ep=3), "ep=3 does not divide its 8 experts"),
    ],
)
def test_axes_that_do_not_divide_the_model_are_refused(mesh: MeshConfig, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        needs(MOE, mesh)


def test_ulysses_needs_heads_for_every_rank() -> None:
    run = config(MOE, MeshConfig(cp=4))
    ulysses = replace(run, context=replace(run.context, kind="ulysses"))
    with pytest.raises(LayoutError, match="the 6 query heads of a rank over cp=4"):
        plan(ulysses, MOE)
    assert len(plan(run, MOE).ranks) == 4


def test_a_model_that_is_not_trained_here_is_not_planned() -> None:
    with pytest.raises(RequestError, match="mixtral"):
        plan(config(MOE), raw("mixtral", num_local_experts=4, num_experts_per_tok=2))


# -- output ------------------------------------------------------------------------------------


def test_json_has_the_documented_keys() -> None:
    found = needs(MOE, MeshConfig(pp=2, dp_shard=2, tp=2, ep=4))
    told = json.loads(json.dumps(found.to_json()))
    ranks = told.pop("ranks")
    assert told == {
        "parameters": found.parameters,
        "bytes": found.parameters * 4,
        "world": 8,
        "layout": {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "ep": 4},
        "global_batch": 2,
        "memory": max(r.memory for r in found.ranks),
    }
    assert len(ranks) == 8
    assert ranks[5]["rank"] == 5
    assert ranks[5]["stage"] == 1
    assert ranks[5]["bytes"] == ranks[5]["parameters"] * 4 == ranks[5]["weights"]
    assert ranks[5]["memory"] == found.ranks[5].memory
    assert ranks[5].keys() == {f.name for f in fields(RankNeeds)} | {"bytes", "memory"}


def test_the_table_has_a_line_for_each_pipeline_rank() -> None:
    found = needs(BIG, MeshConfig(pp=2, dp_shard=64, ep=64), dtype="bfloat16")
    lines = found.to_text().splitlines()
    assert lines[0] == "235,093,634,560 parameters, 875.792 GiB in float32"
    assert lines[1].startswith(
        "128 ranks: pp 2, dp_replicate 1, dp_shard 64, cp 1, tp 1, ep 64; 64 "
    )
    table = [line.split() for line in lines[-2:]]
    assert [row[:2] for row in table] == [["0", "0"], ["1", "64"]]
    for row, rank in zip(table, found.fullest, strict=True):
        assert row[2] == f"{rank.parameters:,}"
        assert float(row[-1].replace(",", "")) == pytest.approx(rank.memory / 2**30, abs=1e-3)
