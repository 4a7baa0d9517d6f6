import pytest
import torch
from kernel_cases import DTYPES, agree, leaf, run

from d9d_kernels import grouped_mm, moe_permute, moe_route, moe_unpermute, reference


def choices(tokens, experts, k, device, dropped=0):
    ids = torch.rand(tokens, experts, device=device).topk(k, -1).indices
    ids.view(-1)[: dropped * 3 : 3] = -1
    return ids


CASES = [(1, 1, 1, 0), (5, 4, 2, 0), (11, 8, 2, 7), (9, 128, 8, 11)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "dropped"), [*CASES, (65, 128, 8, 11), (700, 3, 3, 0)]
)
def test_route_is_the_stable_sort(tokens, experts, k, dropped, dtype, device):
    ids = choices(tokens, experts, k, device, dropped).to(dtype)
    found, expected = moe_route(ids, experts), reference.moe_route(ids, experts)
    for name in expected._fields:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_route_by_hand():
    route = moe_route(torch.tensor([[2, 0], [0, 9], [2, 1]]), 3)
    assert route.counts.tolist() == [2, 1, 2]
    assert route.offsets.tolist() == [2, 3, 5]
    assert route.source.tolist() == [1, 2, 5, 0, 4, 3]
    assert route.position.tolist() == [[3, 0], [1, 5], [4, 2]]


def test_route_refuses_floats():
    with pytest.raises(ValueError, match="int32 or int64"):
        moe_route(torch.zeros(2, 2), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "experts", "k", "dropped"), CASES)
def test_permute_and_unpermute_agree_with_float64(tokens, experts, k, dropped, dtype, device):
    ids = choices(tokens, experts, k, device, dropped)
    route = moe_route(ids, experts)
    x = leaf(tokens, 24, dtype=dtype, device=device)
    rows = leaf(tokens * k, 24, dtype=dtype, device=device)
    probs = torch.rand(tokens, k, device=device).requires_grad_()
    agree(moe_permute, reference.moe_permute, x, route)
    agree(moe_permute, reference.moe_permute, x, route, probs)
    agree(moe_unpermute, reference.moe_unpermute, rows, route)
    agree(moe_unpermute, reference.moe_unpermute, rows, route, probs)


def test_dropped_rows_are_zero_and_never_read(anywhere):
    route = moe_route(choices(10, 4, 2, anywhere, dropped=5), 4)
    x = leaf(10, 16, dtype=torch.float32, device=anywhere)
    rows, _ = moe_permute(x, route)
    assert torch.equal(rows[15:], torch.zeros_like(rows[15:]))
    rows = rows.detach().clone()
    rows[15:] = float("nan")
    rows.requires_grad_()
    out = moe_unpermute(rows, route, torch.rand(10, 2, device=anywhere))
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert torch.equal(rows.grad[15:], torch.zeros_like(rows[15:]))


def test_a_token_comes_back_k_times(anywhere):
    route = moe_route(choices(10, 8, 3, anywhere), 8)
    x = torch.randint(-8, 8, (10, 40), device=anywhere).float()
    assert torch.equal(moe_unpermute(moe_permute(x, route)[0], route), 3 * x)


def test_reruns_are_bitwise_equal(device):
    route = moe_route(choices(10, 8, 3, device), 8)
    args = [
        leaf(30, 40, dtype=torch.float32, device=device),
        route,
        torch.rand(10, 3, device=device).requires_grad_(),
    ]
    first, second = run(moe_unpermute, args, 0), run(moe_unpermute, args, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "ends"),
    [(9, [9]), (70, [10, 10, 64, 70]), (70, [0, 33, 33, 41]), (5, [0, 0]), (0, [0, 0])],
)
def test_grouped_mm_agrees_with_float64(rows, ends, dtype, device):
    x = leaf(rows, 32, dtype=dtype, device=device)
    weights = leaf(len(ends), 16, 32, dtype=dtype, device=device, scale=0.2)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    agree(grouped_mm, reference.grouped_mm, x, weights, offsets)


def test_grouped_mm_leaves_the_tail_zero(anywhere):
    x = torch.full((200, 16), float("nan"), device=anywhere)
    x[:70] = 1.0
    weights = torch.ones(2, 24, 16, device=anywhere)
    out = grouped_mm(x, weights, torch.tensor([3, 70], dtype=torch.int32, device=anywhere))
    assert torch.equal(out[:70], torch.full((70, 24), 16.0, device=anywhere))
    assert torch.equal(out[70:], torch.zeros(130, 24, device=anywhere))


def test_grouped_mm_takes_widths_that_torch_does_not(device):
    x = leaf(10, 3, dtype=torch.float32, device=device)
    weights = leaf(2, 5, 3, dtype=torch.float32, device=device)
    offsets = torch.tensor([4, 10], dtype=torch.int32, device=device)
    agree(grouped_mm, reference.grouped_mm, x, weights, offsets)


def test_grouped_mm_takes_an_expanded_gradient(device):
    x = leaf(10, 16, dtype=torch.float32, device=device)
    weights = leaf(2, 16, 16, dtype=torch.float32, device=device)
    offsets = torch.tensor([4, 10], dtype=torch.int32, device=device)
    found = torch.autograd.grad(grouped_mm(x, weights, offsets).sum(), (x, weights))
    expected = torch.autograd.grad(reference.grouped_mm(x, weights, offsets).sum(), (x, weights))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
