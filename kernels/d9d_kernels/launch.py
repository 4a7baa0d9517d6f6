"""How each kernel is cut into programs: static tables by shape.

No autotuning: a table gives the same bits in every run, needs no warm-up, and works on CPU. The
entries are the fastest of a sweep on one H200 (tools/bench_kernels.py prints the shares that
they reach).
"""

from typing import NamedTuple

from d9d_kernels.lang import power_of_2


class Tile(NamedTuple):
    """One program's tile.

    Attributes:
        rows: rows (of tokens, heads or choices) at once.
        block: channels at once, a power of two.
        warps: warps of 32 threads.
        waves: persistent programs per multiprocessor; 0 where the grid covers the data.
        stages: tiles in flight of a persistent program; 1: the compiler's own order.
    """

    rows: int
    block: int
    warps: int
    waves: int = 0
    stages: int = 1


def norm_forward(dim: int) -> Tile:
    block = power_of_2(dim)
    if block <= 1024:
        return Tile(rows=1024 // block, block=block, warps=1)
    return Tile(rows=1, block=block, warps=min(block // 512, 8) if block <= 8192 else block // 1024)


def norm_backward(dim: int) -> Tile:
    # One program per multiprocessor, which keeps three tiles of 8192 channels in flight: 90 to 94%
    # of the copy rate, where programs that hide latency by their number reach 76 to 89%.
    block = power_of_2(dim)
    if block > 8192:
        return Tile(rows=1, block=block, warps=block // 1024, waves=1)
    warps = 4 if 512 < block < 8192 else 8
    return Tile(rows=8192 // block, block=block, warps=warps, waves=1, stages=3)


def cross_entropy() -> tuple[int, int, int]:
    """Lanes, elements of each lane per step, and warps of a program that owns a row of logits."""
    return 4096, 4, 16


def swiglu(ffn: int, *, whole_rows: bool = False) -> Tile:
    """`whole_rows`: a program goes through its rows to their end, to sum over them."""
    if ffn < 1024:
        block = power_of_2(ffn)
        return Tile(rows=1024 // block, block=block, warps=4)
    # The largest power of two that divides the channels leaves no lane idle.
    block = min(max(ffn & -ffn, 1024), 2048 if whole_rows else 4096)
    return Tile(rows=1, block=block, warps=min(block // 256, 8))


def rope(dim: int) -> Tile:
    return Tile(rows=max(1, 1024 // power_of_2(dim)), block=dim, warps=1)


def qk_norm_rope_forward(dim: int) -> Tile:
    return Tile(rows=max(1, 4096 // power_of_2(dim)), block=dim, warps=4)


def qk_norm_rope_backward(dim: int, *, pairs: bool) -> Tile:
    rows = max(1, 2048 // power_of_2(dim))
    if pairs:
        return Tile(rows=rows, block=dim, warps=1, waves=8, stages=2)
    return Tile(rows=rows, block=dim, warps=2, waves=4, stages=3)


def moe_spread(dim: int) -> Tile:
    block = min(power_of_2(dim), 2048)
    return Tile(rows=1, block=block, warps=max(1, block // 512))


def moe_gather(dim: int) -> Tile:
    block = min(power_of_2(dim), 1024)
    return Tile(rows=1, block=block, warps=max(1, block // 256))


def stochastic() -> tuple[int, int]:
    """Groups of eight elements, and warps of a program: a thread has one group."""
    return 128, 4


def squares() -> tuple[int, int]:
    """Elements and warps of a program that sums squares."""
    return 32768, 16
