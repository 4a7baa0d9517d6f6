"""What the training benchmark times: three models, and how a trainer's steps become figures."""

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from d9d_ckpt.models.registry import family_of
from d9d_train.telemetry import flops_per_token

SEED = 1234
WARM_UP, TIMED, PROFILED = 5, 15, 2
LR, BETAS, WEIGHT_DECAY, MAX_NORM = 1e-4, (0.9, 0.95), 0.1, 1.0

# Of torch.cuda, whose events are untyped.
cuda: Any = torch.cuda

_COMMON = {
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_theta": 10_000.0,
}
MODELS: dict[str, dict[str, Any]] = {
    # Dense, 1.2B.
    "a": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        **_COMMON,
    },
    # Dense, 3.2B.
    "b": {
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        **_COMMON,
    },
    # Mixture of experts, 3B of which a token sees 0.5B.
    "c": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 768,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        **_COMMON,
    },
}
_TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One trainer on one model.

    Attributes:
        trainer: ``ours``, ``hf`` or ``titan``; ``matmul`` for the rate of this GPU.
        model: A key of `MODELS`.
        sequences: Of a step.
        compiled: Whether layers are compiled.
        chunk: ``chunk_mem_const`` of Liger's fused loss, whose default of 1 is slow here.
        steps: Timed steps.
        dry: A tiny model on the CPU, to see that everything runs.
    """

    trainer: str
    model: str = "a"
    sequences: int = 1
    compiled: bool = True
    chunk: int = 8
    steps: int = TIMED
    dry: bool = False

    @property
    def name(self) -> str:
        """As printed, and as ``--only`` matches it."""
        if self.trainer == "matmul":
            return self.trainer
        eager = "" if self.compiled else ",eager"
        return f"{self.trainer},{self.model},b{self.sequences}{eager}"

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        full = MODELS[self.model]
        return full | {k: v for k, v in _TINY.items() if k in full} if self.dry else full

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return int(self.config["max_position_embeddings"])

    @property
    def device(self) -> str:
        """Device type."""
        return "cpu" if self.dry else "cuda"

    @property
    def flops_per_token(self) -> int:
        """One formula for every trainer."""
        config = self.config
        sizes = family_of(config).config(config)
        chosen = config.get("num_experts_per_tok", 0)
        return flops_per_token(sizes, experts_per_token=chosen, seq_len=self.length)


@dataclass(frozen=True, slots=True)
class Trainee:
    """A trainer that is ready.

    Attributes:
        step: Forward, backward, clip and update; gives the mean loss.
        parameters: How many it trains.
        facts: What else is worth telling.
    """

    step: Callable[[], Tensor | float]
    parameters: int
    facts: dict[str, Any] = field(default_factory=dict)


def random_tokens(case: Case, device: str, count: int = 8) -> list[Tensor]:
    """Batches [sequences, length + 1] int64, the same for every trainer."""
    generator = torch.Generator().manual_seed(SEED)
    shape, vocab = (case.sequences, case.length + 1), int(case.config["vocab_size"])
    return [torch.randint(vocab, shape, generator=generator).to(device) for _ in range(count)]


def measured(case: Case, trainee: Trainee) -> dict[str, Any]:
    """Figures of a trainer's steps, and where their time goes."""
    gc.collect()
    gc.disable()
    begun = time.perf_counter()
    first = float(trainee.step())
    compiled_s = time.perf_counter() - begun
    for _ in range(1 if case.dry else WARM_UP - 1):
        trainee.step()
    if case.dry:
        ms, host, last = _timed_on_cpu(trainee.step, case.steps)
        peak = 0
    else:
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        ms, host, last = _timed_on_gpu(trainee.step, case.steps)
        peak = cuda.max_memory_allocated()
    tokens, median = case.sequences * case.length, statistics.median(ms)
    rate = tokens / median * 1e3
    return {
        "parameters": trainee.parameters,
        **trainee.facts,
        "loss_first": first,
        "loss_last": last,
        "first_step_s": round(compiled_s, 1),
        "ms": [round(x, 2) for x in ms],
        "ms_median": round(median, 2),
        "ms_p10": round(_quantile(ms, 0.1), 2),
        "ms_p90": round(_quantile(ms, 0.9), 2),
        "host_ms": round(statistics.median(host), 1),
        "tokens_per_s": round(rate),
        "flops_per_token": case.flops_per_token,
        "tflops": round(rate * case.flops_per_token / 1e12, 1),
        "peak_gib": round(peak / 2**30, 1),
        **({} if case.dry else profile(trainee.step)),
    }


Times = tuple[list[float], list[float], float]


def _timed_on_gpu(step: Callable[[], Tensor | float], steps: int) -> Times:
    """Milliseconds of each step on the device and on the host, and the last loss."""
    events = [cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    host, loss = [], torch.tensor(0.0)
    events[0].record()
    for event in events[1:]:
        begun = time.perf_counter()
        loss = torch.as_tensor(step())
        host.append((time.perf_counter() - begun) * 1e3)
        event.record()
    cuda.synchronize()
    return _between(events), host, float(loss)


def _between(events: list[Any]) -> list[float]:
    """Milliseconds from each event to the next."""
    return [first.elapsed_time(second) for first, second in pairwise(events)]


def _timed_on_cpu(step: Callable[[], Tensor | float], steps: int) -> Times:
    ms, loss = [], 0.0
    for _ in range(steps):
        begun = time.perf_counter()
        loss = float(step())
        ms.append((time.perf_counter() - begun) * 1e3)
    return ms, ms, loss


def _quantile(values: Iterable[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[round(part * (len(ordered) - 1))]


# What a kernel's name says of its work; the first that matches counts. Triton kernels of the compiler
# are pointwise work and reductions, fused; ours for norms, rotation and SwiGLU share their names.
KINDS = (
    ("attention", r"flash|fmha|sdpa|attention"),
    ("loss", r"cross_entropy|[Ss]oft[Mm]ax|nll_loss|_whole_rows|element_mul|_scaled$"),
    ("clip", r"LpNorm|BinaryOpScalar|BinaryOpListAlphaFunctor|foreach_tensor_norm"),
    ("adamw", r"[Aa]dam"),
    ("expert matmul", r"GroupProblem|[Gg]rouped"),
    ("matmul", r"gemm|nvjet|cutlass|xmma|cublas|splitK"),
    (
        "routing",
        (
            r"_spread|_gather|_count|_scan|_place|_zero_tail|[Ss]ort|[Rr]adix|[Tt]op[Kk]|isto|cumsum"
            r"|index|gather|scatter"
        ),
    ),
    ("fused pointwise", r"^triton_"),
    ("copies", r"[Mm]emcpy|[Mm]emset|copy|Copy|CatArray|Fill|chunk_cat|split_with_sizes|nccl"),
    ("norm and rope", r"^_forward$|^_backward$|^_rotate$|^_sum_rows$|rms|rope"),
    ("pointwise", r"elementwise|reduce|vectorized"),
)


def profile(step: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, the largest kernels, and how long the GPU idles."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            step()
        cuda.synchronize()
    kinds: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    spans = []
    for event in profiler.events() or ():
        if event.device_type.name != "CUDA":
            continue
        start, end = event.time_range.start, event.time_range.end
        spans.append((start, end))
        took = (end - start) / 1e3 / PROFILED
        kind = _kind(event.name)
        kinds[kind] = kinds.get(kind, 0.0) + took
        kernel = kernels.setdefault(f"{kind}: {event.name[:120]}", [0.0, 0.0])
        kernel[0] += took
        kernel[1] += 1 / PROFILED
    largest = sorted(kernels.items(), key=lambda item: -item[1][0])[:25]
    return {
        "profile_ms": {k: round(v, 2) for k, v in sorted(kinds.items(), key=lambda x: -x[1])},
        "idle_share": round(_idle(spans), 4),
        "kernels": [[name, round(ms, 3), calls] for name, (ms, calls) in largest],
    }


def _kind(name: str) -> str:
    return next((kind for kind, names in KINDS if re.search(names, name)), "other")


def _idle(spans: list[tuple[float, float]]) -> float:
    """The share of the time from first to last kernel in which none ran."""
    if not spans:
        return 0.0
    spans.sort()
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return 1 - busy / (end - spans[0][0])


def matmul_rate(dry: bool) -> dict[str, Any]:
    """TFLOP/s of bf16 products of 8192 x 8192, at first and once power limits the clock."""
    if dry:
        return {"burst": 1.0, "sustained": 1.0}
    n = 8192
    generator = torch.Generator("cuda").manual_seed(SEED)
    a, b = (
        torch.randn(n, n, device="cuda", generator=generator).to(torch.bfloat16) for _ in range(2)
    )
    out = torch.empty_like(a)

    def rate(count: int) -> float:
        events = [cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            torch.mm(a, b, out=out)
            event.record()
        cuda.synchronize()
        return 2 * n**3 / statistics.median(_between(events)) / 1e9

    rate(3)
    burst = rate(10)
    rate(1200)
    return {
        "burst": round(burst),
        "sustained": round(rate(1200)),
        "gpu": torch.cuda.get_device_name(),
    }
