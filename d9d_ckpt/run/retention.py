"""Which steps of a run go, decided purely, and their deletion: first what makes a step exist."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from d9d_ckpt.errors import UsageError
from d9d_ckpt.formats.claim import CLAIM, Claim
from d9d_ckpt.formats.sharded import MANIFEST
from d9d_ckpt.formats.steps import Run, StepState
from d9d_ckpt.run.claim import alive
from d9d_ckpt.storage.store import Store, join


@dataclass(frozen=True, slots=True)
class Policy:
    """Which whole steps stay.

    Attributes:
        keep_last: That many of the newest.
        keep_every: Those divisible by it as well; None for no others.
    """

    keep_last: int
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise UsageError(f"--keep-last {self.keep_last}: at least one whole step must stay")
        if self.keep_every is not None and self.keep_every < 1:
            raise UsageError(f"--keep-every {self.keep_every}: must be a number of steps from 1")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One step as retention sees it.

    Attributes:
        step: Its number.
        name: Its directory.
        complete: Whether it is a whole checkpoint that lies here.
        abandoned: Whether an incomplete one is certainly ours and nobody's any more: it holds the
            mark of a process that is gone, or nothing at all.
        blocked: Why it must not be touched whatever the policy says, or None.
    """

    step: int
    name: str
    complete: bool
    abandoned: bool = False
    blocked: str | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that prune leaves alone, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of every step; ascending.

    Attributes:
        delete: Steps that go.
        keep: Whole steps that the policy keeps.
        skipped: All others.
    """

    delete: tuple[int, ...]
    keep: tuple[int, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """What goes, or went, with one step.

    Attributes:
        name: Its directory.
        bytes: Bytes of the files.
        files: Their names, relative to the directory.
        left: What else lies there, and stays with the directory.
    """

    name: str
    bytes: int
    files: tuple[str, ...]
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What prune has done, or would do; the keys of its JSON."""

    deleted: tuple[int, ...]
    kept: tuple[int, ...]
    skipped: tuple[Skipped, ...]
    bytes: int
    dry_run: bool
    removed: tuple[Removed, ...]


def decide(steps: Sequence[Candidate], policy: Policy) -> Decision:
    """What becomes of each of ``steps``.

    A whole step goes when it is neither among the newest nor divisible. An incomplete one goes when
    it is abandoned and older than a whole one: a newer one may be about to become the latest.
    """
    whole = sorted(s.step for s in steps if s.complete)
    kept = set(whole[-policy.keep_last :])
    if policy.keep_every is not None:
        kept.update(step for step in whole if step % policy.keep_every == 0)
    latest = whole[-1] if whole else None
    delete, skipped = [], []
    for s in sorted(steps, key=lambda s: s.step):
        if s.step in kept:
            continue
        reason = s.blocked or (None if s.complete else _unsafe(s, latest))
        if reason is None:
            delete.append(s.step)
        else:
            skipped.append(Skipped(s.name, reason))
    return Decision(tuple(delete), tuple(sorted(kept)), tuple(skipped))


def _unsafe(s: Candidate, latest: int | None) -> str | None:
    """Why an incomplete step stays, or None."""
    if latest is None or s.step > latest:
        return "incomplete, and newer than every whole step: it may be in progress"
    if not s.abandoned:
        return "incomplete, and without the mark of a writer of ours: it may be a copy in progress"
    return None


def prune(store: Store, run: Run, policy: Policy, *, dry_run: bool) -> Pruned:
    """Delete the steps of ``run`` that ``policy`` does not keep, the oldest first."""
    decision = decide(candidates(run), policy)
    states = {s.step: s for s in run.steps}
    deleted: list[int] = []
    skipped = [*decision.skipped]
    for step in decision.delete:
        state = states[step]
        if dry_run or erase(store, join(run.url, state.name), state):
            deleted.append(step)
        else:
            skipped.append(Skipped(state.name, "claimed by another process just now"))
    skipped += [Skipped(name, "not a step directory") for name in run.others]
    removed = tuple(_removed(states[step]) for step in deleted)
    return Pruned(
        deleted=tuple(deleted),
        kept=decision.keep,
        skipped=tuple(skipped),
        bytes=sum(r.bytes for r in removed),
        dry_run=dry_run,
        removed=removed,
    )


def candidates(run: Run) -> list[Candidate]:
    """The steps of ``run`` in the light of this host's processes and of links between steps."""
    links = {s.place: s.name for s in run.steps if s.link}
    return [_candidate(s, links) for s in run.steps]


def _candidate(s: StepState, links: Mapping[str, str]) -> Candidate:
    if s.link:
        return Candidate(s.step, s.name, complete=False, blocked="a symbolic link, not followed")
    claim, unknown = s.contents.claim, s.contents.unknown
    blocked = None
    if claim is not None and _alive(claim):
        blocked = f"claimed by {claim}"
    elif s.place in links:
        blocked = f"{links[s.place]} is a symbolic link to it"
    elif s.contents.linked:
        blocked = f"{s.contents.linked[0]} in it is a symbolic link, not followed"
    elif MANIFEST in unknown:
        blocked = f"incomplete, and its manifest cannot be read: {s.reason}"
    empty = not (s.contents.ours or s.contents.saves or unknown)
    return Candidate(s.step, s.name, s.complete, claim is not None or empty, blocked)


def _alive(claim: Claim) -> bool:
    if claim.host == socket.gethostname() and claim.pid == os.getpid():
        # One process prunes one run at a time: an earlier prune of this one has failed.
        return claim.prune is None
    return alive(claim)


def erase(store: Store, path: str, state: StepState) -> bool:
    """Delete what is ours in the step at ``path``; whether nobody else has claimed it.

    The step is claimed, then loses its manifest, so that whatever happens next it never looks whole.
    The claim goes last: it lets a later run finish what this one could not.
    """
    contents = state.contents
    claim = join(path, CLAIM)
    mine = Claim(socket.gethostname(), os.getpid(), time.time(), contents.small).encode()
    if contents.claim is not None:
        store.put(claim, mine)
    elif not store.claim(claim, mine):
        return False
    store.delete(join(path, MANIFEST))
    # File by file: whatever else has come into a directory since it was listed stays.
    for name in contents.ours:
        if name not in (MANIFEST, CLAIM):
            store.delete(join(path, name))
    for save in contents.saves:
        store.remove_empty(join(path, save))
    store.delete(claim)
    store.remove_empty(path)
    return True


def _removed(s: StepState) -> Removed:
    return Removed(s.name, s.contents.nbytes, tuple(s.contents.ours), s.contents.unknown)
