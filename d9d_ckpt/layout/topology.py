"""The six axes, how ranks are numbered on them, and how layers fall into stages."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from d9d_ckpt.errors import LayoutError, UsageError
from d9d_ckpt.tensors import MAX_DIMS, brief

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")

MAX_RANKS = 1 << 17
"""More than any cluster has; plans take memory by the rank."""

_MAX_NUMBER = 1 << 40


@dataclass(frozen=True)
class Topology:
    """Degrees of the six axes and the few settings that decide regions.

    Ranks are numbered pp outermost, then dp_replicate, dp_shard, cp, tp innermost; ep is innermost
    over (dp_shard, cp, tp).

    Attributes:
        pp: Pipeline stages.
        dp_replicate: Replicas of everything.
        dp_shard: Row shards, FSDP.
        cp: Context parallel ranks, which shard parameters like dp_shard.
        tp: Tensor parallel ranks.
        ep: Expert parallel ranks; divides dp_shard x cp x tp.
        stages: Layers of each stage, or None for ceil-first equal ones.
        virtual: Stages per pipeline rank.
        order: How virtual stages fall on ranks: ``loop`` or ``v``.
        vocab_multiple: Vocabulary rows are padded to a multiple of this times tp.
        tensors: (glob, ((axis, dim), ...)) for tensors that no family places.

    Raises:
        LayoutError: A combination that cannot exist.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    stages: tuple[int, ...] | None = None
    virtual: int = 1
    order: str = "loop"
    vocab_multiple: int = 1
    tensors: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()

    def __post_init__(self) -> None:
        for name in (*AXES, "virtual", "vocab_multiple"):
            value = getattr(self, name)
            if not 1 <= value <= _MAX_NUMBER:
                raise LayoutError(
                    f"layout: {name}={brief(value)} must be at least 1, at most {_MAX_NUMBER}"
                )
        if self.world > MAX_RANKS:
            raise LayoutError(f"layout: {self.world} ranks, at most {MAX_RANKS} are planned for")
        if self.fsdp * self.tp % self.ep:
            raise LayoutError(
                f"layout: ep={self.ep} must divide dp_shard x cp x tp = "
                f"{self.dp_shard} x {self.cp} x {self.tp} = {self.fsdp * self.tp}"
            )
        if self.order not in ("loop", "v"):
            raise LayoutError(f"layout: order={self.order!r} must be loop or v")
        if self.stages is not None and len(self.stages) != self.pp * self.virtual:
            raise LayoutError(
                f"layout: {len(self.stages)} stages given for pp x virtual = "
                f"{self.pp} x {self.virtual}"
            )

    @cached_property
    def fsdp(self) -> int:
        """Row shards of dense tensors."""
        return self.dp_shard * self.cp

    @cached_property
    def efsdp(self) -> int:
        """Shards of an expert rank's experts."""
        return self.fsdp * self.tp // self.ep

    @cached_property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline rank: dp_replicate x dp_shard x cp x tp."""
        return self.dp_replicate * self.fsdp * self.tp

    @cached_property
    def world(self) -> int:
        """Ranks in all."""
        return self.pp * self.stage_ranks

    def pipeline_rank(self, stage: int) -> int:
        """The pipeline rank that holds ``stage`` of pp x virtual stages."""
        turn, at = divmod(stage, self.pp)
        return self.pp - 1 - at if self.order == "v" and turn % 2 else at

    def layers_per_stage(self, layers: int) -> tuple[int, ...]:
        """Layers of each of the pp x virtual stages.

        Raises:
            LayoutError: More stages than layers, or given counts that do not add up.
        """
        parts = self.pp * self.virtual
        if self.stages is not None:
            if sum(self.stages) != layers:
                raise LayoutError(
                    f"layout: stages {list(self.stages)} hold {sum(self.stages)} layers, the model "
                    f"has {layers}"
                )
            return self.stages
        if parts > layers:
            raise LayoutError(
                f"layout: pp x virtual = {parts} stages for {layers} layers; at most {layers}"
            )
        return tuple(layers // parts + (stage < layers % parts) for stage in range(parts))

    def pipeline_rank_of_layers(self, layers: int) -> tuple[int, ...]:
        """The pipeline rank of each layer."""
        counts = self.layers_per_stage(layers)
        return tuple(
            self.pipeline_rank(stage) for stage, count in enumerate(counts) for _ in range(count)
        )

    def to_json(self) -> dict[str, Any]:
        """The layout as the manifest keeps it; defaults of the rare settings are left out."""
        out = {k: v for k, v in asdict(self).items() if k in AXES}
        if self.stages is not None:
            out["stages"] = list(self.stages)
        if self.virtual > 1:
            out |= {"virtual": self.virtual, "order": self.order}
        if self.vocab_multiple > 1:
            out["vocab_multiple"] = self.vocab_multiple
        if self.tensors:
            out["tensors"] = {glob: dict(dims) for glob, dims in self.tensors}
        return out


def parse_layout(text: str) -> Topology:
    """A topology from ``pp=2,tp=4``; missing axes are 1.

    Raises:
        UsageError: Not of that form, or an unknown axis.
    """
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if not equals or not value.strip().isdecimal():
            raise UsageError(f"layout {brief(text)}: {brief(item)} is not AXIS=NUMBER")
        if key.strip() in values:
            raise UsageError(f"layout {brief(text)}: {key.strip()} is given twice")
        try:
            values[key.strip()] = int(value)
        except ValueError as error:
            raise UsageError(f"layout: {brief(item)} is not AXIS=NUMBER: {error}") from None
    return layout_from(values, f"layout {brief(text)}")


def layout_from(values: Mapping[str, Any], where: str) -> Topology:
    """A topology from the keys of a YAML file or a manifest.

    Raises:
        UsageError: An unknown key or a value of the wrong kind.
    """
    known = {f.name for f in fields(Topology)}
    for key, value in values.items():
        if key not in known:
            raise UsageError(
                f"{where}: unknown key {brief(key)}; known: {', '.join(sorted(known))}"
            )
        if key in (*AXES, "virtual", "vocab_multiple") and type(value) is not int:
            raise UsageError(f"{where}: {key} must be a whole number, not {brief(value)}")
    given = dict(values)
    if given.get("stages") is not None:
        given["stages"] = _counts(given["stages"], where)
    given["tensors"] = _overrides({} if given.get("tensors") is None else given["tensors"], where)
    return Topology(**given)


def _counts(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(
        type(n) is not int or not 1 <= n <= _MAX_NUMBER for n in value
    ):
        raise UsageError(f"{where}: stages must be a list of layer counts, not {brief(value)}")
    return tuple(value)


def _overrides(value: object, where: str) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: tensors must map globs to {{axis: dim}}")
    out = []
    for glob, dims in value.items():
        if not isinstance(dims, Mapping) or any(
            axis not in AXES or type(dim) is not int or not 0 <= dim < MAX_DIMS
            for axis, dim in dims.items()
        ):
            raise UsageError(
                f"{where}: tensors[{brief(glob)}] must be {{axis: dim}}, not {brief(dims)}"
            )
        out.append((str(glob), tuple(sorted(dims.items()))))
    return tuple(out)
