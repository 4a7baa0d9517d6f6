"""What a run tells: metrics, profiles, and every rank's last action when one of them fails."""

import importlib
import json
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from d9d_ckpt.errors import StorageError, UsageError
from d9d_ckpt.models.config import ModelConfig

Metrics = Mapping[str, float | int | None]

_PrefixStore: Any = dist.distributed_c10d.PrefixStore

_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
}
"""Dense bfloat16 FLOP/s of data sheets, by a part of the device's name; the first that fits."""

_SNAPSHOT_EVENTS = 100_000

_STORE_WAIT = timedelta(seconds=10)
"""What a message about a failure may wait for a store that went with its host."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What is told, and where; empty names tell nothing.

    Attributes:
        jsonl: Local file, one JSON line a step.
        tensorboard: Directory of TensorBoard events.
        wandb: Project at Weights & Biases.
        wandb_run: Run id there, which a resume continues.
        peak_flops: FLOP/s of one device that MFU is relative to; None for the data sheet's.
        profile_steps: First and last step of a profile.
        profile_folder: Local directory of profiles and memory snapshots, one file a rank.
        memory_snapshot: Whether the profiled steps leave a CUDA memory snapshot as well.

    Raises:
        UsageError: Steps that are no range.
    """

    jsonl: str = ""
    tensorboard: str = ""
    wandb: str = ""
    wandb_run: str = ""
    peak_flops: float | None = None
    profile_steps: tuple[int, int] | None = None
    profile_folder: str = "profile"
    memory_snapshot: bool = False

    def __post_init__(self) -> None:
        if self.profile_steps and not 1 <= self.profile_steps[0] <= self.profile_steps[1]:
            raise UsageError(
                f"metrics.profile_steps {list(self.profile_steps)}: expected [first, last], from 1"
            )


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """A step's line, but for its number.

    Attributes:
        loss: Mean over the counted labels of the step, of the language model alone.
        grad_norm: Before clipping.
        lr: Learning rate of the step.
        tokens: Of the step, over the whole world.
        tokens_per_s: Over the whole world.
        mfu: Model FLOP/s over peak, see `flops_per_token`; None where no peak is known.
        step_s: Seconds of the step.
        ckpt_stall_s: Seconds of these that it waited for a checkpoint.
        local_parameters: Parameters held by the rank that holds most.
        peak_memory: Most bytes allocated on this rank's GPU in the step; None on CPU.
        expert_load: Tokens of the busiest expert over the mean, of the worst layer; None without experts.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    mfu: float | None
    step_s: float
    ckpt_stall_s: float
    local_parameters: int
    peak_memory: int | None = None
    expert_load: float | None = None


class Tracker(Protocol):
    """Where metrics go; one rank has one."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Tell some values of a step; None is a value that is not known."""
        ...

    def close(self) -> None:
        """Tell what is left."""
        ...


def open_tracker(
    config: MetricsConfig, *, resumed: int, steps: int, settings: Mapping[str, Any]
) -> Tracker:
    """All places that a config names, and lines on stderr.

    Args:
        config: The places.
        resumed: Last step that is done; what was told of later ones is taken back where that is possible.
        steps: Last step of the run.
        settings: The resolved config, for those who show it.

    Raises:
        UsageError: A package that is not installed, or a file that holds something else.
    """
    trackers: list[Tracker] = []
    if config.jsonl:
        trackers.append(JsonLines(config.jsonl, resumed))
    if config.tensorboard:
        trackers.append(TensorBoard(config.tensorboard, resumed))
    if config.wandb:
        trackers.append(WandB(config.wandb, config.wandb_run, settings))
    trackers.append(Line(steps) if sys.stderr.isatty() else Lines(steps))
    return All(trackers)


@dataclass(frozen=True)
class All:
    """Several trackers as one."""

    trackers: Sequence[Tracker]

    def log(self, step: int, metrics: Metrics) -> None:
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


class JsonLines:
    """One JSON object a line, each flushed; numbers with all their digits, null for those not finite."""

    def __init__(self, path: str, resumed: int) -> None:
        """Go on after the lines of step ``resumed``; those of later steps are cut off.

        Raises:
            UsageError: The file holds something else.
            StorageError: It cannot be written.
        """
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            kept = _kept(path, resumed)
            self._file = open(path, "ab")  # noqa: SIM115 - lives until close
            self._file.truncate(kept)
        except OSError as error:
            raise StorageError(f"metrics.jsonl {path}: {error}") from error

    def log(self, step: int, metrics: Metrics) -> None:
        values = {key: _finite(value) for key, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _kept(path: str, resumed: int) -> int:
    """Bytes of the lines up to a step; a line that a crash cut short ends them."""
    kept = 0
    if not Path(path).exists():
        return kept
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n") or _step_of(line, path) > resumed:
                break
            kept += len(line)
    return kept


def _step_of(line: bytes, path: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"metrics.jsonl {path}: {line[:60]!r} is no line of metrics; name another file, or move this "
            "one away"
        ) from error


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class TensorBoard:
    """Scalars by name; TensorBoard hides the steps that are done again."""

    def __init__(self, folder: str, resumed: int) -> None:
        module = _package("torch.utils.tensorboard", "tensorboard", "metrics.tensorboard")
        self._writer = module.SummaryWriter(folder, purge_step=resumed + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases; steps that are done again are dropped there, the first values stay."""

    def __init__(self, project: str, run: str, settings: Mapping[str, Any]) -> None:
        module = _package("wandb", "wandb", "metrics.wandb")
        self._run = module.init(
            project=project, id=run or None, resume="allow", config=dict(settings)
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({k: v for k, v in metrics.items() if v is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


def _package(module: str, package: str, key: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{key}: the package {package} is not installed; install it, or leave {key} out"
        ) from error


class Line:
    """The last step in one line of a terminal, which the next one overwrites."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def log(self, step: int, metrics: Metrics) -> None:
        sys.stderr.write(f"\r\033[K{_summary(step, self._steps, metrics)}")
        sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.write("\n")
        sys.stderr.flush()


class Lines:
    """A line every ten seconds, for logs; and one for the first step, and for the last."""

    def __init__(self, steps: int) -> None:
        self._steps, self._said = steps, -math.inf

    def log(self, step: int, metrics: Metrics) -> None:
        now = time.monotonic()
        if now - self._said >= _PERIOD or step == self._steps:
            self._said = now
            sys.stderr.write(f"{_summary(step, self._steps, metrics)}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Every line is written."""


def _summary(step: int, steps: int, metrics: Metrics) -> str:
    shown = (
        f"{name} {value:,.0f}" if abs(value) >= _LARGE else f"{name} {value:.4g}"
        for name in ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "step_s")
        if (value := metrics.get(name)) is not None
    )
    return f"step {step:,} of {steps:,}  {'  '.join(shown)}"


_PERIOD = 10.0
_LARGE = 1000


def flops_per_token(config: ModelConfig, *, experts_per_token: int, seq_len: int) -> int:
    """Floating-point operations that training on one token takes, forward and backward.

    6 x active matmul weights + 12 x layers x heads x head_dim x seq_len / 2. Active are the attention
    projections, the MLP or the router and the experts that a token goes to, and the head; the embedding
    is a lookup. The second term is attention's two products, halved because it is causal, as if every
    sequence were one document. What recomputation adds is not counted.

    Args:
        config: Sizes of the model.
        experts_per_token: Experts that a token goes to.
        seq_len: Tokens of a sequence.
    """
    layers = layer_flops(config, experts_per_token=experts_per_token, seq_len=seq_len)
    return sum(layers) + head_flops(config)


def layer_flops(config: ModelConfig, *, experts_per_token: int, seq_len: int) -> list[int]:
    """The operations of each layer a token; arguments as for `flops_per_token`."""
    c = config
    attention = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    products = 6 * c.heads * c.head_dim * seq_len
    dense = 3 * c.hidden * c.intermediate
    sparse = experts_per_token * 3 * c.hidden * c.moe_intermediate + c.hidden * c.experts
    return [
        6 * (attention + (sparse if c.experts and layer not in c.dense_layers else dense))
        + products
        for layer in range(c.layers)
    ]


def head_flops(config: ModelConfig) -> int:
    """The operations of the head a token."""
    return 6 * config.vocab * config.hidden


def peak_flops(device: torch.device, config: MetricsConfig) -> float | None:
    """FLOP/s of one device, for MFU; None on CPU, and for a GPU that neither table nor config has."""
    if device.type != "cuda":
        return None
    if config.peak_flops is not None:
        return config.peak_flops
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes allocated on a GPU since the last call; None on CPU."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


class Capture:
    """A profile of some steps, and a CUDA memory snapshot of the same."""

    def __init__(self, config: MetricsConfig, *, rank: int, device: torch.device) -> None:
        """Nothing is recorded yet.

        Raises:
            UsageError: A memory snapshot of a CPU.
        """
        if config.memory_snapshot and device.type != "cuda":
            raise UsageError("metrics.memory_snapshot: needs a GPU; this run is on CPU")
        self._steps, self._memory = config.profile_steps, config.memory_snapshot
        self._folder, self._rank, self._device = Path(config.profile_folder), rank, device
        self._running: profile | None = None

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Record a step if it is to be recorded; the files are written after the last one, or a failure."""
        if self._steps and self._running is None and self._steps[0] <= step <= self._steps[1]:
            self._running = self._begun()
        try:
            yield
        except BaseException:
            self._end(step)
            raise
        if self._steps and step == self._steps[1]:
            self._end(step)

    def _begun(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_EVENTS)  # noqa: SLF001
        running = profile(activities=activities)
        running.start()
        return running

    def _end(self, step: int) -> None:
        if self._running is None:
            return
        running, self._running = self._running, None
        running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"rank{self._rank}.step{step}"
        running.export_chrome_trace(str(self._folder / f"{stem}.trace.json.gz"))
        if self._memory:
            torch.cuda.memory._dump_snapshot(  # type: ignore[no-untyped-call]  # noqa: SLF001
                str(self._folder / f"{stem}.memory.pickle")
            )
            torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001


class Progress:
    """What this rank does right now; step code says so, another thread may read it."""

    def __init__(self) -> None:
        self._step = 0
        self._now: tuple[int, int | None, str] = (0, None, "start")

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step = step
        self.at("begin")

    def at(self, action: str, microbatch: int | None = None) -> None:
        """An action of the step begins, such as ``backward of stage 1``."""
        self._now = self._step, microbatch, action

    def __str__(self) -> str:
        step, microbatch, action = self._now
        return ", ".join(
            (f"step {step}", *([] if microbatch is None else [f"micro-batch {microbatch}"]), action)
        )


class LastActions:
    """Every rank's last action, for the message of one that fails.

    A thread of each rank writes its action to the rendezvous store once a period, if it has changed:
    collectives are of no use when a rank is stuck in one or gone, and what a killed rank wrote stays. As
    a context, it adds a note with all of them to an exception that leaves it.
    """

    def __init__(
        self,
        store: Any,
        progress: Progress,
        *,
        rank: int,
        world: int,
        period: float = 1.0,
    ) -> None:
        """Nothing is written before the context is entered.

        Args:
            store: That of the process group. It is cloned: the original is locked while another thread
                waits in it.
            progress: This rank's.
            rank: This one.
            world: Ranks.
            period: Seconds.
        """
        own = store.clone()
        own.set_timeout(_STORE_WAIT)
        self._store = _PrefixStore("d9d_train/last_action", own)
        self._progress, self._rank, self._world = progress, rank, world
        self._period = period
        self._written = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="last action", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        if isinstance(error, Exception):
            error.add_note(self.everyone())

    def everyone(self) -> str:
        """All last actions, a line for each different one; takes a period and a half."""
        try:
            self._write()
            time.sleep(1.5 * self._period)  # until all who still run have written theirs
            found = self._read()
        except RuntimeError as error:
            return f"rank {self._rank}: {self._progress}; no word from the others: {error}"
        ranks: dict[str, list[int]] = {}
        for rank, action in enumerate(found):
            ranks.setdefault(action, []).append(rank)
        return "\n".join(
            ["last actions:", *(f"  {_spans(who)}: {action}" for action, who in ranks.items())]
        )

    def _run(self) -> None:
        # The store may go with its host; `everyone` meets the same error, and tells it.
        with suppress(RuntimeError):
            self._write()
            while not self._over.wait(self._period):
                self._write()

    def _write(self) -> None:
        now = str(self._progress)
        if now != self._written:
            self._store.set(str(self._rank), now)
            self._written = now

    def _read(self) -> list[str]:
        names = [str(rank) for rank in range(self._world)]
        if self._store.check(names):
            return [value.decode() for value in self._store.multi_get(names)]
        return [
            self._store.get(name).decode() if self._store.check([name]) else "no word"
            for name in names
        ]


def _spans(ranks: Sequence[int]) -> str:
    """Ascending ranks in words: ``rank 3``, ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
