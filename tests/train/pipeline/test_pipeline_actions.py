"""The text of actions and programs, beside torch's."""

import pytest
from torch.distributed.pipelining.schedules import _Action

from d9d_ckpt.errors import UsageError
from d9d_train.parallel.pipeline.actions import (
    MESSAGES,
    OF_STAGE,
    Action,
    Kind,
    Program,
    parse,
    parse_action,
)

EVERY = [Action(12, kind, None if kind in OF_STAGE else 345) for kind in Kind]


@pytest.mark.parametrize("action", EVERY, ids=str)
def test_text_is_torchs(action: Action) -> None:
    theirs = _Action.from_str(str(action))
    assert (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index) == (
        action.stage,
        action.kind.value,
        action.microbatch,
    )
    assert str(theirs) == str(action)
    assert parse_action(str(theirs)) == action


def test_text_by_hand() -> None:
    assert str(Action(1, Kind.FORWARD, 3)) == "1F3"
    assert str(Action(0, Kind.SEND_B, 10)) == "0SEND_B10"
    assert str(Action(2, Kind.UNSHARD)) == "2UNSHARD"


@pytest.mark.parametrize("text", ["", "F3", "1X3", "1F", "1UNSHARD3", "1F3 0F3", "-1F3", "1SEND3"])
def test_what_is_no_action_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(UsageError, match="pipeline") as refusal:
        parse_action(text)
    assert repr(text) in str(refusal.value)


def test_the_ends_of_a_message_are_each_others() -> None:
    for action in EVERY:
        if action.kind in MESSAGES:
            assert action.counterpart.counterpart == action
            assert action.counterpart.stage == action.far
    assert Action(1, Kind.SEND_F, 2).counterpart == Action(2, Kind.RECV_F, 2)
    assert Action(1, Kind.SEND_B, 2).counterpart == Action(0, Kind.RECV_B, 2)


def test_a_program_reads_back_from_its_text_and_from_torchs_csv() -> None:
    text = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"
    program = parse(text)
    assert str(program) == text
    assert parse("0F0, ,0SEND_F0,,0RECV_B0,0B0\r\n,1RECV_F0,1F0,1B0,1SEND_B0\r\n") == program
    assert (program.stages, program.microbatches, program.rank_of) == (2, 1, {0: 0, 1: 1})
    assert str(program.forward) == "0F0,0SEND_F0\n1RECV_F0,1F0"


PAIRS = "0F0,(0F1;3B0)OVERLAP_F_B,(3F1;0B0)OVERLAP_F_B"


def test_an_overlapped_pair_is_one_cell_as_torch_reads_it() -> None:
    program = parse(PAIRS)
    assert str(program) == PAIRS
    assert list(map(str, program.ranks[0])) == ["0F0", "0F1", "3B0", "3F1", "0B0"]
    assert program.texts(0) == PAIRS.split(",")
    theirs = _Action.from_str(program.texts(0)[1])
    assert theirs.computation_type.value == "OVERLAP_F_B"
    assert [str(action) for action in theirs.sub_actions or ()] == ["0F1", "3B0"]


def test_a_pair_in_the_other_order_or_with_a_message_in_it() -> None:
    """The text is that of the pair; with messages each action stands where it is done."""
    program = parse(PAIRS)
    swapped = Program(
        ((program.ranks[0][0], *program.ranks[0][2:0:-1], *program.ranks[0][3:]),), program.pairs
    )
    assert swapped.texts(0) == PAIRS.split(",")
    sent = (*program.ranks[0][:2], Action(0, Kind.SEND_F, 1), *program.ranks[0][2:])
    apart = Program((sent,), program.pairs)
    assert str(apart) == "0F0,0F1,0SEND_F1,3B0,3F1,0B0"
    assert apart.computations == program


def test_text_with_a_micro_batch_too_many_or_too_few() -> None:
    with pytest.raises(UsageError, match="'1F': F takes a micro-batch"):
        parse_action("1F")
    with pytest.raises(UsageError, match="'1UNSHARD3': UNSHARD takes no micro-batch"):
        parse_action("1UNSHARD3")
    with pytest.raises(UsageError, match="is no action"):
        parse("(0F1;3B0;0F2)OVERLAP_F_B")
