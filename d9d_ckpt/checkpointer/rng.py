"""The random number generators of a process, as state that a resume restores.

Each rank keeps its own generators as ``<path>.<rank>.<kind>``, U8 tensors that no other rank holds.
Loaded by as many ranks in the same layout, each goes on exactly where it was. Loaded by any others,
every generator is seeded anew, from the blake2b hash of (rank 0's saved torch generator, the step of
the checkpoint, this rank): the same for everyone who resumes that checkpoint that way, and another on
every rank; rank 0 warns once, with both layouts.
"""

import hashlib
import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from d9d_ckpt.checkpointer import values
from d9d_ckpt.checkpointer.giving import Giving
from d9d_ckpt.checkpointer.names import Path, named
from d9d_ckpt.checkpointer.taking import Taking
from d9d_ckpt.errors import RequestError
from d9d_ckpt.tensors import brief

_KEY = 624
"""Words of the key of a Mersenne Twister."""


class RNG:
    """The generators of torch (CPU, and CUDA once in use), numpy's legacy one and Python's.

    Put one into the state: ``{"model": ..., "rng": RNG()}``.

    Args:
        layout: What decides, beside the number of ranks, which rank draws what, e.g.
            ``{"tp": 2, "pp": 1}``; a JSON value.
    """

    def __init__(self, layout: Any = None) -> None:
        self.layout = layout

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the generators' states, U8, by kind: torch, numpy, python, cuda.0, ...

        Raises:
            RequestError: numpy's legacy generator is not a Mersenne Twister.
        """
        state = {"torch": torch.get_rng_state(), "numpy": _numpy_state(), "python": _python_state()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for device in range(torch.cuda.device_count()):
                state[f"cuda.{device}"] = torch.cuda.get_rng_state(device)
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the generators that ``state`` has."""
        for kind, tensor in state.items():
            match kind.partition("."):
                case ("torch", _, _):
                    torch.set_rng_state(tensor)
                case ("numpy", _, _):
                    _set_numpy_state(tensor)
                case ("python", _, _):
                    _set_python_state(tensor)
                case ("cuda", _, device):
                    torch.cuda.set_rng_state(tensor, int(device))

    def reseed(self, origin: torch.Tensor, step: int | None, rank: int) -> None:
        """Seed every generator from ``origin``, a generator's state, with ``step`` and ``rank``."""
        text = f"{-1 if step is None else step} {rank}".encode()
        digest = hashlib.blake2b(origin.numpy().tobytes() + text, digest_size=32).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little"))
        np.random.seed(np.frombuffer(digest, "<u4"))
        random.seed(int.from_bytes(digest, "little"))

    def give(self, path: Path, out: Giving) -> dict[str, Any]:
        """Put this rank's generators among the tensors; the JSON that stands for them."""
        rank, where = self._whereabouts()
        for kind, tensor in self.state_dict().items():
            out.tensor(f"{named(path)}.{rank}.{kind}", tensor, ".".join(path))
        return where

    def take(self, json: Any, path: Path, into: Taking) -> None:
        """Want this rank's generators, or what a new seed is made of; the rest of them is not wanted."""
        rank, here = self._whereabouts()
        there = values.unpack(json)
        if "world" not in there:
            into.missing.append(".".join(path))
        elif _alike(here, there):
            self._take_own(f"{named(path)}.{rank}", into)
        else:
            self._take_anew(named(path), rank, (there, here), into)

    def _take_own(self, prefix: str, into: Taking) -> None:
        own = self.state_dict()
        if torch.cuda.is_available():
            own |= {
                name.removeprefix(f"{prefix}."): torch.empty(spec.shape, dtype=torch.uint8)
                for name, spec in into.saved.specs.items()
                if name.startswith(f"{prefix}.cuda.")
                and int(name.rpartition(".")[2]) < torch.cuda.device_count()
            }
        found = {
            kind: tensor
            for kind, tensor in own.items()
            if into.want(f"{prefix}.{kind}", tensor, f"{prefix}.{kind}")
        }
        into.later(lambda: self.load_state_dict(found), last=True)

    def _take_anew(
        self, name: str, rank: int, layouts: tuple[Mapping[str, Any], ...], into: Taking
    ) -> None:
        origin = into.new(f"{name}.0.torch")
        into.used.update(other for other in into.saved.specs if other.startswith(f"{name}."))
        if origin is None:
            return

        def reseed() -> None:
            self.reseed(origin, into.saved.step, rank)
            if rank == 0:
                then, now = (brief(dict(layout)) for layout in layouts)
                warnings.warn(
                    f"{name}: random generators were saved on {then} and are seeded anew on {now}: draws "
                    "differ from those of an uninterrupted run",
                    stacklevel=2,
                )

        into.later(reseed, last=True)

    def _whereabouts(self) -> tuple[int, dict[str, Any]]:
        """This rank, and what must be equal for the generators to be restored."""
        ready = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
        if self.layout is None:
            return rank, {"world": world}
        return rank, {"world": world, "layout": values.encode(self.layout, "layout")}


def _alike(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two layouts agree in all that both say."""
    return all(a[key] == b[key] for key in a.keys() & b.keys())


def _numpy_state() -> torch.Tensor:
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise RequestError(
            f"numpy's global generator is a {state['bit_generator']}; only MT19937, which it is unless "
            "set_bit_generator() was called, can be kept"
        )
    gauss = state["gauss"] if state["has_gauss"] else None
    return _twister(state["state"]["key"], state["state"]["pos"], gauss)


def _set_numpy_state(tensor: torch.Tensor) -> None:
    key, position, gauss = _from_twister(tensor)
    np.random.set_state(("MT19937", key, position, int(gauss is not None), gauss or 0.0))


def _python_state() -> torch.Tensor:
    _, words, gauss = random.getstate()
    return _twister(np.array(words[:_KEY], "<u4"), words[_KEY], gauss)


def _set_python_state(tensor: torch.Tensor) -> None:
    key, position, gauss = _from_twister(tensor)
    random.setstate((3, (*key.tolist(), position), gauss))


def _twister(key: "np.ndarray[Any, Any]", position: int, gauss: float | None) -> torch.Tensor:
    """A Mersenne Twister as little-endian words: key, position, whether a normal is left, its bits."""
    left = np.array([gauss or 0.0], "<f8").view("<u4")
    words = np.concatenate([key, [position, gauss is not None], left]).astype("<u4")
    return torch.from_numpy(words.view(np.uint8).copy())


def _from_twister(tensor: torch.Tensor) -> tuple["np.ndarray[Any, Any]", int, float | None]:
    words = tensor.numpy().view("<u4")
    gauss = float(words[_KEY + 2 :].copy().view("<f8")[0]) if words[_KEY + 1] else None
    return words[:_KEY].copy(), int(words[_KEY]), gauss
