"""What the demos share: a folder to work in, and commands that are shown before they run."""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def in_folder(description: str | None, demo: Callable[[Path], int]) -> int:
    """Run ``demo`` in a temporary directory, or in the one that ``--keep`` names; its exit code."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work here, and leave it")
    keep: Path | None = parser.parse_args().keep
    # The commands lie beside this Python, whether or not its environment is active.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="d9d-demo-") as folder:
            return demo(Path(folder))
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        parser.error(f"{keep} is not empty")
    return demo(keep.resolve())


def show(command: str) -> None:
    """Print a command, or a comment, as one would type it."""
    print(f"\n$ {command}" if command[0] != "#" else f"\n{command}", flush=True)


def failed(folder: Path, command: str) -> int:
    """Show a command and run it; its exit code, told if it is not 0."""
    show(command)
    code = subprocess.run(shlex.split(command), cwd=folder, check=False).returncode  # noqa: S603
    if code:
        print(f"FAILED: exit code {code}", file=sys.stderr)
    return code
