"""What the families share: a layer's two blocks on the residual stream, the stack of layers, the ends."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from d9d_train.batch import Batch
from d9d_train.layers.attention import Attention
from d9d_train.layers.dropout import Dropout
from d9d_train.layers.embedding import Embedding
from d9d_train.layers.head import LMHead
from d9d_train.layers.mlp import MLP
from d9d_train.layers.moe import Experts, MoE, Router
from d9d_train.layers.norm import RMSNorm
from d9d_train.layers.rope import Angles
from d9d_train.models.config import Config, Options


@dataclass(frozen=True)
class Stage:
    """A run of consecutive layers, with the ends of the model that go with it.

    Attributes:
        first: Whether it begins with the embedding.
        last: Whether it ends with the final norm and the head.
        layers: Global indices of its layers.
    """

    first: bool
    last: bool
    layers: range

    @classmethod
    def whole(cls, config: Config) -> "Stage":
        """The only stage of a model."""
        return cls(first=True, last=True, layers=range(config.sizes.layers))


class Layer(nn.Module):
    """Attention, then a feed-forward part, each normalised before and added to the residual stream.

    Args:
        index: Global.
        config: Of the model.
        options: Of the run.
        attention: Of this layer.
        mlp: Dense or sparse.
    """

    def __init__(
        self, index: int, config: Config, options: Options, attention: Attention, mlp: MLP | MoE
    ) -> None:
        super().__init__()
        hidden, name = config.sizes.hidden, f"model.layers.{index}"
        self.input_layernorm = RMSNorm(hidden, config.eps)
        self.self_attn = attention
        self.attn_dropout = Dropout(options.dropout, options.seed, f"{name}.self_attn")
        self.post_attention_layernorm = RMSNorm(hidden, config.eps)
        self.mlp = mlp
        self.mlp_dropout = Dropout(options.dropout, options.seed, f"{name}.mlp")

    def forward(self, x: torch.Tensor, angles: Angles, batch: Batch) -> torch.Tensor:
        """[B, S, H] from the same."""
        attended = self.self_attn(self.input_layernorm(x), angles, batch)
        x = x + self.attn_dropout(attended, batch)
        fed = self.mlp(self.post_attention_layernorm(x))
        out: torch.Tensor = x + self.mlp_dropout(fed, batch)
        return out


class Decoder(nn.Module):
    """Embedding, layers and final norm, as far as a stage has them."""

    def __init__(self, config: Config, stage: Stage, layer: Callable[[int], Layer]) -> None:
        super().__init__()
        sizes = config.sizes
        self.rope = config.rope
        self.embed_tokens = Embedding(sizes.vocab, sizes.hidden) if stage.first else None
        self.layers = nn.ModuleDict({str(index): layer(index) for index in stage.layers})
        self.norm = RMSNorm(sizes.hidden, config.eps) if stage.last else None

    def forward(self, x: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """[B, S, H], from the same of the stage before; the first stage takes the batch's tokens."""
        h = x if self.embed_tokens is None else self.embed_tokens(batch.tokens)
        assert h is not None  # noqa: S101 - for the type checker
        angles = self.rope.angles(batch, h.dtype)
        for layer in self.layers.values():
            h = layer(h, angles, batch)
        return h if self.norm is None else self.norm(h)


class CausalLM(nn.Module):
    """A stage of a language model.

    Parameters have the training names of `d9d_ckpt.models`. Where one stage has both ends of a tied
    model, head and embedding are one parameter; a last stage of its own has a copy, ``lm_head.weight``.

    Args:
        config: Of the whole model.
        stage: Which part of it.
        layer: Makes the layer of a global index.
    """

    def __init__(self, config: Config, stage: Stage, layer: Callable[[int], Layer]) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, stage, layer)
        self.lm_head = LMHead(config.sizes.hidden, config.sizes.vocab) if stage.last else None
        embedding = self.model.embed_tokens
        if config.sizes.tied and embedding is not None and self.lm_head is not None:
            self.lm_head.weight = embedding.weight

    def forward(self, x: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """A forward pass.

        Args:
            x: [B, S, H] from the stage before; None for the first.
            batch: A micro-batch.

        Returns:
            [B, S, H] for the stage after. Of the last stage the sum of the tokens' losses, 0-D in
            float32 or wider; or logits [B, S, vocab] where the batch has no labels.
        """
        h: torch.Tensor = self.model(x, batch)
        return h if self.lm_head is None else self.lm_head(h, batch.labels)


def attention(config: Config, *, qk_norm: bool) -> Attention:
    """Attention as a config sizes it."""
    sizes = config.sizes
    return Attention(
        sizes.hidden,
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        qkv_bias=sizes.attention_bias,
        o_bias=sizes.attention_bias,
        norm_eps=config.eps if qk_norm else None,
    )


def mixture(config: Config, options: Options) -> MoE:
    """Router and experts as a config sizes them."""
    sizes = config.sizes
    router = Router(
        sizes.hidden,
        sizes.experts,
        config.experts_per_token,
        normalize=config.norm_topk_prob,
        biased=options.balance_bias,
    )
    return MoE(router, Experts(sizes.experts, sizes.hidden, sizes.moe_intermediate))
