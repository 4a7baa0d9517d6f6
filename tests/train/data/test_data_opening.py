"""Configs to streams."""

import numpy as np
import pytest

from d9d_ckpt.errors import UsageError
from d9d_train.data.config import DataConfig, SourceConfig
from d9d_train.data.opening import open_stream
from d9d_train.data.text import TextConfig
from d9d_train.data.tokens import TokensConfig


def opened(config, seed=0):
    return open_stream(config, seq_len=4, vocab_size=300, seed=seed)


def tokens_of(stream, number):
    return stream.sample(number).tokens.tolist()


def test_each_kind(tmp_path):
    np.arange(40, dtype="<u2").tofile(tmp_path / "ids.bin")
    (tmp_path / "a.txt").write_text("abcd")
    tokens = TokensConfig(files=(f"{tmp_path}/ids.bin",), shuffle=False)
    text = TextConfig(files=(f"{tmp_path}/a.txt",), shuffle=False)
    assert tokens_of(opened(DataConfig(kind="tokens", tokens=tokens)), 1) == [4, 5, 6, 7]
    assert tokens_of(opened(DataConfig(kind="text", text=text)), 0) == [256, 97, 98, 99]
    assert opened(DataConfig()).length == 0
    mixed = opened(
        DataConfig(
            kind="mixture",
            mixture=(
                SourceConfig(weight=1, kind="tokens", tokens=tokens),
                SourceConfig(weight=1, kind="text", text=text),
            ),
        )
    )
    assert [tokens_of(mixed, n) for n in range(4)] == [
        [256, 97, 98, 99], [0, 1, 2, 3], [256, 97, 98, 99], [4, 5, 6, 7]
    ]  # fmt: skip
    assert mixed.length == 10 + 1


def test_equal_sources_of_a_mixture_differ():
    part = SourceConfig(weight=1, kind="synthetic")
    mixed = opened(DataConfig(kind="mixture", mixture=(part, part)))
    assert tokens_of(mixed, 0) != tokens_of(mixed, 1)


def test_the_seed_is_that_of_the_run_unless_named():
    own = DataConfig(seed=7)
    assert tokens_of(opened(own), 0) == tokens_of(opened(own, seed=1), 0)
    assert tokens_of(opened(own), 0) == tokens_of(opened(DataConfig(), seed=7), 0)
    assert tokens_of(opened(DataConfig()), 0) != tokens_of(opened(DataConfig(), seed=7), 0)


@pytest.mark.parametrize("kind", ["tokens", "text", "mixture"])
def test_a_kind_without_its_settings_is_refused(kind):
    with pytest.raises(UsageError, match=rf"data\.kind is {kind}: its settings data\.{kind}"):
        DataConfig(kind=kind)
