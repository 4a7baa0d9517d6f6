"""Programs drawn, and the command that draws them."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from d9d_train import cli
from d9d_train.parallel.pipeline.costs import Costs
from d9d_train.parallel.pipeline.draw import page, picture, table, timeline
from d9d_train.parallel.pipeline.schedule import BUILDERS, build, from_csv, placement
from d9d_train.parallel.pipeline.simulate import Simulation, simulate


def simulated(name: str, ranks: int, microbatches: int, costs: Costs | None = None) -> Simulation:
    virtual, _ = placement(name)
    return simulate(build(name, virtual * ranks, ranks, microbatches), costs)


def test_a_timeline_by_hand() -> None:
    assert timeline(simulated("1f1b", 2, 2)) == (
        "   0 |F0 F1       B0       B1    |\n   1 |   F0 B0    F1 B1          |"
    )
    assert timeline(simulated("forward_only", 1, 3)) == "   0 |F0 F1 F2 |"


def test_a_timeline_names_stages_where_a_rank_has_several() -> None:
    first = timeline(simulated("zbv", 2, 4)).splitlines()[0]
    assert first.startswith("   0 |0F0 0F1 0F2 3F0 3I0 3W0 ")


def test_a_timeline_that_is_too_long_says_so() -> None:
    assert timeline(simulated("1f1b", 4, 256)) == "(the timeline has 3885 columns; --html draws it)"


def test_a_table_by_hand() -> None:
    costs = Costs(held_bytes=1000, message_bytes=100)
    figures = "makespan 9, bubble 33.3%, at most 2 micro-batches held"
    assert table(simulated("1f1b", 2, 2, costs), "mine").splitlines() == [
        f"mine: 2 ranks, 2 stages, 2 micro-batches; {figures}",
        "rank       busy   bubble  peak micro-batches         peak bytes",
        "   0          6    33.3%                   2              2,200",
        "   1          6    33.3%                   1              1,200",
    ]
    assert "bytes" not in table(simulated("1f1b", 2, 2), "mine")


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_a_picture_has_a_box_for_each_computation(name: str) -> None:
    found = simulated(name, 4, 8)
    root = ET.fromstring(picture(found))  # noqa: S314 - our own
    space = "{http://www.w3.org/2000/svg}"
    rows = root.findall(f"{space}g")
    assert len(rows) == 4
    for row, spans in zip(rows, found.spans, strict=True):
        filled = [path for path in row.findall(f"{space}path") if path.get("fill") != "none"]
        assert sum((path.get("d") or "").count("M") for path in filled) == len(spans)
        framed = [path for path in row.findall(f"{space}path") if path.get("fill") == "none"]
        assert bool(framed) == (name == "dualpipev")


def test_a_page_stands_alone() -> None:
    text = page(simulated("dualpipev", 2, 4), "<mine>")
    assert text.startswith("<!doctype html>")
    assert "<mine>" not in text
    assert "&lt;mine&gt;: 2 ranks, 4 stages" in text
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert "overlapped pair" in text


# -- the command -------------------------------------------------------------------------------


def test_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = "schedule --name dualpipev --ranks 4 --microbatches 8 --costs F=1,I=1,W=1 --json"
    assert cli.main(command.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["makespan"] == 51
    assert found["bubble"] == pytest.approx(3 / 51)
    assert found["peak_microbatches"] == [4.5] * 4
    assert [len(actions) for actions in found["actions"]] == [34, 32, 30, 29]
    assert found["actions"][0][17:20] == ["(0F7;7B3)OVERLAP_F_B", "(7F4;0B0)OVERLAP_F_B", "7B4"]


def test_a_table_and_a_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "schedule --name interleaved --ranks 2 --microbatches 4 --stages-per-rank 3 --costs F=2"
    )
    assert cli.main(command.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("interleaved: 2 ranks, 6 stages, 4 micro-batches; makespan ")
    assert lines[-1].startswith("   1 |")


def test_files_out_and_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, csv = tmp_path / "drawn.html", tmp_path / "mine.csv"
    command = (
        f"schedule --name dualpipev --ranks 2 --microbatches 4 --html {html} --write-csv {csv}"
    )
    assert cli.main([*command.split(), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert "<svg" in html.read_text()
    assert from_csv(csv.read_text()) == build("dualpipev", 4, 2, 4)
    assert cli.main(["schedule", "--csv", str(csv), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            "--name dualpipev --ranks 4 --microbatches 4",
            4,
            "pipeline: dualpipev with 4 micro-batches",
        ),
        ("--name zbv --ranks 4", 2, "--name also needs --ranks and --microbatches; see "),
        ("--name nope --ranks 4 --microbatches 4", 2, "pipeline: no schedule 'nope'; known: gpipe"),
        ("", 2, "one of the arguments --name --csv is required; see d9d-train schedule --help"),
        ("--csv nowhere.csv", 2, "nowhere.csv: cannot read this schedule: No such file"),
        ("--csv a.csv --name zbv", 2, "argument --name: not allowed with argument --csv; see "),
        ("--csv a.csv --ranks 2", 2, "--csv says it all; leave out --ranks, "),
        ("--name 1f1b --ranks 2 --microbatches 2 a.b=c", 2, "unrecognized argument a.b=c; see "),
        (
            "--name 1f1b --ranks 2 --microbatches 2 --costs B=2",
            2,
            "pipeline: costs 'B=2': 'B=2' must",
        ),
        (
            "--name 1f1b --ranks 2 --microbatches 2 --html /nowhere/x",
            5,
            "/nowhere/x: cannot write: ",
        ),
    ],
)
def test_refusals(
    arguments: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["schedule", *arguments.split()]) == code
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith(f"d9d-train: {message}")
    assert found.err.count("\n") == 1


def test_the_answer_does_not_wait_for_torch() -> None:
    script = (
        "import sys; from d9d_train.cli import main\n"
        "assert main('schedule --name zbv --ranks 4 --microbatches 8'.split()) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
