"""Text as token ids."""

import importlib
from typing import Any, Protocol

import numpy as np

from d9d_ckpt.errors import CorruptError, UsageError
from d9d_ckpt.storage.opening import normalise, store_for
from d9d_ckpt.storage.store import Options


class Tokenizer(Protocol):
    """Documents as ids.

    Attributes:
        size: Ids there are.
        identity: What decides the ids of a text, as bytes.
    """

    size: int
    identity: bytes

    def encode(self, document: bytes, name: str) -> np.ndarray[Any, Any]:
        """The ids of a document; ``name`` is for messages."""
        ...


class Bytes:
    """Each byte is its own id; 256 begins a document, 257 ends it."""

    size = 258
    identity = b"bytes"
    bos, eos = 256, 257

    def encode(self, document: bytes, name: str) -> np.ndarray[Any, Any]:
        """The bytes between bos and eos."""
        del name
        return np.concatenate(([self.bos], np.frombuffer(document, np.uint8), [self.eos]))


class FromFile:
    """A Hugging Face ``tokenizer.json``.

    Its own template adds nothing: what begins and ends a document is named here.
    """

    def __init__(self, content: bytes, *, bos: str, eos: str, url: str) -> None:
        try:
            library = importlib.import_module("tokenizers")
        except ImportError as error:
            raise UsageError(f"{url}: {error}; install the package tokenizers") from error
        try:
            self._tokenizer: Any = library.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            raise CorruptError(f"{url}: no tokenizer.json: {error}") from error
        self.size = int(self._tokenizer.get_vocab_size())
        self.identity = b"\0".join((content, bos.encode(), eos.encode()))
        self._before, self._after = (self._special(name, url) for name in (bos, eos))

    def encode(self, document: bytes, name: str) -> np.ndarray[Any, Any]:
        """Bos, the ids of the text, eos, each of the two where it was named.

        Raises:
            CorruptError: The document is not UTF-8.
        """
        try:
            text = document.decode()
        except UnicodeDecodeError as error:
            raise CorruptError(f"{name}: not UTF-8 at byte {error.start}") from error
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array([*self._before, *encoded.ids, *self._after], np.int64)

    def _special(self, name: str, url: str) -> list[int]:
        if not name:
            return []
        found = self._tokenizer.token_to_id(name)
        if found is None:
            raise UsageError(f"{url}: has no token {name!r}")
        return [int(found)]


def open_tokenizer(name: str, *, bos: str, eos: str, options: Options) -> Tokenizer:
    """A tokenizer.

    Args:
        name: ``bytes``, or path or URL of a tokenizer.json.
        bos: Token that begins a document; empty for none.
        eos: Token that ends a document; empty for none.
        options: For fsspec.

    Raises:
        UsageError: A token that it does not have, or bytes with tokens of another name.
    """
    if name == "bytes":
        if bos or eos:
            raise UsageError(f"data.text: bytes have their own bos and eos, not {bos or eos!r}")
        return Bytes()
    url = normalise(name)
    store = store_for(url, options)
    return FromFile(store.read(url, 0, store.size(url)), bos=bos, eos=eos, url=url)
