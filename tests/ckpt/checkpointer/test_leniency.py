"""`load` is strict; what it may pass over is said by name, tensors and values alike."""

import re

import pytest
import torch
from torch import nn

from d9d_ckpt import Checkpointer, DataCursor
from d9d_ckpt.errors import MappingError, RequestError


@pytest.fixture
def saver(tmp_path):
    with Checkpointer(tmp_path / "run") as made:
        yield made


def saved(saver, **state):
    saver.save(1, state, blocking=True)


def three():
    return {"a.w": torch.ones(2), "a.b": torch.ones(3), "old.w": torch.ones(1)}


# -- allow_missing -------------------------------------------------------------------------------


def test_values_that_the_checkpoint_lacks_are_missing_by_their_path(saver):
    saved(saver, model=three(), data={"at": 3})
    live = {"w": torch.zeros(2)}
    state = {"model": three(), "data": {"at": 0, "epoch": 5}, "step": 7, "ema": live}
    with pytest.raises(MappingError, match=r"3 names of the state .*: data\.epoch, step, ema\.w"):
        saver.load(state)
    assert state["data"] == {"at": 0, "epoch": 5}
    report = saver.load(state, allow_missing=["data.*", "st?p", "ema.w"])
    assert report.missing == ("data.epoch", "step", "ema.w")
    assert (state["data"], state["step"]) == ({"at": 3, "epoch": 5}, 7)
    assert not live["w"].any()


def test_objects_that_the_checkpoint_lacks_are_missing_as_a_whole(saver):
    saved(saver, model=three())
    cursor = DataCursor(64, 1, consumed=8)
    state = {"model": three(), "data": cursor}
    with pytest.raises(MappingError, match="1 names of the state are not in it: data"):
        saver.load(state)
    with pytest.raises(RequestError, match=r"allow_missing='data\.\*' matches no name"):
        saver.load(state, allow_missing=["data.*"])
    assert saver.load(state, allow_missing=["data"]).missing == ("data",)
    assert cursor.consumed == 8


@pytest.mark.parametrize("glob", ["q*", "step", "a.w", ""])
def test_a_rule_for_what_is_not_missing_is_a_mistake(saver, glob):
    """Also when it names what is there, tensor or value: it was written for another checkpoint."""
    saved(saver, model=three(), step=1)
    state = {"model": three() | {"c": torch.zeros(1)}, "step": 0}
    message = re.escape(f"allow_missing={glob!r} matches no name; drop it, or correct it")
    with pytest.raises(RequestError, match=message):
        saver.load(state, allow_missing=["c", glob])
    assert state["step"] == 0


# -- ignore --------------------------------------------------------------------------------------


def test_what_is_ignored_is_not_read_and_no_error(saver):
    saved(saver, model=three())
    model = {name: torch.zeros_like(t) for name, t in three().items() if name != "old.w"}
    with pytest.raises(MappingError, match=r"1 of its tensors have no place: old\.w"):
        saver.load({"model": model})
    report = saver.load({"model": model}, ignore=["old.*"])
    assert (report.loaded, report.missing) == (("a.w", "a.b"), ())
    assert report.unexpected == ("old.w",)
    assert report.bytes_read == 20


def test_what_is_ignored_is_not_loaded_though_there_is_a_place(saver):
    saved(saver, model=three())
    model = {name: torch.zeros_like(t) for name, t in three().items()}
    with pytest.raises(MappingError, match=r"1 names of the state are not in it: a\.w"):
        saver.load({"model": model}, ignore=["a.w"])
    report = saver.load({"model": model}, ignore=["a.w"], allow_missing=["a.w"])
    assert report.loaded == ("a.b", "old.w")
    assert not model["a.w"].any()
    assert model["a.b"].all()


def test_an_ignored_tensor_may_be_of_another_shape_and_dtype(saver):
    saved(saver, model=three())
    model = three() | {"a.w": torch.zeros(9, dtype=torch.int8)}
    saver.load({"model": model}, ignore=["a.w"], allow_missing=["a.w"])
    assert not model["a.w"].any()


@pytest.mark.parametrize("glob", ["q*", "model.a.w", ""])
def test_a_rule_that_ignores_nothing_is_a_mistake(saver, glob):
    saved(saver, model=three())
    message = re.escape(f"ignore={glob!r} matches no name; drop it, or correct it")
    with pytest.raises(RequestError, match=message):
        saver.load({"model": three()}, ignore=["a.w", glob])


def test_moments_that_are_ignored_start_anew(saver):
    net = nn.Linear(2, 1)
    optim = torch.optim.AdamW(net.parameters(), lr=0.5)
    net(torch.ones(2)).sum().backward()
    optim.step()
    saved(saver, model=net, optim=optim)
    other = nn.Linear(2, 1)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    slots = ["optim.exp_avg*", "optim.step.*"]
    report = saver.load({"model": other, "optim": fresh}, ignore=slots)
    assert report.fresh == ("optim.*.weight", "optim.*.bias")
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.5


def test_values_that_nothing_asks_for_are_in_the_report(saver):
    saved(saver, model=three(), step=7, args={"lr": 0.5})
    assert saver.load({"model": three()}).extra == {"step": 7, "args": {"lr": 0.5}}


# -- values --------------------------------------------------------------------------------------


def test_values_are_ignored_by_their_path_and_not_loaded(saver):
    saved(saver, model=three(), step=7, data={"at": 3, "seed": 1}, args={"lr": 0.5})
    state = {"model": three(), "step": 0, "data": {"at": 0, "seed": 0}}
    with pytest.raises(MappingError, match=r"2 names of the state .*: step, data\.at"):
        saver.load(state, ignore=["step", "data.at"])
    report = saver.load(state, ignore=["st*", "data.at", "args"], allow_missing=["step", "data.at"])
    assert (state["step"], state["data"]) == (0, {"at": 0, "seed": 1})
    assert report.extra == {"data": {"seed": 1}}
    assert report.unexpected == ("step", "data.at", "args")
    assert report.missing == ("step", "data.at")


def test_an_object_is_ignored_with_all_that_it_kept(saver):
    saved(saver, model=three(), data=DataCursor(64, 1, consumed=40))
    cursor = DataCursor(32, 5)
    state = {"model": three(), "data": cursor}
    saver.load(state, ignore=["data"], allow_missing=["data"])
    assert cursor == DataCursor(32, 5)


def test_an_optimizer_that_is_ignored_keeps_its_settings_only_when_asked(saver):
    net = nn.Linear(2, 1)
    saved(saver, model=net, optim=torch.optim.AdamW(net.parameters(), lr=0.5))
    fresh = torch.optim.AdamW(net.parameters(), lr=0.1)
    state = {"model": net, "optim": fresh}
    with pytest.raises(MappingError, match="1 names of the state are not in it: optim"):
        saver.load(state, ignore=["optim.*"])
    report = saver.load(state, ignore=["optim.*"], allow_missing=["optim"])
    assert report.missing == ("optim",)
    assert fresh.param_groups[0]["lr"] == 0.1


def test_a_name_that_is_tied_is_ignored_alone(saver):
    weight = torch.ones(3)
    saved(saver, model={"emb": weight, "head": weight})
    emb, head = torch.zeros(3), torch.zeros(3)
    state = {"model": {"emb": emb, "head": head}}
    report = saver.load(state, ignore=["head"], allow_missing=["head"])
    assert (report.loaded, report.unexpected) == (("emb",), ("head",))
    assert emb.all()
    assert not head.any()


class Extra(nn.Linear):
    """Extra state that is JSON."""

    def get_extra_state(self):
        return {"amax": 1.5}

    def set_extra_state(self, state):
        self.amax = state["amax"]


def test_a25_d05_extra_state_that_has_no_place_is_passed_over_only_by_a_rule(saver):
    saved(saver, model=nn.Sequential(Extra(2, 2), Extra(2, 2)))
    plain = {"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}
    with pytest.raises(
        MappingError, match=r"2 of its tensors have no place: 0\._extra_state, 1\._extra_state"
    ):
        saver.load(plain)
    report = saver.load(plain, ignore=["*._extra_state"])
    assert report.unexpected == ("0._extra_state", "1._extra_state")
    # A weight that is missing is missing all the same.
    more = {"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))}
    with pytest.raises(MappingError, match=r"2 names of the state .*: 2\.weight, 2\.bias"):
        saver.load(more, ignore=["*._extra_state"])
