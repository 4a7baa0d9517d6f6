"""Where nobody shares a parameter, its gradient is made without a copy, and is the right one."""

import pytest
import torch
from helpers.ranks import launch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from d9d_ckpt.layout.topology import Topology
from d9d_train.batch import Batch
from d9d_train.layers.moe import Experts
from d9d_train.mesh import mesh_of
from d9d_train.models.decoder import CausalLM
from d9d_train.models.registry import build
from d9d_train.optim.shards import shard
from d9d_train.parallel import fsdp

RAW = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def model() -> CausalLM:
    torch.manual_seed(0)
    made = build(RAW).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made


def batch(seed: int) -> Batch:
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(seed))
    return Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        index=torch.arange(8),
        starts=torch.zeros(2, 8, dtype=torch.int64),
        samples=torch.arange(2),
        packed=False,
    )


def sharded(compute: torch.dtype = torch.float64) -> CausalLM:
    made = model()
    mesh = mesh_of(Topology(), "cpu")
    fsdp.parallelize(made, mesh, compute=compute, reduce=torch.float64, reshard=False)
    return made


def backward(made: CausalLM, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        if isinstance(made, FSDPModule):
            fsdp.synchronise(made, last=seed == seeds[-1], reshard=False)
        made(None, batch(seed)).backward()


@pytest.mark.ranks
@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)], ids=["one", "accumulated"])
def test_gradients_are_those_of_the_plain_model(seeds: tuple[int, ...]) -> None:
    def work(rank: int) -> dict[str, torch.Tensor]:
        made = sharded()
        backward(made, seeds)
        return {n: shard(p.grad) for n, p in made.named_parameters() if p.grad is not None}

    plain = model()
    backward(plain, seeds)
    (found,) = launch(1, work)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-14)


@pytest.mark.ranks
def test_gradients_of_a_step_outlive_the_next_backward() -> None:
    def work(rank: int) -> bool:
        made = sharded()
        backward(made, (1,))
        kept = [p.grad for p in made.parameters()]
        copies = [shard(grad).clone() for grad in kept if grad is not None]
        for parameter in made.parameters():
            parameter.grad = None
        backward(made, (2,))
        return all(
            torch.equal(shard(grad), copy)
            for grad, copy in zip(kept, copies, strict=True)
            if grad is not None
        )

    assert launch(1, work) == [True]


@pytest.mark.ranks
def test_weights_of_rows_reach_experts_as_wide_as_they_are() -> None:
    def work(rank: int) -> set[torch.dtype]:
        made = sharded(compute=torch.bfloat16)
        seen: set[torch.dtype] = set()
        for module in made.modules():
            if isinstance(module, Experts):
                module.register_forward_hook(lambda _, args, out: seen.add(args[2].dtype))
        made(None, batch(1))
        return seen

    assert launch(1, work) == [{torch.float32}]
