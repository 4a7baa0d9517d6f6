"""A part of tools/fuzz.py: thousands of hostile inputs, and nothing but refusals."""

import fuzz


def test_mutated_inputs_only_ever_raise_our_errors_and_touch_nothing_else(tmp_path):
    report = fuzz.run(tmp_path / "arena", 7, range(1500))
    assert report.failures == []
    assert report.inputs == 1500
    assert report.accepted > 300
    assert report.refused > 300
    assert report.slowest_s < fuzz.SECONDS


def test_an_input_is_made_by_seed_and_number_alone(tmp_path):
    trees = []
    for turn in range(2):
        report = fuzz.Report(3)
        arena = fuzz.Arena(tmp_path / str(turn))
        for number in (5, 4) if turn else (4, 5):
            fuzz.run_input(arena, report, number, keep=True)
        trees.append((report.by_operation, report.by_refusal))
    assert trees[0] == trees[1]


def test_canaries_tell_of_writes_outside(tmp_path):
    arena = fuzz.Arena(tmp_path / "arena")
    assert arena.escapes() == []
    arena.outside.write_bytes(b"touched")
    (arena.inner / "new").write_bytes(b"")
    assert arena.escapes() == [str(arena.inner / "new"), str(arena.outside)]
    arena.dst.mkdir()
    (arena.dst / "file").write_bytes(b"")
    (arena.inner / "new").unlink()
    assert arena.escapes() == [str(arena.inner / "new")]
