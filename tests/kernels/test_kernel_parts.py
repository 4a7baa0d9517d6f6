"""Backward passes in two parts, inputs and then weights: each part gives its own gradients, and no others."""

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from d9d_kernels import gradmask, grouped_mm, norm, qk, qk_norm_rope, rms_norm


def in_parts(out, grad, first, second):
    """Gradients of the first leaves, then of the second, as an executor asks for them."""
    for leaves in (first, second):
        wanted = {get_gradient_edge(leaf).node for leaf in leaves}
        with gradmask.only(wanted.__contains__):
            torch.autograd.backward(out, grad, inputs=leaves, retain_graph=True)
    return [leaf.grad for leaf in (*first, *second)]


def leaves(device, *shapes):
    return [torch.randn(shape, device=device).requires_grad_() for shape in shapes]


@pytest.fixture
def launches(monkeypatch):
    """How often the backward kernels run."""
    counts = []

    def counted(kernel):
        class Counted:
            def __getitem__(self, grid):
                counts.append(grid)
                return kernel[grid]

        return Counted()

    for module in (norm, qk):
        monkeypatch.setattr(module, "_backward", counted(module._backward))
    return counts


def test_rms_norm_in_parts(device, launches):
    x, weight = leaves(device, (70, 1024), (1024,))  # fewer elements go to torch
    out = rms_norm(x, weight)
    grad = torch.randn_like(out)
    whole = torch.autograd.grad(out, (x, weight), grad, retain_graph=True)
    launches.clear()
    for found, expected in zip(in_parts(out, grad, [x], [weight]), whole, strict=True):
        assert torch.equal(found, expected)
    assert len(launches) == 1


def test_qk_norm_rope_in_parts(device, launches):
    q, k, q_weight, k_weight = leaves(device, (2, 5, 4, 16), (2, 5, 2, 16), (16,), (16,))
    cos, sin = (torch.randn(5, 8, device=device) for _ in range(2))
    out = torch.cat([t.flatten() for t in qk_norm_rope(q, k, q_weight, k_weight, cos, sin)])
    grad = torch.randn_like(out)
    every = (q, k, q_weight, k_weight)
    whole = torch.autograd.grad(out, every, grad, retain_graph=True)
    launches.clear()
    for found, expected in zip(in_parts(out, grad, every[:2], every[2:]), whole, strict=True):
        assert torch.equal(found, expected)
    assert len(launches) == 1


def test_grouped_mm_in_parts(anywhere):
    x, weights = leaves(anywhere, (12, 16), (3, 8, 16))
    ends = torch.tensor([4, 4, 12], dtype=torch.int32, device=anywhere)
    out = grouped_mm(x, weights, ends)
    grad = torch.randn_like(out)
    whole = torch.autograd.grad(out, (x, weights), grad, retain_graph=True)
    for found, expected in zip(in_parts(out, grad, [x], [weights]), whole, strict=True):
        assert torch.equal(found, expected)
