"""The families' Hugging Face names and shapes against the models that transformers builds."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from d9d_ckpt.models.registry import FAMILIES

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 50,
}
SPARSE = SIZES | {"num_experts_per_tok": 2}
CASES = [
    ("llama", SIZES),
    ("llama", SIZES | {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    ("llama", SIZES | {"tie_word_embeddings": True}),
    ("qwen2", SIZES),
    ("qwen3", SIZES | {"head_dim": 10}),
    ("qwen3", SIZES | {"head_dim": 10, "attention_bias": True}),
    ("mixtral", SPARSE | {"num_local_experts": 4}),
    ("qwen3_moe", SPARSE | {"num_experts": 4, "moe_intermediate_size": 20, "head_dim": 10}),
    (
        "qwen3_moe",
        SPARSE
        | {
            "num_experts": 4,
            "moe_intermediate_size": 20,
            "head_dim": 10,
            "attention_bias": True,
            "mlp_only_layers": [2],
            "decoder_sparse_step": 2,
        },
    ),
]


@pytest.mark.parametrize(
    ("name", "keys"), CASES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CASES)]
)
def test_every_parameter_of_the_real_model_is_a_source_and_no_other(name, keys):
    config = AutoConfig.for_model(name, **keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        del real["lm_head.weight"]
    of = FAMILIES[name]
    layout = of.experts_layout(real)
    assert layout == ("fused" if of.hub_experts else "")
    rules = of.rules(of.config(config.to_dict()), layout)
    sources = {source: shape for rule in rules for source, shape in rule.sources}
    assert sources == real


@pytest.mark.parametrize("name", FAMILIES)
def test_a05_a_config_that_does_not_say_is_tied_as_transformers_ties_it(name):
    assert FAMILIES[name].tied_by_default == AutoConfig.for_model(name).tie_word_embeddings
