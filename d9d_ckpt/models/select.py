"""From what a checkpoint holds to what is wanted: family, direction, and the exceptions by rule."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from d9d_ckpt.errors import MappingError, MissingError, RequestError
from d9d_ckpt.graph import ops
from d9d_ckpt.graph.node import Node
from d9d_ckpt.models.config import ModelConfig
from d9d_ckpt.models.family import (
    EMBEDDING,
    HEAD,
    Family,
    Mapped,
    nearest,
    placements_of,
    to_huggingface,
    to_training,
    with_head,
)
from d9d_ckpt.models.quantized import QUANTIZED, dequantized
from d9d_ckpt.models.registry import family, family_of
from d9d_ckpt.tensors import DType

WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of names that wrappers of torch add and that name no module of a model."""

_KEPT_FP32 = re.compile(r".*(inv_freq|e_score_correction_bias|_scale|_scale_inv|\.scales?)")
"""Tensors whose values a cast would ruin."""

Same = Callable[[Node, Node], float | None]
"""Largest absolute difference of two tensors of one spec; None where they are bit-equal."""


@dataclass(frozen=True)
class Source:
    """A checkpoint as far as the choice of a mapping needs it.

    Attributes:
        format: ``huggingface`` or ``sharded``.
        nodes: Its tensors.
        config: The parsed config.json, or None.
        family: The family that its manifest names, or None.
        experts: The experts layout that its manifest keeps.
    """

    format: str
    nodes: Mapping[str, Node]
    config: Mapping[str, Any] | None
    family: str | None = None
    experts: str = ""


@dataclass(frozen=True)
class Wanted:
    """What is asked of a mapping.

    Attributes:
        to: ``sharded`` or ``huggingface``.
        model: A family's name, or ``auto``.
        hf_experts: ``split``, ``fused``, or None for as it was.
        dequantize: What quantised weights become; None leaves them as they are.
        copy_tied: Write a tied head as a second, real tensor.
    """

    to: str
    model: str = "auto"
    hf_experts: str | None = None
    dequantize: DType | None = None
    copy_tied: bool = False


@dataclass(frozen=True)
class Selected:
    """The mapping and what it leaves out.

    Attributes:
        mapped: Target tensors.
        family: Name of the family, or None.
        experts: Experts layout of the Hugging Face side.
        dropped: Source tensors that are left out by rule.
    """

    mapped: Mapped
    family: str | None
    experts: str
    dropped: tuple[str, ...] = ()
    kept_fp32: tuple[str, ...] = field(default=())


def chosen(source: Source, model: str) -> Family | None:
    """The family of a source: as named, or by its manifest or config; None when a manifest has none."""
    if model != "auto":
        return family(model)
    if source.format == "sharded":
        return family(source.family) if source.family is not None else None
    if source.config is None:
        raise RequestError(
            "the source has no config.json to tell its family; name it with --model, or give your "
            "own --mapping"
        )
    return family_of(source.config)


def select(source: Source, want: Wanted, same: Same) -> Selected:
    """The mapping from ``source`` to what is wanted.

    Args:
        source: What there is.
        want: Target format and choices.
        same: Compares two source tensors, for tied heads stored twice.

    Raises:
        RequestError: No family, or the tensors do not fit it.
    """
    if source.format == want.to and not want.hf_experts and not want.copy_tied:
        named = source.format == "sharded" or want.model != "auto"
        return _unmapped(source, chosen(source, want.model) if named else None, want)
    kin = chosen(source, want.model)
    if kin is None:
        raise RequestError(
            "the source was written by a mapping of its user's; give --mapping again"
        )
    if source.config is None:
        raise RequestError(f"{kin.name} needs the sizes in config.json, which the source lacks")
    config = _config(kin, source.config, source.nodes)
    if want.to == "sharded":
        return _forward(source, kin, config, want, same)
    return _backward(source, kin, config, want, same)


def _config(kin: Family, raw: Mapping[str, Any], nodes: Mapping[str, Node]) -> ModelConfig:
    """The sizes, which the tensors there are must be enough for: rules are made by the layer.

    Raises:
        MappingError: More layers and experts than the source has elements, or no experts at all.
    """
    config = kin.config(raw)
    if kin.hub_experts and not config.experts:
        raise MappingError(f"config.json: {kin.name} needs num_experts or num_local_experts")
    sparse = config.layers - len(config.dense_layers)
    elements = sum(node.spec.numel for node in nodes.values())
    if config.layers + sparse * config.experts > elements:
        raise MappingError(
            f"config.json: {config.layers} layers of {config.experts} experts cannot be in tensors of "
            f"{elements} elements; config.json is of another model"
        )
    return config


def _backward(
    source: Source, kin: Family, config: ModelConfig, want: Wanted, same: Same
) -> Selected:
    """Towards Hugging Face names, from training names or from another layout of the experts."""
    if want.hf_experts and not kin.hub_experts:
        raise RequestError(f"--hf-experts {want.hf_experts}: {kin.name} has no experts")
    if source.format == "huggingface":
        there = _forward(source, kin, config, want, same)
        nodes, dropped, experts = there.mapped.nodes, there.dropped, there.experts
    else:
        nodes, dropped = _without_run_state(source.nodes)
        experts = source.experts or kin.hub_experts
    experts = want.hf_experts or experts
    mapped = to_huggingface(kin, config, experts, nodes)
    if want.copy_tied:
        mapped = with_head(kin, config, mapped)
        dropped = tuple(name for name in dropped if name != HEAD)
    return Selected(mapped, kin.name, experts, dropped)


def _unmapped(source: Source, kin: Family | None, want: Wanted) -> Selected:
    nodes = source.nodes
    if want.dequantize is not None:
        nodes = dequantized(nodes, source.config or {}, want.dequantize)
    if kin is None or source.config is None:
        return Selected(Mapped(nodes, {}, 0), None, source.experts)
    config = _config(kin, source.config, nodes)
    placed = _with_slots(placements_of(kin, config), nodes)
    return Selected(Mapped(nodes, placed, config.layers), kin.name, source.experts)


def _with_slots(placements: Mapping[str, Any], nodes: Mapping[str, Node]) -> dict[str, Any]:
    """``optim.<slot>.<fqn>`` goes where ``<fqn>`` goes if their shapes agree, else is replicated."""
    out = dict(placements)
    for name in nodes:
        if name.startswith("optim.") and name not in out:
            fqn = name.split(".", 2)[-1]
            placement = placements.get(fqn)
            if placement is None or fqn not in nodes:
                continue
            if nodes[fqn].shape != nodes[name].shape:
                placement = placement._replace(
                    cut=placement.cut._replace(rows=False, tp=None, vocab=False, experts=False)
                )
            out[name] = placement
    return out


def _without_run_state(nodes: Mapping[str, Node]) -> tuple[dict[str, Node], tuple[str, ...]]:
    kept = {name: node for name, node in nodes.items() if not name.startswith("optim.")}
    return kept, tuple(name for name in nodes if name not in kept)


def _forward(
    source: Source, kin: Family, config: ModelConfig, want: Wanted, same: Same
) -> Selected:
    nodes = _unwrapped(source.nodes, same)
    if want.dequantize is not None:
        nodes = dequantized(nodes, source.config or {}, want.dequantize)
    dropped = [name for name in nodes if kin.recomputed.fullmatch(name)]
    if config.tied and HEAD in nodes and EMBEDDING in nodes:
        _check_tied(nodes[HEAD], nodes[EMBEDDING], same)
        dropped.append(HEAD)
    gone = set(dropped)
    kept = {name: node for name, node in nodes.items() if name not in gone}
    _check_quantised(kept)
    experts = kin.experts_layout(kept)
    return Selected(to_training(kin, config, experts, kept), kin.name, experts, tuple(dropped))


def to_names_of(
    a: Source, b: Source, same_a: Same, same_b: Same
) -> tuple[dict[str, Node], dict[str, Node]]:
    """Two checkpoints of different formats by the Hugging Face names that their family gives both.

    Experts are compared split, whichever way either side stores them.
    """
    out = []
    for source, same in ((a, same_a), (b, same_b)):
        kin = chosen(source, "auto")
        experts = kin.hub_experts if kin is not None else ""
        want = Wanted("huggingface", hf_experts=experts or None)
        out.append(dict(select(source, want, same).mapped.nodes))
    return out[0], out[1]


def _check_tied(head: Node, embedding: Node, same: Same) -> None:
    if head.spec == embedding.spec:
        difference = same(head, embedding)
        if difference is None:
            return
        detail = f"they differ by up to {difference:g}"
    else:
        detail = f"{list(head.shape)} against {list(embedding.shape)}"
    raise MappingError(
        f"config.json ties {HEAD} to {EMBEDDING}, but the file holds two different tensors ({detail}); "
        "set tie_word_embeddings to false, or remove the wrong one"
    )


def _check_quantised(nodes: Mapping[str, Node]) -> None:
    scaled = [n for n in nodes if n.endswith(("_scale_inv", "weight_scale", ".scale", "_scales"))]
    packed = [n for n, node in nodes.items() if node.dtype.name.startswith(QUANTIZED)]
    if scaled or packed:
        shown = ", ".join((packed or scaled)[:4])
        raise MappingError(
            f"{len(packed)} quantised tensors with {len(scaled)} scales ({shown}): fusing them would "
            "part weights from their scale blocks; give --dequantize"
        )


def _unwrapped(nodes: Mapping[str, Node], same: Same) -> Mapping[str, Node]:
    """Names without the parts that wrappers added; two names that become one must be bit-equal."""
    out: dict[str, Node] = {}
    first: dict[str, str] = {}
    for name, node in nodes.items():
        bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        if bare in out:
            other = first[bare]
            if out[bare].spec != node.spec or same(node, out[bare]) is not None:
                raise MappingError(
                    f"{other!r} and {name!r} are both {bare!r} without their wrapper parts, and they "
                    "differ; remove the stale one"
                )
            continue
        out[bare], first[bare] = node, name
    return out


def cast_floats(selected: Selected, dtype: DType) -> Selected:
    """Every floating tensor as ``dtype``, but for those whose values that would ruin."""
    nodes, kept = {}, []
    for name, node in selected.mapped.nodes.items():
        if not node.dtype.floating or node.dtype == dtype:
            nodes[name] = node
        elif _KEPT_FP32.fullmatch(name) and dtype.bits < node.dtype.bits:
            nodes[name] = node
            kept.append(name)
        else:
            nodes[name] = ops.cast(node, dtype)
    mapped = Mapped(nodes, selected.mapped.placements, selected.mapped.layers)
    return Selected(mapped, selected.family, selected.experts, selected.dropped, tuple(kept))


def missing(name: str, nodes: Mapping[str, Any]) -> MissingError:
    """The error for a tensor that is not in a checkpoint."""
    near = nearest(name, nodes)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return MissingError(f"no tensor {name!r} among {len(nodes)}{hint}")
