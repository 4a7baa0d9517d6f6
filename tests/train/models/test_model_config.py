"""config.json as both transformers spell it; what is not computed is refused by name and value."""

import pytest
from helpers.decoders import CASES

from d9d_ckpt.errors import CorruptError, RequestError
from d9d_train.models.config import read_config
from d9d_train.models.registry import build


def test_the_older_spelling_reads_as_the_newer():
    new = CASES["llama-llama3"]
    scaling = dict(new["rope_parameters"])
    theta = scaling.pop("rope_theta")
    old = new | {"rope_theta": theta, "rope_scaling": scaling}
    del old["rope_parameters"]
    assert read_config(old) == read_config(new)
    older = dict(scaling)
    older["type"] = older.pop("rope_type")
    assert read_config(old | {"rope_scaling": older}) == read_config(new)


def test_no_word_of_rope_is_the_default_with_theta_10000():
    rope = read_config(CASES["llama"]).rope
    assert (rope.kind, rope.theta) == ("default", 10_000.0)


REFUSED = [
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ({"sliding_window": 4096}, "sliding_window is 4096"),
    ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window is 4096"),
    (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types is 'sliding_attention'",
    ),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mystery": 3}},
        "rope_parameters.mystery is 3",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"head_dim": 11}, "head_dim is 11"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=[str(n) for n, _ in enumerate(REFUSED)])
def test_what_is_not_computed_is_refused_by_name_and_value(keys, message):
    with pytest.raises(RequestError, match=message):
        read_config(CASES["llama"] | keys)


def test_a_window_that_is_not_used_is_no_reason():
    keys = {"sliding_window": 4096, "use_sliding_window": False}
    assert read_config(CASES["qwen3"] | keys) == read_config(CASES["qwen3"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number above zero, not 'small'"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be from 1 to num_experts 6, not 7"),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "factor must be a number above zero, not None",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name_and_value(keys, message):
    with pytest.raises(CorruptError, match=message):
        read_config(CASES["qwen3_moe"] | keys)


def test_a_family_that_is_not_trained_is_refused_with_those_that_are():
    with pytest.raises(RequestError, match=r"model_type is 'mixtral'.*llama, qwen3, qwen3_moe"):
        build(CASES["llama"] | {"model_type": "mixtral"})
