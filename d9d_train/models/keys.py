"""The keys of a config.json that the trainer reads or hands on, for models that a run describes itself.

What reads them is `d9d_ckpt.models.config` (sizes) and `d9d_train.models.config` (all else). A file on
the hub has many more, which change nothing that is computed here; who writes a key down by hand wants
it to be read.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DecoderKeys:
    """Keys of every family, under their Hugging Face names; what is None is not said.

    Attributes:
        vocab_size: Rows of embedding and head.
        hidden_size: Width of the residual stream.
        num_hidden_layers: Layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; as many as query heads when None.
        head_dim: Channels of a head; hidden_size over query heads when None.
        max_position_embeddings: Positions that dynamic and YaRN RoPE start from.
        original_max_position_embeddings: Positions of pre-training, for YaRN and llama3 RoPE.
        rope_parameters: RoPE as transformers 5 spells it.
        rope_scaling: RoPE as transformers 4 spells it.
        rope_theta: Base of RoPE as transformers 4 spells it.
        partial_rotary_factor: Refused unless 1.
        rms_norm_eps: Of every norm.
        initializer_range: Standard deviation of first values.
        tie_word_embeddings: Whether the head is the embedding.
        attention_bias: Whether attention projections have biases.
        attention_dropout: Refused unless 0.
        hidden_act: Refused unless silu.
        layer_types: Refused unless all are full_attention.
        sliding_window: Refused unless use_sliding_window is false.
        use_sliding_window: See there.
        architectures: For who reads an export.
        bos_token_id: For who reads an export.
        eos_token_id: For who reads an export.
        pad_token_id: For who reads an export.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    original_max_position_embeddings: int | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    rms_norm_eps: float | None = None
    initializer_range: float | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    attention_dropout: float | None = None
    hidden_act: str | None = None
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    architectures: tuple[str, ...] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class DenseKeys(DecoderKeys):
    """Keys of families without experts.

    Attributes:
        intermediate_size: Width of the MLP.
        mlp_bias: Whether its projections have biases.
    """

    intermediate_size: int
    mlp_bias: bool | None = None


@dataclass(frozen=True, kw_only=True)
class SparseKeys(DecoderKeys):
    """Keys of families with experts.

    Attributes:
        num_experts: Experts of a sparse layer.
        num_experts_per_tok: Experts that a token is sent to.
        moe_intermediate_size: Width of an expert.
        norm_topk_prob: Whether the probabilities of a token's experts are divided by their sum.
        intermediate_size: Width of the MLP of dense layers.
        decoder_sparse_step: Every how many layers one is sparse.
        mlp_only_layers: Layers that are dense.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool | None = None
    intermediate_size: int | None = None
    decoder_sparse_step: int | None = None
    mlp_only_layers: tuple[int, ...] | None = None
