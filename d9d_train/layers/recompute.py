"""Activation checkpointing: what a block keeps for its backward pass, and what it computes again."""

from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Mode = Literal["none", "selective", "layer"]
M = TypeVar("M", bound=nn.Module)

_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
KEPT = frozenset(
    {torch.ops.higher_order.flex_attention}
    | {getattr(torch.ops.aten, name).default for name in _NAMES}
)
"""What ``selective`` keeps: matrix products and attention."""


def recomputing() -> bool:
    """Whether this forward pass runs for the second time, inside a backward pass."""
    # While compiling, a forward pass is traced once, for both times.
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - what checkpoint itself asks


def checkpointed(block: M, mode: Mode) -> M:
    """Let a block keep less of its forward pass; names and hooks stay as they are.

    Recomputation draws no random numbers of torch's (`Dropout` needs none), so no state is kept.

    Args:
        block: A module whose forward is to be computed again; it may be compiled afterwards.
        mode: ``none``; ``layer``, which keeps the inputs alone; ``selective``, which keeps `KEPT` too.

    Returns:
        The same block.
    """
    if mode == "none":
        return block
    forward, run = block.forward, _layer if mode == "layer" else _selective

    # A function: torch.compile sees nothing of what is called through functools.partial.
    def again(*args: Any) -> Any:
        return run(forward, *args)

    block.forward = again
    # Each part of a split backward pass would compute all of it again.
    block.whole_backward = True  # type: ignore[assignment]
    return block


def _layer(forward: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)


def _selective(forward: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
    )


def _contexts() -> Any:
    """What the forward pass runs under, and what its repetition does."""
    if torch.compiler.is_compiling():
        return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    kept: deque[Any] = deque()
    return _Keeping(kept), _Giving(kept)


class _Keeping(TorchDispatchMode):
    """Keeps what the operations in `KEPT` give.

    Torch's own modes count every operation and refuse a repetition that has other ones; FSDP's hooks on
    experts inside of a layer do other things in a backward pass (torch 2.13).
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code inside is left alone."""
        return True

    def __init__(self, kept: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        out = op(*args, **(kwargs or {}))
        if op in KEPT:
            self._kept.append(tree_map_only(torch.Tensor, torch.Tensor.detach, out))
        return out


class _Giving(_Keeping):  # type: ignore[no-untyped-call]
    """Gives what was kept, in the same order."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or take what it gave before."""
        return self._kept.popleft() if op in KEPT else op(*args, **(kwargs or {}))


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
