"""Triton where it is installed, and the one switch that says whether an op uses it.

`D9D_KERNELS=reference` takes the eager twins everywhere; `D9D_KERNELS=triton` takes the kernels
for CPU tensors too, which only works in a process started with `TRITON_INTERPRET=1` (tests).
Unset, tensors on a GPU take the kernels and all others the eager twins.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
else:
    triton, tl = None, SimpleNamespace(constexpr=Any, tensor=Any)

# A kernel's parameters, compile-time and other: the compiler looks an annotation up and takes
# nothing but names of Triton's own, and the interpreter compares its text.
if TYPE_CHECKING:
    constexpr: TypeAlias = Any  # noqa: PYI042
    tensor: TypeAlias = Any  # noqa: PYI042
else:
    constexpr, tensor = tl.constexpr, tl.tensor

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`; without Triton the kernel stays a function that nothing calls."""
    return triton.jit(kernel) if HAS_TRITON else kernel


def apply(function: type[Function], *args: Any) -> Any:
    """`function.apply`, which torch leaves untyped."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def runs_triton(x: Tensor, dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES) -> bool:
    """Whether an op on `x` launches its kernel, which takes `dtypes`, not its eager twin.

    Raises:
        ValueError: `D9D_KERNELS` has an unknown value.
        RuntimeError: the kernels were asked for by `D9D_KERNELS=triton`, and Triton is absent.
    """
    if torch.compiler.is_compiling():
        return False  # the compiler fuses the eager twins; it would have to see into the kernels
    switch = os.environ.get("D9D_KERNELS", "")
    if switch == "":
        return x.is_cuda and HAS_TRITON and x.dtype in dtypes
    if switch == "reference":
        return False
    if switch != "triton":
        raise ValueError(f"D9D_KERNELS={switch!r}: expected 'reference', 'triton' or nothing")
    if not HAS_TRITON:
        raise RuntimeError("D9D_KERNELS=triton, but the package triton cannot be imported")
    return x.dtype in dtypes


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; 2 for the interpreter, so that tests see several."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
