"""Reading once what several ranks hold: one of them reads, the others are sent it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from d9d_ckpt.checkpointer.base import Held
from d9d_ckpt.checkpointer.share import Holding, holding
from d9d_ckpt.run.ranks import Ranks
from d9d_ckpt.tensors import Region

Key = tuple[str, Region]


class Sharing:
    """Who reads which replicated box; process groups are made once and kept."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], Any] = {}
        self._readers: dict[Key, tuple[int, tuple[int, ...]]] = {}

    def agree(self, tensors: Mapping[str, Held], ranks: Ranks) -> dict[str, Held]:
        """What this rank reads itself of ``tensors``; every rank calls it."""
        every: list[Holding] = ranks.broadcast(ranks.gather(holding(tensors)))
        self._readers = readers(every)
        for members in sorted({members for _, members in self._readers.values()}):
            if members not in self._groups:
                # Every rank takes part in making every group, its own or not.
                self._groups[members] = dist.new_group(list(members))
        return {
            name: held
            for name, held in tensors.items()
            if held.box is None
            or self._readers.get((name, held.box), (ranks.rank,))[0] == ranks.rank
        }

    def spread(self, tensors: Mapping[str, Held]) -> None:
        """Send what this rank has read to the other holders, and take what they have."""
        mine = {
            (held.name, held.box): held.local for held in tensors.values() if held.box is not None
        }
        for key, (reader, members) in sorted(self._readers.items()):
            if key in mine:
                _broadcast(mine[key], reader, self._groups[members])


def readers(every: Sequence[Holding]) -> dict[Key, tuple[int, tuple[int, ...]]]:
    """Reader and holders of each box that more than one rank holds; they read in turns."""
    holders: dict[Key, list[int]] = {}
    for rank, held in enumerate(every):
        for name, box in zip(held.names, held.boxes, strict=True):
            if box is not None and box.numel:
                holders.setdefault((name, box), []).append(rank)
    shared = {key: tuple(members) for key, members in holders.items() if len(members) > 1}
    return {
        key: (members[turn % len(members)], members)
        for turn, (key, members) in enumerate(sorted(shared.items()))
    }


def _broadcast(local: torch.Tensor, reader: int, group: Any) -> None:
    """As bytes, which every backend can send whatever the dtype."""
    with torch.no_grad():
        whole = local.contiguous()
        dist.broadcast(whole.view(-1).view(torch.uint8), src=reader, group=group)
        if whole.data_ptr() != local.data_ptr():
            local.copy_(whole)
