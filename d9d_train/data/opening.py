"""The stream of a config."""

import torch

from d9d_train import rng
from d9d_train.data.config import DataConfig, SourceConfig
from d9d_train.data.mixture import Mixture
from d9d_train.data.sample import Stream
from d9d_train.data.synthetic import open_synthetic
from d9d_train.data.text import open_text
from d9d_train.data.tokens import open_tokens


def open_stream(config: DataConfig, *, seq_len: int, vocab_size: int, seed: int) -> Stream:
    """The stream of a config.

    Args:
        config: Where tokens come from.
        seq_len: Tokens of a sequence.
        vocab_size: Ids that the model knows; others are refused.
        seed: The run's, for a config without one.

    Raises:
        CkptError: Files that are missing, damaged, or not meant for this model.
    """
    if config.seed is not None:
        seed = config.seed
    if config.kind != "mixture":
        return _source(config, seq_len, vocab_size, seed)
    # A seed for each source, or two synthetic ones would be the same.
    seeds = rng.bits(seed, rng.stream("data.mixture"), torch.arange(len(config.mixture)))
    return Mixture(
        [
            _source(source, seq_len, vocab_size, own)
            for source, own in zip(config.mixture, seeds.tolist(), strict=True)
        ],
        [source.weight for source in config.mixture],
    )


def _source(config: DataConfig | SourceConfig, seq_len: int, vocab_size: int, seed: int) -> Stream:
    if config.kind == "tokens" and config.tokens:
        return open_tokens(config.tokens, seq_len=seq_len, vocab_size=vocab_size, seed=seed)
    if config.kind == "text" and config.text:
        return open_text(config.text, seq_len=seq_len, vocab_size=vocab_size, seed=seed)
    return open_synthetic(config.synthetic, seq_len=seq_len, vocab_size=vocab_size, seed=seed)
