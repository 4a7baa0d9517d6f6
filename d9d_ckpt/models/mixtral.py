"""Mixtral: Llama attention, every MLP sparse; the hub names gate, up and down w1, w3 and w2."""

from collections.abc import Iterator

from d9d_ckpt.models.config import ModelConfig
from d9d_ckpt.models.decoder import attention, ends, norms, sparse_mlp
from d9d_ckpt.models.family import Family, Rule


def rules(c: ModelConfig, experts: str) -> Iterator[Rule]:
    """Every training tensor."""
    yield from ends(c)
    for layer in range(c.layers):
        yield from norms(c, layer)
        yield from attention(c, layer, qkv_bias=False, o_bias=False, qk_norm=False)
        yield from sparse_mlp(
            c, layer, experts, split="block_sparse_moe", router="gate", names=("w1", "w3", "w2")
        )


FAMILY = Family("mixtral", rules, hub_experts="split")
