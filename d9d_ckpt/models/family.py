"""A family: rules that say how training tensors are made of Hugging Face ones, and where they go."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from d9d_ckpt.errors import MappingError
from d9d_ckpt.graph import ops
from d9d_ckpt.graph.build import LazyTensor
from d9d_ckpt.graph.node import Node
from d9d_ckpt.graph.pushdown import invert
from d9d_ckpt.layout.placement import Placement
from d9d_ckpt.models.config import ModelConfig, read_config
from d9d_ckpt.tensors import TensorSpec

Shape = tuple[int, ...]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Rule:
    """One training tensor.

    Attributes:
        name: Its training name.
        sources: Hugging Face names and the shapes that the config makes them have.
        build: The training tensor from the sources, in ops that can be reversed.
        placement: Where it goes.
    """

    name: str
    sources: tuple[tuple[str, Shape], ...]
    build: Callable[[Sequence[LazyTensor]], LazyTensor]
    placement: Placement


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: As in ``model_type``.
        rules: Every training tensor for a config and an experts layout, ``split`` or ``fused``.
        hub_experts: How the hub stores experts; empty for dense models.
        fused_name: Part of a name that only the fused layout has.
        tied_by_default: What a config without ``tie_word_embeddings`` means.
        recomputed: Names of what checkpoints hold and nobody needs: buffers that are computed anew,
            and the private state of another trainer's kernels.
    """

    name: str
    rules: Callable[[ModelConfig, str], Iterator[Rule]]
    hub_experts: str = ""
    fused_name: str = ".mlp.experts.gate_up_proj"
    tied_by_default: bool = False
    recomputed: re.Pattern[str] = re.compile(r".*\.rotary_emb\.inv_freq|.*\._extra_state(/.*)?")

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """The sizes in a config.json."""
        return read_config(raw, tied_by_default=self.tied_by_default)

    def experts_layout(self, names: Sequence[str] | Mapping[str, Any]) -> str:
        """``split`` or ``fused``, as a Hugging Face source of these names stores experts."""
        if not self.hub_experts:
            return ""
        return "fused" if any(self.fused_name in name for name in names) else "split"


@dataclass(frozen=True)
class Mapped:
    """One direction of a mapping.

    Attributes:
        nodes: Target name to expression.
        placements: Target name to placement; empty towards Hugging Face.
        layers: Decoder layers, for pipeline stages.
    """

    nodes: Mapping[str, Node]
    placements: Mapping[str, Placement]
    layers: int


def to_training(
    family: Family, config: ModelConfig, experts: str, sources: Mapping[str, Node]
) -> Mapped:
    """Training tensors from Hugging Face ones.

    Args:
        family: The family.
        config: Its sizes.
        experts: Layout of the sources: ``split``, ``fused`` or empty.
        sources: Every tensor that is to be consumed.

    Raises:
        MappingError: Sources are missing, left over, or of another shape than the config says;
            the message counts all and names the first 20 of each.
    """
    nodes, placements = {}, {}
    missing: list[str] = []
    wrong: list[str] = []
    used: set[str] = set()
    for rule in family.rules(config, experts):
        found = []
        for name, shape in rule.sources:
            node = sources.get(name)
            used.add(name)
            if node is None:
                missing.append(name)
            elif node.shape != shape:
                wrong.append(_misshapen(name, node.shape, shape))
            else:
                found.append(LazyTensor(node))
        if len(found) == len(rule.sources):
            nodes[rule.name] = _built(rule, found)
            placements[rule.name] = rule.placement
    left = [name for name in sources if name not in used]
    _refuse(family, wrong, missing, left, sources)
    return Mapped(nodes, placements, config.layers)


def to_huggingface(
    family: Family, config: ModelConfig, experts: str, sources: Mapping[str, Node]
) -> Mapped:
    """Hugging Face tensors from training ones: the same rules, reversed.

    Raises:
        MappingError: Training tensors are missing, left over, or of another shape.
    """
    nodes: dict[str, Node] = {}
    missing: list[str] = []
    wrong: list[str] = []
    used: set[str] = set()
    for rule in family.rules(config, experts):
        stored = sources.get(rule.name)
        used.add(rule.name)
        if stored is None:
            missing.append(rule.name)
            continue
        blanks = [
            LazyTensor(ops.leaf(name, TensorSpec(stored.dtype, shape)))
            for name, shape in rule.sources
        ]
        forward = _built(rule, blanks)
        if forward.shape != stored.shape:
            wrong.append(_misshapen(rule.name, stored.shape, forward.shape))
            continue
        back = invert(forward, stored)
        nodes |= {name: back[name] for name, _ in rule.sources}
    left = [name for name in sources if name not in used]
    _refuse(family, wrong, missing, left, sources)
    return Mapped(nodes, {}, config.layers)


def with_head(family: Family, config: ModelConfig, mapped: Mapped) -> Mapped:
    """A tied head as a second, real copy of the embedding.

    Raises:
        MappingError: The head is not tied.
    """
    if not config.tied:
        raise MappingError(
            f"{family.name}: config.json does not tie the head, so it has no copy to write"
        )
    nodes = dict(mapped.nodes)
    nodes[HEAD] = nodes[EMBEDDING]
    return Mapped(nodes, mapped.placements, mapped.layers)


def placements_of(family: Family, config: ModelConfig) -> dict[str, Placement]:
    """Where each training tensor goes; no sources needed."""
    return {r.name: r.placement for r in family.rules(config, family.hub_experts)}


def _built(rule: Rule, sources: Sequence[LazyTensor]) -> Node:
    try:
        return rule.build(sources).node
    except MappingError as error:
        names = ", ".join(name for name, _ in rule.sources[:4])
        raise MappingError(f"tensor {rule.name!r} from {names}: {error}") from error


def _misshapen(name: str, found: Shape, expected: Shape) -> str:
    line = f"{name} has shape {list(found)}, expected {list(expected)}"
    if len(expected) > 1 and len(found) == 1:
        line += "; looks like an un-gathered ZeRO-3/FSDP shard: consolidate the checkpoint first"
    elif found[:1] == (0,) and 0 not in expected:
        line += "; looks like a ZeRO-3 placeholder: consolidate the checkpoint first"
    elif len(found) == 3 and found == (expected[0], *expected[:0:-1]):
        line += "; its last two dims are exchanged, which this family does not store"
    return line


def _refuse(
    family: Family,
    wrong: list[str],
    missing: list[str],
    left: list[str],
    sources: Mapping[str, Node],
) -> None:
    """One error for all that does not fit, if anything."""
    if not wrong and not missing and not left:
        return
    parts = []
    if wrong:
        parts.append(_listed(f"{len(wrong)} tensors disagree with config.json", wrong))
    if missing:
        lines = [
            f"{name} (nearest: {', '.join(near)})" if (near := nearest(name, sources)) else name
            for name in missing[:20]
        ]
        parts.append(
            _listed(
                f"{len(missing)} tensors that {family.name} needs are missing", lines, len(missing)
            )
        )
    if left:
        parts.append(_listed(f"{len(left)} tensors match no rule of {family.name}", left))
        flat = [name for name in left if "_flat_param" in name]
        if flat:
            parts.append("_flat_param is an FSDP flat vector: consolidate the checkpoint first")
    parts.append("check --model, or give your own --mapping")
    raise MappingError("; ".join(parts))


def _listed(head: str, names: Sequence[str], total: int | None = None) -> str:
    total = len(names) if total is None else total
    shown = ", ".join(names[:20])
    return f"{head}: {shown}" + (f" and {total - 20} more" if total > 20 else "")


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The three existing names that share most dotted parts with ``name``."""
    parts = set(name.split("."))
    scored = sorted((-len(parts & set(n.split("."))), n) for n in names)
    return [n for score, n in scored[:3] if score < -1]
