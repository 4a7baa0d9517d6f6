"""The architectures by the name of their family."""

from collections.abc import Callable, Mapping
from typing import Any

from d9d_ckpt.errors import RequestError
from d9d_train.models import llama, qwen3, qwen3_moe
from d9d_train.models.config import Config, Options, read_config
from d9d_train.models.decoder import CausalLM, Stage

FAMILIES: Mapping[str, Callable[[Config, Stage, Options], CausalLM]] = {
    "llama": llama.build,
    "qwen3": qwen3.build,
    "qwen3_moe": qwen3_moe.build,
}


def build(
    raw: Mapping[str, Any], stage: Stage | None = None, options: Options | None = None
) -> CausalLM:
    """A stage of the model that a config.json describes; on the meta device, nothing is allocated.

    Values are whatever memory holds: an initialiser or a checkpoint sets them.

    Args:
        raw: The parsed config.json.
        stage: Which part; the whole model by default.
        options: What the run asks of it.

    Raises:
        RequestError: A family that the trainer does not have, or something in the config that it does
            not compute, by name and value.
        CorruptError: A value is missing or makes no sense.
    """
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise RequestError(
            f"config.json: model_type is {name!r}, which the trainer does not have; it trains "
            f"{', '.join(FAMILIES)}"
        )
    config = read_config(raw)
    return FAMILIES[name](config, stage or Stage.whole(config), options or Options())
