"""An endless language of two-word choices, which any model learns."""

from dataclasses import dataclass

import torch

from d9d_ckpt.errors import UsageError
from d9d_train import rng
from d9d_train.data.sample import Sample, packed

_OFTEN = 0.9


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """A bigram chain.

    Attributes:
        vocab_size: Tokens of the language; None for the model's.
    """

    vocab_size: int | None = None


class Synthetic:
    """Walks along a fixed chain: each token has two successors, of probability 0.9 and 0.1.

    The chain depends on the size of the vocabulary alone, the walk of a sample on (seed, number); each
    sample is one document, and all of its labels count.

    A model that knows the chain reaches its entropy, -0.9 ln 0.9 - 0.1 ln 0.1 = 0.325 nats a token.
    Either successor is a permutation of the vocabulary, so all tokens are equally frequent: one that
    knows frequencies alone stays at the unigram entropy, ln(vocab_size).
    """

    def __init__(self, *, vocab_size: int, seq_len: int, seed: int) -> None:
        order = rng.bits(0, rng.stream("data.synthetic.chain"), torch.arange(vocab_size))
        often = order.argsort(stable=True)
        self._successors = often.tolist(), often.roll(1).tolist()
        self._vocab_size, self._seq_len, self._seed = vocab_size, seq_len, seed
        self._stream = rng.stream("data.synthetic.walk")

    @property
    def length(self) -> int:
        """0: there is no end."""
        return 0

    def sample(self, number: int) -> Sample:
        """Walk ``number``."""
        count = self._seq_len + 1
        draws = rng.uniform(self._seed, self._stream, number * count + torch.arange(count))
        token = int(draws[0] * self._vocab_size)
        tokens = [token]
        for rare in (draws[1:] >= _OFTEN).tolist():
            token = self._successors[rare][token]
            tokens.append(token)
        return packed(torch.tensor(tokens), torch.zeros(count, dtype=torch.bool))


def open_synthetic(
    config: SyntheticConfig, *, seq_len: int, vocab_size: int, seed: int
) -> Synthetic:
    """The chain of a config.

    Raises:
        UsageError: A language of more tokens than the model has.
    """
    size = config.vocab_size or vocab_size
    if not 2 <= size <= vocab_size:
        raise UsageError(
            f"data.synthetic.vocab_size {size}: expected 2 to the model's {vocab_size}"
        )
    return Synthetic(vocab_size=size, seq_len=seq_len, seed=seed)
