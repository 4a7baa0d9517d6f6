"""Hostile checkpoints out of good ones: mutations that know the files that they damage.

A mutated document is written back whole, and a manifest is made to agree with the files beside it
and sealed again, so that what it says is read and not only that it was changed.
"""

import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import xxhash

MANIFEST, CONFIG = "manifest.json", "config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_SEAL = b',"self_xxh3":"'

_BOMB = "stages: [&l0 [1, 1]"
_BOMB += "".join(f", &l{n} [*l{n - 1}, *l{n - 1}, *l{n - 1}]" for n in range(1, 30)) + "]\n"

LAYOUTS = (
    "tp=2,dp_shard=2",
    "pp=2",
    "dp_replicate=2,dp_shard=3",
    "tp=2,ep=2,cp=1",
    "pp: 1\ntp: 2\n",
    "pp: 2\nstages: [1, 1]\nvocab_multiple: 3\n",
    "dp_shard: 2\ntensors:\n  '*norm*': {dp_shard: 0}\n",
    "pp: 1\nvirtual: 2\norder: v\n",
)
"""Good ones, as the option has them and as YAML files do."""

_YAML = (
    _BOMB,
    "[" * 3000,
    "{a: " * 500,
    "pp: 0x" + "f" * 6000,
    "pp: " + "9" * 6000,
    "pp: !!int ''",
    "pp: !!float ''",
    "pp: !!bool maybe",
    "pp: !!timestamp never",
    "pp: !!binary '*'",
    "pp: !!python/object/apply:os.system ['touch canary']",
    "pp: 2001-99-99",
    "? {a: 1}\n: 2\n",
    "? [1, 2]\n: 2\n",
    "&a {pp: *a}",
    "stages: &a [*a]",
    "tensors: &a {'*': *a}",
    "pp: *nobody",
    "- pp: 1",
    "pp: .nan",
    "pp: 1_000",
    "pp: 1:30",
    "1: 2",
    "~: 2",
    "[1, 2]: 3",
    "tensors: {'*': {tp: 99999999999999999999}}",
    "tensors: {'[': {tp: 0}, '" + "*a" * 50 + "': {tp: 0}}",
    "tensors: {1: {2: 3, tp: 0}}",
    "stages: [99999999999999999999]",
    "\x00",
    "\ufeffpp: 1",
    "",
    "null",
)
_TEXT = (
    "tp=" + "9" * 5000,
    "tp=99999999999",
    "tp=65536,dp_shard=65536",
    "dp_shard=512",
    "dp_replicate=256",
    "dp_shard=1000000",
    "pp=1000000000000",
    "tp=0",
    "tp=-1",
    "tp=1.5",
    "tp=\u0661",
    "tp=²",
    "tp=1,tp=1",
    "=1",
    "tp=",
    "stages=1",
    "vocab_multiple=99999999999999999999999",
    "virtual=99999999999999999999999",
    "ep=7",
    "\0=1",
    "a\0b",
    "",
    ",,,",
)

_DEPTHS = (40, 120, 400, 900, 980, 100_000)
_DEEP = {f"<nested {n}>": (b"[" * n + b"]" * n) for n in _DEPTHS}
"""Stand-ins, replaced in the encoded text: such nesting cannot be encoded itself."""


@dataclass
class Tree:
    """A directory that is to be: a mutated checkpoint and what was done to it.

    Attributes:
        files: Contents by relative name.
        links: Symbolic links by relative name.
        pipes: Named pipes.
        layout: Text of the option, or of a YAML file.
        changes: What was done, in words.
        odd: Whether a name leads to something that is no ordinary file, which a store may refuse.
        flipped: Whether nothing but bytes of checksummed files was changed.
    """

    files: dict[str, bytes]
    links: dict[str, str] = field(default_factory=dict)
    pipes: list[str] = field(default_factory=list)
    layout: str = LAYOUTS[0]
    changes: list[str] = field(default_factory=list)
    odd: bool = False
    flipped: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.files.values()))


class Slot(NamedTuple):
    """A place in a document: ``holder[key]``, and the keys that lead there."""

    holder: Any
    key: Any
    path: tuple[Any, ...]


def mutate(tree: Tree, rng: Random, outside: str) -> None:
    """One to three mutations of ``tree``; ``outside`` is an absolute path that must not be touched."""
    kinds: tuple[tuple[int, Callable[[Tree, Random, str], None]], ...] = (
        (60, _change_document),
        (12, _change_bytes),
        (10, _change_tensors),
        (8, _change_chunks),
        (8, _change_names),
        (8, _change_layout),
        (6, _change_entries),
        (60 if any(name.endswith(".bin") for name in tree.files) else 0, _change_pickle),
    )
    weights = [weight for weight, _ in kinds]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        _, kind = rng.choices(kinds, weights)[0]
        # What an earlier change has made of a document may leave nothing that this one can change.
        with suppress(
            ArithmeticError, LookupError, TypeError, AttributeError, ValueError, RecursionError
        ):
            kind(tree, rng, outside)
    tree.flipped = bool(tree.changes) and all(change.startswith("flip") for change in tree.changes)
    if not tree.flipped and rng.random() < 0.85:
        with suppress(TypeError, ValueError, RecursionError, AttributeError):
            agree(tree)


# -- documents --------------------------------------------------------------------------------


def is_header(name: str) -> bool:
    return name.endswith(".safetensors")


def documents(tree: Tree) -> list[str]:
    """Files with JSON in them."""
    return [n for n in tree.files if is_header(n) or n.endswith(".json")]


def parsed(name: str, raw: bytes) -> Any:
    """The JSON of a file; None where there is none any more."""
    try:
        if is_header(name):
            raw = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value else None


def encoded(name: str, before: bytes, value: Any, rng: Random) -> bytes:
    """``value`` in place of the JSON of a file, its data kept; a manifest is sealed."""
    if name.endswith(MANIFEST) and isinstance(value, dict):
        value.pop("self_xxh3", None)
        return sealed(_text(value, rng))
    text = _text(value, rng)
    if not is_header(name):
        return text
    length = int.from_bytes(before[:8], "little")
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text + before[8 + length :]


def sealed(text: bytes) -> bytes:
    """A manifest with a digest of itself at its end."""
    body = text.rstrip()[:-1]
    return body + _SEAL + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


def _text(value: Any, rng: Random) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=rng.random() < 0.7)
    if rng.random() < 0.04:
        keys = list(re.finditer(r'"[^"\\]{1,60}":', text))
        if keys:
            at = rng.choice(keys)
            text = f"{text[: at.start()]}{at.group()}{rng.choice(('null', '0', '{}'))},{text[at.start() :]}"
    raw = text.encode(errors="surrogatepass")
    for mark, nested in _DEEP.items():
        raw = re.sub(f'"{mark}"(?!:)'.encode(), nested, raw)
    return raw


def agree(tree: Tree) -> None:
    """Every manifest says of the files beside it what is true: sizes and digests."""
    for name in [n for n in tree.files if n.endswith(MANIFEST)]:
        value = parsed(name, tree.files[name])
        files = value.get("files") if value else None
        if not isinstance(files, dict):
            continue
        for file, entry in files.items():
            raw = tree.files.get(os.path.join(os.path.dirname(name), file))
            if raw is not None and isinstance(entry, dict):
                entry["nbytes"] = len(raw)
                length = int.from_bytes(raw[:8], "little")
                head = raw if "/" not in file else raw[: 8 + length]
                if "/" in file and 8 + length > len(raw):
                    head = raw[:8]
                entry["header_xxh3"] = xxhash.xxh3_64_hexdigest(head)
        value.pop("self_xxh3", None)
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        tree.files[name] = sealed(text.encode(errors="surrogatepass"))


def slots(value: Any, rng: Random) -> Slot:
    """A place in ``value``, near the root as likely as at a leaf."""
    holder: Any = value
    path: tuple[Any, ...] = ()
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = rng.choice(keys)
        path = (*path, key)
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.2:
            return Slot(holder, key, path)
        holder = inner


def _change_document(tree: Tree, rng: Random, outside: str) -> None:
    names = documents(tree)
    telling = [n for n in names if is_header(n) or n.endswith((MANIFEST, INDEX, CONFIG))]
    name = rng.choice(telling if telling and rng.random() < 0.95 else names or [""])
    value = parsed(name, tree.files[name]) if name else None
    if value is None:
        return
    for _ in range(rng.choice((1, 1, 1, 2))):
        if not value:
            break
        slot = slots(value, rng)
        how = rng.choice((_put, _put, _put, _put, _vary, _vary, _drop, _add, _rename, _swap, _copy))
        done = how(slot, value, rng, outside)
        tree.changes.append(f"{name}: {'.'.join(map(str, slot.path))[:200]}: {done}")
    tree.files[name] = encoded(name, tree.files[name], value, rng)


def hostile(rng: Random, outside: str) -> Any:
    """A value that nobody should have to expect."""
    numbers = (0, 1, -1, 2, 3, 7, 255, 2**31, 2**53, 2**63, 2**64, 10**12, 10**30, -(2**63))
    rare = (10**4000, 0.5, 1e308, -0.0, 1.0, float("nan"), float("inf"))
    words = (
        "",
        "x" * 300,
        "x" * 5000,
        "a\0b",
        "\ud800",
        "\udcff",
        "模型",
        'q"\n',
        "a/b",
        "\\",
        "%s",
    )
    paths = (
        "../canary",
        "../../canary",
        "../" * 40 + "canary",
        outside,
        f"{outside}/x",
        ".",
        "..",
        "/",
    )
    meant = (
        *("__metadata__", MANIFEST, INDEX, SINGLE, CONFIG, ".d9d-claim", f".d9d-{CONFIG}.tmp"),
        *(
            "BOOL",
            "U8",
            "F4",
            "F6_E2M3",
            "F8_E4M3",
            "F8_E8M0",
            "F16",
            "F32",
            "F64",
            "C64",
            "I64",
            "U64",
        ),
        *("zstd", "none", "split", "fused", "llama", "qwen3_moe", "mixtral", "nobody", "bfloat16"),
    )
    shapes: tuple[Any, ...] = (
        *([], {}, [[]], [None], {"": None}, [0], [1] * 70, [0, 2**70], [2**40, 2**40], [2**62, 0]),
        *([True], [1.0], ["1"], [-1], [0, 0], [8, 0], list(_DEEP), {"a": {"b": {}}}),
    )
    return rng.choice(
        rng.choice((numbers, rare, words, paths, meant, shapes, tuple(_DEEP), (None, True, False)))
    )


def _put(slot: Slot, _: Any, rng: Random, outside: str) -> str:
    slot.holder[slot.key] = made = hostile(rng, outside)
    return f"= {made!r:.60}"


def _vary(slot: Slot, _: Any, rng: Random, outside: str) -> str:
    """Something near what was there: the same kind, another value; or the same value, another kind."""
    old = slot.holder[slot.key]
    made: Any
    if isinstance(old, bool) or old is None:
        made = not old
    elif isinstance(old, int):
        made = rng.choice(
            (old + 1, old - 1, -old, old * 2, old // 2, float(old), str(old), old + 8, [old])
        )
    elif isinstance(old, str):
        made = rng.choice(
            (old[:-1], old + "0", old.upper(), f"../{old}", f"/{old}", f"{old}/", [old], f"{old}\0")
        )
    elif isinstance(old, list):
        made = rng.choice(
            (
                old[:-1],
                [*old, *old],
                old[::-1],
                [*old, 1],
                old * 500,
                dict(enumerate(map(str, old))),
            )
        )
    else:
        made = (
            list(old)
            if rng.random() < 0.5
            else dict(rng.sample(sorted(old.items(), key=repr), len(old)))
        )
    slot.holder[slot.key] = made
    return f"{old!r:.40} varied to {made!r:.60}"


def _drop(slot: Slot, *_: Any) -> str:
    del slot.holder[slot.key]
    return "removed"


def _add(slot: Slot, _: Any, rng: Random, outside: str) -> str:
    made = hostile(rng, outside)
    if isinstance(slot.holder, dict):
        key = hostile(rng, outside)
        slot.holder[key if isinstance(key, str) else str(slot.key) + ".more"] = made
        return f"with {key!r:.60}: {made!r:.60} beside it"
    slot.holder.insert(slot.key, made)
    return f"after {made!r:.60}"


def _rename(slot: Slot, _: Any, rng: Random, outside: str) -> str:
    if not isinstance(slot.holder, dict):
        return "not renamed"
    key = hostile(rng, outside)
    if not isinstance(key, str):
        key = f"{slot.key}{rng.choice(('.x', '#0', '/', ' '))}"
    slot.holder[key] = slot.holder.pop(slot.key)
    return f"renamed to {key!r:.60}"


def _swap(slot: Slot, value: Any, rng: Random, _: str) -> str:
    other = slots(value, rng)
    a, b = slot.holder[slot.key], other.holder[other.key]
    if slot.path[: len(other.path)] == other.path or other.path[: len(slot.path)] == slot.path:
        return "not swapped"
    slot.holder[slot.key], other.holder[other.key] = b, a
    return f"swapped with {'.'.join(map(str, other.path))[:200]}"


def _copy(slot: Slot, value: Any, rng: Random, _: str) -> str:
    other = slots(value, rng)
    slot.holder[slot.key] = json.loads(json.dumps(other.holder[other.key]))
    return f"a copy of {'.'.join(map(str, other.path))[:200]}"


# -- tensors and chunks -----------------------------------------------------------------------


def _change_tensors(tree: Tree, rng: Random, _: str) -> None:
    """Another shape or dtype of as many bytes, or of as many as there are."""
    names = [n for n in documents(tree) if is_header(n) or n.endswith(MANIFEST)]
    name = rng.choice(names or [""])
    value = parsed(name, tree.files[name]) if name else None
    tensors = value.get("tensors") if name.endswith(MANIFEST) and value else value
    if not isinstance(tensors, dict):
        return
    entries = [
        e for e in tensors.values() if isinstance(e, dict) and isinstance(e.get("shape"), list)
    ]
    if not entries:
        return
    for entry in rng.sample(entries, min(len(entries), rng.choice((1, 1, 2, 50)))):
        shape = entry["shape"]
        made, dtype = rng.choice(
            (
                (shape[::-1], entry["dtype"]),
                ([1] * 100 + shape, entry["dtype"]),
                ([*shape, 1], entry["dtype"]),
                (shape, {"BF16": "F16", "F32": "I32", "F16": "U16"}.get(entry["dtype"], "I8")),
                ([*shape, 2], "F8_E4M3"),
                ([*shape, 2], rng.choice(("BOOL", "F8_E8M0"))),
                ([*shape, 4], rng.choice(("F4", "F6_E2M3"))),
                ([*shape, 0, 2**60], entry["dtype"]),
            )
        )
        for part in (entry, *(c for c in entry.get("chunks", ()) if isinstance(c, dict))):
            if isinstance(part.get("shape"), list):
                inner = part["shape"]
                part["shape"] = inner if made == shape else _like(shape, made, inner)
                if isinstance(part.get("start"), list):
                    part["start"] = (part["start"] + [0] * len(made))[: len(made)]
        entry["dtype"] = dtype
        tree.changes.append(f"{name}: a tensor of {shape} is {dtype} {str(made)[:60]}")
    tree.files[name] = encoded(name, tree.files[name], value, rng)


def _like(before: list[Any], after: list[Any], inner: list[Any]) -> list[Any]:
    return after if inner == before else (inner + [1] * len(after))[: len(after)]


def _change_chunks(tree: Tree, rng: Random, _: str) -> None:
    """Boxes that overlap, interlock or reach outside, of a tensor that a manifest describes."""
    names = [n for n in tree.files if n.endswith(MANIFEST)]
    value = parsed(names[0], tree.files[names[0]]) if names else None
    tensors = value.get("tensors") if value else None
    if not isinstance(tensors, dict):
        return
    known = [
        (name, e)
        for name, e in tensors.items()
        if isinstance(e, dict) and isinstance(e.get("chunks"), list) and e["chunks"]
    ]
    matrices = [(n, e) for n, e in known if isinstance(e["shape"], list) and len(e["shape"]) == 2]
    if not matrices:
        return
    name, entry = rng.choice(matrices)
    first = entry["chunks"][0]
    if not isinstance(first, dict) or not {"start", "shape", "offset", "nbytes"} <= set(first):
        return
    kind = rng.choice(("spiral", "bricks", "twice", "shifted", "outside", "aliased", "single rows"))
    rows, cols = entry["shape"]
    if type(rows) is not int or type(cols) is not int or rows * cols > 1 << 20:
        return
    if kind in ("spiral", "bricks", "single rows"):
        side = rng.choice((9, 25, 99))
        boxes: list[Box] = [((k, 0), (1, 3)) for k in range(side * 4)]
        if kind != "single rows":
            boxes = list(_spiral(side * 8 + 1) if kind == "spiral" else _bricks(side * 2))
        entry["shape"] = [
            max(s + n for (s, _), (n, _) in boxes),
            max(s + n for (_, s), (_, n) in boxes),
        ]
        entry["dtype"] = "U8"
        size = max(a * b for _, (a, b) in boxes)
        entry["chunks"] = [
            first
            | {
                "start": list(at),
                "shape": list(n),
                "offset": 0,
                "nbytes": n[0] * n[1],
                "xxh3": ["0" * 16],
            }
            for at, n in boxes
        ]
        tree.changes.append(f"{names[0]}: {name}: {len(boxes)} boxes, a {kind} of up to {size}")
    elif kind == "twice":
        entry["chunks"] = entry["chunks"] * 2
    elif kind == "shifted":
        first["start"] = [n + rng.choice((-1, 1)) for n in first["start"] if type(n) is int]
    elif kind == "outside":
        first["offset"] = rng.choice((-1, 1 << 40, first["offset"] + 1, 0))
    else:
        for chunk in entry["chunks"]:
            chunk |= {"offset": first["offset"], "file": first.get("file")}
    tree.changes.append(f"{names[0]}: {name}: chunks {kind}")
    tree.files[names[0]] = encoded(names[0], tree.files[names[0]], value, rng)


Box = tuple[tuple[int, int], tuple[int, int]]


def _spiral(side: int) -> Iterator[Box]:
    """Pinwheels inside pinwheels: no straight cut passes between the boxes."""
    low, high = 0, side
    while high - low > 2:
        n = high - low - 1
        yield (low, low), (1, n)
        yield (low, high - 1), (n, 1)
        yield (high - 1, low + 1), (1, n)
        yield (low + 1, low), (n, 1)
        low, high = low + 1, high - 1
    yield (low, low), (high - low, high - low)


def _bricks(count: int) -> Iterator[Box]:
    """Two columns whose joints are never at one height, bound at the top and the bottom."""
    yield (0, 0), (1, 3)
    for k in range(count):
        yield (1 + 2 * k, 0), (2, 1)
        yield (1 + 2 * k, 1), (1, 2)
        yield (2 + 2 * k, 1), (1, 2)
    yield (1 + 2 * count, 0), (1, 3)


# -- bytes, names and directories -------------------------------------------------------------


def _change_bytes(tree: Tree, rng: Random, _: str) -> None:
    name = rng.choice(sorted(tree.files) or [""])
    raw = tree.files.get(name, b"")
    if not raw:
        return
    at = rng.randrange(len(raw))
    if is_header(name) and rng.random() < 0.5:
        at = rng.randrange(min(len(raw), 8 + int.from_bytes(raw[:8], "little")))
    kind = rng.choice(
        ("flip",) * 3 + ("cut", "extend", "zero", "splice", "magic", "length", "empty")
    )
    match kind:
        case "flip":
            made = raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
        case "cut":
            made = raw[:at]
        case "extend":
            made = raw + rng.randbytes(rng.choice((1, 8, 4096)))
        case "zero":
            made = raw[:at] + bytes(min(64, len(raw) - at)) + raw[at + 64 :]
        case "splice":
            made = raw[:at] + rng.randbytes(rng.randrange(1, 16)) + raw[at:]
        case "magic":
            starts = (
                b"PK\x03\x04",
                b"\x80\x02c",
                b"version https://git-lfs",
                b"<html>",
                b"GGUF",
                b"\xff" * 8,
            )
            made = rng.choice(starts) + raw[8:]
        case "length":
            sizes = (0, 1, 2, 100_000_000, 100_000_001, 2**63, 2**64 - 1, len(raw), len(raw) - 8)
            made = rng.choice(sizes).to_bytes(8, "little") + raw[8:]
        case _:
            made = b""
    tree.files[name] = made
    tree.changes.append(f"{kind} {name} at {at}")


def _change_names(tree: Tree, rng: Random, _: str) -> None:
    """Files that are gone, exchanged, renamed, or there beside the others."""
    names = sorted(tree.files)
    if not names:
        return
    name, other = rng.choice(names), rng.choice(names)
    odd = (
        "\udcff.json",
        "new\nline.txt",
        "q'\".json",
        "x" * 200,
        "模型.json",
        ".hidden",
        "a\\b",
        "-rf",
    )
    kind = rng.choice(("gone", "exchanged", "renamed", "beside", "twice"))
    match kind:
        case "gone":
            del tree.files[name]
        case "exchanged":
            tree.files[name], tree.files[other] = tree.files[other], tree.files[name]
        case "renamed":
            other = os.path.join(os.path.dirname(name), rng.choice(odd))
            tree.files[other] = tree.files.pop(name)
        case "beside":
            other = os.path.join(os.path.dirname(name), rng.choice(odd))
            tree.files[other] = b"{}"
        case _:
            other = rng.choice(
                (MANIFEST, INDEX, SINGLE, CONFIG, "model-00001-of-00002.safetensors")
            )
            tree.files[other] = tree.files[name]
    tree.changes.append(f"{name!r} {kind}, {other!r:.80}")


def _change_entries(tree: Tree, rng: Random, outside: str) -> None:
    """A link, a directory or a pipe in the place of a file, or beside it."""
    names = sorted(tree.files)
    if not names:
        return
    name = rng.choice(names)
    if rng.random() < 0.3:
        name = rng.choice(
            (MANIFEST, INDEX, SINGLE, CONFIG, f".d9d-{CONFIG}.tmp", ".d9d-claim", "tokenizer.json")
        )
    if any(other.startswith(f"{name}/") for other in names):
        return
    raw = tree.files.pop(name, b"")
    kind = rng.choice(("away", "loop", "dangling", "directory", "to a directory", "pipe", "real"))
    match kind:
        case "away":
            tree.links[name] = outside
        case "loop":
            tree.links[name] = os.path.basename(name)
        case "dangling":
            tree.links[name] = f"{outside}.not-there"
        case "to a directory":
            tree.links[name] = os.path.dirname(outside)
        case "real":
            tree.files[f"blobs/{len(raw)}"] = raw
            tree.links[name] = "../" * name.count("/") + f"blobs/{len(raw)}"
        case "pipe":
            tree.pipes.append(name)
        case _:
            tree.files[f"{name}/inner"] = raw
    tree.odd = True
    tree.changes.append(f"{name} is a {kind}")


def _evil(outside: str) -> tuple[bytes, ...]:
    """Pickles that would run something, or hold much, if they were let."""
    shell = f"touch {outside}.pwned".encode()
    return (
        b"cos\nsystem\n(S'" + shell + b"'\ntR.",
        b"\x80\x02cposix\nsystem\nX" + len(shell).to_bytes(4, "little") + shell + b"\x85R.",
        b"\x80\x02cbuiltins\neval\nX\x03\0\0\0" + b"1+1\x85R.",
        b"\x80\x02ctorch\nload\n(S'" + outside.encode() + b"'\ntR.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"\x80\x02(S'" + shell + b"'\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(shell)]) + shell + b"\x85R.",
        b"\x80\x02}" + b"2\x86" * 90 + b".",
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02\x8b\xff\xff\xff\x7f1.",
        b"\x80\x04\x8e" + b"\xff" * 8 + b".",
        b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f.",
        b"\x80\x02T\xff\xff\xff\x7f.",
        b"\x80\xff.",
        b"I" + b"9" * 5000 + b"\n.",
        b"\x80\x02r\xff\xff\xff\xff.",
        b"\x80\x02].",
        b".",
        b"",
    )


def _change_pickle(tree: Tree, rng: Random, outside: str) -> None:
    """The pickle of a file of torch.save: another program, or one with other bytes; or the zip."""
    name = rng.choice([n for n in sorted(tree.files) if n.endswith(".bin")])
    raw = tree.files[name]
    kind = rng.choice(("evil", "evil before", "bytes", "bytes", "numbers", "zip"))
    members: dict[str, bytes] = {}
    if raw.startswith(b"PK"):
        with (
            suppress(zipfile.BadZipFile, NotImplementedError),
            zipfile.ZipFile(io.BytesIO(raw)) as archive,
        ):
            members = {n: archive.read(n) for n in archive.namelist()}
    inside = next((n for n in members if n.endswith("data.pkl")), None)
    program = members[inside] if inside is not None else raw
    if kind == "evil":
        made = rng.choice(_evil(outside))
    elif kind == "evil before":
        made = rng.choice(_evil(outside))[:-1] + b"0" + program[2:]
    elif kind == "numbers":
        found = list(re.finditer(rb"K.|M..|J....", program, re.DOTALL))
        number = rng.choice(found)
        made = program[: number.start()] + rng.choice(
            (b"K\0", b"K\xff", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"N", b"\x88", b"K\x01K\x02",
             b"\x8a\x09" + b"\xff" * 8 + b"\0", b"G" + b"\x7f\xf8" + bytes(6), b"U\x03abc", b"]", b"}")
        ) + program[number.end() :]  # fmt: skip
    else:
        at = rng.randrange(len(program))
        made = (
            program[:at]
            + rng.randbytes(rng.choice((1, 1, 2)))
            + program[at + rng.choice((0, 1, 2)) :]
        )
    if inside is not None:
        members[inside] = made
        if kind == "zip":
            member = rng.choice(sorted(members))
            content = members.pop(member)
            members[rng.choice((f"../{member}", f"/{member}", member + "x", "a\\b", outside))] = (
                content
            )
        out = io.BytesIO()
        method = (
            zipfile.ZIP_DEFLATED if kind == "zip" and rng.random() < 0.5 else zipfile.ZIP_STORED
        )
        with zipfile.ZipFile(out, "w", method) as archive:
            for member, content in members.items():
                archive.writestr(member, content)
        made = out.getvalue()
    tree.files[name] = made
    tree.changes.append(f"{name}: pickle, {kind}")


def _change_layout(tree: Tree, rng: Random, outside: str) -> None:
    if rng.random() < 0.5:
        tree.layout = rng.choice(rng.choice((_YAML, _TEXT)))
    else:
        text = rng.choice(LAYOUTS)
        numbers = list(re.finditer(r"\d+|\w+", text))
        at = rng.choice(numbers)
        made = hostile(rng, outside)
        shown = made if isinstance(made, str) else _text(made, rng).decode(errors="surrogatepass")
        tree.layout = text[: at.start()] + shown + text[at.end() :]
    tree.changes.append(f"layout {tree.layout!r:.80}")
