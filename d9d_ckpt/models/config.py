"""The sizes of a decoder model, read from a Hugging Face config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from d9d_ckpt.errors import CorruptError, MappingError
from d9d_ckpt.tensors import brief

_LARGEST = 1 << 40
_MOST_LAYERS = 1 << 16
"""More than any model has; the rules of a family are as many."""


@dataclass(frozen=True)
class ModelConfig:
    """What the rules of a family need to know.

    Attributes:
        layers: Decoder layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Rows of one head.
        intermediate: Width of a dense MLP.
        vocab: Vocabulary rows.
        tied: Whether the head is the embedding.
        experts: Experts of a sparse layer, 0 for dense models.
        moe_intermediate: Width of one expert.
        dense_layers: Layers of a sparse model that have a dense MLP.
        attention_bias: Biases on the attention projections.
        mlp_bias: Biases on the MLP projections.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    experts: int = 0
    moe_intermediate: int = 0
    dense_layers: frozenset[int] = frozenset()
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def queries(self) -> int:
        """Query heads of one KV group."""
        return self.heads // self.kv_heads


def read_config(raw: Mapping[str, Any], *, tied_by_default: bool) -> ModelConfig:
    """The sizes in a config.json, which hub files and transformers v5 spell differently.

    Args:
        raw: The parsed file.
        tied_by_default: What an absent ``tie_word_embeddings`` means for the family.

    Raises:
        CorruptError: A size is missing or not a whole number above zero.
        MappingError: Heads do not divide.
    """
    heads = _size(raw, "num_attention_heads")
    hidden = _size(raw, "hidden_size")
    kv_heads = _size(raw, "num_key_value_heads", default=heads)
    layers = _size(raw, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise CorruptError(f"config.json: num_hidden_layers {layers} is above {_MOST_LAYERS}")
    experts = _size(raw, "num_experts", "num_local_experts", default=0)
    intermediate = _size(raw, "intermediate_size", default=0)
    if heads % kv_heads:
        raise MappingError(
            f"config.json: {heads} attention heads over {kv_heads} key/value heads does not divide"
        )
    if raw.get("head_dim") is None and hidden % heads:
        raise MappingError(f"config.json: hidden_size {hidden} over {heads} heads does not divide")
    step = _size(raw, "decoder_sparse_step", default=1)
    listed = raw.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(n) is not int for n in listed):
        raise CorruptError(
            f"config.json: mlp_only_layers must be a list of layers, not {brief(listed)}"
        )
    dense = set(listed)
    dense |= {layer for layer in range(layers) if (layer + 1) % step}
    tied = raw.get("tie_word_embeddings")
    return ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_size(raw, "head_dim", default=hidden // heads),
        intermediate=intermediate,
        vocab=_size(raw, "vocab_size"),
        tied=tied_by_default if tied is None else bool(tied),
        experts=experts,
        moe_intermediate=_size(raw, "moe_intermediate_size", default=intermediate),
        dense_layers=frozenset(dense) if experts else frozenset(),
        attention_bias=bool(raw.get("attention_bias")),
        mlp_bias=bool(raw.get("mlp_bias")),
    )


def _size(raw: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = raw.get(key)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise CorruptError(
                f"config.json: {key} must be a whole number above zero, not {brief(value)}"
            )
        return value
    if default is None:
        raise CorruptError(f"config.json: {keys[0]} is missing")
    return default
