"""Schedules by hand and by property; a program that was tampered with is refused with the action named."""

import random
from itertools import combinations

import pytest
from helpers.strategies import seeded
from hypothesis import assume, given
from hypothesis import strategies as st

from d9d_ckpt.errors import LayoutError, UsageError
from d9d_train.parallel.pipeline import actions
from d9d_train.parallel.pipeline.actions import Action, Kind, Program, parse
from d9d_train.parallel.pipeline.check import check
from d9d_train.parallel.pipeline.communicate import with_communication
from d9d_train.parallel.pipeline.schedule import (
    BUILDERS,
    build,
    from_csv,
    placement,
    placement_of,
)
from d9d_train.parallel.pipeline.schedules.alternating import one_f_one_b
from d9d_train.parallel.pipeline.schedules.waves import forward_only, gpipe

names = st.sampled_from(sorted(BUILDERS))
LOOPED = ("interleaved", "looped_bfs", "zb1p", "forward_only")
microbatches_ = st.integers(1, 9)


@st.composite
def numbers(draw: st.DrawFn, most_ranks: int = 6) -> tuple[str, int, int, int]:
    """A schedule with stages, ranks and micro-batches that it can be made of."""
    name, ranks, microbatches = draw(names), draw(st.integers(1, most_ranks)), draw(microbatches_)
    local = draw(st.integers(2, 3)) if name in LOOPED else placement(name)[0]
    if name == "dualpipev":
        microbatches += 2 * ranks - 1
    if name in ("interleaved", "zb1p") and local > 1:
        microbatches -= microbatches % max(1, microbatches // ranks)
    return name, local * ranks, ranks, microbatches


def replaced(program: Program, rank: int, actions: list[Action]) -> Program:
    ranks = list(program.ranks)
    ranks[rank] = tuple(actions)
    return Program(tuple(ranks))


def refusal(program: Program) -> str:
    with pytest.raises(LayoutError, match="pipeline") as refused:
        check(program)
    return str(refused.value)


def named(message: str, *actions: Action) -> bool:
    """Whether a refusal has the text of one of them, whole."""
    words = message.replace(",", " ").replace(";", " ").split()
    return any(str(action) in words for action in actions)


def test_computations_by_hand() -> None:
    assert str(gpipe(2, 2, 3)) == "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2"
    assert str(one_f_one_b(3, 3, 4)) == (
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n"
        "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n"
        "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3"
    )
    assert str(one_f_one_b(3, 3, 1)) == "0F0,0B0\n1F0,1B0\n2F0,2B0"
    assert str(forward_only(2, 2, 2)) == "0F0,0F1\n1F0,1F1"


def test_communication_by_hand() -> None:
    """Rank 1 receives micro-batch 1 before it computes the gradient of 0: it is sent meanwhile."""
    assert str(build("1f1b", 2, 2, 3)) == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0F2,0SEND_F2,0RECV_B1,0B1,0RECV_B2,0B2\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1RECV_F2,1F2,1B2,1SEND_B2"
    )
    assert str(build("gpipe", 1, 1, 2)) == "0F0,0F1,0B0,0B1"


@seeded(120)
@given(numbers())
def test_every_stage_does_each_micro_batch_once(of: tuple[str, int, int, int]) -> None:
    name, stages, ranks, microbatches = of
    built = BUILDERS[name](stages, ranks, microbatches)
    done = [a for acts in built.ranks for a in acts]
    assert len(done) == len(set(done))
    for stage in range(stages):
        for kinds in (("F",), ("B", "I"), ("B", "W"))[: 1 if name == "forward_only" else 3]:
            found = sorted(a.microbatch for a in done if a.stage == stage and a.kind in kinds)
            assert found == list(range(microbatches))


@seeded(120)
@given(numbers(most_ranks=8))
def test_built_programs_end(of: tuple[str, int, int, int]) -> None:
    program, plain = build(*of), BUILDERS[of[0]](*of[1:])
    check(program)
    check(program.forward)
    texts = [program.computations.texts(rank) for rank in range(of[2])]
    assert texts == [plain.texts(rank) for rank in range(of[2])]
    virtual, order = placement(of[0], of[1] // of[2])
    assert placement_of(program) == ((virtual, order) if of[2] > 1 else (virtual, "loop"))
    assert from_csv(f"{program.computations}\n") == program


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_refusals_have_the_numbers(name: str) -> None:
    with pytest.raises(LayoutError, match=f"{name} .*9 stages .*4 ranks"):
        build(name, 9, 4, 8)
    with pytest.raises(LayoutError, match=f"{name} .*0 micro-batches"):
        build(name, 4 * placement(name)[0], 4, 0)
    with pytest.raises(LayoutError, match=f"{name} on 0 ranks"):
        build(name, 4, 0, 4)


def test_what_only_some_schedules_need() -> None:
    with pytest.raises(UsageError, match="no schedule '1b1f'; known: gpipe, 1f1b"):
        build("1b1f", 4, 4, 4)
    with pytest.raises(UsageError, match="no schedule '1b1f'"):
        placement("1b1f")
    with pytest.raises(LayoutError, match="dualpipev with 7 micro-batches; it needs at least 8"):
        build("dualpipev", 8, 4, 7)
    with pytest.raises(LayoutError, match=r"zbv puts 2 of the stages .* 12 stages .* 4 ranks"):
        build("zbv", 12, 4, 8)
    with pytest.raises(
        LayoutError, match=r"at least 2 stages .* 4 stages .* 4 ranks; .* it is 1f1b"
    ):
        build("interleaved", 4, 4, 8)
    for name in ("interleaved", "zb1p"):
        with pytest.raises(LayoutError, match=f"{name} .* 4 equal .* 9 do not divide, 8 or 10 do"):
            build(name, 4, 2, 9)
    assert build("zb1p", 2, 2, 9).microbatches == 9


def test_the_placement_of_a_csv() -> None:
    assert placement_of(parse("0F0,3F0\n1F0,2F0")) == (2, "v")
    assert placement_of(parse("0F0,2F0\n1F0,3F0")) == (2, "loop")
    for text in ("0F0,1F0\n2F0,3F0", "0F0,1F0\n2F0", "1F0\n0F0"):
        with pytest.raises(LayoutError, match=r"expected them in a loop .* or in a V"):
            placement_of(parse(text))


def test_a_csv_with_messages_is_taken_as_it_is() -> None:
    text = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"
    assert str(from_csv(text)) == text
    with pytest.raises(LayoutError, match="rank 1 lacks 1SEND_B0"):
        from_csv(text.removesuffix(",1SEND_B0"))
    with pytest.raises(LayoutError, match="rank 1 lacks 1B0"):
        from_csv("0F0,0B0\n1F0")


# Any order of computations that respects their dependencies, on any ranks.


@st.composite
def computations(draw: st.DrawFn) -> Program:
    ranks, stages = draw(st.integers(2, 4)), draw(st.integers(2, 6))
    microbatches, split = draw(st.integers(1, 4)), draw(st.booleans())
    chance = random.Random(draw(st.integers(0, 2**32)))
    rank_of = [*range(ranks), *(chance.randrange(ranks) for _ in range(stages - ranks))][:stages]
    chance.shuffle(rank_of)
    back = Kind.INPUT if split else Kind.BACKWARD
    waiting = {
        Action(s, kind, m)
        for s in range(stages)
        for m in range(microbatches)
        for kind in (Kind.FORWARD, back, *((Kind.WEIGHT,) if split else ()))
    }
    order: list[Action] = []
    while waiting:
        ready = [a for a in waiting if before(a, stages, back).isdisjoint(waiting)]
        order.append(chance.choice(sorted(ready, key=str)))
        waiting.remove(order[-1])
    return actions.program([a for a in order if rank_of[a.stage] == rank] for rank in range(ranks))


def before(action: Action, stages: int, back: Kind) -> set[Action]:
    s, m = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return {Action(s - 1, Kind.FORWARD, m)} if s else set()
    if action.kind is Kind.WEIGHT:
        return {Action(s, Kind.INPUT, m)}
    later = {Action(s + 1, back, m)} if s < stages - 1 else set()
    return {Action(s, Kind.FORWARD, m)} | later


@seeded(200)
@given(computations())
def test_communication_of_any_order_ends(order: Program) -> None:
    program = with_communication(order)
    check(program)
    kept = tuple(tuple(a for a in acts if not a.is_message) for acts in program.ranks)
    assert kept == order.ranks


def test_receives_are_in_the_order_of_sends() -> None:
    """Rank 1 takes micro-batch 1 first; rank 0 sends 0 first, so 1 must receive that before."""
    order = parse("0F0,0F1\n1F1,1F0")
    assert str(with_communication(order)) == (
        "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F1,1F0"
    )


def test_computations_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"computations wait .*1RECV_F0 for 0SEND_F0"):
        with_communication(parse("0B0,0F0\n1F0,1B0"))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    built = numbers().filter(lambda of: of[2] > 1).map(lambda of: build(*of))
    return draw(st.one_of(built, computations().map(with_communication)))


@st.composite
def spots(draw: st.DrawFn) -> tuple[Program, int, int]:
    """A program, a rank, and the place of one of its actions."""
    program = draw(programs())
    busy = [rank for rank, acts in enumerate(program.ranks) if acts]
    assume(sum(map(len, program.ranks)) > 2)
    rank = draw(st.sampled_from(busy))
    return program, rank, draw(st.integers(0, len(program.ranks[rank]) - 1))


@seeded(60)
@given(spots())
def test_a_removed_action_is_named(spot: tuple[Program, int, int]) -> None:
    program, rank, place = spot
    acts = list(program.ranks[rank])
    gone = acts.pop(place)
    tampered = replaced(program, rank, acts)
    assume(tampered.stages == program.stages and tampered.microbatches == program.microbatches)
    assert named(refusal(tampered), gone)


@seeded(60)
@given(spots(), st.randoms())
def test_a_doubled_action_is_named(spot: tuple[Program, int, int], chance: random.Random) -> None:
    program, rank, place = spot
    acts = list(program.ranks[rank])
    acts.insert(chance.randrange(len(acts) + 1), acts[place])
    assert named(
        refusal(replaced(program, rank, acts)), acts[place], *program.ranks[rank][place : place + 1]
    )


@seeded(60)
@given(spots(), st.integers(0, 5))
def test_an_action_on_another_rank_is_named(spot: tuple[Program, int, int], other: int) -> None:
    program, rank, place = spot
    there = other % len(program.ranks)
    assume(there != rank and len(program.ranks[rank]) > 1)
    moved = program.ranks[rank][place]
    program = replaced(program, rank, [a for a in program.ranks[rank] if a != moved])
    message = refusal(replaced(program, there, [*program.ranks[there], moved]))
    assert f"stage {moved.stage}" in message or named(message, moved)


def links(acts: tuple[Action, ...]) -> list[tuple[int, int]]:
    """Places of actions and of later ones of the same rank that need them, written down again."""
    out = []
    for (i, a), (j, b) in combinations(enumerate(acts), 2):
        same = (a.stage, a.microbatch) == (b.stage, b.microbatch)
        steps = {
            ("RECV_F", "F"), ("F", "SEND_F"), ("F", "B"), ("F", "I"), ("RECV_B", "B"), ("RECV_B", "I"),
            ("B", "SEND_B"), ("I", "SEND_B"), ("I", "W"),
        }  # fmt: skip
        if same and (a.kind.value, b.kind.value) in steps:
            out.append((i, j))
    return out


@seeded(60)
@given(programs(), st.randoms())
def test_an_action_moved_across_a_dependency_is_named(
    program: Program, chance: random.Random
) -> None:
    linked = [(rank, *pair) for rank, acts in enumerate(program.ranks) for pair in links(acts)]
    rank, first, second = chance.choice(linked)
    acts = list(program.ranks[rank])
    needed, needing = acts[first], acts[second]
    acts.insert(first, acts.pop(second))
    message = refusal(replaced(program, rank, acts))
    assert named(message, needed) or named(message, needing)


@seeded(60)
@given(programs(), st.randoms())
def test_two_receives_from_one_rank_in_another_order_are_named(
    program: Program, chance: random.Random
) -> None:
    """On a wire without tags the second would silently get what the first was sent."""
    rank_of = program.rank_of
    pairs = [
        (rank, i, j)
        for rank, acts in enumerate(program.ranks)
        for (i, a), (j, b) in combinations(enumerate(acts), 2)
        if a.kind.value.startswith("RECV")
        and b.kind.value.startswith("RECV")
        and rank_of[a.far] == rank_of[b.far]
    ]
    assume(pairs)
    rank, i, j = chance.choice(pairs)
    acts = list(program.ranks[rank])
    later = acts.pop(j)
    acts.insert(i, later)
    assert named(refusal(replaced(program, rank, acts)), later)


def test_the_order_of_receives_is_that_of_sends() -> None:
    message = refusal(parse("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1"))
    assert "rank 1 is in 1RECV_F1 where rank 0 is in 0SEND_F0" in message


SPLIT = """0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0RECV_B0,0I0,0W0,0RECV_B1,0I1,0W1,0RECV_B2,0I2,0W2
1RECV_F0,1F0,1I0,1SEND_B0,1W0,1RECV_F1,1F1,1I1,1SEND_B1,1W1,1RECV_F2,1F2,1I2,1SEND_B2,1W2"""
"""Both ranks send before either receives."""


def test_ranks_that_wait_for_each_other_are_named_with_what_for() -> None:
    message = refusal(parse(SPLIT))
    assert "rank 0 in 0SEND_F1 for 1RECV_F1; rank 1 in 1SEND_B0 for 0RECV_B0" in message


def test_such_a_circle_is_cut_by_an_earlier_receive() -> None:
    computations = parse(SPLIT).computations
    check(with_communication(computations))
    assert with_communication(computations).computations == computations


def test_pairs_that_are_none_are_refused() -> None:
    with pytest.raises(LayoutError, match="0F1 and 0F0 overlap; expected a forward and a backward"):
        from_csv("(0F1;0F0)OVERLAP_F_B,0B0,0B1")
    apart = parse("0F0,0F1,0F2,0B0,0B1,0B2").ranks
    with pytest.raises(LayoutError, match="0F1 and 0B0 overlap and do not follow each other"):
        check(Program(apart, frozenset({(apart[0][1], apart[0][3])})))
