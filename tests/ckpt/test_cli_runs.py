"""Run directories on the command line: list, prune, and a RUN_URL wherever a checkpoint is wanted."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
from helpers.checkpoints import (
    cli,
    convert,
    equal,
    everything,
    manifest,
    model,
    read_hf,
    refused,
    write_model,
)

MODEL = model("llama")
LAYOUT = {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2, "ep": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    src = write_model(root / "src", MODEL)
    convert(src, root / "run" / "step-00000500", "sharded", "--layout", "tp=2,pp=2")
    for step in (1000, 1500, 2000):
        shutil.copytree(root / "run" / "step-00000500", root / "run" / f"step-{step:08}")
    return root / "run"


@pytest.fixture
def run(whole, tmp_path):
    """Steps 500, 1000 and 1500 are whole; 2000 has lost its manifest; something else lies beside."""
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    (root / "step-00002000" / "manifest.json").unlink()
    (root / "metrics.jsonl").write_text("{}")
    return root


def nbytes(path):
    return sum(map(len, everything(path).values()))


def claim(path, **owner):
    path.mkdir(exist_ok=True)
    (path / ".d9d-claim").write_text(json.dumps({"save_id": "x", "time": 1.0} | owner))


# -- list --------------------------------------------------------------------------------------


def test_list_json(run):
    found = cli("list", run, "--json").json
    assert found["latest"] == 1500
    assert [s["step"] for s in found["steps"]] == [500, 1000, 1500, 2000]
    for s in found["steps"][:3]:
        assert (s["complete"], s["layout"], s["reason"]) == (True, LAYOUT, None)
        assert s["bytes"] == nbytes(run / s["name"])
    last = found["steps"][3]
    assert (last["complete"], last["layout"]) == (False, None)
    assert last["reason"] == "no manifest"
    assert last["bytes"] == nbytes(
        run / "step-00002000" / manifest(run / "step-00000500")["save_id"]
    )


def test_list_text(run):
    claim(run / "step-00002000", host="elsewhere", pid=7)
    lines = cli("list", run).out.splitlines()
    assert len(lines) == 5
    assert lines[1].split()[0] == "500"
    assert "complete, pp=2 tp=2" in lines[1]
    assert [line.endswith("latest") for line in lines] == [False, False, False, True, False]
    assert "incomplete: no manifest" in lines[4]
    assert "process 7 on elsewhere" in lines[4]


def test_list_without_a_whole_step(run):
    for step in (500, 1000, 1500):
        (run / f"step-{step:08}" / "manifest.json").write_text("{")
    found = cli("list", run, "--json")
    assert (found.code, found.json["latest"]) == (0, None)
    assert cli("list", run).out.splitlines()[-1] == "no whole step"


def test_list_of_what_is_no_run(run, tmp_path):
    refused(cli("list", tmp_path / "typo"), 3, "typo", "no such run directory")
    refused(cli("list", run / "step-00000500"), 4, "is a checkpoint")
    (tmp_path / "empty").mkdir()
    assert cli("list", tmp_path / "empty").out == f"{tmp_path / 'empty'}: no steps\n"
    refused(cli("list"), 2, "run_url")
    refused(cli("list", run, "--step", 5), 2, "--step")


# -- prune -------------------------------------------------------------------------------------


def test_prune_json(run):
    size = nbytes(run / "step-00000500")
    result = cli("prune", run, "--keep-last", 1, "--keep-every", 1000, "--json")
    assert result.code == 0
    found = result.json
    assert (found["deleted"], found["kept"]) == ([500], [1000, 1500])
    assert (found["bytes"], found["dry_run"]) == (size, False)
    assert [sorted(s) for s in found["skipped"]] == [["name", "reason"]] * 2
    assert [s["name"] for s in found["skipped"]] == ["step-00002000", "metrics.jsonl"]
    assert sorted(os.listdir(run)) == [
        "metrics.jsonl", "step-00001000", "step-00001500", "step-00002000",
    ]  # fmt: skip


def test_prune_dry_run_says_exactly_what_would_go(run):
    (run / "step-00000500" / "notes.txt").write_text("mine")
    before = everything(run)
    result = cli("prune", run, "--keep-last", 2, "--dry-run", "--json")
    assert result.json["dry_run"] is True
    said = {f"{r['name']}/{file}" for r in result.json["removed"] for file in r["files"]}
    text = cli("prune", run, "--keep-last", 2, "--dry-run").out
    assert "would delete step-00000500" in text
    assert "manifest.json" in text
    assert f"{manifest(run / 'step-00000500')['save_id']}/ (4 files)" in text
    assert "not ours, so they stay with it: notes.txt" in text
    assert "kept 1000, 1500" in text
    assert "skipped step-00002000: incomplete" in text
    assert "not steps, not touched: metrics.jsonl" in text
    assert text.splitlines()[-1].endswith("would be freed")
    assert everything(run) == before
    assert cli("prune", run, "--keep-last", 2).out == text.replace(
        "would delete", "deleted"
    ).replace("would be freed", "freed")
    assert before.keys() - everything(run).keys() == said
    assert cli("prune", run, "--keep-last", 2, "--quiet").out == ""


def test_prune_leaves_what_a_live_writer_has_claimed(run):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as writer:
        claim(run / "step-00000500", host=socket.gethostname(), pid=writer.pid)
        claim(run / "step-00000700", host=socket.gethostname(), pid=writer.pid)
        before = everything(run)
        found = cli("prune", run, "--keep-last", 1, "--dry-run", "--json").json
        assert found["deleted"] == [1000]
        reasons = {s["name"]: s["reason"] for s in found["skipped"]}
        for name in ("step-00000500", "step-00000700"):
            assert f"claimed by process {writer.pid}" in reasons[name]
        writer.communicate(b"\n")
    assert everything(run) == before
    found = cli("prune", run, "--keep-last", 1, "--json").json
    assert found["deleted"] == [500, 700, 1000]


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ((), "--keep-last"),
        (("--keep-last", 0), "--keep-last 0"),
        (("--keep-last", -1), "--keep-last"),
        (("--keep-last", "x"), "--keep-last"),
        (("--keep-last", 1, "--keep-every", 0), "--keep-every 0"),
    ],
)
def test_prune_usage(run, argv, word):
    before = everything(run)
    refused(cli("prune", run, *argv), 2, word)
    assert everything(run) == before


def test_prune_of_what_is_no_run(run, tmp_path):
    before = everything(run)
    refused(cli("prune", run / "step-00000500", "--keep-last", 1), 4, "is a checkpoint")
    refused(cli("prune", tmp_path / "typo", "--keep-last", 1), 3, "no such run directory")
    assert everything(run) == before


def test_list_and_prune_do_not_import_torch(run):
    code = (
        "import sys; from d9d_ckpt.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'fsspec'} & set(sys.modules), 'imported'\n"
    )
    for argv in (("list", run), ("prune", run, "--keep-last", "1")):
        done = subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


# -- RUN_URL in place of a checkpoint ----------------------------------------------------------


def test_d01_a_run_stands_for_its_latest_whole_step(run, tmp_path):
    latest = run / "step-00001500"
    note = "step-00002000 is passed over: no manifest"
    assert note in cli("inspect", run).out
    assert cli("inspect", run, "--json").json["url"] == str(latest)
    report = convert(run, tmp_path / "hf", "huggingface")
    assert report["source"] == str(latest)
    assert any(note in n for n in report["notes"])
    assert equal(read_hf(tmp_path / "hf"), MODEL.tensors)
    assert cli("verify", run).code == 0
    assert cli("diff", run, latest).out == "equal\n"
    assert cli("plan", run, "--load", "--layout", "tp=1").code == 0
    assert cli("reshard", run, tmp_path / "x", "--layout", "tp=1", "--workers", 1).code == 0
    assert cli("graph", f"file://{run}/", "--tensor", "model.norm.weight").code == 0


def test_d01_latest_is_what_list_says(run):
    save = manifest(run / "step-00000500")["save_id"]
    (run / "step-00001500" / save / "rank-00003.safetensors").unlink()
    assert cli("list", run, "--json").json["latest"] == 1000
    assert cli("inspect", run, "--json").json["url"] == str(run / "step-00001000")
    notes = cli("inspect", run, "--json").json["notes"]
    assert any("step-00001500" in n and "rank-00003" in n for n in notes)
    refused(cli("inspect", run, "--step", 2000), 3, "incomplete")
    refused(cli("verify", run, "--step", 1500), 3, "rank-00003", "incomplete")
    assert cli("inspect", run, "--step", 500, "--json").json["url"] == str(run / "step-00000500")
