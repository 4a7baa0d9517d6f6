"""The models that transformers builds, and our twins with their values."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from helpers.decoders import Raw, shaken
from helpers.evaluate import evaluate
from helpers.families import nodes_of
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, modeling_rope_utils
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from d9d_ckpt.checkpointer.saver import Checkpointer
from d9d_ckpt.models.family import to_training
from d9d_ckpt.models.registry import family_of
from d9d_train.models.decoder import CausalLM
from d9d_train.models.registry import build


@contextmanager
def exact() -> Iterator[None]:
    """transformers without its casts to float32, which cut float64."""

    class Wide:
        float = float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    modules = modeling_llama, modeling_qwen3, modeling_qwen3_moe, modeling_rope_utils
    patches = [mock.patch.object(module, "torch", Wide()) for module in modules]
    patches.append(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
    default = torch.get_default_dtype()
    for patch in patches:
        patch.start()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        for patch in reversed(patches):
            patch.stop()


def reference(config: Raw, dtype: torch.dtype) -> nn.Module:
    """The model that transformers builds, with values."""
    keys = {key: value for key, value in config.items() if key != "model_type"}
    of = AutoConfig.for_model(config["model_type"], **keys)
    kinds = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    return shaken(AutoModelForCausalLM.from_config(of, dtype=dtype, **kinds))


def twin(model: nn.Module, at: Path, dtype: torch.dtype) -> CausalLM:
    """Our model with the values of transformers', by way of the checkpoint that it saves."""
    model.save_pretrained(at / "hf")
    ours = build(model.config.to_dict()).to(dtype)
    with Checkpointer(at / "run") as saver:
        saver.load({"model": dict(ours.named_parameters())}, url=at / "hf")
    return ours


def training(config: Raw, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of transformers' names, a gradient each, as ours are cut and named."""
    family = family_of(config)
    nodes = nodes_of(dict(tensors))
    mapped = to_training(family, family.config(config), family.experts_layout(tensors), nodes)
    return {name: evaluate(node, dict(tensors)) for name, node in mapped.nodes.items()}
