"""What a run needs on every rank, from its config alone: no weights, no ranks, no GPU."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

import torch

from d9d_ckpt.errors import LayoutError
from d9d_ckpt.layout.placement import Cut, Placement, held
from d9d_ckpt.layout.topology import AXES, Topology
from d9d_ckpt.models.family import HEAD, placements_of
from d9d_ckpt.models.registry import family_of
from d9d_train.config import Config
from d9d_train.layers.moe import MoE
from d9d_train.layers.recompute import Mode
from d9d_train.models.config import Config as ModelConfig
from d9d_train.models.config import read_config
from d9d_train.models.decoder import CausalLM
from d9d_train.models.registry import build
from d9d_train.parallel.context import check_heads
from d9d_train.parallel.pipeline.held import peak_microbatches
from d9d_train.parallel.roles import check, padded, roles
from d9d_train.parallel.stages import stages_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RankNeeds:
    """What a rank holds at the height of a step.

    Attributes:
        rank: Its number.
        stage: Its pipeline rank.
        parameters: Elements of its shards.
        weights: Bytes of these.
        gradients: Bytes of their gradients.
        optimizer: Bytes of their two moments.
        gathered: Bytes of parameters that FSDP has gathered, in the dtype of computation.
        unreduced: Bytes of gradients that wait to be summed over fsdp.
        activations: Bytes kept for the backward passes under way; an estimate, see `_PipelineRank`.
    """

    rank: int
    stage: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int
    unreduced: int
    activations: int

    @property
    def memory(self) -> int:
        """Bytes in all, without what the device's context, its communicators and its allocator take."""
        kept = self.weights + self.gradients + self.optimizer
        return kept + self.gathered + self.unreduced + self.activations


@dataclass(frozen=True)
class RunNeeds:
    """The needs of a run.

    Attributes:
        parameters: Elements of the whole model.
        dtype: What they are stored in.
        topology: Its axes.
        global_batch: Sequences of a step.
        ranks: Of each rank, in order.
    """

    parameters: int
    dtype: torch.dtype
    topology: Topology
    global_batch: int
    ranks: tuple[RankNeeds, ...]

    @property
    def fullest(self) -> list[RankNeeds]:
        """The rank of each pipeline rank that needs most."""
        size = self.topology.stage_ranks
        starts = range(0, len(self.ranks), size)
        return [max(self.ranks[at : at + size], key=lambda rank: rank.memory) for at in starts]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``.

        Returns:
            ``parameters`` and ``bytes`` of the model as it is stored; ``world``, ``layout`` and
            ``global_batch`` of the plan; ``memory`` of the rank that needs most; ``ranks``, each with
            the fields of `RankNeeds` and ``bytes`` of its parameters, ``memory`` in all.
        """
        ranks = [{**asdict(r), "bytes": r.weights, "memory": r.memory} for r in self.ranks]
        return {
            "parameters": self.parameters,
            "bytes": self.parameters * self.dtype.itemsize,
            "world": self.topology.world,
            "layout": self.topology.to_json(),
            "global_batch": self.global_batch,
            "memory": max(rank.memory for rank in self.ranks),
            "ranks": ranks,
        }

    def to_text(self) -> str:
        """A table of the fullest rank of each pipeline rank."""
        layout = ", ".join(f"{axis} {getattr(self.topology, axis)}" for axis in AXES)
        size, name = self.parameters * self.dtype.itemsize, str(self.dtype).removeprefix("torch.")
        lines = [
            f"{self.parameters:,} parameters, {_gib(size).strip()} GiB in {name}",
            f"{self.topology.world:,} ranks: {layout}; {self.global_batch:,} sequences a step",
            "GiB of the fullest rank of each pipeline rank; activations are an estimate",
            f"{'pp':>4} {'rank':>6} {'parameters':>15}" + "".join(f"{c:>12}" for c in _COLUMNS),
        ]
        lines += [
            f"{r.stage:>4} {r.rank:>6} {r.parameters:>15,}"
            + "".join(f"{_gib(getattr(r, column)):>12}" for column in _COLUMNS)
            for r in self.fullest
        ]
        return "\n".join(lines)


_COLUMNS = (
    "weights",
    "gradients",
    "optimizer",
    "gathered",
    "unreduced",
    "activations",
    "memory",
)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.3f}"


def plan(config: Config, raw: Mapping[str, Any], world: int | None = None) -> RunNeeds:
    """The needs of a run.

    A world larger than the config's mesh is filled with replicas: ``dp_replicate`` grows, every rank
    keeps its share of parameters and of work, and the global batch grows along. For another use of the
    ranks, change the mesh.

    Args:
        config: Of the run.
        raw: The model's config.json.
        world: Ranks; None for those of the mesh.

    Raises:
        LayoutError: The axes do not divide the world or the model, with the numbers.
        CkptError: A model that the trainer does not compute.
    """
    config = config.balanced(raw)
    topology, pipeline = _filled(config.topology, world), config.pipeline
    model = read_config(raw)
    heads = model.sizes.heads // topology.tp
    check_heads("context.kind", config.context.kind, heads, topology.cp)
    waiting = peak_microbatches(pipeline.program(topology))
    ranks = [
        _PipelineRank.of(index, config, raw, topology, waiting[index])
        for index in range(topology.pp)
    ]
    return RunNeeds(
        parameters=sum(_own(model) for rank in ranks for model in rank.models),
        dtype=config.train.stored,
        topology=topology,
        global_batch=config.train.global_batch // config.mesh.dp_replicate * topology.dp_replicate,
        ranks=tuple(needs for rank in ranks for needs in rank.ranks()),
    )


def _filled(topology: Topology, world: int | None) -> Topology:
    """The topology with as many replicas as fill the world."""
    if world is None:
        return topology
    once = topology.world // topology.dp_replicate
    if world < 1 or world % once:
        raise LayoutError(
            f"world {world} is no multiple of pp x dp_shard x cp x tp = {topology.pp} x "
            f"{topology.dp_shard} x {topology.cp} x {topology.tp} = {once}, which dp_replicate repeats"
        )
    return replace(topology, dp_replicate=world // once)


def _own(model: CausalLM) -> int:
    """Elements that no other stage has: a tied head is the embedding of the first."""
    tied = model.config.sizes.tied
    return sum(p.numel() for n, p in model.named_parameters() if not (tied and n == HEAD))


@dataclass(frozen=True)
class _PipelineRank:
    """A pipeline rank.

    Attributes:
        index: Its number.
        config: Of the run.
        topology: Of the plan.
        models: Its stages, on the meta device.
        tensors: Shape, vocabularies padded, and placement of each parameter.
        waiting: Micro-batches between their forward and their backward pass, at most.
    """

    index: int
    config: Config
    topology: Topology
    models: Sequence[CausalLM]
    tensors: Sequence[tuple[Shape, Placement]]
    waiting: float

    @classmethod
    def of(
        cls,
        index: int,
        config: Config,
        raw: Mapping[str, Any],
        topology: Topology,
        waiting: float,
    ) -> Self:
        """The modules that the run would build, with the checks that it would make."""
        sizes = read_config(raw).sizes
        with torch.device("meta"):
            parts = stages_of(topology, sizes.layers, index).values()
            models = [build(raw, part) for part in parts]
        placements = placements_of(family_of(raw), sizes)
        tensors = []
        for model in models:
            placed = roles(model, placements)
            check(model, placed, topology)
            tensors += [
                (padded(tuple(p.shape), placed[name].cut, topology), placed[name])
                for name, p in model.named_parameters()
            ]
        return cls(index, config, topology, models, tensors, waiting)

    def ranks(self) -> Iterator[RankNeeds]:
        """The needs of each of its ranks, which differ in their shards alone."""
        train, parts = self.config.train, self.config.pipeline.microbatches
        stored, compute = train.stored.itemsize, train.compute.itemsize
        gathered = self._whole(everything=not self.config.reshards) * compute
        # Gradients of several micro-batches are added up before they are reduced, once.
        unreduced = self._whole(everything=parts > 1) * stored
        activations = self._activations()
        for number, elements in enumerate(self._shards() * self.topology.dp_replicate):
            yield RankNeeds(
                rank=self.index * self.topology.stage_ranks + number,
                stage=self.index,
                parameters=elements,
                weights=elements * stored,
                gradients=elements * stored,
                optimizer=2 * elements * stored,
                gathered=gathered,
                unreduced=unreduced,
                activations=activations,
            )

    def _shards(self) -> list[int]:
        """Elements of each (fsdp, tp) rank; equal tensors are looked at once."""
        out = [0] * (self.topology.fsdp * self.topology.tp)
        alike = Counter((shape, placement.cut) for shape, placement in self.tensors)
        for (shape, cut), count in alike.items():
            for rank, boxes in enumerate(held(shape, cut, self.topology)):
                out[rank] += count * sum(box.numel for box in boxes)
        return out

    def _whole(self, *, everything: bool) -> int:
        """Elements that a rank has beyond its shards: of all its layers, or of two; and of the ends."""
        ends, layers = 0, Counter[int]()
        for shape, placement in self.tensors:
            elements = math.prod(shape) // _parts(placement.cut, self.topology)
            if isinstance(placement.stage, int):
                layers[placement.stage] += elements
            else:
                ends += elements
        return ends + sum(n for _, n in layers.most_common(None if everything else 2))

    def _activations(self) -> int:
        """Bytes kept for backward passes: an estimate, for experts of even loads and the kernels of a GPU.

        Every micro-batch under way keeps something of each layer, see `_kept`. With recomputation, one
        layer more has all that it computes. The loss makes the gradients of the head's input and, in
        float32 or wider, of its weight while it goes forward, and keeps them as well.
        """
        train, model, topology = self.config.train, self.models[0].config, self.topology
        tokens = train.seq_len // topology.cp * self._sequences()
        keep = partial(_kept, model, topology, self.config.context.kind)
        sparse = [
            isinstance(layer.mlp, MoE)
            for part in self.models
            for layer in part.model.layers.values()
        ]
        layers = sum(keep(train.recompute, sparse=s) for s in sparse)
        again = max((keep("none", sparse=s) for s in sparse), default=0.0)
        head = tokens * model.sizes.hidden if self._has_head else 0
        kept = self.waiting * (tokens * layers + head)
        kept += tokens * again * (train.recompute != "none")
        return math.ceil(kept) * train.compute.itemsize + math.ceil(
            self.waiting * self._head_gradient()
        )

    def _sequences(self) -> int:
        """Of one micro-batch of a rank; more replicas have more of them in all."""
        mesh, parts = self.config.mesh, self.config.pipeline.microbatches
        return self.config.train.global_batch // (mesh.readers * parts)

    @property
    def _has_head(self) -> bool:
        return any(model.lm_head is not None for model in self.models)

    def _head_gradient(self) -> int:
        if not self._has_head:
            return 0
        sizes = self.models[0].config.sizes
        return (
            -(-sizes.vocab // self.topology.tp) * sizes.hidden * self.config.train.stored.itemsize
        )


def _parts(cut: Cut, topology: Topology) -> int:
    """Ranks that share a tensor once fsdp has gathered it."""
    if cut.experts:
        return topology.ep
    return 1 if cut.tp is None else topology.tp


def _kept(
    model: ModelConfig, topology: Topology, context: str, recompute: Mode, *, sparse: bool
) -> float:
    """Elements that a layer keeps of each token that its cp rank has.

    ``layer`` keeps the layer's input; ``selective`` also what matrix products and attention give. All
    that backward reads is, beside these: the residual stream after attention, the normed inputs of
    both blocks, queries, keys and values once more as attention takes them, and the products of gates
    and ups. What lies between blocks is cut over tp, their gathered inputs are not; tp cuts heads and
    a dense MLP by width, the rows of experts by tokens.
    """
    sizes, tp = model.sizes, topology.tp
    hidden, stream = sizes.hidden, sizes.hidden / tp
    if recompute == "layer":
        return stream
    q, kv = (n * sizes.head_dim / tp for n in (sizes.heads, 2 * sizes.kv_heads))
    rows, width = 1.0, sizes.intermediate / tp
    if sparse:
        rows, width = model.experts_per_token / tp, float(sizes.moe_intermediate)
    products = q + kv + q + rows * 2 * width
    if recompute == "selective":
        return stream + products + hidden + rows * hidden
    seen = topology.cp if context == "all_gather" else 1
    taken = 2 * stream + hidden + q + kv * seen + rows * (hidden + width)
    return taken + products + (stream + rows * hidden if sparse else 0.0)
