"""Where tokens come from, by kind."""

from dataclasses import dataclass, field
from typing import Literal

from d9d_ckpt.errors import UsageError
from d9d_train.data.synthetic import SyntheticConfig
from d9d_train.data.text import TextConfig
from d9d_train.data.tokens import TokensConfig


@dataclass(frozen=True, kw_only=True)
class _Kinds:
    """The settings of each kind; `d9d_train.config` refuses those that ``kind`` does not name."""

    kind: str = "synthetic"
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    tokens: TokensConfig | None = None
    text: TextConfig | None = None

    def __post_init__(self) -> None:
        if not getattr(self, self.kind):
            raise UsageError(f"data.kind is {self.kind}: its settings data.{self.kind} are missing")


@dataclass(frozen=True, kw_only=True)
class SourceConfig(_Kinds):
    """One source of a mixture.

    Attributes:
        weight: Its share, relative to the other weights.
        kind: Of the source.
        synthetic: Settings of that kind.
        tokens: Settings of that kind.
        text: Settings of that kind.
    """

    weight: float
    kind: Literal["synthetic", "tokens", "text"]


@dataclass(frozen=True, kw_only=True)
class DataConfig(_Kinds):
    """Where a run's tokens come from.

    Attributes:
        kind: ``synthetic``, ``tokens``, ``text``, or ``mixture`` of these.
        seed: Of shuffles and walks; None for the run's.
        synthetic: Settings of that kind.
        tokens: Settings of that kind.
        text: Settings of that kind.
        mixture: Sources of that kind.
    """

    kind: Literal["synthetic", "tokens", "text", "mixture"] = "synthetic"
    seed: int | None = None
    mixture: tuple[SourceConfig, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """The same batches every time, of which only the loss is wanted.

    Attributes:
        every: Steps between validations; 0 for never.
        batches: Global batches of one validation.
        first: Number of the first sample; where training reads the same source, one that it never
            reaches.
        data: Where the tokens come from.
    """

    every: int = 0
    batches: int = 1
    first: int = 0
    data: DataConfig = field(default_factory=DataConfig)
