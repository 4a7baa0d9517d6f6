"""Agreement of an op with its definition in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

# The interpreter holds bf16 as raw uint16 and gets its arithmetic wrong, so there it is float32 only.
DTYPES = [
    torch.float32,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param(torch.float16, marks=pytest.mark.gpu),
]
# Of the norm of a result: half a unit in the last place, and a little for the float32 sums.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative error in the Euclidean norm; of results that cancel, relative to what cancelled."""
    scale = max(expected.double().norm().item(), 0.3 * expected.numel() ** 0.5)
    return (found.double() - expected.double()).norm().item() / max(scale, 1e-30)


def run(op: Callable[..., Any], args: list[Any], seed: int, **options: Any) -> list[Tensor | None]:
    """Outputs of `op`, then the gradients of its floating arguments that want one."""
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    found = op(*args, **options)
    outputs = [o for o in (found if isinstance(found, tuple) else (found,)) if o is not None]
    generator = torch.Generator().manual_seed(seed)
    grads = [
        torch.randn(o.shape, generator=generator, dtype=torch.float64)
        .to(torch.bfloat16)
        .to(o.device, o.dtype)
        for o in outputs
    ]
    return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]


def agree(
    op: Callable[..., Any],
    definition: Callable[..., Any],
    *args: Any,
    rounded: torch.dtype | None = None,
    **options: Any,
) -> None:
    """`op` gives what `definition` gives in float64 on the same numbers, gradients included.

    `rounded` is the dtype that an intermediate result is rounded to, where it is not the result's.
    """
    exact = [
        a.detach().double().requires_grad_(a.requires_grad)
        if isinstance(a, Tensor) and a.is_floating_point()
        else a
        for a in args
    ]
    found = run(op, list(args), seed=1, **options)
    expected = run(definition, exact, seed=1, **options)
    for i, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert f is not None
        assert e is not None
        assert f.shape == e.shape
        error = distance(f, e)
        assert error <= TOLERANCE[rounded or f.dtype], f"result {i}: relative error {error:.2e}"


def leaf(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()
