"""The combinators that families and users write graphs in: torch's names, on `LazyTensor`."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING

from d9d_ckpt.errors import MappingError
from d9d_ckpt.graph import ops
from d9d_ckpt.graph.node import Node
from d9d_ckpt.tensors import DType, Region, TensorSpec, dtype_from_torch

if TYPE_CHECKING:
    import torch

Index = int | slice | EllipsisType
Reader = Callable[[Node, Region], "torch.Tensor"]


def _unread(node: Node, region: Region) -> "torch.Tensor":
    raise MappingError(
        f"{node.dtype.name} {list(region.shape)} has no checkpoint behind it to read"
    )


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """A tensor that has been described and not read; ops describe another one.

    Attributes:
        node: The expression.
        reader: Who executes it when ``read`` is called.
    """

    node: Node
    reader: Reader = _unread

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, known without reading."""
        return self.node.shape

    @property
    def dtype(self) -> str:
        """The dtype's name in torch: ``bfloat16``."""
        return self.node.dtype.torch or self.node.dtype.name

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape."""
        return self.node.spec

    def __repr__(self) -> str:
        return f"LazyTensor({self.dtype}, {list(self.shape)})"

    def __getitem__(self, key: "Index | tuple[Index, ...]") -> "LazyTensor":
        """Basic indexing as in torch: whole numbers, slices of step 1, and one ellipsis."""
        node, dim = self.node, 0
        for k in _spelled(key if isinstance(key, tuple) else (key,), len(self.shape)):
            if isinstance(k, slice):
                start, stop, step = k.indices(node.shape[dim])
                if step != 1:
                    raise MappingError(f"slice step {step} is not supported; use index_select")
                node = ops.narrow(node, dim, start, max(stop - start, 0))
                dim += 1
            else:
                row = k + node.shape[dim] if k < 0 else k
                node = ops.narrow(node, dim, row, 1)
                node = ops.reshape(node, (*node.shape[:dim], *node.shape[dim + 1 :]))
        return self._with(node)

    def read(self) -> "torch.Tensor":
        """The values, reading only the bytes that they are made of.

        Returns:
            A torch tensor of ``shape`` on the CPU.
        """
        return self.reader(self.node, Region.whole(self.shape))

    def narrow(self, dim: int, start: int, length: int) -> "LazyTensor":
        """``self[start : start + length]`` along ``dim``."""
        return self._with(ops.narrow(self.node, self._dim(dim), start, length))

    def reshape(self, *shape: int | Sequence[int]) -> "LazyTensor":
        """Another shape of as many elements, as numbers or one sequence; one entry may be -1."""
        return self._with(ops.reshape(self.node, _infer(_numbers(shape), self.spec.numel)))

    def permute(self, *order: int | Sequence[int]) -> "LazyTensor":
        """Output dim ``i`` is input dim ``order[i]``; numbers or one sequence."""
        return self._with(ops.permute(self.node, tuple(self._dim(d) for d in _numbers(order))))

    def transpose(self, dim0: int, dim1: int) -> "LazyTensor":
        """Two dims exchanged."""
        order = list(range(len(self.shape)))
        a, b = self._dim(dim0), self._dim(dim1)
        order[a], order[b] = order[b], order[a]
        return self._with(ops.permute(self.node, tuple(order)))

    def index_select(self, dim: int, index: Sequence[int]) -> "LazyTensor":
        """The rows ``index`` of ``dim``, in that order, repeats allowed."""
        return self._with(ops.index_select(self.node, self._dim(dim), tuple(index)))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple["LazyTensor", ...]:
        """Parts of ``sizes`` rows; a number means equal parts, the last one shorter."""
        dim, total = self._dim(dim), self.shape[self._dim(dim)]
        if isinstance(sizes, int):
            if sizes < 1:
                raise MappingError(f"cannot split into parts of {sizes} rows")
            sizes = [min(sizes, total - at) for at in range(0, total, sizes)] or [0]
        if sum(sizes) != total:
            raise MappingError(f"parts of {list(sizes)} do not add up to {total}, dim {dim}")
        out, start = [], 0
        for size in sizes:
            out.append(self._with(ops.narrow(self.node, dim, start, size)))
            start += size
        return tuple(out)

    def unbind(self, dim: int = 0) -> tuple["LazyTensor", ...]:
        """One tensor per row of ``dim``."""
        dim = self._dim(dim)
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        rows = (ops.narrow(self.node, dim, row, 1) for row in range(self.shape[dim]))
        return tuple(self._with(ops.reshape(row, shape)) for row in rows)

    def pad(self, dim: int, before: int, after: int) -> "LazyTensor":
        """Zero rows added along ``dim``."""
        dim = self._dim(dim)
        if before < 0 or after < 0:
            raise MappingError(f"cannot pad by {before} and {after} rows")

        def blank(rows: int) -> Node:
            shape = (*self.shape[:dim], rows, *self.shape[dim + 1 :])
            return ops.zeros(TensorSpec(self.spec.dtype, shape))

        return self._with(ops.cat((blank(before), self.node, blank(after)), dim))

    def to(self, dtype: str | DType) -> "LazyTensor":
        """The values as another floating dtype."""
        wanted = dtype if isinstance(dtype, DType) else dtype_from_torch(str(dtype))
        return self._with(ops.cast(self.node, wanted))

    def _with(self, node: Node) -> "LazyTensor":
        return LazyTensor(node, self.reader)

    def _dim(self, dim: int) -> int:
        rank = len(self.shape)
        if not -rank <= dim < rank:
            raise MappingError(f"dim {dim} of a tensor of {rank} dims")
        return dim % rank


def cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Tensors one after the other along ``dim``; dtypes and other dims must agree."""
    if not tensors:
        raise MappingError("cat of no tensors")
    first = tensors[0]
    return LazyTensor(ops.cat(tuple(t.node for t in tensors), first._dim(dim)), first.reader)  # noqa: SLF001


def stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Tensors of one shape along a new ``dim``."""
    rank = len(tensors[0].shape) + 1 if tensors else 1
    if not -rank <= dim < rank:
        raise MappingError(f"dim {dim} of a tensor of {rank} dims")
    dim %= rank
    return cat([t.reshape(*t.shape[:dim], 1, *t.shape[dim:]) for t in tensors], dim)


def _spelled(keys: tuple[Index, ...], rank: int) -> list[int | slice]:
    """``keys`` with the ellipsis written out.

    Raises:
        MappingError: More keys than dims, or one that is neither number nor slice.
    """
    gap = [at for at, k in enumerate(keys) if k is Ellipsis]
    given = len(keys) - len(gap)
    if len(gap) > 1 or given > rank:
        raise MappingError(f"{given} indices into a tensor of {rank} dims")
    out: list[int | slice] = []
    for k in keys:
        if isinstance(k, EllipsisType):
            out += [slice(None)] * (rank - given)
        elif isinstance(k, slice):
            out.append(k)
        else:
            try:
                out.append(operator.index(k))
            except TypeError:
                raise MappingError(f"cannot index by {k!r}; use numbers, slices or ...") from None
    return out


def _numbers(args: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    """Arguments given one by one or as one sequence, as torch takes them."""
    out: list[int] = []
    for arg in args:
        out.extend([arg] if isinstance(arg, int) else arg)
    return tuple(out)


def _infer(shape: tuple[int, ...], numel: int) -> tuple[int, ...]:
    if shape.count(-1) != 1:
        return shape
    known = 1
    for n in shape:
        known *= n if n != -1 else 1
    if not known or numel % known:
        raise MappingError(f"cannot infer -1 in {list(shape)} for {numel} elements")
    return tuple(numel // known if n == -1 else n for n in shape)
