"""Steps of any rank: the same global batches however they are shared out, from any cursor."""

import threading
import time
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pytest
import torch
from helpers.strategies import seeded
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.checkpointer.cursor import DataCursor
from d9d_ckpt.errors import RequestError, StorageError
from d9d_train.batch import IGNORED
from d9d_train.data.arrays import Held
from d9d_train.data.loader import Loader, batch_of
from d9d_train.data.mixture import Mixture
from d9d_train.data.order import Share, token_index
from d9d_train.data.synthetic import Synthetic
from d9d_train.data.tokens import TokenFile, Tokens

CPU = torch.device("cpu")
LENGTH = 16


def mixture():
    """Documents of about seven tokens, and a bigram chain; two shuffled epochs in some 80 samples."""
    ids = np.array([0 if i % 7 == 0 else i % 50 + 1 for i in range(500)], np.uint16)
    packed = Tokens([TokenFile("f", Held(ids))], seq_len=LENGTH, vocab_size=64, seed=5, eos=0)
    return Mixture([packed, Synthetic(vocab_size=64, seq_len=LENGTH, seed=5)], [0.6, 0.4])


def cursor(at=0):
    return DataCursor(length=mixture().length, seed=5, consumed=at)


def loader(stream, at, *, batch=8, parts=1, size=1, rank=0, cp=(1, 0, "contiguous"), **more):
    return Loader(
        stream,
        at,
        share=Share(batch, parts, size, rank),
        index=token_index(LENGTH, *cp),
        device=CPU,
        **more,
    )


def taken(steps, count):
    with steps:
        return list(islice(steps, count))


@seeded(25)
@given(
    dp=st.sampled_from([1, 2, 3, 4]),
    parts=st.sampled_from([1, 2, 3]),
    cp=st.sampled_from([1, 2, 4]),
    order=st.sampled_from(["contiguous", "head_tail"]),
    at=st.sampled_from([0, 72, 1000]),
)
def test_all_ranks_together_have_the_global_batch(dp, parts, cp, order, at):
    whole = batch_of(mixture(), range(at, at + 72))
    tokens, labels = torch.full_like(whole.tokens, -1), torch.full_like(whole.tokens, -1)
    counted = 0
    for rank in range(dp):
        for part in range(cp):
            (step,) = taken(
                loader(
                    mixture(), cursor(at), batch=72, parts=parts, size=dp, rank=rank,
                    cp=(cp, part, order),
                ), 1
            )  # fmt: skip
            assert len(step.batches) == parts
            counted += step.counted if part == 0 else 0
            for batch in step.batches:
                rows = batch.samples - at
                tokens[rows[:, None], batch.index] = batch.tokens
                labels[rows[:, None], batch.index] = batch.labels
                assert torch.equal(batch.starts, whole.starts[rows])
                assert batch.packed == bool(batch.starts.any())
    assert torch.equal(tokens, whole.tokens)
    assert torch.equal(labels, whole.labels)
    assert counted == int((whole.labels != IGNORED).sum())


@seeded(20)
@given(steps=st.integers(1, 9), first=st.sampled_from([1, 2, 4]), then=st.sampled_from([1, 2, 4]))
def test_a_resume_at_any_degree_goes_on_with_the_next_sample(steps, first, then):
    place = cursor()
    taken(loader(mixture(), place, size=first), steps)
    resumed = cursor()
    resumed.load_state_dict(place.state_dict())
    ranks = [
        taken(loader(mixture(), DataCursor(**resumed.state_dict()), size=then, rank=r), 2)
        for r in range(then)
    ]
    for step in range(2):
        numbers = torch.cat([batch.samples for rank in ranks for batch in rank[step].batches])
        assert numbers.tolist() == list(range(8 * (steps + step), 8 * (steps + step + 1)))
        tokens = torch.cat([batch.tokens for rank in ranks for batch in rank[step].batches])
        assert torch.equal(
            tokens, batch_of(mixture(), range(8 * (steps + step), 8 * (steps + step + 1))).tokens
        )


def test_another_dataset_or_seed_is_refused():
    saved = cursor(8).state_dict()
    with pytest.raises(RequestError, match="length was 31, is 30 now"):
        DataCursor(length=30, seed=5).load_state_dict(saved)
    with pytest.raises(RequestError, match="seed was 5, is 6 now"):
        DataCursor(length=31, seed=6).load_state_dict(saved)


@dataclass
class Watched:
    """A stream that notes what is asked of it, and fails at one number."""

    bad: int = -1
    asked: list[int] = field(default_factory=list)
    length: int = 0

    def sample(self, number):
        self.asked.append(number)
        if number == self.bad:
            raise StorageError(f"sample {number} is gone")
        return Synthetic(vocab_size=8, seq_len=LENGTH, seed=0).sample(number)


def settled(stream):
    """Samples asked for, once nothing more is read."""
    while True:
        before = len(stream.asked)
        time.sleep(0.1)
        if len(stream.asked) == before:
            return before


def test_reading_ahead_is_bounded_and_moves_no_cursor():
    stream, place = Watched(), DataCursor(length=0, seed=0)
    with loader(stream, place, batch=2, ahead=3) as steps:
        assert settled(stream) == 0
        next(steps)
        # One step was taken, three are ready, one waits to be put beside them.
        assert settled(stream) == 10
        assert place.consumed == 2


def test_an_error_comes_where_its_step_would_and_the_next_call_tries_again():
    stream, place = Watched(bad=5), DataCursor(length=0, seed=0)
    with loader(stream, place, batch=2, ahead=2) as steps:
        next(steps)
        next(steps)
        for _ in range(2):
            with pytest.raises(StorageError, match="sample 5 is gone"):
                next(steps)
            assert place.consumed == 4
        stream.bad = -1
        assert next(steps).batches[0].samples.tolist() == [4, 5]


def test_a_cursor_that_was_moved_is_followed():
    place = DataCursor(length=0, seed=0)
    with loader(Watched(), place, batch=2) as steps:
        next(steps)
        place.consumed = 40
        assert next(steps).batches[0].samples.tolist() == [40, 41]
        assert next(steps).batches[0].samples.tolist() == [42, 43]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_no_thread_is_left(steps):
    before = threading.active_count()
    taken(loader(Watched(), DataCursor(length=0, seed=0), batch=2, ahead=1), steps)
    assert threading.active_count() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_come_to_the_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    share, index = Share(4, 2, 1, 0), token_index(LENGTH, 2, 1, "head_tail")
    with (
        Loader(mixture(), cursor(), share=share, index=index, device=device) as there,
        Loader(mixture(), cursor(), share=share, index=index, device=CPU) as here,
    ):
        for moved, kept in islice(zip(there, here, strict=False), 3):
            for a, b in zip(moved.batches, kept.batches, strict=True):
                assert a.tokens.device == device
                assert torch.equal(a.tokens.cpu(), b.tokens)
                assert torch.equal(a.positions.cpu(), b.positions)
