"""torchtitan 0.2.2 in the benchmark: its own Trainer, with stubs for tokenizer and data."""

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench_peers.train_case import LR, SEED, Case, Trainee, random_tokens
from bench_peers.train_mesh import name_rank, shard_on_one


class _Tokens:
    """Its data loader: random tokens on the CPU."""

    def __init__(self, case: Case) -> None:
        self._batches = random_tokens(case, "cpu")

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            for tokens in self._batches:
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take over: the stream is endless."""


def prepare(case: Case) -> Trainee:
    """Its model, compilation, loss and step; fully_shard on a mesh of one after its own parallelism.

    On one GPU it would use autocast, which is slower; both peers get the same sharding. Dense models
    are its Qwen3 without query and key norms, tied: the parameters of a tied Llama.
    """
    name_rank()
    if case.dry:
        _find_cpu()
    train_spec = import_module("torchtitan.protocols.train_spec")
    trainer_of = import_module("torchtitan.train").Trainer
    job = import_module("torchtitan.config").JobConfig()
    logging.getLogger().setLevel(logging.WARNING)
    stock = train_spec.get_train_spec("qwen3")

    def parallelize(model: Any, dims: Any, job: Any) -> Any:
        model = stock.parallelize_fn(model, dims, job)
        shard_on_one(model, model.layers.values(), case.device)
        return model

    spec = dataclasses.replace(
        stock,
        model_args={"bench": _arguments(case, stock.model_args)},
        parallelize_fn=parallelize,
        build_dataloader_fn=lambda **_: _Tokens(case),
        build_tokenizer_fn=None,
        build_validator_fn=None,
        state_dict_adapter=None,
    )
    train_spec.register_train_spec("bench", spec)
    trainer = trainer_of(_configured(case, job))
    trainer.maybe_enable_amp = contextlib.nullcontext()
    return _trainee(trainer)


def _arguments(case: Case, stock: dict[str, Any]) -> Any:
    config = case.config
    experts = config.get("num_experts", 0)
    arguments = type(stock["0.6B"])(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        hidden_dim=config["intermediate_size"],
        rope_theta=config["rope_theta"],
        qk_norm=bool(experts),
        enable_weight_tying=config["tie_word_embeddings"],
        max_seq_len=case.length,
        moe_enabled=bool(experts),
    )
    if experts:
        arguments.moe_inter_dim = config["moe_intermediate_size"]
        arguments.moe_args = dataclasses.replace(
            stock["30B-A3B"].moe_args, num_experts=experts, top_k=config["num_experts_per_tok"]
        )
    return arguments


def _configured(case: Case, job: Any) -> Any:
    job.job.dump_folder = tempfile.mkdtemp()
    job.model.name = job.model.flavor = "bench"
    job.training.local_batch_size, job.training.seq_len = case.sequences, case.length
    job.training.dtype, job.training.steps = "float32", 10_000
    job.optimizer.lr, job.optimizer.implementation = LR, "fused"
    job.lr_scheduler.warmup_steps = 10
    job.compile.enable = case.compiled and not case.dry
    job.activation_checkpoint.mode = "none"
    job.metrics.log_freq = 1_000_000
    job.debug.seed = SEED
    return job


def _trainee(trainer: Any) -> Trainee:
    seen: list[Tensor] = []
    plain = trainer.loss_fn

    def loss_fn(predictions: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = plain(predictions, labels)
        seen[:] = [total.detach() / labels.numel()]
        return total

    trainer.loss_fn = loss_fn
    batches = trainer.batch_generator(trainer.dataloader)

    def step() -> Tensor:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)
        return seen[0]

    unique = {id(p): p.numel() for part in trainer.model_parts for p in part.parameters()}
    return Trainee(step, sum(unique.values()))


def _find_cpu() -> None:
    """Let it take the CPU for an accelerator, which a dry run has none of."""
    torch._utils._get_available_device_type = lambda: "cpu"  # noqa: SLF001
    properties = SimpleNamespace(total_memory=1 << 34)
    stubs: dict[str, Any] = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: properties,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda *_: {},
    }
    for name, stub in stubs.items():
        setattr(torch.cpu, name, stub)
