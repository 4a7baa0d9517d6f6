"""Live sharded state written as a Hugging Face directory that the hub's users can load."""

from functools import partial

import pytest
import torch
from helpers.checkpoints import cli, equal, everything, read_hf
from helpers.families import checkpoint
from helpers.ranks import launch
from helpers.topologies import Meshes, state_of, whole

from d9d_ckpt.checkpointer.saver import Checkpointer
from d9d_ckpt.errors import DestinationError, UsageError
from d9d_ckpt.layout.topology import Topology

TOPOLOGY = Topology(pp=2, dp_shard=2, ep=2)
MODEL = whole("qwen3_moe", experts=4)


def _export(path, rank):
    meshes = Meshes.make(TOPOLOGY, rank)
    state = {"model": state_of(MODEL, meshes), "step": 3}
    saver = Checkpointer(
        path / "run", layout=TOPOLOGY, family="qwen3_moe", config=MODEL.json, silence=30
    )
    with saver:
        saver.export_hf(path / "hf", state, max_shard_size=20_000)


@pytest.mark.ranks
def test_four_ranks_write_one_hugging_face_directory(tmp_path):
    launch(4, partial(_export, tmp_path))
    expected = checkpoint(MODEL.config)
    found = read_hf(tmp_path / "hf")
    assert equal({n: t.to(torch.float64) for n, t in found.items()}, expected)
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    assert cli("verify", tmp_path / "hf").code == 0
    converted = cli(
        "convert", tmp_path / "hf", tmp_path / "s", "--to", "sharded", "--layout", "tp=2"
    )
    assert converted.code == 0


def test_one_process_exports_too_and_refuses_a_used_place(tmp_path):
    state = {"model": dict(MODEL.tensors)}
    with Checkpointer(tmp_path / "run", family="qwen3_moe", config=MODEL.json) as saver:
        saver.export_hf(tmp_path / "hf", state)
        before = everything(tmp_path)
        with pytest.raises(DestinationError, match="not empty"):
            saver.export_hf(tmp_path / "hf", state)
    assert everything(tmp_path) == before
    assert read_hf(tmp_path / "hf").keys() == checkpoint(MODEL.config).keys()


def test_an_export_without_a_family_is_refused_and_leaves_nothing(tmp_path):
    with (
        Checkpointer(tmp_path / "run") as saver,
        pytest.raises(UsageError, match="family= and config="),
    ):
        saver.export_hf(tmp_path / "hf", {"model": dict(MODEL.tensors)})
    assert list(tmp_path.iterdir()) == []
