"""What looking at a run directory on an object store costs: listings, and none of it per file."""

import pytest
from helpers.checkpoints import cli, convert, model, refused, write_model

pytest_plugins = ["helpers.servers"]
pytestmark = pytest.mark.s3

STEPS = (1, 2, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of some 20 files, four of them with weights."""
    root = tmp_path_factory.mktemp("saved")
    src = write_model(root / "src", model("llama"))
    for number in range(16):
        (src / f"extra{number}.json").write_text("{}")
    convert(src, root / "dst", "sharded", "--layout", "tp=2,pp=2")
    return root / "dst"


@pytest.fixture
def run(stub, saved):
    """A run of whole steps on the stub, with nothing in its log."""
    for step in STEPS:
        stub.seen.send(saved, f"run/step-{step:08}")
    stub.log.clear()
    return f"{stub.seen.url}/run"


def asked(stub):
    return {op: stub.count(op) for op in ("head", "get", "list")}


def test_a_listing_of_steps_asks_nothing_for_single_files(stub, run):
    assert cli("list", run, "--json").json["latest"] == 3
    # Of the run: names and files. Of each step: names and files of it and of its save, and the
    # manifest with its size.
    assert asked(stub) == {"head": 3, "get": 3, "list": 2 + 3 * 4}


def test_opening_the_latest_step_asks_nothing_for_single_files(stub, run):
    assert cli("inspect", run).code == 0
    assert asked(stub)["head"] == asked(stub)["get"] == 1
    assert asked(stub)["list"] <= 4


def test_a_prune_that_only_looks_costs_as_much_as_a_listing(stub, run):
    assert cli("prune", run, "--keep-last", 1, "--dry-run").code == 0
    assert asked(stub) == {"head": 3, "get": 3, "list": 14}
    assert stub.count("delete") == stub.count("put") == 0


@pytest.mark.parametrize("name", ["extra7.json", "rank-00002.safetensors"])
def test_d01_what_is_missing_or_short_is_named_from_the_listing(stub, run, name):
    key = next(k for k in stub.objects if "step-00000003" in k and k.endswith(name))
    content = stub.objects.pop(key)
    found = cli("list", run, "--json").json
    assert found["latest"] == 2
    assert name in found["steps"][2]["reason"]
    assert "is not there" in found["steps"][2]["reason"]
    refused(cli("inspect", run, "--step", 3), 3, name, "is not there")
    stub.objects[key] = content[:-1]
    assert f"{len(content) - 1} bytes" in cli("list", run, "--json").json["steps"][2]["reason"]
    refused(cli("inspect", run, "--step", 3), 3, name, f"the manifest says {len(content)}")
