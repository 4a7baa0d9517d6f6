"""What holds for every op: exports, the switch, float64 anywhere."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch.autograd import gradcheck

import d9d_kernels
from d9d_kernels import lang, reference


def test_every_op_has_a_definition_with_its_signature():
    for name in d9d_kernels.__all__:
        op, definition = getattr(d9d_kernels, name), getattr(reference, name)
        assert op.__doc__
        assert [p.replace(annotation="") for p in inspect.signature(op).parameters.values()] == [
            p.replace(annotation="") for p in inspect.signature(definition).parameters.values()
        ]


def test_reference_is_taken_on_request(monkeypatch):
    monkeypatch.setenv("D9D_KERNELS", "reference")
    assert not lang.runs_triton(torch.zeros(1))


def test_float64_takes_the_reference(monkeypatch):
    monkeypatch.setenv("D9D_KERNELS", "")
    assert not lang.runs_triton(torch.zeros(1, dtype=torch.float64))


def test_unknown_switch_is_refused(monkeypatch):
    monkeypatch.setenv("D9D_KERNELS", "fast")
    with pytest.raises(ValueError, match="'fast'"):
        lang.runs_triton(torch.zeros(1))


def test_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        "import torch, d9d_kernels\n"
        "print(d9d_kernels.rms_norm(torch.ones(2, 3), torch.ones(3)).sum().item())\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    assert float(done.stdout) == pytest.approx(6.0, rel=1e-5)


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_definitions_in_float64_have_their_gradients(monkeypatch):
    monkeypatch.setenv("D9D_KERNELS", "")
    torch.manual_seed(0)
    turn = torch.randn(3, 3, dtype=torch.float64)
    angles = turn.cos(), turn.sin()
    weight = double(8)
    route = d9d_kernels.moe_route(torch.tensor([[0, 2], [2, -1], [1, 0], [3, 2], [5, 1]]), 4)
    assert gradcheck(d9d_kernels.rms_norm, (double(5, 8), weight))
    assert gradcheck(lambda x: d9d_kernels.rope(x, *angles), (double(2, 3, 2, 8),))
    q, k = double(1, 3, 2, 2, 8), double(1, 3, 2, 8)
    assert gradcheck(lambda *a: d9d_kernels.qk_norm_rope(*a, *angles), (q, k, weight, double(8)))
    assert gradcheck(d9d_kernels.swiglu, (double(3, 8), True, double(3)))
    assert gradcheck(
        lambda x, p: d9d_kernels.moe_permute(x, route, p), (double(5, 2), double(5, 2))
    )
    assert gradcheck(
        lambda r, p: d9d_kernels.moe_unpermute(r, route, p), (double(10, 2), double(5, 2))
    )
    assert gradcheck(
        lambda x, w: d9d_kernels.grouped_mm(x, w, route.offsets), (double(10, 2), double(4, 3, 2))
    )
