"""What a state holds beside tensors, as JSON that comes back exactly.

None, booleans, ints, finite floats, strings, lists and dicts with string keys stand for themselves.
Anything else is an object whose only key starts with ``$``:

    {"$float": "nan"}                      nan, inf and -inf
    {"$tuple": [1, 2]}                     a tuple; a torch.Size comes back as one
    {"$dict": [[key, value], ...]}         a dict with other keys, or with one that starts with $
    {"$counter": [[key, count], ...]}      a collections.Counter
    {"$bytes": "AAEC"}                     bytes, base64
    {"$numpy": ["<f4", null, "AACAPw=="]}  a numpy scalar: dtype, shape, base64; arrays have a shape
    {"$tensor": "sched.best"}              the tensor of that name
"""

import base64
import binascii
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from d9d_ckpt.errors import CorruptError, RequestError, UsageError
from d9d_ckpt.tensors import brief

Keep = Callable[[str, torch.Tensor], str]
"""Takes a tensor at a path, and says under which name it is kept."""

_ARRAY = 64 << 10
"""Bytes of an array at most: more belongs into a tensor, not into the manifest."""


def encode(value: object, path: str, keep: Keep | None = None) -> Any:
    """``value`` as JSON.

    Args:
        value: What to keep.
        path: Where it stands in the state, for messages and for the names of tensors.
        keep: Takes the tensors in it; without it a tensor is an error.

    Raises:
        RequestError: Something in it is of a kind that has no JSON form.
        UsageError: It is the state_dict of an optimizer.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return {"$numpy": _numpy(value, path)}
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor) and keep is not None:
        return {"$tensor": keep(path, value)}
    if isinstance(value, list | tuple) and kind in (list, tuple, torch.Size):
        listed = [encode(item, f"{path}.{n}", keep) for n, item in enumerate(value)]
        return listed if kind is list else {"$tuple": listed}
    if isinstance(value, Mapping):
        refuse_optimizer_state(value, path)
        items = {key: encode(item, f"{path}.{key}", keep) for key, item in value.items()}
        return {"$counter": _pairs(items)} if kind is Counter else pack(items)
    raise RequestError(
        f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be kept; give tensors, objects with "
        "state_dict and load_state_dict, numbers, strings, bytes, lists, tuples and dicts"
    )


def decode(value: Any, tensor: Callable[[str], Any] = str) -> Any:
    """What ``encode`` made ``value`` of; ``tensor`` gives the tensor of a name.

    Raises:
        CorruptError: Not what ``encode`` writes.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag, body = _tagged(value)
    if tag is None:
        return {key: decode(item, tensor) for key, item in value.items()}
    try:
        return _untag(tag, body, tensor)
    except (TypeError, ValueError, binascii.Error) as error:
        raise CorruptError(f"values: {brief(value)} is no {tag}: {error}") from None


def pack(items: Mapping[Any, Any]) -> dict[str, Any]:
    """A dict whose values are JSON already, as JSON."""
    if all(type(key) is str and not key.startswith("$") for key in items):
        return dict(items)
    return {"$dict": _pairs(items)}


def unpack(value: Any) -> dict[Any, Any]:
    """The dict that ``pack`` made ``value`` of, its values left as JSON; empty for anything else."""
    if not isinstance(value, dict):
        return {}
    tag, body = _tagged(value)
    if tag is None:
        return value
    return {decode(key): item for key, item in body} if tag == "$dict" else {}


def tensors_in(value: Any) -> Iterator[str]:
    """Names of the tensors that JSON stands for in part."""
    if isinstance(value, list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        tag, body = _tagged(value)
        if tag == "$tensor":
            yield body
        else:
            for item in value.values():
                yield from tensors_in(item)


def refuse_optimizer_state(value: Mapping[Any, Any], path: str) -> None:
    """Stop a state_dict whose entries are numbered: another topology numbers other parameters.

    Raises:
        UsageError: ``value`` is one.
    """
    groups, state = value.get("param_groups"), value.get("state")
    if not (isinstance(groups, list) and isinstance(state, Mapping)):
        return
    numbers = [n for group in groups if isinstance(group, Mapping) for n in group.get("params", ())]
    if any(isinstance(n, int) for n in [*numbers, *state]):
        raise UsageError(
            f"{path}: this is the state_dict of an optimizer, which numbers its parameters; pass the "
            "optimizer itself"
        )


def merge(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of all ranks as one: dicts are joined, parameter groups of equal settings too.

    Args:
        ranks: The values of each rank, as ``state.flatten`` gives them, in rank order.

    Raises:
        RequestError: Ranks give different values at one place.
    """
    merged: dict[str, Any] = {}
    for rank, values in enumerate(ranks):
        _join(merged, values, rank, ())
    return merged


def _join(into: dict[str, Any], values: Mapping[str, Any], rank: int, path: Sequence[str]) -> None:
    for key, value in values.items():
        if key not in into:
            into[key] = _copied(value)
            continue
        here, old = (*path, key), into[key]
        if _are_groups(old) and _are_groups(value):
            _join_groups(old, value)
        elif _is_plain(old) and _is_plain(value):
            _join(old, value, rank, here)
        elif old != value or type(old) is not type(value):
            raise RequestError(
                f"{'.'.join(here)} is {brief(value)} on rank {rank} and {brief(old)} on a rank before; "
                "make it one value of the whole run, or keep each under a key of its own"
            )


def _is_plain(value: object) -> bool:
    """Whether JSON is a dict that stands for itself."""
    return isinstance(value, dict) and _tagged(value)[0] is None


def _are_groups(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in value
    )


def _join_groups(into: list[dict[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Add parameters to the group of their settings: the stages of a pipeline hold different ones."""
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for old in into:
            if {key: value for key, value in old.items() if key != "params"} == settings:
                known = set(old["params"])
                old["params"] += [name for name in group["params"] if name not in known]
                break
        else:
            into.append(_copied(group))


def _copied(value: Any) -> Any:
    """``value`` with containers of its own, so that joining leaves the ranks' as they are."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _pairs(items: Mapping[Any, Any]) -> list[list[Any]]:
    return [[encode(key, "a key"), item] for key, item in items.items()]


def _tagged(value: Mapping[str, Any]) -> tuple[str | None, Any]:
    """The tag and what it stands before; None for a plain dict."""
    if len(value) == 1:
        ((key, body),) = value.items()
        if key.startswith("$"):
            return key, body
    return None, None


def _untag(tag: str, body: Any, tensor: Callable[[str], Any]) -> Any:
    match tag:
        case "$float":
            return float(body)
        case "$tuple":
            return tuple(decode(item, tensor) for item in body)
        case "$dict":
            return {decode(key): decode(item, tensor) for key, item in body}
        case "$counter":
            return Counter({decode(key): decode(item, tensor) for key, item in body})
        case "$bytes":
            return base64.b64decode(body, validate=True)
        case "$numpy":
            return _from_numpy(*body)
        case "$tensor":
            return tensor(body)
    raise CorruptError(f"values: unknown tag {brief(tag)}; a newer version wrote this")


def _numpy(value: "np.ndarray[Any, Any] | np.generic", path: str) -> list[Any]:
    if value.dtype.kind not in "biufcSU" or value.nbytes > _ARRAY:
        raise RequestError(
            f"{path}: a numpy {value.dtype} of {value.nbytes} bytes cannot be kept as a value; numbers "
            f"and strings up to {_ARRAY} bytes can, and torch.from_numpy makes a tensor of it"
        )
    shape = list(value.shape) if isinstance(value, np.ndarray) else None
    return [value.dtype.str, shape, base64.b64encode(value.tobytes()).decode()]


def _from_numpy(dtype: str, shape: Sequence[int] | None, text: str) -> Any:
    kind = np.dtype(dtype)
    if kind.kind not in "biufcSU":
        raise ValueError(f"dtype {brief(dtype)}")
    flat = np.frombuffer(base64.b64decode(text, validate=True), kind).copy()
    return flat[0] if shape is None else flat.reshape(shape)
