"""Interrupted runs to object stores go on behind their last whole object; compressed ones as well."""

import os
import sys

import pytest
from helpers.checkpoints import cli, refused

import d9d_ckpt
import make_checkpoint

pytest_plugins = ["helpers.servers"]
pytestmark = pytest.mark.s3

SHARDED = {"to": "sharded", "layout": "tp=2,pp=4"}
FORMS = {
    "sharded": SHARDED,
    "zstd": SHARDED | {"codec": "zstd"},
    "huggingface": {"to": "huggingface", "max_shard_size": "4MB"},
}
ENOUGH = {"sharded": 2, "zstd": 6, "huggingface": 2}
"""Objects after which something is whole that a run takes at once."""

ENDED = 9


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / "hf"
    config = make_checkpoint.sized("llama", "24MiB", layers=4)
    make_checkpoint.write(config, path, seed=5, max_shard_size=10**9, sparse=False)
    return path


def options(form):
    """The command line of a form."""
    return [
        part for key, value in FORMS[form].items() for part in (f"--{key.replace('_', '-')}", value)
    ]


def killed(source, url, form, objects, *more):
    """A conversion in a process of its own that is gone at its ``objects``-th finished one."""
    program = (
        "import os, sys\n"
        "from d9d_ckpt.run import upload\n"
        "from d9d_ckpt.cli import main\n"
        "note, left = upload.note, [int(sys.argv[1])]\n"
        "def noted(*args):\n"
        "    note(*args)\n"
        "    left[0] -= 1\n"
        "    if not left[0]:\n"
        f"        os._exit({ENDED})\n"
        "upload.note = noted\n"
        "sys.exit(main(sys.argv[2:]))\n"
    )
    argv = ["convert", str(source), url, *options(form), "--workers", "1", "--quiet", *more]
    pid = os.posix_spawn(
        sys.executable, [sys.executable, "-c", program, str(objects), *argv], os.environ
    )
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == ENDED


def names(server):
    return {name.removeprefix("out/") for name in server.objects("out/")}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("server", ["rclone", "moto"], indirect=True)
def test_u03_finished_objects_are_kept_and_the_rest_is_done(server, fresh, source, form):
    url = f"{server.url}/out"
    killed(source, url, form, ENOUGH[form])
    kept = {n for n in names(server) if n.endswith(".safetensors")}
    assert len(kept) >= 2
    assert not {"manifest.json", "model.safetensors.index.json"} & names(server)
    refused(cli("convert", source, url, *options(form)), 4, "not empty", "--overwrite")
    result = cli("convert", source, url, *options(form), "--resume", "--json")
    assert result.code == 0, result.err
    whole = cli("verify", url, "--json").json
    assert whole["ok"]
    assert result.json["bytes_written"] < 0.98 * whole["bytes"]
    assert cli("diff", source, url).code == 0
    assert kept < names(server)
    assert not [n for n in names(server) if ".d9d-" in n]


@pytest.mark.parametrize("form", FORMS)
def test_u03_damaged_objects_are_sent_again(moto, fresh, source, form):
    url = f"{moto.url}/out"
    killed(source, url, form, 2)
    for name, content in moto.objects("out/").items():
        if name.endswith(".safetensors"):
            moto.put(name, content[:-1] + bytes([content[-1] ^ 1]))
    result = cli("convert", source, url, *options(form), "--resume", "--json")
    assert result.code == 0, result.err
    whole = cli("verify", url, "--json").json
    assert whole["ok"]
    assert result.json["bytes_written"] >= whole["bytes"]
    assert cli("diff", source, url).code == 0


def test_u03_another_request_is_refused_with_what_changed(moto, fresh, source):
    url = f"{moto.url}/out"
    killed(source, url, "sharded", 1)
    before = names(moto)
    for change, words in (
        (["--layout", "tp=4"], "--layout was"),
        (["--codec", "zstd"], "--codec was none, is zstd now"),
    ):
        result = cli("convert", source, url, *options("sharded"), *change, "--resume")
        refused(result, 4, words)
    # More may have come to be in the server after the kill, nothing may be gone.
    assert before <= names(moto)


@pytest.mark.parametrize("form", FORMS)
def test_a_compressed_or_plain_checkpoint_replaces_another_on_a_store(moto, fresh, source, form):
    url = f"{moto.url}/out"
    for _ in range(2):
        assert cli("convert", source, url, *options("huggingface"), "--overwrite").code == 0
    first = names(moto)
    assert cli("convert", source, url, *options(form), "--overwrite").code == 0
    assert cli("diff", source, url).code == 0
    assert cli("verify", url).code == 0
    weights = {n for n in first if n.endswith(".safetensors")}
    assert not weights & names(moto)


def test_any_other_store_takes_compressed_checkpoints(source):
    url = f"memory://compressed-{os.getpid()}"
    assert cli("convert", source, url, *options("zstd")).code == 0
    assert cli("verify", url).code == 0
    assert cli("diff", source, url).code == 0
    stored = d9d_ckpt.open(url).opened.catalogue.nbytes
    assert stored < 0.72 * d9d_ckpt.open(str(source)).opened.catalogue.nbytes
