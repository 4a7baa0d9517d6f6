"""Nested frozen dataclasses from parsed TOML or JSON, with the key in every refusal."""

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from d9d_ckpt.errors import UsageError
from d9d_ckpt.tensors import brief

T = TypeVar("T")

_UNIONS = (Union, types.UnionType)
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple: "a list",
    dict: "a table",
}


def read(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """A ``cls`` from a table.

    Args:
        cls: A dataclass whose fields are numbers, strings, booleans, tuples, dicts, literals, optional
            ones or unions of these, or dataclasses.
        values: The table.
        where: Its path, for messages; empty for the whole file.

    Raises:
        UsageError: An unknown key (with the nearest known one), a missing one, a value of another type.
    """
    hints = get_type_hints(cls)
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise UsageError(f"{_at(where, key)}: unknown key; {nearest(key, known)}")
    for name, field in known.items():
        if field.default is MISSING and field.default_factory is MISSING and name not in values:
            raise UsageError(f"{_at(where, name)}: missing, and it has no default")
    return cls(**{k: _value(hints[k], v, _at(where, k)) for k, v in values.items()})


def nearest(key: str, known: Iterable[str]) -> str:
    """The known name that is most like ``key``, or all of them when none is."""
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    return f"nearest: {near[0]}" if near else f"known: {', '.join(sorted(known))}"


def _value(kind: Any, value: Any, where: str) -> Any:
    """``value`` as a ``kind``."""
    origin = get_origin(kind)
    if origin in _UNIONS:
        return _any_of(get_args(kind), value, where)
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise _mistyped(_named(kind), value, where)
        return read(kind, value, where)  # type: ignore[arg-type]
    if origin is tuple:
        return _items(kind, value, where)
    if kind is float and _is_float(value):
        return float(value)
    if not _fits(kind, value):
        raise _mistyped(_named(kind), value, where)
    return value


def _fits(kind: Any, value: Any) -> bool:
    """Whether ``value`` is a plain ``kind``; a boolean is no number."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    plain = get_origin(kind) or kind
    return plain is Any or (isinstance(value, plain) and (type(value) is bool) == (plain is bool))


def _is_float(value: Any) -> bool:
    """TOML writes 1 for 1.0, and JSON has no infinity, so that a resolved config says it in words."""
    return type(value) is int or (isinstance(value, str) and value in ("inf", "-inf"))


def _any_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """``value`` as the first of ``kinds`` that takes it; its own refusal where there is but one."""
    if value is None and type(None) in kinds:
        return None
    real = [kind for kind in kinds if kind is not type(None)]
    if len(real) == 1:
        return _value(real[0], value, where)
    for kind in real:
        if _fits(kind, value):
            return value
    raise _mistyped(" or ".join(map(_named, real)), value, where)


def _items(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    """A tuple, of any length for ``tuple[T, ...]``."""
    if not isinstance(value, list | tuple):
        raise _mistyped(_named(kind), value, where)
    inner = get_args(kind)
    if inner[1:] == (Ellipsis,):
        inner = inner[:1] * len(value)
    if len(inner) != len(value):
        raise UsageError(f"{where}: expected {len(inner)} values, found {len(value)}")
    return tuple(
        _value(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(inner, value, strict=True))
    )


def _mistyped(expected: str, value: Any, where: str) -> UsageError:
    found = "" if value is None else f"{type(value).__name__} "
    return UsageError(f"{where}: expected {expected}, found {found}{brief(value)}")


def _named(kind: Any) -> str:
    """A type as a user of TOML calls it."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    return "a table" if is_dataclass(kind) else _WORDS[get_origin(kind) or kind]


def _at(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
