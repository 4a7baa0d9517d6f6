"""xxh3 over blocks of stored bytes.

The streaming hasher is used throughout: the one-shot call scales badly over threads.
"""

import xxhash

from d9d_ckpt.tensors import BLOCK


def digest(view: bytes | memoryview) -> int:
    """The 64-bit xxh3 of ``view``."""
    hasher = xxhash.xxh3_64()
    hasher.update(view)
    return hasher.intdigest()


def block_digests(view: memoryview) -> list[int]:
    """One digest per ``BLOCK`` bytes of ``view``, the last block shorter."""
    return [digest(view[at : at + BLOCK]) for at in range(0, len(view), BLOCK)]


def to_hex(value: int) -> str:
    """A digest as 16 hex digits."""
    return f"{value:016x}"
