"""Logits and every gradient against transformers, on the checkpoint that it saves."""

from contextlib import nullcontext

import pytest
import torch
from helpers.decoders import CASES, batch_of, gradients, relative, tokens_of
from helpers.references import exact, reference, training, twin
from torch.nn import functional

LENGTH = 24
"""Above the positions of pre-training of every stretched RoPE."""


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_every_gradient_are_those_of_transformers(name, dtype, bound, tmp_path):
    config, tokens = CASES[name], tokens_of(2, LENGTH)
    batch = batch_of(tokens)
    with exact() if dtype == torch.float64 else nullcontext():
        theirs = reference(config, dtype)
        logits = theirs(input_ids=tokens, use_cache=False).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    loss.backward()

    ours = twin(theirs, tmp_path, dtype)
    assert ours(None, batch_of(tokens, labels=False)).dtype == dtype
    assert relative(ours(None, batch_of(tokens, labels=False)), logits) < bound
    summed = ours(None, batch)
    summed.backward()
    assert relative(summed, loss) < bound
    found = gradients(ours)
    expected = training(config, gradients(theirs))
    assert found.keys() == expected.keys()
    wrong = {n: relative(found[n], g) for n, g in expected.items()}
    assert {n: error for n, error in wrong.items() if not error < bound} == {}
