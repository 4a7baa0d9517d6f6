"""Shuffles that are functions: no table, so that a billion samples cost nothing to shuffle or to resume."""

import hashlib

_ROUNDS = 6
"""Four make a Feistel network of good round functions indistinguishable from random; two to spare."""


def permuted(index: int, length: int, seed: int, epoch: int) -> int:
    """Where a shuffle of ``range(length)`` takes ``index``; another shuffle for each (seed, epoch).

    A Feistel network permutes the numbers below the next power of four, fewer than four times
    ``length``; a result beyond ``length`` goes through it again until it is within (cycle walking).
    """
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    key = seed.to_bytes(16, "little", signed=True) + epoch.to_bytes(8, "little")
    while True:
        index = _feistel(index, half, key)
        if index < length:
            return index


def _feistel(index: int, half: int, key: bytes) -> int:
    mask = (1 << half) - 1
    left, right = index >> half, index & mask
    for number in range(_ROUNDS):
        content = bytes([number]) + right.to_bytes(8, "little")
        digest = hashlib.blake2b(content, digest_size=8, key=key).digest()
        left, right = right, left ^ int.from_bytes(digest, "little") & mask
    return left << half | right
