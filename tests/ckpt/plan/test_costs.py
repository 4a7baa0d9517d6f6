"""What a plan says it will cost, against sets of bytes."""

import numpy as np
import pytest
import torch
from helpers.families import checkpoint, forward, small
from helpers.strategies import programs, regions, run, seeded, values_of
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.graph import build, ops
from d9d_ckpt.graph.build import LazyTensor
from d9d_ckpt.graph.mosaic import stored
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.models.family import to_training
from d9d_ckpt.models.registry import family
from d9d_ckpt.plan.explain import amplification, costs
from d9d_ckpt.plan.lower import Request, lower
from d9d_ckpt.plan.plan import FROM, MOVE, SOURCE, TARGET
from d9d_ckpt.plan.requests import held_requests, stored_requests
from d9d_ckpt.plan.schedule import limits
from d9d_ckpt.tensors import BLOCK, Chunk, Coding, Entry, Region, TensorSpec, dtype_from_torch
from make_checkpoint import config_json

LIMIT = limits(64 << 20)


def chunk(name, nbytes, *, checksums):
    count = -(-nbytes // BLOCK)
    return Chunk(Region((0,), (nbytes,)), name, 0, nbytes, xxh3=(0,) * count if checksums else None)


def bytes_of(plan, row):
    """The source bytes of one copy."""
    at = np.array([row[FROM]])
    move = plan.movements[row[MOVE]]
    for d in move.digits:
        at = (at[:, None] + np.arange(d.count) * d.address).reshape(-1)
    return {int(a) + k for a in at for k in range(move.dtype.itemsize)}


def by_hand(plan, world, *, whole_blocks):
    """(bytes read, bytes needed, bytes written) of each rank, from sets."""
    needed = [{} for _ in range(world)]
    written = [0] * world
    for t in plan.targets:
        written[t.rank] += t.nbytes
    for row in plan.rows.tolist():
        if row[SOURCE] >= 0:
            mine = needed[plan.targets[row[TARGET]].rank]
            mine.setdefault(row[SOURCE], set()).update(bytes_of(plan, row))
    out = []
    for rank in range(world):
        read = 0
        for source, wanted in needed[rank].items():
            c = plan.sources[source]
            if whole_blocks and c.xxh3 is not None:
                blocks = {at // BLOCK for at in wanted}
                read += sum(min(BLOCK, c.nbytes - b * BLOCK) for b in blocks)
            else:
                read += len(wanted)
        out.append((read, sum(map(len, needed[rank].values())), written[rank]))
    return out


def told(plan, world, *, whole_blocks):
    found = costs(plan, world, LIMIT, whole_blocks=whole_blocks)
    assert [c.rank for c in found] == list(range(world))
    read, needed = (sum(getattr(c, k) for c in found) for k in ("bytes_read", "bytes_needed"))
    assert amplification(found) == (read / needed if needed else 1.0)
    return [(c.bytes_read, c.bytes_needed, c.bytes_written) for c in found]


@st.composite
def plans(draw):
    checksums = draw(st.booleans())
    requests = []
    for n in range(draw(st.integers(1, 3))):
        program = draw(programs(steps=5))
        shape = run(program, values_of, torch).shape

        def leaf(k, dtype, s, n=n):
            spec = TensorSpec(dtype_from_torch(dtype), tuple(s))
            return LazyTensor(ops.leaf(chunk(f"{n}.{k}", spec.nbytes, checksums=checksums), spec))

        boxes = draw(st.lists(regions(shape), min_size=1, max_size=4))
        ranks = draw(st.lists(st.integers(0, 2), min_size=len(boxes), max_size=len(boxes)))
        requests.append(Request(f"t{n}", run(program, leaf, build).node, tuple(boxes), ranks))
    return lower(requests)


@seeded(300)
@given(plans(), st.booleans())
def test_costs_of_random_plans(plan, whole_blocks):
    assert told(plan, 3, whole_blocks=whole_blocks) == by_hand(plan, 3, whole_blocks=whole_blocks)


def family_plan(requests, *, checksums=False):
    config = small("qwen3_moe", layers=2)
    nodes = {}
    for name, t in checkpoint(config).items():
        spec = TensorSpec(dtype_from_torch("float32"), tuple(t.shape))
        nodes[name] = ops.leaf(chunk(name, spec.nbytes, checksums=checksums), spec)
    of = family(config.family)
    return lower(requests(to_training(of, of.config(config_json(config)), "split", nodes)))


def test_a_conversion_reads_and_writes_every_byte_once():
    config = small("qwen3_moe", layers=2)
    total = 4 * sum(t.numel() for t in checkpoint(config).values())
    assert forward(config, checkpoint(config)).layers == 2
    layout = Topology(pp=2, dp_shard=2, tp=2, ep=2)
    plan = family_plan(lambda m: stored_requests(m, layout))
    found = costs(plan, layout.world, LIMIT, whole_blocks=True)
    assert sum(c.bytes_read for c in found) == total == sum(c.bytes_written for c in found)
    assert amplification(found) == 1.0
    expected = by_hand(plan, layout.world, whole_blocks=True)
    assert told(plan, layout.world, whole_blocks=True) == expected


def test_a_load_reads_replicas_again_and_that_is_not_amplification():
    layout = Topology(dp_replicate=2, tp=2)
    plan = family_plan(lambda m: held_requests(m, layout))
    found = costs(plan, layout.world, LIMIT, whole_blocks=False)
    assert amplification(found) == 1.0
    assert [c.bytes_read for c in found[:2]] == [c.bytes_read for c in found[2:]]
    assert told(plan, 4, whole_blocks=False) == by_hand(plan, 4, whole_blocks=False)


def test_whole_blocks_are_counted_as_read():
    spec = TensorSpec(dtype_from_torch("uint8"), (3 * BLOCK + 10,))
    node = ops.leaf(chunk("x", spec.nbytes, checksums=True), spec)
    boxes = (Region((5,), (1,)), Region((BLOCK - 1,), (2,)), Region((3 * BLOCK + 9,), (1,)))
    plan = lower([Request("t", node, boxes, (0, 1, 2))])
    assert told(plan, 3, whole_blocks=True) == [(BLOCK, 1, 1), (2 * BLOCK, 2, 2), (10, 1, 1)]
    assert told(plan, 3, whole_blocks=False) == [(1, 1, 1), (2, 2, 2), (1, 1, 1)]
    ranks = costs(plan, 3, LIMIT, whole_blocks=True)
    assert amplification(ranks) == (3 * BLOCK + 10) / 4


def test_two_targets_of_one_rank_share_what_they_read():
    spec = TensorSpec(dtype_from_torch("float32"), (10, 10))
    x = LazyTensor(ops.leaf(chunk("x", 400, checksums=False), spec))
    whole = Region.whole((10, 10))
    same = [Request(n, x.node, (whole,), (0,)) for n in "ab"]
    assert told(lower(same), 1, whole_blocks=False) == [(400, 400, 800)]
    apart = [Request(n, x.node, (whole,), (r,)) for r, n in enumerate("ab")]
    assert told(lower(apart), 2, whole_blocks=False) == [(400, 400, 400), (400, 400, 400)]


def test_zeros_cost_nothing_to_read():
    spec = TensorSpec(dtype_from_torch("float32"), (4,))
    x = LazyTensor(ops.leaf(chunk("x", 16, checksums=False), spec)).pad(0, 3, 5)
    plan = lower([Request("t", x.node, (Region.whole((12,)),), (0,))])
    assert told(plan, 1, whole_blocks=False) == [(16, 16, 48)]


@pytest.mark.parametrize(
    ("checksums", "read"),
    [(False, 128 * 384), (True, 256 * 384)],
)
def test_scales_are_read_whole_by_every_rank_that_needs_one(checksums, read):
    weight = TensorSpec(dtype_from_torch("float8_e4m3fn"), (256, 384))
    scale = TensorSpec(dtype_from_torch("float32"), (2, 3))
    values = ops.dequantize(
        ops.leaf(chunk("w", 256 * 384, checksums=checksums), weight),
        ops.leaf(chunk("s", 24, checksums=checksums), scale),
        (128, 128),
    )
    node = ops.cast(values, dtype_from_torch("bfloat16"))
    halves = (Region((0, 0), (128, 384)), Region((128, 0), (128, 384)))
    found = costs(lower([Request("t", node, halves, (0, 2))]), 3, LIMIT, whole_blocks=True)
    each = (read + 24, 128 * 384 + 24, 2 * 128 * 384, 2)
    assert [(c.bytes_read, c.bytes_needed, c.bytes_written, c.requests) for c in found] == [
        each,
        (0, 0, 0, 0),
        each,
    ]


def test_two_targets_of_one_rank_share_their_scales():
    weight = TensorSpec(dtype_from_torch("float8_e4m3fn"), (2, 4))
    scale = ops.leaf(
        chunk("s", 4, checksums=False), TensorSpec(dtype_from_torch("float32"), (1, 1))
    )
    requests = [
        Request(
            name,
            ops.dequantize(ops.leaf(chunk(name, 8, checksums=False), weight), scale, (2, 4)),
            (Region.whole((2, 4)),),
            (0,),
        )
        for name in "ab"
    ]
    assert told(lower(requests), 1, whole_blocks=False) == [(8 + 8 + 4, 8 + 8 + 4, 2 * 4 * 8)]


def test_encoded_chunks_are_read_whole_once_by_every_rank_that_needs_a_part():
    spec = TensorSpec(dtype_from_torch("bfloat16"), (8, 4))
    chunks = tuple(
        Chunk(Region((row, 0), (4, 4)), "f", 100 * row, 20 + row, Coding("zstd", 2, 32))
        for row in (0, 4)
    )
    node = stored("t", Entry(spec, chunks))
    boxes = (Region((0, 0), (2, 4)), Region((2, 0), (1, 4)), Region((3, 0), (5, 4)))
    # Rank 0 takes two parts of the first chunk, rank 1 the rest of it and all of the second.
    found = costs(lower([Request("t", node, boxes, (0, 0, 1))]), 2, LIMIT, whole_blocks=True)
    assert [(c.bytes_read, c.bytes_needed, c.requests) for c in found] == [
        (20, 20, 1),
        (44, 44, 2),
    ]


def test_nothing_costs_nothing():
    assert told(lower([]), 2, whole_blocks=True) == [(0, 0, 0), (0, 0, 0)]
