"""What every parameter of a stage is to the axes, from the one table that offline tools use as well."""

from collections.abc import Iterator, Mapping

from torch import nn

from d9d_ckpt.errors import LayoutError
from d9d_ckpt.layout.placement import Cut, Placement, held
from d9d_ckpt.layout.topology import Topology


def roles(model: nn.Module, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """The placement of every parameter of a stage, under its FQN.

    A head that is tied to an embedding of another stage goes where the embedding goes.

    Args:
        model: The whole model, or one stage of it.
        placements: Those of all tensors of the model.

    Raises:
        LayoutError: A parameter without a placement, or a layer whose placements lack a parameter.
    """
    found = {name: placement_of(name, placements) for name, _ in model.named_parameters()}
    here = {placement.stage for name, placement in found.items() if name in placements}
    absent = [n for n, p in placements.items() if p.stage in here and n not in found]
    if absent:
        raise LayoutError(
            f"{absent[0]}: placed with its layer, but the model has no such parameter "
            f"({len(absent)} like it); model and family table disagree"
        )
    return found


def placement_of(name: str, placements: Mapping[str, Placement]) -> Placement:
    """Where a parameter goes; a tied head goes where the embedding goes.

    Raises:
        LayoutError: No rule places it.
    """
    placement = placements.get(name)
    if placement is None and name == "lm_head.weight":
        placement = next((p for p in placements.values() if p.tied), None)
    if placement is None:
        raise LayoutError(f"{name}: no rule of the family places this parameter")
    return placement


def check(model: nn.Module, placed: Mapping[str, Placement], topology: Topology) -> None:
    """Every dim that an axis cuts divides by it.

    Raises:
        LayoutError: Naming the tensor and the numbers.
    """
    for name, parameter in model.named_parameters():
        cut = placed[name].cut
        if cut.heads is not None and topology.tp > cut.heads.groups:
            raise LayoutError(
                f"{name}: tp={topology.tp} is above the {cut.heads.groups} KV heads, which the "
                f"trainer does not replicate; use tp <= {cut.heads.groups}"
            )
        try:
            held(tuple(parameter.shape), cut, topology)
        except LayoutError as error:
            raise LayoutError(f"{name}: {error}") from None


def padded(shape: tuple[int, ...], cut: Cut, topology: Topology) -> tuple[int, ...]:
    """The shape with a vocabulary rounded up to a multiple of ``vocab_multiple`` x tp."""
    if not cut.vocab:
        return shape
    multiple = topology.vocab_multiple * topology.tp
    return (-(-shape[0] // multiple) * multiple, *shape[1:])


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(FQN, module, attribute, parameter) of every parameter, each once."""
    seen = set()
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{attribute}" if path else attribute, module, attribute, parameter
