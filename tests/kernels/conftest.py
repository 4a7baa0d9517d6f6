"""Where the kernels run: on the GPU, or on CPU tensors in Triton's interpreter."""

import importlib.util
import os
import pathlib

import pytest
import torch

ON_GPU = torch.cuda.is_available()


def _why_not() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
        return "no GPU, and triton was imported before TRITON_INTERPRET=1 could be set"
    return ""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of a test that must run the kernel and not its eager twin."""
    if reason := _why_not():
        pytest.skip(reason)
    monkeypatch.setenv("D9D_KERNELS", "triton")
    torch.manual_seed(0)
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture
def anywhere(request: pytest.FixtureRequest) -> torch.device:
    """The device of a test that holds for the kernel and, where it cannot run, for its eager twin."""
    if _why_not():
        torch.manual_seed(0)
        return torch.device("cpu")
    device: torch.device = request.getfixturevalue("device")
    return device


# The interpreter computes with numpy, which warns of what a GPU passes over in silence, and that
# of Triton 3.6 turns one-element arrays into loop bounds.
NUMPY_WARNINGS = [
    "ignore:Conversion of an array:DeprecationWarning",
    "ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.path.parent == pathlib.Path(__file__).parent:
            for warning in NUMPY_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
            if not ON_GPU and item.get_closest_marker("gpu"):
                item.add_marker(skip)
