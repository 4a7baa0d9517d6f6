"""Names and shapes that do not fit: refused with what was expected, what was found, and what to do."""

import pytest
import torch
from helpers.families import SPARSE, backward, checkpoint, forward, read, small

from d9d_ckpt.errors import MappingError, RequestError
from d9d_ckpt.models.registry import FAMILIES, family, family_of

LAYER = "model.layers.0."


def refused(config, stored, **kwargs):
    with pytest.raises(MappingError) as error:
        forward(config, stored, **kwargs)
    assert error.value.exit_code == 4
    return str(error.value)


def test_a05_a_tied_head_is_the_embedding():
    config = small("llama", tied=True)
    stored = checkpoint(config)
    assert "lm_head.weight" not in stored
    mapped = forward(config, stored)
    assert "lm_head.weight" not in mapped.nodes
    embedding = mapped.placements["model.embed_tokens.weight"]
    assert (embedding.stage, embedding.tied) == ("first", True)


def test_a05_untied_embedding_and_head_are_two():
    mapped = forward(small("llama"), checkpoint(small("llama")))
    assert not mapped.placements["model.embed_tokens.weight"].tied
    assert mapped.placements["lm_head.weight"].stage == "last"


def test_a05_an_untied_head_that_is_missing_is_named():
    config = small("llama")
    stored = checkpoint(config)
    del stored["lm_head.weight"]
    assert "1 tensors that llama needs are missing: lm_head.weight" in refused(config, stored)


def test_a01_an_expert_that_is_missing_is_named_with_its_nearest():
    config = small("qwen3_moe")
    stored = checkpoint(config)
    del stored[LAYER + "mlp.experts.5.up_proj.weight"]
    message = refused(config, stored)
    assert f"missing: {LAYER}mlp.experts.5.up_proj.weight (nearest: {LAYER}mlp.experts." in message


@pytest.mark.parametrize("name", SPARSE)
def test_a01_the_other_expert_layout_is_not_taken_for_granted(name):
    config = small(name, layout="split")
    message = refused(config, checkpoint(config), experts="fused")
    assert f"{LAYER}mlp.experts.gate_up_proj" in message
    assert "match no rule" in message


def test_a20_a_tensor_that_no_rule_takes_is_listed():
    config = small("qwen3")
    stored = checkpoint(config) | {LAYER + "self_attn.q_proj.bias": torch.zeros(96)}
    message = refused(config, stored)
    assert f"1 tensors match no rule of qwen3: {LAYER}self_attn.q_proj.bias" in message
    assert "--mapping" in message


def test_long_lists_are_counted_to_the_end():
    config = small("llama", layers=4)
    stored = checkpoint(config)
    kept = {n: t for n, t in stored.items() if not n.startswith("model.layers.")}
    assert "36 tensors that llama needs are missing" in refused(config, kept)
    assert "and 16 more" in refused(config, kept)
    extra = stored | {f"extra.{i}": torch.zeros(1) for i in range(30)}
    assert "30 tensors match no rule of llama" in refused(config, extra)
    assert "and 10 more" in refused(config, extra)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("model.embed_tokens.weight", (320,)), ("model.norm.weight", (0,)), ("lm_head.weight", (0,))],
)
def test_a07_placeholders_of_a_sharded_trainer_are_named_as_such(name, shape):
    config = small("llama")
    stored = checkpoint(config) | {name: torch.zeros(shape)}
    expected = list(checkpoint(config)[name].shape)
    message = refused(config, stored)
    assert f"{name} has shape {list(shape)}, expected {expected}" in message
    assert "ZeRO-3" in message
    assert "consolidate" in message


def test_a07_flat_parameters_are_named_as_such():
    config = small("llama")
    message = refused(config, checkpoint(config) | {"model._flat_param": torch.zeros(9)})
    assert "FSDP flat vector: consolidate" in message


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("down_proj", (2, 6, 4), [2, 4, 6]),
        ("gate_up_proj", (2, 4, 12), [2, 12, 4]),
    ],
)
def test_a09_experts_of_the_other_orientation_are_refused(name, shape, expected):
    config = small("qwen3_moe", layers=1, hidden=4, experts=2, moe_intermediate=6, layout="fused")
    stored = checkpoint(config) | {f"{LAYER}mlp.experts.{name}": torch.zeros(shape)}
    message = refused(config, stored)
    assert f"mlp.experts.{name} has shape {list(shape)}, expected {expected}" in message
    assert "last two dims are exchanged" in message


def test_every_tensor_of_a_wrong_shape_is_listed():
    config = small("qwen3")
    message = refused(config, checkpoint(small("qwen3", hidden=32)))
    assert message.startswith("21 tensors disagree with config.json")
    assert "model.embed_tokens.weight has shape [20, 32], expected [20, 64]" in message


def test_dtypes_that_cannot_be_joined_are_an_error_naming_the_tensors():
    config = small("qwen3")
    stored = checkpoint(config)
    name = LAYER + "self_attn.k_proj.weight"
    message = refused(config, stored | {name: stored[name].bfloat16()})
    assert (
        f"tensor '{LAYER}self_attn.qkv_proj.weight' from {LAYER}self_attn.q_proj.weight" in message
    )
    assert "BF16" in message


def test_training_tensors_that_do_not_fit_are_refused_on_the_way_back():
    config = small("qwen3")
    stored = checkpoint(config)
    training = read(forward(config, stored), stored)
    name = LAYER + "self_attn.qkv_proj.weight"
    with pytest.raises(MappingError, match=rf"{name} has shape \[3, 64\], expected \[192, 64\]"):
        backward(config, training | {name: torch.zeros(3, 64)}, "")
    with pytest.raises(MappingError, match=r"1 tensors match no rule of qwen3: optim\.step"):
        backward(config, training | {"optim.step": torch.zeros(())}, "")
    del training[name]
    with pytest.raises(MappingError, match=rf"missing: {name}"):
        backward(config, training, "")


@pytest.mark.parametrize("name", FAMILIES)
def test_a22_recomputed_buffers_are_known_by_name(name):
    pattern = FAMILIES[name].recomputed
    assert pattern.fullmatch("model.layers.10.self_attn.rotary_emb.inv_freq")
    assert pattern.fullmatch("model.rotary_emb.inv_freq")
    assert not pattern.fullmatch("model.layers.0.self_attn.q_proj.weight")
    assert not pattern.fullmatch("model.layers.0.self_attn.rotary_emb.inv_freq.scale")


def test_unknown_families_are_refused_with_the_list():
    with pytest.raises(
        RequestError, match="'gpt5'; known: llama, mixtral, qwen2, qwen3, qwen3_moe"
    ):
        family("gpt5")
    with pytest.raises(RequestError, match="'gpt5'"):
        family_of({"model_type": "gpt5"})
    for config in ({}, {"model_type": None}, {"model_type": 3}):
        with pytest.raises(RequestError, match="no model_type; name the family with --model"):
            family_of(config)
    assert family_of({"model_type": "qwen3"}) is FAMILIES["qwen3"]
