"""What a schedule needs of stages, ranks and micro-batches."""

from d9d_ckpt.errors import LayoutError


def check_microbatches(name: str, microbatches: int, least: int = 1) -> None:
    """That there are enough.

    Raises:
        LayoutError: Fewer than ``least``.
    """
    if microbatches < least:
        raise LayoutError(
            f"pipeline: {name} with {microbatches} micro-batches; it needs at least {least}"
        )


def stages_a_rank(name: str, stages: int, ranks: int, exactly: int | None = None) -> int:
    """How many stages a rank has.

    Raises:
        LayoutError: Not the same on every rank, or not ``exactly`` so many.
    """
    if ranks < 1:
        raise LayoutError(f"pipeline: {name} on {ranks} ranks; it needs at least 1")
    local = "the same number of stages" if exactly is None else f"{exactly} of the stages"
    if stages < ranks or stages % ranks or exactly not in (None, stages // ranks):
        raise LayoutError(
            f"pipeline: {name} puts {local} on each rank, so {stages} stages do not go on {ranks} ranks"
        )
    return stages // ranks


def microbatches_a_round(name: str, ranks: int, microbatches: int) -> int:
    """How many micro-batches a rank takes through one stage before it turns to its next one.

    Raises:
        LayoutError: They do not fall into equal rounds of at least one micro-batch a rank.
    """
    rounds = _rounds(ranks, microbatches)
    if microbatches % rounds:
        fitting = [m for m in range(1, 2 * microbatches) if not m % _rounds(ranks, m)]
        below = max(m for m in fitting if m < microbatches)
        above = min(m for m in fitting if m > microbatches)
        raise LayoutError(
            f"pipeline: {name} takes micro-batches in {rounds} equal rounds of at least {ranks}, as "
            f"many as ranks; {microbatches} do not divide, {below} or {above} do"
        )
    return microbatches // rounds


def _rounds(ranks: int, microbatches: int) -> int:
    return max(1, microbatches // ranks)
