"""Hugging Face -> d9d form by d9d 0.24, through its public API.

    python d9d_peer.py SRC DST
    torchrun --standalone --nproc-per-node 2 d9d_peer.py SRC DST

Under torchrun every rank maps its share of the groups and writes files of its own.
"""

import json
import os
import sys
import time
import types
import warnings
from pathlib import Path

# d9d's model package imports the GPU-only cut-cross-entropy kernels, which mapping never calls.
sys.modules["d9d.kernel.cce"] = types.ModuleType("d9d.kernel.cce")
sys.modules["d9d.kernel.cce"].linear_cross_entropy = None  # type: ignore[attr-defined]
warnings.filterwarnings("ignore")

import torch.distributed as dist
from d9d.model_state.io import (
    read_model_state,
    write_model_state_distributed,
    write_model_state_local,
)
from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.adapters import identity_mapper_from_mapper_outputs
from d9d.model_state.mapper.compose import ModelStateMapperShard
from d9d.module.model.qwen3_moe import (
    Qwen3MoELayerParameters,
    Qwen3MoEParameters,
)
from d9d.module.model.qwen3_moe.huggingface import (
    Qwen3MoEExpertsFormat,
    mapper_from_huggingface_qwen3_moe_for_causal_lm,
)

BYTES = 2
LEAST_SHARD_GB = 0.5
"""The fastest of 0.25, 0.5, 1 and its default 4, by a little; memory grows with it."""


def main() -> None:
    src, dst = map(Path, sys.argv[1:])
    config = json.loads((src / "config.json").read_text())
    mapper = mapper_from_huggingface_qwen3_moe_for_causal_lm(
        parameters(config), Qwen3MoEExpertsFormat.MODULE_LIST
    )
    start = time.perf_counter()
    if "RANK" in os.environ:
        convert_share(src, dst, mapper, shard_gb(config))
    else:
        convert(src, dst, mapper, shard_gb(config))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"seconds": time.perf_counter() - start}))


def convert(src: Path, dst: Path, mapper: ModelStateMapper, size_gb: float) -> None:
    write_model_state_local(
        dst,
        identity_mapper_from_mapper_outputs(mapper),
        read_model_state(src, mapper, "cpu", show_progress=False),
        shard_size_gb=size_gb,
        show_progress=False,
    )


def convert_share(src: Path, dst: Path, mapper: ModelStateMapper, size_gb: float) -> None:
    dist.init_process_group("gloo")
    share = ModelStateMapperShard(
        mapper, total_shards=dist.get_world_size(), current_shard=dist.get_rank()
    )
    write_model_state_distributed(
        dst,
        identity_mapper_from_mapper_outputs(share),
        read_model_state(src, share, "cpu", show_progress=False),
        process_group=dist.group.WORLD,
        shard_size_gb=size_gb,
        show_progress=False,
    )
    dist.barrier()
    dist.destroy_process_group()


def shard_gb(config: dict[str, int]) -> float:
    """File size: d9d holds outputs until a file is full, and a tensor must fit in one."""
    expert = experts(config) * config["moe_intermediate_size"]
    largest = max(config["vocab_size"], expert) * config["hidden_size"] * BYTES
    return max(LEAST_SHARD_GB, 1.01 * largest / 2**30)


def experts(config: dict[str, int]) -> int:
    return config["num_experts"] if "num_experts" in config else config["num_local_experts"]


def parameters(config: dict[str, int]) -> Qwen3MoEParameters:
    layer = Qwen3MoELayerParameters(
        hidden_size=config["hidden_size"],
        intermediate_size=config["moe_intermediate_size"],
        num_experts=experts(config),
        experts_top_k=config["num_experts_per_tok"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        rms_norm_eps=1e-6,
        head_dim=config["head_dim"],
    )
    return Qwen3MoEParameters(
        layer=layer,
        num_hidden_layers=config["num_hidden_layers"],
        rope_base=10_000,
        max_position_ids=64,
        split_vocab_size={"regular": config["vocab_size"]},
        split_vocab_order=["regular"],
    )


if __name__ == "__main__":
    main()
