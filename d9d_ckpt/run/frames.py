"""Messages between processes of ours on a pipe or a socket that nobody else has.

A frame is its length in 8 bytes, little endian, and a pickle; none is ever read from storage.
"""

import pickle
from collections.abc import Iterator
from typing import Any

_LENGTH = 8


def pack(content: object) -> bytes:
    """A frame."""
    data = pickle.dumps(content)
    return len(data).to_bytes(_LENGTH, "little") + data


def unpack(received: bytearray) -> Iterator[Any]:
    """The contents of the whole frames at the start of ``received``, which they are taken from."""
    while len(received) >= _LENGTH:
        end = _LENGTH + int.from_bytes(received[:_LENGTH], "little")
        if len(received) < end:
            return
        # Pickled by our own child or parent, never read from storage.
        content = pickle.loads(received[_LENGTH:end])  # noqa: S301
        del received[:end]
        yield content
