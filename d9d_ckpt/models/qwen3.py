"""Qwen3: Llama with norms on q and k, and a head_dim of its own."""

from collections.abc import Iterator

from d9d_ckpt.models.config import ModelConfig
from d9d_ckpt.models.decoder import attention, dense_mlp, ends, norms
from d9d_ckpt.models.family import Family, Rule


def rules(c: ModelConfig, experts: str) -> Iterator[Rule]:
    """Every training tensor."""
    yield from ends(c)
    for layer in range(c.layers):
        yield from norms(c, layer)
        yield from attention(
            c, layer, qkv_bias=c.attention_bias, o_bias=c.attention_bias, qk_norm=True
        )
        yield from dense_mlp(c, layer)


FAMILY = Family("qwen3", rules)
