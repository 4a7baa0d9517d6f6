"""`d9d_train.rng`: golden values, any slicing, and the statistics that random numbers must show."""

import math
from itertools import combinations

import pytest
import torch

from d9d_train import rng

MANY = 1 << 18
STREAM = rng.stream("model.norm.weight")


def counter(count: int = MANY, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count)


def reference(seed: int, stream: int, index: int) -> int:
    """`rng.bits` in Python's integers, written a second time."""
    word = (1 << 64) - 1

    def mix(x: int) -> int:
        x &= word
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
        return x ^ (x >> 31)

    x = (index * 0x9E3779B97F4A7C15 + mix(mix(seed) + stream)) & word
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
    x = (x + mix(mix(stream + 0x9E3779B97F4A7C15) + seed)) & word
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
    return x ^ (x >> 31)


def unsigned(x: torch.Tensor) -> list[int]:
    return [n & ((1 << 64) - 1) for n in x.tolist()]


def hexes(x: torch.Tensor) -> list[str]:
    return [n.hex() for n in x.tolist()]


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def test_golden_values() -> None:
    assert STREAM == 4304603226505007698
    assert rng.bits(0, STREAM, counter(2)).tolist() == [267437796802701043, -3593260688690691736]
    assert hexes(rng.uniform(0, STREAM, counter(2))) == [
        "0x1.db10a12ef8100p-7",
        "0x1.9c4458e2126e8p-1",
    ]
    assert hexes(rng.normal(0, STREAM, counter(2))) == [
        "-0x1.91270641ee3dcp-1",
        "0x1.1e19801df9a13p-2",
    ]


@pytest.mark.parametrize("seed", [0, 1, -1, 1 << 63, 987654321987654321])
def test_bits_are_those_of_the_formula_in_whole_numbers(seed: int) -> None:
    index = torch.tensor([0, 1, 2, 1 << 40, -1, (1 << 63) - 1, -(1 << 63)])
    found = unsigned(rng.bits(seed, STREAM, index))
    assert found == [reference(seed, STREAM, n) for n in index.tolist()]


def test_uniform_is_the_upper_53_bits() -> None:
    index = counter(100, -50)
    found = rng.uniform(3, 5, index)
    assert found.dtype == torch.float64
    assert found.tolist() == [(reference(3, 5, n) >> 11) / 2**53 for n in index.tolist()]


def test_normal_is_the_centred_sum_of_sixteen_lanes() -> None:
    index = counter(100, 1 << 45)
    lanes = [
        sum(
            reference(3, 5, 4 * n + word) >> 16 * lane & 0xFFFF
            for word in range(4)
            for lane in range(4)
        )
        for n in index.tolist()
    ]
    scale = 1 / math.sqrt(16 * (65536**2 - 1) / 12)
    assert rng.normal(3, 5, index).tolist() == [(total - 8 * 65535) * scale for total in lanes]


def test_seed_and_stream_count_modulo_two_to_the_64() -> None:
    index = counter(4)
    assert torch.equal(rng.bits(-1, 7, index), rng.bits((1 << 64) - 1, 7 + (1 << 64), index))


@pytest.mark.parametrize("draw", [rng.bits, rng.uniform, rng.normal])
@pytest.mark.parametrize("threads", [1, 2])
def test_any_slicing_gives_the_same_numbers(draw, threads) -> None:
    before = torch.get_num_threads()
    whole = draw(11, STREAM, counter(40_007))
    torch.set_num_threads(threads)
    try:
        for size in (1, 3, 8, 1021):
            for start in (0, 5, 39_000 // size * size - 7 * size):
                start = max(start, 0)
                assert torch.equal(
                    draw(11, STREAM, counter(size, start)), whole[start : start + size]
                )
    finally:
        torch.set_num_threads(before)
    strided = counter(40_007).reshape(-1, 1)[::7]
    assert torch.equal(draw(11, STREAM, strided), whole.reshape(-1, 1)[::7])


def test_streams_of_names_differ_and_stay() -> None:
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(1000)]
    streams = [rng.stream(name) for name in names]
    assert len(set(streams)) == 1000
    assert all(-(1 << 63) <= s < 1 << 63 for s in streams)


def test_equal_indices_alone_give_equal_bits() -> None:
    assert len(rng.bits(0, 0, counter()).unique()) == MANY


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("stream", [0, 1, STREAM])
def test_every_byte_is_uniform(seed: int, stream: int) -> None:
    """Chi-square over 256 cells: mean 255, standard deviation 22.6; seven of them either way."""
    x = rng.bits(seed, stream, counter())
    for byte in range(8):
        counts = ((x >> 8 * byte) & 255).bincount(minlength=256).double()
        assert 255 - 160 < ((counts - MANY / 256) ** 2 / (MANY / 256)).sum() < 255 + 160


def test_pairs_of_neighbours_are_uniform() -> None:
    """Chi-square over 4096 cells of the top six bits of two neighbours; standard deviation 90.5."""
    for other in (
        rng.bits(0, 0, counter(start=1)),
        rng.bits(1, 0, counter()),
        rng.bits(0, 1, counter()),
    ):
        cells = ((rng.bits(0, 0, counter()) >> 58) & 63) * 64 + ((other >> 58) & 63)
        counts = cells.bincount(minlength=4096).double()
        assert abs(((counts - MANY / 4096) ** 2 / (MANY / 4096)).sum() - 4095) < 7 * 90.5


@pytest.mark.parametrize("draw", [rng.uniform, rng.normal])
def test_neighbouring_counters_streams_and_seeds_do_not_correlate(draw) -> None:
    """Of 2**18 independent pairs the correlation is 0.002 wide; the bound is five of that."""
    drawn = [
        draw(0, 0, counter()),
        draw(0, 0, counter(start=1)),
        draw(0, 0, counter(start=2)),
        draw(0, 0, counter(start=4096)),
        draw(0, 0, counter() * 4096),
        draw(0, 1, counter()),
        draw(1, 0, counter()),
        draw(1, 1, counter()),
        draw(0, STREAM, counter()),
        draw(0, STREAM + 1, counter()),
    ]
    for a, b in combinations(drawn, 2):
        assert abs(correlation(a, b)) < 5 / math.sqrt(MANY)


@pytest.mark.parametrize("flip", ["index", "seed", "stream"])
def test_one_flipped_bit_flips_half_of_the_bits(flip: str) -> None:
    for bit in range(0, 63, 3):
        index = counter(4096)
        seed, stream = (0, 1 << bit) if flip == "stream" else (1 << bit, 0)
        there = (
            rng.bits(0, 0, index ^ (1 << bit)) if flip == "index" else rng.bits(seed, stream, index)
        )
        changed = rng.bits(0, 0, index) ^ there
        ones = sum(((changed >> n) & 1).double().mean().item() for n in range(64))
        assert abs(ones - 32) < 0.5, bit


def test_moments_of_the_uniform() -> None:
    x = rng.uniform(5, STREAM, counter())
    assert 0 <= x.min() < 1e-4
    assert 1 - 1e-4 < x.max() < 1
    assert abs(x.mean() - 1 / 2) < 5 * math.sqrt(1 / 12 / MANY)
    assert abs(x.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / MANY)


def test_moments_of_the_normal() -> None:
    """A sum of n uniforms has kurtosis 3 - 6/(5 n), and n = 16 ends at sqrt(48)."""
    x = rng.normal(5, STREAM, counter())
    assert x.dtype == torch.float64
    assert x.abs().max() < math.sqrt(48)
    for power, expected, width in [(1, 0, 1), (2, 1, math.sqrt(2)), (3, 0, math.sqrt(15))]:
        assert abs((x**power).mean() - expected) < 5 * width / math.sqrt(MANY)
    assert abs((x**4).mean() - (3 - 6 / 80)) < 5 * math.sqrt(96 / MANY)
    inside = [(x.abs() < deviations).double().mean().item() for deviations in (1, 2, 3)]
    assert inside == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.005)


def test_a_compiler_sees_plain_tensor_operations() -> None:
    compiled = torch.compile(
        lambda index: rng.normal(3, STREAM, index), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(counter(100)), rng.normal(3, STREAM, counter(100)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_numbers() -> None:
    index = counter(100_003)
    for draw in (rng.bits, rng.uniform, rng.normal):
        assert torch.equal(draw(7, STREAM, index.cuda()).cpu(), draw(7, STREAM, index))
