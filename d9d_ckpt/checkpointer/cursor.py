"""Where a run stands in its data: one global position, so that any number of readers goes on from there."""

from dataclasses import dataclass
from typing import Any

from d9d_ckpt.errors import RequestError


@dataclass
class DataCursor:
    """Samples consumed by all ranks together.

    Attributes:
        length: Samples of the dataset.
        seed: Of the shuffle.
        consumed: Samples taken so far, over all ranks and epochs.
    """

    length: int
    seed: int
    consumed: int = 0

    def share(self, rank: int, world: int, count: int) -> range:
        """Positions of the next ``count`` samples that ``rank`` of ``world`` readers takes.

        Readers take turns, so that the samples of a step are the same however many readers there are.

        Raises:
            RequestError: ``count`` does not divide over the readers.
        """
        if count % world:
            raise RequestError(f"{count} samples do not divide over {world} readers")
        return range(self.consumed + rank, self.consumed + count, world)

    def advance(self, count: int) -> None:
        """Note that ``count`` samples have been taken, over all ranks."""
        self.consumed += count

    def state_dict(self) -> dict[str, Any]:
        """For `Checkpointer`."""
        return {"length": self.length, "seed": self.seed, "consumed": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            RequestError: It is one in another dataset, or of another shuffle, or no position.
        """
        lacking = [key for key in self.state_dict() if key not in state]
        if lacking:
            raise RequestError(
                f"data cursor: the saved position has no {', '.join(lacking)}, only "
                f"{', '.join(state) or 'nothing'}; it is of another kind, so put it under another key"
            )
        for key in ("length", "seed"):
            if state[key] != getattr(self, key):
                raise RequestError(
                    f"data cursor: {key} was {state[key]}, is {getattr(self, key)} now; position "
                    f"{state['consumed']} means other samples there"
                )
        self.consumed = state["consumed"]
