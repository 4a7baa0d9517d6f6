import pytest
import torch
from kernel_cases import DTYPES, agree, leaf, run

from d9d_kernels import norm, reference, rms_norm


@pytest.fixture(autouse=True)
def _kernel_at_any_size(monkeypatch):
    monkeypatch.setattr(norm, "SMALL", -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 7), (5, 64), (67, 128), (2, 3, 130), (9, 1024), (5, 2048), (3, 3001)]
)
def test_agrees_with_float64(shape, zero_centred, dtype, device):
    x = leaf(*shape, dtype=dtype, device=device)
    weight = leaf(shape[-1], dtype=dtype, device=device)
    agree(rms_norm, reference.rms_norm, x, weight, 1e-5, zero_centred=zero_centred)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_inputs_agree_with_float64(dtype, device, monkeypatch):
    monkeypatch.setattr(norm, "SMALL", 1 << 16)
    x = leaf(16, 130, dtype=dtype, device=device)
    agree(rms_norm, reference.rms_norm, x, leaf(130, dtype=dtype, device=device))


def test_takes_rows_of_a_wider_tensor(device):
    wide = torch.randn(6, 96, device=device)
    x, weight = wide[:, 32:64].requires_grad_(), leaf(32, dtype=torch.float32, device=device)
    agree(rms_norm, reference.rms_norm, x, weight)


def test_takes_an_expanded_gradient(device):
    x = leaf(4, 32, dtype=torch.float32, device=device)
    weight = leaf(32, dtype=torch.float32, device=device)
    found = torch.autograd.grad(rms_norm(x, weight).sum(), (x, weight))
    expected = torch.autograd.grad(reference.rms_norm(x, weight).sum(), (x, weight))
    torch.testing.assert_close(found, expected)


def test_empty(device):
    x = leaf(0, 16, dtype=torch.float32, device=device)
    weight = leaf(16, dtype=torch.float32, device=device)
    y, dx, dw = run(rms_norm, [x, weight], 0)
    assert y.shape == dx.shape == (0, 16)
    assert torch.equal(dw, torch.zeros_like(weight))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_rows_stay_rows(bad, device):
    x = torch.randn(8, 64, device=device)
    x[3, 5] = bad
    weight = torch.randn(64, device=device)
    found, expected = rms_norm(x, weight), reference.rms_norm(x, weight)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_reruns_are_bitwise_equal(device):
    args = [
        leaf(301, 256, dtype=torch.float32, device=device),
        leaf(256, dtype=torch.float32, device=device),
    ]
    first, second = run(rms_norm, args, 0), run(rms_norm, args, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_zero_centred_weight_is_added_in_float32(device):
    # 1 + 2^-9 is not a bfloat16; rounding it first would drop the weight altogether.
    x = torch.ones(1, 16, device=device)
    weight = torch.full((16,), 2.0**-9, device=device, dtype=torch.float32)
    y = rms_norm(x, weight, 0.0, zero_centred=True)
    torch.testing.assert_close(y, torch.full_like(x, 1 + 2.0**-9), rtol=1e-6, atol=0)


@pytest.mark.gpu
def test_offsets_past_2_to_31(device):
    rows, dim = (1 << 31) // 4096 + 3, 4096
    x = torch.randn(rows, dim, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = leaf(dim, dtype=torch.bfloat16, device=device)
    y = rms_norm(x, weight)
    y.backward(torch.ones_like(y))
    tail = x[-3:].detach().requires_grad_()
    expected = reference.rms_norm(tail, weight)
    expected.backward(torch.ones_like(expected))
    torch.testing.assert_close(y[-3:], expected)
    torch.testing.assert_close(x.grad[-3:], tail.grad)
