"""Topologies that have to compute what one process does, each a line of words."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helpers.trainers import BATCH, DENSE, MOE, SEQ_LEN, config

from d9d_ckpt.errors import LayoutError
from d9d_train.config import Config
from d9d_train.parallel.pipeline.schedule import BUILDERS, placement


def _stretched(kind: str, **parameters: float) -> dict[str, Any]:
    """A dense Qwen3 with biases, some of whose positions are beyond those of its pre-training."""
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **parameters}
    trained = SEQ_LEN // 4 if kind == "dynamic" else SEQ_LEN
    sizes = {"family": "qwen3", "head_dim": 8, "mlp_bias": False, "rope_parameters": rope}
    return DENSE | sizes | {"max_position_embeddings": trained}


MODELS: Mapping[str, Mapping[str, Any]] = {
    "moe": MOE,
    "moe-tied": MOE | {"tie_word_embeddings": True},
    "moe-4": MOE | {"num_experts": 4},
    "moe-6": MOE
    | {"num_experts": 6, "head_dim": 6, "hidden_size": 36, "moe_intermediate_size": 12},
    "moe-8": MOE | {"num_hidden_layers": 8},
    "tied-8": DENSE | {"num_hidden_layers": 8},
    "moe-mixed": MOE | {"mlp_only_layers": [0, 3], "attention_bias": True},
    "llama": DENSE,
    "llama-untied": DENSE | {"tie_word_embeddings": False},
    "qwen3-linear": _stretched("linear", factor=4.0),
    "qwen3-dynamic": _stretched("dynamic", factor=4.0),
    "qwen3-yarn": _stretched("yarn", factor=4.0, original_max_position_embeddings=8),
    "qwen3-llama3": _stretched(
        "llama3",
        factor=4.0,
        original_max_position_embeddings=16,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
}
"""moe-8, tied-8: layers for two stages on each of four ranks; moe-4: fewer experts than ranks that shard them; moe-6: sizes that they do not divide; moe-mixed:
stages without experts."""


def _layers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("+")))


def _flag(text: str) -> bool:
    return {"yes": True, "no": False}[text]


_WORDS: Mapping[str, tuple[str, str, Callable[[str], Any]]] = {
    **{axis: ("mesh", axis, int) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
    "stages": ("mesh", "stages", _layers),
    "vocab_multiple": ("mesh", "vocab_multiple", int),
    "context": ("context", "kind", str),
    "schedule": ("pipeline", "schedule", str),
    "microbatches": ("pipeline", "microbatches", int),
    "recompute": ("train", "recompute", str),
    "reshard": ("train", "reshard_after_forward", _flag),
}
"""Word: section of the config, key, and how its value is written."""


def model_of(line: str) -> Mapping[str, Any]:
    """The model of a line, its first word."""
    return MODELS[line.split()[0]]


def config_of(line: str, tokens: str) -> Config:
    """The run that a line describes.

    Args:
        line: A model of `MODELS`, then ``word=value`` for whatever is not the default.
        tokens: The file that `documents` wrote.
    """
    sections: dict[str, dict[str, Any]] = {}
    for word in line.split()[1:]:
        name, _, value = word.partition("=")
        section, key, read = _WORDS[name]
        sections.setdefault(section, {})[key] = read(value)
    return config(tokens, model_of(line), **sections)


FEW = """
moe dp_shard=8 ep=8 recompute=selective
moe dp_replicate=4 dp_shard=2 ep=2 reshard=yes microbatches=2
moe cp=8 context=ring ep=2
moe dp_shard=2 tp=4 ep=8 reshard=yes microbatches=2
moe pp=4 dp_shard=2 ep=2 microbatches=4
moe pp=2 dp_shard=4 ep=2 stages=3+1 schedule=gpipe microbatches=4 reshard=yes
moe pp=2 tp=4 ep=2 schedule=gpipe microbatches=4
moe pp=2 dp_shard=2 tp=2 ep=4 schedule=gpipe microbatches=4 recompute=layer
moe pp=2 cp=2 tp=2 context=ulysses ep=4 microbatches=2
moe dp_replicate=2 cp=2 tp=2 context=all_gather ep=4
moe-4 dp_shard=4 tp=2 ep=2 microbatches=2
moe-6 dp_replicate=2 dp_shard=4
moe-mixed pp=2 dp_shard=2 cp=2 context=ring ep=4 schedule=gpipe microbatches=2
llama pp=2 dp_shard=2 tp=2 schedule=gpipe microbatches=2 vocab_multiple=4
qwen3-yarn pp=2 cp=4 context=ulysses microbatches=2
""".strip().splitlines()
"""On 8 processes: a few in which everything occurs."""

EIGHT = [
    *FEW,
    *"""
moe dp_replicate=8
moe dp_shard=8
moe dp_shard=8 ep=2 reshard=yes microbatches=2
moe dp_shard=8 ep=4 reshard=no
moe dp_replicate=2 dp_shard=4 ep=2 microbatches=2
moe cp=8
moe cp=8 context=ulysses ep=8
moe dp_shard=2 cp=4 context=all_gather ep=8
moe dp_shard=2 cp=4 context=ring ep=4 recompute=layer
moe dp_shard=4 cp=2 context=ulysses ep=4 recompute=selective
moe dp_replicate=2 cp=4 context=ulysses ep=2
moe dp_replicate=2 cp=4 context=ring
moe dp_shard=2 tp=4
moe dp_shard=2 tp=4 ep=2 microbatches=4
moe dp_shard=2 tp=4 ep=4 recompute=layer
moe dp_replicate=2 tp=4 ep=4
moe dp_shard=4 tp=2 ep=8 vocab_multiple=4
moe cp=2 tp=4 context=ulysses ep=8
moe cp=4 tp=2 context=ring ep=2
moe cp=4 tp=2 context=all_gather ep=4 recompute=selective
moe pp=4 dp_shard=2 schedule=gpipe microbatches=4
moe pp=4 tp=2 ep=2 microbatches=8
moe pp=4 cp=2 context=ring schedule=gpipe microbatches=2
moe pp=4 dp_replicate=2 microbatches=4 recompute=layer
moe pp=2 dp_shard=4 ep=4 stages=1+3 microbatches=2
moe pp=2 cp=4 context=ulysses ep=2 microbatches=8
moe pp=2 dp_replicate=2 dp_shard=2 ep=2 microbatches=2
moe pp=2 dp_replicate=2 cp=2 context=ring ep=2 microbatches=4
moe pp=2 dp_replicate=2 tp=2 ep=2 schedule=gpipe microbatches=2
moe pp=2 dp_shard=2 cp=2 context=all_gather ep=4 microbatches=4
moe pp=2 dp_shard=2 tp=2 ep=2 microbatches=4 recompute=selective
moe pp=2 cp=2 tp=2 context=ring ep=2 schedule=gpipe microbatches=4
moe dp_replicate=2 dp_shard=2 cp=2 context=ulysses ep=4
moe dp_replicate=2 dp_shard=2 tp=2 ep=4 microbatches=2
moe dp_shard=2 cp=2 tp=2 context=ring ep=8 microbatches=2
moe dp_shard=2 cp=2 tp=2 context=ulysses ep=4 recompute=layer
moe dp_shard=2 cp=2 tp=2 context=all_gather ep=2 reshard=yes microbatches=2
moe-tied pp=2 dp_shard=2 tp=2 ep=2 microbatches=2
moe-tied dp_shard=4 cp=2 ep=4
moe-4 dp_shard=8
moe-4 pp=2 cp=4 context=ring microbatches=2
moe-6 dp_shard=4 tp=2 ep=2 vocab_multiple=8
moe-6 dp_shard=8 ep=2
moe-6 pp=2 dp_shard=2 cp=2 ep=2 context=ulysses microbatches=2
moe-6 pp=2 dp_shard=4 reshard=yes
moe-mixed pp=4 tp=2 ep=2 microbatches=2
llama dp_shard=8
llama pp=4 tp=2 microbatches=4
llama pp=2 dp_replicate=2 cp=2 context=ring stages=3+1 microbatches=2
llama dp_shard=2 cp=2 tp=2 context=ulysses recompute=selective
llama-untied pp=2 cp=2 tp=2 context=all_gather microbatches=2
llama-untied dp_replicate=2 dp_shard=2 tp=2 recompute=layer
qwen3-linear cp=4 tp=2 context=ring
qwen3-dynamic cp=4 dp_shard=2 context=all_gather
qwen3-llama3 cp=2 tp=2 dp_shard=2 context=ring
""".strip().splitlines(),
]
"""On 8 processes."""

SIX = """
moe pp=2 dp_replicate=2 dp_shard=2 cp=2 tp=2 ep=4 context=ring microbatches=4
moe pp=2 dp_replicate=2 dp_shard=2 cp=2 tp=2 ep=2 context=ulysses schedule=gpipe microbatches=2
moe pp=2 dp_replicate=2 dp_shard=2 cp=2 tp=2 ep=8 context=all_gather microbatches=2 recompute=layer
moe-tied pp=2 dp_replicate=2 dp_shard=2 cp=2 tp=2 ep=4 context=ring schedule=gpipe microbatches=4
moe-6 pp=2 dp_replicate=2 dp_shard=2 cp=2 tp=2 ep=2 stages=1+3 microbatches=4
llama pp=2 dp_replicate=2 dp_shard=2 cp=2 tp=2 context=ulysses microbatches=4
""".strip().splitlines()
"""All axes at once, on 32 processes."""

PIPELINES = """
moe-8 pp=2
moe-8 pp=4
moe-8 pp=2 dp_shard=2
moe-8 pp=4 dp_shard=2
moe-8 pp=2 tp=2
moe-8 pp=4 tp=2
moe-8 pp=2 cp=2
moe-8 pp=4 cp=2
moe-8 pp=2 dp_shard=2 ep=2
moe-8 pp=4 dp_shard=2 ep=2
moe-8 pp=2 dp_shard=2 cp=2 tp=2 ep=4
tied-8 pp=2 recompute=layer
tied-8 pp=4 dp_shard=2
""".strip().splitlines()
"""Pipelines alone, with each other axis, and with all; each for every schedule."""


def schedules(line: str, microbatches: Sequence[int] = (1, 2, 4, 8, 16)) -> list[str]:
    """A pipeline's line with every schedule and number of micro-batches that can be had."""
    words = dict(word.split("=") for word in line.split()[1:])
    ranks, readers = int(words["pp"]), int(words.get("dp_shard", 1))
    out = []
    for name, builder in BUILDERS.items():
        virtual, _ = placement(name)
        for count in microbatches:
            if name == "forward_only" or BATCH % (readers * count):
                continue
            try:
                builder(virtual * ranks, ranks, count)
            except LayoutError:
                continue  # fewer micro-batches than the schedule needs, or no whole rounds of them
            out.append(f"{line} schedule={name} microbatches={count}")
    return out
