"""Context parallelism: each rank works on a part of every sequence, and attention brings the parts together.

Ulysses     heads against tokens, by all-to-all; contiguous parts
AllGather   keys and values gathered; head-tail parts
Ring        keys and values passed around, outputs merged by log-sum-exp; head-tail parts
"""

from torch import nn

from d9d_ckpt.errors import LayoutError, UsageError
from d9d_train.layers.attention import Attention
from d9d_train.mesh import Axis
from d9d_train.parallel.context.all_gather import AllGather as AllGather
from d9d_train.parallel.context.ring import Ring as Ring
from d9d_train.parallel.context.ulysses import Ulysses as Ulysses

KINDS: dict[str, type[Ulysses | AllGather | Ring]] = {
    "ulysses": Ulysses,
    "all_gather": AllGather,
    "ring": Ring,
}
"""The flavours by the name that a configuration gives them; ``order`` of each says how it cuts a sequence."""


def parallelize(model: nn.Module, axis: Axis, kind: str) -> None:
    """Let every attention of a stage see whole sequences.

    Args:
        model: A stage; tp has cut it already.
        axis: cp; with one rank along it, nothing changes.
        kind: One of `KINDS`.

    Raises:
        UsageError: The kind is unknown.
        LayoutError: The heads of this rank do not divide over cp, which Ulysses needs.
    """
    if kind not in KINDS:
        raise UsageError(f"context.kind: {kind!r} is none of {', '.join(KINDS)}")
    if axis.size == 1:
        return
    attend = KINDS[kind](axis)
    for name, module in model.named_modules():
        if not isinstance(module, Attention):
            continue
        check_heads(name, kind, module.local_heads, axis.size)
        module.attend = attend


def check_heads(where: str, kind: str, heads: int, cp: int) -> None:
    """That the query heads of a rank divide as a flavour needs it.

    Raises:
        LayoutError: They do not, with the numbers.
    """
    if kind == "ulysses" and heads % cp:
        raise LayoutError(
            f"{where}: ulysses cuts the {heads} query heads of a rank over cp={cp}, which does not "
            "divide them; use all_gather or ring, or a cp that divides"
        )
