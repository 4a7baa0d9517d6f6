"""AdamW on local shards: elementwise, so that no shard needs another."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from d9d_ckpt.errors import MappingError
from d9d_train.optim.shards import shard

MOMENTS = ("exp_avg", "exp_avg_sq")


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices and experts, not to vectors (norms) and biases."""
    return parameter.dim() > 1 and not name.endswith("bias")


@dataclass(frozen=True)
class _Group:
    """Parameters that one fused call updates, all of them with something on this rank."""

    names: tuple[str, ...]
    weight_decay: float


class AdamW:
    """Adam with decoupled weight decay; state is there from the start, so that a checkpoint fills it.

    Moments are in ``promote_types(dtype, float32)``. Parameters narrower than float32 have a float32
    ``master`` beside them, which is updated in their place and then rounded to them.

    Attributes:
        parameters: By FQN.
        slots: Slot name to FQN to tensor, each sharded as its parameter: ``exp_avg``, ``exp_avg_sq``,
            and ``master`` where there are any.
        steps: Steps taken.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        exempt: Collection[str] = (),
    ) -> None:
        """Make state for the parameters, masters of their present values.

        Args:
            parameters: By FQN, on their device; those of a pipeline rank's stages together.
            betas: Decay of the two moments.
            eps: Added to the root of the second moment.
            weight_decay: Times the rate; for whatever `decays`.
            exempt: FQNs that do not decay beside those, such as the embedding's.
        """
        self.parameters = dict(parameters)
        self.slots = {slot: {n: _zeros(p) for n, p in parameters.items()} for slot in MOMENTS}
        narrow = {n: p for n, p in parameters.items() if p.dtype != _wide(p.dtype)}
        if narrow:
            self.slots["master"] = {n: _zeros(p) for n, p in narrow.items()}
        self._betas, self._eps = betas, eps
        self._groups = self._grouped(weight_decay, exempt)
        device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._step = torch.zeros((), dtype=torch.float32, device=device)
        self.steps = 0
        self.take_masters()

    @torch.no_grad()
    def take_masters(self) -> None:
        """Set masters to the values of their parameters, as after loading parameters alone."""
        for name, master in self.slots.get("master", {}).items():
            shard(master).copy_(shard(self.parameters[name]))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter from its ``grad``.

        Args:
            lr: The rate of this step.

        Raises:
            RuntimeError: A parameter has no gradient.
        """
        grads = {name: _grad(name, parameter) for name, parameter in self.parameters.items()}
        self.steps += 1
        self._step += 1
        for group in self._groups:
            self._update(group, grads, lr)

    def state_dict(self) -> dict[str, Any]:
        """The slots, live, and ``step``: what a checkpoint keeps under ``optim``."""
        return {**self.slots, "step": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over values and the number of steps; tensors are filled in place.

        Raises:
            MappingError: A slot or a parameter in it is missing.
        """
        for slot, tensors in self.slots.items():
            for name, tensor in tensors.items():
                saved = state.get(slot, {}).get(name)
                if saved is None:
                    raise MappingError(f"optim.{slot}.{name}: missing in the state to be loaded")
                shard(tensor).copy_(shard(saved))
        self.steps = int(state["step"])
        self._step.fill_(self.steps)

    def _grouped(self, weight_decay: float, exempt: Collection[str]) -> list[_Group]:
        names: dict[tuple[torch.dtype, float], list[str]] = {}
        for name, parameter in self.parameters.items():
            if shard(parameter).numel():
                decaying = decays(name, parameter) and name not in exempt
                key = parameter.dtype, weight_decay if decaying else 0.0
                names.setdefault(key, []).append(name)
        return [_Group(tuple(alike), decay) for (_, decay), alike in names.items()]

    def _update(self, group: _Group, grads: Mapping[str, torch.Tensor], lr: float) -> None:
        values = _shards(self.parameters, group)
        masters = self.slots.get("master", {})
        updated = _shards(masters, group) if group.names[0] in masters else values
        torch._fused_adamw_(
            updated,
            [g.to(u.dtype) for g, u in zip(_shards(grads, group), updated, strict=True)],
            _shards(self.slots["exp_avg"], group),
            _shards(self.slots["exp_avg_sq"], group),
            [],
            [self._step] * len(updated),
            lr=lr,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=group.weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )
        if updated is not values:
            torch._foreach_copy_(values, updated)


def _shards(tensors: Mapping[str, torch.Tensor], group: _Group) -> list[torch.Tensor]:
    return [shard(tensors[name]) for name in group.names]


def _grad(name: str, parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        raise RuntimeError(f"{name}: has no gradient; it took no part in the loss")
    return parameter.grad


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros in the wide dtype, sharded as the parameter."""
    return torch.zeros_like(parameter, dtype=_wide(parameter.dtype), requires_grad=False)
