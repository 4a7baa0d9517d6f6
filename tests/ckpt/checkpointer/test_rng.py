import random
import warnings

import numpy as np
import pytest
import torch
from helpers.meshes import fake_rank

from d9d_ckpt.checkpointer.base import Saved
from d9d_ckpt.checkpointer.rng import RNG
from d9d_ckpt.checkpointer.state import flatten, take_in
from d9d_ckpt.errors import RequestError
from d9d_ckpt.tensors import Region


@pytest.fixture(autouse=True)
def _restored():
    """Generators as they were, for the tests that follow."""
    rng = RNG()
    before = rng.state_dict()
    yield
    rng.load_state_dict(before)


def draws():
    """A few numbers of every generator, normals among them, which are drawn in pairs."""
    return (
        torch.rand(3).tolist(),
        torch.randn(1).tolist(),
        np.random.rand(2).tolist(),
        np.random.randn(1).tolist(),
        [random.random(), random.gauss(0, 1)],
        torch.randperm(64).tolist(),
    )


def seed(number):
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def saved_by(ranks, step=None, layout=None):
    """A checkpoint of ranks that are seeded by 100 + rank."""
    specs, tensors = {}, {}
    for rank in range(ranks):
        with fake_rank(rank, ranks):
            seed(100 + rank)
            draws()
            flat = flatten({"rng": RNG(layout)})
        specs |= {name: held.spec for name, held in flat.tensors.items()}
        tensors |= {name: held.local for name, held in flat.tensors.items()}
    return Saved(specs, flat.values, step=step), tensors


def load(saved, tensors, rng, name="rng"):
    intake = take_in({name: rng}, saved)
    for key, held in intake.tensors.items():
        held.local.copy_(tensors[key])
    intake.finish()
    return intake


def test_each_rank_keeps_its_own_under_its_number():
    with fake_rank(3, 8):
        flat = flatten({"train": {"rng": RNG({"tp": 2})}})
    assert list(flat.tensors) == [f"train.rng.3.{kind}" for kind in ("torch", "numpy", "python")]
    assert flat.values == {"train": {"rng": {"world": 8, "layout": {"tp": 2}}}}
    for held in flat.tensors.values():
        assert held.spec.dtype.name == "U8"
        assert held.box == Region.whole(held.spec.shape)


def test_sizes_do_not_depend_on_what_was_drawn():
    def sizes():
        return {name: held.spec for name, held in flatten({"rng": RNG()}).tensors.items()}

    before = sizes()
    draws()
    assert sizes() == before


def test_a_state_dict_restores_every_generator():
    seed(5)
    # One normal of a pair is left in numpy's and in Python's generator.
    draws()
    state = RNG().state_dict()
    expected = draws()
    seed(6)
    RNG().load_state_dict(state)
    assert draws() == expected


def test_a_state_dict_is_a_copy():
    state = RNG().state_dict()
    before = {kind: tensor.clone() for kind, tensor in state.items()}
    draws()
    assert all(torch.equal(state[kind], before[kind]) for kind in before)


@pytest.mark.parametrize("rank", [0, 3])
def test_d22_the_same_layout_goes_on_with_the_same_draws(rank):
    saved, tensors = saved_by(4, layout={"tp": 2})
    seed(100 + rank)
    draws()
    expected = draws()
    seed(7)
    with fake_rank(rank, 4), warnings.catch_warnings():
        warnings.simplefilter("error")
        intake = load(saved, tensors, RNG({"tp": 2}))
    assert draws() == expected
    assert not intake.missing
    # The others' are theirs to want.
    assert {name.split(".")[1] for name in intake.unexpected} == {*"0123"} - {str(rank)}


def anew(saved, tensors, rank, ranks, layout=None):
    seed(8)
    with fake_rank(rank, ranks):
        intake = load(saved, tensors, RNG(layout))
    assert not intake.missing
    assert not intake.unexpected
    return draws()


def test_d22_another_number_of_ranks_seeds_anew_and_warns_once():
    saved, tensors = saved_by(4, step=20)
    with pytest.warns(UserWarning, match=r"rng: .*'world': 4.*'world': 2") as seen:
        first = anew(saved, tensors, 0, 2)
    assert len(seen) == 1
    # Rank 0 speaks for all; every rank draws its own, again at each such resume.
    second = anew(saved, tensors, 1, 2)
    assert second == anew(saved, tensors, 1, 2)
    for mine, others in zip(first, second, strict=True):
        assert mine != others


def test_d22_the_new_seed_depends_on_the_step_and_on_the_saved_generator():
    saved, tensors = saved_by(2, step=20)
    at_20 = anew(saved, tensors, 1, 3)
    at_21 = anew(Saved(saved.specs, saved.values, step=21), tensors, 1, 3)
    other = anew(saved, tensors | {"rng.0.torch": tensors["rng.1.torch"]}, 1, 3)
    assert at_20[0] != at_21[0]
    assert at_20[0] != other[0]


def test_d22_the_same_ranks_in_another_layout_seed_anew():
    saved, tensors = saved_by(2, layout={"tp": 2})
    with pytest.warns(UserWarning, match=r"'tp': 2.*'tp': 1"):
        anew(saved, tensors, 0, 2, {"tp": 1})


def test_d22_generators_that_were_not_saved_are_missing():
    assert take_in({"rng": RNG()}, Saved({})).missing == ("rng",)
    saved, _ = saved_by(2)
    left = {name: spec for name, spec in saved.specs.items() if not name.startswith("rng.1.")}
    with fake_rank(1, 2):
        intake = take_in({"rng": RNG()}, Saved(left, saved.values))
    assert intake.missing == ("rng.1.torch", "rng.1.numpy", "rng.1.python")


def test_generators_are_restored_after_all_else():
    class Drawing:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            draws()

    seed(9)
    flat = flatten({"rng": RNG(), "other": Drawing()})
    tensors = {name: held.local for name, held in flat.tensors.items()}
    expected = draws()
    saved = Saved({name: held.spec for name, held in flat.tensors.items()}, flat.values)
    intake = take_in({"rng": RNG(), "other": Drawing()}, saved)
    for name, held in intake.tensors.items():
        held.local.copy_(tensors[name])
    intake.finish()
    assert draws() == expected


def test_a_checkpoint_with_cuda_generators_says_that_they_have_no_place_here():
    saved, tensors = saved_by(1)
    specs = {**saved.specs, "rng.0.cuda.0": saved.specs["rng.0.torch"]}
    intake = load(Saved(specs, saved.values), tensors, RNG())
    assert intake.unexpected == ("rng.0.cuda.0",) or torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_d22_cuda_generators_go_on_with_the_same_draws():
    torch.cuda.manual_seed(3)
    torch.rand(5, device="cuda")
    flat = flatten({"rng": RNG()})
    assert "rng.0.cuda.0" in flat.tensors
    tensors = {name: held.local for name, held in flat.tensors.items()}
    expected = torch.rand(5, device="cuda").tolist()
    torch.cuda.manual_seed(4)
    saved = Saved({name: held.spec for name, held in flat.tensors.items()}, flat.values)
    assert load(saved, tensors, RNG()).missing == ()
    assert torch.rand(5, device="cuda").tolist() == expected


def test_another_generator_under_numpy_is_refused():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(RequestError, match="PCG64"):
            flatten({"rng": RNG()})
    finally:
        np.random.set_bit_generator(before)
