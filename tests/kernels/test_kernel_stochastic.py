import pytest
import torch

from d9d_kernels import reference, stochastic_adamw_, stochastic_copy_, sum_of_squares
from d9d_kernels.types import Place


def rounded(x, place=None, seed=7, step=3):
    out = torch.empty_like(x, dtype=torch.bfloat16)
    stochastic_copy_(out, x, place, seed=seed, step=step)
    return out


def test_philox_gives_the_published_words():
    """Random123's known answer for zeros, at seven rounds."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [w.item() for w in reference.philox(0, (zero, zero, 0, 0))]
    assert words == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("size", [1, 7, 8, 1000, 4097])
@pytest.mark.parametrize("offset", [0, 8, 3, (1 << 35) + 16])
def test_copy_is_bitwise_the_reference(size, offset, device):
    x = torch.randn(size, device=device) * 10.0 ** torch.randint(-30, 30, (size,), device=device)
    place = Place(offset, size, size)
    expected = torch.empty(size, dtype=torch.bfloat16, device=device)
    reference.stochastic_copy_(expected, x, place, seed=7, step=3)
    assert torch.equal(rounded(x, place), expected)


def test_copy_goes_to_a_neighbour_and_keeps_what_is_exact(anywhere):
    x = torch.randn(5000, device=anywhere)
    out = rounded(x)
    down = (x.view(torch.int32) & -65536).view(torch.float32)
    up = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((out.float() == down) | (out.float() == up)).all()
    assert torch.equal(rounded(out.float()), out)


def test_copy_keeps_nan_and_infinity(anywhere):
    bits = [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, -0x800000, 0, -0x80000000]
    x = torch.tensor(bits, dtype=torch.int32, device=anywhere).view(torch.float32)
    out = rounded(x).float()
    assert torch.isnan(out[:4]).all()
    assert torch.equal(out[4:], x[4:])
    assert torch.signbit(out[7])


@pytest.mark.parametrize("columns", [16, 12, 5])
def test_shards_are_rounded_as_the_whole(columns, anywhere):
    whole = torch.randn(6, 40, device=anywhere)
    expected = rounded(whole, Place(80, 40, 40))
    top = rounded(whole[:2].contiguous(), Place(80, 40, 40))
    rest = rounded(whole[2:].contiguous(), Place(160, 40, 40))
    assert torch.equal(torch.cat((top, rest)), expected)
    right = rounded(whole[:, columns:].contiguous(), Place(80 + columns, 40 - columns, 40))
    assert torch.equal(right, expected[:, columns:])


def test_seed_step_and_place_change_the_noise(anywhere):
    x = torch.randn(4000, device=anywhere)
    base = rounded(x)
    for other in (rounded(x, seed=8), rounded(x, step=4), rounded(x, Place(8, 4000, 4000))):
        assert not torch.equal(base, other)


@pytest.mark.parametrize("draws", [1 << 19, pytest.param(10_000_000, marks=pytest.mark.gpu)])
def test_rounding_is_unbiased(draws):
    """The share that goes up is within four standard errors of the chance."""
    value = torch.tensor(1.0 + 0.3 * 2.0**-7, device="cuda" if torch.cuda.is_available() else "cpu")
    x = value.expand(1 << 19).contiguous()
    steps = -(-draws // x.numel())
    ups = sum((rounded(x, step=step) > 1).sum().item() for step in range(steps))
    # The chance itself is a multiple of 2^-16.
    chance = (value.view(torch.int32).item() & 0xFFFF) / 65536
    error = (chance * (1 - chance) / (steps * x.numel())) ** 0.5
    assert abs(ups / (steps * x.numel()) - chance) <= 4 * error


def state(sizes, moments, grads, device):
    def make(dtype, scale=1.0):
        return [(torch.randn(n, device=device) * scale).to(dtype) for n in sizes]

    squares = [v.abs() for v in make(moments, 1e-2)]
    return [make(torch.bfloat16), make(grads), make(moments, 0.1), squares]


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16])
def test_adamw_is_the_reference(moments, grads, device):
    sizes = [5, 4096, 0, 3000]
    ours = state(sizes, moments, grads, device)
    theirs = [[t.clone() for t in tensors] for tensors in ours]
    places = [Place(0, 5, 5), Place(8, 64, 128), Place(9000, 1, 1), Place(9001, 3000, 3000)]
    options = {"lr": 1e-2, "weight_decay": 0.1, "step": 5, "seed": 11}
    stochastic_adamw_(*ours, places, **options)
    reference.stochastic_adamw_(*theirs, places, **options)
    for found, expected in zip(ours, theirs, strict=True):
        for f, e in zip(found, expected, strict=True):
            # Where the fp32 result differs in its last bit, a draw on the edge goes the other way.
            if f.dtype == torch.bfloat16:
                assert (f != e).sum() <= 0.001 * f.numel()
            torch.testing.assert_close(
                f, e, rtol=2.0**-7 if f.dtype == torch.bfloat16 else 1e-5, atol=1e-7
            )


def test_adamw_is_torch_s_on_average():
    """The mean of many seeds is where exact arithmetic ends."""
    param, grad, m, v = (t[0] for t in state([64], torch.float32, torch.float32, "cpu"))
    exact = param.float().requires_grad_()
    exact.grad = grad.clone()
    optimizer = torch.optim.AdamW([exact], lr=1e-3, weight_decay=0.1)
    optimizer.state[exact] = {
        "step": torch.tensor(4.0),
        "exp_avg": m.clone(),
        "exp_avg_sq": v.clone(),
    }
    optimizer.step()
    total = torch.zeros(64, dtype=torch.float64)
    for seed in range(400):
        p = param.clone()
        stochastic_adamw_(
            [p], [grad], [m.clone()], [v.clone()], [Place(0, 64, 64)],
            lr=1e-3, weight_decay=0.1, step=5, seed=seed,
        )  # fmt: skip
        total += p.double()
    # One bf16 step is 2^-7 of the value or less; its mean over 400 draws is 1/40 of that at worst.
    assert (
        (total / 400 - exact.double()).abs() <= 4 * 2.0**-7 / 40 * param.double().abs() + 1e-9
    ).all()


def test_adamw_refuses_gaps_and_other_dtypes():
    p, g, m, v = state([8], torch.float32, torch.float32, "cpu")
    options = {"lr": 1.0, "step": 1, "seed": 0}
    with pytest.raises(ValueError, match="params: expected one dtype"):
        stochastic_adamw_([p[0].float()], g, m, v, [Place(0, 8, 8)], **options)
    with pytest.raises(ValueError, match=r"grads\[0\]: expected dense"):
        stochastic_adamw_(p, [torch.zeros(16)[::2]], m, v, [Place(0, 8, 8)], **options)


@pytest.mark.parametrize("sizes", [[1], [7, 0, 40000], [16384, 16385]])
def test_sum_of_squares(sizes, anywhere):
    tensors = [torch.randn(n, device=anywhere) for n in sizes]
    expected = sum(t.double().square().sum() for t in tensors)
    torch.testing.assert_close(sum_of_squares(tensors).double(), expected, rtol=1e-5, atol=0)
    assert torch.equal(sum_of_squares(tensors), sum_of_squares(tensors))


@pytest.mark.gpu
def test_sum_of_squares_of_mixed_dtypes(device):
    tensors = [
        torch.randn(n, device=device).to(d)
        for n, d in ((50000, torch.bfloat16), (7, torch.float32), (9, torch.float16))
    ]
    tensors.append(torch.randn(11, device=device)[1:])
    expected = sum(t.double().square().sum() for t in tensors)
    torch.testing.assert_close(sum_of_squares(tensors).double(), expected, rtol=1e-5, atol=0)


def test_sum_of_squares_sees_nan_and_infinity(anywhere):
    assert sum_of_squares([torch.tensor([1.0, float("nan")], device=anywhere)]).isnan()
    assert sum_of_squares([torch.tensor([1.0, -float("inf")], device=anywhere)]).isinf()
