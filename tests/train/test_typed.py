"""Dataclasses from tables: types, unknown and missing keys, and what the refusals say."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from d9d_ckpt.errors import UsageError
from d9d_train.typed import read


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 1
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    rate: float = 0.5
    on: bool = False
    mode: Literal["slow", "fast"] = "slow"
    when: int | Literal["auto", "never"] = "auto"
    limit: int | None = None
    pair: tuple[int, float] = (1, 1.0)
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    many: tuple[Inner, ...] = ()
    free: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Outer(count=3)),
        ({"rate": 2}, Outer(count=3, rate=2.0)),
        ({"rate": "inf"}, Outer(count=3, rate=float("inf"))),
        ({"when": 7}, Outer(count=3, when=7)),
        ({"when": "never"}, Outer(count=3, when="never")),
        ({"limit": None}, Outer(count=3)),
        ({"limit": 4}, Outer(count=3, limit=4)),
        ({"pair": [2, 3]}, Outer(count=3, pair=(2, 3.0))),
        ({"inner": {"names": ["a", "b"]}}, Outer(count=3, inner=Inner(names=("a", "b")))),
        ({"maybe": {"size": 2}}, Outer(count=3, maybe=Inner(size=2))),
        ({"many": [{}, {"size": 5}]}, Outer(count=3, many=(Inner(), Inner(size=5)))),
        ({"free": {"x": [1, "y"]}}, Outer(count=3, free={"x": [1, "y"]})),
    ],
)
def test_values_are_taken(values, expected):
    assert read(Outer, {"count": 3, **values}, "") == expected


def test_a_whole_number_for_a_number_becomes_one():
    assert type(read(Outer, {"count": 3, "rate": 2}, "").rate) is float


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuont": 1}, "cuont: unknown key; nearest: count"),
        ({"inner": {"sise": 1}}, "inner.sise: unknown key; nearest: size"),
        ({"inner": {"xyz": 1}}, "inner.xyz: unknown key; known: names, size"),
        ({"many": [{}, {"sice": 1}]}, "many[1].sice: unknown key; nearest: size"),
        ({"count": "3"}, "count: expected a whole number, found str '3'"),
        ({"count": 3.0}, "count: expected a whole number, found float 3.0"),
        ({"count": True}, "count: expected a whole number, found bool True"),
        ({"count": None}, "count: expected a whole number, found None"),
        ({"rate": False}, "rate: expected a number, found bool False"),
        ({"rate": "fast"}, "rate: expected a number, found str 'fast'"),
        ({"on": 1}, "on: expected true or false, found int 1"),
        ({"mode": "quick"}, "mode: expected one of slow, fast, found str 'quick'"),
        (
            {"when": "soon"},
            "when: expected a whole number or one of auto, never, found str 'soon'",
        ),
        ({"limit": "x"}, "limit: expected a whole number, found str 'x'"),
        ({"pair": 1}, "pair: expected a list, found int 1"),
        ({"pair": [1]}, "pair: expected 2 values, found 1"),
        ({"pair": [1, "x"]}, "pair[1]: expected a number, found str 'x'"),
        ({"inner": 3}, "inner: expected a table, found int 3"),
        ({"inner": {"names": "a"}}, "inner.names: expected a list, found str 'a'"),
        ({"free": 3}, "free: expected a table, found int 3"),
    ],
)
def test_refusals_name_key_expected_and_found(values, message):
    with pytest.raises(UsageError) as refused:
        read(Outer, {"count": 3, **values}, "")
    assert str(refused.value) == message


def test_a_missing_key_is_named_with_its_section():
    with pytest.raises(UsageError, match=r"^part\.count: missing, and it has no default$"):
        read(Outer, {}, "part")
