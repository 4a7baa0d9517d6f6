"""Sequences cut from files of token ids."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch

from d9d_ckpt.errors import CorruptError, RequestError, UsageError
from d9d_train.data.arrays import Array, Held, find, open_array
from d9d_train.data.permutation import permuted
from d9d_train.data.sample import Sample, packed


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """Files of token ids, one after the other; a file's end is the end of a document.

    Attributes:
        files: Paths, URLs or patterns of them: ``.npy``, or bare little-endian ids.
        dtype: Of bare ids.
        eos: The id that ends a document; None where boundaries tell, or where each file is one
            document.
        boundaries: A file for each of ``files``: where in it documents start, ascending, as int64 or
            ``.npy``; its 0 and its length may be among them.
        masks: A file for each of ``files``, one uint8 a token: 0 where a token is not to be predicted,
            such as those of a prompt.
        shuffle: Whether each epoch has an order of its own.
        storage_options: For fsspec.
    """

    files: tuple[str, ...]
    dtype: Literal["uint16", "uint32", "int32"] = "uint16"
    eos: int | None = None
    boundaries: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    shuffle: bool = True
    storage_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse two answers to one question.

        Raises:
            UsageError: Documents end by an id and by boundaries.
        """
        if self.boundaries and self.eos is not None:
            raise UsageError(
                f"data.tokens: eos {self.eos} and boundaries both end documents; name one of them"
            )


@dataclass(frozen=True)
class TokenFile:
    """The ids of one file and what goes with them.

    Attributes:
        name: For messages.
        ids: Token ids.
        boundaries: int64, ascending positions where documents start.
        mask: One value an id; 0 where it is not to be predicted.

    Raises:
        CorruptError: A mask of another length, or boundaries beyond the file.
    """

    name: str
    ids: Array
    boundaries: np.ndarray[Any, Any] | None = None
    mask: Array | None = None

    def __post_init__(self) -> None:
        if self.mask is not None and len(self.mask) != len(self.ids):
            raise CorruptError(
                f"{self.name}: {len(self.ids)} tokens, but its mask has {len(self.mask)} values"
            )
        # The ends alone: whether all of them ascend takes reading them all.
        found = self.boundaries
        ends = [] if found is None or not len(found) else found[[0, -1]].tolist()
        if ends and not 0 <= ends[0] <= ends[1] <= len(self.ids):
            raise CorruptError(
                f"{self.name}: boundaries from {ends[0]} to {ends[1]}, expected them to ascend from 0 or "
                f"above to at most {len(self.ids)}, its tokens"
            )


@dataclass(frozen=True)
class _Piece:
    """Consecutive tokens of one file, as `packed` wants them."""

    tokens: torch.Tensor
    begins: torch.Tensor
    counted: torch.Tensor


_END = _Piece(torch.zeros(1, dtype=torch.int64), *torch.ones(2, 1, dtype=torch.bool))
"""What follows the last token of all: a document that predicts nothing."""


class Tokens:
    """All files as one row of tokens, cut every ``seq_len`` of them; what is left at the end is unused.

    An epoch is all sequences once, in an order of its own when shuffled.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        *,
        seq_len: int,
        vocab_size: int,
        seed: int,
        eos: int | None = None,
        shuffle: bool = True,
    ) -> None:
        self._files = [file for file in files if len(file.ids)]
        self._ends = list(accumulate(len(file.ids) for file in self._files))
        self._seq_len, self._vocab_size = seq_len, vocab_size
        self._seed, self._eos, self._shuffle = seed, eos, shuffle
        self._total = self._ends[-1] if self._ends else 0
        if self._total < seq_len:
            raise RequestError(
                f"{files[0].name} and {len(files) - 1} more files: {self._total} tokens in all, fewer "
                f"than one sequence of {seq_len}"
            )

    @property
    def length(self) -> int:
        """Sequences of an epoch."""
        return self._total // self._seq_len

    def sample(self, number: int) -> Sample:
        """Sequence ``number``, counted through all epochs."""
        epoch, place = divmod(number, self.length)
        if self._shuffle:
            place = permuted(place, self.length, self._seed, epoch)
        return self._cut(place * self._seq_len)

    def _cut(self, low: int) -> Sample:
        pieces = []
        at, high = low, low + self._seq_len + 1
        while at < min(high, self._total):
            number = bisect_right(self._ends, at)
            end = min(high, self._ends[number])
            base = self._ends[number] - len(self._files[number].ids)
            pieces.append(self._piece(self._files[number], at - base, end - base))
            at = end
        if at < high:
            pieces.append(_END)
        return packed(
            torch.cat([piece.tokens for piece in pieces]),
            torch.cat([piece.begins for piece in pieces]),
            torch.cat([piece.counted for piece in pieces]),
        )

    def _piece(self, file: TokenFile, low: int, high: int) -> _Piece:
        tokens = torch.from_numpy(file.ids.read(low, high).astype(np.int64))
        self._check(tokens, file.name, low)
        begins = torch.zeros(high - low, dtype=torch.bool)
        begins[0] = low == 0
        if self._eos is not None:
            begins[1:] |= tokens[:-1] == self._eos
        if file.boundaries is not None:
            begins[_within(file.boundaries, low, high)] = True
        counted = torch.ones(high - low, dtype=torch.bool)
        if file.mask is not None:
            counted = torch.from_numpy(file.mask.read(low, high) != 0)
        return _Piece(tokens, begins, counted)

    def _check(self, tokens: torch.Tensor, name: str, low: int) -> None:
        wrong = (tokens < 0) | (tokens >= self._vocab_size)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise RequestError(
                f"{name}: token {low + at} has id {int(tokens[at])}, expected 0 to "
                f"{self._vocab_size - 1}: another tokenizer, or another dtype of the file?"
            )


def open_tokens(config: TokensConfig, *, seq_len: int, vocab_size: int, seed: int) -> Tokens:
    """The sequences of a config.

    Raises:
        UsageError: Boundaries or masks that are not one a file.
        CorruptError: Files that contradict each other or themselves.
        RequestError: Fewer tokens than one sequence has.
    """
    options = config.storage_options
    names = find(config.files, options)
    bounds = _beside(names, config.boundaries, "int64", "boundaries", options)
    masks = _beside(names, config.masks, "uint8", "masks", options)
    files = [
        TokenFile(
            name,
            open_array(name, config.dtype, options),
            None if bound is None else _values(bound),
            mask,
        )
        for name, bound, mask in zip(names, bounds, masks, strict=True)
    ]
    return Tokens(
        files,
        seq_len=seq_len,
        vocab_size=vocab_size,
        seed=seed,
        eos=config.eos,
        shuffle=config.shuffle,
    )


def _beside(
    names: Sequence[str], patterns: Sequence[str], dtype: str, what: str, options: dict[str, Any]
) -> Sequence[Array | None]:
    if not patterns:
        return [None] * len(names)
    found = find(patterns, options)
    if len(found) != len(names):
        raise UsageError(f"data.tokens: {len(names)} files, but {len(found)} {what}")
    return [open_array(name, dtype, options) for name in found]


def _values(array: Array) -> np.ndarray[Any, Any]:
    """For a search: local int64 stays mapped, anything else comes whole, 8 bytes a document."""
    values = array.values if isinstance(array, Held) else array.read(0, len(array))
    return values.astype(np.int64, copy=False)


def _within(boundaries: np.ndarray[Any, Any], low: int, high: int) -> torch.Tensor:
    """Boundaries from ``low`` to below ``high``, as indices from ``low``."""
    first, last = np.searchsorted(boundaries, (low, high))
    return torch.from_numpy(boundaries[first:last] - low)
