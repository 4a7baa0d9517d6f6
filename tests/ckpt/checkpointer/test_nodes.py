"""Two nodes of two ranks each, as a launcher starts them, on one file system."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from helpers.checkpoints import equal, model, read_sharded, training, write_model

import d9d_ckpt

pytestmark = pytest.mark.ranks

WATCHED = """
    import json, os, sys
    import torch, torch.distributed as dist
    from pathlib import Path

    root, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    assert int(os.environ["LOCAL_WORLD_SIZE"]) == 2
    assert int(os.environ["LOCAL_RANK"]) == rank % 2
    KINDS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate")
    changed = []

    def hook(event, args):
        "What changes a directory: names made, moved and removed, and files made by opening them."
        made = event == "open" and (args[2] or 0) & os.O_CREAT
        if (event in KINDS or made) and str(args[0]).startswith(f"{root}/run"):
            changed.append((event, str(args[0])))

    sys.addaudithook(hook)

    def over(**found):
        (root / f"out.{rank}").write_text(json.dumps(found | {"changed": changed}))
"""

SAVES = """
    from d9d_ckpt import Checkpointer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    w = distribute_tensor(torch.arange(4000.0), init_device_mesh("cpu", (4,)), [Shard(0)])
    state = {"model": {"w": w, "b": torch.ones(70_000)}, "step": 0}
    with Checkpointer(root / "run", keep_last=1, silence=20) as saver:
        for step in (1, 2, 3):
            state["step"] = step
            saver.save(step, state, blocking=True)
        state["step"] = 0
        report = saver.load(state)
    over(step=report.step, value=state["step"])
    dist.destroy_process_group()
"""

CONVERTS = """
    from d9d_ckpt.cli import main

    code = main(["convert", f"{root}/src", f"{root}/run", "--to", "sharded",
                 "--layout", "pp=2,tp=2", "--workers", "1", "--quiet"])
    over(code=code)
"""


def free_port():
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        return end.getsockname()[1]


def on_two_nodes(root, body):
    """What the script leaves on each of four ranks; the launcher of each node sets its own LOCAL_RANK."""
    script = root / "script.py"
    script.write_text(textwrap.dedent(WATCHED) + textwrap.dedent(body))
    port = free_port()
    nodes = [
        subprocess.Popen(  # noqa: S603 - a script of our own
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
             "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port),
             str(script), str(root)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        told = [node.communicate(timeout=90)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], told
    return [json.loads((root / f"out.{rank}").read_text()) for rank in range(4)]


def test_d16_one_process_of_all_nodes_makes_renames_and_deletes_what_is_saved(tmp_path):
    found = on_two_nodes(tmp_path, SAVES)
    assert [(f["step"], f["value"]) for f in found] == [(3, 3)] * 4
    kinds = {event for event, _ in found[0]["changed"]}
    assert {"os.mkdir", "open", "os.link", "os.rename", "os.rmdir"} <= kinds
    assert [f["changed"] for f in found[1:]] == [[], [], []]
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["step-00000003"]
    ckpt = d9d_ckpt.open(str(tmp_path / "run"))
    assert torch.equal(ckpt["w"].read(), torch.arange(4000.0))
    assert d9d_ckpt.verify(str(tmp_path / "run")).ok
    files = (tmp_path / "run").glob("*/*/rank-*")
    assert sorted(f.name for f in files) == [f"rank-{n:05}.safetensors" for n in range(4)]


def test_d16_one_process_of_all_nodes_makes_and_renames_what_is_converted(tmp_path):
    made = model("llama")
    write_model(tmp_path / "src", made)
    found = on_two_nodes(tmp_path, CONVERTS)
    assert [f["code"] for f in found] == [0] * 4
    assert {"os.mkdir", "os.rename"} <= {event for event, _ in found[0]["changed"]}
    # What each rank has done so far it notes in a journal of its own.
    assert [e for f in found[1:] for e in f["changed"] if "journal" not in e[1]] == []
    assert equal(read_sharded(tmp_path / "run"), training(made))
    assert d9d_ckpt.verify(str(tmp_path / "run")).ok
