"""The command line: what it prints, its exit codes, and what is said once among several ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from d9d_ckpt.errors import StorageError
from d9d_train import cli

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    "OMP_NUM_THREADS": "1",
}
RUN = """
[model]
family = "qwen3_moe"
vocab_size = 64
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 8
[train]
steps = 2
global_batch = 4
seq_len = 16
"""


@pytest.fixture
def run(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return str(path)


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603
        [sys.executable, *args],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def start(*args: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return python(*launcher, "-m", "d9d_train", *args)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


# -- plan --------------------------------------------------------------------------------------


def test_a_plan_as_json(run, capsys):
    assert cli.main(["plan", run, "--world", "2048", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["world"], len(found["ranks"])) == (2048, 2048)
    assert found["ranks"][7]["parameters"] == found["parameters"]


def test_a_plan_as_a_table(run, capsys):
    assert cli.main(["plan", run, "mesh.pp=2", "train.dtype=bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" parameters, 0.000 GiB in float32")
    assert lines[1].startswith("2 ranks: pp 2, ")
    assert len(lines) == 6


@pytest.mark.parametrize(
    "arguments",
    [
        ["RUN", "--world", "4", "mesh.tp=2", "mesh.ep=2"],
        ["RUN", "mesh.tp=2", "--world", "4", "mesh.ep=2"],
        ["--world", "4", "RUN", "mesh.tp=2", "mesh.ep=2"],
    ],
)
def test_overrides_go_anywhere_after_the_file(run, capsys, arguments):
    assert cli.main(["plan", *(run if a == "RUN" else a for a in arguments), "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert (layout["tp"], layout["ep"], layout["dp_replicate"]) == (2, 2, 2)


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "RUN", "mesh.pp=3"], 4, "layout: pp x virtual = 3 stages for 2 layers"),
        (["plan", "RUN", "--world", "3", "mesh.tp=2"], 4, "world 3 is no multiple of "),
        (["plan", "RUN", "train.stepz=3"], 2, "train.stepz: unknown key; nearest: steps"),
        (["plan", "RUN", "--wrld", "3"], 2, "unrecognized argument --wrld; see d9d-train plan"),
        (["plan", "RUN", "--json", "steps"], 2, "unrecognized argument steps; see d9d-train plan"),
        (["plan", "RUN", "--world", "x"], 2, "argument --world: invalid int value: 'x'; see "),
        (["plan", "nowhere.toml"], 2, "nowhere.toml: cannot read this config: No such file"),
        (["plan"], 2, "the following arguments are required: config, section.key=value; see "),
        (["fly"], 2, "argument command: invalid choice: 'fly'"),
        ([], 2, "the following arguments are required: command; see d9d-train --help"),
        (["train", "RUN", "train.steps=0"], 2, "train.steps: 0 must be at least 1"),
    ],
)
def test_a_refusal_is_one_message_and_its_code(run, capsys, arguments, code, message):
    assert cli.main([run if a == "RUN" else a for a in arguments]) == code
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith(f"d9d-train: {message}")
    assert found.err.count("\n") == 1


def test_an_interruption_has_a_code_of_its_own(run, capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_train", interrupted)
    assert cli.main(["train", run]) == 130
    assert capsys.readouterr().err == "d9d-train: interrupted\n"


def test_what_others_add_to_an_error_is_told(run, capsys, monkeypatch):
    def failing(args):
        error = StorageError("the disk is full")
        error.add_note("last actions: rank 0: step 3, forward")
        raise error

    monkeypatch.setattr(cli, "_train", failing)
    assert cli.main(["train", run]) == 5
    expected = "d9d-train: the disk is full\nlast actions: rank 0: step 3, forward\n"
    assert capsys.readouterr().err == expected


def test_a_defect_is_no_refusal(run, monkeypatch):
    def broken(args):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_train", broken)
    with pytest.raises(ZeroDivisionError) as alone:
        cli.main(["train", run])
    assert not hasattr(alone.value, "__notes__")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(ZeroDivisionError) as one_of_many:
        cli.main(["train", run])
    assert one_of_many.value.__notes__ == ["on rank 5"]


def test_a_traceback_is_shown_on_request():
    shown = start("plan", "nowhere.toml", "--log-level", "debug")
    assert shown.returncode == 2
    assert "Traceback" in shown.stderr
    assert shown.stderr.endswith(
        "d9d-train: nowhere.toml: cannot read this config: No such file or directory\n"
    )


def test_help_does_not_wait_for_torch():
    script = (
        "import sys; from d9d_train.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert main(['train', '--nonsense', 'x']) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert "d9d-train [-h] {train,plan,schedule}" in done.stdout


# -- ranks -------------------------------------------------------------------------------------


@pytest.fixture
def agent(monkeypatch) -> Iterator[None]:
    """The store that torchrun keeps for its ranks."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    yield
    del store


def failing_on(rank: int, message: str, run: str, monkeypatch: pytest.MonkeyPatch) -> int:
    def failing(args):
        raise StorageError(message)

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(cli, "_train", failing)
    return cli.main(["train", run])


def test_what_all_ranks_have_to_say_is_said_once(run, capsys, monkeypatch, agent):
    assert [failing_on(rank, "no disk", run, monkeypatch) for rank in (1, 0)] == [5, 5]
    assert capsys.readouterr().err == "d9d-train: rank 1: no disk\n"


def test_what_one_rank_has_to_say_is_always_said(run, capsys, monkeypatch, agent):
    assert failing_on(0, "no disk", run, monkeypatch) == 5
    assert failing_on(1, "no memory", run, monkeypatch) == 5
    expected = "d9d-train: rank 0: no disk\nd9d-train: rank 1: no memory\n"
    assert capsys.readouterr().err == expected


def test_a_new_start_says_it_again(run, capsys, monkeypatch, agent):
    for restart in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        failing_on(0, "no disk", run, monkeypatch)
    assert capsys.readouterr().err == "d9d-train: rank 0: no disk\n" * 2


def test_without_a_store_every_rank_speaks(run, capsys, monkeypatch, agent):
    monkeypatch.setattr(cli, "_STORE_WAIT", cli.timedelta(seconds=0.2))
    monkeypatch.setenv("MASTER_PORT", "1")
    for rank in (0, 1):
        assert failing_on(rank, "no disk", run, monkeypatch) == 5
    expected = "d9d-train: rank 0: no disk\nd9d-train: rank 1: no disk\n"
    assert capsys.readouterr().err == expected


@pytest.mark.ranks
def test_a_run_on_one_process_and_on_two(run, tmp_path):
    lines = []
    for name, launcher in (("one", ()), ("two", TORCHRUN)):
        metrics = tmp_path / f"{name}.jsonl"
        mesh = ["mesh.dp_shard=2"] if launcher else []
        done = start(
            "train",
            run,
            f"metrics.jsonl={metrics}",
            "train.dtype=float64",
            *mesh,
            launcher=launcher,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        lines.append([json.loads(line) for line in metrics.read_text().splitlines()])
    assert [line["step"] for line in lines[0]] == [1, 2]
    losses = [[line["loss"] for line in run] for run in lines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-11)


@pytest.mark.ranks
def test_two_ranks_refuse_once(run):
    done = start("train", run, "mesh.dp_shard=4", launcher=TORCHRUN)
    said = [line for line in done.stderr.splitlines() if line.startswith("d9d-train: ")]
    assert len(said) == 1
    assert said[0].endswith("= 4 ranks, but 2 were started")
    assert "exitcode  : 4" in done.stderr
