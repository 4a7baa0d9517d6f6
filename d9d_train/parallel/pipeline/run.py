"""A pipeline rank executes its part of a program."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

from d9d_ckpt.errors import LayoutError
from d9d_train.batch import Batch
from d9d_train.mesh import Axis
from d9d_train.parallel.pipeline.actions import (
    GRADIENTS,
    OF_STAGE,
    SENDS,
    Action,
    Kind,
    Program,
    given,
    taken,
)
from d9d_train.parallel.pipeline.split import Graph, splits

TransferSpec = Callable[[Batch], tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of what goes from stage to stage for a micro-batch."""


class PipelineError(RuntimeError):
    """A message between stages failed, mostly because the rank at the other end did."""


def _ignore(_: object) -> None:
    """What is done for who does not ask."""


def _plain(_stage: int, _last: bool) -> AbstractContextManager[None]:
    """What surrounds the gradients of weights where they are nobody else's."""
    return nullcontext()


class Executor:
    """Runs the stages of one pipeline rank through a program, any number of times.

    A stage is called as ``stage(hidden, batch)``; ``hidden`` is what the stage before gave, None for the
    first. The last stage gives the sum of the micro-batch's losses, or logits in an evaluation.

    Args:
        stages: This rank's stages by their index in the pipeline.
        program: Of all ranks, with communication; `schedule.build` makes it.
        axis: The pipeline ranks.
        transfer_spec: Shape and dtype of what goes between stages.
        on_action: Called with each action before it is done; consecutive messages then go as one batch.
        on_first: Called with a stage before its first computation of a step or evaluation.
        on_last_backward: Called with a stage before its last backward pass of a step, if that is a whole
            one: gradients can be reduced once for all micro-batches, each as soon as it is there.
        on_weights: Called with a stage and whether they are its last of a step; surrounds gradients of
            weights apart from those of inputs. The last time, gradients are reduced afterwards.
        on_stage: Called with what concerns a whole stage: UNSHARD, RESHARD, REDUCE_GRAD. Where a program
            has the latter, neither of the former two hooks has to reduce.

    Raises:
        LayoutError: The program is for other ranks or stages.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        program: Program,
        axis: Axis,
        transfer_spec: TransferSpec,
        *,
        on_action: Callable[[Action], None] = _ignore,
        on_first: Callable[[int], None] = _ignore,
        on_last_backward: Callable[[int], None] = _ignore,
        on_weights: Callable[[int, bool], AbstractContextManager[None]] = _plain,
        on_stage: Callable[[Action], None] = _ignore,
    ) -> None:
        _check_executable(stages, program, axis)
        self.stages = stages
        self.axis = axis
        self.transfer_spec = transfer_spec
        self.on_action = on_action
        self.on_first = on_first
        self.on_last_backward = on_last_backward
        self.on_weights = on_weights
        self.on_stage = on_stage
        self.rank_of = program.rank_of
        self.length = program.stages
        self._microbatches = program.microbatches
        self._actions = program.ranks[axis.rank]
        self._forward = program.forward.ranks[axis.rank]
        self.split = {
            (a.stage, a.microbatch)
            for a in self._actions
            if a.kind is Kind.INPUT and splits(stages[a.stage])
        }
        self._met = axis.size == 1

    def step(self, batches: Sequence[Batch], scale: float | torch.Tensor) -> list[torch.Tensor]:
        """Forward and backward passes of all micro-batches; gradients are added to the parameters'.

        Args:
            batches: This rank's micro-batches, of any shapes, the same on all pipeline ranks.
            scale: Of the loss: what its gradient starts with.

        Returns:
            What the last stage gave for each, detached; nothing on the other ranks.

        Raises:
            LayoutError: More or fewer micro-batches than the program has, or it is for evaluation only.
            PipelineError: Another rank failed.
        """
        if self._actions and self._actions == self._forward:
            raise LayoutError(
                "pipeline: a step needs a program with backward passes; evaluate does not"
            )
        return self._walk(self._actions, batches, scale)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """The forward half of `step`, without gradients."""
        return self._walk(self._forward, batches, 1.0)

    def _walk(
        self, actions: tuple[Action, ...], batches: Sequence[Batch], scale: float | torch.Tensor
    ) -> list[torch.Tensor]:
        if len(batches) != self._microbatches:
            raise LayoutError(
                f"pipeline: {len(batches)} micro-batches for a program of {self._microbatches}"
            )
        self._meet(batches[0].tokens.device)
        walk = _Walk(self, batches, scale)
        walk.run(actions)
        return [walk.outputs[i] for i in sorted(walk.outputs)]

    def _meet(self, device: torch.device) -> None:
        """Let all ranks call the group once: NCCL's first batch of messages needs them all, later ones do not."""
        if not self._met:
            dist.all_reduce(torch.zeros(1, device=device), group=self.axis.group)
            self._met = True


class _Walk:
    """One execution of a program by one rank: what it holds goes with it, also when it fails."""

    def __init__(
        self,
        executor: Executor,
        batches: Sequence[Batch],
        scale: float | torch.Tensor,
    ) -> None:
        self.outputs: dict[int, torch.Tensor] = {}
        self._executor = executor
        self._batches = batches
        self._scale = scale
        self._values: dict[Action, torch.Tensor] = {}  # by the message that brings or takes them
        self._graphs: dict[tuple[int, int], Graph] = {}  # by stage and micro-batch
        self._receiving: dict[Action, dist.Work] = {}
        self._sending: list[tuple[Action, dist.Work, torch.Tensor]] = []
        self._lasts: dict[int, Action] = {}

    def run(self, actions: Sequence[Action]) -> None:
        """Do them in order, consecutive messages at once."""
        computations = [action for action in actions if not action.is_message]
        firsts = {action.stage: action for action in reversed(computations)}
        self._lasts = _lasts(computations)
        for messages, group in groupby(actions, lambda action: action.is_message):
            if messages:
                self._exchange(tuple(group))
                continue
            for action in group:
                self._executor.on_action(action)
                if action is firsts[action.stage]:
                    self._executor.on_first(action.stage)
                self._compute(action)
        self._finish_sends()

    def _compute(self, action: Action) -> None:
        try:
            if action.kind in OF_STAGE:
                self._executor.on_stage(action)
            elif action.kind is Kind.FORWARD:
                self._forward(action)
            elif action.kind in GRADIENTS:
                self._backward(action)
            else:
                self._weights(action)
        except Exception as error:
            error.add_note(f"pipeline: in {action} on pipeline rank {self._executor.axis.rank}")
            raise

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, _microbatch(action)
        hidden = self._take(taken(action, self._executor.length))
        if hidden is not None:
            hidden.requires_grad_(torch.is_grad_enabled())
        graph = Graph(hidden, split=(stage, microbatch) in self._executor.split)
        with graph.recording():
            out = self._executor.stages[stage](hidden, self._batches[microbatch])
        if torch.is_grad_enabled():
            graph.end(out)
            self._graphs[stage, microbatch] = graph
        message = given(action, self._executor.length)
        if message is None:
            self.outputs[microbatch] = out.detach()
        else:
            self._give(message, out)

    def _backward(self, action: Action) -> None:
        key = action.stage, _microbatch(action)
        grad = self._take(taken(action, self._executor.length))
        if grad is None:
            grad = torch.as_tensor(self._scale).to(self.outputs[key[1]])
        if action.kind is Kind.INPUT:
            graph = self._graphs[key]
            graph.inputs(grad)
        else:
            graph = self._graphs.pop(key)
            if action is self._lasts.get(action.stage):
                self._executor.on_last_backward(action.stage)
            graph.whole(grad)
        message = given(action, self._executor.length)
        if message is not None:
            self._give(message, _gradient(graph, action))

    def _weights(self, action: Action) -> None:
        graph = self._graphs.pop((action.stage, _microbatch(action)))
        last = action is self._lasts.get(action.stage)
        with self._executor.on_weights(action.stage, last):
            graph.weights()

    def _give(self, message: Action, value: torch.Tensor) -> None:
        """Leave a result for its send, or for the stage that takes it where that is on this rank."""
        here = message.far in self._executor.stages
        self._values[message.counterpart if here else message] = value.detach().contiguous()

    def _take(self, message: Action | None) -> torch.Tensor | None:
        if message is None:
            return None
        work = self._receiving.pop(message, None)
        if work is not None:
            self._wait(message, work)
        return self._values.pop(message)

    def _exchange(self, messages: tuple[Action, ...]) -> None:
        """Begin a batch of messages.

        What it receives is waited for where it is needed. What it sends is waited for before the next
        batch: the computation between them hides it, and no more than one result is held by it.
        """
        self._finish_sends()
        operations = [self._operation(message) for message in messages]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._failure(messages, error) from error
        if len(works) < len(messages):
            works = works * len(messages)  # NCCL has one for the whole batch
        for message, operation, work in zip(messages, operations, works, strict=True):
            if message.kind in SENDS:
                self._sending.append((message, work, operation.tensor))
            else:
                self._receiving[message] = work
                self._values[message] = operation.tensor

    def _operation(self, message: Action) -> dist.P2POp:
        self._executor.on_action(message)
        batch = self._batches[_microbatch(message)]
        shape, dtype = self._executor.transfer_spec(batch)
        group, peer = self._executor.axis.group, self._executor.rank_of[message.far]
        if message.kind in SENDS:
            value = self._values.pop(message)
            _check_sent(message, value, tuple(shape), dtype)
            return dist.P2POp(dist.isend, value, group=group, group_peer=peer)
        empty = torch.empty(tuple(shape), dtype=dtype, device=batch.tokens.device)
        return dist.P2POp(dist.irecv, empty, group=group, group_peer=peer)

    def _finish_sends(self) -> None:
        for message, work, _ in self._sending:
            self._wait(message, work)
        self._sending.clear()

    def _wait(self, message: Action, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failure((message,), error) from error

    def _failure(self, messages: Sequence[Action], error: RuntimeError) -> PipelineError:
        ends = ", ".join(
            f"{m} of stage {m.stage} with {m.counterpart} on pipeline rank {self._executor.rank_of[m.far]}"
            for m in messages
        )
        return PipelineError(f"pipeline: {ends} failed: {error}; see what that rank reports")


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None  # noqa: S101 - for the type checker
    return action.microbatch


def _lasts(actions: Sequence[Action]) -> dict[int, Action]:
    """Of each stage whose gradients the program does not reduce by itself, the last that gives some."""
    reduced = {action.stage for action in actions if action.kind is Kind.REDUCE_GRAD}
    kinds = Kind.BACKWARD, Kind.WEIGHT
    return {a.stage: a for a in actions if a.kind in kinds and a.stage not in reduced}


def _gradient(graph: Graph, action: Action) -> torch.Tensor:
    gradient = graph.take()
    if gradient is None:
        raise RuntimeError(
            f"{action}: what stage {action.stage} gives does not depend on its input"
        )
    return gradient


def _check_sent(
    message: Action, value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if (tuple(value.shape), value.dtype) != (shape, dtype):
        raise LayoutError(
            f"pipeline: {message}: transfer_spec says {list(shape)} {dtype}, the stage gave "
            f"{list(value.shape)} {value.dtype}"
        )


def _check_executable(stages: Mapping[int, nn.Module], program: Program, axis: Axis) -> None:
    if len(program.ranks) != axis.size:
        raise LayoutError(
            f"pipeline: a program for {len(program.ranks)} ranks on {axis.size} pipeline ranks"
        )
    actions = program.ranks[axis.rank]
    wanted = {action.stage for action in actions}
    if wanted != set(stages):
        raise LayoutError(
            f"pipeline: rank {axis.rank} runs stages {sorted(wanted)} and has {sorted(stages)}"
        )
