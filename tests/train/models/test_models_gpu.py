"""Models on a GPU: kernels, FlexAttention and compiled layers against float64 on the CPU."""

from dataclasses import replace

import pytest
import torch
from helpers.decoders import CASES, batch_of, gradients, made, tokens_of

from d9d_train.layers.recompute import checkpointed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTH = 256
DOCUMENTS = [[100, 28, 128], [1, 254, 1]]
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Of a gradient's error, as a share of its norm; float32 products may run in TF32 in attention."""


def step(name, dtype, documents, device, *, mode="none", compiled=False, replays=None):
    """Loss, gradients and the choices of experts."""
    config = CASES[name] | {"head_dim": 16, "hidden_size": 64}
    model = made(config, dtype).to(device)
    batch = batch_of(tokens_of(2, LENGTH), documents)
    tensors = ("tokens", "labels", "index", "starts", "samples")
    batch = replace(batch, **{key: getattr(batch, key).to(device) for key in tensors})
    chosen = []
    for at, layer in enumerate(model.model.layers.values()):
        if hasattr(layer.mlp, "router"):
            layer.mlp.balance = 0.1
            if replays:
                layer.mlp.replay = replays[at].to(device)
            else:
                layer.mlp.router.register_forward_hook(lambda m, a, out: chosen.append(out[1]))
        checkpointed(layer, mode)
        if compiled:
            layer.compile()
    loss = model(None, batch)
    choices = list(chosen)
    loss.backward()
    if "moe" in name:
        counts = [int(layer.mlp.counts.sum()) for layer in model.model.layers.values()]
        assert set(counts) == {2 * LENGTH * config["num_experts_per_tok"]}
    return loss.detach().cpu(), {n: g.cpu() for n, g in gradients(model).items()}, choices


def distance(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("name", ["llama-llama3", "qwen3", "qwen3_moe-norm"])
def test_a_gpu_computes_what_float64_does(name, documents, dtype):
    loss, grads, choices = step(name, torch.float64, documents, "cpu")
    found, others, _ = step(name, dtype, documents, "cuda", replays=choices)
    assert distance(found, loss) < BOUNDS[dtype]
    wrong = {n: distance(others[n], g) for n, g in grads.items()}
    assert {n: error for n, error in wrong.items() if not error < BOUNDS[dtype]} == {}


@pytest.mark.parametrize("mode", ["selective", "layer"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe-norm"])
def test_recomputation_gives_the_same_bits(name, mode):
    plain = step(name, torch.bfloat16, DOCUMENTS, "cuda")
    again = step(name, torch.bfloat16, DOCUMENTS, "cuda", mode=mode)
    assert torch.equal(plain[0], again[0])
    assert [n for n, g in plain[1].items() if not torch.equal(again[1][n], g)] == []


@pytest.mark.parametrize("mode", ["none", "selective", "layer"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe-norm"])
def test_compiled_layers_compute_the_same(name, mode):
    loss, grads, choices = step(name, torch.float64, None, "cpu")
    found, others, _ = step(
        name, torch.bfloat16, None, "cuda", mode=mode, compiled=True, replays=choices
    )
    assert distance(found, loss) < BOUNDS[torch.bfloat16]
    wrong = {n: distance(others[n], g) for n, g in grads.items()}
    assert {n: error for n, error in wrong.items() if not error < BOUNDS[torch.bfloat16]} == {}
