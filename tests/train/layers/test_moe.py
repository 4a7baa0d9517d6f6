"""Routing, experts, and the two ways to balance, against results written by hand."""

import copy

import pytest
import torch
from helpers.decoders import CASES, batch_of, made, tokens_of
from helpers.references import exact, reference
from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from d9d_train.layers.moe import Experts, MoE, Router, attach, balance_loss
from d9d_train.layers.recompute import checkpointed

HIDDEN, EXPERTS, CHOSEN, WIDTH = 8, 5, 2, 6


def moe(*, normalize=False, biased=False, dtype=torch.float64):
    router = Router(HIDDEN, EXPERTS, CHOSEN, normalize=normalize, biased=biased)
    layer = MoE(router, Experts(EXPERTS, HIDDEN, WIDTH)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
        if biased:
            layer.router.bias.zero_()
    return layer


def tokens(count=2, length=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, length, HIDDEN, generator=generator, dtype=dtype)
    return x.requires_grad_()


def by_token(layer, x):
    """The layer's definition, a token and an expert at a time."""
    out = torch.zeros_like(x)
    gate_up, down = layer.experts.gate_up_proj.weight, layer.experts.down_proj.weight
    for b, row in enumerate(x):
        for s, token in enumerate(row):
            scores = (layer.router.weight @ token).softmax(0)
            probs, chosen = scores.topk(CHOSEN)
            if layer.router.normalize:
                probs = probs / probs.sum()
            for p, e in zip(probs, chosen, strict=True):
                both = gate_up[e] @ token
                out[b, s] += p * (down[e] @ (functional.silu(both[0::2]) * both[1::2]))
    return out


@pytest.mark.parametrize("normalize", [False, True])
def test_a_token_gets_its_experts_by_their_probabilities(normalize):
    layer, x = moe(normalize=normalize), tokens()
    torch.testing.assert_close(layer(x), by_token(layer, x), rtol=1e-13, atol=1e-13)


def test_every_gradient_is_that_of_the_definition():
    layer, x, weight = moe(), tokens(), torch.linspace(-1, 1, HIDDEN, dtype=torch.float64)
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad((layer(x) * weight).sum(), inputs)
    expected = torch.autograd.grad((by_token(layer, x) * weight).sum(), inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_replay_takes_the_given_choices():
    layer, x = moe(), tokens()
    layer.replay = torch.tensor([[4, 0]]).expand(14, 2)
    layer(x)
    assert layer.counts.tolist() == [14, 0, 0, 0, 14]


class Away:
    """Experts elsewhere: rows go in another order and come back."""

    def there(self, rows, counts):
        assert counts.dtype == torch.int64
        self.counts = counts.tolist()
        return rows, counts, rows.shape

    def back(self, rows, ticket):
        assert rows.shape == ticket
        return 2 * rows


def test_an_exchange_sees_rows_by_expert_and_has_the_last_word_on_them():
    layer, x = moe(), tokens()
    plain = layer(x)
    layer.exchange = Away()
    torch.testing.assert_close(layer(x), 2 * plain)
    assert sum(layer.exchange.counts) == 14 * CHOSEN


def test_counts_are_of_training_passes_and_add_up():
    layer, x = moe(), tokens()
    with torch.no_grad():
        layer(x)
    assert layer.counts is None
    layer(x)
    once = layer.counts.clone()
    assert int(once.sum()) == 14 * CHOSEN
    layer(x)
    assert torch.equal(layer.counts, 2 * once)
    assert "counts" not in layer.state_dict()


@pytest.mark.parametrize("mode", ["selective", "layer"])
def test_recomputation_counts_nothing(mode):
    plain, again = moe(), checkpointed(moe(), mode)
    for layer in (plain, again):
        layer(tokens()).sum().backward()
    assert torch.equal(plain.counts, again.counts)


# -- balance ----------------------------------------------------------------------------------


def test_the_balance_loss_by_hand():
    # Two tokens, three experts, one each: both go to expert 0, whose mean score is 0.6.
    scores = torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.1, 0.4]]], dtype=torch.float64)
    choices = torch.tensor([[[0], [0]]])
    assert float(balance_loss(choices, scores)) == pytest.approx(3 / (1 * 2) * 2 * 0.6)


def test_even_loads_cost_one_a_sequence_whatever_the_scores():
    choices = torch.arange(8).reshape(1, 4, 2).remainder(4).repeat(3, 1, 1)
    scores = torch.rand(3, 4, 4, dtype=torch.float64).softmax(-1)
    assert float(balance_loss(choices, scores)) == pytest.approx(3.0)


def test_of_one_sequence_it_is_that_of_transformers_over_k():
    logits = torch.randn(1, 40, EXPERTS, generator=torch.Generator().manual_seed(0)).double()
    with exact():
        theirs = load_balancing_loss_func((logits[0],), EXPERTS, CHOSEN)
    scores = logits.softmax(-1)
    found = balance_loss(scores.topk(CHOSEN).indices, scores)
    assert float(found * CHOSEN) == pytest.approx(float(theirs), rel=1e-6)


def test_sequences_are_balanced_each_for_itself():
    layer, x = moe(), tokens()
    _, choices, scores = layer.router(x.flatten(0, 1))
    choices, scores = choices.unflatten(0, (2, 7)), scores.unflatten(0, (2, 7))
    apart = sum(balance_loss(choices[i : i + 1], scores[i : i + 1]) for i in range(2))
    torch.testing.assert_close(balance_loss(choices, scores), apart)


def test_attached_it_changes_gradients_and_nothing_else():
    plain, balanced, x = moe(), moe(), tokens()
    balanced.balance = 0.25
    y = balanced(x)
    assert torch.equal(y, plain(x))

    _, choices, scores = plain.router(x.flatten(0, 1))
    loss = balance_loss(choices.unflatten(0, (2, 7)), scores.unflatten(0, (2, 7)))
    expected = torch.autograd.grad(plain(x).sum() + 0.25 * loss, [x, plain.router.weight])
    found = torch.autograd.grad(y.sum(), [x, balanced.router.weight])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_attach_gives_the_loss_a_gradient_of_one_whatever_comes_from_above():
    y, loss = (torch.tensor(v, requires_grad=True) for v in (2.0, 5.0))
    (attach(y, loss) * 7).backward()
    assert (float(y.grad), float(loss.grad)) == (7.0, 1.0)


def test_the_gradient_of_balance_reaches_every_router_of_a_model():
    model = made(CASES["qwen3_moe"])
    batch = batch_of(tokens_of(2, 8))
    grads = []
    for weight in (0.0, 0.5):
        for layer in model.model.layers.values():
            layer.mlp.balance = weight
        model.zero_grad()
        loss = model(None, batch)
        loss.backward()
        routers = [layer.mlp.router.weight.grad for layer in model.model.layers.values()]
        grads.append((loss.item(), copy.deepcopy(routers)))
    (loss, before), (same, after) = grads
    assert loss == same
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


# -- bias -------------------------------------------------------------------------------------


def test_the_bias_changes_the_choice_but_not_the_weights():
    layer = moe(biased=True)
    x = tokens().flatten(0, 1)
    _, before, scores = layer.router(x)
    assert bool((before != 3).all(1).any())
    layer.router.bias[3] = 10.0
    probs, after, same = layer.router(x)
    assert bool((after == 3).any(1).all())
    assert torch.equal(scores, same)
    assert torch.equal(probs, scores.gather(-1, after))


def test_a_bias_of_zero_changes_nothing():
    x = tokens()
    assert torch.equal(moe(biased=True)(x), moe()(x))


def test_rebalancing_lifts_what_had_less_than_the_mean():
    layer = moe(biased=True)
    layer.router.rebalance(torch.tensor([10, 30, 20, 0, 40]), 0.125)
    assert layer.router.bias.tolist() == [0.125, -0.125, 0.0, 0.125, -0.125]


def test_rebalancing_evens_the_load():
    router, x = moe(biased=True).router, tokens(8, 64).flatten(0, 1)
    loads = []
    for _ in range(300):
        loads.append(router(x)[1].flatten().bincount(minlength=EXPERTS))
        router.rebalance(loads[-1], 0.004)
    spreads = [int(load.max() - load.min()) for load in (loads[0], loads[-1])]
    assert spreads[1] < spreads[0] / 3


def test_the_bias_is_saved_and_the_only_buffer_that_is():
    with torch.device("meta"):
        biased, plain = moe_state(biased=True), moe_state(biased=False)
    assert biased - plain == {"router.bias"}
    assert plain == {
        "router.weight",
        "experts.gate_up_proj.weight",
        "experts.down_proj.weight",
    }


def moe_state(*, biased):
    router = Router(HIDDEN, EXPERTS, CHOSEN, normalize=False, biased=biased)
    return set(MoE(router, Experts(EXPERTS, HIDDEN, WIDTH)).state_dict())


def test_routing_is_that_of_transformers_in_float32():
    theirs = reference(CASES["qwen3_moe-norm"], torch.float32).model.layers[0].mlp.gate
    router = Router(48, 6, 2, normalize=True)
    with torch.no_grad():
        router.weight.copy_(theirs.weight)
    x = torch.randn(30, 48, generator=torch.Generator().manual_seed(0))
    _, expected, chosen = theirs(x)
    probs, experts, _ = router(x)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(probs, expected)
