"""Training steps of ours, torchtitan 0.2.2, and transformers with Liger's loss, on one GPU, in one run.

    python tools/bench_train.py [--only NAME;...] [--budget SECONDS] [--json FILE] [--dry]

Three models: (a) dense 1.2B and (b) dense 3.2B at 8192 tokens, (c) a mixture of experts, 3B of which
0.5B are active, at 4096. A step is forward, backward, clipping to 1.0 and fused AdamW; float32
parameters, gradients and states, bf16 computation through FSDP2 on a mesh of one; layers compiled;
random tokens. Every case has a process of its own; the next one imports while one runs. After 5 steps,
15 are timed by events between them, without a synchronisation that the trainer does not make itself;
then two run under the profiler. The rate of bf16 products of 8192 x 8192 on the same GPU comes first,
since its power limit moves all figures alike.

--dry runs tiny models on the CPU. Peers that are not installed fail alone, as do torchtitan's experts
without a GPU.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import IO, Any

from bench_peers.train_case import Case, matmul_rate, measured

CASES = (
    Case("matmul"),
    Case("ours", "a", 4),
    Case("titan", "a", 4),
    Case("hf", "a", 4),
    Case("ours", "c", 12),
    Case("hf", "c", 12, chunk=16),
    Case("ours", "b", 3),
    Case("titan", "b", 3),
    Case("hf", "b", 3),
    Case("titan", "c", 8),
    Case("ours", "c", 8),
    Case("hf", "c", 8, chunk=16),
)
PEAK = 989.0
"""TFLOP/s in bf16 by the datasheet."""

LEAST_S = 25.0
"""No case is begun with less left of the budget."""

LIMIT_S = 150.0
"""What a case may take before it is given up."""

TOLD = "RESULT "
PACKAGES = ("torch", "triton", "transformers", "liger_kernel", "torchtitan", "nvidia-cudnn-cu13")


def main() -> None:
    """Run the cases that were asked for and print a line for each."""
    args = _arguments()
    if args.worker:
        _work()
        return
    wanted = [_parsed(text) for text in args.case] or CASES
    wanted = [c for c in wanted if any(part in c.name for part in args.only.split(";"))]
    wanted = [replace(case, dry=args.dry, steps=args.steps) for case in wanted]
    report: dict[str, Any] = {"versions": _versions(), "cases": []}
    with open(args.log, "a") as log:
        for result in _results(wanted, args.budget, log):
            if "burst" in result:
                report["matmul"] = result
            report["cases"].append(result)
            print(_line(result, report.get("matmul", {}).get("sustained")), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(report, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="parts of names: ours;,a,")
    parser.add_argument(
        "--case", action="append", default=[], help="trainer,model,bN[,eager] in place of all"
    )
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of a case")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--log", default=os.devnull, help="what the cases print beside their results"
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _parsed(text: str) -> Case:
    trainer, model, batch, *rest = text.split(",")
    return Case(trainer, model, int(batch[1:]), "eager" not in rest)


def _versions() -> dict[str, str]:
    out = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            out[package] = metadata.version(package)
    return out


# -- the driver -------------------------------------------------------------------------------


def _results(cases: Sequence[Case], budget: float, log: IO[str]) -> Iterator[dict[str, Any]]:
    """Each case's figures, or what went wrong with it."""
    until = time.monotonic() + budget
    ready = _start(log) if cases else None
    for index, case in enumerate(cases):
        left = until - time.monotonic()
        assert ready is not None  # noqa: S101 - for the type checker
        if left < LEAST_S and not case.dry:
            yield {"name": case.name, "error": f"not begun: {left:.0f} s left"}
            continue
        process, ready = ready, _start(log) if index + 1 < len(cases) else None
        begun = time.monotonic()
        result = _told(process, case, min(LIMIT_S, left))
        yield {"name": case.name, **result, "seconds": round(time.monotonic() - begun, 1)}
    if ready is not None:
        ready.kill()


def _start(log: IO[str]) -> subprocess.Popen[str]:
    """A process that imports, then waits for its case."""
    return subprocess.Popen(  # noqa: S603 - ourselves
        [sys.executable, __file__, "--worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )


def _told(process: subprocess.Popen[str], case: Case, limit: float) -> dict[str, Any]:
    try:
        out, _ = process.communicate(json.dumps(asdict(case)) + "\n", timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"given up after {limit:.0f} s"}
    for line in out.splitlines():
        if line.startswith(TOLD):
            result: dict[str, Any] = json.loads(line.removeprefix(TOLD))
            return result
    return {"error": f"ended with {process.returncode} and no result"}


def _line(result: dict[str, Any], sustained: float | None) -> str:
    name = f"{result['name']:<16}"
    if "error" in result:
        return f"{name} FAILED {result['error']}"
    if "burst" in result:
        return f"{name} burst {result['burst']} sustained {result['sustained']} TFLOP/s"
    median, tflops = result["ms_median"], result["tflops"]
    shares = result.get("profile_ms", {}).items()
    of = f"{100 * tflops / sustained:.1f}%" if sustained else ""
    return (
        f"{name} {result['tokens_per_s']:>7} tok/s {tflops:6.1f} TFLOP/s {100 * tflops / PEAK:.1f}% {of} "
        f"{median:.1f} ms [{result['ms_p10']:.1f}, {result['ms_p90']:.1f}] host {result['host_ms']:.0f} "
        f"{result['peak_gib']:.0f} GiB loss {result['loss_first']:.3f} -> {result['loss_last']:.3f} "
        f"first step {result['first_step_s']:.0f} s, all {result['seconds']:.0f} s | idle "
        f"{100 * result.get('idle_share', 0):.1f}% "
        + " ".join(f"{kind} {100 * ms / median:.1f}%" for kind, ms in shares)
    )


# -- a case's process -------------------------------------------------------------------------


def _work() -> None:
    """Import what takes long, wait for a case, tell its figures."""
    _import()
    line = sys.stdin.readline()
    if not line:
        return
    case = Case(**json.loads(line))
    try:
        result = _measured(case)
    except Exception as error:  # noqa: BLE001 - a case's failure is its result
        trace = traceback.format_exc()
        print(trace, file=sys.stderr)
        result = {"error": f"{type(error).__name__}: {error}"[:600], "trace": trace[-3000:]}
    print(f"\n{TOLD}{json.dumps(result)}", flush=True)
    # Nothing to tear down: process groups of one, and a compiler's idle helpers.
    os._exit(0)


def _import() -> None:
    import_module("torch.distributed.fsdp")
    import_module("torch._inductor.compile_fx")
    import_module("d9d_train.build")
    for name in ("transformers.models.qwen3_moe.modeling_qwen3_moe", "datasets"):
        # A peer that is not installed is told where it is used.
        with contextlib.suppress(ImportError):
            import_module(name)


def _measured(case: Case) -> dict[str, Any]:
    if case.trainer == "matmul":
        return matmul_rate(case.dry)
    trainee = import_module(f"bench_peers.train_{case.trainer}").prepare(case)
    return measured(case, trainee)


if __name__ == "__main__":
    main()
