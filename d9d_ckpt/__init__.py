"""A streaming checkpoint engine: tensors as expressions over stored bytes.

import d9d_ckpt

ckpt = d9d_ckpt.open("Qwen3-30B-A3B")
d9d_ckpt.convert("Qwen3-30B-A3B", "sharded", to="sharded", layout="tp=2,pp=2")
"""

import os
import sys

if os.path.basename(next(iter(sys.argv), "")) in ("d9d-ckpt", "-m"):
    # The command never multiplies matrices, and starting numpy's BLAS threads is a third of the CPU
    # time of its start: 0.3 s with them, 0.2 s without. Whoever imports the package keeps them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import importlib
from typing import TYPE_CHECKING

from d9d_ckpt.api import Settings as Settings
from d9d_ckpt.api import convert as convert
from d9d_ckpt.api import diff as diff
from d9d_ckpt.api import open as open
from d9d_ckpt.api import reshard as reshard
from d9d_ckpt.api import verify as verify
from d9d_ckpt.errors import CkptError as CkptError
from d9d_ckpt.graph.build import LazyTensor as LazyTensor
from d9d_ckpt.graph.build import cat as cat
from d9d_ckpt.graph.build import stack as stack
from d9d_ckpt.layout.topology import Topology as Topology
from d9d_ckpt.run.checkpoint import Checkpoint as Checkpoint

if TYPE_CHECKING:
    from d9d_ckpt.checkpointer.cursor import DataCursor as DataCursor
    from d9d_ckpt.checkpointer.load import LoadReport as LoadReport
    from d9d_ckpt.checkpointer.rng import RNG as RNG
    from d9d_ckpt.checkpointer.saver import Checkpointer as Checkpointer
    from d9d_ckpt.checkpointer.saver import Handle as Handle

_LIVE = {
    "Checkpointer": "saver",
    "DataCursor": "cursor",
    "Handle": "saver",
    "LoadReport": "load",
    "RNG": "rng",
}
"""What needs torch, and its module: torch takes seconds to import, and the command does without."""


def __getattr__(name: str) -> object:
    if name not in _LIVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"d9d_ckpt.checkpointer.{_LIVE[name]}"), name)
