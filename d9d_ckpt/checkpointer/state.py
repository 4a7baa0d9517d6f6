"""A trainer's state as named tensors and JSON, and a checkpoint taken in again, in place.

A state is a nested dict. At its leaves stand tensors, ``nn.Module``s, optimizers, an ``RNG``, other
objects with ``state_dict`` and ``load_state_dict``, and JSON values. A list of modules, or of
optimizers, is one: the stages of a pipeline rank, the optimizers of dense and expert parameters.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from d9d_ckpt.checkpointer import values
from d9d_ckpt.checkpointer.base import Flat, Held, Saved
from d9d_ckpt.checkpointer.giving import Giving
from d9d_ckpt.checkpointer.names import ModuleNames, Path, named, parts_of
from d9d_ckpt.checkpointer.optimizer import Optimizers
from d9d_ckpt.checkpointer.rng import RNG
from d9d_ckpt.checkpointer.taking import Taking
from d9d_ckpt.errors import RequestError, UsageError


@dataclass(frozen=True)
class Intake:
    """What a state wants of a checkpoint; nothing of the state has been changed yet.

    Attributes:
        tensors: To be filled, under names that the checkpoint has, be they tied ones.
        missing: Names and paths of the state that the checkpoint has not.
        unexpected: Its tensors, and values of its modules, that have no place in the state of this
            rank.
        fresh: Optimizer state that starts anew, as ``optim.*.<fqn>``.
        extra: Its JSON values, but for those of modules, optimizers and other objects of the state.
    """

    tensors: Mapping[str, Held]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    fresh: tuple[str, ...]
    extra: Mapping[str, Any]
    _taking: Taking = field(repr=False)

    def finish(self) -> None:
        """Once the tensors are filled: settings, JSON values and objects in place, generators last.

        Raises:
            MappingError: Names that are one tensor here differ in the checkpoint, or settings do of
                parameters that are one group here.
        """
        self._taking.finish()


def flatten(state: Mapping[str, Any]) -> Flat:
    """``state`` as a checkpoint keeps it; tensors are not copied.

    Raises:
        UsageError: Something stands in it that has to be given in another way.
        RequestError: A tensor or value that cannot be stored, or two that would have one name.
    """
    out = Giving()
    # Without gradients a DTensor hands out its local tensor at once: half of the time of a large state.
    with torch.no_grad():
        json = _tree(state).give(out)
    return Flat(out.tensors, {} if json is _Absent.ABSENT else json, out.tied)


def take_in(state: Mapping[str, Any], saved: Saved) -> Intake:
    """What ``state`` wants of a checkpoint.

    Raises:
        UsageError: Something stands in the state that has to be given in another way.
        RequestError: A tensor that cannot be filled, or two that would have one name; parameters of
            one group that were saved with different settings.
    """
    into = Taking(saved)
    with torch.no_grad():
        tree = _tree(state)
        tree.take(saved.values, into)
    return Intake(
        into.tensors,
        tuple(into.missing),
        (*(name for name in saved.specs if name not in into.used), *tree.unplaced(saved.values)),
        tuple(into.fresh),
        tree.leftover(saved.values),
        into,
    )


def names_of(saved: Saved) -> list[str]:
    """Names by which parts of a checkpoint can be left out: tensors, and paths of values."""
    return [*dict.fromkeys((*saved.specs, *saved.tied, *_paths(saved.values, ())))]


def without(saved: Saved, names: Collection[str]) -> Saved:
    """``saved`` without some of its `names_of`; a value goes with all that is in it."""
    return replace(
        saved,
        specs={name: spec for name, spec in saved.specs.items() if name not in names},
        tied={name: owner for name, owner in saved.tied.items() if name not in names},
        values=_trimmed(saved.values, (), names),
    )


def _paths(json: Any, path: Path) -> Iterator[str]:
    for key, item in values.unpack(json).items():
        yield named((*path, str(key)))
        yield from _paths(item, (*path, str(key)))


def _trimmed(json: Any, path: Path, names: Collection[str]) -> Any:
    items = values.unpack(json)
    if not items:
        return json
    left = {key: (*path, str(key)) for key in items if named((*path, str(key))) not in names}
    return values.pack({key: _trimmed(items[key], here, names) for key, here in left.items()})


class _Absent(Enum):
    """No JSON: what stands there is all tensors, or the checkpoint has nothing."""

    ABSENT = 0


class _Part(Protocol):
    """Something that stands at one place of a state."""

    def give(self, out: Giving) -> Any:
        """Put its tensors among the others; the JSON of all else."""

    def take(self, json: Any, into: Taking) -> None:
        """Want its tensors, and leave the rest for later; ``json`` is what was saved of it."""


@dataclass(frozen=True)
class _Tensor:
    path: Path
    tensor: torch.Tensor
    place: str

    def give(self, out: Giving) -> Any:
        out.tensor(named(self.path), self.tensor, self.place)
        return _Absent.ABSENT

    def take(self, json: Any, into: Taking) -> None:
        into.want(named(self.path), self.tensor, self.place)


@dataclass(frozen=True)
class _Value:
    """A JSON value; ``put`` takes its place in the dict that it stands in."""

    path: Path
    value: Any
    put: Callable[[Any], object]

    def give(self, out: Giving) -> Any:
        return values.encode(self.value, ".".join(self.path))

    def take(self, json: Any, into: Taking) -> None:
        if json is _Absent.ABSENT:
            into.missing.append(".".join(self.path))
        else:
            into.rebuild(json, self.put)


@dataclass(frozen=True)
class _Object:
    """Anything with ``state_dict`` and ``load_state_dict``."""

    path: Path
    thing: Any

    def give(self, out: Giving) -> Any:
        return _encode(self.thing.state_dict(), self.path, out)

    def take(self, json: Any, into: Taking) -> None:
        if json is _Absent.ABSENT:
            into.missing.append(".".join(self.path))
            return
        live: dict[str, torch.Tensor] = {}

        def keep(place: str, tensor: torch.Tensor) -> str:
            live[_name_at(place)] = tensor
            return ""

        values.encode(self.thing.state_dict(), ".".join(self.path), keep)
        into.rebuild(json, self.thing.load_state_dict, live)


@dataclass(frozen=True)
class _Random:
    path: Path
    rng: RNG

    def give(self, out: Giving) -> Any:
        return self.rng.give(self.path, out)

    def take(self, json: Any, into: Taking) -> None:
        self.rng.take(json, self.path, into)


class _Modules:
    """Modules under one prefix: live tensors are filled in place, what else they keep is loaded."""

    def __init__(self, path: Path, modules: Sequence[nn.Module], params: dict[int, str]) -> None:
        self._path = path
        self._entries: list[tuple[nn.Module, str, Path, Any, bool]] = []
        for module in modules:
            self._add(module, params)

    def _add(self, module: nn.Module, params: dict[int, str]) -> None:
        # FSDP puts its shards back before it gives a state_dict: before that, its parameters are whole.
        state = module.state_dict(keep_vars=True)
        names = ModuleNames(module)
        live = {id(t) for t in chain(module.parameters(), module.buffers())}
        for key, value in state.items():
            path = (*self._path, names(key))
            self._entries.append((module, key, path, value, id(value) in live))
        for key, parameter in module.named_parameters(remove_duplicate=False):
            params.setdefault(id(parameter), named((*self._path, names(key))))

    def give(self, out: Giving) -> Any:
        json = {}
        for _, key, path, value, _ in self._entries:
            if isinstance(value, torch.Tensor):
                out.tensor(named(path), value, ".".join((*self._path, key)))
            else:
                json[named(path)] = _encode(value, path, out)
        return values.pack(json) if json else _Absent.ABSENT

    def take(self, json: Any, into: Taking) -> None:
        saved = values.unpack(json)
        rests: dict[nn.Module, dict[str, Any]] = {}
        for module, key, path, value, live in self._entries:
            name = named(path)
            if live:
                into.want(name, value, ".".join((*self._path, key)))
                continue
            put = partial(rests.setdefault(module, {}).__setitem__, key)
            if isinstance(value, torch.Tensor):
                into.rebuild({"$tensor": name}, put, {name: value})
            elif name in saved:
                into.rebuild(saved[name], put)
            else:
                into.missing.append(name)
        for module, rest in rests.items():
            # Extra state, and what hooks of the module have made of its tensors.
            into.later(partial(module.load_state_dict, rest, strict=False))

    def unplaced(self, json: Any) -> Iterator[str]:
        """Values that were saved and that these modules do not keep, extra state above all."""
        here = {named(path) for _, _, path, _, _ in self._entries}
        yield from (name for name in values.unpack(json) if name not in here)


class _Tree:
    """A dict or list of parts. Dicts stay the objects they are; their scalars and lists are replaced."""

    def __init__(self, path: Path, items: Any, parts: Mapping[Any, _Part]) -> None:
        self._path, self._items, self._parts = path, items, parts

    def give(self, out: Giving) -> Any:
        json = {key: part.give(out) for key, part in self._parts.items()}
        kept = {key: value for key, value in json.items() if value is not _Absent.ABSENT}
        if json and not kept:
            return _Absent.ABSENT
        if isinstance(self._items, Mapping):
            return values.pack(kept)
        return [kept.get(n) for n in range(len(self._items))]

    def take(self, json: Any, into: Taking) -> None:
        if isinstance(self._items, Mapping):
            saved = values.unpack(json)
            self._take_new(saved, into)
        else:
            saved = self._numbered(json)
        for key, part in self._parts.items():
            part.take(saved.get(key, _Absent.ABSENT), into)

    def leftover(self, saved: Any) -> dict[Any, Any]:
        """Saved values in plain Python, but for what objects of the state take."""
        out: dict[Any, Any] = {}
        for key, json in values.unpack(saved).items():
            part = self._parts.get(key)
            if isinstance(part, _Tree):
                if isinstance(json, dict):
                    out[key] = part.leftover(json)
            elif part is None or isinstance(part, _Value):
                out[key] = values.decode(json)
        return out

    def unplaced(self, saved: Any) -> Iterator[str]:
        """Values that were saved of modules, and that the modules here do not have."""
        for key, json in values.unpack(saved).items():
            part = self._parts.get(key)
            if isinstance(part, _Tree | _Modules):
                yield from part.unplaced(json)

    def _take_new(self, saved: Mapping[Any, Any], into: Taking) -> None:
        """Values that the saved dict had and this one has not; those of a whole state are ``extra``."""
        for key, json in saved.items():
            if self._path and key not in self._items and not any(values.tensors_in(json)):
                into.later(partial(_put, self._items, self._path, key, values.decode(json)))

    def _numbered(self, json: Any) -> dict[Any, Any]:
        if not isinstance(json, list):
            return {}
        if len(json) != len(self._items):
            raise RequestError(
                f"{'.'.join(self._path)}: a list of {len(self._items)} with tensors, in the checkpoint one "
                f"of {len(json)}; make it as long, or a dict"
            )
        return dict(enumerate(json))


def _tree(state: Mapping[str, Any]) -> _Tree:
    """The parts of a whole state."""
    if not isinstance(state, Mapping):
        raise UsageError(f"a state is a dict of named parts, not a {type(state).__qualname__}")
    return _mapping(state, (), {})


def _mapping(items: Mapping[Any, Any], path: Path, params: dict[int, str]) -> _Tree:
    values.refuse_optimizer_state(items, ".".join(path) or "the state")
    # Values keep their keys, tensors get names.
    names = parts_of(key for key, value in items.items() if _holds_tensors(value))
    parts: dict[Any, _Part] = {}
    for key, value in items.items():
        here = (*path, names.get(key, str(key)))
        put = partial(_put, items, path, key)
        parts[key] = _part(value, here, put, params, ".".join((*path, str(key))))
    return _Tree(path, items, parts)


def _part(
    value: Any, path: Path, put: Callable[[Any], object], params: dict[int, str], place: str
) -> _Part:
    if isinstance(value, torch.Tensor):
        params.setdefault(id(value), named(path))
        return _Tensor(path, value, place)
    if isinstance(value, RNG):
        return _Random(path, value)
    if _all_are(nn.Module, value):
        return _Modules(path, _listed(value), params)
    if _all_are(Optimizer, value):
        return Optimizers(path, _listed(value), params)
    if _is_object(value):
        return _Object(path, value)
    if isinstance(value, Mapping):
        return _mapping(value, path, params)
    if isinstance(value, list | tuple) and _holds_tensors(value):
        return _sequence(value, path, params)
    return _Value(path, value, put)


def _sequence(items: list[Any] | tuple[Any, ...], path: Path, params: dict[int, str]) -> _Tree:
    if isinstance(items, tuple):
        raise UsageError(
            f"{'.'.join(path)}: a tuple with tensors or objects in it cannot be loaded in place; make it a "
            "list or a dict"
        )
    parts: dict[Any, _Part] = {}
    for n, value in enumerate(items):
        here = (*path, str(n))
        put = partial(items.__setitem__, n)
        parts[n] = _part(value, here, put, params, ".".join(here))
    return _Tree(path, items, parts)


def _all_are(kind: type, value: Any) -> bool:
    items = _listed(value)
    return bool(items) and all(isinstance(item, kind) for item in items)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _is_object(value: object) -> bool:
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _holds_tensors(value: object) -> bool:
    """Whether tensors, or objects that may have some, stand in ``value``."""
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor) or _is_object(value)


def _put(items: Mapping[Any, Any], path: Path, key: Any, value: Any) -> None:
    if not isinstance(items, MutableMapping):
        raise UsageError(
            f"{'.'.join(path) or 'the state'}: {key!r} cannot be put into it; give a dict"
        )
    items[key] = value


def _encode(value: Any, path: Path, out: Giving) -> Any:
    def keep(place: str, tensor: torch.Tensor) -> str:
        return out.tensor(_name_at(place), tensor, place)

    return values.encode(value, ".".join(path), keep)


def _name_at(place: str) -> str:
    return named(tuple(place.split(".")))
