"""What a tensor is, where its bytes lie, and box algebra; no I/O, no torch."""

import hashlib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from d9d_ckpt.errors import CorruptError, RequestError

BLOCK = 1 << 20
"""Bytes under one checksum: small enough that a partial read stays partial."""


MAX_DIMS = 64
"""What numpy and torch can hold."""

_MAX_ELEMENTS = 1 << 60
"""More than any tensor has; sizes beyond it overflow in readers."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: Its name in a safetensors header.
        bits: Width of one element.
        torch: Name of the attribute of ``torch``, empty where torch has none.
        floating: Whether casts may touch it; everything else moves bit for bit.
    """

    name: str
    bits: int
    torch: str
    floating: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of one element; packed types of less than a byte have none.

        Raises:
            RequestError: The type is narrower than a byte.
        """
        if self.bits % 8:
            raise RequestError(
                f"dtype {self.name} packs {self.bits}-bit elements, which cannot be cut or moved "
                "one by one; convert such a checkpoint where it was quantised"
            )
        return self.bits // 8


DTYPES: Mapping[str, DType] = {
    d.name: d
    for d in (
        DType("BOOL", 8, "bool"),
        DType("U8", 8, "uint8"),
        DType("I8", 8, "int8"),
        DType("U16", 16, "uint16"),
        DType("I16", 16, "int16"),
        DType("U32", 32, "uint32"),
        DType("I32", 32, "int32"),
        DType("U64", 64, "uint64"),
        DType("I64", 64, "int64"),
        DType("F4", 4, "float4_e2m1fn_x2"),
        DType("F6_E2M3", 6, ""),
        DType("F6_E3M2", 6, ""),
        DType("F8_E4M3", 8, "float8_e4m3fn"),
        DType("F8_E5M2", 8, "float8_e5m2"),
        DType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
        DType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
        DType("F8_E8M0", 8, "float8_e8m0fnu"),
        DType("F16", 16, "float16", floating=True),
        DType("BF16", 16, "bfloat16", floating=True),
        DType("F32", 32, "float32", floating=True),
        DType("F64", 64, "float64", floating=True),
        DType("C64", 64, "complex64"),
    )
}
"""Every dtype of safetensors 0.8, by name."""

_BY_TORCH = {d.torch: d for d in DTYPES.values() if d.torch}


def dtype_from_torch(name: str) -> DType:
    """The dtype that torch calls ``name`` (``bfloat16``, ``torch.bfloat16``).

    Raises:
        RequestError: No such dtype can be stored.
    """
    found = _BY_TORCH.get(name.removeprefix("torch."))
    if found is None:
        raise RequestError(f"unknown dtype {name!r}; known: {', '.join(sorted(_BY_TORCH))}")
    return found


class TensorSpec(NamedTuple):
    """Dtype and shape."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements; 1 for a scalar."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Stored bytes, packed types rounded up."""
        return -(-prod(self.shape) * self.dtype.bits // 8)


class Region(NamedTuple):
    """A box: ``start`` and ``shape`` per dim, in elements."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Region":
        """The box that is all of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements inside; 0 when any side is empty."""
        return prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index, per dim."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def intersect(self, other: "Region") -> "Region | None":
        """What both share; None when that is nothing."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(
            min(a + n, b + m) - s for a, n, b, m, s in zip(*self, *other, start, strict=True)
        )
        return None if any(n <= 0 for n in shape) else Region(start, shape)

    def narrow(self, dim: int, start: int, length: int) -> "Region":
        """The part ``[start, start + length)`` of this box along ``dim``, counted from its own start."""
        return Region(
            (*self.start[:dim], self.start[dim] + start, *self.start[dim + 1 :]),
            (*self.shape[:dim], length, *self.shape[dim + 1 :]),
        )

    def slabs(self, most: int) -> "Iterator[Region]":
        """Boxes of at most ``most`` elements that tile this one, in row-major order.

        The outermost dim is cut evenly; where not even one index of it fits, the next dim is cut.
        """
        if self.numel <= max(most, 1):
            yield from (self,) if self.numel else ()
            return
        dim = next(d for d, n in enumerate(self.shape) if n > 1)
        total = self.shape[dim]
        fitting = max(1, most * total // self.numel)
        size = -(-total // -(-total // fitting))
        for at in range(0, total, size):
            yield from self.narrow(dim, at, min(size, total - at)).slabs(most)

    def within(self, outer: "Region") -> "Region":
        """This box in the coordinates of ``outer``."""
        return Region(
            tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape
        )


class Coding(NamedTuple):
    """How the bytes of a box are encoded; they decode as one piece.

    Attributes:
        codec: Name of the codec.
        itemsize: Bytes of an element: how many byte planes there are.
        nbytes: Bytes of the box once decoded, ``BLOCK`` at most.
    """

    codec: str
    itemsize: int
    nbytes: int


class Chunk(NamedTuple):
    """Where the bytes of one box of a tensor lie, row-major unless ``strides`` say otherwise.

    Attributes:
        region: The box of the tensor.
        file: URL of the file.
        offset: First byte in the file.
        nbytes: Stored bytes.
        coding: How they are encoded; None where they are the elements.
        xxh3: One digest per ``BLOCK`` of stored bytes, or None where the source has none.
        strides: Elements from one index to the next of each dim, where the box is a view that is not
            row-major; ``nbytes`` then reach from its first to its last element, and none share one.
    """

    region: Region
    file: str
    offset: int
    nbytes: int
    coding: Coding | None = None
    xxh3: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None

    @property
    def extent(self) -> int:
        """Bytes of the box as elements: what addresses in it count."""
        return self.coding.nbytes if self.coding is not None else self.nbytes


class Target(NamedTuple):
    """A box of a tensor that is filled and kept in one piece.

    Attributes:
        name: The tensor.
        spec: Dtype and shape of the whole tensor.
        box: The box.
        rank: The rank of the layout that stores, or holds, it.
        part: Its position among the boxes of the tensor.
        parts: How many boxes the tensor has.
    """

    name: str
    spec: TensorSpec
    box: Region
    rank: int
    part: int
    parts: int

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.box.numel * self.spec.dtype.itemsize


class Entry(NamedTuple):
    """One tensor of a catalogue: its spec and the boxes that make it up."""

    spec: TensorSpec
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Catalogue:
    """Every tensor of a checkpoint by name, metadata only, in file order."""

    entries: Mapping[str, Entry]

    @cached_property
    def mark(self) -> str:
        """A digest of names, specs, places and checksums: another one means other content."""
        mark = hashlib.blake2b(digest_size=16)
        for name, (spec, chunks) in self.entries.items():
            mark.update(f"{name} {spec.dtype.name} {spec.shape}".encode())
            for c in chunks:
                # The hash of a tuple of numbers is the same in every process, that of None is not.
                mark.update(f"{c.region} {c.file} {c.offset} {hash(c.xxh3 or ())}".encode())
        return mark.hexdigest()

    @cached_property
    def nbytes(self) -> int:
        """Stored bytes of all chunks."""
        return sum(c.nbytes for e in self.entries.values() for c in e.chunks)


def spec_of(name: str, dtype: object, shape: object, where: str) -> TensorSpec:
    """A spec from untrusted metadata.

    Raises:
        CorruptError: Unknown dtype, or a shape that is not a list of whole numbers from 0, or that
            no tensor has: too many dims or elements, or a part of a byte.
    """
    known = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if known is None:
        raise CorruptError(f"{where}: tensor {name!r} has unknown dtype {dtype!r}")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise CorruptError(f"{where}: tensor {name!r} has no valid shape: {shape!r}")
    if len(shape) > MAX_DIMS:
        raise CorruptError(f"{where}: tensor {name!r} has {len(shape)} dims, at most {MAX_DIMS}")
    spec, numel = TensorSpec(known, tuple(shape)), prod(shape)
    if (numel or prod(n or 1 for n in shape)) > _MAX_ELEMENTS or numel * known.bits % 8:
        raise CorruptError(
            f"{where}: tensor {name!r}, {known.name}, has no valid shape: {list(shape)}"
        )
    return spec


class _Brief(reprlib.Repr):
    """Short representations that cost little, whatever a file made of the value."""

    def repr_int(self, x: int, level: int) -> str:
        # Beyond 4,300 digits Python refuses to write a number out.
        return repr(x) if x.bit_length() < 256 else f"<number of {x.bit_length()} bits>"


_BRIEF = _Brief()
_BRIEF.maxstring = _BRIEF.maxother = 100
_BRIEF.maxlevel = 3


def brief(value: object) -> str:
    """``repr`` of an untrusted value for a message: cut short, and shared parts not written out."""
    return _BRIEF.repr(value)


def format_bytes(count: float) -> str:
    """``count`` bytes for people: ``4.0 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


def parse_bytes(text: str) -> int:
    """``128MiB``, ``5GB`` or plain bytes as a number.

    Raises:
        RequestError: Not a size.
    """
    digits = text.strip().rstrip("abgikmtABGIKMT").strip()
    unit = text.strip()[len(digits) :].strip().lower()
    try:
        size = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise RequestError(f"{text!r} is not a size; write bytes, 128MiB or 5GB") from None
    if size <= 0:
        raise RequestError(f"{text!r} is not a size above zero")
    return size
