"""Attention against its definition, and documents that do not see each other."""

import pytest
import torch
from helpers.decoders import CASES, batch_of, gradients, made, relative, tokens_of

from d9d_train.layers import sdpa
from d9d_train.layers.attention import Attention

DOCUMENTS = [[5, 12, 7], [24], [1, 22, 1]]


def by_score(q, k, v, starts):
    """The definition, a query head and token at a time."""
    out = torch.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for i in range(q.shape[1]):
                seen = slice(int(starts[b, i]), i + 1)
                keys, values = k[b, seen, h // group], v[b, seen, h // group]
                weights = (keys @ q[b, i, h] / q.shape[-1] ** 0.5).softmax(0)
                out[b, i, h] = weights @ values
    return out


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_its_definition(documents, kv_heads):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(3, 24, heads, 6, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    )
    batch = batch_of(tokens_of(3, 24), documents)
    found, expected = sdpa.attend(q, k, v, batch), by_score(q, k, v, batch.starts)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    weight = torch.linspace(-1, 1, 6, dtype=torch.float64)
    grads = [torch.autograd.grad((x * weight).sum(), [q, k, v]) for x in (found, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-yarn", "qwen3", "qwen3_moe-dense"])
def test_packed_documents_are_what_they_are_one_by_one(name):
    model, tokens = made(CASES[name]), tokens_of(3, 24)
    packed = batch_of(tokens, DOCUMENTS)
    logits = model(None, batch_of(tokens, DOCUMENTS, labels=False))
    loss = model(None, packed)
    loss.backward()
    grads = {n: g.clone() for n, g in gradients(model).items()}
    model.zero_grad()
    alone = 0.0
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            part = tokens[row : row + 1, start : start + length]
            found = model(None, batch_of(part, labels=False))
            assert relative(logits[row : row + 1, start : start + length], found) < 1e-12
            one = model(None, batch_of(part))
            one.backward()
            alone += one.item()
            start += length
    assert loss.item() == pytest.approx(alone, rel=1e-13)
    wrong = {n: relative(grads[n], g) for n, g in gradients(model).items()}
    assert {n: error for n, error in wrong.items() if not error < 1e-11} == {}


def test_the_query_heads_of_a_rank_follow_from_its_rows():
    layer = Attention(16, 6, 2, 4)
    assert layer.local_heads == 6
    layer.qkv_proj.weight = torch.nn.Parameter(layer.qkv_proj.weight[:20])
    assert layer.local_heads == 3
