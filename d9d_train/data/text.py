"""Sequences cut from text files."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from d9d_ckpt.errors import RequestError
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.storage.opening import normalise, store_for
from d9d_train.data.arrays import Held, find
from d9d_train.data.tokenizer import Tokenizer, open_tokenizer
from d9d_train.data.tokens import TokenFile, Tokens


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Text files; each is one document.

    Attributes:
        files: Paths, URLs or patterns of them.
        tokenizer: ``bytes``, or path or URL of a Hugging Face tokenizer.json.
        bos: Token of the tokenizer that begins a document; empty for none.
        eos: Token of the tokenizer that ends a document; empty for none.
        cache: Local directory for token files; empty: none are written.
        shuffle: Whether each epoch has an order of its own.
        storage_options: For fsspec.
    """

    files: tuple[str, ...]
    tokenizer: str = "bytes"
    bos: str = ""
    eos: str = ""
    cache: str = ""
    shuffle: bool = True
    storage_options: dict[str, Any] = field(default_factory=dict)


def open_text(config: TextConfig, *, seq_len: int, vocab_size: int, seed: int) -> Tokens:
    """The sequences of a config; all text is read and tokenised here, by every process.

    The ids stay in memory, 2 or 4 bytes each. With ``cache`` they go to two ``.npy`` files there,
    named by a hash of text and tokenizer, which all processes of a machine map, and which the next
    start finds: it reads the text to hash it, and tokenises nothing.

    Raises:
        RequestError: A tokenizer of more ids than the model has, or less text than one sequence.
        CorruptError: Text that the tokenizer cannot read.
    """
    options = config.storage_options
    tokenizer = open_tokenizer(config.tokenizer, bos=config.bos, eos=config.eos, options=options)
    if tokenizer.size > vocab_size:
        raise RequestError(
            f"data.text: tokenizer {config.tokenizer} has {tokenizer.size} ids, the model a "
            f"vocab_size of {vocab_size}"
        )
    names = find(config.files, options)
    documents = [_content(name, options) for name in names]
    if config.cache:
        ids, starts = _cached(Path(normalise(config.cache)), names, documents, tokenizer)
    else:
        ids, starts = _tokenised(names, documents, tokenizer)
    return Tokens(
        [TokenFile(", ".join(config.files), Held(ids), starts)],
        seq_len=seq_len,
        vocab_size=vocab_size,
        seed=seed,
        shuffle=config.shuffle,
    )


_Ints = np.ndarray[Any, Any]


def _content(url: str, options: dict[str, Any]) -> bytes:
    store = store_for(url, options)
    try:
        return store.read(url, 0, store.size(url))
    finally:
        store.close()


def _tokenised(
    names: Sequence[str], documents: Sequence[bytes], tokenizer: Tokenizer
) -> tuple[_Ints, _Ints]:
    """All ids, and where documents start among them."""
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
    ids = [
        tokenizer.encode(document, name).astype(dtype)
        for name, document in zip(names, documents, strict=True)
    ]
    return np.concatenate(ids), np.cumsum([0, *map(len, ids)], dtype=np.int64)


def _cached(
    folder: Path, names: Sequence[str], documents: Sequence[bytes], tokenizer: Tokenizer
) -> tuple[_Ints, _Ints]:
    """The same, mapped from files that are made if they are not there."""
    key = _key(documents, tokenizer)
    paths = [folder / f"{key}.{what}.npy" for what in ("tokens", "boundaries")]
    if not all(path.exists() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        for path, values in zip(paths, _tokenised(names, documents, tokenizer), strict=True):
            _publish(path, values)
    ids, starts = (np.load(path, mmap_mode="r") for path in paths)
    return ids, starts


def _key(documents: Sequence[bytes], tokenizer: Tokenizer) -> str:
    hasher = xxhash.xxh3_128()
    for content in (tokenizer.identity, *documents):
        hasher.update(len(content).to_bytes(8, "little"))
        hasher.update(content)
    return hasher.hexdigest()


def _publish(path: Path, values: _Ints) -> None:
    """A file that is whole as soon as it has its name; other processes may be making the same one."""
    content = io.BytesIO()
    np.save(content, values)
    store = LocalStore()
    store.claim(str(path), content.getvalue())
    store.close()
