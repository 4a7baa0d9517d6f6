"""A stored tensor as one node over the boxes that it is stored in."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from d9d_ckpt.errors import CorruptError
from d9d_ckpt.graph import ops
from d9d_ckpt.graph.node import Leaf, Node
from d9d_ckpt.tensors import Chunk, Entry, Region, TensorSpec

_DEEPEST = 64
"""Cuts inside cuts; layouts of ours make two or three."""


class _Tile(NamedTuple):
    """A part of a stored box: where it is in the tensor, and the leaf of the whole box."""

    region: Region
    leaf: Leaf
    box: Region


def stored(name: str, entry: Entry) -> Node:
    """The tensor ``name`` from its chunks, each a leaf whose source is the chunk.

    Raises:
        CorruptError: The chunks do not cover the tensor, each element once.
    """
    whole = Region.whole(entry.spec.shape)
    if len(entry.chunks) == 1 and entry.chunks[0].region == whole:
        chunk = entry.chunks[0]
        if chunk.strides is not None:
            return _strided(chunk, entry.spec, chunk.strides)
        return ops.leaf(chunk, entry.spec)
    tiles = []
    for chunk in entry.chunks:
        leaf = ops.leaf(chunk, TensorSpec(entry.spec.dtype, chunk.region.shape))
        tiles.append(_Tile(chunk.region, leaf, chunk.region))
    if not whole.numel:
        return ops.zeros(entry.spec)
    if sum(t.region.numel for t in tiles) != whole.numel:
        raise _gap(name, whole)
    return _joined(name, whole, tiles, _DEEPEST)


def _strided(chunk: Chunk, spec: TensorSpec, strides: Sequence[int]) -> Node:
    """A view of the flat leaf of all that it spans, unrolled dim by dim, the widest stride first.

    Rows of one stride begin inside the span and the last one ends with it, short of a whole stride:
    zeros make up for that, and the narrow that follows drops them.
    """
    flat = chunk.extent // spec.dtype.itemsize
    node: Node = ops.leaf(chunk, TensorSpec(spec.dtype, (flat,)))
    order = sorted((d for d, n in enumerate(spec.shape) if n > 1), key=lambda d: -strides[d])
    for d in order:
        *outer, span = node.shape
        rows, stride = spec.shape[d], strides[d]
        short = TensorSpec(spec.dtype, (*outer, rows * stride - span))
        node = ops.cat((node, ops.zeros(short)), len(outer))
        node = ops.reshape(node, (*outer, rows, stride))
        node = ops.narrow(node, len(outer) + 1, 0, span - (rows - 1) * stride)
    node = ops.reshape(node, tuple(spec.shape[d] for d in order))
    back = sorted(range(len(order)), key=order.__getitem__)
    return ops.reshape(ops.permute(node, tuple(back)), spec.shape)


def _gap(name: str, region: Region) -> CorruptError:
    return CorruptError(
        f"tensor {name!r}: its chunks do not cover {region.start} to {region.stop} exactly once"
    )


def _joined(name: str, region: Region, tiles: Sequence[_Tile], levels: int) -> Node:
    """``region`` by nested cats: cut where no tile straddles, else cut the tiles themselves."""
    if not levels:
        raise CorruptError(
            f"tensor {name!r}: its chunks interlock more than {_DEEPEST} levels deep, which no layout "
            "makes"
        )
    if len(tiles) == 1:
        if tiles[0].region != region:
            raise _gap(name, region)
        return _part(tiles[0])
    for dim in range(len(region.shape)):
        bounds = _clean_cuts(tiles, dim, region)
        if len(bounds) > 2:
            return ops.cat(tuple(_bands(name, region, tiles, dim, bounds, levels)), dim)
    dim, at = _first_edge(name, tiles, region)
    split = [part for t in tiles for part in _cut_tile(t, dim, at)]
    return _joined(name, region, split, levels - 1)


def _clean_cuts(tiles: Sequence[_Tile], dim: int, region: Region) -> list[int]:
    """Where ``region`` can be cut along ``dim`` without cutting a tile, ends included."""
    spans = sorted((t.region.start[dim], t.region.start[dim] + t.region.shape[dim]) for t in tiles)
    bounds, reach = [region.start[dim]], region.start[dim]
    for start, stop in spans:
        if start >= reach and start > bounds[-1]:
            bounds.append(start)
        reach = max(reach, stop)
    return [*bounds, region.start[dim] + region.shape[dim]]


def _bands(
    name: str,
    region: Region,
    tiles: Sequence[_Tile],
    dim: int,
    bounds: Sequence[int],
    levels: int,
) -> list[Node]:
    groups: dict[int, list[_Tile]] = {start: [] for start in bounds[:-1]}
    ordered = sorted(tiles, key=lambda t: t.region.start[dim])
    band = 0
    for t in ordered:
        while t.region.start[dim] >= bounds[band + 1]:
            band += 1
        groups[bounds[band]].append(t)
    out = []
    for start, stop in pairwise(bounds):
        part = region.narrow(dim, start - region.start[dim], stop - start)
        if sum(t.region.numel for t in groups[start]) != part.numel:
            raise _gap(name, part)
        out.append(_joined(name, part, groups[start], levels - 1))
    return out


def _first_edge(name: str, tiles: Sequence[_Tile], region: Region) -> tuple[int, int]:
    for dim in range(len(region.shape)):
        edges = sorted({t.region.start[dim] for t in tiles} - {region.start[dim]})
        if edges:
            return dim, edges[0]
    raise _gap(name, region)


def _cut_tile(tile: _Tile, dim: int, at: int) -> list[_Tile]:
    before = at - tile.region.start[dim]
    size = tile.region.shape[dim]
    if not 0 < before < size:
        return [tile]
    return [
        tile._replace(region=tile.region.narrow(dim, 0, before)),
        tile._replace(region=tile.region.narrow(dim, before, size - before)),
    ]


def _part(tile: _Tile) -> Node:
    node: Node = tile.leaf
    inside = tile.region.within(tile.box)
    for dim, (start, length) in enumerate(zip(*inside, strict=True)):
        node = ops.narrow(node, dim, start, length)
    return node
