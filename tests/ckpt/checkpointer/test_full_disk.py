"""Saves to a file system of 10 MiB that is really full: mounted in a name space of a process of its own."""

import os
import subprocess
import sys
import textwrap

import pytest


def mountable():
    """Whether this host lets a process mount a tmpfs where nobody else sees it."""
    try:
        done = subprocess.run(
            ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"],  # noqa: S607
            check=False,
            capture_output=True,
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


pytestmark = pytest.mark.skipif(not mountable(), reason="a tmpfs cannot be mounted here")

START = """
    import os, sys, errno
    from pathlib import Path
    import numpy as np, torch, d9d_ckpt
    from d9d_ckpt import Checkpointer
    from d9d_ckpt.errors import StorageError
    from d9d_ckpt.checkpointer.messages import Abort
    from helpers.checkpoints import everything
    from helpers.writers import Ranks, children

    MIB = 1 << 20
    disk = Path(sys.argv[1])
    assert os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize == 10 * MIB
    run, ballast = disk / "run", disk / "ballast"

    def state(mib, value=1):
        return {"model": {f"w{n}": torch.full((MIB // 4,), float(value)) for n in range(mib)}}

    def told(step):
        try:
            step()
        except StorageError as error:
            return str(error)
        return ""

    def has(text, *words):
        missing = [word for word in words if word not in text]
        assert not missing, (missing, text)

    def fill(leaving):
        "Somebody else takes what is free but for so many bytes."
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(disk).f_bavail * 4096 - leaving)

    def only_step_1():
        assert [p.name for p in run.iterdir()] == ["step-00000001"]
        assert everything(run) == before
        assert d9d_ckpt.open(str(run)).metadata["step"] == 1
        assert d9d_ckpt.verify(str(run)).ok

    saver = Checkpointer(run, keep_last=1)
    saver.save(1, state(4), blocking=True)
    before = everything(run)
"""


def on_small_disk(tmp_path, body):
    """Run ``body`` after `START` with a tmpfs of 10 MiB mounted at its first argument."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(START) + textwrap.dedent(body) + "\nprint('over')\n")
    disk = tmp_path / "disk"
    disk.mkdir()
    shell = 'mount -t tmpfs -o size=10m none "$1" && exec "$2" "$3" "$1"'
    done = subprocess.run(  # noqa: S603 - a script of our own
        ["unshare", "-rm", "sh", "-c", shell, "sh", disk, sys.executable, script],  # noqa: S607
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


@pytest.mark.parametrize("blocking", [True, False])
def test_d17_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, blocking):
    """4 of 10 MiB are taken, 8 are to be written: needed and free are told, and what fits is saved."""
    on_small_disk(
        tmp_path,
        f"""
        text = told(lambda: saver.save(2, state(8), blocking={blocking}).wait())
        has(text, f"{{run}}/step-00000002", "8.0 MiB are to be written, 6.0 MiB are free")
        only_step_1()
        saver.save(3, state(5, 3), blocking=True)
        assert [p.name for p in run.iterdir()] == ["step-00000003"]
        saver.close()
        """,
    )


def test_d17_a_disk_that_fills_while_live_tensors_are_written(tmp_path):
    on_small_disk(
        tmp_path,
        """
        from d9d_ckpt.storage.local import LocalStore
        write, count = LocalStore.write, [0]

        def writing(store, *args):
            count[0] += 1
            if count[0] == 3:
                fill(MIB // 2)
            write(store, *args)

        LocalStore.write = writing
        text = told(lambda: saver.save(2, state(5, 2), blocking=True))
        LocalStore.write = write
        has(text, f"write {run}/step-00000002/", "rank-00000.safetensors", "errno 28", " free")
        assert count[0] >= 3
        only_step_1()
        ballast.unlink()
        saver.save(2, state(5, 2), blocking=True)
        assert [p.name for p in run.iterdir()] == ["step-00000002"]
        saver.close()
        """,
    )


def test_d17_a_disk_that_fills_while_the_writer_process_writes(tmp_path):
    on_small_disk(
        tmp_path,
        """
        tensors = {"w": np.ones((1280, 1024), np.float32)}
        with Ranks() as ranks:
            ranks.stage(tensors)
            ranks.prepare(run / "step-00000002", 2)
            fill(MIB)
            has(told(ranks.write), f"write {run}/step-00000002/", "errno 28", " free")
            ranks[0].link.ask(Abort())
            only_step_1()
            ballast.unlink()
            ranks.save(run / "step-00000002", tensors, 2)
        assert d9d_ckpt.open(str(run)).metadata["step"] == 2
        saver.close()
        assert not children()
        """,
    )


def test_d17_a_conversion_that_fills_the_disk_leaves_nothing(tmp_path):
    on_small_disk(
        tmp_path,
        """
        from helpers.checkpoints import cli, refused
        from d9d_ckpt.run.directory import Directory
        prepare = Directory.prepare

        def prepared(place, *args):
            prepare(place, *args)
            fill(MIB)

        Directory.prepare = prepared
        out = disk / "out"
        result = cli("convert", run, out, "--to", "sharded", "--layout", "dp_shard=2",
                     "--workers", 1)
        refused(result, 5, f"write {out}/", "errno 28", " free")
        assert not out.exists()
        only_step_1()
        saver.close()
        """,
    )
