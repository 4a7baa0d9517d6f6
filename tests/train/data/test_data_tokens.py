"""Token files: mapped or by ranges, cut, masked, shuffled."""

import mmap
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from helpers.strategies import seeded
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.errors import CorruptError, MissingError, RequestError, UsageError
from d9d_train.batch import IGNORED
from d9d_train.data.arrays import Held, find, open_array
from d9d_train.data.tokens import TokenFile, Tokens, TokensConfig, open_tokens

X = IGNORED


def stream(*files, seq_len=4, **more):
    more = {"shuffle": False, "seed": 0, "vocab_size": 1000, **more}
    return Tokens([held(i, ids) for i, ids in enumerate(files)], seq_len=seq_len, **more)


def held(name, ids, boundaries=None, mask=None):
    return TokenFile(
        f"file{name}",
        Held(np.array(ids, np.uint16)),
        None if boundaries is None else np.array(boundaries, np.int64),
        None if mask is None else Held(np.array(mask, np.uint8)),
    )


def lists(sample):
    return sample.tokens.tolist(), sample.labels.tolist(), sample.starts.tolist()


def opened(seq_len=4, **config):
    config = {"shuffle": False, **config}
    return open_tokens(TokensConfig(**config), seq_len=seq_len, vocab_size=70_000, seed=0)


def test_eos_ends_documents():
    tokens = stream([1, 2, 0, 3, 4, 5, 6, 0, 7, 8], eos=0)
    assert tokens.length == 2
    assert lists(tokens.sample(0)) == ([1, 2, 0, 3], [2, 0, X, 4], [0, 0, 0, 3])
    assert lists(tokens.sample(1)) == ([4, 5, 6, 0], [5, 6, 0, X], [0, 0, 0, 0])
    assert lists(tokens.sample(2)) == lists(tokens.sample(0))


def test_a_file_ends_a_document_and_a_sequence_may_cross_files():
    tokens = stream([1, 2, 3], [], [4], [5, 6, 7, 8])
    assert lists(tokens.sample(0)) == ([1, 2, 3, 4], [2, 3, X, X], [0, 0, 0, 3])
    assert lists(tokens.sample(1)) == ([5, 6, 7, 8], [6, 7, 8, X], [0, 0, 0, 0])


@pytest.mark.parametrize("ends", [[2, 5], [0, 2, 5, 9]])
def test_boundaries(ends):
    tokens = Tokens([held(0, range(9), ends)], seq_len=4, vocab_size=9, seed=0, shuffle=False)
    assert lists(tokens.sample(0)) == ([0, 1, 2, 3], [1, X, 3, 4], [0, 0, 2, 2])
    assert lists(tokens.sample(1)) == ([4, 5, 6, 7], [X, 6, 7, 8], [0, 1, 1, 1])


def test_masks_are_cut_like_tokens():
    files = [held(0, range(3), mask=[1, 0, 1]), held(1, range(3, 9), mask=[0, 1, 1, 0, 1, 1])]
    tokens = Tokens(files, seq_len=4, vocab_size=9, seed=0, shuffle=False)
    assert lists(tokens.sample(0))[1] == [X, 2, X, 4]
    assert lists(tokens.sample(1))[1] == [5, X, 7, 8]


@seeded(60)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    seq_len=st.integers(1, 7),
    ends=st.sets(st.integers(0, 53)),
)
def test_sequences_are_the_row_of_tokens(sizes, seq_len, ends):
    # Ids count up from 1; 0 is eos.
    row = [0 if i in ends else i + 1 for i in range(sum(sizes))]
    files = [row[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    if len(row) < seq_len:
        with pytest.raises(RequestError, match=f"{len(row)} tokens in all"):
            stream(*files, seq_len=seq_len, eos=0)
        return
    tokens = stream(*files, seq_len=seq_len, eos=0)
    first = {sum(sizes[:i]) for i in range(len(sizes))} | {
        i + 1 for i, t in enumerate(row) if not t
    }
    for number in range(tokens.length):
        low = number * seq_len
        assert lists(tokens.sample(number)) == (
            row[low : low + seq_len],
            [
                X if i in first or i == len(row) else row[i]
                for i in range(low + 1, low + seq_len + 1)
            ],
            [
                max([0, *(f - low for f in first if low <= f <= i)])
                for i in range(low, low + seq_len)
            ],
        )


def test_each_epoch_is_all_sequences_in_an_order_of_its_own():
    tokens = stream(range(400), seq_len=4, shuffle=True)
    epochs = [[tokens.sample(e * 100 + i).tokens[0].item() for i in range(100)] for e in range(3)]
    assert all(sorted(epoch) == list(range(0, 400, 4)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    other = stream(range(400), seq_len=4, shuffle=True, seed=1)
    assert [other.sample(i).tokens[0].item() for i in range(100)] != epochs[0]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
@pytest.mark.parametrize("form", ["bin", "npy"])
@pytest.mark.parametrize("place", ["local", "memory"])
def test_files_of_every_kind(tmp_path, dtype, form, place):
    ids = np.arange(60_000, 60_030).astype(dtype)
    url = f"{tmp_path if place == 'local' else 'memory://tokens'}/ids.{form}"
    if form == "bin":
        with fsspec.open(url, "wb") as file:
            file.write(ids.astype(ids.dtype.newbyteorder("<")).tobytes())
    else:
        with fsspec.open(url, "wb") as file:
            np.save(file, ids)
    tokens = opened(files=(url,), dtype=dtype)
    assert tokens.length == 7
    assert lists(tokens.sample(3))[:2] == (
        [60_012, 60_013, 60_014, 60_015], [60_013, 60_014, 60_015, 60_016]
    )  # fmt: skip


@pytest.mark.parametrize("place", ["local", "memory"])
def test_boundaries_and_masks_in_files(tmp_path, place):
    root = tmp_path if place == "local" else "memory://beside"
    parts = {
        "a.bin": np.arange(6, dtype="<u2"), "a.ends": np.array([2], "<i8"),
        "a.mask": np.array([1, 1, 1, 1, 0, 1], np.uint8),
        "b.bin": np.arange(6, 12, dtype="<u2"), "b.ends": np.array([0, 3], "<i8"),
        "b.mask": np.ones(6, np.uint8),
    }  # fmt: skip
    for name, values in parts.items():
        with fsspec.open(f"{root}/{name}", "wb") as file:
            file.write(values.tobytes())
    tokens = opened(
        files=(f"{root}/*.bin",),
        boundaries=(f"{root}/*.ends",),
        masks=(f"{root}/*.mask",),
        seq_len=6,
    )
    assert lists(tokens.sample(0)) == (list(range(6)), [1, X, 3, X, 5, X], [0, 0, 2, 2, 2, 2])
    assert lists(tokens.sample(1))[1:] == ([7, 8, X, 10, 11, X], [0, 0, 0, 3, 3, 3])


def test_boundaries_of_another_dtype(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(8, dtype=np.uint16))
    np.save(tmp_path / "ends.npy", np.array([3], np.int32))
    tokens = opened(files=(f"{tmp_path}/ids.npy",), boundaries=(f"{tmp_path}/ends.npy",), seq_len=8)
    assert lists(tokens.sample(0))[2] == [0, 0, 0, 3, 3, 3, 3, 3]


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_local_file_is_not_read_whole(tmp_path):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(1 << 28)
    before = resident()
    tokens = opened(files=(str(path),), seq_len=4096, shuffle=True)
    for number in range(20):
        tokens.sample(number)
    assert resident() - before < 1 << 25


class Counting(MemoryFileSystem):
    """Counts the bytes that are read."""

    protocol = "counting"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    read = 0

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = super().cat_file(path, start, end, **kwargs)
        Counting.read += len(data)
        return data


def test_a_remote_file_is_read_by_ranges():
    fsspec.register_implementation("counting", Counting, clobber=True)
    with fsspec.open("counting://large.bin", "wb") as file:
        file.write(bytes(1 << 22))
    tokens = opened(files=("counting://large.bin",), seq_len=1024)
    Counting.read = 0
    for number in range(3):
        tokens.sample(number)
    assert Counting.read == 3 * 2 * 1025


def test_ids_beyond_the_vocabulary_are_refused_where_they_are():
    tokens = stream([1, 2, 3], [4, 5, 1000, 6, 7], vocab_size=1000)
    with pytest.raises(RequestError, match=r"file1: token 2 has id 1000, expected 0 to 999"):
        tokens.sample(1)
    negative = Tokens(
        [TokenFile("n", Held(np.array([1, -1], np.int32)))], seq_len=2, vocab_size=9, seed=0
    )
    with pytest.raises(RequestError, match="n: token 1 has id -1"):
        negative.sample(0)


def test_contradictions_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(8, dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.arange(7, dtype=np.uint8))
    a, b = (f"{tmp_path}/{name}.npy" for name in "ab")
    with pytest.raises(UsageError, match="1 files, but 2 masks"):
        opened(files=(a,), masks=(a, b))
    with pytest.raises(CorruptError, match="8 tokens, but its mask has 7 values"):
        opened(files=(a,), masks=(b,))
    with pytest.raises(CorruptError, match=r"boundaries from 0 to 9, expected .* at most 8"):
        held("c", range(8), [0, 9])
    with pytest.raises(UsageError, match="eos 3 and boundaries both"):
        TokensConfig(files=(a,), boundaries=(b,), eos=3)


def test_files_that_are_no_arrays_are_refused(tmp_path):
    odd, flat, short = (tmp_path / name for name in ("odd.bin", "flat.npy", "short.npy"))
    odd.write_bytes(b"abc")
    np.save(flat, np.zeros((2, 2), np.int32))
    np.save(short, np.zeros(9, np.int32))
    short.write_bytes(short.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="3 bytes are no whole number of uint16"):
        open_array(str(odd), "uint16", {})
    with pytest.raises(UsageError, match=r"found \(2, 2\) of int32"):
        open_array(str(flat), "uint16", {})
    with pytest.raises(CorruptError, match="163 bytes, but its header says 9 values"):
        open_array(str(short), "uint16", {})
    (tmp_path / "text.npy").write_bytes(b"text, no array")
    with pytest.raises(CorruptError, match=r"no \.npy file"):
        open_array(str(tmp_path / "text.npy"), "uint16", {})
    (tmp_path / "empty.bin").touch()
    assert len(open_array(str(tmp_path / "empty.bin"), "uint16", {})) == 0


def test_patterns(tmp_path):
    for name in ("b.bin", "a.bin", "deep/c.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find([f"{tmp_path}/*.bin"], {}) == [f"{tmp_path}/a.bin", f"{tmp_path}/b.bin"]
    assert find([f"{tmp_path}/**/c.bin", f"{tmp_path}/b.bin"], {}) == [
        f"{tmp_path}/deep/c.bin", f"{tmp_path}/b.bin"
    ]  # fmt: skip
    with pytest.raises(MissingError, match=r"\*\.txt: no file matches"):
        find([f"{tmp_path}/*.txt"], {})
    with pytest.raises(UsageError, match="in its last part only"):
        find(["memory://a/*/b.bin"], {})
    with pytest.raises(UsageError, match="files is empty"):
        find([], {})
