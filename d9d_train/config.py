"""A training run as its TOML file says it: every section, checked key by key and against each other."""

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

import d9d_ckpt
from d9d_ckpt.errors import LayoutError, MissingError, UsageError
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.models.registry import family as family_called
from d9d_train.data.config import DataConfig, SourceConfig, ValidationConfig
from d9d_train.data.synthetic import SyntheticConfig
from d9d_train.models.config import read_config
from d9d_train.models.keys import DenseKeys, SparseKeys
from d9d_train.models.registry import FAMILIES
from d9d_train.optim.lr import OptimConfig
from d9d_train.parallel.balance import balanced
from d9d_train.parallel.context import KINDS
from d9d_train.parallel.pipeline.actions import Program
from d9d_train.parallel.pipeline.schedule import build, from_csv, placement, placement_of
from d9d_train.telemetry import MetricsConfig, head_flops, layer_flops
from d9d_train.typed import nearest, read

FREE_AT_RESUME = ("mesh", "pipeline", "context", "checkpoint", "metrics", "validation")
"""Sections that may differ when a run resumes; ``train.steps`` may as well."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Degrees of the axes; see `d9d_ckpt.layout.topology.Topology`.

    Attributes:
        pp: Pipeline ranks.
        dp_replicate: Replicas of everything.
        dp_shard: FSDP shards.
        cp: Context parallel ranks.
        tp: Tensor parallel ranks.
        ep: Expert parallel ranks; divides dp_shard x cp x tp.
        stages: Layers of each stage, pp times as many as the schedule puts on a rank; None for equal
            ones, the first ones longer.
        balance_stages: Layers fall on stages by the operations that they and the head take, in place of
            ``stages``.
        vocab_multiple: The vocabulary is padded to a multiple of this times tp.

    Raises:
        UsageError: Stages that are given and balanced.
        LayoutError: Degrees that cannot be, with the numbers.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    stages: tuple[int, ...] | None = None
    balance_stages: bool = False
    vocab_multiple: int = 1

    def __post_init__(self) -> None:
        if self.balance_stages and self.stages is not None:
            raise UsageError("mesh.balance_stages: mesh.stages is given as well; leave one out")
        stages = self.topology.stages or ()
        _check("mesh.stages", stages, all(n >= 1 for n in stages), "at least one layer each")

    @property
    def topology(self) -> Topology:
        """The topology of these degrees, with as many stages on a rank as ``stages`` says."""
        return self.staged(max(1, len(self.stages or ()) // self.pp), "loop")

    def staged(self, virtual: int, order: str) -> Topology:
        """The topology of these degrees with ``virtual`` stages on a pipeline rank, in that order."""
        degrees = {f.name: getattr(self, f.name) for f in fields(self)}
        del degrees["balance_stages"]
        return Topology(**degrees, virtual=virtual, order=order)

    @property
    def readers(self) -> int:
        """Ranks that read data of their own."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """How attention sees a whole sequence over cp.

    Attributes:
        kind: ``all_gather`` of keys and values, ``ulysses``, or ``ring``.
    """

    kind: Literal["all_gather", "ulysses", "ring"] = "all_gather"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The order of forward and backward passes.

    Attributes:
        schedule: ``1f1b``, ``gpipe``, ``interleaved``, ``looped_bfs``, ``zb1p``, ``zbv`` or
            ``dualpipev``.
        csv: A file with a schedule of one's own, in torch's form, in place of ``schedule``.
        microbatches: Parts of a rank's share of a step; without pp, gradient accumulation.
        stages_per_rank: Of ``interleaved`` and ``looped_bfs``; None for what the schedule has, two there.

    Raises:
        UsageError: No micro-batch, or no stage.
    """

    schedule: Literal["gpipe", "1f1b", "interleaved", "looped_bfs", "zb1p", "zbv", "dualpipev"] = (
        "1f1b"
    )
    csv: str = ""
    microbatches: int = 1
    stages_per_rank: int | None = None

    def __post_init__(self) -> None:
        _check("pipeline.microbatches", self.microbatches, self.microbatches >= 1, "at least 1")
        stages = self.stages_per_rank
        _check("pipeline.stages_per_rank", stages, stages is None or stages >= 1, "at least 1")

    def placement(self) -> tuple[int, str]:
        """Stages on a pipeline rank, and their order.

        Raises:
            UsageError: The file cannot be read, or says no schedule.
            LayoutError: Its stages lie on ranks in no order that there is.
        """
        if self.csv:
            return placement_of(self._given)
        return placement(self.schedule, self.stages_per_rank)

    def program(self, topology: Topology) -> Program:
        """What every pipeline rank does in a step.

        Args:
            topology: With the stages that `placement` says.

        Raises:
            LayoutError: The schedule cannot be made of these numbers, or the file has others.
        """
        ranks, stages = topology.pp, topology.pp * topology.virtual
        if not self.csv:
            return build(self.schedule, stages, ranks, self.microbatches)
        given = self._given
        found = len(given.ranks), given.microbatches
        if found != (ranks, self.microbatches):
            raise LayoutError(
                f"pipeline.csv {self.csv}: is for {found[0]} ranks and {found[1]} micro-batches; the run "
                f"has pp={ranks} and pipeline.microbatches={self.microbatches}"
            )
        return given

    @cached_property
    def _given(self) -> Program:
        try:
            text = Path(self.csv).read_text()
        except OSError as error:
            raise UsageError(f"pipeline.csv {self.csv}: {error.strerror}") from error
        return from_csv(text)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The steps.

    Attributes:
        steps: Last step.
        global_batch: Sequences of a step over the whole world.
        seq_len: Tokens of a sequence.
        dtype: Of computation; parameters and optimizer states are float32 beside bfloat16.
        seed: Of parameters and dropout, and of data where it names none of its own.
        deterministic: Bitwise equal reruns on the same topology.
        recompute: Activation checkpointing: ``none``, ``selective`` (keep matmuls and attention) or
            ``layer``.
        compile: Compile the layers; on a GPU only.
        reshard_after_forward: Free gathered parameters between forward and backward; None: when there
            is one micro-batch and no pipeline.
        dropout: Of what a block adds to the residual stream.
        balance_loss: Weight of the router's load-balancing loss.
        balance_bias: Step of the router's selection bias towards equal loads; 0 has no bias.
        max_bad_steps: Steps in a row with a gradient that is not finite (or a spike) that are skipped
            before the run stops.
        spike: A step whose loss is more than this many times the running mean is skipped; 0 for never.

    Raises:
        UsageError: A number out of its range.
    """

    steps: int
    global_batch: int
    seq_len: int
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    seed: int = 0
    deterministic: bool = False
    recompute: Literal["none", "selective", "layer"] = "none"
    compile: bool = False
    reshard_after_forward: bool | None = None
    dropout: float = 0.0
    balance_loss: float = 0.0
    balance_bias: float = 0.0
    max_bad_steps: int = 3
    spike: float = 0.0

    def __post_init__(self) -> None:
        for key in ("steps", "global_batch", "seq_len"):
            _check(f"train.{key}", getattr(self, key), getattr(self, key) >= 1, "at least 1")
        _check("train.seed", self.seed, 0 <= self.seed < 2**63, "at least 0, below 2^63")
        _check("train.dropout", self.dropout, 0 <= self.dropout < 1, "at least 0, below 1")
        for key in ("balance_loss", "balance_bias"):
            value = getattr(self, key)
            _check(f"train.{key}", value, 0 <= value < math.inf, "at least 0, and finite")
        _check("train.max_bad_steps", self.max_bad_steps, self.max_bad_steps >= 0, "at least 0")
        _check("train.spike", self.spike, self.spike == 0 or self.spike > 1, "0, or above 1")

    @property
    def compute(self) -> torch.dtype:
        """The dtype of computation."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)  # noqa: S101 - for the type checker
        return dtype

    @property
    def stored(self) -> torch.dtype:
        """The dtype of parameters and optimizer states."""
        return torch.promote_types(self.compute, torch.float32)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saves and resumes.

    Attributes:
        url: The run directory; empty: no checkpoints.
        every: Steps between saves; the last step is saved as well.
        keep_last: How many of the newest stay; None keeps all.
        keep_every: Steps divisible by it stay as well.
        resume: ``auto`` (the latest whole step, if there is one), ``never`` (anew; refused where the URL
            holds whole steps), or a step (later steps of the URL are deleted before the first save).
        export: URL of a Hugging Face directory written at the end.
        allow_changes: Keys whose value may differ from the one that the checkpoint was written with.
        storage_options: Passed to fsspec.

    Raises:
        UsageError: A number out of its range, or a step of no run.
    """

    url: str = ""
    every: int = 1000
    keep_last: int | None = None
    keep_every: int | None = None
    resume: int | Literal["auto", "never"] = "auto"
    export: str = ""
    allow_changes: tuple[str, ...] = ()
    storage_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("every", "keep_last", "keep_every"):
            value = getattr(self, key)
            _check(f"checkpoint.{key}", value, value is None or value >= 1, "at least 1")
        if isinstance(self.resume, int) and not self.url:
            raise UsageError(
                f"checkpoint.resume: {self.resume} is a step, but checkpoint.url is empty"
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run.

    Attributes:
        model: ``family`` and the keys of `d9d_train.models.keys`, or ``hf``: URL of a checkpoint.
        mesh: Axes.
        context: Attention over cp.
        pipeline: Schedule.
        train: Steps.
        data: Where tokens come from.
        optim: Optimizer and schedule of its rate.
        checkpoint: Saves.
        metrics: What is told, and where.
        validation: Loss on other data.

    Raises:
        UsageError: Keys that are unknown, mistyped or out of range, or that contradict each other.
        LayoutError: Batch or sequence do not divide over the axes.
    """

    model: dict[str, Any]
    train: TrainConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)

    def __post_init__(self) -> None:
        _check_model(self.model)
        _check_data(self.data, "data")
        _check_data(self.validation.data, "validation.data")
        for key, least in (("every", 0), ("batches", 1), ("first", 0)):
            value = getattr(self.validation, key)
            _check(f"validation.{key}", value, value >= least, f"at least {least}")
        for key in self.checkpoint.allow_changes:
            section = key.partition(".")[0]
            sections = [f.name for f in fields(self)]
            if section not in sections:
                raise UsageError(
                    f"checkpoint.allow_changes: {key} is in no section; {nearest(section, sections)}"
                )
        self._check_batch()
        self._check_sequence()
        # Refuses layers of stages that the schedule has more or fewer of.
        _ = self.topology

    @property
    def topology(self) -> Topology:
        """The axes, with the stages that the schedule puts on a pipeline rank."""
        return self.mesh.staged(*self.pipeline.placement())

    def balanced(self, raw: Mapping[str, Any]) -> "Config":
        """The config with the layers of each stage, where they are to be balanced.

        Args:
            raw: The model's config.json.

        Raises:
            LayoutError: More stages than layers.
        """
        if not self.mesh.balance_stages:
            return self
        model, topology = read_config(raw), self.topology
        layers = layer_flops(
            model.sizes, experts_per_token=model.experts_per_token, seq_len=self.train.seq_len
        )
        stages = balanced(layers, head_flops(model.sizes), topology.pp * topology.virtual)
        return replace(self, mesh=replace(self.mesh, balance_stages=False, stages=stages))

    def _check_batch(self) -> None:
        mesh, parts = self.mesh, self.pipeline.microbatches
        share = mesh.readers * parts
        if self.train.global_batch % share:
            raise LayoutError(
                f"train.global_batch {self.train.global_batch} does not divide over dp_replicate x "
                f"dp_shard x microbatches = {mesh.dp_replicate} x {mesh.dp_shard} x {parts} = {share}"
            )

    def _check_sequence(self) -> None:
        """Whole chunks for each cp rank, and whole parts of these for each tp rank."""
        length, cp, tp = self.train.seq_len, self.mesh.cp, self.mesh.tp
        order = KINDS[self.context.kind].order
        chunks = 2 * cp if cp > 1 and order == "head_tail" else cp
        if length % chunks:
            raise LayoutError(
                f"train.seq_len {length} does not divide into {chunks} chunks, which "
                f"{self.context.kind} needs over cp={cp} ({order})"
            )
        if length // cp % tp:
            raise LayoutError(
                f"train.seq_len {length} over cp={cp} leaves {length // cp} tokens a rank, which do not "
                f"divide over tp={tp}"
            )

    @property
    def reshards(self) -> bool:
        """Whether FSDP frees gathered parameters between forward and backward."""
        asked = self.train.reshard_after_forward
        once = self.pipeline.microbatches == 1 and self.mesh.pp == 1
        return once if asked is None else asked

    def resolved(self, before: Mapping[str, Any] | None) -> "Config":
        """The config with ``optim.total_steps``, which a schedule keeps from the first start on.

        Args:
            before: The resolved config of the checkpoint that the run resumes from, JSON; None for a
                first start.

        Raises:
            UsageError: Warm-up and decay are longer than that.
        """
        if self.optim.total_steps is not None:
            return self
        total = self.train.steps if before is None else before["optim"]["total_steps"]
        return replace(self, optim=replace(self.optim, total_steps=total))

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint; `read` makes the same config of it."""
        return {key: _plain(value) for key, value in asdict(self).items()}


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """A config from a TOML file and ``section.key=value`` overrides.

    Raises:
        UsageError: No such file, not TOML, an unknown or mistyped key.
        LayoutError: A combination of numbers that cannot be.
    """
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path}: cannot read this config: {error.strerror}") from error
    except ValueError as error:  # tomllib's own, or bytes that are no UTF-8
        raise UsageError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        _override(values, override)
    return read(Config, values, "")


def _override(values: dict[str, Any], text: str) -> None:
    """Set one key; a bare word is a string."""
    path, equals, value = text.partition("=")
    *sections, key = (part.strip() for part in path.split("."))
    if not equals or not sections or not all((*sections, key)):
        raise UsageError(f"override {text!r}: expected section.key=value")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UsageError(f"override {text!r}: {section} is a value, not a section")
    values[key] = _parsed(value)


def _parsed(value: str) -> Any:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value.strip()


def model_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of what ``[model]`` describes, or of the checkpoint that it names.

    Args:
        model: The section, checked.

    Raises:
        MissingError: The checkpoint has none.
    """
    if "hf" not in model:
        return {"model_type": model["family"], **{k: v for k, v in model.items() if k != "family"}}
    config = d9d_ckpt.open(model["hf"]).metadata["config"]
    if config is None:
        raise MissingError(f"model.hf {model['hf']}: has no config.json")
    return dict(config)


def _check_model(model: Mapping[str, Any]) -> None:
    """Either a checkpoint alone, or a family and its keys."""
    given = dict(model)
    url, family = given.pop("hf", None), given.pop("family", None)
    if (url is None) == (family is None):
        raise UsageError("model: expected either family = NAME with its sizes, or hf = URL")
    for key, value in (("hf", url), ("family", family)):
        if value is not None and not isinstance(value, str):
            raise UsageError(f"model.{key}: expected a string, found {value!r}")
    if url is not None:
        if given:
            raise UsageError(f"model.{next(iter(given))}: model.hf brings its own config.json")
        return
    if family not in FAMILIES:
        raise UsageError(
            f"model.family: {family} is not trained here; known: {', '.join(FAMILIES)}"
        )
    read(SparseKeys if family_called(family).hub_experts else DenseKeys, given, "model")


def _check_data(data: DataConfig | SourceConfig, where: str) -> None:
    """Refuse settings of a kind that is not asked for: they would say nothing."""
    unset = {"synthetic": SyntheticConfig(), "tokens": None, "text": None, "mixture": ()}
    for kind, nothing in unset.items():
        if kind != data.kind and getattr(data, kind, nothing) != nothing:
            raise UsageError(f'{where}.{kind}: is not read, since {where}.kind is "{data.kind}"')
    for number, source in enumerate(getattr(data, "mixture", ())):
        _check_data(source, f"{where}.mixture[{number}]")


def _check(key: str, value: object, good: bool, rule: str) -> None:
    if not good:
        raise UsageError(f"{key}: {value} must be {rule}")


def _plain(value: Any) -> Any:
    """What JSON can hold: it has lists and no tuples, and no number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys that differ between the config of a checkpoint and this one, beyond what may differ.

    Args:
        before: The resolved config of the checkpoint, JSON.
        now: The resolved config of this run, JSON.

    Returns:
        Dotted key: (value of the checkpoint, value now). A key that one of them lacks, since the other
        was written by newer code, has its default there, or None.
    """
    old, new = (_defaults() | dict(_flat(values)) for values in (before, now))
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _free(key)
    }


def _free(key: str) -> bool:
    return key == "train.steps" or key.partition(".")[0] in FREE_AT_RESUME


def _defaults() -> dict[str, Any]:
    """The values of keys that are not said, by dotted key."""
    made = {f.name: f.default_factory for f in fields(Config) if f.default_factory is not MISSING}
    sections = {name: asdict(make()) for name, make in made.items()}
    train = {f.name: f.default for f in fields(TrainConfig) if f.default is not MISSING}
    return dict(_flat(_plain(sections | {"train": train})))


def _flat(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value
