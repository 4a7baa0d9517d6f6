"""A part of tools/flip_drill.py: flipped bits, each caught and named."""

from itertools import pairwise
from random import Random

import pytest

import flip_drill
from d9d_ckpt import api
from flip_drill import HEADER, LENGTH, PADDING, PROMISED, SMALL, WEIGHTS, Flip, Place


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return flip_drill.run(tmp_path_factory.mktemp("flips"), 60, 5)


@pytest.mark.parametrize("form", PROMISED)
def test_d08_every_flip_is_named_by_verify_and_by_a_read(report, form):
    assert [m for m in report.broken if m.format == form] == []
    flips = {kind: count for (f, kind), count in report.flips.items() if f == form}
    assert sum(flips.values()) == 60
    assert set(PROMISED[form]) <= set(flips)
    for kind in PROMISED[form]:
        assert report.verified[form, kind] == report.refused[form, kind] == flips[kind]


def test_d08_what_a_huggingface_directory_cannot_tell_is_counted_and_not_promised(report):
    missed = {(m.format, m.kind) for m in report.misses}
    assert ("huggingface", SMALL) in missed
    assert not missed & {(form, kind) for form, kinds in PROMISED.items() for kind in kinds}


@pytest.fixture
def made(tmp_path):
    return {form: path for path, form in flip_drill.checkpoints(tmp_path)}


def test_the_places_of_a_checkpoint_are_all_of_its_bytes(made):
    for path in made.values():
        found = flip_drill.places(path)
        files = {str(p.relative_to(path)): p.stat().st_size for p in path.rglob("*") if p.is_file()}
        for file, size in files.items():
            spans = sorted((p.start, p.stop) for p in found if p.file == file and p.stop > p.start)
            assert spans[0][0] == 0
            assert spans[-1][1] == size
            assert all(a[1] == b[0] for a, b in pairwise(spans))
        assert {p.file for p in found} == set(files)
    kinds = {p.kind for p in flip_drill.places(made["sharded"])}
    assert kinds == {WEIGHTS, LENGTH, HEADER, PADDING, "manifest.json", SMALL}


def test_a_flip_that_is_named_wrongly_is_a_miss(made):
    path = made["sharded"]
    found = flip_drill.places(path)
    flip = next(flip_drill.drawn([p for p in found if p.kind == WEIGHTS], 1, Random(0)))
    assert flip_drill.verify(path, flip) == "0 damaged: ()"
    assert flip_drill.convert(path, "sharded") is None
    flip_drill.toggle(path / flip.place.file, flip)
    assert flip_drill.verify(path, flip) is None
    other = next(p for p in found if p.file == flip.place.file and p.tensor != flip.place.tensor)
    elsewhere = Flip(Place(WEIGHTS, other.file, other.start, other.stop, "other"), other.start, 0)
    assert "1 damaged" in flip_drill.verify(path, elsewhere)
    flip_drill.toggle(path / flip.place.file, flip)
    assert api.verify(str(path)).ok
