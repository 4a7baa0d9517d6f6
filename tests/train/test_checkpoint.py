"""Where a run starts: the latest whole step, a step by its number, or anew; and what it refuses."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.ranks import launch
from helpers.runs import Place, Sections, mesh, warnings_of
from helpers.trainers import BATCH, DENSE

import d9d_ckpt
from d9d_ckpt.api import list_steps
from d9d_ckpt.errors import CkptError
from d9d_train import checkpoint
from d9d_train.build import train
from d9d_train.checkpoint import described, find_start
from d9d_train.config import Config

pytestmark = pytest.mark.ranks

PLAIN: Sections = {"train": {"balance_bias": 0.0, "balance_loss": 0.0}, "checkpoint": {"every": 2}}


@pytest.fixture
def place(tmp_path: Path, before: Path) -> Place:
    """A run of one process with the whole steps 2, 4 and 6."""
    shutil.copytree(before, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path, DENSE, before)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    Place(folder, DENSE).train(6, PLAIN)
    return folder


def made(place: Place, steps: int, *parts: Sections) -> Config:
    return place.config(steps, PLAIN, *parts)


def said(config: Config, rank: int) -> tuple[list[str], str]:
    """What a run of one rank warned of, and what it was refused for."""
    with warnings_of("d9d_train") as messages:
        try:
            train(config)
        except CkptError as error:
            return messages, f"{type(error).__name__}: {error}"
    return messages, ""


def run(config: Config) -> tuple[list[str], str]:
    """The same of all ranks, which are refused alike."""
    ranks = launch(config.topology.world, lambda rank: said(config, rank))
    assert {refusal for _, refusal in ranks} == {ranks[0][1]}
    return ranks[0]


def whole(place: Place) -> list[int]:
    return [step.step for step in list_steps(place.run).steps if step.complete]


def manifest(place: Place, step: int) -> Path:
    return Path(place.run) / f"step-{step:08d}" / "manifest.json"


def resume(value: object, **more: object) -> Mapping[str, Mapping[str, object]]:
    return {"checkpoint": {"resume": value, **more}}


def test_auto_goes_on_from_the_latest_step(place: Place):
    assert run(made(place, 7)) == ([], "")
    assert [line["step"] for line in place.lines()] == list(range(1, 8))
    assert whole(place) == [2, 4, 6, 7]


def test_a_run_that_is_over_does_nothing(place: Place):
    assert run(made(place, 6)) == ([], "")
    assert len(place.lines()) == 6


def test_auto_passes_over_a_half_written_step(place: Place):
    manifest(place, 6).unlink()
    before = place.lines()
    messages, refusal = run(made(place, 6))
    assert not refusal
    assert any("step 6 is not whole: no manifest" in message for message in messages)
    assert [line["loss"] for line in place.lines()] == [line["loss"] for line in before]
    assert whole(place) == [2, 4, 6]


def test_never_starts_anew_where_nothing_is(tmp_path: Path):
    place = Place(tmp_path, DENSE)
    assert run(place.config(1, PLAIN, resume("never"))) == ([], "")
    assert whole(place) == [1]


def test_never_does_not_touch_another_run(place: Place):
    _, refusal = run(made(place, 8, resume("never"), mesh(dp_shard=2)))
    assert refusal.startswith("DestinationError: ")
    assert "holds steps 2, 4, 6 of a run" in refusal
    assert whole(place) == [2, 4, 6]
    assert len(place.lines()) == 6


def test_a_step_goes_back_and_takes_the_later_ones_away(place: Place):
    before = place.lines()
    messages, refusal = run(made(place, 5, resume(2, every=5)))
    assert not refusal
    assert any("its steps 4, 6 are deleted" in message for message in messages)
    assert whole(place) == [2, 5]
    assert [line["loss"] for line in place.lines()] == [line["loss"] for line in before[:5]]


def test_going_back_with_retention_keeps_what_is_new(place: Place):
    assert not run(made(place, 4, resume(2, keep_last=1, every=1), mesh(dp_shard=2)))[1]
    assert whole(place) == [4]


def test_later_steps_stay_until_something_takes_their_place(place: Place):
    assert not run(made(place, 2, resume(2)))[1]
    assert whole(place) == [2, 4, 6]


def test_a_step_that_is_not_there_is_refused(place: Place):
    manifest(place, 6).unlink()
    _, refusal = run(made(place, 8, resume(6)))
    assert "has no whole step 6; whole are: 2, 4" in refusal


def test_another_config_is_refused_with_both_values(place: Place):
    changed = {"optim": {"lr": 0.5}, "train": {"dropout": 0.25}}
    _, refusal = run(made(place, 7, changed, mesh(dp_shard=2)))
    assert refusal.startswith("RequestError: ")
    assert "optim.lr was 0.01, is 0.5" in refusal
    assert "train.dropout was 0.1, is 0.25" in refusal
    assert whole(place) == [2, 4, 6]


def test_what_is_allowed_may_change(place: Place):
    allowed = {"checkpoint": {"allow_changes": ["optim.lr"]}}
    assert run(made(place, 7, {"optim": {"lr": 0.5}}, allowed)) == ([], "")
    assert place.lines()[-1]["lr"] == 0.5
    saved = json.loads(manifest(place, 7).read_text())["values"]["config"]
    assert saved["optim"]["lr"] == 0.5


def test_other_data_go_on_at_the_same_position(place: Place, before: Path, tmp_path: Path):
    for name in ("tokens.bin", "tokens.bin.mask"):
        (tmp_path / name).write_bytes((before / name).read_bytes() * 2)
    other = Place(tmp_path, DENSE)
    keys = ["data.tokens.files", "data.tokens.masks"]
    assert "data.tokens.files was" in run(made(other, 7))[1]
    assert run(made(other, 7, {"checkpoint": {"allow_changes": keys}})) == ([], "")
    saved = json.loads(manifest(place, 7).read_text())["values"]["data"]
    assert saved["consumed"] == 7 * BATCH


def test_other_code_warns(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "code_hash", lambda: "another")
    messages, refusal = run(made(place, 7))
    assert not refusal
    assert [m for m in messages if "was written by other code" in m]


def test_a_schedule_keeps_its_length(tmp_path: Path):
    place = Place(tmp_path, DENSE)
    cosine = {"optim": {"schedule": "cosine"}}
    place.train(2, PLAIN, cosine)
    longer = place.config(9, PLAIN, cosine)
    total = launch(1, lambda rank: find_start(longer).config.optim.total_steps)
    assert total == [2]
    longer = place.config(9, PLAIN, {"optim": {"schedule": "cosine", "total_steps": 9}})
    assert "optim.total_steps was 2, is 9" in run(longer)[1]


def test_a_checkpoint_of_something_else_is_refused(place: Place):
    path = manifest(place, 6).parent
    shutil.rmtree(path)
    shutil.rmtree(manifest(place, 4).parent)
    launch(1, lambda rank: other_save(place.run))
    assert "was not saved by a run of this trainer" in run(made(place, 8))[1]


def other_save(url: str) -> None:
    with d9d_ckpt.Checkpointer(url) as saver:
        saver.save(7, {"epoch": 1}, blocking=True)


def test_no_access_to_a_store_is_told_to_others(tmp_path: Path):
    secret = {"secret": "xyzzy"}
    options = {"checkpoint": {"storage_options": secret}, "metrics": {"jsonl": "m"}}
    config = Place(tmp_path, DENSE).config(1, PLAIN, options)
    assert "xyzzy" in json.dumps(config.to_json())
    assert "xyzzy" not in json.dumps(described(config))
