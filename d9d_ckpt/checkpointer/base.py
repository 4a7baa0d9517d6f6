"""What the parts of the live checkpointer hand each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from d9d_ckpt.tensors import Region, TensorSpec

if TYPE_CHECKING:
    import torch


class Held(NamedTuple):
    """A tensor of the state as this rank holds it.

    Attributes:
        name: Its name in a checkpoint; the same on every topology.
        spec: Dtype and shape of the whole tensor.
        box: The part that is here; None where this rank holds nothing of it.
        local: The local tensor, of the box's shape, detached; filling it fills the live tensor.
    """

    name: str
    spec: TensorSpec
    box: Region | None
    local: "torch.Tensor"


@dataclass(frozen=True)
class Flat:
    """A state as a checkpoint keeps it.

    Attributes:
        tensors: By name, in the order of the state.
        values: JSON: everything that is no tensor, nested as the state is.
        tied: Names whose tensor is kept under another name, which is the value.
    """

    tensors: Mapping[str, Held]
    values: Mapping[str, Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds, as far as a state must know to take it in.

    Attributes:
        specs: Dtype and shape of its tensors, by name.
        values: Its JSON.
        tied: Names that stand for another tensor.
        step: Its step, where it has one.
    """

    specs: Mapping[str, TensorSpec]
    values: Mapping[str, Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
