"""Qwen2: Llama with biases on q, k and v."""

from collections.abc import Iterator

from d9d_ckpt.models.config import ModelConfig
from d9d_ckpt.models.decoder import attention, dense_mlp, ends, norms
from d9d_ckpt.models.family import Family, Rule


def rules(c: ModelConfig, experts: str) -> Iterator[Rule]:
    """Every training tensor."""
    yield from ends(c)
    for layer in range(c.layers):
        yield from norms(c, layer)
        yield from attention(c, layer, qkv_bias=True, o_bias=False, qk_norm=False)
        yield from dense_mlp(c, layer)


FAMILY = Family("qwen2", rules)
