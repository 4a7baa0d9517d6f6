"""Rows of class UX: memory, dtypes, progress, and messages that tell one cause from another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import (
    cli,
    convert,
    equal,
    model,
    read_hf,
    read_sharded,
    refused,
    same,
    training,
    write_hf,
    write_index,
    write_model,
)

import d9d_ckpt
from d9d_ckpt.report import progress
from d9d_ckpt.report.progress import Progress

ROOT = Path(__file__).parents[2]


# -- memory ------------------------------------------------------------------------------------


def measured(*argv):
    """Exit code and peak resident bytes of the command and of its largest worker."""
    code = (
        "import os, resource, sys\n"
        "pid = os.fork()\n"
        "if not pid: os.execv(sys.executable, [sys.executable, '-m', 'd9d_ckpt', *sys.argv[1:]])\n"
        "_, status, usage = os.wait4(pid, 0)\n"
        "most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "print(os.waitstatus_to_exitcode(status), max(usage.ru_maxrss, most) * 1024)\n"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, *map(str, argv), "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    status, rss = done.stdout.split()
    return int(status), int(rss)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """One tensor of 300 MiB and a small one."""
    path = tmp_path_factory.mktemp("large")
    write_hf(
        path / "src", {"w": torch.arange(300 << 18, dtype=torch.int32).reshape(300 << 8, 1024)}
    )
    (path / "m.py").write_text(
        "def whole(c):\n    return dict(c.tensors)\n"
        "def columns(c):\n    w = c['w']\n    return {'r': w[:, 512:], 'l': w[:, :512]}\n"
    )
    yield path
    for file in (path / "src").iterdir():
        file.unlink()


@pytest.mark.parametrize("mapping", ["whole", "columns"])
@pytest.mark.parametrize("workers", [1, 2])
def test_u01_peak_memory_is_bounded_by_what_was_given(large, tmp_path, mapping, workers):
    dst = tmp_path / "s"
    status, rss = measured(
        "convert", large / "src", dst, "--to", "sharded", "--layout", "dp_shard=2",
        "--mapping", f"{large}/m.py:{mapping}", "--memory", "64MiB", "--workers", workers,
    )  # fmt: skip
    assert status == 0
    assert rss < 256 << 20
    for file in dst.rglob("*.safetensors"):
        file.unlink()


def test_u01_too_little_memory_is_refused_up_front_with_both_numbers(tmp_path):
    src = write_model(tmp_path / "src", model("llama"))
    result = cli("convert", src, tmp_path / "x", "--to", "huggingface", "--memory", "5MiB")
    refused(result, 4, "--memory 5.0 MiB", "8.0 MiB")
    assert not (tmp_path / "x").exists()


def test_u01_what_was_used_is_reported(tmp_path):
    src = write_model(tmp_path / "src", model("llama"))
    report = convert(src, tmp_path / "x", "huggingface")
    assert report["peak_rss"] > 10 << 20
    assert report["ranks"] == 1


# -- dtypes ------------------------------------------------------------------------------------


def mixed(tmp_path, key="torch_dtype"):
    """A bf16 model with one fp32 norm, one int64 buffer, and one fp8 weight with its scale."""
    weights = {
        "a.weight": torch.arange(64, dtype=torch.bfloat16).reshape(8, 8),
        "norm.weight": torch.tensor([1.0, 1.0 + 2**-20, 3.0]),
        "ids": torch.tensor([1, 2**40], dtype=torch.int64),
        "q.weight": torch.arange(16).reshape(4, 4).to(torch.float8_e4m3fn),
        "q.weight_scale_inv": torch.tensor([[0.1]]),
    }
    write_hf(tmp_path / "src", weights, {"model_type": "x", key: "bfloat16", "n": 1})
    return tmp_path / "src", weights


SIZES = {"BF16": 128, "F32": 16, "I64": 16, "F8_E4M3": 16}


def test_u02_without_a_flag_every_tensor_keeps_its_dtype(tmp_path):
    src, weights = mixed(tmp_path)
    report = convert(src, tmp_path / "x", "huggingface")
    assert equal(read_hf(tmp_path / "x"), weights)
    assert report["dtypes_in"] == report["dtypes_out"] == SIZES
    assert report["kept_fp32"] == []
    assert (tmp_path / "x" / "config.json").read_bytes() == (src / "config.json").read_bytes()


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_u02_float32_widens_every_float_and_nothing_else(tmp_path, key):
    src, weights = mixed(tmp_path, key)
    report = convert(src, tmp_path / "x", "huggingface", "--dtype", "float32")
    found = read_hf(tmp_path / "x")
    assert same(found["a.weight"], weights["a.weight"].float())
    for name in ("norm.weight", "ids", "q.weight", "q.weight_scale_inv"):
        assert same(found[name], weights[name])
    assert report["dtypes_in"] == SIZES
    assert report["dtypes_out"] == {"F32": 272, "I64": 16, "F8_E4M3": 16}
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config == {"model_type": "x", key: "float32", "n": 1}


def test_u02_bfloat16_rounds_to_nearest_and_keeps_scales(tmp_path):
    src, weights = mixed(tmp_path)
    report = convert(src, tmp_path / "x", "huggingface", "--dtype", "bfloat16")
    found = read_hf(tmp_path / "x")
    assert same(found["norm.weight"], weights["norm.weight"].to(torch.bfloat16))
    for name in ("a.weight", "ids", "q.weight", "q.weight_scale_inv"):
        assert same(found[name], weights[name])
    assert report["kept_fp32"] == ["q.weight_scale_inv"]
    assert report["dtypes_out"] == {"BF16": 134, "I64": 16, "F8_E4M3": 16, "F32": 4}
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"


def test_u02_the_text_has_the_histogram(tmp_path):
    src, _ = mixed(tmp_path)
    text = cli("convert", src, tmp_path / "x", "--to", "huggingface", "--dtype", "float32").out
    before, after = text.partition("dtypes: ")[2].splitlines()[0].split(" -> ")
    assert sorted(before.split(", ")) == ["BF16 128 B", "F32 16 B", "F8_E4M3 16 B", "I64 16 B"]
    assert sorted(after.split(", ")) == ["F32 272 B", "F8_E4M3 16 B", "I64 16 B"]


def test_u02_a_cast_through_the_sharded_format(tmp_path):
    made = model("qwen3_moe", dtype="bfloat16")
    src = write_model(tmp_path / "src", made)
    convert(src, tmp_path / "s", "sharded", "--layout", "tp=2,ep=2", "--dtype", "float32")
    assert equal(read_sharded(tmp_path / "s"), {n: t.float() for n, t in training(made).items()})
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert config == made.config | {"torch_dtype": "float32"}
    convert(tmp_path / "s", tmp_path / "hf", "huggingface", "--dtype", "bfloat16")
    assert equal(read_hf(tmp_path / "hf"), made.tensors)


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn", "float33", "bf16"])
def test_u02_a_dtype_that_floats_cannot_have_is_refused(tmp_path, dtype):
    src, _ = mixed(tmp_path)
    result = cli("convert", src, tmp_path / "x", "--to", "huggingface", "--dtype", dtype)
    assert result.code in (2, 4)
    refused(result, result.code, dtype)
    assert not (tmp_path / "x").exists()


def test_u02_a_cast_of_a_checkpoint_without_floats(tmp_path):
    write_hf(tmp_path / "src", {"ids": torch.arange(4)}, {"torch_dtype": "float32"})
    convert(tmp_path / "src", tmp_path / "x", "huggingface", "--dtype", "bfloat16")
    assert equal(read_hf(tmp_path / "x"), {"ids": torch.arange(4)})


def test_u02_rounding_is_to_nearest_even_and_specials_survive(tmp_path):
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0, torch.inf, -torch.inf,
                           torch.nan, 1e-40, 3.4e38])  # fmt: skip
    write_hf(tmp_path / "src", {"w": values})
    convert(tmp_path / "src", tmp_path / "x", "huggingface", "--dtype", "bfloat16")
    found = read_hf(tmp_path / "x")["w"]
    assert found[:3].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]
    assert same(found[[0, 1, 2, 3, 4, 5, 7, 8]], values.bfloat16()[[0, 1, 2, 3, 4, 5, 7, 8]])
    assert found[6].isnan()


def test_rule10_unknown_bit_patterns_pass_through(tmp_path):
    bits = torch.tensor([0x7FC1, 0xFFFF, 0x7F81, 0x8000, 1], dtype=torch.int32).to(torch.int16)
    weights = {"nan": bits.view(torch.bfloat16), "bool": torch.tensor([True, False])}
    write_hf(tmp_path / "src", weights)
    convert(tmp_path / "src", tmp_path / "x", "huggingface")
    assert equal(read_hf(tmp_path / "x"), weights)


# -- progress ----------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_u03_a_line_at_least_every_ten_seconds(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    watch = Progress()
    told = []
    for _ in range(40):
        clock.now += 1.0
        watch(1 << 20, 1, 40 << 20, 40)
        text = capsys.readouterr().err
        if text:
            told.append((clock.now, text))
    watch.close()
    assert [t for t, _ in told] == [110.0, 120.0, 130.0, 140.0]
    first = told[0][1]
    assert first.count("\n") == 1
    assert "\r" not in first
    for word in (" 25%", "10 of 40 chunks", "10.0 MiB of 40.0 MiB", "1.0 MiB/s", "30 s left"):
        assert word in first


def test_u03_a_bar_on_a_terminal(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    watch = Progress()
    clock.now += 1.0
    watch(1 << 20, 3, 2 << 20, 6)
    text = capsys.readouterr().err
    assert text.startswith("\r")
    assert "##" in text
    assert " 50%" in text
    watch.close()
    assert "\n" not in text + capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 4])
def test_u03_the_last_line_has_seconds_and_bytes(tmp_path, workers):
    weights = {f"t{n}": torch.ones(100) for n in range(200)}
    src = write_hf(tmp_path / "src", weights)
    result = cli("convert", src, tmp_path / "x", "--to", "huggingface", "--workers", workers)
    assert result.code == 0
    assert result.out.startswith("wrote 200 tensors, 78.1 KiB, to ")
    assert " s: " in result.out
    assert result.err == ""


def test_u03_every_worker_is_counted_and_the_watch_ends_at_the_total(tmp_path):
    weights = {f"t{n}": torch.ones(1000, 1000) for n in range(20)}
    src = write_hf(tmp_path / "src", weights)
    seen = []
    d9d_ckpt.convert(
        str(src), str(tmp_path / "x"), to="huggingface", workers=1, watch=lambda *a: seen.append(a)
    )
    assert sum(s[0] for s in seen) == 80_000_000 == seen[-1][2]
    assert sum(s[1] for s in seen) == 20 == seen[-1][3]


def test_u03_quiet_says_nothing(tmp_path):
    src = write_model(tmp_path / "src", model("llama"))
    result = cli("convert", src, tmp_path / "x", "--to", "huggingface", "--quiet")
    assert (result.code, result.out, result.err) == (0, "", "")


# -- messages ----------------------------------------------------------------------------------


def test_u04_three_causes_have_three_texts(tmp_path):
    made = model("llama")
    name, file = "model.layers.1.mlp.up_proj.weight", "model-00002-of-00002.safetensors"
    without = {n: t for n, t in made.tensors.items() if n != name}

    src = write_hf(tmp_path / "absent", without, made.config, shards=2)
    absent = refused(
        cli("convert", src, tmp_path / "x", "--to", "sharded", "--layout", "tp=1"),
        4, name, "llama needs", "nearest: model.layers.0.mlp.up_proj.weight", "--mapping",
    )  # fmt: skip

    src = write_model(tmp_path / "gone", made, shards=2)
    (src / file).unlink()
    gone = refused(
        cli("convert", src, tmp_path / "x", "--to", "sharded", "--layout", "tp=1"),
        3, file, "not there", "finish the download",
    )  # fmt: skip

    src = write_hf(tmp_path / "lacks", without, made.config, shards=2)
    weight_map = json.loads((src / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(src, weight_map | {name: file})
    lacks = refused(
        cli("convert", src, tmp_path / "x", "--to", "sharded", "--layout", "tp=1"),
        3, name, file, "header lacks",
    )  # fmt: skip
    assert len({absent, gone, lacks}) == 3
    assert not (tmp_path / "x").exists()


def test_u04_the_wrong_family_says_what_is_missing_and_what_to_do(tmp_path):
    src = write_model(tmp_path / "src", model("llama"))
    refused(
        cli("convert", src, tmp_path / "x", "--to", "sharded", "--layout", "tp=1", "--model", "qwen3"),
        4, "qwen3 needs", "model.layers.0.self_attn.q_norm.weight", "check --model",
    )  # fmt: skip


@pytest.mark.parametrize("argv", [(), ("--json",), ("--quiet",)])
def test_u04_no_traceback_in_any_form(tmp_path, argv):
    result = cli("inspect", tmp_path / "nothing", *argv)
    refused(result, 3, "no checkpoint here", str(tmp_path / "nothing"))
    assert result.out == ""


def test_u04_debug_shows_the_traceback(tmp_path):
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "d9d_ckpt", "inspect", str(tmp_path / "x"), "--log-level", "debug"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 3
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("d9d-ckpt: ")


def test_diff_of_one_step_of_two_runs(tmp_path):
    for run in "ab":
        for step in (1, 2):
            changed = run == "b" and step == 2
            src = write_hf(tmp_path / f"{run}{step}", {"w": torch.full((4,), 1.0 + changed)})
            (tmp_path / "m.py").write_text("def f(c):\n    return dict(c.tensors)\n")
            argv = ("--layout", "tp=1", "--mapping", f"{tmp_path}/m.py:f")
            convert(src, tmp_path / run / f"step-0000000{step}", "sharded", *argv)
    runs = (tmp_path / "a", tmp_path / "b")
    assert cli("diff", *runs).code == 1
    assert cli("diff", *runs, "--step", 1).code == 0
    assert cli("diff", *runs, "--step", 2).code == 1
    refused(cli("diff", *runs, "--step", 3), 3, "no step 3", "there are 1, 2")
    refused(cli("diff", tmp_path / "a1", runs[0], "--step", 1), 4, "a1: step 1 was asked for")
