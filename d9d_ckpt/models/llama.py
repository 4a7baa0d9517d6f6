"""Llama: grouped-query attention, dense SwiGLU, optional biases."""

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
            c, layer, qkv_bias=c.attention_bias, o_bias=c.attention_bias, qk_norm=False
        )
        yield from dense_mlp(c, layer, bias=c.mlp_bias)


FAMILY = Family("llama", rules)
