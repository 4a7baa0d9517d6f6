"""Plans carried out in memory: random graphs against eager torch, each byte once, blocks read once.

Blocks and buffers are shrunk so that tensors of a few hundred bytes go through every path that large
ones take; a few tensors of megabytes do the same at the real sizes.
"""

from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.evaluate import box
from helpers.strategies import programs, regions, run, seeded, values_of
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.codecs import checksum
from d9d_ckpt.codecs.zstd import Zstd
from d9d_ckpt.errors import CorruptError, ResourceError
from d9d_ckpt.graph import build, ops
from d9d_ckpt.graph.build import LazyTensor
from d9d_ckpt.graph.mosaic import stored as stored_as
from d9d_ckpt.plan import assign, lower, schedule
from d9d_ckpt.plan.assign import Span, Unit, units
from d9d_ckpt.plan.schedule import limits, tasks
from d9d_ckpt.run import stream
from d9d_ckpt.run.stream import Streamer
from d9d_ckpt.tensors import BLOCK, Chunk, Coding, Entry, Region, TensorSpec, dtype_from_torch

TINY = 64
"""Bytes of a shrunk block."""


def shrunk():
    """Blocks of 64 bytes, and every threshold in proportion."""
    stack = ExitStack()
    for module in (assign, schedule, stream, checksum):
        stack.enter_context(mock.patch.object(module, "BLOCK", TINY))
    for module, name, value in (
        (schedule, "_LARGEST_HULL", 32 * TINY),
        (schedule, "_USUAL_HULL", 8 * TINY),
        (schedule, "_STRAIGHT_BYTES", 48),
        (schedule, "_STRAIGHT_RUN", 12),
        (schedule, "_SWEEP", 4 * TINY),
        (schedule, "_SWEPT_GAP", 24),
        (schedule, "_MOST_KEPT", 3),
        (schedule, "_ENCODED", 2 * TINY),
        (assign, "SHORT", 32),
        (assign, "_UNIT", 16 * TINY),
    ):
        stack.enter_context(mock.patch.object(module, name, value))
    return stack


class Sources:
    """Chunks in files of one dict; which bytes were read, and from where."""

    def __init__(self, *, checksums, block, encoded=False):
        self.files: dict[str, bytearray] = {}
        self.reads: list[tuple[str, int, int]] = []
        self._checksums, self._block, self._encoded = checksums, block, encoded

    def add(self, tensor):
        """``tensor`` as a lazy one over its bytes, which lie at an odd place of a file."""
        if self._encoded:
            return self._add_encoded(tensor)
        raw = bits(tensor).tobytes()
        number = len(self.files)
        pad = 8 + number * 8
        url = f"file{number}"
        self.files[url] = bytearray(b"\xaa" * pad + raw + b"\xbb" * 5)
        xxh3 = None
        if self._checksums:
            xxh3 = tuple(
                checksum.digest(raw[at : at + self._block])
                for at in range(0, len(raw), self._block)
            )
        spec = TensorSpec(dtype_from_torch(str(tensor.dtype)), tuple(tensor.shape))
        chunk = Chunk(Region.whole(spec.shape), url, pad, len(raw), xxh3=xxh3)
        return LazyTensor(ops.leaf(chunk, spec))

    def _add_encoded(self, tensor):
        """In pieces of at most a block, encoded, every second one in the same file."""
        spec = TensorSpec(dtype_from_torch(str(tensor.dtype)), tuple(tensor.shape))
        itemsize, chunks = spec.dtype.itemsize, []
        first = len(self.files)
        for k, region in enumerate(Region.whole(spec.shape).slabs(self._block // itemsize)):
            raw = bits(box(tensor, region)).tobytes()
            stored = Zstd().encode(memoryview(raw), itemsize)
            url = f"file{first + k % 2}"
            content = self.files.setdefault(url, bytearray(b"\xaa" * 3))
            digests = [
                checksum.digest(stored[at : at + self._block])
                for at in range(0, len(stored), self._block)
            ]
            chunks.append(
                Chunk(
                    region,
                    url,
                    len(content),
                    len(stored),
                    Coding("zstd", itemsize, len(raw)),
                    tuple(digests) if self._checksums else None,
                )
            )
            content += stored
        self.files.setdefault(f"file{len(self.files)}", bytearray())
        return LazyTensor(stored_as("t", Entry(spec, tuple(chunks))))

    def read_into(self, url, offset, views):
        for view in views:
            data = self.files[url][offset : offset + len(view)]
            assert len(data) == len(view), "a read past the end"
            self.reads.append((url, offset, len(view)))
            view[:] = data
            offset += len(view)

    def read_runs(self, url, offsets, nbytes, view):
        for number, offset in enumerate(offsets):
            self.read_into(url, offset, [view[number * nbytes : (number + 1) * nbytes]])


class Written:
    """The targets' bytes, and how often each was written."""

    def __init__(self, plan):
        self.bytes = [np.full(t.nbytes, 0xCC, np.uint8) for t in plan.targets]
        self.counts = [np.zeros(t.nbytes, np.int64) for t in plan.targets]

    def write(self, target, start, view):
        self.bytes[target][start : start + len(view)] = np.frombuffer(view, np.uint8)
        self.counts[target][start : start + len(view)] += 1
        assert start + len(view) <= len(self.bytes[target])


def plan_of(nodes):
    """A plan for (node, boxes) pairs, each a tensor of its own."""
    requests = [
        lower.Request(f"t{n}", node, tuple(boxes), [0] * len(boxes))
        for n, (node, boxes) in enumerate(nodes)
    ]
    return lower.lower(requests)


def execute(plan, sources, limit, work, *, exact=False):
    """All of ``work``; the writer and the streamer."""
    sources.reads.clear()
    written = Written(plan)
    streamer = Streamer(plan, limit, sources, written)
    for unit in work:
        for task in tasks(plan, unit, limit, exact=exact):
            streamer.run(task)
    assert all((c == 1).all() for c in written.counts), "a byte not written exactly once"
    assert streamer.bytes_written == plan.bytes_written
    assert streamer.bytes_read == sum(n for _, _, n in sources.reads)
    return written, streamer


def bits(tensor):
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy()


def check(plan, written, streamer, expected, block):
    """Targets and their digests against the eager results, box by box."""
    wanted = [
        bits(box(t, target.box))
        for target in plan.targets
        for t in [expected[int(target.name[1:])]]
    ]
    for number, (got, want) in enumerate(zip(written.bytes, wanted, strict=True)):
        assert np.array_equal(got, want), plan.targets[number]
        digests = {}
        for first, values in streamer.digests.get(number, []):
            digests |= {first + k: v for k, v in enumerate(values)}
        raw = want.tobytes()
        assert digests == {
            at // block: checksum.digest(raw[at : at + block]) for at in range(0, len(raw), block)
        }


@st.composite
def plans(draw):
    """Up to three random programs over their own leaves, each wanted in a few boxes."""
    found = draw(st.lists(programs(), min_size=1, max_size=3))
    boxes = []
    for program in found:
        shape = run(program, values_of, torch).shape
        boxes.append(draw(st.lists(regions(shape), min_size=1, max_size=3)))
    return found, boxes


def cut(span, parts):
    """A span in up to ``parts`` spans of whole blocks."""
    blocks = -(-(span.high - span.low) // TINY)
    edges = {min(span.low + k * blocks // parts * TINY, span.high) for k in range(parts + 1)}
    return [Span(span.target, a, b) for a, b in pairwise(sorted(edges))] or [span]


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("checksums", [False, True])
def test_random_graphs_equal_eager_torch_whatever_the_memory(checksums, exact, encoded):
    @seeded(150)
    @given(plans(), st.sampled_from((8, 9, 12, 17, 40, 100)), st.integers(1, 3))
    def holds(drawn, blocks, parts):
        found, boxes = drawn
        with shrunk():
            sources = Sources(checksums=checksums, block=TINY, encoded=encoded)

            def leaf(n, dtype, shape):
                return sources.add(values_of(n, dtype, shape))

            nodes = [run(program, leaf, build).node for program in found]
            plan = plan_of([*zip(nodes, boxes, strict=True)])
            work = [Unit((piece,)) for u in units(plan) for s in u.spans for piece in cut(s, parts)]
            limit = limits((blocks + 2 * encoded) * TINY, encoded=encoded)
            written, streamer = execute(plan, sources, limit, work, exact=exact)
            expected = [run(program, values_of, torch) for program in found]
            check(plan, written, streamer, expected, TINY)

    holds()


@pytest.mark.parametrize("exact", [False, True])
def test_an_encoded_source_that_does_not_fit_the_buffers_is_picked_from_chunk_by_chunk(exact):
    with shrunk():
        sources = Sources(checksums=True, block=TINY, encoded=True)
        tensor = values_of(0, "bfloat16", (96, 16))
        plan = plan_of([(sources.add(tensor).permute(1, 0).node, [Region.whole((16, 96))])])
        limit = limits(10 * TINY, encoded=True)
        written, streamer = execute(plan, sources, limit, units(plan), exact=exact)
        check(plan, written, streamer, [tensor.t()], TINY)
    # Each of the 16 columns is a tile, and the buffers do not hold the 48 chunks that it goes through.
    assert streamer.bytes_read == 16 * sum(c.nbytes for c in plan.sources)


def test_every_target_falls_to_exactly_one_unit_or_all_parts_of_one():
    @seeded(200)
    @given(plans())
    def holds(drawn):
        found, boxes = drawn
        with shrunk():
            sources = Sources(checksums=False, block=TINY)
            nodes = [
                run(p, lambda n, d, s: sources.add(values_of(n, d, s)), build).node for p in found
            ]
            plan = plan_of([*zip(nodes, boxes, strict=True)])
            found_spans = sorted(span for u in units(plan) for span in u.spans)
            by_target: dict[int, list[tuple[int, int]]] = {}
            for target, low, high in found_spans:
                by_target.setdefault(target, []).append((low, high))
            assert set(by_target) == set(range(len(plan.targets)))
            for target, edges in by_target.items():
                assert edges[0][0] == 0
                assert edges[-1][1] == plan.targets[target].nbytes
                assert all(a[1] == b[0] and b[0] % TINY == 0 for a, b in pairwise(edges))

    holds()


# -- real sizes --------------------------------------------------------------------------------


def counted(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def halves(xs, lib):
    a, b = xs
    return lib.stack([a, b], 1).reshape(2 * a.shape[0], a.shape[1])


CASES = {
    "copy": ([counted(1500, 700)], lambda xs, _: xs[0]),
    "transpose": ([counted(1300, 700, dtype=torch.bfloat16)], lambda xs, _: xs[0].transpose(0, 1)),
    "wide transpose": ([counted(40, 33_000)], lambda xs, _: xs[0].transpose(0, 1)),
    "pairs": ([counted(600, 700), -counted(600, 700)], halves),
    "columns": ([counted(1000, 1000)], lambda xs, _: xs[0].narrow(1, 333, 334)),
    "cat": (
        [counted(700, 500), counted(1, 500), counted(900, 500)],
        lambda xs, lib: lib.cat(xs, 0),
    ),
    "cat columns": ([counted(700, 500), counted(700, 300)], lambda xs, lib: lib.cat(xs, 1)),
    "cast": (
        [counted(900, 1000)],
        lambda xs, _: xs[0].to("bfloat16" if lazy(xs) else torch.bfloat16),
    ),
    "shuffle": ([counted(64, 9000)], lambda xs, _: pick(xs[0], [*range(63, -1, -1)])),
    "experts": ([counted(200, 300) + n for n in range(8)], lambda xs, lib: lib.stack(xs, 0)),
}


def lazy(xs):
    return isinstance(xs[0], LazyTensor)


def pick(x, rows):
    return x.index_select(0, rows if isinstance(x, LazyTensor) else torch.tensor(rows))


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("memory", [8 << 20, 11 << 20, 64 << 20])
@pytest.mark.parametrize("name", CASES)
def test_real_sizes_equal_eager_torch(name, memory, checksums):
    leaves, make = CASES[name]
    sources = Sources(checksums=checksums, block=BLOCK)
    node = make([sources.add(t) for t in leaves], build).node
    expected = make(leaves, torch)
    rows = expected.shape[0]
    split = Region.whole(expected.shape).narrow(0, 0, rows // 3)
    rest = Region.whole(expected.shape).narrow(0, rows // 3, rows - rows // 3)
    plan = plan_of([(node, [split, rest])])
    written, streamer = execute(plan, sources, limits(memory), units(plan))
    check(plan, written, streamer, [expected], BLOCK)


def blocks_read(sources, plan):
    """How often each block of each source was read, by its first byte."""
    counts: Counter[tuple[str, int]] = Counter()
    for chunk in plan.sources:
        for url, offset, nbytes in sources.reads:
            if url == chunk.file:
                low = offset - chunk.offset
                for block in range(low // BLOCK, -(-(low + nbytes) // BLOCK)):
                    if low <= block * BLOCK < low + nbytes:
                        counts[url, block] += 1
    return counts


@pytest.mark.parametrize("name", CASES)
def test_a_unit_reads_each_block_once(name):
    leaves, make = CASES[name]
    sources = Sources(checksums=True, block=BLOCK)
    node = make([sources.add(t) for t in leaves], build).node
    shape = node.shape
    rows = shape[0] // 3
    boxes = [
        Region.whole(shape).narrow(0, 0, rows),
        Region.whole(shape).narrow(0, rows, shape[0] - rows),
    ]
    plan = plan_of([(node, boxes)])
    limit = limits(256 << 20)
    for unit in units(plan):
        sources.reads.clear()
        written = Written(plan)
        streamer = Streamer(plan, limit, sources, written)
        for task in tasks(plan, unit, limit):
            streamer.run(task)
        repeated = {k: n for k, n in blocks_read(sources, plan).items() if n > 1}
        assert not repeated
        # Whole blocks are read, and none is read in parts.
        assert streamer.bytes_read <= sum(-(-c.nbytes // BLOCK) * BLOCK for c in plan.sources)


@pytest.mark.parametrize("name", CASES)
def test_exact_reads_take_only_wanted_bytes(name):
    leaves, make = CASES[name]
    sources = Sources(checksums=True, block=BLOCK)
    node = make([sources.add(t) for t in leaves], build).node
    region = Region.whole(node.shape).narrow(0, 1, min(node.shape[0] - 1, 5))
    plan = plan_of([(node, [region])])
    written, _ = execute(plan, sources, limits(64 << 20), units(plan), exact=True)
    assert np.array_equal(written.bytes[0], bits(box(make(leaves, torch), region)))
    wanted = sum(int(n) for n in plan.row_bytes)
    assert sum(n for _, _, n in sources.reads) <= wanted / 0.98


def test_d08_damage_in_any_block_stops_a_task():
    tensor = counted(1000, 1000)
    for block in range(4):
        sources = Sources(checksums=True, block=BLOCK)
        node = sources.add(tensor).transpose(0, 1).node
        plan = plan_of([(node, [Region.whole(node.shape)])])
        chunk = plan.sources[0]
        sources.files[chunk.file][chunk.offset + block * BLOCK + 17] ^= 1
        with pytest.raises(CorruptError) as raised:
            execute(plan, sources, limits(64 << 20), units(plan))
        assert f"bytes {chunk.offset + block * BLOCK} to" in str(raised.value)
        assert chunk.file in str(raised.value)


def test_d08_damage_outside_the_wanted_bytes_of_a_block_is_found_by_whole_reads():
    sources = Sources(checksums=True, block=BLOCK)
    node = sources.add(counted(1000, 1000)).narrow(0, 0, 10).node
    plan = plan_of([(node, [Region.whole(node.shape)])])
    sources.files["file0"][plan.sources[0].offset + 900_000] ^= 1
    with pytest.raises(CorruptError):
        execute(plan, sources, limits(64 << 20), units(plan))
    execute(plan, sources, limits(64 << 20), units(plan), exact=True)


@pytest.mark.parametrize("memory", [1, 8 * BLOCK - 1])
def test_u01_memory_that_cannot_do_is_refused_with_both_numbers(memory):
    with pytest.raises(ResourceError, match=r"at least 8\.0 MiB"):
        limits(memory)


def test_u01_buffers_stay_within_the_memory_that_was_given():
    for memory in (8 << 20, 9 << 20, 13 << 20, 64 << 20, 1 << 30, (1 << 34) + 5):
        for threads in (1, 2, 7):
            if memory // threads >= 8 << 20:
                limit = limits(memory, threads)
                assert limit.total * threads <= memory
                assert limit.kept >= 0
                streamer = Streamer(plan_of([]), limit, None, None)
                buffers = [b for b in vars(streamer).values() if isinstance(b, np.ndarray)]
                held = sum(b.nbytes for b in buffers) + (limit.kept + 1) * BLOCK
                assert held * threads <= memory


def test_a_transpose_beyond_the_buffers_is_not_read_element_by_element():
    """40 MB turned in 16 MiB: runs of a few hundred bytes would be hundreds of thousands of requests."""
    sources = Sources(checksums=False, block=BLOCK)
    tensor = counted(20_000, 512)
    node = sources.add(tensor).transpose(0, 1).node
    plan = plan_of([(node, [Region.whole(node.shape)])])
    written, streamer = execute(plan, sources, limits(16 << 20), units(plan))
    check(plan, written, streamer, [tensor.t()], BLOCK)
    assert len(sources.reads) < 10_000


def test_large_targets_are_cut_at_whole_blocks_and_shared_out():
    sources = Sources(checksums=False, block=BLOCK)
    node = sources.add(torch.zeros(3 * (32 << 20) + 5, dtype=torch.uint8)).node
    plan = plan_of([(node, [Region.whole(node.shape)])])
    found = units(plan)
    assert [len(u.spans) for u in found] == [1, 1, 1, 1]
    edges = []
    for unit in found:
        outputs = [o for t in tasks(plan, unit, limits(64 << 20)) for o in t.outputs]
        edges.append((min(o.start for o in outputs), max(o.start + o.nbytes for o in outputs)))
    assert edges[0][0] == 0
    assert edges[-1][1] == plan.bytes_written
    assert all(a[1] == b[0] and b[0] % BLOCK == 0 for a, b in pairwise(edges))


def test_equal_requests_share_their_copies():
    sources = Sources(checksums=False, block=BLOCK)
    nodes = [sources.add(counted(4, 6)).transpose(0, 1).node for _ in range(100)]
    plan = plan_of([(n, [Region.whole(n.shape)]) for n in nodes])
    assert len(plan.movements) == 1
    assert len(plan.rows) == 100
    again = plan_of([(n, [Region.whole(n.shape)]) for n in nodes])
    assert plan.mark == again.mark
    assert plan.mark != plan_of([(n, [Region.whole(n.shape)]) for n in nodes[::-1]][:99]).mark
