import pytest
import torch
from kernel_cases import DTYPES, agree, leaf

from d9d_kernels import qk_norm_rope, reference, rope


def angles(*shape, device):
    turn = torch.randn(shape, device=device) * 3
    return turn.cos(), turn.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("shape", "half"),
    [
        ((1, 1, 1, 2), 1),
        ((2, 3, 4, 16), 8),
        ((2, 3, 2, 3, 24), 5),
        ((1, 5, 16), 8),
        ((1, 2, 33, 64), 24),
    ],
)
def test_rope_agrees_with_float64(shape, half, interleaved, dtype, device):
    x = leaf(*shape, dtype=dtype, device=device)
    cos, sin = angles(shape[1], half, device=device)
    agree(rope, reference.rope, x, cos, sin, interleaved=interleaved)


def test_rope_takes_positions_of_each_sequence(device):
    x = leaf(2, 3, 4, 16, dtype=torch.float32, device=device)
    cos, sin = angles(2, 3, 8, device=device)
    agree(rope, reference.rope, x, cos, sin)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_a_pair_by_its_angle(interleaved):
    turn = torch.tensor([[0.0, torch.pi / 2]])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0]).view(1, 1, 1, 5)
    y = rope(x, turn.cos(), turn.sin(), interleaved=interleaved).flatten()
    expected = [1.0, 2.0, -4.0, 3.0, 9.0] if interleaved else [1.0, -4.0, 3.0, 2.0, 9.0]
    torch.testing.assert_close(y, torch.tensor(expected), atol=1e-6, rtol=0)


def test_rope_leaves_its_input_alone(anywhere):
    x = torch.randn(1, 3, 2, 8, device=anywhere)
    before = x.clone()
    rope(x, *angles(3, 4, device=anywhere))
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (1, 3, 4)])
def test_rope_refuses_angles_of_other_tokens(shape):
    x = torch.zeros(2, 3, 2, 8)
    with pytest.raises(ValueError, match="cos"):
        rope(x, torch.zeros(shape), torch.zeros(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize(
    ("q_heads", "k_heads", "dim", "half"),
    [((1,), (1,), 8, 4), ((2, 3), (2,), 16, 8), ((5,), (2,), 24, 5), ((16,), (2,), 64, 32)],
)
def test_qk_norm_rope_agrees_with_float64(
    q_heads, k_heads, dim, half, zero_centred, interleaved, dtype, device
):
    q = leaf(2, 5, *q_heads, dim, dtype=dtype, device=device)
    k = leaf(2, 5, *k_heads, dim, dtype=dtype, device=device)
    weights = [leaf(dim, dtype=dtype, device=device) for _ in range(2)]
    agree(
        qk_norm_rope,
        reference.qk_norm_rope,
        q,
        k,
        *weights,
        *angles(5, half, device=device),
        1e-5,
        zero_centred=zero_centred,
        interleaved=interleaved,
    )


def test_qk_norm_rope_takes_parts_of_a_fused_projection(device):
    """Rows of qkv go group by group: its query heads, then k, then v."""
    qkv = torch.randn(2, 3, 2, 5, 8, device=device)
    weights = [leaf(8, dtype=torch.float32, device=device) for _ in range(2)]
    cos, sin = angles(3, 4, device=device)
    q, k = qkv[:, :, :, :3], qkv[:, :, :, 3]
    q_out, k_out = qk_norm_rope(q, k, *weights, cos, sin)
    dense = qk_norm_rope(q.contiguous(), k.contiguous(), *weights, cos, sin)
    assert torch.equal(q_out, dense[0])
    assert torch.equal(k_out, dense[1])
    agree(
        qk_norm_rope,
        reference.qk_norm_rope,
        q.detach().requires_grad_(),
        k.detach().requires_grad_(),
        *weights,
        cos,
        sin,
    )
