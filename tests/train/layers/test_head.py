"""The chunked loss against all logits at once, and what it never holds."""

import pytest
import torch
from torch.nn import functional

from d9d_train.layers import head
from d9d_train.layers.head import LMHead

HIDDEN, VOCAB, SEQUENCES, LENGTH = 12, 29, 3, 11
TOKENS = SEQUENCES * LENGTH


@pytest.fixture
def five(monkeypatch):
    """Chunks of five tokens."""
    monkeypatch.setattr(head, "CHUNK_BYTES", 5 * VOCAB * 8)


def made(vocab=VOCAB, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    layer = LMHead(HIDDEN, vocab)
    drawn = torch.randn(vocab, HIDDEN, generator=generator, dtype=dtype)
    layer.weight = torch.nn.Parameter(drawn)
    x = torch.randn(SEQUENCES, LENGTH, HIDDEN, generator=generator, dtype=dtype)
    labels = torch.randint(vocab, (SEQUENCES, LENGTH), generator=generator)
    labels[1, 3:9] = -100
    return layer, x.requires_grad_(), labels


def plain(layer, x, labels):
    logits = functional.linear(x, layer.weight).flatten(0, 1)
    return functional.cross_entropy(logits, labels.flatten(), reduction="sum")


@pytest.mark.parametrize("scale", [1.0, 0.03])
def test_loss_and_gradients_are_those_of_all_logits_at_once(five, scale):
    layer, x, labels = made()
    found, expected = layer(x, labels), plain(layer, x, labels)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    grads = [torch.autograd.grad(loss * scale, [x, layer.weight]) for loss in (found, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_nothing_of_the_size_of_all_logits_is_kept_for_backward(five):
    layer, x, labels = made()
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = layer(x, labels)
        expected = plain(layer, x, labels)
    assert any(t.numel() >= TOKENS * VOCAB for t in kept), "the plain loss keeps them"
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = layer(x, labels)
    loss.backward()
    assert kept
    assert all(t.numel() < TOKENS * VOCAB for t in kept)
    assert loss.item() == pytest.approx(expected.item())


def test_the_largest_tensor_ever_made_is_a_chunk_of_logits(five):
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                if isinstance(t, torch.Tensor) and t.is_floating_point():
                    Largest.seen = max(Largest.seen, t.numel())
            return out

    layer, x, labels = made()
    with Largest():
        layer(x, labels).backward()
    assert Largest.seen == TOKENS * HIDDEN


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_labels_that_are_all_ignored_give_zeros(five, dtype):
    layer, x, labels = made(dtype=dtype)
    loss = layer(x, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))


def test_rows_of_padding_have_no_part():
    layer, x, labels = made()
    expected = plain(layer, x, labels)
    padding = torch.full((3, HIDDEN), 100.0, dtype=torch.float64)
    layer.weight = torch.nn.Parameter(torch.cat([layer.weight.detach(), padding]))
    loss = layer(x, labels)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert torch.equal(layer.weight.grad[VOCAB:], torch.zeros_like(padding))
    assert layer(x, None).shape == (SEQUENCES, LENGTH, VOCAB)


def test_without_labels_there_are_logits_with_a_gradient():
    layer, x, labels = made()
    logits = layer(x, None)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    found = torch.autograd.grad(loss, layer.weight)[0]
    expected = torch.autograd.grad(layer(x, labels), layer.weight)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_without_a_gradient_there_is_only_the_sum(five):
    layer, x, labels = made()
    with torch.no_grad():
        loss = layer(x, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(layer, x, labels).detach())


def test_bfloat16_sums_in_float32(five):
    layer, x, labels = made(dtype=torch.bfloat16)
    loss = layer(x, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert layer.weight.grad.dtype == x.grad.dtype == torch.bfloat16
    wide, xs, _ = made(dtype=torch.bfloat16)
    logits = functional.linear(xs, wide.weight).float().flatten(0, 1)
    functional.cross_entropy(logits, labels.flatten(), reduction="sum").backward()
    torch.testing.assert_close(layer.weight.grad, wide.weight.grad, rtol=0.02, atol=0.05)
