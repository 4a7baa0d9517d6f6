"""A Hugging Face directory from a sharded save: every rank writes its share, none ever holds the model."""

from collections.abc import Mapping
from functools import partial

from d9d_ckpt.checkpointer.load import Origin
from d9d_ckpt.errors import DestinationError, UsageError
from d9d_ckpt.formats.existing import superseded
from d9d_ckpt.formats.huggingface_sink import HuggingFaceSink
from d9d_ckpt.models.select import Source, Wanted, select
from d9d_ckpt.plan.assign import units
from d9d_ckpt.plan.lower import lower
from d9d_ckpt.plan.requests import whole_requests
from d9d_ckpt.plan.schedule import limits
from d9d_ckpt.run.claim import occupied
from d9d_ckpt.run.destination import destination
from d9d_ckpt.run.execute import Done, Work, execute, new_save_id
from d9d_ckpt.run.journal import Finished
from d9d_ckpt.run.ranks import Ranks
from d9d_ckpt.run.upload import PART
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.storage.opening import store_for
from d9d_ckpt.storage.store import Store, is_local

_MEMORY = 512 << 20
_THREADS = 8


def export(
    origin: Origin,
    url: str,
    ranks: Ranks,
    small: Mapping[str, bytes],
    *,
    experts: str | None,
    size: int,
) -> Done:
    """Write a save as Hugging Face files, in the names and layout of its family.

    Args:
        origin: The save; only weights, under training names.
        url: The directory; empty or absent.
        ranks: Who takes part.
        small: Files that go along, config.json above all.
        experts: ``split`` or ``fused``; None for the family's layout on the hub.
        size: Bytes of a file at most.

    Raises:
        UsageError: The save does not say its family and config.
        DestinationError: Something is at ``url``.
    """
    opened = origin.opened
    if opened.family is None or opened.config is None:
        raise UsageError("an export needs family= and config= of the Checkpointer")
    source = Source("sharded", origin.nodes, opened.config, opened.family, opened.experts)
    mapped = select(source, Wanted("huggingface", hf_experts=experts), lambda _, __: None).mapped
    plan = lower(whole_requests(mapped))
    store = store_for(url, origin.options)
    found = ranks.broadcast(_taken(store, url) if ranks.rank == 0 else None)
    if found is not None:
        raise DestinationError(found)
    old = superseded(store, url)
    local = isinstance(store, LocalStore)
    save_id = ranks.broadcast(new_save_id() if ranks.rank == 0 else None)
    sink = HuggingFaceSink(save_id, size, {})
    threads = 1 if local and is_local(opened.url) else _THREADS
    work = Work(
        plan=plan,
        sink=sink,
        arrangement=sink.arrange(plan.targets),
        destination=destination(store, url, old, {}),
        source=opened.url,
        options=origin.options,
        limit=limits(
            _MEMORY,
            threads,
            remote=not is_local(opened.url),
            encoded=plan.encoded,
            part=0 if local else PART,
        ),
        workers=threads,
        save_id=save_id,
        small=small,
        done=Finished(),
        lots=[(unit,) for unit in units(plan, small=not is_local(opened.url))],
    )
    try:
        return execute(work, ranks, partial(_unwatched, ranks))
    finally:
        store.close()


def _taken(store: Store, url: str) -> str | None:
    names = occupied(store, url)
    return f"{url}: not empty ({', '.join(names[:4])}); export to another place" if names else None


def _unwatched(ranks: Ranks, nbytes: int, targets: int) -> None:
    del nbytes, targets
    ranks.alive()
