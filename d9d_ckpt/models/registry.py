"""The families by name."""

from collections.abc import Mapping
from typing import Any

from d9d_ckpt.errors import RequestError
from d9d_ckpt.models import llama, mixtral, qwen2, qwen3, qwen3_moe
from d9d_ckpt.models.family import Family

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (llama, qwen2, qwen3, qwen3_moe, mixtral)
}


def family(name: str) -> Family:
    """The family called ``name``.

    Raises:
        RequestError: There is none; the message lists those there are.
    """
    if name not in FAMILIES:
        raise RequestError(
            f"unknown model family {name!r}; known: {', '.join(sorted(FAMILIES))}; name one with "
            "--model, or give your own --mapping"
        )
    return FAMILIES[name]


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a config.json names by ``model_type``.

    Raises:
        RequestError: It names none of ours.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise RequestError(
            "config.json has no model_type; name the family with --model "
            f"({', '.join(sorted(FAMILIES))}) or give your own --mapping"
        )
    return family(kind)
