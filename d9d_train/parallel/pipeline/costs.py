"""What actions and messages cost."""

import math
from dataclasses import dataclass, fields

from d9d_ckpt.errors import LayoutError, UsageError
from d9d_train.parallel.pipeline.actions import Action, Kind

PerStage = float | tuple[float, ...]
"""The same for every stage, or one number each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Durations in any one unit of time; a whole backward pass takes ``input`` and ``weight``.

    Attributes:
        forward: Of a micro-batch in a stage.
        input: Of the part of its backward pass that gives the gradient of the stage's input.
        weight: Of the other part.
        latency: Of a message.
        bandwidth: Bytes of a message in a unit of time.
        message_bytes: What goes between two stages for a micro-batch.
        held_bytes: What a stage keeps of a micro-batch from its forward pass to the end of its backward
            pass.

    Raises:
        UsageError: A number that is negative or none.
    """

    forward: PerStage = 1.0
    input: PerStage = 1.0
    weight: PerStage = 1.0
    latency: float = 0.0
    bandwidth: float = math.inf
    message_bytes: int = 0
    held_bytes: PerStage = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            for number in given if isinstance(given, tuple) else (given,):
                if not number >= 0 or (number == math.inf and field.name != "bandwidth"):
                    raise UsageError(f"pipeline: costs: {field.name}={number} must be at least 0")
        if self.bandwidth == 0:
            raise UsageError("pipeline: costs: bandwidth=0 must be more than 0")

    def of(self, action: Action) -> float:
        """Of a computation; what concerns a whole stage takes no time."""
        match action.kind:
            case Kind.FORWARD:
                return _at(self.forward, action.stage)
            case Kind.BACKWARD:
                return _at(self.input, action.stage) + _at(self.weight, action.stage)
            case Kind.INPUT:
                return _at(self.input, action.stage)
            case Kind.WEIGHT:
                return _at(self.weight, action.stage)
        return 0.0

    def transfer(self, _: Action) -> float:
        """Of a message."""
        return self.latency + self.message_bytes / self.bandwidth

    def held(self, stage: int) -> float:
        """Bytes that a stage keeps of a micro-batch."""
        return _at(self.held_bytes, stage)

    def check_stages(self, stages: int) -> None:
        """That numbers per stage are for so many.

        Raises:
            LayoutError: They are for more or fewer.
        """
        for field in fields(self):
            given = getattr(self, field.name)
            if isinstance(given, tuple) and len(given) != stages:
                raise LayoutError(
                    f"pipeline: costs: {field.name} of {len(given)} stages for a program of {stages}"
                )


def parse_costs(text: str) -> Costs:
    """Costs from ``F=1,I=1,W=1``; a missing one is 1.

    Raises:
        UsageError: Not of that form.
    """
    given: dict[str, float] = {}
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if key not in {*"FIW"} - given.keys() or not 0 <= number < math.inf:
            raise UsageError(
                f"pipeline: costs {text!r}: {item.strip()!r} must be F, I or W once, = and a number "
                "of at least 0, such as F=1,I=1,W=1; B is I + W"
            )
        given[key] = number
    forward, back, weight = (given.get(key, 1.0) for key in "FIW")
    return Costs(forward=forward, input=back, weight=weight)


def _at(given: PerStage, stage: int) -> float:
    return given[stage] if isinstance(given, tuple) else given
