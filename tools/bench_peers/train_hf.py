"""transformers and Liger's fused linear cross-entropy in the benchmark, in a plain loop."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bench_peers.train_case import (
    BETAS,
    LR,
    MAX_NORM,
    SEED,
    WEIGHT_DECAY,
    Case,
    Trainee,
    random_tokens,
)
from bench_peers.train_mesh import join, shard_on_one


def prepare(case: Case) -> Trainee:
    """Layers compiled, then sharded on a mesh of one: float32 parameters, bf16 computation."""
    join(case.device)
    torch.manual_seed(SEED)
    with torch.device(case.device):
        model = _model(case)
    model.train()
    chunk = {} if case.dry else _with_liger(model, case)
    layers = model.model.layers
    if case.compiled and not case.dry:
        for index, layer in enumerate(layers):
            layers[index] = torch.compile(layer)
    shard_on_one(model, layers, case.device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    batches, taken = random_tokens(case, case.device), 0

    def step() -> Tensor:
        nonlocal taken
        taken += 1
        tokens = batches[taken % len(batches)][:, :-1]
        optimizer.zero_grad()
        # It shifts the labels itself.
        loss: Tensor = model(input_ids=tokens, labels=tokens, **chunk).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True)
        optimizer.step()
        return loss.detach()

    facts = {"attention": model.config._attn_implementation}  # noqa: SLF001 - no public way
    return Trainee(step, sum(p.numel() for p in parameters), facts)


def _with_liger(model: Any, case: Case) -> dict[str, int]:
    """Its loss alone, whose kernels need a GPU; what the model's forward then takes beside its inputs."""
    patches = import_module("liger_kernel.transformers.monkey_patch")
    others = dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy"), False)
    patches._apply_liger_kernel_to_instance(  # noqa: SLF001 - the public one needs a checkpoint
        model, fused_linear_cross_entropy=True, **others
    )
    return {"chunk_mem_const": case.chunk}


def _model(case: Case) -> Any:
    transformers = import_module("transformers")
    sizes = {k: v for k, v in case.config.items() if k not in ("model_type", "rope_theta")}
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": case.config["rope_theta"]}
    sizes |= {"use_cache": False, "attn_implementation": "sdpa"}
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    if case.config["model_type"] == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    config = transformers.Qwen3MoeConfig(experts_implementation="grouped_mm", **sizes)
    return transformers.Qwen3MoeForCausalLM(config)
