"""Dropout: one mask, however sequences and batches are split."""

from dataclasses import replace

import pytest
import torch
from helpers.decoders import CASES, batch_of, made, tokens_of

from d9d_train.layers.dropout import Dropout, set_step
from d9d_train.layers.recompute import checkpointed
from d9d_train.mesh import Axis
from d9d_train.models.config import Options

COUNT, LENGTH, CHANNELS = 4, 16, 10


def dropped(batch, x=None, *, rate=0.3, seed=5, name="here", step=2, tokens=None):
    layer = Dropout(rate, seed, name)
    layer.set_step(step)
    layer.tokens = tokens
    if x is None:
        x = torch.ones(batch.tokens.shape[0], len(batch.index), CHANNELS, dtype=torch.float64)
    return layer(x, batch)


@pytest.fixture
def batch():
    return replace(batch_of(tokens_of(COUNT, LENGTH)), samples=torch.tensor([70, 3, 12, 4]))


def test_a_split_of_the_batch_draws_the_same(batch):
    whole = dropped(batch)
    for row in range(COUNT):
        part = replace(
            batch,
            tokens=batch.tokens[row : row + 1],
            starts=batch.starts[row : row + 1],
            samples=batch.samples[row : row + 1],
        )
        assert torch.equal(dropped(part), whole[row : row + 1])


def test_a_split_of_the_sequence_draws_the_same(batch):
    whole = dropped(batch)
    for index in (torch.tensor([0, 1, 2, 3, 12, 13, 14, 15]), torch.arange(4, 12)):
        part = replace(batch, tokens=batch.tokens[:, index], index=index)
        assert torch.equal(dropped(part), whole[:, index])
        for rank in range(2):
            axis = Axis(2, rank, None)
            x = torch.ones(COUNT, 4, CHANNELS, dtype=torch.float64)
            mine = index.chunk(2)[rank]
            assert torch.equal(dropped(part, x, tokens=axis), whole[:, mine])


def test_seed_place_step_and_sample_each_change_the_mask(batch):
    whole = dropped(batch)
    others = [{"seed": 6}, {"name": "there"}, {"step": 3}]
    others = [dropped(batch, **other) for other in others]
    others.append(dropped(replace(batch, samples=batch.samples + 1)))
    for other in others:
        share = (other == whole).double().mean()
        assert 0.5 < float(share) < 0.66  # 0.3 * 0.3 + 0.7 * 0.7 = 0.58 of independent masks


def test_the_share_is_the_rate_and_the_mean_stays(batch):
    many = replace(batch_of(tokens_of(8, 512)), samples=torch.arange(8))
    out = dropped(many)
    assert float((out == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(out.mean()) == pytest.approx(1.0, abs=0.015)
    assert set(out.unique().tolist()) == {0.0, 1 / 0.7}


def test_evaluation_drops_nothing(batch):
    layer, x = Dropout(0.5, 1, "here").eval(), torch.randn(COUNT, LENGTH, CHANNELS)
    assert layer(x, batch) is x


def test_a_model_drops_by_step_and_recomputes_what_it_dropped():
    tokens = batch_of(tokens_of(2, 8))
    grads = []
    for mode in ("none", "layer", "selective"):
        model = made(CASES["qwen3"], options=Options(dropout=0.2, seed=1))
        for layer in model.model.layers.values():
            checkpointed(layer, mode)
        set_step(model, 4)
        loss = model(None, tokens)
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters())])
        set_step(model, 5)
        assert model(None, tokens).item() != loss.item()
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))
