"""Writes a checkpoint of a supported family in the layout the Hugging Face hub has.

    python tools/make_checkpoint.py qwen3_moe /tmp/tiny
    python tools/make_checkpoint.py qwen3_moe /dev/shm/x --size 4GiB
    python tools/make_checkpoint.py qwen3_moe /tmp/235b --size 235b --sparse

Values are N(0, 0.02), norms N(1, 0.02), and depend on seed, family and sizes alone: `split` and
`fused` hold the same weights, and other dtypes are the same numbers rounded.
"""

import argparse
import json
import math
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

BLOCK = 1 << 22  # elements of random data, drawn once and written rotated: 8 MiB of bf16
STRIDE = 2_592_069  # odd, so no two pieces share a rotation; near the golden section of BLOCK
SCALE = 0.02
DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
WIDTHS = dict(DTYPES.values())
UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
TOKENS = {"<unk>": 0, "<s>": 1, "</s>": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What sets one family's checkpoints apart from another's."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim_key: bool = True
    moe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of one model.

    `experts`, `moe_intermediate` and `experts_per_token` are read for mixtures only, whose rows per
    expert are `moe_intermediate` always, Mixtral's `intermediate_size` included.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    moe_intermediate: int = 0
    experts_per_token: int = 0
    tied: bool = False
    dtype: str = "bfloat16"
    layout: str = "split"


class Tensor(NamedTuple):
    """A stored tensor; `dtype` is safetensors' name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True, head_dim_key=False),
    "qwen3": Family(architecture="Qwen3ForCausalLM", qk_norm=True),
    "qwen3_moe": Family(architecture="Qwen3MoeForCausalLM", qk_norm=True, moe=True),
    "mixtral": Family(architecture="MixtralForCausalLM", head_dim_key=False, moe=True),
}

EXPERT_NAMES = {  # router, then the formats of gate, up and down
    "qwen3_moe": ("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj",
                  "mlp.experts.{}.down_proj"),
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1",
                "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2"),
}  # fmt: skip

QWEN3_30B = Config(
    family="qwen3_moe", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128,
    intermediate=6144, vocab=151936, experts=128, moe_intermediate=768, experts_per_token=8,
)  # fmt: skip

PUBLISHED = {
    "30b-a3b": QWEN3_30B,
    "235b": replace(
        QWEN3_30B, layers=94, hidden=4096, heads=64, intermediate=12288, moe_intermediate=1536
    ),
}

# The shapes that `--size BYTES` fits by layers and vocabulary: small published models of each family.
SHAPES = {
    "llama": Config(
        family="llama", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64,
        intermediate=8192, vocab=32768,
    ),
    "qwen2": Config(
        family="qwen2", layers=28, hidden=1536, heads=12, kv_heads=2, head_dim=128,
        intermediate=8960, vocab=32768,
    ),
    "qwen3": Config(
        family="qwen3", layers=28, hidden=2048, heads=16, kv_heads=8, head_dim=128,
        intermediate=6144, vocab=32768,
    ),
    "qwen3_moe": replace(QWEN3_30B, vocab=32768),
    "mixtral": Config(
        family="mixtral", layers=32, hidden=2048, heads=16, kv_heads=4, head_dim=128,
        intermediate=7168, vocab=32768, experts=8, moe_intermediate=7168, experts_per_token=2,
    ),
}  # fmt: skip


def tiny(family: str) -> Config:
    """A few hundred KB; no two dims are equal where the family has a head_dim of its own."""
    head_dim = 24 if FAMILIES[family].head_dim_key else 16
    dense = Config(
        family=family, layers=4, hidden=64, heads=4, kv_heads=2, head_dim=head_dim,
        intermediate=160, vocab=512,
    )  # fmt: skip
    if not FAMILIES[family].moe:
        return dense
    return replace(dense, experts=8, moe_intermediate=40, experts_per_token=2)


# -- what a checkpoint holds ------------------------------------------------------------------


def tensors(config: Config) -> list[Tensor]:
    """Every stored tensor in the model's own order: name, dtype, shape."""
    dtype = DTYPES[config.dtype][0]
    return [Tensor(name, dtype, shape) for name, shape in _shapes(config)]


def total_bytes(config: Config) -> int:
    return sum(_nbytes(tensor) for tensor in tensors(config))


def _shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (config.vocab, config.hidden)
    for layer in range(config.layers):
        stem = f"model.layers.{layer}."
        for name, shape in _layer(config):
            yield stem + name, shape
    yield "model.norm.weight", (config.hidden,)
    if not config.tied:
        yield "lm_head.weight", (config.vocab, config.hidden)


def _layer(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _attention(config)
    yield from _experts(config) if FAMILIES[config.family].moe else _mlp(config)
    yield "input_layernorm.weight", (config.hidden,)
    yield "post_attention_layernorm.weight", (config.hidden,)


def _attention(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    family, hidden = FAMILIES[config.family], config.hidden
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        yield f"self_attn.{name}_proj.weight", (rows, hidden)
        if family.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, q_rows)
    if family.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)


def _mlp(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mlp.gate_proj.weight", (config.intermediate, config.hidden)
    yield "mlp.up_proj.weight", (config.intermediate, config.hidden)
    yield "mlp.down_proj.weight", (config.hidden, config.intermediate)


def _experts(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    experts, rows, hidden = config.experts, config.moe_intermediate, config.hidden
    if config.layout == "fused":
        yield "mlp.gate.weight", (experts, hidden)
        yield "mlp.experts.gate_up_proj", (experts, 2 * rows, hidden)
        yield "mlp.experts.down_proj", (experts, hidden, rows)
        return
    router, gate, up, down = EXPERT_NAMES[config.family]
    yield f"{router}.weight", (experts, hidden)
    for expert in range(experts):
        yield f"{gate.format(expert)}.weight", (rows, hidden)
        yield f"{up.format(expert)}.weight", (rows, hidden)
        yield f"{down.format(expert)}.weight", (hidden, rows)


def _nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * WIDTHS[tensor.dtype]


def config_json(config: Config) -> dict[str, Any]:
    """The keys that the hub's config.json of this family has."""
    family = FAMILIES[config.family]
    keys: dict[str, Any] = {
        "architectures": [family.architecture],
        "attention_dropout": 0.0,
        "bos_token_id": TOKENS["<s>"],
        "eos_token_id": TOKENS["</s>"],
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "initializer_range": SCALE,
        "intermediate_size": config.intermediate,
        "max_position_embeddings": 40960,
        "model_type": config.family,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": config.tied,
        "torch_dtype": config.dtype,
        "transformers_version": "4.51.0",
        "use_cache": True,
        "vocab_size": config.vocab,
    }
    if family.head_dim_key or config.heads * config.head_dim != config.hidden:
        keys["head_dim"] = config.head_dim
    return dict(sorted((keys | _family_keys(config)).items()))


def _family_keys(config: Config) -> dict[str, Any]:
    routing = {
        "num_experts_per_tok": config.experts_per_token,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    windows = {
        "max_window_layers": config.layers,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    plain = {"attention_bias": False, "rope_scaling": None}
    match config.family:
        case "llama":
            return plain | {"mlp_bias": False, "pretraining_tp": 1}
        case "qwen2":
            return windows
        case "mixtral":
            return routing | {
                "intermediate_size": config.moe_intermediate,
                "num_local_experts": config.experts,
                "sliding_window": None,
            }
        case "qwen3_moe":
            return plain | windows | routing | {
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "moe_intermediate_size": config.moe_intermediate,
                "norm_topk_prob": True,
                "num_experts": config.experts,
            }  # fmt: skip
    return plain | windows


# -- sizes ------------------------------------------------------------------------------------


def parse_bytes(text: str) -> int:
    """Reads `4GiB`, `5GB` or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4GiB, 5GB or 1048576")
    number, unit, binary = match.groups(default="")
    return int(float(number) * (1024 if binary else 1000) ** UNITS[unit.upper()])


def sized(family: str, size: str, **overrides: Any) -> Config:
    """The config that `--size` means, with single sizes overridden.

    Raises:
        ValueError: A published size of another family, or bytes that the shape cannot meet.
    """
    if size in PUBLISHED and family != PUBLISHED[size].family:
        raise ValueError(f"size {size} is a {PUBLISHED[size].family}, not a {family}")
    if size == "tiny" or size in PUBLISHED:
        config = replace(PUBLISHED.get(size) or tiny(family), **overrides)
    else:
        shape = replace(SHAPES[family], **overrides)
        config = fitted(shape, parse_bytes(size), frozenset(overrides))
    return replace(config, experts_per_token=min(config.experts_per_token, config.experts))


def fitted(shape: Config, nbytes: int, fixed: frozenset[str] = frozenset()) -> Config:
    """`shape` with as many layers as fit in `nbytes`, and a vocabulary that fills what is left.

    Small totals halve the widths first, until two layers fit; sizes named in `fixed` stay.

    Raises:
        ValueError: The total would be more than 5% off.
    """
    wanted = shape.layers if "layers" in fixed else 2
    while _whole_layers(shape, nbytes) < wanted and shape.hidden > 64:
        shape = _halved(shape, fixed)
    if "layers" not in fixed:
        shape = replace(shape, layers=max(_whole_layers(shape, nbytes), 1))
    if "vocab" not in fixed:
        row = shape.hidden * DTYPES[shape.dtype][1] * (1 if shape.tied else 2)
        spare = (nbytes - total_bytes(shape)) // row
        shape = replace(shape, vocab=max(shape.vocab + spare // 64 * 64, 64))
    total = total_bytes(shape)
    if abs(total - nbytes) > nbytes / 20:
        raise ValueError(f"{shape.family} nearest to {nbytes} bytes has {total}: {shape}")
    return shape


def _whole_layers(shape: Config, nbytes: int) -> int:
    bare = total_bytes(replace(shape, layers=0))
    return (nbytes - bare) // (total_bytes(replace(shape, layers=1)) - bare)


def _halved(shape: Config, fixed: frozenset[str]) -> Config:
    names = {"hidden", "heads", "kv_heads", "intermediate", "moe_intermediate", "vocab"} - fixed
    floors = {"heads": shape.kv_heads, "kv_heads": 1}
    halves = {name: max(getattr(shape, name) // 2, floors.get(name, 0)) for name in names}
    return replace(shape, **halves)


# -- values -----------------------------------------------------------------------------------


class Values:
    """Pseudo-random contents, the same for a weight whether it is stored split or fused."""

    def __init__(self, config: Config, seed: int) -> None:
        """Draws the block; `pieces` then only slices it."""
        normal = np.random.default_rng(seed).standard_normal(BLOCK, dtype=np.float32)
        normal *= np.float32(SCALE)
        self._weights = _encode(normal, config.dtype)
        self._norms = _encode(normal + np.float32(1), config.dtype)
        self._config = config
        self._first = _first_pieces(config)

    def pieces(self, tensor: Tensor) -> Iterator[memoryview]:
        """The tensor's bytes in row-major order, a few MiB at a time."""
        block = self._norms if tensor.name.endswith("norm.weight") else self._weights
        for name, count in _parts(self._config, tensor):
            for number, start in enumerate(range(0, count, BLOCK), self._first[name]):
                yield from _rotated(block, number, min(BLOCK, count - start))


def _encode(values: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> memoryview:
    if dtype != "bfloat16":
        return values.astype("<f2" if dtype == "float16" else "<f4").view(np.uint8).data
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype("<u2").view(np.uint8).data


def _rotated(block: memoryview, number: int, count: int) -> Iterator[memoryview]:
    width = len(block) // BLOCK
    start = number * STRIDE % BLOCK * width
    head = block[start : start + count * width]
    yield head
    if len(head) < count * width:
        yield block[: count * width - len(head)]


def _first_pieces(config: Config) -> dict[str, int]:
    first, number = {}, 0
    for tensor in tensors(replace(config, layout="split")):
        first[tensor.name] = number
        number += -(-math.prod(tensor.shape) // BLOCK)
    return first


def _parts(config: Config, tensor: Tensor) -> Iterator[tuple[str, int]]:
    """The split tensors that a stored one is laid end to end of, with their element counts."""
    count = math.prod(tensor.shape)
    stem, fused, kind = tensor.name.partition("mlp.experts.")
    if config.layout == "split" or not FAMILIES[config.family].moe or "mlp." not in tensor.name:
        yield tensor.name, count
        return
    router, gate, up, down = EXPERT_NAMES[config.family]
    if not fused:
        yield tensor.name.replace("mlp.gate", router), count
        return
    names = (gate, up) if kind == "gate_up_proj" else (down,)
    for expert in range(config.experts):
        for name in names:
            yield f"{stem}{name.format(expert)}.weight", count // config.experts // len(names)


# -- files ------------------------------------------------------------------------------------


def write(
    config: Config,
    dst: Path,
    *,
    seed: int = 0,
    max_shard_size: int = 5 * 10**9,
    sparse: bool = False,
) -> None:
    """Writes the checkpoint; with `sparse` headers and index are real and the data is a hole."""
    dst.mkdir(parents=True, exist_ok=True)
    values = None if sparse else Values(config, seed)
    files = name_files(shards(tensors(config), max_shard_size))
    for name, content in files.items():
        with (dst / name).open("wb") as file:
            _write_shard(file, content, values)
    if len(files) > 1:
        _write_json(dst / "model.safetensors.index.json", _index(files))
    write_small_files(config, dst)


def shards(content: list[Tensor], max_bytes: int) -> list[list[Tensor]]:
    """Consecutive tensors, as many a shard as fit; a tensor larger than that has its own."""
    result: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in content:
        if result[-1] and filled + _nbytes(tensor) > max_bytes:
            result.append([])
            filled = 0
        result[-1].append(tensor)
        filled += _nbytes(tensor)
    return result


def name_files(content: list[list[Tensor]]) -> dict[str, list[Tensor]]:
    if len(content) == 1:
        return {"model.safetensors": content[0]}
    total = len(content)
    return {
        f"model-{number:05}-of-{total:05}.safetensors": shard
        for number, shard in enumerate(content, 1)
    }


def _write_shard(file: BinaryIO, content: list[Tensor], values: Values | None) -> None:
    ordered = sorted(content)  # by name as a string, which is the order inside the hub's files
    header = encode_header(ordered)
    file.write(header)
    if values is None:
        file.truncate(len(header) + sum(map(_nbytes, ordered)))
        return
    for tensor in ordered:
        file.writelines(values.pieces(tensor))


def encode_header(content: list[Tensor]) -> bytes:
    """The safetensors header of tensors that follow each other: its length, then JSON."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in content:
        end = offset + _nbytes(tensor)
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _index(files: dict[str, list[Tensor]]) -> dict[str, Any]:
    names = {tensor.name: file for file, content in files.items() for tensor in content}
    total = sum(_nbytes(tensor) for content in files.values() for tensor in content)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}


def write_small_files(config: Config, dst: Path) -> None:
    """config.json, generation_config.json and a tokenizer of three words."""
    tokens = {"bos_token_id": TOKENS["<s>"], "eos_token_id": TOKENS["</s>"]}
    _write_json(dst / "config.json", config_json(config))
    _write_json(dst / "generation_config.json", tokens | {"transformers_version": "4.51.0"})
    _write_json(dst / "tokenizer.json", _tokenizer())
    _write_json(
        dst / "tokenizer_config.json",
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def _tokenizer() -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": id_, "content": word, "special": True, **flags} for word, id_ in TOKENS.items()]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": TOKENS, "unk_token": "<unk>"},
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_real(
    config: Config, dst: Path, *, seed: int = 0, max_shard_size: int = 5 * 10**9
) -> None:
    """Lets transformers write the checkpoint: its model classes, its names, its files.

    Transformers 5 saves split experts as the hub has them, and fused ones without its conversion.
    """
    import torch
    import transformers

    keys = {key: value for key, value in config_json(config).items() if key != "torch_dtype"}
    hf_config = transformers.AutoConfig.for_model(**keys)
    dtype = getattr(torch, config.dtype)
    model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        hf_config, dtype=dtype
    )
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, SCALE)
    write_small_files(config, dst)
    model.save_pretrained(
        dst, max_shard_size=max_shard_size, save_original_format=config.layout == "split"
    )


# -- command line -----------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        config = _config(args)
        _write(args, config)
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    files = len(list(args.dst.glob("*.safetensors")))
    stored = tensors(config)
    print(
        f"{args.dst}: {len(stored)} tensors, {total_bytes(config)} bytes, {files} files, {config}"
    )
    return 0


def _config(args: argparse.Namespace) -> Config:
    names = (*OVERRIDES, "tied", "dtype", "layout")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.real and args.size != "tiny":
        raise ValueError("--real holds the whole model in memory and takes --size tiny only")
    if args.real:
        given.setdefault("dtype", "float32")
    return sized(args.family, args.size, **given)


def _write(args: argparse.Namespace, config: Config) -> None:
    if args.dst.exists() and any(args.dst.iterdir()):
        raise ValueError(f"{args.dst} is not empty")
    options = {"seed": args.seed, "max_shard_size": args.max_shard_size}
    if args.real:
        args.dst.mkdir(parents=True, exist_ok=True)
        write_real(config, args.dst, **options)
    else:
        write(config, args.dst, sparse=args.sparse, **options)


OVERRIDES = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate",
    "experts",
    "moe_intermediate",
    "vocab",
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("family", choices=sorted(FAMILIES))
    add("dst", type=Path, metavar="DST", help="a directory that is absent or empty")
    add("--size", default="tiny", help=f"tiny, {', '.join(PUBLISHED)}, or bytes such as 4GiB")
    add("--layout", choices=("split", "fused"), help="how experts are stored (default: split)")
    add("--dtype", choices=sorted(DTYPES), help="default: bfloat16, with --real float32")
    add("--tie", dest="tied", action=argparse.BooleanOptionalAction, help="no lm_head of its own")
    add("--seed", type=int, default=0)
    add("--max-shard-size", type=parse_bytes, default=5 * 10**9, help="default: 5GB")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--real",
        action="store_true",
        help="random weights in transformers' own model, written by its save_pretrained",
    )
    kind.add_argument("--sparse", action="store_true", help="headers over holes: takes no disk")
    for name in OVERRIDES:
        add(f"--{name.replace('_', '-')}", type=int, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
