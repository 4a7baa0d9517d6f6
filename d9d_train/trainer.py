"""A run, step after step."""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from d9d_ckpt.checkpointer.cursor import DataCursor
from d9d_ckpt.errors import CheckError
from d9d_train.checkpoint import Checkpoints
from d9d_train.config import Config
from d9d_train.data.loader import Loader
from d9d_train.launch import Stopping
from d9d_train.mesh import Mesh
from d9d_train.models.decoder import CausalLM
from d9d_train.optim.lr import learning_rate
from d9d_train.parallel.fsdp import units
from d9d_train.parallel.stages import saved_tensors
from d9d_train.step import Outcome, Stepper
from d9d_train.telemetry import (
    Capture,
    Progress,
    StepMetrics,
    Tracker,
    peak_flops,
    peak_memory,
)

_LOG = logging.getLogger(__name__)

_SMOOTHING = 0.1
"""Weight of a step's loss in the running mean that spikes are measured against."""


@dataclass
class RunState:
    """Where a run stands, beside its tensors and its data.

    Attributes:
        step: Steps done.
        bad: Steps skipped in a row.
        loss: Running mean of the loss; None before the first step.
    """

    step: int = 0
    bad: int = 0
    loss: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.step, self.bad, self.loss = state["step"], state["bad"], state["loss"]

    def good(self, loss: float, norm: float, spike: float) -> bool:
        """Whether a step may be applied: all of it finite, its loss no spike."""
        high = spike and self.loss is not None and loss > spike * self.loss
        return math.isfinite(loss) and math.isfinite(norm) and not high

    def took(self, outcome: Outcome) -> None:
        """Note what a step came to."""
        self.step += 1
        self.bad = 0 if outcome.applied else self.bad + 1
        if outcome.applied:
            before = outcome.loss if self.loss is None else self.loss
            self.loss = before + _SMOOTHING * (outcome.loss - before)


@dataclass(frozen=True)
class Validation:
    """The loss on the same batches every time.

    Attributes:
        every: Steps between two.
        batches: Steps of the loader that one takes.
        loader: Gives their micro-batches.
        cursor: Of the loader alone.
        stepper: Has the model.
    """

    every: int
    batches: int
    loader: Loader
    cursor: DataCursor
    stepper: Stepper

    def due(self, step: int) -> bool:
        """Whether it is time."""
        return step % self.every == 0

    def loss(self) -> float:
        """Mean over the labels that count, over all ranks; the model is as it was before."""
        first = self.cursor.consumed
        for stage in self.stepper.stages.values():
            stage.eval()
        try:
            total, counted = self._sums()
        finally:
            self.cursor.consumed = first
            self.loader.close()
            for stage in self.stepper.stages.values():
                stage.train()
                for unit in units(stage):
                    unit.reshard()
        return float(total / counted.clamp(min=1))

    def _sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of losses and of labels that count, 0-D on every rank."""
        mesh = self.stepper.mesh
        total = torch.zeros((), dtype=torch.float64, device=mesh.torch_device)
        counted = 0
        for _ in range(self.batches):
            work = next(self.loader)
            counted += work.counted
            total += sum(self.stepper.executor.evaluate(work.batches))
        # Over the world, so that all ranks have the same to the bit; ranks along tp had the same before.
        total /= mesh.topology.tp
        dist.all_reduce(total)
        return total, self.stepper.tokens(counted)


@dataclass(frozen=True)
class Run:
    """Everything that a run consists of on this rank.

    Attributes:
        config: Its config.
        mesh: This rank's.
        stages: This rank's part of the model.
        stepper: Takes steps.
        loader: Gives their micro-batches.
        cursor: Where the data stand.
        state: Where the run stands.
        validation: None where the config asks for none.
        checkpoints: Saves; None where the config names no URL.
        tracker: Where metrics go; None on ranks that tell nothing.
        progress: This rank's last action.
        flops: Floating-point operations of a token.
        parameters: Of the rank that holds most.
    """

    config: Config
    mesh: Mesh
    stages: Mapping[int, CausalLM]
    stepper: Stepper
    loader: Loader
    cursor: DataCursor
    state: RunState
    validation: Validation | None
    checkpoints: Checkpoints | None
    tracker: Tracker | None
    progress: Progress
    flops: int
    parameters: int

    @property
    def over(self) -> bool:
        """Whether the last step is done."""
        return self.state.step >= self.config.train.steps

    def train(self, stopping: Stopping) -> None:
        """Step after step, until the last or until a signal asks for the end; all saves are committed then.

        Raises:
            CheckError: Too many steps in a row were bad.
            CkptError: A save has failed.
        """
        capture = Capture(self.config.metrics, rank=dist.get_rank(), device=self.mesh.torch_device)
        last = stopping.at(self.state.step) or self.over
        while not last:
            begun = time.perf_counter()
            self.progress.begin(self.state.step + 1)
            with capture.around(self.state.step + 1):
                outcome, lr = self._step()
            seconds = time.perf_counter() - begun
            last = stopping.at(self.state.step) or self.over
            self._finish(outcome, lr, seconds, last=last)
        if self.checkpoints is not None:
            self.progress.at("wait for the last save")
            self.checkpoints.wait()
        if not self.over:
            self._warn("stopped by a signal after step %d", self.state.step)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "model": saved_tensors(self.stages),
            "optim": self.stepper.optimizer,
            "data": self.cursor,
            "run": self.state,
        }

    def _step(self) -> tuple[Outcome, float]:
        number = self.state.step + 1
        lr = learning_rate(self.config.optim, number)
        self.progress.at("data")
        work = next(self.loader)
        outcome = self.stepper.step(number, work.batches, work.counted, lr, self._judge)
        self.state.took(outcome)
        return outcome, lr

    def _judge(self, loss: float, norm: float) -> bool:
        self.progress.at("update")
        return self.state.good(loss, norm, self.config.train.spike)

    def _finish(self, outcome: Outcome, lr: float, seconds: float, *, last: bool) -> None:
        """All that follows a step.

        Its line is told once the save has its copy and before anything waits for the store: a step that
        is resumed from has been told of.
        """
        validation = self._validated()
        begun = time.perf_counter()
        self._save(last=last)
        seconds += time.perf_counter() - begun
        stall = 0.0 if self.checkpoints is None else self.checkpoints.stall()
        self._tell(outcome, lr, seconds, stall, validation)
        self._check(outcome)

    def _validated(self) -> dict[str, float]:
        """The validation's loss, when it is time."""
        if self.validation is None or not self.validation.due(self.state.step):
            return {}
        self.progress.at("validation")
        return {"validation_loss": self.validation.loss()}

    def _save(self, *, last: bool) -> None:
        """Save when it is time, but for a state that has just met a bad step: it may be the cause."""
        if self.checkpoints is None:
            return
        step = self.state.step
        if not (last or step % self.config.checkpoint.every == 0):
            self.checkpoints.poll()
        elif self.state.bad:
            self._warn("step %d is not saved: it was skipped", step)
        else:
            self.progress.at("save")
            self.checkpoints.save(step, self.saved())

    def _check(self, outcome: Outcome) -> None:
        """Stop a run that goes nowhere."""
        if outcome.applied:
            return
        step, bad, most = self.state.step, self.state.bad, self.config.train.max_bad_steps
        what = f"step {step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}"
        if bad > most:
            raise CheckError(
                f"{what}: skipped, as were the {bad - 1} before it, and train.max_bad_steps is {most}; "
                f"step {step - bad} is the last good one, and nothing later was saved"
            )
        self._warn("%s: skipped, %d in a row", what, bad)

    def _warn(self, message: str, *values: object) -> None:
        """Say it once, not on every rank."""
        if dist.get_rank() == 0:
            _LOG.warning(message, *values)

    def _tell(
        self,
        outcome: Outcome,
        lr: float,
        seconds: float,
        stall: float,
        validation: Mapping[str, float],
    ) -> None:
        if self.tracker is None:
            return
        train, device = self.config.train, self.mesh.torch_device
        tokens = train.global_batch * train.seq_len
        rate = tokens / seconds
        peak = peak_flops(device, self.config.metrics)
        told = StepMetrics(
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=lr,
            tokens=tokens,
            tokens_per_s=rate,
            mfu=None if peak is None else rate * self.flops / (peak * dist.get_world_size()),
            step_s=seconds,
            ckpt_stall_s=stall,
            local_parameters=self.parameters,
            peak_memory=peak_memory(device),
            expert_load=outcome.expert_load or None,
        )
        self.tracker.log(self.state.step, {**asdict(told), **validation})
