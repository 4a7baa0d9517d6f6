import pytest
import torch
from kernel_cases import DTYPES, agree, leaf

from d9d_kernels import reference, swiglu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (5, 256), (2, 3, 200), (67, 96), (2, 6000)])
def test_agrees_with_float64(shape, interleaved, dtype, device):
    agree(swiglu, reference.swiglu, leaf(*shape, dtype=dtype, device=device), interleaved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(1, 2), (7, 14), (5, 256), (2, 3, 200), (3, 6000)])
def test_probabilities_agree_with_float64(shape, interleaved, dtype, device):
    probs = torch.rand(shape[:-1], device=device).requires_grad_()
    agree(swiglu, reference.swiglu, leaf(*shape, dtype=dtype, device=device), interleaved, probs)


def test_the_two_layouts_are_the_same_numbers():
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    pairs = torch.stack((gate, up), -1).flatten(-2)
    halves = torch.cat((gate, up), -1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(swiglu(pairs), expected)
    torch.testing.assert_close(swiglu(halves, interleaved=False), expected)


def test_empty(device):
    x = leaf(0, 8, dtype=torch.float32, device=device)
    swiglu(x).sum().backward()
    assert x.grad.shape == (0, 8)


def test_nan_and_large_gates(device):
    x = torch.tensor([[float("nan"), 1.0, -200.0, 3.0, 200.0, 2.0]], device=device)
    torch.testing.assert_close(swiglu(x), reference.swiglu(x), equal_nan=True)


def test_refuses_odd_rows_and_foreign_probabilities():
    with pytest.raises(ValueError, match="even last dim"):
        swiglu(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="one factor per row"):
        swiglu(torch.zeros(2, 4), probs=torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [True, False])
def test_offsets_past_2_to_31(interleaved, device):
    x = torch.randn((1 << 31) // 8192 + 3, 8192, device=device, dtype=torch.bfloat16)
    y = swiglu(x.requires_grad_(), interleaved)
    y.backward(torch.ones_like(y))
    tail = x[-3:].detach().requires_grad_()
    expected = reference.swiglu(tail, interleaved)
    expected.backward(torch.ones_like(expected))
    torch.testing.assert_close(y[-3:], expected)
    torch.testing.assert_close(x.grad[-3:], tail.grad)
