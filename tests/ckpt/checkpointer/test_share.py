"""Who stores what of a live state: by hand, by count, and at the sizes of clusters."""

from itertools import pairwise

import numpy as np
import pytest

from d9d_ckpt.checkpointer.share import Holding, plan_save
from d9d_ckpt.errors import LayoutError, RequestError
from d9d_ckpt.layout.placement import SMALL
from d9d_ckpt.tensors import BLOCK, Region


def held(*tensors):
    """A holding of (name, dtype, shape, box or None)."""
    names, specs, boxes = [], [], []
    for name, dtype, shape, box in tensors:
        names.append(name)
        specs.append((dtype, shape))
        boxes.append(box)
    return Holding(tuple(names), tuple(specs), tuple(boxes))


def rows(low, high, width):
    return Region((low, 0), (high - low, width))


def stored(plan):
    return [(t.name, t.box, t.rank, t.part, t.parts) for t in plan.targets]


def test_shards_are_stored_where_they_are():
    shape = (5, 4)
    plan = plan_save(
        [held(("w", "F32", shape, box)) for box in (rows(0, 3, 4), rows(3, 5, 4), None)]
    )
    assert stored(plan) == [("w", rows(0, 3, 4), 0, 0, 2), ("w", rows(3, 5, 4), 1, 1, 2)]
    assert plan.replicas == []
    assert [plan.of(rank) for rank in range(3)] == [[0], [1], []]


def test_a_large_replica_is_cut_over_its_holders_by_rows():
    shape = (7, SMALL)
    whole = Region.whole(shape)
    plan = plan_save([held(("w", "U8", shape, whole))] * 3)
    # rows * k // 3: 0, 2, 4, 7.
    assert stored(plan) == [
        ("w", rows(0, 2, SMALL), 0, 0, 3),
        ("w", rows(2, 4, SMALL), 1, 1, 3),
        ("w", rows(4, 7, SMALL), 2, 2, 3),
    ]
    assert plan.replicas == [("w", whole, (0, 1, 2))]
    assert plan.compared(1) == plan.replicas


def test_small_replicas_and_scalars_fall_to_their_holders_in_turn():
    tensors = [(f"t{n}", "F32", (), Region((), ())) for n in range(5)]
    plan = plan_save([held(*tensors)] * 2)
    assert [(t.name, t.rank) for t in plan.targets] == [
        ("t0", 0), ("t1", 1), ("t2", 0), ("t3", 1), ("t4", 0),
    ]  # fmt: skip


def test_replicas_of_shards_are_cut_within_their_own_holders():
    shape = (4, SMALL)
    boxes = [rows(0, 2, SMALL), rows(2, 4, SMALL)]
    plan = plan_save([held(("w", "U8", shape, boxes[rank % 2])) for rank in range(4)])
    assert [(t.box.start[0], t.box.shape[0], t.rank) for t in plan.targets] == [
        (0, 1, 0), (1, 1, 2), (2, 1, 1), (3, 1, 3),
    ]  # fmt: skip
    assert [r.ranks for r in plan.replicas] == [(0, 2), (1, 3)]


def test_ranks_of_several_pipeline_stages_have_their_own_tensors_and_share_a_tied_one():
    shape = (2, 3)
    tied = ("emb", "F32", shape, Region.whole(shape))
    plan = plan_save(
        [
            held(tied, ("a", "F32", (1,), Region.whole((1,)))),
            held(("b", "F32", (1,), Region.whole((1,))), tied),
        ]
    )
    assert list(plan.specs) == ["a", "b", "emb"]
    assert {t.name: t.rank for t in plan.targets} == {"a": 0, "b": 1, "emb": 0}
    assert [r.name for r in plan.replicas] == ["emb"]


def test_targets_of_a_codec_hold_a_block_at_most_and_cover_their_tensor():
    shape = (700, 1000)
    plan = plan_save([held(("w", "F32", shape, Region.whole(shape)))], largest=BLOCK)
    assert max(t.nbytes for t in plan.targets) <= BLOCK
    starts = [t.box.start[0] for t in plan.targets] + [700]
    assert all(
        t.box.shape[0] == b - a for t, (a, b) in zip(plan.targets, pairwise(starts), strict=True)
    )


def test_an_empty_tensor_has_no_boxes():
    plan = plan_save([held(("e", "F32", (0, 4), None))])
    assert (plan.targets, list(plan.specs)) == ([], ["e"])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (("w", "BF16", (4,), Region.whole((4,))), "BF16.*rank 1.*F32.*rank 0"),
        (("w", "F32", (8,), Region.whole((8,))), r"\[8\].*rank 1.*\[4\].*rank 0"),
    ],
)
def test_a12_one_name_for_different_tensors_is_refused(other, words):
    first = held(("w", "F32", (4,), Region.whole((4,))))
    with pytest.raises(RequestError, match=f"'w'.*{words}"):
        plan_save([first, held(other)])


def test_a_tensor_that_is_not_all_there_is_refused_with_the_counts():
    with pytest.raises(LayoutError, match=r"'w' \[5, 4\]: the ranks hold 12 of its 20"):
        plan_save([held(("w", "F32", (5, 4), rows(0, 3, 4))), held(("w", "F32", (5, 4), None))])


@pytest.mark.parametrize("second", [(2, 5), (2, 4)])
def test_boxes_that_overlap_in_part_are_refused_with_the_ranks(second):
    """Also where they hold as many elements as the tensor has."""
    boxes = (rows(0, 3, 4), rows(*second, 4))
    with pytest.raises(LayoutError, match=r"'w'.*ranks 0 .* and 1 .* overlap"):
        plan_save([held(("w", "F32", (5, 4), box)) for box in boxes])


def test_d27_a_replicated_state_of_256_ranks_is_balanced():
    widths = [3200 + 16 * (n % 7) for n in range(500)]
    whole = [("BF16", (4096, width)) for width in widths]
    tensors = [(f"t{n:03}", *spec, Region.whole(spec[1])) for n, spec in enumerate(whole)]
    plan = plan_save([held(*tensors)] * 256)
    written = np.zeros(256)
    for target in plan.targets:
        written[target.rank] += target.nbytes
    assert written.sum() > 13e9
    assert written.max() / written.mean() <= 1.05


def test_equal_structures_have_equal_marks_and_others_have_not():
    a, b = (held(("w", "F32", (4,), Region((n,), (2,)))) for n in (0, 2))
    assert a.mark == held(("w", "F32", (4,), Region((0,), (2,)))).mark != b.mark


def test_512_ranks_by_1000_tensors_are_planned_without_a_pass_over_pairs():
    """No timing: two structures among a thousand tensors are cut twice, whatever the clock says."""
    specs = [("BF16", (4096, (1024, 2048)[n % 2])) for n in range(1000)]
    ranks = [
        held(
            *(
                (f"t{n:04}", *spec, rows(8 * r, 8 * r + 8, spec[1][1]))
                for n, spec in enumerate(specs)
            )
        )
        for r in range(512)
    ]
    plan = plan_save(ranks)
    assert len(plan.targets) == 512_000
