"""Cases of object stores, through the whole engine."""

import json

import pytest
import torch
from helpers.checkpoints import cli, convert, model, write_hf, write_model, write_raw

import d9d_ckpt

pytest_plugins = ["helpers.servers"]
pytestmark = pytest.mark.s3


@pytest.mark.parametrize("length", [99_993, 99_994, 100_000, 100_001])
def test_f21_headers_of_these_lengths_are_read_whole_over_http(stub, tmp_path, length):
    """Clients that fetch the first 100,000 bytes and count the last one wrong cut such headers."""
    values = torch.arange(6, dtype=torch.float32)
    entry = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}
    bare = len(json.dumps({"__metadata__": {"format": "pt", "k": ""}, "w": entry}))
    header = {"__metadata__": {"format": "pt", "k": "v" * (length - bare)}, "w": entry}
    file = write_raw(tmp_path / "x.safetensors", header, values.numpy().tobytes())
    assert file.stat().st_size == 8 + length + 24
    stub.seen.put("src/model.safetensors", file.read_bytes())
    opened = d9d_ckpt.open(f"{stub.seen.url}/src")
    assert torch.equal(opened["w"].read(), values)
    assert torch.equal(opened["w"][5:].read(), values[5:])
    convert(f"{stub.seen.url}/src", tmp_path / "dst", "huggingface")
    assert torch.equal(d9d_ckpt.open(str(tmp_path / "dst"))["w"].read(), values)


def test_d15_a_step_that_another_client_adds_is_the_latest_at_once(stub, tmp_path):
    src = write_model(tmp_path / "src", model("llama"))
    convert(src, tmp_path / "a", "sharded", "--layout", "tp=2")
    url = f"{stub.seen.url}/run"
    stub.seen.send(tmp_path / "a", "run/step-00000001")
    assert cli("list", url, "--json").json["latest"] == 1
    stub.seen.send(tmp_path / "a", "run/step-00000002")
    assert cli("list", url, "--json").json["latest"] == 2
    assert d9d_ckpt.open(url).opened.url.endswith("step-00000002")
    stub.seen.delete("run/step-00000002/manifest.json")
    assert cli("list", url, "--json").json["latest"] == 1
    assert d9d_ckpt.open(url).opened.url.endswith("step-00000001")


def test_d15_a_weight_file_that_is_rewritten_with_another_size_is_read_as_it_is(stub, tmp_path):
    url = f"{stub.seen.url}/src"
    for count in (3, 5, 2):
        made = write_hf(tmp_path / str(count), {"w": torch.arange(count)})
        stub.seen.send(made, "src")
        assert d9d_ckpt.open(url)["w"].read().tolist() == list(range(count))
