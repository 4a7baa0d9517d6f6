"""The loop: bad steps, validation, what waits for storage, export, and the end of a rank that fails."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import launch
from helpers.runs import Place, Sections, mesh, warnings_of
from helpers.savers import writer_pid
from helpers.trainers import DENSE, MOE, VOCAB
from transformers import AutoModelForCausalLM

import d9d_ckpt
from d9d_ckpt.api import list_steps
from d9d_train.build import train
from d9d_train.config import Config
from d9d_train.data.opening import open_stream
from d9d_train.layers.head import LMHead
from d9d_train.optim.shards import shard
from d9d_train.step import Outcome, Stepper

pytestmark = pytest.mark.ranks

PLAIN: Sections = {"train": {"balance_bias": 0.0, "balance_loss": 0.0}}
EACH: Sections = {"checkpoint": {"every": 1}}


def whole(place: Place) -> list[int]:
    return [step.step for step in list_steps(place.run).steps if step.complete]


def tried(config: Config) -> str:
    """How a run on this rank ends: what it raises with all notes, or nothing."""
    try:
        train(config)
    except Exception as error:  # noqa: BLE001 - told to the test
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return ""


def poison(
    monkeypatch: pytest.MonkeyPatch,
    when: Callable[[int], bool],
    what: Callable[[Stepper, Any], Any],
) -> None:
    """Let ``what`` come of the gradients of some steps in place of their loss."""
    real_step, real_gradients = Stepper.step, Stepper.gradients
    now = [0]

    def step(self: Stepper, number: int, *rest: Any) -> Outcome:
        now[0] = number
        return real_step(self, number, *rest)

    def gradients(self: Stepper, *given: Any) -> torch.Tensor:
        loss = real_gradients(self, *given)
        return what(self, loss) if when(now[0]) else loss

    monkeypatch.setattr(Stepper, "step", step)
    monkeypatch.setattr(Stepper, "gradients", gradients)


def nan_on_one_rank(stepper: Stepper, loss: torch.Tensor) -> torch.Tensor:
    """One element of one gradient on the last rank."""
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        gradient = next(p.grad for p in stepper.optimizer.parameters.values() if shard(p).numel())
        shard(gradient).view(-1)[0] = float("nan")
    return loss


def infinite(stepper: Stepper, loss: torch.Tensor) -> torch.Tensor:
    del stepper
    return loss * float("inf")


def tenfold(stepper: Stepper, loss: torch.Tensor) -> torch.Tensor:
    del stepper
    return loss * 10


@pytest.mark.parametrize(
    ("what", "shown"), [(nan_on_one_rank, "grad_norm"), (infinite, "loss"), (tenfold, None)]
)
def test_a_bad_step_is_skipped_on_all_ranks_and_not_saved(
    what: Callable[..., Any], shown: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    poison(monkeypatch, lambda step: step == 3, what)
    place = Place(tmp_path)
    place.train(4, EACH, {"train": {"spike": 3.0}}, mesh(2, pp=2, dp_shard=2, ep=2))
    assert whole(place) == [1, 2, 4]
    lines = place.lines()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    nulls = {key for line in lines for key in ("loss", "grad_norm") if line[key] is None}
    assert nulls == ({shown} if shown else set())
    # Its samples are gone, but for them nothing has changed: Adam has taken three steps.
    values = d9d_ckpt.open(place.run).metadata["values"]
    assert values["optim"]["step"] == 3
    assert values["run"] == {"step": 4, "bad": 0, "loss": pytest.approx(lines[0]["loss"], rel=0.1)}


def test_spikes_pass_unless_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch, lambda step: step == 3, tenfold)
    place = Place(tmp_path, DENSE)
    place.train(3, PLAIN, EACH)
    assert whole(place) == [1, 2, 3]


def test_a_bad_last_step_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch, lambda step: step == 3, infinite)
    place = Place(tmp_path, DENSE)
    place.train(3, PLAIN, {"checkpoint": {"every": 2}})
    assert whole(place) == [2]


def test_too_many_bad_steps_end_the_run_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    poison(monkeypatch, lambda step: step > 2, nan_on_one_rank)
    place = Place(tmp_path, DENSE)
    made = place.config(20, PLAIN, EACH, {"train": {"max_bad_steps": 2}}, mesh(dp_shard=2))
    for end in launch(2, lambda rank: tried(made)):
        assert end.startswith("CheckError: step 5: loss ")
        assert "gradient norm nan: skipped, as were the 2 before it" in end
        assert "step 2 is the last good one" in end
    assert whole(place) == [1, 2]
    assert place.lines()[-1]["step"] == 5


def test_poisoned_weights_are_never_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def applied(self: Stepper, *given: Any, **more: Any) -> Outcome:
        outcome = real(self, *given, **more)
        if self.optimizer.steps == 2:
            weight = next(iter(self.optimizer.parameters.values()))
            shard(weight.detach()).view(-1)[0] = float("nan")
        return outcome

    real = Stepper.step
    monkeypatch.setattr(Stepper, "step", applied)
    place = Place(tmp_path, DENSE)
    made = place.config(9, PLAIN, EACH)
    (end,) = launch(1, lambda rank: tried(made))
    # Whichever is noticed first: the save of these weights, or the steps that they spoil.
    assert "nan" in end.lower()
    assert whole(place) == [1]


VALIDATION: Sections = {"validation": {"every": 2, "batches": 2, "first": 1000}}


def validated(folder: Path, *parts: Sections, model: Mapping[str, Any] = MOE) -> Place:
    """Four steps with a validation after the second and the last."""
    place = Place(folder, model)
    place.train(4, VALIDATION, *parts)
    return place


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return validated(tmp_path_factory.mktemp("alone"))


def test_validation_is_told_when_it_is_due(alone: Place):
    assert [line["step"] for line in alone.lines() if "validation_loss" in line] == [2, 4]


@pytest.mark.parametrize(
    "where",
    [mesh(2, pp=2, dp_shard=2, tp=2, ep=4), mesh(4, dp_replicate=2, cp=2, ep=2)],
    ids=["8 with a pipeline", "4 with cp"],
)
def test_validation_is_the_same_on_every_topology(where: Sections, alone: Place, tmp_path: Path):
    place = validated(tmp_path, where)
    for ours, theirs in zip(place.lines(), alone.lines(), strict=True):
        assert ours.keys() == theirs.keys()
        if "validation_loss" in ours:
            assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-12)


@pytest.mark.parametrize("where", [mesh(), mesh(2, dp_shard=2, tp=2)], ids=["1", "4"])
def test_validation_leaves_training_as_it_was(where: Sections, tmp_path: Path):
    seen = validated(tmp_path / "with", where)
    place = Place(tmp_path / "without")
    place.train(4, where)
    for key in ("loss", "grad_norm", "expert_load"):
        assert [line[key] for line in seen.lines()] == [line[key] for line in place.lines()]
    assert d9d_ckpt.diff(seen.run, place.run).equal


def test_a_save_waits_for_its_copy_and_a_slow_store_says_so(tmp_path: Path):
    place = Place(tmp_path, DENSE)
    made = place.config(5, PLAIN, EACH)
    (messages,) = launch(1, lambda rank: slowly(made, 2.0))
    stalls = [line["ckpt_stall_s"] for line in place.lines()]
    # Two copies are taken while nothing is written; the third waits for the first to be.
    assert max(stalls[:2]) < 1.0
    assert stalls[2] > 1.0
    assert all(line["step_s"] >= line["ckpt_stall_s"] for line in place.lines())
    assert any("the store is slower than the saves" in message for message in messages)
    assert whole(place) == [1, 2, 3, 4, 5]


def slowly(made: Config, seconds: float) -> list[str]:
    """Train while the writer stands still at first."""
    with warnings_of("d9d_ckpt") as messages:
        holding = threading.Thread(target=hold_writer, args=(seconds,))
        holding.start()
        train(made)
        holding.join()
    return messages


def hold_writer(seconds: float) -> None:
    while True:
        try:
            writer = writer_pid()
            break
        except ValueError:
            time.sleep(0.001)
    os.kill(writer, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(writer, signal.SIGCONT)


TRANSFORMERS: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "qwen3_moe": ({k: v for k, v in MOE.items() if k != "max_position_embeddings"}, 1e-6),
    "llama": (DENSE, 1e-9),
    # Of these transformers' own defaults are others: 32 KV heads, head_dim 128.
    "qwen3": (
        {
            "family": "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        1e-9,
    ),
}
"""Models, and how near transformers comes: norms and RoPE of it, and its router, compute in float32
whatever the model does."""


@pytest.fixture(scope="module", params=TRANSFORMERS)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Place, Config, float]:
    """A run on four ranks, which ends with an export."""
    model, bound = TRANSFORMERS[request.param]
    place = Place(tmp_path_factory.mktemp(request.param), model)
    made = place.config(
        2,
        PLAIN,
        VALIDATION,
        mesh(2, pp=2, dp_shard=2),
        {"checkpoint": {"export": str(place.folder / "hf")}},
    )
    launch(4, lambda rank: train(made))
    return place, made, bound


def test_an_export_is_the_trained_model(exported: tuple[Place, Config, float]):
    place, made, _ = exported
    report = d9d_ckpt.diff(place.run, made.checkpoint.export)
    assert report.equal, report


def test_transformers_has_the_loss_of_the_validation(exported: tuple[Place, Config, float]):
    place, made, bound = exported
    model = AutoModelForCausalLM.from_pretrained(
        made.checkpoint.export,
        experts_implementation="eager",  # torch's grouped product has no float64
    )
    assert model.dtype == torch.float64
    stream = open_stream(made.validation.data, seq_len=32, vocab_size=VOCAB, seed=0)
    samples = [stream.sample(1000 + n) for n in range(2 * made.train.global_batch)]
    with torch.no_grad():
        logits = model(torch.stack([sample.tokens for sample in samples])).logits
    labels = torch.stack([sample.labels for sample in samples])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert place.lines()[-1]["validation_loss"] == pytest.approx(float(loss), rel=bound)


def test_a_run_starts_from_hugging_face_and_takes_the_tokenizer_along(
    exported: tuple[Place, Config, float], tmp_path: Path
):
    before, source, _ = exported
    hf = Path(source.checkpoint.export)
    (hf / "tokenizer.json").write_text('{"version": "1.0"}')
    place = Place(tmp_path, {"hf": str(hf)})
    export = tmp_path / "out"
    still = {"optim": {"lr": 0.0}, "checkpoint": {"export": str(export)}}
    place.train(2, PLAIN, VALIDATION, still, mesh(dp_shard=2, tp=2))
    (hf / "tokenizer.json").unlink()
    ours, theirs = (run.lines()[-1]["validation_loss"] for run in (place, before))
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert (export / "tokenizer.json").read_text() == '{"version": "1.0"}'
    configs = [json.loads((folder / "config.json").read_text()) for folder in (hf, export)]
    assert configs[0] == configs[1]
    assert d9d_ckpt.diff(str(hf), str(export)).equal


def test_what_could_not_be_exported_is_refused_before_training(tmp_path: Path):
    place = Place(tmp_path)
    export = {"checkpoint": {"export": str(tmp_path / "hf")}}
    biased = place.config(2, export, {"train": {"balance_bias": 0.1}})
    (end,) = launch(1, lambda rank: tried(biased))
    assert "selection bias" in end
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    taken = place.config(2, PLAIN, export, mesh(dp_shard=2))
    for end in launch(2, lambda rank: tried(taken)):
        assert end.startswith("DestinationError: ")
        assert "model.safetensors" in end
    assert not place.metrics.exists()


def test_a_rank_that_fails_ends_all_and_says_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def forward(self: LMHead, *given: Any) -> torch.Tensor:
        if torch.distributed.get_rank() == 3:
            calls.append(1)
            if len(calls) == 4:
                raise ZeroDivisionError("made up")
        return real(self, *given)

    calls: list[int] = []
    real = LMHead.forward
    monkeypatch.setattr(LMHead, "forward", forward)
    place = Place(tmp_path, DENSE)
    made = place.config(9, PLAIN, EACH, mesh(2, pp=2, dp_shard=2))
    ends = launch(4, lambda rank: tried(made))
    assert all(ends)
    assert ends[3].startswith("ZeroDivisionError: made up")
    assert "last actions:" in ends[3]
    assert "step 2, micro-batch 1, 1F1" in ends[3]
    # Lines come from one rank, and are whole.
    assert [line["step"] for line in place.lines()] == [1]


def test_a_failed_save_ends_the_run(tmp_path: Path):
    place = Place(tmp_path, DENSE)
    made = place.config(6, PLAIN, EACH)
    (tmp_path / "run").write_text("a file where a directory has to be")
    (end,) = launch(1, lambda rank: tried(made))
    assert end
    assert len(place.lines() if place.metrics.exists() else []) < 6
