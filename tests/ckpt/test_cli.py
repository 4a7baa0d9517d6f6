"""The command line: JSON keys, exit codes, options, and the ways to start it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import (
    SINGLE,
    cli,
    convert,
    equal,
    everything,
    flip,
    fused,
    manifest,
    model,
    read_hf,
    read_ranks,
    read_sharded,
    refused,
    training,
    write_hf,
    write_model,
)

ROOT = Path(__file__).parents[2]
FAMILIES = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "hf", model("qwen3_moe"), shards=2)


@pytest.fixture(scope="module")
def sharded(hf):
    dst = hf.parent / "sharded"
    convert(hf, dst, "sharded", "--layout", "pp=2,tp=2,ep=2")
    return dst


TOTAL = sum(t.nbytes for t in model("qwen3_moe").tensors.values())
PARAMETERS = TOTAL // 4


# -- results -----------------------------------------------------------------------------------


def test_inspect_json(hf, sharded):
    found = cli("inspect", hf, "--json").json
    assert found["format"] == "huggingface"
    assert found["model"] == "qwen3_moe"
    assert found["tensors"] == len(model("qwen3_moe").tensors)
    assert (found["parameters"], found["bytes"]) == (PARAMETERS, TOTAL)
    assert found["dtypes"] == {"F32": TOTAL}
    assert found["files"] == 2
    assert (found["layout"], found["step"], found["save_id"]) == (None, None, None)
    assert "entries" not in found
    found = cli("inspect", sharded, "--json").json
    assert (found["format"], found["bytes"], found["files"]) == ("sharded", TOTAL, 4)
    assert found["layout"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2, "ep": 2}
    assert found["save_id"] == manifest(sharded)["save_id"]


def test_inspect_tensors(sharded):
    globs = ("--tensors", "*layers.0*qkv*", "--tensors", "model.norm.weight")
    found = cli("inspect", sharded, *globs, "--json").json
    assert sorted(found["entries"], key=lambda e: e["name"]) == [
        {
            "name": "model.layers.0.self_attn.qkv_proj.weight",
            "dtype": "F32",
            "shape": [32, 8],
            "bytes": 1024,
            "chunks": 2,
        },
        {"name": "model.norm.weight", "dtype": "F32", "shape": [8], "bytes": 32, "chunks": 1},
    ]
    text = cli("inspect", sharded, *globs).out
    assert "model.layers.0.self_attn.qkv_proj.weight  F32 [32, 8] in 2 chunks" in text
    refused(cli("inspect", sharded, "--tensors", "nothing*"), 3, "nothing*", "matches none")


REPORT = {
    "source", "destination", "format", "tensors", "bytes_read", "bytes_written", "bytes_source",
    "seconds", "ranks", "peak_rss", "kept_fp32", "dropped",
}  # fmt: skip


def test_convert_json(hf, tmp_path):
    found = convert(hf, tmp_path / "x", "sharded", "--layout", "tp=2,ep=2")
    assert found.keys() >= REPORT
    assert (found["source"], found["destination"]) == (str(hf), str(tmp_path / "x"))
    assert (found["format"], found["tensors"]) == ("sharded", len(training(model("qwen3_moe"))))
    assert found["bytes_read"] == found["bytes_written"] == found["bytes_source"] == TOTAL
    assert found["seconds"] > 0
    assert (found["kept_fp32"], found["dropped"]) == ([], [])


def test_reshard_json(sharded, tmp_path):
    result = cli(
        "reshard", sharded, tmp_path / "x", "--layout", "dp_shard=4,ep=4", "--json", "--workers", 1
    )
    assert result.code == 0
    assert result.json.keys() >= REPORT
    assert result.json["bytes_read"] == result.json["bytes_written"] == TOTAL
    assert equal(read_sharded(tmp_path / "x"), training(model("qwen3_moe")))


def test_reshard_of_what_is_not_sharded(hf, tmp_path):
    result = cli("reshard", hf, tmp_path / "x", "--layout", "tp=2")
    refused(result, 4, str(hf), "not sharded", "convert")


PLAN = {"ranks", "bytes_read", "bytes_source", "read_amplification", "seconds_to_plan"}
RANK = {"rank", "bytes_read", "bytes_written", "requests", "buffer_bytes"}


@pytest.mark.parametrize(
    ("argv", "ranks"),
    [
        (("--layout", "pp=2,tp=2,ep=2"), 4),
        (("--to", "sharded", "--layout", "dp_shard=3"), 3),
        (("--to", "huggingface"), 1),
        (("--load", "--layout", "dp_replicate=2,tp=2"), 4),
    ],
)
def test_plan_json(sharded, argv, ranks):
    before = everything(sharded)
    found = cli("plan", sharded, *argv, "--json").json
    assert found.keys() >= PLAN
    assert [r["rank"] for r in found["ranks"]] == list(range(ranks))
    assert all(r.keys() >= RANK for r in found["ranks"])
    assert found["bytes_source"] == TOTAL
    assert found["bytes_read"] == sum(r["bytes_read"] for r in found["ranks"])
    written = sum(r["bytes_written"] for r in found["ranks"])
    if "--load" in argv:
        assert written > TOTAL
        assert found["read_amplification"] == 1.0
    else:
        assert written == TOTAL
    assert everything(sharded) == before


def test_plan_writes_nothing_and_needs_no_destination(hf, tmp_path):
    assert cli("plan", hf, "--layout", "tp=2").code == 0
    assert os.listdir(tmp_path) == []
    refused(cli("plan", hf, "--load", "--to", "sharded", "--layout", "tp=2"), 2, "--load", "--to")
    refused(cli("plan", hf), 2, "--layout")


def test_plan_agrees_with_what_is_done(hf, tmp_path):
    for layout in ("tp=2,ep=2", "pp=2,dp_shard=2"):
        planned = cli("plan", hf, "--layout", layout, "--json").json
        dst = tmp_path / layout
        convert(hf, dst, "sharded", "--layout", layout)
        stored = {r: sum(t.nbytes for t in ts.values()) for r, ts in read_ranks(dst).items()}
        assert {
            r["rank"]: r["bytes_written"] for r in planned["ranks"] if r["bytes_written"]
        } == stored


def test_verify_json(sharded, hf):
    found = cli("verify", sharded, "--json")
    assert found.code == 0
    assert found.json.keys() >= {"ok", "bytes", "chunks", "damaged"}
    assert (found.json["ok"], found.json["bytes"], found.json["damaged"]) == (True, TOTAL, [])
    found = cli("verify", hf, "--json")
    assert (found.code, found.json["reason"]) == (1, "no checksums recorded")


def test_verify_damage_exits_1(sharded, tmp_path, hf):
    convert(hf, tmp_path / "x", "sharded", "--layout", "tp=2")
    file = next((tmp_path / "x" / manifest(tmp_path / "x")["save_id"]).iterdir())
    flip(file, -1)
    found = cli("verify", tmp_path / "x", "--json")
    assert found.code == 1
    (damage,) = found.json["damaged"]
    assert damage.keys() >= {"file", "tensor", "expected", "found"}
    assert damage["file"].endswith(file.name)
    assert "1 damaged" in found.err
    assert cli("verify", sharded).code == 0


def test_diff_json(hf, sharded, tmp_path):
    found = cli("diff", hf, sharded, "--json")
    assert found.code == 0
    assert found.json.keys() >= {"equal", "only_in_a", "only_in_b", "different"}
    assert found.json["equal"] is True
    made = model("qwen3_moe")
    made.tensors["model.norm.weight"][3] += 0.5
    made.tensors["model.norm.weight"][5] -= 2.0
    other = write_model(tmp_path / "other", made)
    for a, b in ((hf, other), (other, sharded)):
        found = cli("diff", a, b, "--json")
        assert found.code == 1
        (different,) = found.json["different"]
        assert (different["name"], different["max_abs"], different["count"]) == (
            "model.norm.weight", 2.0, 2,
        )  # fmt: skip
    assert cli("diff", hf, other, "--atol", 2.0).code == 0
    assert cli("diff", hf, other, "--atol", 1.0, "--json").json["different"][0]["count"] == 1
    assert cli("diff", hf, other, "--rtol", 0.5).code == 0


def test_diff_names(hf, tmp_path):
    made = model("qwen3_moe")
    made.tensors["extra"] = made.tensors.pop("model.norm.weight")
    other = write_model(tmp_path / "other", made)
    found = cli("diff", hf, other, "--json").json
    assert (found["only_in_a"], found["only_in_b"]) == (["model.norm.weight"], ["extra"])
    found = cli("diff", other, hf)
    assert "only in A: extra" in found.out
    assert found.code == 1


def test_diff_is_logical_across_layouts_and_expert_forms(hf, sharded, tmp_path):
    other = write_model(tmp_path / "fused", fused(model("qwen3_moe")))
    assert cli("diff", other, sharded).code == 0
    result = cli("reshard", sharded, tmp_path / "s", "--layout", "dp_shard=2,cp=2", "--workers", 1)
    assert result.code == 0
    assert cli("diff", sharded, tmp_path / "s").code == 0


def test_graph_text_and_dot(hf, sharded):
    name = "model.layers.1.mlp.experts.gate_up_proj.weight"
    text = cli("graph", hf, "--tensor", name).out
    assert text.startswith(f"{name}: F32 [4, 12, 8]\n")
    assert "read model.layers.1.mlp.experts.0.gate_proj.weight from model-0000" in text
    back = "model.layers.1.mlp.experts.2.up_proj.weight"
    text = cli("graph", sharded, "--tensor", back).out
    assert text.startswith(f"{back}: F32 [6, 8]\n")
    dot = cli("graph", hf, "--tensor", name, "--format", "dot").out
    assert dot.startswith("digraph {")
    assert dot.rstrip().endswith("}")
    nodes = [line.split()[0] for line in dot.splitlines() if " [label=" in line]
    assert len(nodes) == len(set(nodes)) > 8
    edges = [line.strip().rstrip(";").split(" -> ") for line in dot.splitlines() if " -> " in line]
    assert all(end in nodes for edge in edges for end in edge)
    refused(
        cli("graph", hf, "--tensor", "model.layers.1.mlp.experts"), 3, "nearest", "model.layers.1."
    )
    refused(cli("graph", hf, "--tensor", name, "--format", "svg"), 2, "svg", "not available")


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("--to", "dcp"), "dcp"),
        (("--to", "megatron"), "megatron"),
    ],
)
def test_what_is_not_there_yet_is_refused(hf, tmp_path, argv, word):
    refused(cli("convert", hf, tmp_path / "x", *argv), 2, word, "not available yet")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("nonsense",),
        ("convert",),
        ("convert", "a"),
        ("convert", "a", "b"),
        ("convert", "a", "b", "--to", "sharded"),
        ("convert", "a", "b", "--to", "sharded", "--layout", "tp"),
        ("convert", "a", "b", "--to", "sharded", "--layout", "zz=2"),
        ("convert", "a", "b", "--to", "sharded", "--layout", "tp=2,tp=2"),
        ("convert", "a", "b", "--to", "sharded", "--layout", "tp=x"),
        ("convert", "a", "b", "--to", "sharded", "--layout", "absent.yaml"),
        ("convert", "a", "b", "--to", "huggingface", "--mapping", "no_colon"),
        ("convert", "a", "b", "--to", "huggingface", "--mapping", "absent.py:f"),
        ("convert", "a", "b", "--to", "huggingface", "--mapping", "absent_module:f"),
        ("convert", "a", "b", "--to", "huggingface", "--mapping", "json:absent"),
        ("convert", "a", "b", "--to", "huggingface", "--storage-option", "no_equals"),
        ("convert", "a", "b", "--to", "huggingface", "--workers", "many"),
        ("inspect", "a", "--unknown"),
        ("inspect", "a", "--html", "x.html"),
        ("diff", "a"),
        ("graph", "a"),
    ],
)
def test_usage_errors_exit_2(argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(cli(*argv), 2)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("workers", [0, -1])
def test_a_number_of_workers_that_is_none(hf, sharded, tmp_path, workers):
    argv = ("convert", hf, tmp_path / "x", "--to", "huggingface", f"--workers={workers}")
    refused(cli(*argv), 2, "--workers", str(workers))
    refused(cli("verify", sharded, f"--workers={workers}"), 2, "--workers", str(workers))
    assert not (tmp_path / "x").exists()


def test_memory_that_is_no_size(hf, tmp_path):
    for option in ("--memory", "--max-shard-size"):
        for value in ("lots", "-5", "0", "5 parsecs"):
            result = cli("convert", hf, tmp_path / "x", "--to", "huggingface", f"{option}={value}")
            assert result.code in (2, 4)
            refused(result, result.code, value)


def test_an_unknown_family_lists_the_families(hf, tmp_path):
    result = cli(
        "convert", hf, tmp_path / "x", "--to", "sharded", "--layout", "tp=1", "--model", "gpt9"
    )
    refused(result, 4, "'gpt9'", *FAMILIES)


def test_an_unknown_model_type_lists_the_families(tmp_path):
    made = model("llama")
    src = write_hf(tmp_path / "src", made.tensors, made.config | {"model_type": "gpt9"})
    refused(
        cli("convert", src, tmp_path / "x", "--to", "sharded", "--layout", "tp=1"),
        4,
        "'gpt9'",
        *FAMILIES,
    )
    convert(src, tmp_path / "y", "sharded", "--layout", "tp=2", "--model", "llama")
    assert equal(read_sharded(tmp_path / "y"), training(made))


@pytest.mark.parametrize("config", [None, {}])
def test_no_family_at_all_says_what_to_give(tmp_path, config):
    src = write_hf(tmp_path / "src", model("llama").tensors, config)
    refused(
        cli("convert", src, tmp_path / "x", "--to", "sharded", "--layout", "tp=1"),
        4,
        "--model",
        "--mapping",
    )


def test_a_huggingface_copy_needs_no_family(tmp_path):
    src = write_hf(tmp_path / "src", {"w": torch.ones(2)})
    convert(src, tmp_path / "x", "huggingface")
    assert equal(read_hf(tmp_path / "x"), {"w": torch.ones(2)})


def test_hf_experts_is_for_huggingface_targets(hf, tmp_path):
    result = cli(
        "convert",
        hf,
        tmp_path / "x",
        "--to",
        "sharded",
        "--layout",
        "tp=1",
        "--hf-experts",
        "split",
    )
    refused(result, 2, "--hf-experts")


MAPPING = """
def swapped(ckpt):
    import d9d_ckpt
    w, v = ckpt["w"], ckpt["v"]
    return {"wv": d9d_ckpt.cat([w, v]), "t": w.transpose(0, 1)[1:]}
def nothing(ckpt):
    return {}
def wrong(ckpt):
    return {"w": 3}
def none(ckpt):
    return None
def absent(ckpt):
    return {"x": ckpt["layers.w"]}
def raises(ckpt):
    return {"x": {}["y"]}
value = 3
"""


@pytest.fixture
def mapped(tmp_path):
    (tmp_path / "my_mapping.py").write_text(MAPPING)
    weights = {"w": torch.arange(6.0).reshape(2, 3), "v": torch.ones(1, 3), "unused": torch.ones(5)}
    return write_hf(tmp_path / "src", weights), f"{tmp_path}/my_mapping.py"


def test_mapping_by_path_and_by_module(mapped, tmp_path, monkeypatch):
    src, file = mapped
    monkeypatch.syspath_prepend(str(tmp_path))
    for n, where in enumerate((f"{file}:swapped", "my_mapping:swapped")):
        report = convert(src, tmp_path / str(n), "huggingface", "--mapping", where)
        w = torch.arange(6.0).reshape(2, 3)
        expected = {"wv": torch.cat([w, torch.ones(1, 3)]), "t": w.t()[1:]}
        assert equal(read_hf(tmp_path / str(n)), expected)
        assert report["dropped"] == ["unused"]
    planned = cli("plan", src, "--to", "huggingface", "--mapping", f"{file}:swapped", "--json").json
    assert planned["bytes_read"] == 36
    assert (
        "cat of 2"
        in cli(
            "graph", src, "--to", "huggingface", "--tensor", "wv", "--mapping", f"{file}:swapped"
        ).out
    )


@pytest.mark.parametrize(
    ("function", "codes", "word"),
    [
        ("nothing", (2, 4), "--mapping"),
        ("wrong", (2, 4), "LazyTensor"),
        ("none", (2, 4), "--mapping"),
        ("absent", (3, 4), "'layers.w'"),
        ("raises", (2, 4), "--mapping"),
        ("value", (2,), "value"),
    ],
)
def test_a_mapping_that_fails_is_one_message(mapped, tmp_path, function, codes, word):
    src, file = mapped
    result = cli(
        "convert", src, tmp_path / "x", "--to", "huggingface", "--mapping", f"{file}:{function}"
    )
    assert result.code in codes
    refused(result, result.code, word)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("text", ["1/0", "def f(:", "import absent_module", "raise SystemExit"])
def test_a_mapping_file_that_does_not_load_is_one_message(mapped, tmp_path, text):
    (tmp_path / "bad.py").write_text(text)
    result = cli(
        "convert",
        mapped[0],
        tmp_path / "x",
        "--to",
        "huggingface",
        "--mapping",
        f"{tmp_path}/bad.py:f",
    )
    refused(result, 2, "--mapping", "bad.py")


def test_a_layout_file_with_stages_and_patterns(tmp_path):
    made = model("llama", layers=4)
    src = write_model(tmp_path / "src", made)
    (tmp_path / "l.yaml").write_text(
        "pp: 2\ntp: 2\nstages: [3, 1]\nvocab_multiple: 4\ntensors:\n  '*o_proj.weight': {tp: 0}\n"
    )
    convert(src, tmp_path / "s", "sharded", "--layout", tmp_path / "l.yaml")
    assert equal(read_sharded(tmp_path / "s"), training(made))
    found = manifest(tmp_path / "s")
    assert found["layout"]["stages"] == [3, 1]
    assert found["layout"]["vocab_multiple"] == 4
    chunks = found["tensors"]["model.layers.0.self_attn.o_proj.weight"]["chunks"]
    assert [(c["start"], c["shape"]) for c in chunks] == [([0, 0], [4, 16]), ([4, 0], [4, 16])]
    by_layer = {
        int(n.split(".")[2]): {int(c["file"].partition("rank-")[2][:5]) // 2 for c in e["chunks"]}
        for n, e in found["tensors"].items()
        if "qkv" in n
    }
    assert by_layer == {0: {0}, 1: {0}, 2: {0}, 3: {1}}
    # 10 rows padded to 16: 8 and 2.
    rows = [c["shape"][0] for c in found["tensors"]["lm_head.weight"]["chunks"]]
    assert rows == [8, 2]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("pp: 2\nstages: [1, 2]\n", 4, ("stages", "3 layers", "2")),
        ("pp: 2\nstages: [2]\n", 4, ("stages",)),
        ("tensors: {'none*': {tp: 0}}\n", 4, ("none*", "matches no tensor")),
        ("tensors: {'*': {zz: 0}}\n", 2, ("zz",)),
        ("tp: two\n", 2, ("tp", "'two'")),
        ("what: 1\n", 2, ("what",)),
        ("- 1\n", 2, ("l.yaml",)),
        ("{", 2, ("l.yaml",)),
        ("pp: 3\n", 4, ("3", "2")),
        ("pp: 2\nvirtual: 2\n", 4, ("4 stages", "2")),
        ("vocab_multiple: 0\n", 4, ("vocab_multiple",)),
    ],
)
def test_a_layout_file_that_will_not_do(tmp_path, text, code, words):
    src = write_model(tmp_path / "src", model("llama"))
    (tmp_path / "l.yaml").write_text(text)
    result = cli("convert", src, tmp_path / "x", "--to", "sharded", "--layout", tmp_path / "l.yaml")
    refused(result, code, *words)
    assert not (tmp_path / "x").exists()


def test_a_layout_of_one_rank(tmp_path):
    made = model("llama")
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "s", "sharded", "--layout", "")
    assert set(read_ranks(tmp_path / "s")) == {0}
    assert equal(read_ranks(tmp_path / "s")[0], training(made))


def test_a_non_empty_destination_is_refused_and_overwrite_replaces_it(hf, tmp_path):
    dst = tmp_path / "x"
    convert(hf, dst, "sharded", "--layout", "tp=2")
    first = manifest(dst)["save_id"]
    refused(
        cli("convert", hf, dst, "--to", "sharded", "--layout", "tp=2"), 4, str(dst), "--overwrite"
    )
    assert manifest(dst)["save_id"] == first
    convert(hf, dst, "sharded", "--layout", "pp=2", "--overwrite")
    assert manifest(dst)["save_id"] != first
    assert equal(read_sharded(dst), training(model("qwen3_moe")))


def test_an_empty_destination_counts_as_absent(hf, tmp_path):
    (tmp_path / "x").mkdir()
    convert(hf, tmp_path / "x", "sharded", "--layout", "tp=2")


def test_verify_option_reads_the_destination_back(hf, tmp_path):
    for to in ("huggingface", "sharded"):
        layout = ("--layout", "tp=2") if to == "sharded" else ()
        convert(hf, tmp_path / to, to, *layout, "--verify")


# -- starting it -------------------------------------------------------------------------------


def started(*command, **options):
    return subprocess.run(  # noqa: S603
        [str(c) for c in command],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
        **options,
    )


def test_python_dash_m(sharded):
    done = started(sys.executable, "-m", "d9d_ckpt", "inspect", sharded, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["format"] == "sharded"
    done = started(sys.executable, "-m", "d9d_ckpt", "inspect", sharded / "nothing")
    assert done.returncode == 3
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


def test_help_of_every_command():
    for command in (
        (),
        *((c,) for c in ("inspect", "convert", "reshard", "plan", "graph", "verify", "diff")),
    ):
        done = started(sys.executable, "-m", "d9d_ckpt", *command, "--help")
        assert done.returncode == 0
        assert done.stdout.startswith("usage: d9d-ckpt")


def test_a_closed_pipe_is_no_error(sharded):
    script = f'"{sys.executable}" -m d9d_ckpt inspect "{sharded}" --tensors "*" | head -c 1; echo "${{PIPESTATUS[0]}}"'
    done = started("bash", "-c", script)
    assert done.stdout[1:].strip() == "0"
    assert done.stderr == ""


def test_metadata_commands_do_not_import_torch(sharded, hf):
    code = (
        "import sys; from d9d_ckpt.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'fsspec'} & set(sys.modules), 'imported'\n"
    )
    for argv in (
        ("inspect", sharded),
        ("plan", hf, "--layout", "tp=2"),
        ("verify", sharded),
        ("diff", sharded, sharded),
    ):
        done = started(sys.executable, "-c", code, *argv)
        assert done.returncode == 0, (argv, done.stderr)


def test_a_single_safetensors_file_is_a_source(hf, tmp_path):
    file = min(hf.glob("*.safetensors"))
    convert(file, tmp_path / "x", "huggingface")
    assert len(read_hf(tmp_path / "x")) == len(model("qwen3_moe").tensors) // 2 + 1
    assert os.listdir(tmp_path / "x") == [SINGLE]


def test_a_step_is_for_run_directories(hf, tmp_path):
    result = cli("convert", hf, tmp_path / "x", "--to", "huggingface", "--step", 3)
    refused(result, 4, "step 3", "not a run directory")
