import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from d9d_ckpt.checkpointer.names import Claims, ModuleNames, named, parts_of
from d9d_ckpt.checkpointer.state import flatten
from d9d_ckpt.errors import MappingError


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("model", "layers.0.x"), "layers.0.x"),
        (("model", "critic", "x"), "critic.x"),
        (("ema", "layers.0.x"), "ema.layers.0.x"),
        (("model",), "model"),
        (("ema", "model", "x"), "ema.model.x"),
        (("model", "_orig_mod.layers.0._checkpoint_wrapped_module.x"), "layers.0.x"),
        (("ema", "_fsdp_wrapped_module", "x"), "ema.x"),
        (("model", "my_orig_mod.x_orig_mod"), "my_orig_mod.x_orig_mod"),
    ],
)
def test_a_name_is_the_path_and_the_models_is_the_fqn(path, name):
    assert named(path) == name


def test_a06_a_leading_module_goes_where_all_have_it():
    assert parts_of(["module.a", "_orig_mod.module.b"]) == {
        "module.a": "a",
        "_orig_mod.module.b": "b",
    }
    assert parts_of(["module.a", "b"]) == {"module.a": "module.a", "b": "b"}
    assert parts_of(["modules.a"]) == {"modules.a": "modules.a"}


class Inner(nn.Module):
    """A model that has a part called ``module``."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2)])


def compiled(module):
    return torch.compile(module, backend="eager")


def names_of(module):
    names = ModuleNames(module)
    return [names(key) for key in module.state_dict()]


PLAIN = ["module.weight", "module.bias", "layers.0.weight", "layers.0.bias"]


def test_a06_a_real_module_called_module_is_kept():
    assert names_of(Inner()) == PLAIN


def test_a06_wrappers_are_removed_in_any_order_and_depth():
    inner = Inner()
    inner.layers[0] = checkpoint_wrapper(inner.layers[0])
    inner.layers[0] = compiled(inner.layers[0])
    wrapped = nn.DataParallel(compiled(inner))
    assert "module._orig_mod.layers.0._orig_mod.weight" in wrapped.state_dict()
    assert names_of(wrapped) == PLAIN
    assert names_of(compiled(nn.DataParallel(inner))) == PLAIN


def test_a06_a_wrapper_of_another_package_counts_by_its_name():
    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    assert names_of(DistributedDataParallel(Inner())) == PLAIN


@pytest.mark.parametrize(
    "key",
    [
        "_orig_mod.module.model.layers.0.x",
        "module._orig_mod.model.layers.0.x",
        "module.model.layers.0._checkpoint_wrapped_module.x",
    ],
)
def test_a06_dicts_of_tensors_lose_the_parts_too(key):
    assert list(flatten({"model": {key: torch.zeros(2)}}).tensors) == ["model.layers.0.x"]


def test_a06_two_names_that_become_one_are_both_named():
    state = {"model": {"_orig_mod.x": torch.zeros(2), "x": torch.ones(2)}}
    with pytest.raises(MappingError, match=r"'model\._orig_mod\.x' and 'model\.x' .* both 'x'"):
        flatten(state)


def test_a12_experts_counted_anew_on_a_list_of_parts_collide():
    local = [nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(1, 1)])}) for _ in range(2)]
    with pytest.raises(MappingError, match=r"both 'experts\.0\.weight' in a checkpoint"):
        flatten({"model": local})


def test_a_claimed_name_cannot_be_claimed_again():
    claims = Claims()
    claims.add("w", "model.w")
    claims.add("v", "model.v")
    with pytest.raises(MappingError, match=r"'model\.w' and 'ema\.w'"):
        claims.add("w", "ema.w")
