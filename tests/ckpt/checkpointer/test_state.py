import collections
import types

import pytest
import torch
from helpers.meshes import fake_rank, fresh_mesh, on_fake_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from d9d_ckpt.checkpointer.base import Saved
from d9d_ckpt.checkpointer.state import flatten, take_in
from d9d_ckpt.errors import CorruptError, MappingError, RequestError, UsageError
from d9d_ckpt.tensors import DTYPES, Region, TensorSpec


def copied(flat):
    return {name: held.local.clone() for name, held in flat.tensors.items()}


def saved_of(flat):
    return Saved({n: held.spec for n, held in flat.tensors.items()}, flat.values, flat.tied)


def load(state, saved, tensors):
    intake = take_in(state, saved)
    for name, held in intake.tensors.items():
        held.local.copy_(tensors[saved.tied.get(name, name)])
    intake.finish()
    return intake


def resumed(state, into):
    flat = flatten(state)
    return load(into, saved_of(flat), copied(flat))


def names(state):
    return list(flatten(state).tensors)


class Sched:
    """An object with a state: a tensor in a list, a tuple, a number."""

    def __init__(self, best=1.0, last=0):
        self.state = {"best": [torch.tensor(best)], "window": (last, last + 1), "last": last}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_a_state_is_named_tensors_and_json():
    flat = flatten(
        {
            "model": nn.Linear(2, 3),
            "ema": {"decay": 0.9, "weights": {"w": torch.zeros(2)}},
            "sched": Sched(last=4),
            "step": 5,
            "data": {"position": 40, "seed": (1, 2)},
        }
    )
    assert list(flat.tensors) == ["weight", "bias", "ema.weights.w", "sched.best.0"]
    assert flat.values == {
        "ema": {"decay": 0.9},
        "sched": {"best": [{"$tensor": "sched.best.0"}], "window": {"$tuple": [4, 5]}, "last": 4},
        "step": 5,
        "data": {"position": 40, "seed": {"$tuple": [1, 2]}},
    }
    assert flat.tied == {}


def test_a_state_of_tensors_alone_has_no_values():
    assert flatten({"model": nn.Linear(2, 3)}).values == {}
    assert flatten({}).tensors == {}


def test_d23_everything_returns_in_place():
    weight, inner, steps = torch.zeros(2), {"position": 0, "old": 1}, [0]
    state = {"w": weight, "data": inner, "steps": steps, "sched": (sched := Sched()), "step": 0}
    intake = resumed(
        {
            "w": torch.tensor([1.0, 2.0]),
            "data": {"position": 40, "old": 2, "new": {1: b"x"}},
            "steps": [1, 2],
            "sched": Sched(best=7.0, last=3),
            "step": 5,
        },
        state,
    )
    assert state["w"] is weight
    assert weight.tolist() == [1, 2]
    assert state["data"] is inner
    assert inner == {"position": 40, "old": 2, "new": {1: b"x"}}
    assert (state["steps"], state["step"]) == ([1, 2], 5)
    assert state["sched"] is sched
    assert sched.state["best"][0].item() == 7
    assert sched.state["window"] == (3, 4)
    assert (intake.missing, intake.unexpected, intake.fresh) == ((), (), ())


def test_nothing_changes_before_finish():
    state = {"data": {"position": 0}, "step": 0, "sched": (sched := Sched())}
    take_in(state, saved_of(flatten({"data": {"position": 4}, "step": 5, "sched": Sched(last=9)})))
    assert (state["data"], state["step"], sched.state["last"]) == ({"position": 0}, 0, 0)


def test_extra_has_the_values_but_for_those_of_objects():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    full = {"model": model, "optim": optimizer, "sched": Sched(), "step": 5, "data": {"at": (4, 0)}}
    saved = saved_of(flatten(full))
    assert dict(take_in(full, saved).extra) == {"step": 5, "data": {"at": (4, 0)}}
    partial = take_in({"model": model, "data": {}}, saved).extra
    assert partial["step"] == 5
    assert partial["data"] == {"at": (4, 0)}
    assert partial["sched"]["last"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=9),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
            ],
            [2],
        ),
    ],
    ids=["multistep", "onecycle", "lambda", "sequential"],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_schedulers_go_on_where_they_were(make):
    def built():
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
        return {"model": module, "optim": optimizer, "sched": make(optimizer)}

    module = nn.Linear(1, 1)
    old = built()
    for _ in range(2):
        old["sched"].step()
    flat = flatten(old)
    new = built()
    load(new, saved_of(flat), copied(flat))
    for _ in range(3):
        old["sched"].step()
        new["sched"].step()
        assert new["sched"].get_last_lr() == old["sched"].get_last_lr()


def test_d24_what_the_checkpoint_lacks_and_has_too_much_is_listed_in_full():
    saved = saved_of(flatten({"model": {"a": torch.zeros(1), "extra": torch.zeros(1)}, "old": 1}))
    state = {
        "model": {"a": torch.zeros(1), "c": torch.zeros(1)},
        "step": 1,
        "sched": Sched(),
        "data": {"at": 1},
    }
    intake = take_in(state, saved)
    assert intake.missing == ("c", "step", "sched", "data.at")
    assert intake.unexpected == ("extra",)
    assert list(intake.tensors) == ["a"]
    assert intake.extra == {"old": 1}
    # A whole state gets no keys that it did not ask for.
    intake.finish()
    assert "old" not in state


def test_a_missing_value_stays_as_it_is():
    state = {"step": 3, "data": {"at": 1}}
    load(state, Saved({}), {})
    assert state == {"step": 3, "data": {"at": 1}}


def test_tied_tensors_are_kept_once_under_the_first_name():
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    flat = flatten({"model": model})
    assert list(flat.tensors) == ["embed.weight"]
    assert flat.tied == {"head.weight": "embed.weight"}
    # The same through detached tensors, which are other objects.
    assert flatten({"model": model.state_dict()}).tied == flat.tied


def test_tied_in_both_is_filled_once():
    def tied():
        weight = torch.zeros(2)
        return weight, {"model": {"embed": weight, "head": weight}}

    source, saved_state = tied()
    source.fill_(4)
    weight, state = tied()
    intake = resumed(saved_state, state)
    assert list(intake.tensors) == ["embed"]
    assert weight.tolist() == [4, 4]
    assert (intake.missing, intake.unexpected) == ((), ())


def test_tied_in_the_checkpoint_alone_fills_both():
    weight = torch.ones(2)
    embed, head = torch.zeros(2), torch.zeros(2)
    intake = resumed(
        {"model": {"embed": weight, "head": weight}}, {"model": {"embed": embed, "head": head}}
    )
    assert list(intake.tensors) == ["embed", "head"]
    assert (embed.tolist(), head.tolist()) == ([1, 1], [1, 1])
    assert intake.unexpected == ()


def test_tied_in_the_state_alone_wants_equal_copies():
    weight = torch.zeros(2)
    state = {"model": {"embed": weight, "head": weight}}
    equal = {"model": {"embed": torch.tensor([1, torch.nan]), "head": torch.tensor([1, torch.nan])}}
    assert resumed(equal, state).unexpected == ()
    assert weight[0] == 1
    unequal = {"model": {"embed": torch.tensor([1.0, 2]), "head": torch.tensor([1.0, 3])}}
    with pytest.raises(MappingError, match=r"'embed' and 'head' are one tensor .* differ"):
        resumed(unequal, state)


def test_a_tied_tensor_is_read_under_whichever_of_its_names_was_saved():
    weight = torch.zeros(2)
    state = {"model": {"embed": weight, "other": weight, "head": weight}}
    intake = resumed({"model": {"head": torch.ones(2)}}, state)
    assert (list(intake.tensors), intake.missing) == (["head"], ())
    assert weight.tolist() == [1, 1]
    assert take_in(state, Saved({})).missing == ("embed",)


@pytest.mark.parametrize("rank", [0, 3])
def test_d25_empty_shards_are_tied_like_full_ones(rank):
    with fake_rank(rank, 4):
        whole = distribute_tensor(torch.zeros(3), fresh_mesh(4), [Shard(0)], src_data_rank=None)
        model = nn.ParameterDict({"embed": nn.Parameter(whole), "other": nn.Parameter(whole + 1)})
        model["head"] = model["embed"]
        for state in (model, model.state_dict()):
            flat = flatten({"model": state})
            assert list(flat.tensors) == ["embed", "other"]
            assert flat.tied == {"head": "embed"}
            assert flat.tensors["embed"].box == (Region((rank,), (1,)) if rank < 3 else None)


def test_d25_one_process_holds_plain_tensors_whole():
    held = flatten({"model": nn.Linear(2, 3)}).tensors["weight"]
    assert held.box == Region((0, 0), (3, 2))


def test_f16_views_are_kept_as_what_they_show():
    x = torch.arange(8.0).reshape(4, 2)
    flat = flatten({"model": {"t": x.t(), "low": x[:3], "high": x[2:], "all": x, "again": x}})
    assert {name: held.spec.shape for name, held in flat.tensors.items()} == {
        "t": (2, 4),
        "low": (3, 2),
        "high": (2, 2),
        "all": (4, 2),
    }
    assert flat.tied == {"again": "all"}
    assert flat.tensors["t"].local.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_f16_an_expanded_view_is_kept_in_full_and_cannot_be_filled():
    state = {"model": {"w": torch.arange(2.0).expand(3, 2)}}
    flat = flatten(state)
    assert flat.tensors["w"].local.tolist() == [[0, 1]] * 3
    with pytest.raises(RequestError, match=r"'w' \[3, 2\] is an expanded view"):
        take_in(state, saved_of(flat))


def test_f16_a_row_of_a_large_tensor_is_the_row():
    held = flatten({"model": {"row": torch.zeros(1000, 1000)[:1]}}).tensors["row"]
    assert held.spec.nbytes == held.local.nbytes == 4000


def test_d09_tensors_of_a_state_are_live_until_they_are_copied():
    step = torch.tensor(1.0)
    held = flatten({"step": step}).tensors["step"]
    step.add_(1)
    assert held.local.item() == 2


class Extra(nn.Module):
    """Extra state of some kind, and a buffer that is not kept."""

    def __init__(self, extra):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.register_buffer("mean", torch.zeros(1))
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize(
    "extra", [{"amax": 3.5}, torch.tensor([1, 2, 3]), {"history": [torch.tensor([1, 2, 3])]}]
)
def test_extra_state_of_modules_returns(extra):
    inside = nn.ModuleDict({"fp8": Extra(extra)})
    other = nn.ModuleDict({"fp8": Extra(None if isinstance(extra, dict) else extra[:0])})
    intake = resumed({"model": inside}, {"model": other})
    assert str(other["fp8"].extra) == str(extra)
    assert (intake.missing, intake.unexpected) == ((), ())
    assert "fp8.cache" not in intake.tensors
    assert {"fp8.w", "fp8.mean"} <= intake.tensors.keys()


def test_extra_state_that_was_not_saved_is_missing():
    saved = saved_of(flatten({"model": {"w": torch.zeros(2), "mean": torch.zeros(1)}}))
    assert take_in({"model": Extra({"a": 1})}, saved).missing == ("_extra_state",)


@pytest.mark.ranks
def test_shards_are_found_after_a_forward_that_left_the_parameters_whole():
    def work(rank):
        model = fully_shard(nn.Linear(2, 5), mesh=fresh_mesh(2), reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2))
        assert not isinstance(model.weight, DTensor)
        held = flatten({"optim": optimizer, "model": model}).tensors["weight"]
        return held.box, held.local.shape

    assert on_fake_ranks(2, work) == [
        (Region((0, 0), (3, 2)), (3, 2)),
        (Region((3, 0), (2, 2)), (2, 2)),
    ]


def test_what_a_modules_hook_makes_goes_back_through_its_load():
    class Halved(nn.Linear):
        """Gives half of its weight to a state_dict, and takes it back."""

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = self.weight.detach() / 2

        def _load_from_state_dict(self, state_dict, prefix, *args):
            if prefix + "weight" in state_dict:
                state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
            super()._load_from_state_dict(state_dict, prefix, *args)

    source, other = Halved(2, 2), Halved(2, 2)
    weight = other.weight
    resumed({"model": source}, {"model": other})
    assert torch.equal(source.weight, other.weight)
    assert other.weight is weight


def test_stages_of_a_pipeline_rank_are_one_model():
    layers = nn.ModuleDict({"3": nn.Linear(1, 1)})
    parts = [nn.ModuleDict({"layers": layers}), nn.ModuleDict({"head": nn.Linear(1, 1)})]
    assert names({"model": parts}) == [
        "layers.3.weight",
        "layers.3.bias",
        "head.weight",
        "head.bias",
    ]


def test_lists_and_nested_dicts_hold_tensors_under_their_path():
    state = {
        "parts": [torch.zeros(1), {"w": torch.zeros(2), "n": 1}, 3],
        "model": {"x": {"y": torch.zeros(3)}},
    }
    flat = flatten(state)
    assert list(flat.tensors) == ["parts.0", "parts.1.w", "x.y"]
    assert flat.values == {"parts": [None, {"n": 1}, 3]}
    first = state["parts"][0]
    other = {
        "parts": [torch.ones(1), {"w": torch.ones(2), "n": 2}, 4],
        "model": {"x": {"y": torch.ones(3)}},
    }
    resumed(other, state)
    assert state["parts"][0] is first
    assert state["parts"][1]["w"].tolist() == [1, 1]
    assert (first.item(), state["parts"][1]["n"], state["parts"][2]) == (1, 2, 4)


def test_a_list_with_tensors_of_another_length_is_refused():
    saved = saved_of(flatten({"parts": [torch.zeros(1), 1]}))
    with pytest.raises(RequestError, match=r"parts: a list of 3 .*one of 2"):
        take_in({"parts": [torch.zeros(1), 1, 2]}, saved)


def test_keys_that_are_no_strings_come_back_as_they_are():
    state = {"data": {0: {"at": 1}, "$odd": 2, 7: torch.zeros(1)}}
    flat = flatten(state)
    assert list(flat.tensors) == ["data.7"]
    assert flat.values == {"data": {"$dict": [[0, {"at": 1}], ["$odd", 2]]}}
    live = {"data": {0: {"at": 0}, "$odd": 0, 7: torch.zeros(1)}}
    load(live, saved_of(flat), copied(flat))
    assert live["data"][0] == {"at": 1}
    assert live["data"]["$odd"] == 2


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ([1], UsageError, "a state is a dict"),
        ({"a": {"set": {1}}}, RequestError, r"a\.set: a builtins\.set"),
        ({"a": (torch.zeros(1), 1)}, UsageError, "a: a tuple with tensors"),
        (
            {"a": {"b.c": torch.zeros(1), "b": {"c": torch.ones(1)}}},
            MappingError,
            r"both 'a\.b\.c'",
        ),
        (
            {"model": {"w": torch.zeros(1, device="meta")}},
            RequestError,
            "'w' is on the meta device",
        ),
        ({"s": Sched}, RequestError, "s: a builtins.type"),
    ],
    ids=["list", "set", "tuple", "collision", "meta", "class"],
)
def test_states_that_cannot_be_kept_are_refused(state, error, message):
    with pytest.raises(error, match=message):
        flatten(state)


def test_values_cannot_be_put_into_what_cannot_be_changed():
    frozen = {"data": types.MappingProxyType({"at": 1})}
    saved = saved_of(flatten(frozen))
    with pytest.raises(UsageError, match="data: 'at' cannot be put"):
        load(frozen, saved, {})


def test_ordered_and_default_dicts_are_states_too():
    state = collections.OrderedDict(step=1, data=collections.defaultdict(int, at=3))
    live = collections.OrderedDict(step=0, data=collections.defaultdict(int))
    resumed(state, live)
    assert (live["step"], live["data"]["at"], live["data"]["none"]) == (1, 3, 0)


def test_an_object_that_is_tensors_of_the_mesh_is_read_by_shards():
    with fake_rank(1, 2):
        ema = Sched()
        ema.state = {
            "w": distribute_tensor(torch.zeros(5), fresh_mesh(2), [Shard(0)], src_data_rank=None)
        }
        saved = Saved(
            {"ema.w": TensorSpec(DTYPES["F32"], (5,))}, {"ema": {"w": {"$tensor": "ema.w"}}}
        )
        intake = take_in({"ema": ema}, saved)
        held = intake.tensors["ema.w"]
        assert held.box == Region((3,), (2,))
        held.local.fill_(6)
        intake.finish()
        assert isinstance(ema.state["w"], DTensor)
        assert ema.state["w"].to_local().tolist() == [6, 6]


def test_a_tensor_of_an_objects_state_that_is_not_there_is_missing():
    saved = Saved({}, {"sched": {"best": {"$tensor": "sched.best"}}})
    sched = Sched(last=9)
    intake = load({"sched": sched}, saved, {})
    assert intake.missing == ("sched.best",)
    assert sched.state["last"] == 9


def test_a_value_takes_what_was_an_object():
    state = {"sched": None}
    intake = resumed({"sched": Sched(best=7.0, last=3)}, state)
    assert state["sched"] == {"best": [torch.tensor(7.0)], "window": (3, 4), "last": 3}
    assert intake.unexpected == ()


def test_values_that_are_damaged_are_found_before_anything_changes():
    with pytest.raises(CorruptError, match="values: "):
        take_in({"at": 1}, Saved({}, {"at": {"$float": []}}))


def test_a_disabled_scaler_has_an_empty_state():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert flatten({"scaler": scaler}).values == {"scaler": {}}
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    resumed({"scaler": scaler}, {"scaler": other})
    assert other.get_scale() == 8.0
