"""The pickles of torch.save, read by a stack machine that builds records and runs nothing.

A pickle is a program: it names callables and calls them. Here only the few names that a dict of
tensors needs are known, each stands for a record of ours, and any other is refused. There is no
recursion, and what a pickle can make us hold is counted as it is made, and bounded.
"""

import struct
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

from d9d_ckpt.errors import CorruptError, SourceError
from d9d_ckpt.tensors import DTYPES

MAX_PICKLE = 64 << 20
"""Bytes: of tensors alone some 10 MiB are enough; whatever else was saved may lie among them."""

_MAX_HELD = 160 << 20
"""Bytes of objects of one pickle, as they are counted here: some 60,000 tensors of 2,700 bytes with
their names, their records and the pickle's own memo. Uncounted, a file of 54 MiB held 5.6 million
names of one tensor, which cost 4 GiB."""

_HELD_AT_ONCE, _HELD_PER_BYTE = 16 << 20, 64
"""What a pickle may make us hold before, and for each of, its bytes; tensors take 20 (protocol 2) to
33 (protocol 4)."""

_LIST_ITEM, _DICT_ITEM, _TENSOR = 16, 112, 640
"""Bytes of an item in its container while that grows; of the records of a tensor that has a name."""

_LONGEST = 1 << 16
"""Bytes of a string that is kept: no name of a tensor is longer."""

_MAX_STACK = 1 << 20
_MAX_DEPTH = 1000
_MAX_NAME = 256

_STORAGES: Mapping[str, tuple[str, int]] = {
    "torch.BoolStorage": ("bool", 1),
    "torch.ByteStorage": ("uint8", 1),
    "torch.CharStorage": ("int8", 1),
    "torch.ShortStorage": ("int16", 2),
    "torch.IntStorage": ("int32", 4),
    "torch.LongStorage": ("int64", 8),
    "torch.HalfStorage": ("float16", 2),
    "torch.BFloat16Storage": ("bfloat16", 2),
    "torch.FloatStorage": ("float32", 4),
    "torch.DoubleStorage": ("float64", 8),
    "torch.ComplexFloatStorage": ("complex64", 8),
    "torch.ComplexDoubleStorage": ("complex128", 16),
    "torch.UntypedStorage": ("uint8", 1),
    "torch.storage.UntypedStorage": ("uint8", 1),
}
"""Torch's name of the dtype and its bytes, by storage class."""

_DTYPES = {f"torch.{d.torch}" for d in DTYPES.values() if d.torch} | {"torch.complex128"}
_CLASSES = {"torch.Tensor", "torch.nn.parameter.Parameter"}


class Global(NamedTuple):
    """A known name, such as ``torch.float32``; it is never looked up."""

    name: str


class Storage(NamedTuple):
    """Bytes beside the pickle.

    Attributes:
        key: Their name in the file.
        dtype: Torch's name of the dtype.
        itemsize: Bytes of an element.
        elements: How many.
    """

    key: str
    dtype: str
    itemsize: int
    elements: int

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return self.itemsize * self.elements


class Strided(NamedTuple):
    """A tensor as it was pickled: a view of a storage, nothing checked; numbers are in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conjugated: bool


class Opaque(NamedTuple):
    """A value that is of no interest."""

    kind: str


class Cursor:
    """Bytes of a pickle in the order in which it is read, a window at a time.

    Attributes:
        where: The file, for messages.
        position: The next byte, counted as ``fetch`` counts.
    """

    _WINDOW = 1 << 18

    def __init__(
        self, fetch: Callable[[int, int], bytes], start: int, stop: int, where: str
    ) -> None:
        """``fetch(offset, nbytes)`` reads; a pickle goes from ``start`` to before ``stop``."""
        self.where = where
        self.position = self.start = start
        self._fetch, self._stop = fetch, stop
        self._window, self._low = b"", start

    def take(self, nbytes: int) -> bytes:
        """The next ``nbytes``."""
        at = self.position - self._low
        if at + nbytes > len(self._window):
            self._refill(nbytes)
            at = 0
        self.position += nbytes
        return self._window[at : at + nbytes]

    def skip(self, nbytes: int) -> None:
        """Leave the next ``nbytes`` unread."""
        self._check(nbytes)
        self.position += nbytes

    def line(self) -> str:
        """A name that ends with the line."""
        out = bytearray()
        while (byte := self.take(1)) != b"\n":
            out += byte
            if len(out) > _MAX_NAME:
                raise self.broken(f"a name of more than {_MAX_NAME} bytes")
        return self.text(bytes(out))

    def text(self, raw: bytes) -> str:
        """``raw`` as UTF-8."""
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.broken("a string that is not UTF-8") from None

    def broken(self, what: str) -> CorruptError:
        """What to raise for ``what``, found here."""
        return CorruptError(
            f"{self.where}: {what} at byte {self.position - self.start} of its pickle; it is damaged "
            "or no file of torch.save"
        )

    def _refill(self, nbytes: int) -> None:
        left = self._check(nbytes)
        size = min(max(nbytes, self._WINDOW), left)
        self._window, self._low = self._fetch(self.position, size), self.position

    def _check(self, nbytes: int) -> int:
        """How many bytes are left, at least ``nbytes``."""
        left = self._stop - self.position
        if nbytes > left:
            raise self.broken(f"{nbytes} more bytes expected where {max(left, 0)} are left,")
        return left


def unpickle(cursor: Cursor, storages: dict[str, Storage]) -> object:
    """The value of the pickle at ``cursor``, which is left behind it.

    Args:
        cursor: Where it is.
        storages: Filled with every storage that is mentioned, by key.

    Returns:
        None, numbers, strings, bytes, tuples, lists and dicts of such, and the records above.

    Raises:
        SourceError: It names a class or function that is not known here.
        CorruptError: It is no valid pickle, or not one that torch.save writes.
    """
    machine = _Machine(cursor, storages)
    while (op := cursor.take(1)) != b".":
        step = _STEPS.get(op)
        if step is None:
            raise cursor.broken(_REFUSED.get(op, f"unknown opcode {op[0]:#04x}"))
        step(machine)
        if len(machine.stack) > _MAX_STACK:
            raise cursor.broken(f"more than {_MAX_STACK} values on the stack")
    return machine.pop()


class _Machine:
    """The state of a pickle that is being read."""

    def __init__(self, cursor: Cursor, storages: dict[str, Storage]) -> None:
        self.cursor = cursor
        self.stack: list[object] = []
        self._storages = storages
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}
        self._held = 0

    def push(self, value: object) -> None:
        self.stack.append(value)

    def push_new(self, value: object) -> None:
        """An object of its own, which costs more memory than it has bytes in the pickle."""
        self._hold(sys.getsizeof(value))
        self.stack.append(value)

    def pop(self) -> object:
        if len(self.stack) <= (self._marks[-1] if self._marks else 0):
            raise self.cursor.broken("a value expected where there is none")
        return self.stack.pop()

    def mark(self) -> None:
        if len(self._marks) == _MAX_DEPTH:
            raise self.cursor.broken(f"values nested more than {_MAX_DEPTH} deep")
        self._marks.append(len(self.stack))

    def pop_mark(self) -> list[object]:
        if not self._marks:
            raise self.cursor.broken("a mark expected where there is none")
        low = self._marks.pop()
        items = self.stack[low:]
        del self.stack[low:]
        return items

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.push_new(tuple(reversed(items)))

    def extend(self, items: list[object]) -> None:
        target = self._top()
        if type(target) is not list:
            raise self.cursor.broken(f"an item for a {kind_of(target)}, not a list,")
        self._hold(_LIST_ITEM * len(items))
        target += items

    def update(self, items: list[object]) -> None:
        target = self._top()
        if type(target) is not dict or len(items) % 2:
            raise self.cursor.broken(f"keys and values for a {kind_of(target)}, not a dict,")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | float | bytes | None):
                raise self.cursor.broken(f"a dict key that is a {kind_of(key)}")
            self._hold(_DICT_ITEM + (_TENSOR if isinstance(value, Strided) else 0))
            target[key] = value

    def put(self, number: int) -> None:
        if number not in self._memo:
            self._hold(_DICT_ITEM + sys.getsizeof(number))
        self._memo[number] = self._top()

    def put_next(self) -> None:
        self.put(len(self._memo))

    def get(self, number: int) -> None:
        if number not in self._memo:
            raise self.cursor.broken(f"a reference to value {number}, which is not there,")
        self.push(self._memo[number])

    def name(self, module: object, name: object) -> None:
        """A class or function: the only place where a pickle reaches out of itself."""
        full = f"{module}.{name}"
        known = _GLOBALS.get(full)
        if known is None:
            raise self.refusal(full)
        self.push(known)

    def name_from_stack(self) -> None:
        name, module = self.pop(), self.pop()
        if type(module) is not str or type(name) is not str:
            raise self.cursor.broken("a class without a name")
        self.name(module, name)

    def refusal(self, name: str) -> SourceError:
        return SourceError(
            f"{self.cursor.where}: its pickle needs {name[:_MAX_NAME]!r}, and no code is run to read "
            "a checkpoint: save the tensors alone, torch.save(model.state_dict(), ...), or as "
            "safetensors"
        )

    def call(self) -> None:
        args, function = self.pop(), self.pop()
        if not isinstance(function, Global) or function.name not in _CALLS:
            raise self.cursor.broken(f"a call of {_named(function)}")
        if type(args) is not tuple or (made := _CALLS[function.name](args)) is None:
            raise self.cursor.broken(f"{function.name} called with what it does not take")
        self.push_new(made)

    def set_state(self) -> None:
        """Attributes of an OrderedDict, such as the ``_metadata`` of a state dict; of no interest."""
        self.pop()
        if type(self._top()) is not dict:
            raise self.cursor.broken(f"state for {_named(self._top())}, which takes none,")

    def storage(self) -> None:
        pid = self.pop()
        match pid:
            case ("storage", Global(name), str(key), str(), int(count), *view) if (
                name in _STORAGES and count >= 0 and view in ([], [None])
            ):
                found = Storage(key, *_STORAGES[name], count)
            case _:
                raise self.cursor.broken("a reference to a storage that cannot be understood")
        if key not in self._storages:
            self._hold(_DICT_ITEM)
        known = self._storages.setdefault(key, found)
        if known.nbytes != found.nbytes:
            raise self.cursor.broken(f"storage {key!r} with two sizes")
        self.push_new(found)

    def _top(self) -> object:
        if len(self.stack) <= (self._marks[-1] if self._marks else 0):
            raise self.cursor.broken("a value expected where there is none")
        return self.stack[-1]

    def _hold(self, nbytes: int) -> None:
        """Count memory that a step takes; nothing is taken back when a value is dropped."""
        self._held += nbytes
        read = self.cursor.position - self.cursor.start
        most = min(_HELD_AT_ONCE + _HELD_PER_BYTE * read, _MAX_HELD)
        if self._held > most:
            raise self.cursor.broken(
                f"objects of {self._held} bytes, at most {most} and more than tensors take,"
            )


def kind_of(value: object) -> str:
    """The kind of a value, for messages."""
    if isinstance(value, Opaque):
        return value.kind
    return "tensor" if isinstance(value, Strided) else type(value).__name__.lower()


def _named(value: object) -> str:
    return repr(value.name) if isinstance(value, Global) else f"a {kind_of(value)}"


def _is_numbers(value: object) -> bool:
    return type(value) is tuple and all(type(n) is int for n in value)


def _view(args: tuple[object, ...], dtype: str | None, metadata: object) -> Strided | None:
    storage, offset, shape, strides = args
    if (
        not isinstance(storage, Storage)
        or type(offset) is not int
        or not (isinstance(shape, tuple) and _is_numbers(shape))
        or not (isinstance(strides, tuple) and _is_numbers(strides))
    ):
        return None
    lazy = isinstance(metadata, dict) and bool(metadata.get("conj") or metadata.get("neg"))
    return Strided(storage, dtype or storage.dtype, offset, shape, strides, lazy)


def _tensor(args: tuple[object, ...]) -> object:
    """Of 4 arguments, or those and requires_grad, hooks and metadata."""
    if len(args) not in (4, 6, 7):
        return None
    return _view(args[:4], None, args[6] if len(args) == 7 else None)


def _tensor_with_dtype(args: tuple[object, ...]) -> object:
    if len(args) not in (7, 8):
        return None
    dtype = args[6]
    if not isinstance(dtype, Global) or dtype.name not in _DTYPES:
        return None
    name = dtype.name.removeprefix("torch.")
    return _view(args[:4], name, args[7] if len(args) == 8 else None)


def _parameter(args: tuple[object, ...]) -> object:
    """The tensor inside, whether or not attributes of a user's own come with it."""
    return args[0] if len(args) in (3, 4) and isinstance(args[0], Strided) else None


def _subclass(args: tuple[object, ...]) -> object:
    """(function, class, arguments, state) of a plain tensor with attributes, or a buffer."""
    match args:
        case (Global(function), Global(made), tuple(inner), _) if made in _CLASSES:
            return _TENSORS[function](inner) if function in _TENSORS else None
    return None


def _ordered(args: tuple[object, ...]) -> object:
    """Empty, and its items follow; Python 2 gives them as one list of pairs."""
    match args:
        case ():
            return {}
        case (list(pairs),) if all(
            type(p) in (list, tuple) and len(p) == 2 and type(p[0]) is str for p in pairs
        ):
            return dict(pairs)
    return None


def _size(args: tuple[object, ...]) -> object:
    return args[0] if len(args) == 1 and _is_numbers(args[0]) else None


def _opaque(kind: str) -> Callable[[tuple[object, ...]], object]:
    return lambda _: Opaque(kind)


_TENSORS: Mapping[str, Callable[[tuple[object, ...]], object]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_with_dtype,
}
_CALLS: Mapping[str, Callable[[tuple[object, ...]], object]] = {
    **_TENSORS,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _subclass,
    "collections.OrderedDict": _ordered,
    "torch.Size": _size,
    "torch.device": _opaque("device"),
    "_codecs.encode": _opaque("bytes"),
}
"""What a call makes of its arguments; None where it does not take them."""

_GLOBALS: Mapping[str, Global] = {
    name: Global(name) for name in {*_STORAGES, *_DTYPES, *_CLASSES, *_CALLS}
}


def _number(m: _Machine, form: str, nbytes: int) -> int:
    return int(struct.unpack(form, m.cursor.take(nbytes))[0])


def _string(m: _Machine, form: str, nbytes: int) -> None:
    length = _number(m, form, nbytes)
    if length > _LONGEST:
        m.cursor.skip(length)
        m.push_new(Opaque("str"))
    else:
        m.push_new(m.cursor.text(m.cursor.take(length)))


def _bytes(m: _Machine, form: str, nbytes: int) -> None:
    length = _number(m, form, nbytes)
    if length > _LONGEST:
        m.cursor.skip(length)
        m.push_new(Opaque("bytes"))
    else:
        m.push_new(m.cursor.take(length))


def _protocol(m: _Machine) -> None:
    if (protocol := m.cursor.take(1)[0]) > 5:
        raise m.cursor.broken(f"pickle protocol {protocol}")


def _long(m: _Machine) -> None:
    m.push_new(int.from_bytes(m.cursor.take(_number(m, "B", 1)), "little", signed=True))


def _frame(m: _Machine) -> None:
    """Says how many bytes belong together, which matters to nobody who reads ahead."""
    m.cursor.take(8)


def _instance(m: _Machine) -> None:
    raise m.refusal(f"{m.cursor.line()}.{m.cursor.line()}")


def _extension(m: _Machine, nbytes: int) -> None:
    raise m.refusal(f"extension class {int.from_bytes(m.cursor.take(nbytes), 'little')}")


_STEPS: Mapping[bytes, Callable[[_Machine], None]] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b"(": _Machine.mark,
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push_new(tuple(m.pop_mark())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"]": lambda m: m.push_new([]),
    b"a": lambda m: m.extend([m.pop()]),
    b"e": lambda m: m.extend(m.pop_mark()),
    b"}": lambda m: m.push_new({}),
    b"s": lambda m: m.update([m.pop(), m.pop()][::-1]),
    b"u": lambda m: m.update(m.pop_mark()),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.cursor.take(1)[0]),
    b"M": lambda m: m.push_new(_number(m, "<H", 2)),
    b"J": lambda m: m.push_new(_number(m, "<i", 4)),
    b"\x8a": _long,
    b"G": lambda m: m.push_new(struct.unpack(">d", m.cursor.take(8))[0]),
    b"X": lambda m: _string(m, "<I", 4),
    b"\x8c": lambda m: _string(m, "B", 1),
    b"\x8d": lambda m: _string(m, "<Q", 8),
    b"T": lambda m: _string(m, "<I", 4),
    b"U": lambda m: _string(m, "B", 1),
    b"B": lambda m: _bytes(m, "<I", 4),
    b"C": lambda m: _bytes(m, "B", 1),
    b"c": lambda m: m.name(m.cursor.line(), m.cursor.line()),
    b"\x93": _Machine.name_from_stack,
    b"q": lambda m: m.put(m.cursor.take(1)[0]),
    b"r": lambda m: m.put(_number(m, "<I", 4)),
    b"\x94": _Machine.put_next,
    b"h": lambda m: m.get(m.cursor.take(1)[0]),
    b"j": lambda m: m.get(_number(m, "<I", 4)),
    b"Q": _Machine.storage,
    b"R": _Machine.call,
    b"b": _Machine.set_state,
    b"i": _instance,
    b"\x82": lambda m: _extension(m, 1),
    b"\x83": lambda m: _extension(m, 2),
    b"\x84": lambda m: _extension(m, 4),
}
"""Protocols 2 to 5, as far as tensors, numbers, strings, lists and dicts go, and what makes objects otherwise."""

_REFUSED: Mapping[bytes, str] = {
    b"o": "an instance of a class",
    b"\x81": "an instance of a class",
    b"\x92": "an instance of a class",
}
