"""Llama."""

from d9d_train.layers.mlp import MLP
from d9d_train.models.config import Config, Options
from d9d_train.models.decoder import CausalLM, Layer, Stage, attention


def build(config: Config, stage: Stage, options: Options) -> CausalLM:
    """A stage of a Llama."""
    sizes = config.sizes

    def layer(index: int) -> Layer:
        mlp = MLP(sizes.hidden, sizes.intermediate, bias=sizes.mlp_bias)
        return Layer(index, config, options, attention(config, qk_norm=False), mlp)

    return CausalLM(config, stage, layer)
