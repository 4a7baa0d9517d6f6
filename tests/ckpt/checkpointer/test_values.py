import json
import math
from collections import Counter, OrderedDict
from enum import IntEnum

import numpy as np
import pytest
import torch

from d9d_ckpt.checkpointer.values import decode, encode, merge, pack, tensors_in, unpack
from d9d_ckpt.errors import CorruptError, RequestError, UsageError


def through_json(value):
    return decode(json.loads(json.dumps(encode(value, "v"), allow_nan=False)))


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, None),
        (True, True),
        (2**200, 2**200),
        (0.1, 0.1),
        ("a\ud800", "a\ud800"),
        (math.inf, {"$float": "inf"}),
        (-math.inf, {"$float": "-inf"}),
        ([1, [2]], [1, [2]]),
        ((0.9, 0.95), {"$tuple": [0.9, 0.95]}),
        ({"a": {"b": 1}}, {"a": {"b": 1}}),
        ({1: "a", (2, 3): None}, {"$dict": [[1, "a"], [{"$tuple": [2, 3]}, None]]}),
        ({"$tuple": 1}, {"$dict": [["$tuple", 1]]}),
        (Counter({30: 2}), {"$counter": [[30, 2]]}),
        (b"\x00\x01\x02", {"$bytes": "AAEC"}),
        (np.float32(1.5), {"$numpy": ["<f4", None, "AADAPw=="]}),
        (np.int64(-1), {"$numpy": ["<i8", None, "//////////8="]}),
        (np.bool_(True), {"$numpy": ["|b1", None, "AQ=="]}),
    ],
)
def test_values_are_written_so_and_come_back(value, written):
    assert encode(value, "v") == written
    back = through_json(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_signed_zero_and_ordered_dicts_come_back():
    assert math.isnan(through_json(math.nan))
    assert math.copysign(1, through_json(-0.0)) == -1
    assert through_json(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert through_json(torch.Size([2, 3])) == (2, 3)


def test_arrays_come_back_with_dtype_and_shape():
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    back = through_json({"keys": array})["keys"]
    assert back.dtype == np.uint16
    assert back.tolist() == [[0, 1, 2], [3, 4, 5]]


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize("odd", [{1, 2}, 1j, Colour.RED, torch.float32, object(), range(3), int])
def test_other_kinds_are_refused_with_their_path(odd):
    with pytest.raises(RequestError, match=r"data\.list\.1: a .* cannot be kept"):
        encode({"list": [0, odd]}, "data")


def test_large_and_object_arrays_are_refused_with_the_way_out():
    with pytest.raises(RequestError, match=r"a\.b: a numpy float64 of 80000 bytes.*from_numpy"):
        encode({"b": np.zeros(10_000)}, "a")
    with pytest.raises(RequestError, match="a: a numpy object"):
        encode(np.array([None]), "a")


def test_tensors_are_kept_by_whoever_takes_them():
    kept = {}

    def keep(path, tensor):
        kept[path] = tensor
        return f"name of {path}"

    best = torch.tensor(3.0)
    written = encode({"best": [best]}, "sched", keep)
    assert written == {"best": [{"$tensor": "name of sched.best.0"}]}
    assert kept["sched.best.0"] is best
    assert list(tensors_in(written)) == ["name of sched.best.0"]
    assert decode(written, {"name of sched.best.0": 7}.__getitem__) == {"best": [7]}
    with pytest.raises(RequestError, match=r"sched\.best: a torch\.Tensor"):
        encode({"best": best}, "sched")


@pytest.mark.parametrize("items", [{}, {"a": 1}, {1: [2]}, {"$float": "nan"}])
def test_one_level_packs_and_unpacks(items):
    assert unpack(pack(items)) == items


@pytest.mark.parametrize(
    "bad",
    [
        {"$float": []},
        {"$tuple": 3},
        {"$dict": [[1]]},
        {"$bytes": "!"},
        {"$numpy": ["O", None, ""]},
        {"$numpy": ["<f4", [2], "AADAPw=="]},
        {"$later": 1},
    ],
)
def test_what_encode_never_writes_is_corrupt(bad):
    with pytest.raises(CorruptError, match="values: "):
        decode({"a": [bad]})


@pytest.mark.parametrize("steps", [0, 1])
def test_the_state_dict_of_an_optimizer_is_refused(steps):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    with pytest.raises(UsageError, match=r"run\.optim: .*pass the optimizer itself"):
        encode({"optim": optimizer.state_dict()}, "run")


def test_d20_groups_of_equal_settings_are_one_over_the_stages_of_a_pipeline():
    def group(names, lr):
        return {"params": names, "lr": lr}

    stages = [
        {"step": 5, "optim": {"param_groups": [group(["a", "b"], 0.1), group(["c"], 0.2)]}},
        {"step": 5, "optim": {"param_groups": [group(["d", "a"], 0.1)]}},
    ]
    groups = [group(["a", "b", "d"], 0.1), group(["c"], 0.2)]
    assert merge(stages) == {"step": 5, "optim": {"param_groups": groups}}
    assert stages[0]["optim"]["param_groups"][0]["params"] == ["a", "b"]


def test_merging_joins_dicts_by_key():
    assert merge([{"data": {"rank-0": 3}}, {"data": {"rank-1": [4]}}]) == {
        "data": {"rank-0": 3, "rank-1": [4]}
    }


def test_merging_does_not_look_into_what_stands_for_something_else():
    with pytest.raises(RequestError, match=r"at is .* on rank 1"):
        merge([{"at": encode((1, 2), "at")}, {"at": encode({1: 2}, "at")}])
    assert merge([{"at": encode((1, 2), "at")}] * 2) == {"at": {"$tuple": [1, 2]}}


def test_d10_positions_that_differ_between_ranks_are_no_value_of_the_run():
    with pytest.raises(RequestError, match=r"data\.position is 12 on rank 1 and 10 "):
        merge([{"data": {"position": 10}}, {"data": {"position": 12}}])
