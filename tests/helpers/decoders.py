"""Tiny decoders of every family: configs, models with values, batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from d9d_train.batch import Batch
from d9d_train.models.decoder import CausalLM
from d9d_train.models.registry import build

Raw = dict[str, Any]

SIZES: Raw = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 50,
    "head_dim": 12,
    "max_position_embeddings": 64,
}
EXPERTS: Raw = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LLAMA3: Raw = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
}
YARN: Raw = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1000.0,
}
DEEPSEEK: Raw = YARN | {
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 16,
    "beta_slow": 2,
    "truncate": False,
}


def raw(family: str, **keys: Any) -> Raw:
    """The config.json of a tiny model."""
    sparse = EXPERTS if family == "qwen3_moe" else {}
    return {"model_type": family} | SIZES | sparse | keys


def rope(**parameters: Any) -> Raw:
    return {"rope_parameters": {"rope_theta": 10_000.0} | parameters}


CASES: dict[str, Raw] = {
    "llama": raw("llama"),
    "llama-biases": raw("llama", attention_bias=True, mlp_bias=True),
    "llama-tied": raw("llama", tie_word_embeddings=True),
    "llama-mha": raw("llama", num_key_value_heads=6),
    "llama-linear": raw("llama", **rope(rope_type="linear", factor=2.5)),
    "llama-dynamic": raw(
        "llama", **rope(rope_type="dynamic", factor=2.0), max_position_embeddings=16
    ),
    "llama-yarn": raw("llama", rope_parameters=YARN),
    "llama-yarn-mscale": raw("llama", rope_parameters=DEEPSEEK),
    "llama-llama3": raw("llama", rope_parameters=LLAMA3),
    "qwen3": raw("qwen3"),
    "qwen3-tied": raw("qwen3", tie_word_embeddings=True, attention_bias=True),
    "qwen3_moe": raw("qwen3_moe"),
    "qwen3_moe-norm": raw("qwen3_moe", norm_topk_prob=True),
    "qwen3_moe-dense": raw(
        "qwen3_moe",
        num_hidden_layers=4,
        mlp_only_layers=[3],
        decoder_sparse_step=2,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
}


def batch_of(
    tokens: torch.Tensor, documents: Sequence[Sequence[int]] | None = None, *, labels: bool = True
) -> Batch:
    """A batch of whole sequences with labels of the next token; ``documents`` are lengths, by sequence."""
    count, length = tokens.shape
    starts = torch.zeros(count, length, dtype=torch.int64)
    for row, lengths in zip(starts, documents or (), strict=bool(documents)):
        ends = torch.tensor(lengths).cumsum(0)
        assert ends[-1] == length
        row.copy_((ends - torch.tensor(lengths)).repeat_interleave(torch.tensor(lengths)))
    targets = tokens.roll(-1, 1)
    last = torch.cat([starts[:, 1:] != starts[:, :-1], torch.ones(count, 1, dtype=torch.bool)], 1)
    return Batch(
        tokens=tokens,
        labels=targets.masked_fill(last, -100) if labels else None,
        index=torch.arange(length),
        starts=starts,
        samples=torch.arange(count),
        packed=documents is not None,
    )


def tokens_of(count: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SIZES["vocab_size"], (count, length), generator=generator)


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """A model whose every value matters: norms near one, all else far from zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.2 * drawn if "norm" in name else 0.15 * drawn)
    return model


def made(config: Mapping[str, Any], dtype: torch.dtype = torch.float64, **options: Any) -> CausalLM:
    """A whole model with values."""
    model = build(config, **options).to(dtype)
    shaken(model)
    for buffer in model.buffers():
        buffer.zero_()
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by name; every parameter has one."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value."""
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())
