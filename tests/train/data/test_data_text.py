"""Text to sequences, by bytes and by a tokenizer.json."""

import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from d9d_ckpt.errors import CorruptError, RequestError, UsageError
from d9d_train.batch import IGNORED
from d9d_train.data import text
from d9d_train.data.text import TextConfig, open_text

X = IGNORED


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    (tmp_path / "b.txt").write_bytes("é".encode())
    return f"{tmp_path}/*.txt"


@pytest.fixture
def words(tmp_path):
    vocabulary = {"<end>": 0, "one": 1, "two": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 - a word
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def opened(seq_len, vocab_size=258, **config):
    config = TextConfig(shuffle=False, **config)
    return open_text(config, seq_len=seq_len, vocab_size=vocab_size, seed=0)


def test_bytes_by_hand(files):
    sample = opened(9, files=(files,)).sample(0)
    assert sample.tokens.tolist() == [256, 97, 98, 255, 257, 256, 195, 169, 257]
    assert sample.labels.tolist() == [97, 98, 255, 257, X, 195, 169, 257, X]
    assert sample.starts.tolist() == [0, 0, 0, 0, 0, 5, 5, 5, 5]


def test_a_tokenizer_file(tmp_path, words):
    (tmp_path / "a.txt").write_text("two one")
    (tmp_path / "b.txt").write_text("one three")
    config = {"files": (f"{tmp_path}/?.txt",), "tokenizer": words}
    assert opened(4, **config).sample(0).tokens.tolist() == [2, 1, 1, 3]
    ended = opened(6, **config, eos="<end>").sample(0)
    assert ended.tokens.tolist() == [2, 1, 0, 1, 3, 0]
    assert ended.labels.tolist() == [1, 0, X, 3, 0, X]
    both = opened(8, **config, bos="<end>", eos="<end>").sample(0)
    assert both.tokens.tolist() == [0, 2, 1, 0, 0, 1, 3, 0]


def test_a_cache_is_made_once_and_found_again(tmp_path, files, monkeypatch):
    cache = tmp_path / "cache"
    first = opened(9, files=(files,), cache=str(cache)).sample(0)
    made = sorted(path.name.partition(".")[2] for path in cache.iterdir())
    assert made == ["boundaries.npy", "tokens.npy"]

    def refuse(*_):
        raise AssertionError("tokenised again")

    with monkeypatch.context() as patched:
        patched.setattr(text, "_tokenised", refuse)
        again = opened(9, files=(files,), cache=str(cache)).sample(0)
    assert again.tokens.tolist() == first.tokens.tolist()
    assert again.starts.tolist() == first.starts.tolist()
    (tmp_path / "a.txt").write_bytes(b"xy\xff")
    changed = opened(9, files=(files,), cache=str(cache)).sample(0)
    assert changed.tokens.tolist()[:4] == [256, 120, 121, 255]


def test_a_cached_file_is_mapped(tmp_path, files):
    stream = opened(9, files=(files,), cache=str(tmp_path / "cache"))
    assert isinstance(stream._files[0].ids.values, np.memmap)


def test_what_does_not_fit_is_refused(tmp_path, files, words):
    with pytest.raises(RequestError, match="bytes has 258 ids, the model a vocab_size of 257"):
        opened(4, vocab_size=257, files=(files,))
    with pytest.raises(CorruptError, match=r"a\.txt: not UTF-8 at byte 2"):
        opened(2, files=(files,), tokenizer=words)
    with pytest.raises(UsageError, match="has no token '<s>'"):
        opened(2, files=(files,), tokenizer=words, bos="<s>")
    with pytest.raises(UsageError, match="bytes have their own bos and eos"):
        opened(2, files=(files,), eos="<end>")
    with pytest.raises(CorruptError, match=r"b\.txt: no tokenizer\.json"):
        opened(2, files=(files,), tokenizer=f"{tmp_path}/b.txt")


def test_a_missing_package_is_named(files, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match="install the package tokenizers"):
        opened(2, files=(files,), tokenizer=words)
