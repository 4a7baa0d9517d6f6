"""Parameters of every stage against the families' table, and stages against the whole model."""

import pytest
import torch
from helpers.decoders import CASES, batch_of, gradients, made, relative, tokens_of

from d9d_ckpt.graph import ops
from d9d_ckpt.graph.build import LazyTensor
from d9d_ckpt.models.family import EMBEDDING, HEAD, placements_of
from d9d_ckpt.models.registry import family_of
from d9d_ckpt.tensors import TensorSpec, dtype_from_torch
from d9d_train.layers.embedding import Embedding
from d9d_train.layers.linear import Linear
from d9d_train.models.config import Options, read_config
from d9d_train.models.decoder import Stage
from d9d_train.models.registry import build

SPLITS = {1: [0], 2: [0, 2], 3: [0, 1, 2], 4: [0, 0, 1, 3]}
"""Stages to the first layer of each; one of four has none."""


def stages(layers, count):
    starts = [*SPLITS[count], layers]
    return [
        Stage(first=i == 0, last=i == count - 1, layers=range(starts[i], starts[i + 1]))
        for i in range(count)
    ]


def table(config):
    """Shape of every training tensor, as the family's rules build it."""
    family = family_of(config)
    sizes = family.config(config)
    shapes = {}
    for rule in family.rules(sizes, family.hub_experts):
        leaves = [
            LazyTensor(ops.leaf(name, TensorSpec(dtype_from_torch("torch.float32"), shape)))
            for name, shape in rule.sources
        ]
        shapes[rule.name] = tuple(rule.build(leaves).shape)
    assert shapes.keys() == placements_of(family, sizes).keys()
    return shapes


@pytest.mark.parametrize("count", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_names_shapes_and_stages_are_those_of_the_table(name, count):
    config = CASES[name]
    layers = config["num_hidden_layers"]
    placements = placements_of(family_of(config), read_config(config).sizes)
    expected = table(config)
    found = {}
    for stage in stages(layers, count):
        with torch.device("meta"):
            model = build(config, stage, Options(dropout=0.1, balance_bias=True))
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        if config.get("tie_word_embeddings") and stage.last and not stage.first:
            assert shapes.pop(HEAD) == expected[EMBEDDING]
        for parameter in shapes:
            at = placements[parameter].stage
            assert at in stage.layers or (at, True) in [
                ("first", stage.first),
                ("last", stage.last),
            ]
        assert not found.keys() & shapes.keys()
        found |= shapes
    assert found == expected


def test_nothing_is_computed_or_kept_beside_the_parameters():
    for name, config in CASES.items():
        with torch.device("meta"):
            model = build(config)
        assert all(t.is_meta for t in model.state_dict().values()), name
        assert list(model.buffers()) == []
        parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        assert model.state_dict().keys() == parameters


def test_bias_balancing_adds_a_bias_to_each_router():
    with torch.device("meta"):
        model = build(CASES["qwen3_moe-dense"], options=Options(balance_bias=True))
    assert {n: (t.dtype, t.shape) for n, t in model.named_buffers()} == {
        "model.layers.1.mlp.router.bias": (torch.float32, (6,))
    }


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", ["llama-tied", "qwen3_moe", "qwen3_moe-dense"])
def test_stages_one_after_the_other_are_the_whole_model(name, count):
    config, batch = CASES[name], batch_of(tokens_of(2, 12), [[5, 7], [12]])
    whole = made(config)
    loss = whole(None, batch)
    loss.backward()
    parts = [build(config, s).double() for s in stages(config["num_hidden_layers"], count)]
    values = dict(whole.named_parameters(remove_duplicate=False))
    x = None
    for part in parts:
        with torch.no_grad():
            for parameter_name, parameter in part.named_parameters():
                parameter.copy_(values[parameter_name])
        x = part(x, batch)
    assert torch.equal(x, loss)
    x.backward()
    found = {}
    for part in parts:
        for parameter_name, grad in gradients(part).items():
            tied = parameter_name == HEAD and config.get("tie_word_embeddings")
            parameter_name = EMBEDDING if tied else parameter_name
            found[parameter_name] = found.get(parameter_name, 0) + grad
    expected = gradients(whole)
    assert found.keys() == expected.keys()
    assert all(relative(found[n], g) < 1e-14 for n, g in expected.items())


def test_a_tied_head_is_one_parameter_of_a_whole_model():
    model = made(CASES["llama-tied"])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_shards_of_a_vocabulary_add_up_to_the_embedding():
    whole = Embedding(12, 5)
    torch.nn.init.normal_(whole.weight)
    ids = torch.tensor([[0, 3, 4, 11], [7, 8, 3, 0]])
    total = torch.zeros(2, 4, 5)
    for rank in range(3):
        part = Embedding(4, 5)
        part.weight = torch.nn.Parameter(whole.weight.detach()[4 * rank : 4 * rank + 4])
        part.first_row = 4 * rank
        total += part(ids)
    assert torch.equal(total, whole(ids))


def test_a_bias_counts_as_often_as_its_scale_says():
    layer = Linear(3, 2, bias=True)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(4, 3)
    with_bias = layer(x)
    layer.bias_scale = 0.0
    without = layer(x)
    without.sum().backward()
    torch.testing.assert_close(with_bias - without, layer.bias.expand(4, 2))
    assert torch.equal(layer.bias.grad, torch.zeros(2))
