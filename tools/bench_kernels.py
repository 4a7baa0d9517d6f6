"""Time every kernel on a GPU against eager torch, torch.compile and Liger, as shares of this GPU's ceilings.

    python tools/bench_kernels.py [--only norm,cross_entropy] [--json FILE] [--report DIR]

Ceilings come first, in the same run: copy (bytes read plus written), read, and bf16 matrix products
sustained for three seconds, since the power limit does not hold the burst rate. Then each op and its
peers in the order ABBA on the same random inputs, L2 flushed before every call, the GPU kept busy
while the host enqueues so that only device time counts; medians, with the distance between the
quartiles as spread. A share is the floor (each input read once, each output written once; or the
products' operations) over the time, over the ceiling. `--report` writes a table and a plot.
"""

from __future__ import annotations

import argparse
import gc
import html
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import d9d_kernels
from d9d_kernels import reference
from d9d_kernels.types import Place

BF16 = torch.bfloat16
SAMPLES = 10
SPIN_CYCLES = 3_000_000
GIB = 1 << 30

Op = Callable[..., Any]
# Of torch.cuda, whose events are untyped.
cuda: Any = torch.cuda


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        op: what ran.
        size: on which shape.
        provider: whose.
        ms: median time.
        spread: between the quartiles, of the median.
        rate: GB/s or TFLOP/s; 0 where only time counts.
        share: of the ceiling; 0 where there is none.
        gib: peak memory above what was there before; 0 where not measured.
    """

    op: str
    size: str
    provider: str
    ms: float
    spread: float
    rate: float = 0.0
    share: float = 0.0
    gib: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """The floor of an op: bytes against the copy or read rate, or operations."""

    amount: float
    kind: str = "copy"


class Bench:
    """Ceilings of this run, and every row measured so far."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.ceilings: dict[str, float] = {}
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def times(self, call: Op, samples: int) -> list[float]:
        """Device milliseconds of `samples` calls."""
        pairs = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(samples)]
        for start, end in pairs:
            self._flush.zero_()
            cuda._sleep(SPIN_CYCLES)  # noqa: SLF001 - keeps the GPU busy while the host enqueues
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def compare(
        self,
        op: str,
        size: str,
        work: Work | None,
        calls: Mapping[str, Op],
        *,
        samples: int = SAMPLES,
        memory: bool = False,
    ) -> None:
        """Time all providers in the order ABBA."""
        alive, peaks = {}, {}
        for name, call in calls.items():
            try:
                call()
                call()
                peaks[name] = peak_gib(call) if memory else 0.0
                torch.cuda.synchronize()
                alive[name] = call
            except Exception as error:  # noqa: BLE001 - a peer that fails is a line, not the end
                print(f"{op} {size} {name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        order = [*alive, *reversed(alive)]
        found: dict[str, list[float]] = {name: [] for name in alive}
        for name in order:
            found[name] += self.times(alive[name], samples)
        for name, times in found.items():
            self.rows.append(self._row(op, size, name, work, times, peaks[name]))
        torch.cuda.synchronize()

    def _row(
        self, op: str, size: str, name: str, work: Work | None, times: list[float], gib: float
    ) -> Row:
        ms = statistics.median(times)
        low, _, high = statistics.quantiles(times, n=4)
        rate = share = 0.0
        if work is not None:
            rate = work.amount / ms / (1e9 if work.kind == "matmul" else 1e6)
            share = rate / self.ceilings[work.kind]
        return Row(op, size, name, ms, (high - low) / ms, rate, share, gib)

    def training(
        self,
        op: str,
        size: str,
        calls: Mapping[str, Op],
        inputs: tuple[Tensor, ...],
        forward: Work,
        backward: Work,
    ) -> None:
        """Forward of each provider, then its backward alone."""
        self.compare(f"{op} fwd", size, forward, {n: partial(f, *inputs) for n, f in calls.items()})
        backwards = {}
        for name, call in calls.items():
            try:
                backwards[name] = backward_of(call, inputs)
            except Exception as error:  # noqa: BLE001
                print(f"{op} {size} {name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        self.compare(f"{op} bwd", size, backward, backwards)


def backward_of(call: Op, inputs: tuple[Tensor, ...]) -> Op:
    found = call(*inputs)
    outputs = [o for o in (found if isinstance(found, tuple) else (found,)) if o.requires_grad]
    grads = [torch.randn_like(o) for o in outputs]
    leaves = [x for x in inputs if x.requires_grad]
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


def peak_gib(call: Op) -> float:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def compiled(call: Op) -> Op:
    out: Op = torch.compile(call, dynamic=False)
    return out


def liger(module: str) -> Any:
    """A module of Liger's, or None."""
    try:
        return importlib.import_module(f"liger_kernel.ops.{module}")
    except ImportError:
        return None


def normal(*shape: int, std: float = 1.0, grad: bool = True, dtype: torch.dtype = BF16) -> Tensor:
    x = torch.empty(shape, dtype=dtype, device="cuda").normal_(0, std)
    return x.requires_grad_(grad)


def ceilings(bench: Bench) -> None:
    source = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    floats = source.view(torch.float32)
    copy = statistics.median(bench.times(partial(target.copy_, source), 20))
    read = statistics.median(bench.times(partial(torch.sum, floats), 20))
    bench.ceilings["copy"] = 2 * source.numel() * 4 / copy / 1e6
    bench.ceilings["read"] = source.numel() * 4 / read / 1e6
    del source, target, floats
    a, b = normal(8192, 8192, grad=False), normal(8192, 8192, grad=False)
    out = torch.empty_like(a)
    burst = statistics.median(bench.times(lambda: torch.mm(a, b.t(), out=out), 10))
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    began, calls = time.perf_counter(), 0
    start.record()
    while time.perf_counter() - began < 3.0:
        for _ in range(50):
            torch.mm(a, b.t(), out=out)
        calls += 50
        torch.cuda.synchronize()
    end.record()
    torch.cuda.synchronize()
    bench.ceilings["matmul burst"] = 2 * 8192**3 / burst / 1e9
    bench.ceilings["matmul"] = 2 * 8192**3 * calls / start.elapsed_time(end) / 1e9


def norm(bench: Bench) -> None:
    def huggingface(x: Tensor, weight: Tensor) -> Tensor:
        h = x.float()
        return weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    for rows, dim in ((65536, 2048), (32768, 4096), (16384, 7168), (1048576, 128)):
        calls: dict[str, Op] = {
            "ours": lambda x, w: d9d_kernels.rms_norm(x, w, 1e-6),
            "torch": lambda x, w: functional.rms_norm(x, (x.shape[-1],), w, 1e-6),
            "compile": compiled(huggingface),
        }
        if theirs := liger("rms_norm"):
            apply = theirs.LigerRMSNormFunction.apply
            calls["liger"] = lambda x, w, f=apply: f(x, w, 1e-6, 0.0, "llama", False)
        inputs = (normal(rows, dim), normal(dim))
        n = rows * dim
        bench.training("RMSNorm", f"{rows}x{dim}", calls, inputs, Work(4 * n), Work(6 * n))
        torch._dynamo.reset()  # noqa: SLF001 - one compilation per shape, as a model would have


def host(bench: Bench) -> None:
    """Wall time of a small forward and backward: what the host spends."""
    x, weight = normal(16, 1024), normal(1024)
    grad = torch.randn_like(x)
    calls: dict[str, Op] = {
        "ours": d9d_kernels.rms_norm,
        "torch": lambda x, w: functional.rms_norm(x, (1024,), w, 1e-6),
    }
    if theirs := liger("rms_norm"):
        apply = theirs.LigerRMSNormFunction.apply
        calls["liger"] = lambda x, w: apply(x, w, 1e-6, 0.0, "llama", False)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for name in [*calls, *reversed(calls)] * 4:
        for _ in range(20):
            torch.autograd.grad(calls[name](x, weight), (x, weight), grad)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(200):
            torch.autograd.grad(calls[name](x, weight), (x, weight), grad)
        torch.cuda.synchronize()
        found[name].append((time.perf_counter() - began) / 200 * 1e3)
    for name, times in found.items():
        low, middle, high = statistics.quantiles(times, n=4)
        bench.rows.append(Row("RMSNorm f+b, host", "16x1024", name, middle, (high - low) / middle))


def glu(bench: Bench) -> None:
    def pairs(x: Tensor) -> Tensor:
        return functional.silu(x[..., ::2]) * x[..., 1::2]

    def halves(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up

    def weighted(x: Tensor, probs: Tensor) -> Tensor:
        return (pairs(x.float()) * probs[:, None]).to(x.dtype)

    for rows, ffn in ((16384, 12288), (262144, 768)):
        n, size = rows * ffn, f"{rows}x2x{ffn}"
        x, probs = normal(rows, 2 * ffn), torch.rand(rows, device="cuda").requires_grad_()
        calls: dict[str, Op] = {
            "ours": lambda x: d9d_kernels.swiglu(x, interleaved=False),
            "torch": halves,
            "compile": compiled(halves),
        }
        if theirs := liger("swiglu"):
            calls["liger"] = theirs.LigerFusedGateUpSiLUMulFunction.apply
        bench.training("SwiGLU halves", size, calls, (x,), Work(6 * n), Work(10 * n))
        calls = {"ours": d9d_kernels.swiglu, "torch": pairs, "compile": compiled(pairs)}
        bench.training("SwiGLU pairs", size, calls, (x,), Work(6 * n), Work(10 * n))
        calls = {
            "ours": lambda x, p: d9d_kernels.swiglu(x, probs=p),
            "torch": weighted,
            "compile": compiled(weighted),
        }
        bench.training("SwiGLU pairs x probs", size, calls, (x, probs), Work(6 * n), Work(10 * n))
        torch._dynamo.reset()  # noqa: SLF001


def rotary(bench: Bench) -> None:
    seq, q_heads, k_heads, dim = 32768, 32, 8, 128
    turn = torch.outer(
        torch.arange(seq, device="cuda").float(),
        1e6 ** (-torch.arange(0, dim, 2, device="cuda").float() / dim),
    )
    cos, sin = turn.cos(), turn.sin()
    q, k = normal(1, seq, q_heads, dim), normal(1, seq, k_heads, dim)
    weights = normal(dim), normal(dim)
    n, size = seq * (q_heads + k_heads) * dim, f"{seq}x({q_heads}+{k_heads})x{dim}"

    def both(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(d9d_kernels.rope(x, cos, sin) for x in (q, k))

    def eager(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(reference.rope(x, cos, sin) for x in (q, k))

    calls: dict[str, Op] = {"ours": both, "torch": eager, "compile": compiled(eager)}
    bench.training("RoPE", size, calls, (q, k), Work(4 * n), Work(4 * n))
    if theirs := liger("rope"):
        table = torch.cat((turn, turn), -1)[None]
        c, s = table.cos().to(BF16), table.sin().to(BF16)
        heads = [x.detach().transpose(1, 2) for x in (q, k)]
        apply = theirs.LigerRopeFunction.apply
        bench.compare(
            "RoPE fwd", size, Work(4 * n), {"liger (in place)": lambda: apply(*heads, c, s)}
        )

    def fused(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> Any:
        return d9d_kernels.qk_norm_rope(q, k, q_weight, k_weight, cos, sin)

    def apart(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> Any:
        return reference.qk_norm_rope(q, k, q_weight, k_weight, cos, sin)

    calls = {"ours": fused, "torch": apart, "compile": compiled(apart)}
    bench.training("q/k-norm + RoPE", size, calls, (q, k, *weights), Work(4 * n), Work(6 * n))


def cross_entropy(bench: Bench) -> None:
    tokens, vocab = 8192, 151936
    for hidden in (4096, 2048):
        x, weight = normal(tokens, hidden), normal(vocab, hidden, std=0.02)
        labels = torch.randint(0, vocab, (tokens,), device="cuda")
        calls = {
            name: training_step(loss, x, weight, labels)
            for name, loss in cross_entropy_losses().items()
        }
        flops = Work(6 * tokens * hidden * vocab, "matmul")
        size = f"{tokens}x{hidden}x{vocab}"
        bench.compare("linear + CE f+b", size, flops, calls, samples=4, memory=True)
        x.grad = weight.grad = None
        torch._dynamo.reset()  # noqa: SLF001


def training_step(loss: Op, x: Tensor, weight: Tensor, labels: Tensor) -> Op:
    def step() -> None:
        loss(x, weight, labels).backward()
        x.grad = weight.grad = None

    return step


def cross_entropy_losses() -> dict[str, Op]:
    def eager(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(x, weight), labels, reduction="sum")

    def wide(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = functional.linear(x, weight).float()
        return functional.cross_entropy(logits, labels, reduction="sum")

    return {
        "ours": d9d_kernels.linear_cross_entropy,
        "torch": eager,
        "compile": compiled(wide),
        **dict(liger_cross_entropy()),
    }


def liger_cross_entropy() -> Iterator[tuple[str, Op]]:
    """With the weight's gradient summed in bf16, as by default, and in fp32."""
    try:
        module = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    except ImportError:
        return
    for name, options in {"liger": {}, "liger fp32 dW": {"accum_dtype": torch.float32}}.items():
        loss = module.LigerFusedLinearCrossEntropyLoss(reduction="sum", **options)
        yield name, lambda x, weight, labels, f=loss: f(weight, x, labels)


def moe(bench: Bench) -> None:
    tokens, hidden, experts, k = 16384, 2048, 128, 8
    size = f"{tokens}x{hidden} top {k} of {experts}"
    x = normal(tokens, hidden)
    ids = torch.rand(tokens, experts, device="cuda").topk(k, -1).indices
    probs = torch.rand(tokens, k, device="cuda").requires_grad_()
    route = d9d_kernels.moe_route(ids, experts)
    rows = normal(tokens * k, hidden)

    def sort() -> Any:
        return reference.moe_route(ids, experts)

    bench.compare(
        "MoE route",
        size,
        None,
        {"ours": lambda: d9d_kernels.moe_route(ids, experts), "torch": sort},
    )
    spread, gather = Work(2 * tokens * hidden * (1 + k)), Work(2 * tokens * hidden * (1 + 2 * k))

    def permute(op: Op) -> Op:
        return lambda x, p: op(x, route, p)

    calls = {
        "ours": permute(d9d_kernels.moe_permute),
        "torch": permute(reference.moe_permute),
        "compile": compiled(permute(reference.moe_permute)),
    }
    bench.training("MoE permute", size, calls, (x, probs), spread, spread)
    calls = {
        "ours": permute(d9d_kernels.moe_unpermute),
        "torch": permute(reference.moe_unpermute),
        "compile": compiled(permute(reference.moe_unpermute)),
    }
    bench.training("MoE unpermute", size, calls, (rows, probs), spread, gather)


def grouped(bench: Bench) -> None:
    for experts, rows, inner, outer in ((128, 65536, 2048, 1536), (16, 65536, 4096, 3072)):
        x, weights = normal(rows, inner), normal(experts, outer, inner, std=0.02)
        ends = torch.arange(1, experts + 1, device="cuda") * (rows // experts)
        offsets = ends.to(torch.int32)

        def plain(x: Tensor, w: Tensor, offsets: Tensor = offsets) -> Tensor:
            return functional.grouped_mm(x, w.transpose(1, 2), offs=offsets)

        def wrapped(x: Tensor, w: Tensor, offsets: Tensor = offsets) -> Tensor:
            return d9d_kernels.grouped_mm(x, w, offsets)

        flops, size = 2 * rows * inner * outer, f"{experts} of {rows}x{inner}x{outer}"
        bench.training(
            "grouped_mm",
            size,
            {"ours": wrapped, "torch": plain},
            (x, weights),
            Work(flops, "matmul"),
            Work(2 * flops, "matmul"),
        )


def compiled_rounding(x: Tensor) -> Tensor:
    """Stochastic rounding as one would write it for torch.compile."""
    noise = torch.randint(0, 1 << 16, x.shape, device=x.device, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32).to(BF16)


def compiled_adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    grad = g.float()
    mean = 0.9 * m.float() + 0.1 * grad
    square = 0.95 * v.float() + 0.05 * grad * grad
    new = p.float() * (1 - 1e-5) - 1e-4 * (mean / 0.5) / ((square / 0.3).sqrt() + 1e-8)
    p.copy_(compiled_rounding(new))
    m.copy_(compiled_rounding(mean) if m.dtype == BF16 else mean)
    v.copy_(compiled_rounding(square) if v.dtype == BF16 else square)


def model_shapes() -> list[tuple[int, ...]]:
    """596M parameters in 309 tensors, those of Qwen3-0.6B."""
    hidden, ffn = 1024, 3072
    square, norms = [(2 * hidden, hidden), (hidden, 2 * hidden)], [(hidden,), (hidden,)]
    kv, mlp = [(hidden, hidden)] * 2, [(ffn, hidden), (ffn, hidden), (hidden, ffn)]
    return [*square, *kv, *mlp, *norms, (128,), (128,)] * 28 + [(151936, hidden)]


def optimizer(bench: Bench) -> None:
    for moments, unit in ((torch.float32, 22), (BF16, 14)):
        name = f"SR AdamW, {'fp32' if unit == 22 else 'bf16'} moments"
        n = 1 << 28
        flat = adamw_state([(n,)], moments)
        call = compiled(compiled_adamw)
        calls = {
            "ours": partial(adamw, *flat),
            "compile": partial(call, *(tensors[0] for tensors in flat)),
        }
        bench.compare(name, f"{n >> 20}Mi in 1", Work(unit * n), calls)
        del flat, calls
        shapes = model_shapes()
        n = sum(torch.Size(s).numel() for s in shapes)
        many = adamw_state(shapes, moments)
        size = f"{n / 1e6:.0f}M in {len(shapes)}"
        bench.compare(name, size, Work(unit * n), {"ours": partial(adamw, *many)})
        grads = many[1]
        calls = {"ours": partial(d9d_kernels.sum_of_squares, grads)}
        if moments == torch.float32:
            calls["torch"] = partial(torch.nn.utils.get_total_norm, grads)
            bench.compare("grad norm bf16", size, Work(2 * n, "read"), calls)
        else:
            wide = [g.float() for g in grads]
            calls = {
                "ours": partial(d9d_kernels.sum_of_squares, wide),
                "torch": partial(torch.nn.utils.get_total_norm, wide),
            }
            bench.compare("grad norm fp32", size, Work(4 * n, "read"), calls)
        torch._dynamo.reset()  # noqa: SLF001
    x = normal(1 << 28, grad=False, dtype=torch.float32)
    out = torch.empty_like(x, dtype=BF16)
    rounding = compiled(lambda out, x: out.copy_(compiled_rounding(x)))
    calls = {
        "ours": partial(d9d_kernels.stochastic_copy_, out, x, seed=1, step=1),
        "compile": partial(rounding, out, x),
    }
    bench.compare("SR copy", "256Mi", Work(6 * x.numel()), calls)


def adamw_state(shapes: list[tuple[int, ...]], moments: torch.dtype) -> list[list[Tensor]]:
    def make(dtype: torch.dtype, std: float) -> list[Tensor]:
        return [normal(*s, std=std, grad=False, dtype=dtype) for s in shapes]

    squares = [v.abs_() for v in make(moments, 1e-6)]
    return [make(BF16, 0.02), make(BF16, 1e-3), make(moments, 1e-3), squares]


def adamw(p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
    places = [Place(i << 32, x.numel(), x.numel()) for i, x in enumerate(p)]
    d9d_kernels.stochastic_adamw_(p, g, m, v, places, lr=1e-4, weight_decay=0.1, step=10, seed=1)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "norm": norm,
    "host": host,
    "glu": glu,
    "rotary": rotary,
    "cross_entropy": cross_entropy,
    "moe": moe,
    "grouped": grouped,
    "optimizer": optimizer,
}


def table(rows: list[Row]) -> str:
    """Markdown: a line per op and size, ours first, then each peer."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.size), []).append(row)
    lines = ["| op | size | ours | peers | ours / best peer |", "|---|---|---|---|---|"]
    for (op, size), members in groups.items():
        ours = [cell(r) for r in members if r.provider == "ours"]
        peers = [r for r in members if r.provider != "ours"]
        ratio = ""
        if ours and peers:
            mine = next(r.ms for r in members if r.provider == "ours")
            ratio = f"{min(p.ms for p in peers) / mine:.2f}x as fast"
        theirs = "; ".join(f"{p.provider} {cell(p)}" for p in peers)
        lines.append(f"| {op} | {size} | {''.join(ours)} | {theirs} | {ratio} |")
    return "\n".join(lines)


def cell(row: Row) -> str:
    parts = [f"{row.ms:.4g} ms"]
    if row.share:
        parts.append(f"{row.share:.0%}")
    if row.gib:
        parts.append(f"{row.gib:.2f} GiB")
    if row.spread > 0.02:
        parts.append(f"±{row.spread / 2:.0%}")
    return ", ".join(parts)


def plot(rows: list[Row]) -> str:
    """SVG: shares of the ceiling, a bar for each provider."""
    colours = {"ours": "#1f6f54", "torch": "#b9b9b9", "compile": "#7f8fb3"}
    shown = [r for r in rows if r.share]
    height = 18 * len(shown) + 30
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="900" font-family="sans-serif"'
    out = [f'{svg} font-size="11" height="{height}">']
    for i, row in enumerate(shown):
        y = 20 + 18 * i
        label = html.escape(f"{row.op} {row.size} {row.provider}")
        colour = colours.get(row.provider, "#c9a36a")
        out.append(f'<text x="390" y="{y + 11}" text-anchor="end">{label}</text>')
        out.append(
            f'<rect x="400" y="{y}" width="{440 * row.share:.1f}" height="14" fill="{colour}"/>'
            f'<text x="{405 + 440 * row.share:.1f}" y="{y + 11}">{row.share:.0%}</text>'
        )
    out.append(f'<path d="M840 14V{height - 8}" stroke="#888" stroke-dasharray="3"/></svg>')
    return "\n".join(out)


def heading(bench: Bench) -> str:
    triton = importlib.import_module("triton")
    c = bench.ceilings
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}. "
        f"Ceilings of this run: copy {c['copy']:.0f} GB/s, read {c['read']:.0f} GB/s, bf16 products "
        f"{c['matmul']:.0f} TFLOP/s sustained over 3 s ({c['matmul burst']:.0f} in bursts)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by comma")
    parser.add_argument("--json", type=Path, help="write all figures")
    parser.add_argument(
        "--report", type=Path, help="write results.md and results.svg into this directory"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench_kernels: needs a CUDA device, found none\n")
    if unknown := set(options.only.split(",")) - set(SECTIONS):
        parser.error(f"unknown sections {sorted(unknown)}, expected some of {sorted(SECTIONS)}")
    torch.manual_seed(0)
    # Without this a compiled backward cannot be run again on the same graph.
    functorch: Any = importlib.import_module("torch._functorch.config")
    functorch.donated_buffer = False
    bench = Bench()
    ceilings(bench)
    for name in options.only.split(","):
        began = time.perf_counter()
        SECTIONS[name](bench)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    print(heading(bench))
    print(table(bench.rows))
    if options.json:
        figures = {"ceilings": bench.ceilings, "rows": [asdict(r) for r in bench.rows]}
        options.json.write_text(json.dumps(figures, indent=1))
    if options.report:
        options.report.mkdir(parents=True, exist_ok=True)
        text = f"# Kernels, measured\n\n{heading(bench)}\n\n{table(bench.rows)}\n\n![shares](results.svg)\n"
        (options.report / "results.md").write_text(text)
        (options.report / "results.svg").write_text(plot(bench.rows))


if __name__ == "__main__":
    main()
