"""What FSDP2 does around gradients of weights that come apart from those of inputs.

FSDP2 gathers parameters, and takes gradients over, in hooks on the inputs and outputs of its units. A pass
for weights alone runs few of them, so both are done for the whole stage, before it and after it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from d9d_train.parallel.fsdp import synchronise, units
from d9d_train.parallel.pipeline.actions import Action, Kind


@contextmanager
def weights(stage: nn.Module, *, last: bool, reshard: bool) -> Iterator[None]:
    """Surrounds a backward pass for a stage's weights; their gradients are added up, unsharded.

    Args:
        stage: Has parameters gathered meanwhile; those that still are cost nothing.
        last: It is the last of a step: gradients are reduced, and what is gathered is freed.
        reshard: Free what is gathered after any backward pass.
    """
    synchronise(stage, last=False, reshard=False)
    for unit in units(stage):
        unit.unshard()
    yield
    synchronise(stage, last=last, reshard=reshard)
    _take_over(stage)


def perform(stage: nn.Module, action: Action) -> None:
    """What a program says of a whole stage: UNSHARD, RESHARD or REDUCE_GRAD.

    Parameters arrive while other actions are done; who needs them waits for them.
    """
    match action.kind:
        case Kind.UNSHARD:
            for unit in units(stage):
                unit.unshard(async_op=True)
        case Kind.RESHARD:
            for unit in units(stage):
                unit.reshard()
        case _:
            synchronise(stage, last=True, reshard=True)
            _take_over(stage)


def _take_over(stage: nn.Module) -> None:
    """Add gradients to those of micro-batches before, in the dtype of the sum; reduce them if that is asked.

    FSDP2 does it at the end of any backward pass that ran a hook of it.
    """
    assert isinstance(stage, FSDPModule)  # noqa: S101 - for the type checker
    fully_shard.state(stage)._root_post_backward_final_callback()  # type: ignore[attr-defined] # noqa: SLF001 - no public way to it
