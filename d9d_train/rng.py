"""Random numbers that are functions of (seed, stream, index), equal to the bit on every device.

Nothing has state, so a shard, a rank or a resumed run draws its numbers without those before them.
Only integer arithmetic, exact conversions and single multiplications decide a value: no library
function, whose last bit differs between devices or between a vector and its tail.
"""

import hashlib
import math

import torch

_WORD = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of splitmix64."""

_WORDS = 4
_LANES = 4 * _WORDS
_EVEN = 0x0000FFFF0000FFFF
"""Every second 16-bit lane: with gaps between them, lanes are added two at a time."""
_MEAN = _LANES * 0xFFFF // 2
_SCALE = 1 / math.sqrt(_LANES * (0x10000**2 - 1) / 12)


def stream(name: str) -> int:
    """The stream of a name: a hash of it, as an int64, equal in every process and release."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(seed: int, stream: int, index: torch.Tensor) -> torch.Tensor:
    """64 random bits for each index.

    For one seed and stream a permutation of the int64s: equal indices alone give equal bits. Compiled
    code has seed and stream as constants; what changes from call to call goes into ``index``, to which
    the bits of another stream may be added.

    Args:
        seed: Any integer, taken modulo 2**64.
        stream: Any integer, taken modulo 2**64; `stream` makes one of a name.
        index: int64, any shape.

    Returns:
        int64 of the shape of ``index``, all 64 bits random.
    """
    offset, inner = _keys(seed, stream)
    x = index * _signed(_GOLDEN)
    x += offset
    x ^= _shifted(x, 30)
    x *= _signed(_FIRST)
    # Without a second key, the streams would be stretches of one sequence, and might overlap.
    x += inner
    x ^= _shifted(x, 27)
    x *= _signed(_SECOND)
    x ^= _shifted(x, 31)
    return x


def uniform(seed: int, stream: int, index: torch.Tensor) -> torch.Tensor:
    """Float64 in [0, 1) for each index, multiples of 2**-53; arguments as for `bits`."""
    return _shifted(bits(seed, stream, index), 11).to(torch.float64) * 2.0**-53


def normal(seed: int, stream: int, index: torch.Tensor) -> torch.Tensor:
    """Float64 of mean 0 and variance 1 for each index; arguments as for `bits`.

    The sum of sixteen 16-bit uniforms, centred and scaled: a bell that ends at 6.93, with a kurtosis
    of 2.925 for the normal's 3.
    """
    first = index * _WORDS
    pairs = torch.zeros_like(index)
    for word in range(_WORDS):
        x = bits(seed, stream, first + word)
        pairs += x & _EVEN
        pairs += (x >> 16) & _EVEN
    total = (pairs & 0xFFFFFFFF) + (pairs >> 32)
    return (total - _MEAN).to(torch.float64) * _SCALE


def _keys(seed: int, stream: int) -> tuple[int, int]:
    """Two int64s that nothing simple relates to those of a neighbouring seed or stream."""
    offset = _mixed(_mixed(seed) + stream)
    inner = _mixed(_mixed(stream + _GOLDEN) + seed)
    return _signed(offset), _signed(inner)


def _mixed(x: int) -> int:
    """The finisher of splitmix64, in Python integers: constants to a compiler, unlike a digest."""
    x &= _WORD
    x = (x ^ x >> 30) * _FIRST & _WORD
    x = (x ^ x >> 27) * _SECOND & _WORD
    return x ^ x >> 31


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """``x`` shifted to the right with zeros coming in, which int64 only does with a mask."""
    return (x >> count) & (_WORD >> count)


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of its bits."""
    return word - (1 << 64) if word >> 63 else word
