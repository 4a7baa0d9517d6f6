"""Several streams as one, in exact proportions."""

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite

from d9d_ckpt.errors import UsageError
from d9d_train.data.sample import Sample, Stream


class Mixture:
    """Takes every sample from one of several streams, each of which is read in order.

    Of the first n samples, a source of share w among k has n w of them, less than k - 1 more or fewer:
    no batch is short of any source, and no history is needed to know where each of them stands.
    """

    def __init__(self, sources: Sequence[Stream], weights: Sequence[float]) -> None:
        if not sources or any(not isfinite(weight) or weight <= 0 for weight in weights):
            raise UsageError(
                f"data.mixture: weights {list(weights)}: expected at least one, all above 0"
            )
        self._sources = sources
        self._shares = shares(weights)

    @property
    def length(self) -> int:
        """Samples of all sources, which changes when files do."""
        return sum(source.length for source in self._sources)

    def sample(self, number: int) -> Sample:
        """Sample ``number`` of the mixture."""
        source, own = place(number, self._shares)
        return self._sources[source].sample(own)


def shares(weights: Sequence[float]) -> list[Fraction]:
    """What each source takes of what those before it leave; the decimals of the weights are exact."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact[i:]) for i, weight in enumerate(exact)]


def place(number: int, shares: Sequence[Fraction]) -> tuple[int, int]:
    """The source that sample ``number`` is taken from, and its number there.

    Of the first n that reach it, a source takes floor(n x share), and passes the others on.
    """
    for source, share in enumerate(shares):
        taken = number * share.numerator // share.denominator
        if (number + 1) * share.numerator // share.denominator > taken:
            return source, taken
        number -= taken
    raise AssertionError("the last source takes all that is left")
