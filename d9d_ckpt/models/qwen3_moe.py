"""Qwen3-MoE: Qwen3 attention, sparse MLPs but for the layers that the config keeps dense."""

from collections.abc import Iterator

from d9d_ckpt.models.config import ModelConfig
from d9d_ckpt.models.decoder import attention, dense_mlp, ends, norms, sparse_mlp
from d9d_ckpt.models.family import Family, Rule


def rules(c: ModelConfig, experts: str) -> Iterator[Rule]:
    """Every training tensor."""
    yield from ends(c)
    for layer in range(c.layers):
        yield from norms(c, layer)
        yield from attention(
            c, layer, qkv_bias=c.attention_bias, o_bias=c.attention_bias, qk_norm=True
        )
        if layer in c.dense_layers:
            yield from dense_mlp(c, layer)
        else:
            yield from sparse_mlp(
                c,
                layer,
                experts,
                split="mlp",
                router="gate",
                names=("gate_proj", "up_proj", "down_proj"),
            )


FAMILY = Family("qwen3_moe", rules, hub_experts="split")
