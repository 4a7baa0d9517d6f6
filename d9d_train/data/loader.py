"""Micro-batches of one rank, step by step, read ahead by a thread."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Self

import torch

from d9d_ckpt.checkpointer.cursor import DataCursor
from d9d_train.batch import IGNORED, Batch
from d9d_train.data.order import Share, split
from d9d_train.data.sample import Stream


@dataclass(frozen=True)
class Step:
    """What a rank works on in one optimizer step.

    Attributes:
        batches: Its micro-batches.
        counted: Labels that count in the whole sequences of its dp share. Summed over dp (not over cp,
            tp or pp, where it is the same) they are those of the global batch: to know them alone, a
            rank would have to read what all others read.
    """

    batches: tuple[Batch, ...]
    counted: int


class Loader:
    """The steps from a cursor on; the cursor moves when a step is handed out, not when it is read.

    A cursor that somebody else moved, by loading a checkpoint, is followed. Errors of the thread are
    raised by the ``next`` that they belong to; the one after tries again.
    """

    def __init__(
        self,
        stream: Stream,
        cursor: DataCursor,
        *,
        share: Share,
        index: torch.Tensor,
        device: torch.device,
        ahead: int = 2,
    ) -> None:
        """Nothing is read before the first ``next``.

        Args:
            stream: Samples.
            cursor: How many of them have been taken.
            share: This rank's part of a step.
            index: [S] int64, the tokens of each sequence that this rank works on; see `token_index`.
            device: Where batches go; to a GPU through pinned memory, without waiting.
            ahead: Steps that may wait ready, besides one in the making.
        """
        self._stream, self._cursor, self._share = stream, cursor, share
        self._index, self._device, self._ahead = index, device, ahead
        self._reader: _Reader | None = None
        self._next = cursor.consumed

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._next != self._cursor.consumed:
            self.close()
        if self._reader is None:
            self._next = self._cursor.consumed
            self._reader = _Reader(self._read, self._next, self._share.global_batch, self._ahead)
        try:
            step = self._reader.get()
        except BaseException:
            self.close()
            raise
        self._cursor.advance(self._share.global_batch)
        self._next = self._cursor.consumed
        return replace(step, batches=tuple(self._given(batch) for batch in step.batches))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead; what was read is dropped."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self, first: int) -> Step:
        full = [batch_of(self._stream, numbers) for numbers in self._share.numbers(first)]
        counted = sum(int((b.labels != IGNORED).sum()) for b in full if b.labels is not None)
        batches = (split(batch, self._index) for batch in full)
        if self._device.type == "cuda":
            # A new thread would pin through the first GPU, which is some other rank's.
            torch.cuda.set_device(self._device)
            batches = (_mapped(batch, torch.Tensor.pin_memory) for batch in batches)
        return Step(tuple(batches), counted)

    def _given(self, batch: Batch) -> Batch:
        return _mapped(batch, lambda tensor: tensor.to(self._device, non_blocking=True))


def batch_of(stream: Stream, numbers: range) -> Batch:
    """Whole sequences as one batch."""
    samples = [stream.sample(number) for number in numbers]
    starts = torch.stack([sample.starts for sample in samples])
    return Batch(
        tokens=torch.stack([sample.tokens for sample in samples]),
        labels=torch.stack([sample.labels for sample in samples]),
        index=torch.arange(starts.shape[1]),
        starts=starts,
        samples=torch.tensor(numbers),
        packed=bool(starts.any()),
    )


def _mapped(batch: Batch, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    return replace(
        batch,
        tokens=function(batch.tokens),
        labels=None if batch.labels is None else function(batch.labels),
        index=function(batch.index),
        starts=function(batch.starts),
        samples=function(batch.samples),
    )


class _Reader:
    """A thread that reads steps in order until it is told to stop, or fails."""

    def __init__(self, read: Callable[[int], Step], first: int, stride: int, ahead: int) -> None:
        self._ready: queue.Queue[Step | BaseException] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(read, first, stride), name="data", daemon=True
        )
        self._thread.start()

    def get(self) -> Step:
        """The next step, or the error that stands in its place."""
        step = self._ready.get()
        if isinstance(step, BaseException):
            raise step
        return step

    def close(self) -> None:
        """Stop once what is being read is read."""
        self._stopped.set()
        # A thread that waits for room finds some; afterwards it sees that it is over.
        while not self._ready.empty():
            self._ready.get()
        self._thread.join()

    def _run(self, read: Callable[[int], Step], first: int, stride: int) -> None:
        for number in count(first, stride):
            if self._stopped.is_set():
                return
            try:
                step = read(number)
            except BaseException as error:  # noqa: BLE001 - raised where the step is asked for
                self._ready.put(error)
                return
            self._ready.put(step)
