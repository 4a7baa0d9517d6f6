"""The bigram chain."""

import math
from collections import Counter

import pytest
import torch
from helpers.strategies import seeded
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.errors import UsageError
from d9d_train.batch import IGNORED
from d9d_train.data.synthetic import Synthetic, SyntheticConfig, open_synthetic


def chain(seed=0, seq_len=64, vocab_size=32):
    return Synthetic(vocab_size=vocab_size, seq_len=seq_len, seed=seed)


def pairs(stream, count):
    samples = [stream.sample(n) for n in range(count)]
    return Counter(
        pair
        for sample in samples
        for pair in zip(sample.tokens.tolist(), sample.labels.tolist(), strict=True)
    )


def test_is_the_same_in_every_release():
    sample = chain(seed=3, seq_len=12).sample(5)
    assert sample.tokens.tolist() == [6, 19, 25, 28, 17, 6, 19, 25, 28, 17, 6, 19]


def test_labels_are_the_tokens_that_follow():
    sample = chain().sample(0)
    assert sample.labels[:-1].tolist() == sample.tokens[1:].tolist()
    assert not (sample.labels == IGNORED).any()
    assert not sample.starts.any()


def test_each_token_has_two_successors_of_nine_to_one():
    seen = pairs(chain(), 1000)
    for token in range(32):
        counts = sorted((n for (a, _), n in seen.items() if a == token), reverse=True)
        assert len(counts) == 2
        # 2,000 draws: three deviations are 2 %.
        assert counts[0] / sum(counts) == pytest.approx(0.9, abs=0.025)


def test_entropies_are_those_of_the_docstring():
    seen = pairs(chain(), 2000)
    total = seen.total()
    before = Counter()
    for (token, _), n in seen.items():
        before[token] += n
    bigram = -sum(n / total * math.log(n / before[a]) for (a, _), n in seen.items())
    unigram = -sum(n / total * math.log(n / total) for n in before.values())
    assert bigram == pytest.approx(0.3251, abs=0.003)
    assert unigram == pytest.approx(math.log(32), abs=0.003)


def test_the_chain_is_one_whatever_the_seed_and_the_walks_are_not():
    one, other = chain(seed=1), chain(seed=2)
    assert pairs(one, 300).keys() == pairs(other, 300).keys()
    assert one.sample(0).tokens.tolist() != other.sample(0).tokens.tolist()
    assert one.sample(0).tokens.tolist() != one.sample(1).tokens.tolist()


@seeded(20)
@given(number=st.integers(0, 1 << 40))
def test_a_sample_is_a_function_of_its_number(number):
    assert torch.equal(chain().sample(number).tokens, chain().sample(number).tokens)


def test_a_language_larger_than_the_model_is_refused():
    with pytest.raises(UsageError, match="vocab_size 65: expected 2 to the model's 64"):
        open_synthetic(SyntheticConfig(vocab_size=65), seq_len=4, vocab_size=64, seed=0)
    own = open_synthetic(SyntheticConfig(vocab_size=4), seq_len=64, vocab_size=64, seed=0)
    assert set(own.sample(0).tokens.tolist()) == {0, 1, 2, 3}
