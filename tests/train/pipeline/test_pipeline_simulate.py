"""What simulated programs take, by hand, by figure and by property."""

import random
from itertools import pairwise

import pytest
from helpers.strategies import seeded
from hypothesis import given
from hypothesis import strategies as st

from d9d_ckpt.errors import LayoutError, UsageError
from d9d_train.parallel.pipeline.actions import Action, Kind, parse
from d9d_train.parallel.pipeline.costs import Costs, parse_costs
from d9d_train.parallel.pipeline.lockstep import Span
from d9d_train.parallel.pipeline.schedule import BUILDERS, build, placement
from d9d_train.parallel.pipeline.simulate import Simulation, simulate

FIGURES = {
    # name: (bubble, peak) at 4 ranks and 8 micro-batches, at 8 ranks and 32
    "gpipe": (27.3, 8, 17.9, 32),
    "1f1b": (27.3, 4, 17.9, 8),
    "interleaved": (15.8, 5.5, 9.9, 11.5),
    "looped_bfs": (15.8, 8, 9.9, 32),
    "zb1p": (11.1, 4, 6.8, 8),
    "zbv": (5.9, 4, 3.5, 8),
    "dualpipev": (5.9, 4.5, 3.5, 8.5),
}


def simulated(name: str, ranks: int, microbatches: int, costs: Costs | None = None) -> Simulation:
    virtual, _ = placement(name)
    return simulate(build(name, virtual * ranks, ranks, microbatches), costs)


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_bubbles_and_peaks(name: str) -> None:
    few, many = simulated(name, 4, 8), simulated(name, 8, 32)
    found = [figure for s in (few, many) for figure in (100 * s.bubble, max(s.peak_microbatches))]
    assert found == pytest.approx(FIGURES[name], abs=0.051)


def test_1f1b_by_hand() -> None:
    found = simulated("1f1b", 2, 2)
    F, B = Kind.FORWARD, Kind.BACKWARD  # noqa: N806
    assert found.spans == (
        (
            Span(Action(0, F, 0), 0, 1),
            Span(Action(0, F, 1), 1, 2),
            Span(Action(0, B, 0), 4, 6),
            Span(Action(0, B, 1), 7, 9),
        ),
        (
            Span(Action(1, F, 0), 1, 2),
            Span(Action(1, B, 0), 2, 4),
            Span(Action(1, F, 1), 4, 5),
            Span(Action(1, B, 1), 5, 7),
        ),
    )
    assert (found.makespan, found.busy) == (9, (6, 6))
    assert found.bubble == pytest.approx(1 / 3)
    assert found.peak_microbatches == (2, 1)


def test_messages_take_time() -> None:
    """Latency 1/4 and 6 bytes at 8 a unit are one unit: it passes between each two computations."""
    costs = Costs(latency=0.25, bandwidth=8, message_bytes=6)
    found = simulated("1f1b", 2, 1, costs)
    starts = [[span.start for span in spans] for spans in found.spans]
    assert starts == [[0, 6], [2, 3]]
    assert found.makespan == 8


def test_a_message_travels_while_its_receiver_computes_something_else() -> None:
    """Rank 1 receives micro-batch 1 while it is at the gradient of 0: a latency of 2 is hidden there."""
    found = simulated("1f1b", 2, 2, Costs(latency=2.0))
    assert [(str(a), start) for a, start, _ in found.spans[1]][:3] == [
        ("1F0", 3),
        ("1B0", 4),
        ("1F1", 6),
    ]


def test_a_send_waits_for_a_receiver_that_begins_late() -> None:
    """Rank 0 sends micro-batch 1 once 0 is there, and rank 1 begins to receive it after its 0."""
    program = parse(
        "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2\n1RECV_F0,1F0,1RECV_F1,1F1,1RECV_F2,1F2"
    )
    found = simulate(program, Costs(forward=(1.0, 5.0)))
    assert [span.start for span in found.spans[0]] == [0, 1, 2]
    assert [span.start for span in found.spans[1]] == [1, 6, 11]


def test_costs_by_stage() -> None:
    found = simulated("1f1b", 2, 1, Costs(forward=(1.0, 2.0), input=(3.0, 4.0), weight=(5.0, 6.0)))
    assert [[span.end for span in spans] for spans in found.spans] == [[1, 21], [3, 13]]
    with pytest.raises(LayoutError, match="weight of 3 stages for a program of 2"):
        simulated("1f1b", 2, 1, Costs(weight=(1.0, 2.0, 3.0)))


@pytest.mark.parametrize(
    ("text", "costs"),
    [
        ("F=1,I=1,W=1", Costs()),
        ("F=2, W=0.5", Costs(forward=2.0, weight=0.5)),
        ("I=0", Costs(input=0.0)),
    ],
)
def test_costs_as_text(text: str, costs: Costs) -> None:
    assert parse_costs(text) == costs


@pytest.mark.parametrize(
    "text", ["", "F", "F=", "F=-1", "F=nan", "F=inf", "F=1,F=2", "B=2", "F=1;I=2"]
)
def test_costs_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="must be F, I or W once"):
        parse_costs(text)


@pytest.mark.parametrize(
    "given", [{"forward": -1.0}, {"latency": float("nan")}, {"bandwidth": 0.0}]
)
def test_costs_below_nothing(given: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"costs: {next(iter(given))}="):
        Costs(**given)  # type: ignore[arg-type]


def test_an_evaluation_holds_what_it_works_on() -> None:
    assert simulated("forward_only", 4, 8).peak_microbatches == (1, 1, 1, 1)


def test_bytes_by_hand() -> None:
    """Rank 0 holds two micro-batches of 100 and sends 10; rank 1 holds one, what it got, and the next."""
    found = simulated("1f1b", 2, 3, Costs(held_bytes=100, message_bytes=10))
    #            F0 F1 with its result, beside what is left of the result of F0
    assert found.peak_bytes[0] == 2 * 100 + 10 + 10
    #            F0 B0: its gradient, and 1 received meanwhile
    assert found.peak_bytes[1] == 100 + 10 + 10


def test_bytes_of_unequal_stages() -> None:
    found = simulated("zbv", 2, 4, Costs(held_bytes=(1.0, 10.0, 100.0, 1000.0)))
    assert found.peak_bytes[0] > 1000
    assert found.peak_bytes[1] < 1000


@st.composite
def anything(draw: st.DrawFn) -> tuple[str, int, int, Costs]:
    name = draw(st.sampled_from(sorted(BUILDERS)))
    ranks = draw(st.integers(1, 5))
    microbatches = ranks * draw(st.integers(2, 3))
    chance = random.Random(draw(st.integers(0, 2**32)))
    stages = placement(name)[0] * ranks
    forward, back, weight = (
        tuple(chance.choice((0.0, 0.1, 1.0, 7.0)) * chance.random() for _ in range(stages))
        for _ in range(3)
    )
    costs = Costs(forward=forward, input=back, weight=weight, latency=chance.choice((0.0, 0.3)))
    return name, ranks, microbatches, costs


@seeded(120)
@given(anything())
def test_uneven_stages_never_wait_for_each_other(
    of: tuple[str, int, int, Costs],
) -> None:
    name, ranks, microbatches, costs = of
    found = simulated(name, ranks, microbatches, costs)
    kinds = [Kind.FORWARD] if name == "forward_only" else [Kind.FORWARD, Kind.BACKWARD]
    work = sum(
        costs.of(Action(stage, kind, 0)) for stage in range(found.program.stages) for kind in kinds
    )
    assert sum(found.busy) == pytest.approx(microbatches * work)
    assert found.makespan >= max(found.busy) - 1e-9
    for spans, actions in zip(found.spans, found.program.computations.ranks, strict=True):
        assert tuple(span.action for span in spans) == actions
        assert all(a.end <= b.start for a, b in pairwise(spans))


@seeded(60)
@given(anything())
def test_results_are_there_before_they_are_used(of: tuple[str, int, int, Costs]) -> None:
    name, ranks, microbatches, costs = of
    found = simulated(name, ranks, microbatches, costs)
    spans = {span.action: span for each in found.spans for span in each}
    rank_of = found.program.rank_of
    for (stage, kind, microbatch), span in spans.items():
        if kind is Kind.FORWARD and stage:
            before = spans[Action(stage - 1, Kind.FORWARD, microbatch)]
            wait = costs.latency if rank_of[stage] != rank_of[stage - 1] else 0.0
            assert span.start >= before.end + wait - 1e-9


def test_128_ranks_and_512_micro_batches() -> None:
    """390,000 actions, built, proven and simulated; tools/bench_schedules.py says how fast."""
    found = simulated("1f1b", 128, 512)
    assert found.makespan == 3 * (512 + 127)
