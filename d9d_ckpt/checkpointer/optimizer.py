"""Optimizers: state by slot and parameter name, settings by parameter name, nothing by position."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from d9d_ckpt.checkpointer import values
from d9d_ckpt.checkpointer.giving import Giving
from d9d_ckpt.checkpointer.names import Path, named
from d9d_ckpt.checkpointer.taking import Taking, torch_dtype
from d9d_ckpt.errors import CorruptError, MappingError, UsageError
from d9d_ckpt.tensors import TensorSpec, brief

_LIVE = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Keys of a group that say how steps are computed here, which a checkpoint does not decide."""


class _Param(NamedTuple):
    """A parameter of an optimizer: its name in a checkpoint, and the group that it is in."""

    name: str
    tensor: torch.Tensor
    group: Mapping[str, Any]
    optimizer: Optimizer

    @property
    def state(self) -> Mapping[Any, Any]:
        """Its slots; empty before the first step."""
        found: Mapping[Any, Any] = self.optimizer.state.get(self.tensor) or {}
        return found


@dataclass(frozen=True)
class Optimizers:
    """Optimizers that stand at one place of the state and are one in a checkpoint.

    Attributes:
        path: The place.
        members: The optimizers: several where dense and expert parameters have their own.
        names: Names of the state's parameters, by identity.
    """

    path: Path
    members: Sequence[Optimizer]
    names: Mapping[int, str]

    def give(self, out: Giving) -> dict[str, Any]:
        """Put the slots among the tensors; settings, and slots that are no tensors, as JSON.

        Raises:
            UsageError: A parameter is in no module of the state.
        """
        groups = [
            {"params": [param.name for param in params]} | self._settings(group, params, out)
            for group, params in self._groups()
            if params
        ]
        state: dict[str, dict[str, Any]] = {}
        for _, params in self._groups():
            for param in params:
                for slot, value in param.state.items():
                    name, place = self._slot(slot, param), ".".join((*self.path, str(slot)))
                    if isinstance(value, torch.Tensor):
                        out.tensor(name, _as_sharded(value, param.tensor), f"{place} {param.name}")
                    else:
                        json = self._encode(value, str(slot), param, out)
                        state.setdefault(str(slot), {})[param.name] = json
        return {"param_groups": groups} | ({"state": state} if state else {})

    def take(self, json: Any, into: Taking) -> None:
        """Want the slots that were saved, made where the optimizer has none yet; settings by name.

        Parameters without saved state start anew, whatever state they have.

        Raises:
            UsageError: A parameter is in no module of the state.
            MappingError: Parameters of one group had different settings.
        """
        there = values.unpack(json)
        slots = _by_parameter(named(self.path), set(values.tensors_in(there)), into)
        state = there.get("state", {})
        if not there and not slots:
            into.missing.append(".".join(self.path))
            return
        if "param_groups" not in there:
            into.missing.append(".".join((*self.path, "param_groups")))
        for _, params in self._groups():
            for param in params:
                others = {slot: of[param.name] for slot, of in state.items() if param.name in of}
                self._take_state(param, slots.get(param.name, {}), others, into)
        self._take_settings(_groups_of(there, self.path), into)

    def _groups(self) -> Iterator[tuple[dict[str, Any], list[_Param]]]:
        """Every group with its parameters."""
        for member in self.members:
            for number, group in enumerate(member.param_groups):
                yield (
                    group,
                    [_Param(self._name(p, number), p, group, member) for p in group["params"]],
                )

    def _name(self, parameter: torch.Tensor, group: int) -> str:
        name = self.names.get(id(parameter))
        if name is None:
            raise UsageError(
                f"{'.'.join(self.path)}: a parameter of group {group}, {list(parameter.shape)}, is in no "
                "module of the state; put the module that has it there, itself and not its state_dict"
            )
        return name

    def _slot(self, slot: object, param: _Param) -> str:
        return f"{named((*self.path, str(slot)))}.{param.name}"

    def _encode(self, value: object, key: str, param: _Param, out: Giving) -> Any:
        """JSON of a setting or slot; tensors in it are named by ``param`` too."""

        def keep(path: str, tensor: torch.Tensor) -> str:
            return out.tensor(f"{path}.{param.name}", tensor, f"{path} {param.name}")

        return values.encode(value, named((*self.path, key)), keep)

    def _settings(
        self, group: Mapping[str, Any], params: Sequence[_Param], out: Giving
    ) -> dict[str, Any]:
        return {
            key: self._encode(value, key, params[0], out)
            for key, value in group.items()
            if key not in _LIVE
        }

    def _take_state(
        self, param: _Param, slots: Mapping[str, str], others: Mapping[str, Any], into: Taking
    ) -> None:
        live = {str(slot): value for slot, value in param.state.items()}
        if not slots and not others:
            if live or param.tensor.requires_grad:
                into.fresh.append(f"{named(self.path)}.*.{param.name}")
            into.later(lambda: param.optimizer.state.pop(param.tensor, None))
            return
        into.missing += [
            self._slot(slot, param) for slot in live if slot not in slots and slot not in others
        ]
        for slot, name in slots.items():
            self._take_slot(param, slot, name, live.get(slot), into)
        for slot, json in others.items():
            into.rebuild(json, partial(_put, param, slot), device=param.tensor.device)

    def _take_slot(self, param: _Param, slot: str, name: str, live: object, into: Taking) -> None:
        place = f"{'.'.join(self.path)}.{slot} {param.name}"
        if isinstance(live, torch.Tensor):
            into.want(name, _as_sharded(live, param.tensor), place)
            return
        spec = into.saved.specs[into.saved.tied.get(name, name)]
        new = _new_slot(param, slot, spec, _stored_shape(param, into))
        into.want(name, new, place)
        into.later(partial(_put, param, slot, new))

    def _take_settings(self, saved: Mapping[str, dict[str, Any]], into: Taking) -> None:
        for group, params in self._groups():
            known = [param.name for param in params if param.name in saved]
            for name in known[1:]:
                _check_alike(known[0], name, saved)
            # One for all parameters of a saved group, which share the object.
            distinct = {id(saved[name]): name for name in reversed(known)}
            self._put_settings(group, {n: saved[n] for n in reversed(distinct.values())}, into)

    def _put_settings(
        self, group: dict[str, Any], saved: Mapping[str, dict[str, Any]], into: Taking
    ) -> None:
        """Leave the settings for later; tensors among them can be compared only then."""
        found: dict[str, dict[str, Any]] = {}
        for name, json in saved.items():
            into.rebuild(json, partial(found.__setitem__, name))

        def put() -> None:
            for first, name in pairwise(found):
                _check_equal(first, name, found)
            for key, value in next(iter(found.values()), {}).items():
                _set(group, key, value)

        into.later(put)


def _by_parameter(prefix: str, inside: Collection[str], into: Taking) -> dict[str, dict[str, str]]:
    """Names of saved slots, by parameter and slot; tensors ``inside`` values are none."""
    out: dict[str, dict[str, str]] = {}
    for name in (*into.saved.specs, *into.saved.tied):
        if name.startswith(f"{prefix}.") and name not in inside and into.owner(name):
            slot, _, parameter = name[len(prefix) + 1 :].partition(".")
            out.setdefault(parameter, {})[slot] = name
    return out


def _groups_of(json: Mapping[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """Saved settings, as JSON, by parameter; parameters of one group share them."""
    out: dict[str, dict[str, Any]] = {}
    for group in json.get("param_groups", ()):
        settings = {key: value for key, value in group.items() if key not in _LIVE}
        for name in group["params"]:
            if out.setdefault(name, settings) != settings:
                raise CorruptError(
                    f"{'.'.join(path)}: parameter {name!r} is in two groups of the checkpoint, of different "
                    "settings"
                )
    return out


def _put(param: _Param, slot: str, value: object) -> None:
    param.optimizer.state[param.tensor][slot] = value


def _stored_shape(param: _Param, into: Taking) -> tuple[int, ...]:
    """The parameter's shape in the checkpoint, where vocabulary rows are not padded."""
    owner = into.owner(param.name)
    return tuple(param.tensor.shape) if owner is None else into.saved.specs[owner].shape


def _new_slot(param: _Param, slot: str, spec: TensorSpec, stored: tuple[int, ...]) -> torch.Tensor:
    """An empty slot as the optimizer would have made it: like its parameter, or a replica."""
    tensor, dtype = param.tensor.detach(), torch_dtype(spec.dtype)
    if not spec.shape and (slot == "step" or tensor.dim()):
        # torch counts steps on the CPU unless the step itself runs in a kernel or a graph.
        there = param.group.get("capturable") or param.group.get("fused")
        return torch.zeros((), dtype=dtype, device=tensor.device if there else "cpu")
    if spec.shape in (stored, tuple(tensor.shape)):
        return torch.zeros_like(tensor, dtype=dtype)
    local = torch.zeros(spec.shape, dtype=dtype, device=tensor.device)
    if not isinstance(tensor, DTensor):
        return local
    mesh = tensor.device_mesh
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _as_sharded(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A slot of a DTensor's local shape is its shard, though the optimizer keeps it as plain tensor."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not value.dim():
        return value
    local = parameter.to_local().detach()
    if value.shape != local.shape or local.shape == parameter.shape:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _check_alike(first: str, name: str, saved: Mapping[str, dict[str, Any]]) -> None:
    """Compare the settings of two parameters, but for tensors, whose values are not yet there."""
    a, b = saved[first], saved[name]
    if a is b:
        return
    for key in {**a, **b}:
        one, other = (group.get(key) for group in (a, b))
        if one != other and not (list(values.tensors_in(one)) and list(values.tensors_in(other))):
            raise _differ(first, name, key, one, other)


def _check_equal(first: str, name: str, found: Mapping[str, dict[str, Any]]) -> None:
    """Compare settings with the tensors in them."""
    one, other = (
        values.encode(found[n], n, lambda _, tensor: repr(tensor.tolist())) for n in (first, name)
    )
    for key in one:
        if one[key] != other[key]:
            raise _differ(first, name, key, found[first][key], found[name][key])


def _differ(first: str, name: str, key: str, one: object, other: object) -> MappingError:
    return MappingError(
        f"parameters {first!r} and {name!r} are in one group and were saved with different settings: "
        f"{key} {brief(one)} and {brief(other)}; put them into groups of their own"
    )


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Change a setting in place: a tensor stays the one that a graph or a scheduler holds."""
    live = group.get(key)
    if isinstance(live, torch.Tensor):
        live.copy_(torch.as_tensor(value))
    elif isinstance(value, torch.Tensor) and isinstance(live, float | int):
        group[key] = value.item()
    else:
        group[key] = value
