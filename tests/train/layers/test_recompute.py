"""Activation checkpointing: the same bits from fewer tensors."""

import pytest
import torch
from helpers.decoders import CASES, batch_of, made, tokens_of
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_train.layers.recompute import KEPT, checkpointed

DOCUMENTS = [[9, 7], [16]]
DYNAMO = pytest.mark.filterwarnings("ignore")
"""Tracing warns of what it does itself."""


def run(name, mode, dtype, *, compiled=False):
    """Loss, gradients and counts of a step; bytes kept between the passes; products in backward."""
    model = made(CASES[name], dtype)
    for layer in model.model.layers.values():
        checkpointed(layer, mode)
        if hasattr(layer.mlp, "balance"):
            layer.mlp.balance = 0.1
        if compiled:
            layer.compile(backend="aot_eager")
    kept: dict[int, int] = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    batch = batch_of(tokens_of(2, 16), DOCUMENTS)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(None, batch)
    with Products() as products:
        loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    counts = [getattr(layer.mlp, "counts", None) for layer in model.model.layers.values()]
    return {"loss": loss.detach(), **grads}, counts, sum(kept.values()), products.count


class Products(TorchDispatchMode):
    """Counts the operations that ``selective`` keeps."""

    supports_higher_order_operators = True  # compiled graphs have one around attention
    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op in KEPT
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["selective", "layer"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "qwen3_moe-dense"])
def test_gradients_and_counts_are_the_same_bits(name, mode, dtype):
    plain, counts, _, _ = run(name, "none", dtype)
    again, recounted, _, _ = run(name, mode, dtype)
    assert plain.keys() == again.keys()
    assert [n for n in plain if not torch.equal(plain[n], again[n])] == []
    assert [None if c is None else c.tolist() for c in counts] == [
        None if c is None else c.tolist() for c in recounted
    ]


@pytest.mark.parametrize("name", ["llama-biases", "qwen3_moe-norm"])
def test_selective_repeats_no_product_and_layer_repeats_all(name):
    products = {mode: run(name, mode, torch.float32)[3] for mode in ("none", "selective", "layer")}
    assert products["selective"] == products["none"] < products["layer"]


def test_a_layer_keeps_its_inputs_alone():
    kept = {mode: run("qwen3", mode, torch.float32)[2] for mode in ("none", "layer")}
    assert kept["layer"] < kept["none"] / 2


@DYNAMO
@pytest.mark.parametrize("mode", ["none", "selective", "layer"])
def test_a_block_compiles_into_one_graph_and_the_same_bits(mode):
    plain, _, _, _ = run("qwen3", "none", torch.float32)
    torch._dynamo.reset()
    counters.clear()
    again, _, _, _ = run("qwen3", mode, torch.float32, compiled=True)
    assert [n for n in plain if not torch.equal(plain[n], again[n])] == []
    assert counters["frames"] == {"total": 1, "ok": 1}
    assert not counters["graph_break"]


@DYNAMO
@pytest.mark.parametrize("mode", ["none", "selective", "layer"])
def test_a_compiled_block_counts_once(mode):
    _, counts, _, _ = run("qwen3_moe-norm", "none", torch.float32)
    torch._dynamo.reset()
    _, recounted, _, _ = run("qwen3_moe-norm", mode, torch.float32, compiled=True)
    assert all(torch.equal(a, b) for a, b in zip(counts, recounted, strict=True))


def test_none_leaves_a_block_as_it_is():
    block = torch.nn.Linear(2, 2)
    forward = block.forward
    assert checkpointed(block, "none") is block
    assert block.forward == forward


def test_names_stay():
    block = torch.nn.Linear(2, 2)
    names = list(block.state_dict())
    assert list(checkpointed(block, "layer").state_dict()) == names
