"""What a model computes, read from a Hugging Face config.json; what is not built here is refused."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from d9d_ckpt.errors import CorruptError, RequestError
from d9d_ckpt.models.config import ModelConfig
from d9d_ckpt.models.registry import family_of
from d9d_train.layers.rope import Kind, Rope

THETA = 10_000.0
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "llama3": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
        }
    ),
}
"""What each kind of RoPE reads, beside its kind and theta."""


@dataclass(frozen=True)
class Config:
    """A decoder.

    Attributes:
        sizes: What placements and shapes follow from.
        rope: Rotary embedding.
        eps: Of every norm.
        initializer_range: Standard deviation of first values.
        experts_per_token: Experts that a token is sent to; 0 for dense models.
        norm_topk_prob: Whether the probabilities of a token's experts are divided by their sum.
    """

    sizes: ModelConfig
    rope: Rope
    eps: float
    initializer_range: float
    experts_per_token: int = 0
    norm_topk_prob: bool = False


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run asks of a model beyond its config.json.

    Attributes:
        dropout: Share of what a block adds to the residual stream that becomes zero.
        seed: Of dropout.
        balance_bias: Whether routers have a selection bias.
    """

    dropout: float = 0.0
    seed: int = 0
    balance_bias: bool = False


def read_config(raw: Mapping[str, Any]) -> Config:
    """The config of a model, as config.json of transformers 4 or 5 spells it.

    Args:
        raw: The parsed file; ``model_type`` names the family.

    Raises:
        RequestError: Something in it that the trainer does not compute, by name and value.
        CorruptError: A value is missing or makes no sense.
    """
    sizes = family_of(raw).config(raw)
    _refuse(raw)
    return Config(
        sizes=sizes,
        rope=_rope(raw, sizes.head_dim),
        eps=_number(raw, "rms_norm_eps", 1e-6),
        initializer_range=_number(raw, "initializer_range", 0.02),
        experts_per_token=_experts_per_token(raw, sizes),
        norm_topk_prob=bool(raw.get("norm_topk_prob")),
    )


def _refuse(raw: Mapping[str, Any]) -> None:
    """Name the first thing that changes what a model computes and is not built here."""
    act = raw.get("hidden_act", "silu")
    if act != "silu":
        raise _unsupported("hidden_act", act, "silu")
    if raw.get("attention_dropout"):
        raise _unsupported("attention_dropout", raw["attention_dropout"], "0; see train.dropout")
    window = raw.get("sliding_window")
    if window is not None and raw.get("use_sliding_window", True):
        raise _unsupported("sliding_window", window, "null, or use_sliding_window false")
    for kind in raw.get("layer_types") or ():
        if kind != "full_attention":
            raise _unsupported("layer_types", kind, "full_attention")


def _experts_per_token(raw: Mapping[str, Any], sizes: ModelConfig) -> int:
    if not sizes.experts:
        return 0
    chosen = raw.get("num_experts_per_tok")
    if type(chosen) is not int or not 1 <= chosen <= sizes.experts:
        raise CorruptError(
            f"config.json: num_experts_per_tok must be from 1 to num_experts {sizes.experts}, not "
            f"{chosen!r}"
        )
    return chosen


def _rope(raw: Mapping[str, Any], dim: int) -> Rope:
    """From ``rope_parameters`` (transformers 5), or ``rope_scaling`` and ``rope_theta``."""
    given = _rope_parameters(raw)
    theta, kind = given.pop("rope_theta"), given.pop("rope_type")
    if kind not in get_args(Kind):
        raise _unsupported("rope_type", kind, ", ".join(get_args(Kind)))
    for key, value in given.items():
        if key not in _KEYS[kind]:
            raise _unsupported(f"rope_parameters.{key}", value, f"none for rope_type {kind!r}")
    if dim % 2 or (kind == "dynamic" and dim < 4):
        raise _unsupported("head_dim", dim, "an even number (dynamic RoPE: at least 4)")
    values = dict(given)
    if kind == "yarn":
        values = _yarn(raw, values)
    elif kind != "default":
        values["factor"] = _number(given, "factor")
    if kind == "dynamic":
        values["trained"] = _positions(raw)
    if kind == "llama3":
        values = {
            "factor": values["factor"],
            "trained": _trained(raw, given),
            "low": _number(given, "low_freq_factor"),
            "high": _number(given, "high_freq_factor"),
        }
    return Rope(dim=dim, theta=theta, kind=kind, **values)


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    old = given.pop("type", None)
    given["rope_type"] = given.get("rope_type") or old or "default"
    given.setdefault("rope_theta", raw.get("rope_theta"))
    given["rope_theta"] = _number(given, "rope_theta", THETA)
    part = given.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if part != 1:
        raise _unsupported("partial_rotary_factor", part, "1")
    # transformers 5 writes absent values as null.
    return {key: value for key, value in given.items() if value is not None}


def _yarn(raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    trained = _trained(raw, given)
    factor = _number(given, "factor", _positions(raw) / trained)
    attention = given.get("attention_factor")
    if attention is None:
        attention = _attention_factor(factor, given.get("mscale"), given.get("mscale_all_dim"))
    return {
        "factor": factor,
        "trained": trained,
        "beta_fast": _number(given, "beta_fast", 32.0),
        "beta_slow": _number(given, "beta_slow", 1.0),
        "truncate": bool(given.get("truncate", True)),
        "attention_factor": float(attention),
    }


def _attention_factor(factor: float, mscale: float | None, all_dim: float | None) -> float:
    """The paper's (arXiv 2309.00071, equation 22), or DeepSeek's ratio of two."""
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _trained(raw: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    """Positions of pre-training: a key of the model's before that of its RoPE, as transformers reads it."""
    key = "original_max_position_embeddings"
    value = raw.get(key) or given.get(key)
    return int(value) if value else _positions(raw)


def _positions(raw: Mapping[str, Any]) -> int:
    return int(_number(raw, "max_position_embeddings"))


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CorruptError(f"config.json: {key} must be a number above zero, not {value!r}")
    return float(value)


def _unsupported(key: str, found: Any, expected: str) -> RequestError:
    return RequestError(
        f"config.json: {key} is {found!r}, which the trainer does not compute; it takes {expected}"
    )
