"""The whole walk: open, map, place, push down, lower, stream, commit."""

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from d9d_ckpt.codecs.zstd import parse_codec
from d9d_ckpt.errors import (
    CkptError,
    DestinationError,
    RequestError,
    StorageError,
    UsageError,
)
from d9d_ckpt.formats.base import Opened, Sink
from d9d_ckpt.formats.claim import Claim
from d9d_ckpt.formats.existing import superseded
from d9d_ckpt.formats.huggingface_sink import HuggingFaceSink
from d9d_ckpt.formats.opening import open_checkpoint
from d9d_ckpt.formats.sharded import Manifest, check_files
from d9d_ckpt.formats.sharded_sink import ShardedSink
from d9d_ckpt.formats.steps import Run, read_run
from d9d_ckpt.graph.build import LazyTensor
from d9d_ckpt.graph.mosaic import stored
from d9d_ckpt.graph.node import Node
from d9d_ckpt.graph.pushdown import leaves
from d9d_ckpt.layout.topology import Topology, layout_from, parse_layout
from d9d_ckpt.models.family import Mapped
from d9d_ckpt.models.select import (
    Selected,
    Source,
    Wanted,
    cast_floats,
    missing,
    select,
    to_names_of,
)
from d9d_ckpt.plan.assign import Lot, columns, members, units
from d9d_ckpt.plan.explain import RankCost, amplification, costs
from d9d_ckpt.plan.lower import lower
from d9d_ckpt.plan.plan import Plan
from d9d_ckpt.plan.requests import held_requests, stored_requests, whole_requests
from d9d_ckpt.plan.schedule import Limits, limits
from d9d_ckpt.run.checkpoint import Checkpoint, Reader
from d9d_ckpt.run.claim import interrupted, occupied
from d9d_ckpt.run.commit import Destination
from d9d_ckpt.run.compare import Compared, compare, difference
from d9d_ckpt.run.destination import destination as destination_of
from d9d_ckpt.run.directory import Directory
from d9d_ckpt.run.execute import Done, Work, execute, new_save_id, together
from d9d_ckpt.run.journal import Finished, finished
from d9d_ckpt.run.ranks import Ranks, open_ranks
from d9d_ckpt.run.retention import Policy, Pruned
from d9d_ckpt.run.retention import prune as prune_run
from d9d_ckpt.run.upload import PART
from d9d_ckpt.run.verify import Verified
from d9d_ckpt.run.verify import verify as verify_opened
from d9d_ckpt.run.workers import Progress, forking
from d9d_ckpt.storage.opening import normalise, store_for
from d9d_ckpt.storage.store import Options, is_local
from d9d_ckpt.tensors import BLOCK, DType, dtype_from_torch, parse_bytes

_IN_FLIGHT = range(8, 65)
_PER_CORE = 4
"""Requests to remote stores at once: four a core, within these bounds. With 16 on two cores, which the
server shared, downloads ran at 0.78 of a plain client's speed, with 8 at 0.9."""

UserMapping = Callable[[Checkpoint], Mapping[str, LazyTensor]]
Watch = Callable[[int, int, int, int], None]
"""Called with bytes and chunks done since the last call, and bytes and chunks in all."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What convert, reshard and plan can be asked; the options of the command line.

    Attributes:
        to: Target format, ``sharded`` or ``huggingface``.
        layout: ``pp=2,tp=4``, the path of a YAML file, or a Topology.
        model: A family's name, or ``auto``.
        mapping: The user's own graph in place of a family.
        hf_experts: ``split`` or ``fused``: how a Hugging Face target stores experts.
        dtype: ``keep``, or the torch dtype that floats are cast to.
        codec: ``none``, ``zstd`` or ``zstd:LEVEL``: how chunks of a sharded target are stored.
        dequantize: Turn fp8 weights with their scales into ``dtype``, bfloat16 when that is ``keep``.
        max_shard_size: Bytes of a Hugging Face file.
        memory: Bytes of tensor data in flight in a process.
        workers: Local processes; None means one per core, and one each under a launcher.
        verify: Read the destination back before success is said.
        copy_tied: Write a tied head to a Hugging Face target as a second, real tensor.
        resume: Go on with an interrupted run of the same request.
        take_over: Resume although the process that was at it may be alive on another host.
        overwrite: Replace a complete destination, once the new one is complete.
        storage_options: Passed to fsspec.
        step: Which step of a run directory.
        only_sharded: Refuse a source of another format.
    """

    to: str = "sharded"
    layout: str | Topology | None = None
    model: str = "auto"
    mapping: UserMapping | None = None
    hf_experts: str | None = None
    dtype: str = "keep"
    codec: str = "none"
    dequantize: bool = False
    max_shard_size: str | int = "5GB"
    memory: str | int = "1GiB"
    workers: int | None = None
    verify: bool = False
    copy_tied: bool = False
    resume: bool = False
    take_over: bool = False
    overwrite: bool = False
    storage_options: Options = field(default_factory=dict)
    step: int | None = None
    only_sharded: bool = False


class Planned(NamedTuple):
    """A request that has been understood, with nothing done yet."""

    checkpoint: Checkpoint
    selected: Selected
    plan: Plan
    topology: Topology | None


@dataclass(frozen=True)
class Report:
    """What a convert or reshard has done; the keys of its JSON."""

    source: str
    destination: str
    format: str
    tensors: int
    bytes_read: int
    bytes_written: int
    bytes_source: int
    seconds: float
    ranks: int
    peak_rss: int
    kept_fp32: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]
    dtypes_in: Mapping[str, int]
    dtypes_out: Mapping[str, int]


@dataclass(frozen=True)
class PlanReport:
    """What a plan would do; the keys of its JSON."""

    ranks: tuple[RankCost, ...]
    bytes_read: int
    bytes_source: int
    read_amplification: float
    seconds_to_plan: float
    tensors: int
    copies: int


@contextmanager
def _walk() -> Iterator[None]:
    """What every call does: errors of the file system come out as ours, garbage is not collected.

    A catalogue is many small objects without cycles. Walking them again and again as they are made is
    most of the time: opening 204,363 tensors takes 3.2 s with the collector and 0.9 s without.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    except CkptError:
        raise
    except OSError as error:
        raise StorageError(f"{error.filename or 'storage'}: {error.strerror or error}") from error
    finally:
        if was_enabled:
            gc.enable()


@_walk()
def open(
    url: str, *, step: int | None = None, storage_options: Options | None = None
) -> Checkpoint:
    """A checkpoint's metadata and lazy tensors.

    Args:
        url: A Hugging Face or sharded checkpoint, one safetensors file, or a run directory.
        step: Which step of a run directory; the latest whole one when None.
        storage_options: Passed to fsspec.

    Raises:
        SourceError: There is no checkpoint, or it is incomplete or damaged.
    """
    options = storage_options or {}
    url = normalise(url)
    store = store_for(url, options)
    try:
        return Checkpoint(open_checkpoint(store, url, step), Reader(url, options))
    finally:
        store.close()


def convert(
    source: str, destination: str, *, watch: Watch | None = None, **settings: Any
) -> Report:
    """Write ``source`` to ``destination`` in another format or layout, bit for bit.

    Args:
        source: URL of a checkpoint.
        destination: Where to; must be empty or absent unless ``overwrite``.
        watch: Called as bytes are written.
        settings: Fields of `Settings`.

    Raises:
        CkptError: What is wrong, and nothing partial is left behind.
    """
    return _written(source, normalise(destination), Settings(**settings), watch)


def reshard(
    source: str, destination: str, *, watch: Watch | None = None, **settings: Any
) -> Report:
    """Write a sharded checkpoint on another layout.

    Raises:
        CkptError: As `convert`; also when the source is not sharded.
    """
    want = Settings(**settings, to="sharded", only_sharded=True)
    return _written(source, normalise(destination), want, watch)


@_walk()
def _written(source: str, destination: str, want: Settings, watch: Watch | None) -> Report:
    ranks = open_ranks()
    try:
        return _together_written(source, destination, want, watch, ranks)
    except BaseException as error:
        # The others may be waiting for a round that this rank does not come to.
        ranks.leave(f"{type(error).__name__}: {error}")
        raise


def _together_written(
    source: str, destination: str, want: Settings, watch: Watch | None, ranks: Ranks
) -> Report:
    started = time.monotonic()
    made = together(ranks, lambda: _planned(source, destination, want), lambda p: p.plan.mark)
    begun = _begun(made, destination, want)
    save_id = ranks.broadcast(begun.save_id if begun else new_save_id())
    work = _work(made, destination, want, save_id, _workers(want, ranks), again=begun is not None)
    total, chunks = made.plan.bytes_written, len(made.plan.targets)
    try:
        done = execute(work, ranks, _progress(watch, total, chunks))
    finally:
        work.destination.store.close()
    if want.verify and ranks.rank == 0:
        _read_back(destination, want)
    return _report(made, destination, want, done, time.monotonic() - started)


@_walk()
def plan(source: str, *, load: bool = False, **settings: Any) -> PlanReport:
    """What `convert` would do, or with ``load`` what each rank of the layout would read at resume.

    Raises:
        CkptError: What `convert` would refuse.
    """
    want = Settings(**settings)
    started = time.monotonic()
    made = _planned(source, None, want, load=load)
    world = made.topology.world if made.topology is not None else 1
    limit = limits(_size(want.memory), encoded=made.plan.encoded)
    ranks = tuple(costs(made.plan, world, limit, whole_blocks=not load))
    return PlanReport(
        ranks=ranks,
        bytes_read=sum(r.bytes_read for r in ranks),
        bytes_source=made.checkpoint.opened.catalogue.nbytes,
        read_amplification=amplification(ranks),
        seconds_to_plan=time.monotonic() - started,
        tensors=len(made.selected.mapped.nodes),
        copies=len(made.plan.rows),
    )


@_walk()
def graph(source: str, tensor: str, **settings: Any) -> tuple[Node, Mapping[int, str]]:
    """The graph of one target tensor, and the source tensor of each of its chunks, by identity.

    Raises:
        MissingError: The target has no such tensor; the message has the nearest names.
    """
    want = Settings(**settings)
    checkpoint = open(source, step=want.step, storage_options=want.storage_options)
    nodes = _selected(checkpoint, want).mapped.nodes
    if tensor not in nodes:
        raise missing(tensor, nodes)
    entries = checkpoint.opened.catalogue.entries
    return nodes[tensor], {id(c): name for name, e in entries.items() for c in e.chunks}


@_walk()
def verify(
    url: str,
    *,
    step: int | None = None,
    workers: int | None = None,
    storage_options: Options | None = None,
    watch: Watch | None = None,
) -> Verified:
    """Check everything that a checkpoint has checksums for."""
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: at least one is needed")
    opened = open(url, step=step, storage_options=storage_options).opened
    chunks = sum(len(entry.chunks) for entry in opened.catalogue.entries.values())
    progress = _progress(watch, opened.catalogue.nbytes, chunks)
    return verify_opened(opened, storage_options or {}, workers or _cores(), progress)


@_walk()
def diff(
    a: str,
    b: str,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    step: int | None = None,
    storage_options: Options | None = None,
) -> Compared:
    """Two checkpoints by value.

    Of different formats, both by the Hugging Face names of their family where their own differ; what
    optimizers keep is left out then.

    Args:
        a: URL of a checkpoint, or of a run directory.
        b: The other one.
        rtol: How far elements may differ, relative to those of ``b``.
        atol: How far they may differ beside that.
        step: That of both, which must be run directories then.
        storage_options: Passed to fsspec.

    Raises:
        RequestError: Names differ, and there is no family to translate them by.
        SourceError: One of them is not there, incomplete or damaged.
    """
    left, right = (open(url, step=step, storage_options=storage_options) for url in (a, b))
    nodes = _comparable(left, right)
    return compare(nodes[0], nodes[1], (left.reader, right.reader), (rtol, atol))


@_walk()
def list_steps(url: str, *, storage_options: Options | None = None) -> Run:
    """Every step of a run directory: whole or why not, its size, and which is the latest whole one.

    Raises:
        MissingError: There is no such directory.
        RequestError: It is a checkpoint itself.
    """
    url = normalise(url)
    store = store_for(url, storage_options or {})
    try:
        return read_run(store, url)
    finally:
        store.close()


@_walk()
def prune(
    url: str,
    *,
    keep_last: int,
    keep_every: int | None = None,
    dry_run: bool = False,
    storage_options: Options | None = None,
) -> Pruned:
    """Delete old steps of a run directory; the latest whole one always stays.

    Args:
        url: The run directory.
        keep_last: How many of the newest whole steps stay.
        keep_every: Whole steps divisible by it stay as well.
        dry_run: Only say what would go.
        storage_options: Passed to fsspec.

    Raises:
        UsageError: ``keep_last`` or ``keep_every`` is below 1.
        CkptError: As `list_steps`, or the store refused; what is half deleted never looks whole,
            and the next prune finishes it.
    """
    policy = Policy(keep_last, keep_every)
    url = normalise(url)
    store = store_for(url, storage_options or {})
    try:
        return prune_run(store, read_run(store, url), policy, dry_run=dry_run)
    finally:
        store.close()


def _planned(
    source: str, destination: str | None, want: Settings, *, load: bool = False
) -> Planned:
    """The pure part: everything that can be refused before a byte moves."""
    _check_words(want)
    limits(_size(want.memory))
    topology = _topology(want)
    checkpoint = open(source, step=want.step, storage_options=want.storage_options)
    if want.only_sharded and checkpoint.format != "sharded":
        raise RequestError(
            f"{source}: is {checkpoint.format}, not sharded; use convert --to sharded"
        )
    if destination is not None:
        _check_destination(checkpoint.opened.url, destination, want)
        _check_save(checkpoint.opened, want)
    selected = _selected(checkpoint, want)
    if topology is None:
        requests = whole_requests(selected.mapped)
    elif load:
        requests = held_requests(selected.mapped, topology)
    else:
        largest = BLOCK if parse_codec(want.codec) is not None else None
        requests = stored_requests(selected.mapped, topology, largest=largest)
    return Planned(checkpoint, selected, lower(requests), topology)


def _begun(made: Planned, destination: str, want: Settings) -> Claim | None:
    """The claim of the interrupted run to go on with, if there is one."""
    if not want.resume:
        return None
    store = store_for(destination, want.storage_options)
    try:
        return interrupted(store, destination, _request(made, want), take_over=want.take_over)
    finally:
        store.close()


def _request(made: Planned, want: Settings) -> dict[str, str]:
    """What was asked, as far as it decides what is written."""
    o = made.checkpoint.opened
    layout = made.topology.to_json() if made.topology is not None else None
    return {
        "source": o.url,
        "content of the source": made.checkpoint.opened.catalogue.mark,
        "--to": want.to,
        "--layout": json.dumps(layout),
        "--dtype": want.dtype,
        "--codec": want.codec,
        "--dequantize": str(want.dequantize),
        "--hf-experts": str(want.hf_experts),
        "--copy-tied": str(want.copy_tied),
        "--max-shard-size": str(_size(want.max_shard_size)),
        "plan": made.plan.mark,
    }


def _work(
    made: Planned, destination: str, want: Settings, save_id: str, workers: int, *, again: bool
) -> Work:
    small = _small_files(made.checkpoint, made.selected, want)
    source = made.checkpoint.opened.url
    codec = parse_codec(want.codec)
    lots: list[Lot] = (
        columns(made.plan)
        if codec is not None
        else [(unit,) for unit in units(made.plan, small=not is_local(source))]
    )
    place = _destination(destination, want, _request(made, want), again=again)
    sink = _sink(want, made, small, save_id, lots, place)
    remote = not (is_local(source) and is_local(destination))
    if remote:
        # Requests cost milliseconds each: many at once, as far as their buffers fit.
        workers = max(1, min(max(workers, _in_flight()), _size(want.memory) // (3 * PART)))
    arrangement = sink.arrange(made.plan.targets)
    done = Finished()
    if again:
        threads = 1 if isinstance(place, Directory) else workers
        done = finished(place, save_id, arrangement, made.plan, threads)
    return Work(
        plan=made.plan,
        sink=sink,
        arrangement=arrangement,
        destination=place,
        done=done,
        source=source,
        options=want.storage_options,
        limit=_limit(made, want, destination, workers),
        workers=workers,
        save_id=save_id,
        small=small,
        lots=lots,
        codec=codec,
        committed=place.old.save_id == save_id,
    )


def _destination(
    url: str, want: Settings, request: Mapping[str, str], *, again: bool
) -> Destination:
    store = store_for(url, want.storage_options)
    old = superseded(store, url)
    return destination_of(store, url, old, request, again=again)


def _limit(made: Planned, want: Settings, destination: str, workers: int) -> Limits:
    memory, source = _size(want.memory), made.checkpoint.opened.url
    encoded = made.plan.encoded
    if forking(source, destination):
        return limits(memory, encoded=encoded)
    part = 0 if is_local(destination) else PART
    return limits(memory, workers, remote=not is_local(source), encoded=encoded, part=part)


def _check_words(want: Settings) -> None:
    if want.to not in ("sharded", "huggingface"):
        raise UsageError(f"--to {want.to}: not available yet; sharded and huggingface are")
    if want.hf_experts not in (None, "split", "fused"):
        raise UsageError(f"--hf-experts {want.hf_experts}: must be split or fused")
    if parse_codec(want.codec) is not None and want.to != "sharded":
        raise UsageError(f"--codec {want.codec}: only sharded targets can be encoded; drop it")
    if want.copy_tied and want.to == "sharded":
        raise UsageError("--copy-tied is about a Hugging Face target; drop it")
    if want.hf_experts and want.to == "sharded":
        raise UsageError("--hf-experts says how a Hugging Face target stores experts; drop it")


def _topology(want: Settings) -> Topology | None:
    if want.to == "huggingface":
        return None
    if want.layout is None:
        raise UsageError("--layout is required for a sharded target, such as --layout pp=2,tp=4")
    if isinstance(want.layout, Topology):
        return want.layout
    if "=" not in want.layout and want.layout:
        return _layout_file(want.layout)
    return parse_layout(want.layout)


_YAML_FAULTS = (AttributeError, LookupError, TypeError, RecursionError)
"""What PyYAML lets out for `!!int ''`, `!!timestamp x`, and for deep nesting."""


def _layout_file(path: str) -> Topology:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, *_YAML_FAULTS) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise UsageError(
            f"--layout {path}: neither AXIS=NUMBER,... nor a readable YAML file: {reason}"
        ) from error
    if not isinstance(values, dict):
        raise UsageError(f"--layout {path}: must hold keys such as pp: 2")
    return layout_from(values, path)


def _nodes(checkpoint: Checkpoint) -> dict[str, Node]:
    entries = checkpoint.opened.catalogue.entries
    return {name: stored(name, entry) for name, entry in entries.items()}


def _source(checkpoint: Checkpoint, nodes: Mapping[str, Node]) -> Source:
    o = checkpoint.opened
    return Source(o.format, nodes, o.config, o.family, o.experts)


def _comparable(a: Checkpoint, b: Checkpoint) -> tuple[dict[str, Node], dict[str, Node]]:
    """The tensors of two checkpoints, by names that mean the same on both sides."""
    left, right = _nodes(a), _nodes(b)
    if a.format == b.format:
        return left, right
    bare = _weights(a, left), _weights(b, right)
    if bare[0].keys() == bare[1].keys():
        return bare
    _check_families((a, b), bare)
    return to_names_of(_source(a, left), _source(b, right), _same(a), _same(b))


def _weights(checkpoint: Checkpoint, nodes: Mapping[str, Node]) -> dict[str, Node]:
    """Without what optimizers keep, which only a sharded checkpoint has."""
    trained = checkpoint.format == "sharded"
    return {n: node for n, node in nodes.items() if not (trained and n.startswith("optim."))}


def _check_families(sides: Sequence[Checkpoint], nodes: Sequence[Mapping[str, Node]]) -> None:
    """Names that differ can only be translated by a family.

    Raises:
        RequestError: A sharded checkpoint has none.
    """
    for side, mine, other in zip(sides, nodes, reversed(nodes), strict=True):
        if side.format == "sharded" and side.opened.family is None:
            alone = sorted(mine.keys() ^ other.keys())
            raise RequestError(
                f"{side.opened.url}: its manifest names no model family, and {len(alone)} names are on "
                f"one side only ({', '.join(alone[:4])}); compare it with another sharded checkpoint, or "
                "write it anew with a family"
            )


def _same(checkpoint: Checkpoint) -> Callable[[Node, Node], float | None]:
    def same(a: Node, b: Node) -> float | None:
        found = difference("", (a, b), (checkpoint.reader, checkpoint.reader))
        return found.max_abs if found else None

    return same


def _selected(checkpoint: Checkpoint, want: Settings) -> Selected:
    if want.mapping is not None:
        selected = _by_user(checkpoint, want.mapping)
    else:
        source = _source(checkpoint, _nodes(checkpoint))
        wanted = Wanted(
            want.to, want.model, want.hf_experts, _dequantized_dtype(want), want.copy_tied
        )
        selected = select(source, wanted, _same(checkpoint))
    if want.dtype != "keep":
        dtype = dtype_from_torch(want.dtype)
        if not dtype.floating:
            raise UsageError(f"--dtype {want.dtype}: weights are cast to floating dtypes only")
        selected = cast_floats(selected, dtype)
    return selected


def _dequantized_dtype(want: Settings) -> DType | None:
    if not want.dequantize:
        return None
    return dtype_from_torch("bfloat16" if want.dtype == "keep" else want.dtype)


def _by_user(checkpoint: Checkpoint, mapping: UserMapping) -> Selected:
    """The user's own graph; what it leaves out is reported."""
    try:
        made = mapping(checkpoint)
    except CkptError:
        raise
    except Exception as error:  # whatever the user's function does wrong is a fault of the request
        raise UsageError(f"--mapping: {type(error).__name__}: {error}") from error
    given: object = made
    if not isinstance(given, Mapping):
        raise UsageError(f"--mapping must return {{name: LazyTensor}}, not {given!r}")
    wrong = [name for name, t in given.items() if not isinstance(t, LazyTensor)]
    if wrong or not made:
        raise RequestError(
            f"--mapping must return {{name: LazyTensor}}; look at {wrong[:4] or made!r}"
        )
    nodes = {name: t.node for name, t in made.items()}
    used = {id(chunk) for chunk in leaves(nodes.values())}
    entries = checkpoint.opened.catalogue.entries
    dropped = [
        n for n, e in entries.items() if e.chunks and not any(id(c) in used for c in e.chunks)
    ]
    return Selected(Mapped(nodes, {}, 0), None, "", tuple(dropped))


def _check_destination(source: str, destination: str, want: Settings) -> None:
    if _within(source, destination):
        raise DestinationError(
            f"{destination}: source and destination are the same, or {source} lies inside it; write "
            "to another place"
        )
    store = store_for(destination, want.storage_options)
    if is_local(destination) and Path(destination).is_file():
        raise DestinationError(f"{destination}: is a file; a checkpoint is a directory")
    names = occupied(store, destination)
    if names and not want.overwrite and not want.resume:
        raise DestinationError(
            f"{destination}: not empty ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}); "
            "choose another place, --overwrite to replace a checkpoint, or --resume to go on with a run "
            "that was interrupted"
        )


def _within(source: str, destination: str) -> bool:
    """Whether ``source`` is ``destination`` or something in it."""
    if is_local(source) and is_local(destination):
        inner, outer = Path(source).resolve(), Path(destination).resolve()
        return inner == outer or outer in inner.parents
    return f"{source}/".startswith(f"{destination}/")


def _check_save(opened: Opened, want: Settings) -> None:
    """The files of a sharded source must be of the save that its manifest describes."""
    store = store_for(opened.url, want.storage_options)
    try:
        check_files(store, opened)
    finally:
        store.close()


def _small_files(checkpoint: Checkpoint, selected: Selected, want: Settings) -> dict[str, bytes]:
    """What goes along byte for byte; of config.json only what a cast makes false is changed."""
    o = checkpoint.opened
    store = store_for(o.url, want.storage_options)
    try:
        out = {
            name: store.read(place, 0, store.size(place))
            for name, place in ((name, o.place(name)) for name in o.small)
        }
    finally:
        store.close()
    if (want.dtype != "keep" or want.dequantize) and "config.json" in out:
        config = json.loads(out["config.json"])
        keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]
        dominant = _dominant(selected)
        if dominant is not None:
            config |= dict.fromkeys(keys, dominant)
        if want.dequantize:
            config.pop("quantization_config", None)
        out["config.json"] = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    return out


def _dominant(selected: Selected) -> str | None:
    sizes: dict[str, int] = {}
    for node in selected.mapped.nodes.values():
        if node.dtype.floating:
            sizes[node.dtype.torch] = sizes.get(node.dtype.torch, 0) + node.spec.numel
    return max(sizes, key=lambda name: sizes[name], default=None)


def _sink(
    want: Settings,
    made: Planned,
    small: Mapping[str, bytes],
    save_id: str,
    lots: Sequence[Lot],
    place: Destination,
) -> Sink:
    o, selected = made.checkpoint.opened, made.selected
    if made.topology is None:
        return HuggingFaceSink(save_id, _size(want.max_shard_size), o.metadata, place.taken)
    config = json.loads(small["config.json"]) if "config.json" in small else o.config
    manifest = Manifest(
        save_id=save_id,
        step=o.step,
        layout=made.topology,
        family=selected.family,
        config=config,
        experts=selected.experts,
        entries={},
        files={},
        values=o.values,
        metadata=o.metadata,
        provenance={
            "source": o.url,
            "source_save_id": o.save_id,
            "dropped": list(selected.dropped),
        },
    )
    specs = {name: node.spec for name, node in selected.mapped.nodes.items()}
    columns = None if parse_codec(want.codec) is None else list(map(members, lots))
    return ShardedSink(manifest, specs, columns)


def _size(value: str | int) -> int:
    return value if isinstance(value, int) else parse_bytes(value)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _in_flight() -> int:
    return min(max(_PER_CORE * _cores(), _IN_FLIGHT[0]), _IN_FLIGHT[-1])


def _workers(want: Settings, ranks: Ranks) -> int:
    if want.workers is not None:
        if want.workers < 1:
            raise UsageError(f"--workers {want.workers}: at least one is needed")
        return want.workers
    return _cores() if ranks.world == 1 else 1


def _progress(watch: Watch | None, total: int, chunks: int) -> Progress:
    if watch is None:
        return lambda _, __: None
    return lambda nbytes, ended: watch(nbytes, ended, total, chunks)


def _read_back(destination: str, want: Settings) -> None:
    found = verify(destination, storage_options=want.storage_options)
    if not found.ok:
        bad = found.damaged[0]
        raise CkptError(
            f"{destination}: {len(found.damaged)} blocks read back differ from what was written, first "
            f"{bad.tensor or bad.file}: expected {bad.expected}, found {bad.found}"
        )


def _report(made: Planned, destination: str, want: Settings, done: Done, seconds: float) -> Report:
    checkpoint, selected = made.checkpoint, made.selected
    entries = checkpoint.opened.catalogue.entries
    return Report(
        source=checkpoint.opened.url,
        destination=destination,
        format=want.to,
        tensors=len(selected.mapped.nodes),
        bytes_read=done.bytes_read,
        bytes_written=done.bytes_written,
        bytes_source=checkpoint.opened.catalogue.nbytes,
        seconds=seconds,
        ranks=done.processes,
        peak_rss=done.peak_rss,
        kept_fp32=selected.kept_fp32,
        dropped=selected.dropped,
        notes=checkpoint.opened.notes,
        dtypes_in=_histogram({name: e.spec for name, e in entries.items()}),
        dtypes_out=_histogram({n: node.spec for n, node in selected.mapped.nodes.items()}),
    )


def _histogram(specs: Mapping[str, Any]) -> dict[str, int]:
    out: dict[str, int] = {}
    for spec in specs.values():
        out[spec.dtype.name] = out.get(spec.dtype.name, 0) + spec.nbytes
    return out
