"""The executor on gloo ranks: losses and gradients of one process, each part once, and what is held."""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from d9d_ckpt.errors import LayoutError
from d9d_kernels.gradmask import needs
from d9d_train.batch import Batch
from d9d_train.mesh import Axis
from d9d_train.parallel.pipeline.actions import Action, Kind, Program, parse
from d9d_train.parallel.pipeline.communicate import with_communication
from d9d_train.parallel.pipeline.run import Executor
from d9d_train.parallel.pipeline.schedule import BUILDERS, build, placement
from d9d_train.parallel.pipeline.simulate import simulate

SIZE, WIDTH, VOCAB = 2, 8, 11
MICROBATCHES = (1, 2, 4, 8)
SCALE = 0.125


class Token:
    """Lives as long as the node that holds it."""


class Counted(torch.autograd.Function):
    """A product that counts the parts of its backward passes and how many of its nodes are alive."""

    alive: ClassVar[weakref.WeakSet[Token]] = weakref.WeakSet()
    parts: ClassVar[Counter[tuple[int, int, str]]] = Counter()

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, stage: int, microbatch: int
    ) -> torch.Tensor:
        ctx.token, ctx.key = Token(), (stage, microbatch)
        ctx.save_for_backward(x, weight)
        Counted.alive.add(ctx.token)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x, weight), wanted, dx, dw = ctx.saved_tensors, needs(ctx), None, None
        if wanted[0]:
            Counted.parts[*ctx.key, "input"] += 1
            dx = grad @ weight.T
        if wanted[1]:
            Counted.parts[*ctx.key, "weight"] += 1
            dw = x.flatten(0, 1).T @ grad.flatten(0, 1)
        return dx, dw, None, None


class Stage(nn.Module):
    """A residual block; the first stage embeds, the last gives a loss sum."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.index = index
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64) if index == 0 else None
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)
        last = index == stages - 1
        self.head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64) if last else None
        self.outputs: list[StorageWeakRef] = []

    def forward(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        x = hidden if self.embed is None else self.embed(batch.tokens)
        x = x + Counted.apply(x, self.mix, self.index, int(batch.samples[0]) // SIZE)
        x = x + self.down(torch.tanh(self.up(x)))
        if self.head is None:
            self.outputs.append(StorageWeakRef(x.untyped_storage()))
            return x
        logits = self.head(x)
        if batch.labels is None:
            return logits
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"
        )


def microbatch(number: int, *, labels: bool = True) -> Batch:
    """Micro-batches of different lengths."""
    length = 3 + number % 3
    torch.manual_seed(number)
    tokens = torch.randint(VOCAB, (SIZE, length + 1))
    return Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:] if labels else None,
        index=torch.arange(length),
        starts=torch.zeros(SIZE, length, dtype=torch.int64),
        samples=torch.arange(SIZE) + SIZE * number,
        packed=False,
    )


def spec(batch: Batch) -> tuple[Sequence[int], torch.dtype]:
    return (*batch.tokens.shape, WIDTH), torch.float64


def alone(stages: int, microbatches: int) -> tuple[list[torch.Tensor], list[Stage]]:
    """Losses and modules with gradients, without any executor."""
    modules = [Stage(index, stages) for index in range(stages)]
    losses = []
    for number in range(microbatches):
        x = None
        for module in modules:
            x = module(x, microbatch(number))
        (x * SCALE).backward()
        losses.append(x.detach())
    return losses, modules


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-14 * expected.abs().max())


def world_axis() -> Axis:
    return Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


class Trace:
    """What an executor tells, with the micro-batches alive at each action."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.peak = 0
        self.hooks: list[tuple[str, int, int]] = []

    def on_action(self, action: Action) -> None:
        self.actions.append(action)
        self.peak = max(self.peak, len(Counted.alive))

    def on_first(self, stage: int) -> None:
        self.hooks.append(("first", stage, len(self.actions) - 1))

    def on_last_backward(self, stage: int) -> None:
        self.hooks.append(("last", stage, len(self.actions) - 1))

    @contextmanager
    def on_weights(self, stage: int, last: bool) -> Iterator[None]:
        self.hooks.append(("last weights" if last else "weights", stage, len(self.actions) - 1))
        yield


def check_step(program: Program, stages: int) -> Trace:
    """Run a step; compare everything with one process."""
    axis, microbatches, trace = world_axis(), program.microbatches, Trace()
    losses, modules = alone(stages, microbatches)
    Counted.alive.clear()
    Counted.parts.clear()
    own = {s: Stage(s, stages) for s, rank in program.rank_of.items() if rank == axis.rank}
    executor = Executor(
        own,
        program,
        axis,
        spec,
        on_action=trace.on_action,
        on_first=trace.on_first,
        on_last_backward=trace.on_last_backward,
        on_weights=trace.on_weights,
    )
    found = executor.step([microbatch(i) for i in range(microbatches)], SCALE)
    assert len(found) == (microbatches if stages - 1 in own else 0)
    assert all(map(torch.equal, found, losses))
    for stage, module in own.items():
        whole = dict(modules[stage].named_parameters())
        for name, parameter in module.named_parameters():
            assert close(parameter.grad, whole[name].grad), (stage, name)
    every = product(own, range(microbatches), ("input", "weight"))
    assert Counted.parts == dict.fromkeys(every, 1)
    assert trace.actions == list(program.ranks[axis.rank])
    assert len(Counted.alive) == 0
    check_hooks(trace, own)
    return trace


def check_hooks(trace: Trace, own: dict[int, Stage]) -> None:
    """A stage's first computation, a last backward pass that is whole, and every one for weights."""
    expected = []
    for stage in own:
        places = [i for i, a in enumerate(trace.actions) if a.stage == stage and not a.is_message]
        weights = [i for i in places if trace.actions[i].kind is Kind.WEIGHT]
        *_, last = (i for i in places if trace.actions[i].kind in (Kind.BACKWARD, Kind.WEIGHT))
        expected.append(("first", stage, places[0]))
        expected += [("weights", stage, i) for i in weights if i != last]
        expected.append(("last weights" if last in weights else "last", stage, last))
    assert sorted(expected) == sorted(trace.hooks)


def check_evaluation(program: Program, stages: int) -> None:
    axis = world_axis()
    own = {s: Stage(s, stages) for s, rank in program.rank_of.items() if rank == axis.rank}
    executor = Executor(own, program, axis, spec)
    for labels in (True, False):
        batches = [microbatch(i, labels=labels) for i in range(program.microbatches)]
        found = executor.evaluate(batches)
        if stages - 1 in own:
            modules = [Stage(index, stages) for index in range(stages)]
            for batch, output in zip(batches, found, strict=True):
                x = None
                for module in modules:
                    x = module(x, batch)
                assert torch.equal(output, x)
        assert not any(output.requires_grad for output in found)
    assert all(p.grad is None for module in own.values() for p in module.parameters())


@pytest.mark.ranks
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_steps_equal_one_process(pp: int) -> None:
    def work(rank: int) -> None:
        for microbatches in MICROBATCHES:
            trace = check_step(build("1f1b", pp, pp, microbatches), pp)
            assert trace.peak == min(pp - rank, microbatches)
            trace = check_step(build("gpipe", pp, pp, microbatches), pp)
            assert trace.peak == microbatches
            check_evaluation(build("1f1b", pp, pp, microbatches), pp)
            check_evaluation(build("forward_only", pp, pp, microbatches), pp)

    launch(pp, work)


@pytest.mark.ranks
@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_equals_one_process_and_holds_what_the_simulator_says(pp: int) -> None:
    def work(rank: int) -> None:
        for name in BUILDERS.keys() - {"forward_only"}:
            stages = pp * placement(name)[0]
            program = build(name, stages, pp, 2 * pp)
            peak = simulate(program).peak_microbatches[rank]
            assert check_step(program, stages).peak == peak * stages / pp, name

    launch(pp, work)


V_SHAPE = """0F0,0F1,0F2,3F0,3B0,3F1,3B1,0B0,3F2,0B1,3B2,0B2
1F0,2F0,1F1,2F1,1F2,2F2,2B0,1B0,2B1,1B1,2B2,1B2"""


@pytest.mark.ranks
@pytest.mark.parametrize("text", [V_SHAPE, "0F0,1F0,2F0,0F1,1F1,2F1,2B1,1B1,2B0,0B1,1B0,0B0"])
def test_stages_of_one_rank_hand_over_without_messages(text: str) -> None:
    program = with_communication(parse(text))
    launch(len(program.ranks), lambda _: check_step(program, program.stages) and None)


def zero_bubble(ranks: int, microbatches: int, lag: int, *, last_first: bool = False) -> Program:
    """1F1B of which gradients of weights come ``lag`` micro-batches after those of inputs, or at the end."""

    def rank(stage: int) -> Iterator[str]:
        ahead, late = min(ranks - 1 - stage, microbatches), list[int]()
        yield from (f"{stage}F{i}" for i in range(ahead))
        for i in range(microbatches):
            if ahead + i < microbatches:
                yield f"{stage}F{ahead + i}"
            yield f"{stage}I{i}"
            late.append(i)
            if len(late) > lag:
                yield f"{stage}W{late.pop(0)}"
        yield from (f"{stage}W{i}" for i in (reversed(late) if last_first else late))

    return with_communication(parse("\n".join(",".join(rank(stage)) for stage in range(ranks))))


@pytest.mark.ranks
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_two_parts_equal_one_process(pp: int) -> None:
    def work(rank: int) -> None:
        for microbatches in (1, 4):
            for lag in (0, 1, 2, microbatches):
                trace = check_step(zero_bubble(pp, microbatches, lag), pp)
                assert trace.peak == min(pp - rank + lag, microbatches)
            check_step(zero_bubble(pp, microbatches, microbatches, last_first=True), pp)

    launch(pp, work)


SPLIT_V = """0F0,0F1,3F0,3I0,3F1,(0F2;3I1)OVERLAP_F_B,3W0,0I0,3F2,3W1,3B2,0I1,0B2,0W1,0W0
1F0,2F0,1F1,2F1,2I0,1B0,1F2,2F2,2W0,2B1,1I1,2I2,1I2,2W2,1W2,1W1"""


@pytest.mark.ranks
def test_parts_and_wholes_and_overlapped_pairs_mix() -> None:
    """The first stage ends with parts, the last with a whole; both are on one rank."""
    program = with_communication(parse(SPLIT_V))
    launch(2, lambda _: check_step(program, 4) and None)


class Tied(Stage):
    """Its head is another stage's embedding."""

    def tie(self, embed: nn.Embedding) -> None:
        assert self.head is not None
        self.head.weight = embed.weight


@pytest.mark.ranks
@pytest.mark.parametrize("text", [V_SHAPE, SPLIT_V])
def test_the_ends_of_a_v_share_a_weight(text: str) -> None:
    program = with_communication(parse(text))

    def work(rank: int) -> None:
        own = {stage: Tied(stage, 4) for stage in ((0, 3), (1, 2))[rank]}
        whole = [Tied(stage, 4) for stage in range(4)]
        whole[3].tie(whole[0].embed)
        if rank == 0:
            own[3].tie(own[0].embed)
        Executor(own, program, world_axis(), spec).step([microbatch(i) for i in range(3)], SCALE)
        for number in range(3):
            x = None
            for module in whole:
                x = module(x, microbatch(number))
            (x * SCALE).backward()
        for stage, module in own.items():
            expected = dict(whole[stage].named_parameters())
            for name, parameter in module.named_parameters():
                assert close(parameter.grad, expected[name].grad), (stage, name)

    launch(2, work)


@pytest.mark.ranks
def test_what_concerns_a_whole_stage_is_told_and_spares_the_hooks_for_it() -> None:
    def work(_: int) -> None:
        told: list[str] = []

        @contextmanager
        def on_weights(stage: int, last: bool) -> Iterator[None]:
            told.append(f"weights {stage} {last}")
            yield

        Executor(
            {0: Stage(0, 2), 1: Stage(1, 2)},
            parse("0UNSHARD,0F0,1F0,1I0,0B0,1W0,0RESHARD,0REDUCE_GRAD,1REDUCE_GRAD"),
            world_axis(),
            spec,
            on_last_backward=lambda stage: told.append(f"last {stage}"),
            on_weights=on_weights,
            on_stage=lambda action: told.append(str(action)),
        ).step([microbatch(0)], SCALE)
        assert told == [
            *("0UNSHARD", "weights 1 False", "0RESHARD", "0REDUCE_GRAD", "1REDUCE_GRAD")
        ]

    launch(1, work)


@pytest.mark.ranks
def test_an_output_is_free_once_it_is_sent() -> None:
    """The last one is held until the next messages begin."""

    def work(rank: int) -> list[int]:
        program = build("gpipe", 2, 2, 4)
        stage, alive = Stage(rank, 2), []

        def on_action(action: Action) -> None:
            if not action.is_message:
                alive.append(sum(not output.expired() for output in stage.outputs))

        executor = Executor({rank: stage}, program, world_axis(), spec, on_action=on_action)
        executor.step([microbatch(i) for i in range(4)], 1.0)
        return alive

    assert launch(2, work)[0] == [0, 1, 1, 1, 1, 0, 0, 0]


@pytest.mark.ranks
def test_sharded_gradients_are_reduced_once() -> None:
    """pp x fsdp = 2 x 2: gradients are whole after the last backward pass of a stage, and none before."""

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
        pp, shard = mesh.get_local_rank("pp"), mesh.get_local_rank("fsdp")
        stage = fully_shard(Stage(pp, 2), mesh=mesh["fsdp"], reshard_after_forward=False)
        stage.set_gradient_divide_factor(1.0)
        stage.set_force_sum_reduction_for_comms(True)
        reduced = []

        def synchronise(last: bool) -> None:
            reduced.append(any(isinstance(p.grad, DTensor) for p in stage.parameters()))
            stage.set_requires_gradient_sync(last)
            stage.set_is_last_backward(last)

        executor = Executor(
            {pp: stage},
            build("1f1b", 2, 2, 4),
            Axis(2, pp, mesh.get_group("pp")),
            spec,
            on_first=lambda _: synchronise(False),
            on_last_backward=lambda _: synchronise(True),
        )
        executor.step([microbatch(4 * shard + i) for i in range(4)], SCALE)
        assert reduced == [False, False]
        _, modules = alone(2, 8)
        whole = dict(modules[pp].named_parameters())
        for name, parameter in stage.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            assert close(parameter.grad.full_tensor(), whole[name].grad), name

    launch(4, work)


@pytest.mark.ranks
def test_a_stage_in_which_nothing_is_learnt() -> None:
    def work(rank: int) -> None:
        program, stage = build("1f1b", 2, 2, 3), Stage(rank, 2)
        stage.requires_grad_(rank == 1)
        Executor({rank: stage}, program, world_axis(), spec).step(
            [microbatch(i) for i in range(3)], SCALE
        )
        _, modules = alone(2, 3)
        for found, whole in zip(stage.parameters(), modules[rank].parameters(), strict=True):
            assert found.grad is None if rank == 0 else close(found.grad, whole.grad)

    launch(2, work)


class Broken(Stage):
    def forward(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        if int(batch.samples[0]) == 2 * SIZE:
            raise ValueError("a stage of a test")
        return super().forward(hidden, batch)


@pytest.mark.ranks
def test_the_cause_leaves_at_once_and_others_name_stage_action_and_peer() -> None:
    def work(rank: int) -> tuple[str, str, list[str]]:
        program = build("1f1b", 3, 3, 4)
        stage = (Broken if rank == 1 else Stage)(rank, 3)
        try:
            Executor({rank: stage}, program, world_axis(), spec).step(
                [microbatch(i) for i in range(4)], 1.0
            )
        except Exception as error:  # noqa: BLE001 - its type is what is looked at
            return type(error).__name__, str(error), list(getattr(error, "__notes__", ()))
        return "", "", []

    first, broken, last = launch(3, work)
    assert broken == ("ValueError", "a stage of a test", ["pipeline: in 1F2 on pipeline rank 1"])
    for (kind, message, _), stage in ((first, 0), (last, 2)):
        assert kind == "PipelineError"
        assert f"of stage {stage} with 1" in message
        assert "on pipeline rank 1 failed: " in message


@pytest.mark.ranks
def test_what_is_sent_is_what_the_spec_says() -> None:
    def work(rank: int) -> None:
        def spec32(batch: Batch) -> tuple[Sequence[int], torch.dtype]:
            return spec(batch)[0], torch.float32

        executor = Executor({rank: Stage(rank, 2)}, build("gpipe", 2, 2, 1), world_axis(), spec32)
        found = (
            r"0SEND_F0: transfer_spec says \[2, 3, 8\] torch.float32, .* \[2, 3, 8\] torch.float64"
        )
        with pytest.raises(LayoutError, match=found):
            executor.step([microbatch(0)], 1.0)

    with pytest.raises(AssertionError, match="rank 1") as other:
        launch(2, work)
    assert "1RECV_F0 of stage 1 with 0SEND_F0 on pipeline rank 0 failed" in str(other.value)


@pytest.mark.ranks
def test_refusals_have_the_numbers() -> None:
    def work(_: int) -> None:
        axis = world_axis()
        stages = {0: Stage(0, 2), 1: Stage(1, 2)}
        with pytest.raises(LayoutError, match="2 ranks on 1 pipeline ranks"):
            Executor(stages, build("gpipe", 2, 2, 2), axis, spec)
        with pytest.raises(LayoutError, match=r"rank 0 runs stages \[0\] and has \[0, 1\]"):
            Executor(stages, build("gpipe", 1, 1, 2), axis, spec)
        with pytest.raises(LayoutError, match="needs a program with backward passes"):
            Executor({0: Stage(0, 1)}, build("forward_only", 1, 1, 1), axis, spec).step(
                [microbatch(0)], 1.0
            )
        with pytest.raises(LayoutError, match="3 micro-batches for a program of 2"):
            Executor({0: Stage(0, 1)}, build("gpipe", 1, 1, 2), axis, spec).step(
                [microbatch(i) for i in range(3)], 1.0
            )

    launch(1, work)
