"""Names of tensors in a checkpoint: no wrapper, rank or position is in them."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from torch import nn

from d9d_ckpt.errors import MappingError

HIDDEN = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts that torch.compile, activation checkpointing and FSDP put into names."""

_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel"})
"""Classes that keep the model as ``module``; by name, so that those of other packages count too."""

Path = tuple[str, ...]
"""Keys from the top of a state down."""


@lru_cache(maxsize=1 << 16)
def named(path: Path) -> str:
    """The name of what stands at ``path``: the model's by FQN alone, all else by the whole path."""
    inner = path[1:] if path[0] == "model" and len(path) > 1 else path
    parts = ".".join(inner).split(".")
    return ".".join([part for part in parts if part not in HIDDEN] or parts)


def parts_of(keys: Iterable[Any]) -> dict[Any, str]:
    """The part of a name that each key of a dict of tensors makes.

    A leading ``module.`` is the wrapper's where all keys have it; where only some have it, it is a
    part of the model.
    """
    parts = {key: str(key) for key in keys}
    bare = {key: named((part,)) for key, part in parts.items()}
    if parts and all(part.startswith("module.") for part in bare.values()):
        return {key: part.removeprefix("module.") for key, part in bare.items()}
    return parts


class ModuleNames:
    """Names of a module's tensors, without the parts of its wrappers."""

    def __init__(self, module: nn.Module) -> None:
        self._inside: dict[str, tuple[Any, str]] = {"": (module, "")}

    def __call__(self, key: str) -> str:
        """The FQN of ``key``, which is the module's own name of a tensor."""
        outer, _, leaf = key.rpartition(".")
        prefix = self._walk(outer)[1]
        return f"{prefix}.{leaf}" if prefix else leaf

    def _walk(self, prefix: str) -> tuple[Any, str]:
        """The submodule at ``prefix``, and its FQN."""
        found = self._inside.get(prefix)
        if found is None:
            outer, _, part = prefix.rpartition(".")
            module, fqn = self._walk(outer)
            # A wrapper that its state_dict leaves out hands on the attributes of what it wraps.
            found = getattr(module, part, None), fqn if _wraps(module, part) else _join(fqn, part)
            self._inside[prefix] = found
        return found


def _wraps(module: object, part: str) -> bool:
    return part in HIDDEN or (
        part == "module" and any(cls.__name__ in _WRAPPERS for cls in type(module).__mro__)
    )


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))


class Claims:
    """Names in use, each with the place in the state that has it."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def add(self, name: str, place: str) -> None:
        """Give ``name`` to ``place``.

        Raises:
            MappingError: Another place has it.
        """
        other = self._places.get(name)
        if other is not None:
            raise MappingError(
                f"{other!r} and {place!r} of the state are both {name!r} in a checkpoint; rename one, or "
                "keep it under another key"
            )
        self._places[name] = place
