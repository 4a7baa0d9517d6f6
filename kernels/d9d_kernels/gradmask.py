"""Which gradients a backward pass wants of a custom Function, where it runs in parts.

Built-in operations compute what the engine asks them for. A Function sees ``ctx.needs_input_grad``, which
is that of its forward pass; one that reads `needs` in its place computes each gradient in the one part that
wants it. One that does not stays right, and does its work once for each part.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.graph import Node

# Of the process, not of a thread: the engine runs backward functions in threads of its own.
_wanted: Callable[[Node], bool] | None = None


@contextmanager
def only(wanted: Callable[[Node], bool]) -> Iterator[None]:
    """Backward passes meanwhile want gradients for some nodes alone.

    Args:
        wanted: Whether a gradient that goes on to this node is wanted.
    """
    global _wanted
    before, _wanted = _wanted, wanted
    try:
        yield
    finally:
        _wanted = before


def needs(ctx: Any) -> tuple[bool, ...]:
    """``ctx.needs_input_grad`` as far as the running part of the backward pass wants it.

    Args:
        ctx: What the Function's ``backward`` was given.

    Returns:
        Whether to compute its gradient, for each argument of ``forward``; None is good for the others.
    """
    needed: tuple[bool, ...] = ctx.needs_input_grad
    if _wanted is None:
        return needed
    # An edge for each tensor argument; those that need no gradient lead nowhere.
    targets = iter([node for node, _ in ctx.next_functions if node is not None])
    return tuple(need and _wanted(next(targets)) for need in needed)
