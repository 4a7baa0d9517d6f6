"""Sizes from config.json, as the hub and transformers v5 spell them."""

import pytest

from d9d_ckpt.errors import CkptError, CorruptError, MappingError
from d9d_ckpt.models.config import read_config

PLAIN = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def config(**keys):
    return read_config(PLAIN | keys, tied_by_default=False)


def without(key):
    return read_config({k: v for k, v in PLAIN.items() if k != key}, tied_by_default=False)


def test_sizes_of_a_dense_model():
    c = config()
    assert (c.layers, c.hidden, c.heads, c.kv_heads, c.queries) == (3, 64, 4, 2, 2)
    assert (c.head_dim, c.intermediate, c.vocab, c.experts) == (16, 160, 512, 0)
    assert not any((c.tied, c.attention_bias, c.mlp_bias, c.dense_layers))


def test_head_dim_is_its_own_where_given():
    assert config(head_dim=24).head_dim == 24
    assert config(head_dim=None).head_dim == 16
    assert config(head_dim=5, hidden_size=63).head_dim == 5


def test_absent_kv_heads_are_the_heads():
    assert without("num_key_value_heads").kv_heads == 4
    assert config(num_key_value_heads=None).kv_heads == 4


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_experts_are_read_under_both_names(key):
    c = config(**{key: 8, "moe_intermediate_size": 40})
    assert (c.experts, c.moe_intermediate) == (8, 40)
    assert config(**{key: 8}).moe_intermediate == 160


def test_dense_layers_of_a_sparse_model():
    assert config(num_experts=8).dense_layers == frozenset()
    assert config(num_experts=8, mlp_only_layers=[1]).dense_layers == {1}
    assert config(num_experts=8, decoder_sparse_step=2).dense_layers == {0, 2}
    assert config(mlp_only_layers=[1]).dense_layers == frozenset()


@pytest.mark.parametrize(
    ("keys", "default", "tied"),
    [({}, False, False), ({}, True, True), ({"tie_word_embeddings": False}, True, False)],
    ids=str,
)
def test_a05_tied_by_config_or_by_the_familys_default(keys, default, tied):
    assert read_config(PLAIN | keys, tied_by_default=default).tied is tied
    assert (
        read_config(PLAIN | {"tie_word_embeddings": None}, tied_by_default=default).tied is default
    )


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"]
)
def test_a_missing_size_is_named(key):
    with pytest.raises(CorruptError, match=f"{key} is missing"):
        without(key)


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [64]], ids=str)
def test_a_size_of_another_kind_is_named(value):
    with pytest.raises(CorruptError, match="hidden_size must be a whole number above zero, not"):
        config(hidden_size=value)


def test_heads_that_do_not_divide_are_refused_with_the_numbers():
    with pytest.raises(MappingError, match="4 attention heads over 3 key/value heads"):
        config(num_key_value_heads=3)
    with pytest.raises(MappingError, match="hidden_size 62 over 4 heads"):
        config(hidden_size=62)


@pytest.mark.parametrize(
    "keys",
    [{"mlp_only_layers": 1}, {"mlp_only_layers": ["1"]}, {"decoder_sparse_step": "2"}],
    ids=str,
)
def test_malformed_layer_lists_are_an_error_of_ours(keys):
    with pytest.raises(CkptError):
        config(num_experts=8, **keys)
