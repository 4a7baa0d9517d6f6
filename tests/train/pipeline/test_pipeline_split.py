"""The two parts of a backward pass: each gradient once, what lies between them, and what does not split."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_kernels.gradmask import needs, only
from d9d_train.parallel.pipeline.split import Graph, splits

ROWS, WIDTH = 6, 8
done: Counter[str] = Counter()


def count(**parts: bool) -> None:
    """What a Function computes."""
    done.update(part for part, wanted in parts.items() if wanted)


class Matmul(torch.autograd.Function):
    """Linear-like: two products, each on its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transposed: bool, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wanted = needs(ctx)
        count(matmul_x=wanted[0], matmul_w=wanted[2])
        dx = grad @ weight.T if wanted[0] else None
        return dx, None, x.T @ grad if wanted[2] else None


class Unmasked(Matmul):
    """Computes both whenever it is called."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        count(unmasked=True)
        return grad @ weight.T, None, x.T @ grad


class Norm(torch.autograd.Function):
    """Norm-like: ``x / scale(x) * weight``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = x.square().mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        wanted, dx, dw = needs(ctx), None, None
        count(norm_x=wanted[0], norm_w=wanted[1])
        if wanted[0]:
            g, h = grad * weight, x * scale
            dx = scale * (g - h * (g * h).mean(-1, keepdim=True))
        if wanted[1]:
            dw = (grad * x * scale).reshape(-1, WIDTH).sum(0)
        return dx, dw


class Block(nn.Module):
    """Linear, norm and their like, a branch, a weight used twice side by side, one made of another."""

    def __init__(self, matmul: type[Matmul] = Matmul) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.matmul = matmul
        self.scale, self.offset, self.gain = (nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in "abc")
        self.up, self.down, self.twice = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in "abc")
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.to(torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = Norm.apply(x, self.scale)
        h = torch.tanh(self.matmul.apply(h, False, self.up))
        h = h + torch.sin(Norm.apply(self.offset, self.gain))  # a Function beside the spine
        left, right = h.split(ROWS // 2)
        h = torch.cat([left @ self.twice, torch.exp(-right.square()) @ self.twice])
        x = x + self.matmul.apply(h, False, self.down)
        return x + self.norm(self.linear(x))


class Products(TorchDispatchMode):
    """Counts the matrix products of built-in operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("mm", "addmm", "bmm")
        self.count += op.overloadpacket in [getattr(torch.ops.aten, n) for n in names]
        return op(*args, **(kwargs or {}))


def passed(module: nn.Module, *, split: bool = True) -> tuple[Graph, torch.Tensor]:
    """A forward pass, with the gradient of its output."""
    torch.manual_seed(2)
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    graph = Graph(hidden, split=split)
    with graph.recording():
        out = module(hidden)
    graph.end(out)
    return graph, torch.randn_like(out)


def whole(module: nn.Module) -> list[torch.Tensor]:
    """The gradients of input and weights, at once."""
    module.zero_grad()
    graph, grad = passed(module, split=False)
    graph.whole(grad)
    return [graph.take(), *gradients(module)]


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad if p.grad is None else p.grad.clone() for p in module.parameters()]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-14 * expected.abs().max())


def check_split(module: nn.Module) -> None:
    """Both parts give what the whole does, each its own."""
    expected = whole(module)
    module.zero_grad()
    graph, grad = passed(module)
    graph.inputs(grad)
    assert close(graph.take(), expected[0])
    assert not any(grad is not None for grad in gradients(module))
    graph.weights()
    assert all(map(close, gradients(module), expected[1:]))


def check_whole(module: nn.Module) -> None:
    """The first part gives everything, the second one nothing."""
    expected = whole(module)
    module.zero_grad()
    graph, grad = passed(module, split=splits(module))
    graph.inputs(grad)
    assert close(graph.take(), expected[0])
    assert all(map(close, gradients(module), expected[1:]))
    graph.weights()
    assert all(map(close, gradients(module), expected[1:]))


def counted(part: Callable[..., None], *args: torch.Tensor) -> tuple[int, Counter[str]]:
    """Matrix products, and what Functions did."""
    done.clear()
    with Products() as products:
        part(*args)
    return products.count, Counter(done)


def test_each_part_of_every_operation_runs_once():
    module = Block()
    graph, grad = passed(module, split=False)
    products, parts = counted(graph.whole, grad)
    assert (products, parts) == (10, Counter(matmul_x=2, matmul_w=2, norm_x=2, norm_w=2))
    graph, grad = passed(module)
    assert counted(graph.inputs, grad) == (5, Counter(matmul_x=2, norm_x=1))
    # The norm beside the spine belongs to weights as a whole.
    assert counted(graph.weights) == (5, Counter(matmul_w=2, norm_x=1, norm_w=2))


def test_parts_equal_the_whole():
    check_split(Block())
    check_split(nn.Sequential(*(Block() for _ in range(3))))


def test_a_function_that_does_not_ask_is_right_and_called_for_each_part():
    done.clear()
    check_split(Block(Unmasked))
    assert done["unmasked"] == 2 + 2 * 2


class Chained(Block):
    """A weight behind itself, at a joint that has another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.twice, self.offset)
        return super().forward(torch.tanh(x)) + self.gain


def test_weights_behind_themselves_come_with_the_input_and_others_do_not():
    module = Chained()
    expected = whole(module)
    module.zero_grad()
    graph, grad = passed(module)
    products, parts = counted(graph.inputs, grad)
    assert close(graph.take(), expected[0])
    early = {n for n, p in module.named_parameters() if p.grad is not None}
    assert early == {"twice", "offset", "gain"}
    again, more = counted(graph.weights)
    assert all(map(close, gradients(module), expected[1:]))
    assert (products, parts) == (5 + 2 + 2, Counter(matmul_x=2, norm_x=2, norm_w=1))
    assert (again, more) == (3, Counter(matmul_w=2, norm_w=1))


class Tanh(nn.Module):
    """Dynamo leaves torch's own modules alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Compiled(Block):
    """A block with a part that gives all of its gradients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Tanh()
        self.linear.compile(backend="aot_eager")


class Declared(Block):
    whole_backward = True


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by dynamo
@pytest.mark.parametrize("kind", [Compiled, Declared])
def test_what_cannot_be_split_is_whole_in_the_first_part(kind):
    module = kind()
    done.clear()
    check_whole(module)
    assert done == Counter(dict.fromkeys(("matmul_x", "matmul_w", "norm_x", "norm_w"), 4))
    check_whole(nn.Sequential(Block(), module))


def test_without_an_input_the_second_part_is_the_whole():
    def run(split: bool) -> tuple[Graph, torch.Tensor]:
        torch.manual_seed(2)
        graph = Graph(None, split=split)
        with graph.recording():
            out = module(torch.randn(ROWS, WIDTH, dtype=torch.float64))
        graph.end(out)
        return graph, torch.ones_like(out)

    module = Block()
    graph, grad = run(split=False)
    graph.whole(grad)
    expected = gradients(module)
    module.zero_grad()
    graph, grad = run(split=True)
    graph.inputs(grad)
    assert graph.take() is None
    assert all(grad is None for grad in gradients(module))
    graph.weights()
    assert all(map(torch.equal, gradients(module), expected))


def test_an_output_of_nothing_learnt_and_one_without_the_input():
    module = Block().requires_grad_(False)
    expected = whole(module)[0]
    graph, grad = passed(module)
    graph.inputs(grad)
    assert torch.equal(graph.take(), expected)
    graph.weights()
    module = Block()
    graph, grad = passed(lambda _: module(torch.ones(ROWS, WIDTH, dtype=torch.float64)))
    graph.inputs(grad)
    assert graph.take() is None
    graph.weights()
    assert all(grad is not None for grad in gradients(module))


class Hooked(nn.Module):
    """A hook doubles the gradient of what a joint gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        out.register_hook(lambda grad: grad * 2)
        return torch.sin(out)


def test_a_hook_counts_once():
    check_split(Hooked())


class Watched(Block):
    """Knows which intermediate results are alive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = Norm.apply(x, self.scale)
        product = Matmul.apply(normed, False, self.up)
        squashed = torch.sin(product)
        gated = squashed * torch.cos(product)
        out = Matmul.apply(gated, False, self.down)
        names = {"normed": normed, "product": product, "squashed": squashed, "gated": gated}
        self.storages = {n: weakref.ref(t.untyped_storage()) for n, t in names.items()}
        return out + x


def test_what_no_weight_needs_is_free_between_the_parts():
    module = Watched()
    alive: list[set[str]] = []

    def look() -> None:
        alive.append({n for n, s in module.storages.items() if s() is not None})

    gc.disable()
    try:
        graph, grad = passed(module)
        look()
        graph.inputs(grad)
        look()
        graph.weights()
        look()
    finally:
        gc.enable()
    assert alive == [{"normed", "product", "squashed", "gated"}, {"normed", "gated"}, set()]


def test_needs_is_what_the_forward_pass_says_unless_a_part_is_asked_for():
    """An argument that is no tensor has no edge, one that needs no gradient an empty one."""
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, flag: Any, b: Any, c: Any, nothing: Any) -> torch.Tensor:
            return a + b + c

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            seen.append(needs(ctx))
            return grad, None, grad, grad, None

    a, c = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    out = Seen.apply(a, 1, torch.ones(2), c, None)
    target = torch.autograd.graph.get_gradient_edge(c).node
    with only(lambda node: node is target):
        out.backward(torch.ones(2), retain_graph=True)
    out.backward(torch.ones(2))
    assert seen == [(False, False, False, True, False), (True, False, False, True, False)]
