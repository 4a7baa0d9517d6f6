"""Qwen3-MoE."""

from d9d_train.layers.mlp import MLP
from d9d_train.models.config import Config, Options
from d9d_train.models.decoder import CausalLM, Layer, Stage, attention, mixture


def build(config: Config, stage: Stage, options: Options) -> CausalLM:
    """A stage of a Qwen3-MoE."""
    sizes = config.sizes

    def layer(index: int) -> Layer:
        dense = index in sizes.dense_layers
        mlp = MLP(sizes.hidden, sizes.intermediate) if dense else mixture(config, options)
        return Layer(index, config, options, attention(config, qk_norm=True), mlp)

    return CausalLM(config, stage, layer)
