"""Objects in parts: how they are cut, what they hold, and what is left when something fails."""

import json
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from helpers.checkpoints import Model, everything, manifest, model, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

import d9d_ckpt
from d9d_ckpt import api
from d9d_ckpt.errors import CkptError, DestinationError, StorageError
from d9d_ckpt.formats.base import Arrangement, OutFile
from d9d_ckpt.run.upload import PART, parts_of
from d9d_ckpt.storage import s3
from d9d_ckpt.storage.retry import Patience, persist
from d9d_ckpt.tensors import BLOCK

pytest_plugins = ["helpers.servers"]

LEAST, MOST = 5 << 20, 10_000
"""What S3 asks of parts."""

SMALL = model("llama")
LARGE = model("llama", vocab=24_000, hidden=128, intermediate=2048)
"""Some 30 MB of float32."""

CLAIM = ".d9d-claim"


# -- cutting -----------------------------------------------------------------------------------


def cut(header, *totals):
    """An object of a header and targets of these sizes, in parts."""
    plan = SimpleNamespace(targets=[SimpleNamespace(nbytes=n) for n in totals])
    nbytes = header + sum(totals)
    file = OutFile("a", "a", bytes(header), nbytes, tuple(range(len(totals))))
    parts = parts_of(Arrangement((file,), ()), plan, 0)
    _check(parts, header, totals)
    return parts


def _check(parts, header, totals):
    """Parts tile the object, their spans the targets, at whole blocks; S3 takes them."""
    assert [p.number for p in parts] == list(range(1, len(parts) + 1))
    assert len(parts) <= MOST
    at = 0
    for p in parts:
        assert p.offset == at
        own = sum(s.high - s.low for s in p.unit.spans)
        assert p.nbytes == own + (header if p.number == 1 else 0)
        at += p.nbytes
    assert at == header + sum(totals)
    assert all(p.nbytes >= LEAST for p in parts[:-1])
    largest = max(PART, at // 9000)
    assert all(p.nbytes <= max(largest + BLOCK, header + BLOCK) for p in parts)
    reached = dict.fromkeys(range(len(totals)), 0)
    for s in [s for p in parts for s in p.unit.spans]:
        assert s.low == reached[s.target]
        assert s.low < s.high
        assert s.high % BLOCK == 0 or s.high == totals[s.target]
        reached[s.target] = s.high
    assert list(reached.values()) == list(totals)


def test_one_part():
    assert len(cut(100, 10, 20)) == 1


def test_a_header_alone_is_a_part():
    assert len(cut(100)) == len(cut(100, 0, 0)) == 1


def test_a_part_is_cut_inside_a_target_at_a_whole_block():
    first, second = cut(100, 3 * BLOCK, PART)
    assert {s.target for s in first.unit.spans} == {0, 1}
    assert [(s.target, s.high) for s in second.unit.spans][-1] == (1, PART)
    assert second.unit.spans[0].low == first.unit.spans[-1].high == PART - 3 * BLOCK
    assert first.nbytes == PART + 100


def test_empty_targets_between_others():
    cut(8, 0, PART, 0, PART, 0)


def test_a_header_larger_than_a_part():
    cut(PART * 3 + 5, 1, PART)


@settings(deadline=None)
@given(
    st.integers(8, 20 << 20),
    st.lists(
        st.integers(0, 40 << 20)
        | st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, PART - 1, PART, PART + 1]),
        max_size=12,
    ),
)
def test_any_object(header, totals):
    cut(header, *totals)


@pytest.mark.parametrize("nbytes", [72 << 30, 80 << 30, 1 << 40, (5 << 40) - (1 << 20)])
@pytest.mark.parametrize("targets", [1, 7, 3001])
def test_objects_up_to_the_largest_of_s3(nbytes, targets):
    sizes = [nbytes // targets + n % 3 for n in range(targets)]
    assert len(cut(1000, *sizes)) > 8000


# -- what they hold ----------------------------------------------------------------------------


@pytest.fixture
def there(stub, monkeypatch):
    """Convert to the stub; the usual options, and short patience."""
    short = Patience(tries=4, first_pause=0.01, longest_pause=0.02)
    monkeypatch.setattr(s3, "persist", partial(persist, patience=short))

    def convert(src, name="out", **more):
        options = {"storage_options": stub.seen.options, "workers": 2, "memory": "64MiB"}
        return d9d_ckpt.convert(str(src), f"{stub.seen.url}/{name}", **options | more)

    return convert


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("large") / "src", LARGE)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("small") / "src", SMALL, shards=2)


SHARDED = {"to": "sharded", "layout": "tp=2"}
HF = {"to": "huggingface"}
HF_FILES = HF | {"max_shard_size": 1500}
SHAPES = pytest.mark.parametrize("want", [SHARDED, HF, HF_FILES], ids=["sharded", "one", "files"])


@pytest.mark.s3
@pytest.mark.parametrize("busy", [0, 3])
@pytest.mark.parametrize("want", [SHARDED | {"layout": ""}, HF, HF | {"max_shard_size": "13MB"}])
def test_d13_objects_have_the_bytes_of_local_files(stub, there, large, tmp_path, want, busy):
    d9d_ckpt.convert(str(large), str(tmp_path / "out"), workers=1, **want)
    for op in ("put", "create", "part", "complete", "head", "get", "list") if busy else ():
        stub.fail(op, times=busy)
    there(large, **want)
    local, remote = everything(tmp_path / "out"), stub.seen.objects("out/")
    remote = {name.removeprefix("out/"): content for name, content in remote.items()}
    if want["to"] == "sharded":
        ours, theirs = manifest(tmp_path / "out"), json.loads(remote["manifest.json"])
        del local["manifest.json"], remote["manifest.json"]
        old, new = theirs["save_id"], ours["save_id"]
        remote = {
            n.replace(old, new): c.replace(old.encode(), new.encode()) for n, c in remote.items()
        }
        assert theirs["tensors"].keys() == ours["tensors"].keys()
    assert remote == local
    assert max(map(len, local.values())) > (8 << 20)
    assert not stub.open
    assert "1" in stub.details("part")
    assert "3" in stub.details("part") or want.get("max_shard_size")


# -- what is left of a failure -----------------------------------------------------------------

POINTS = [
    ("put", CLAIM),
    ("get", CLAIM),
    ("create", ""),
    ("part", ""),
    ("complete", ""),
    ("put", "config.json"),
    ("put", "RECORD"),
]


@pytest.mark.s3
@SHAPES
@pytest.mark.parametrize(("op", "key"), POINTS)
def test_d14_a_failed_conversion_leaves_nothing(stub, there, small, want, op, key):
    key = _record(want) if key == "RECORD" else key
    stub.fail(op, times=99, status=403, code="AccessDenied", key=key)
    with pytest.raises(StorageError, match="AccessDenied") as raised:
        there(small, **want)
    assert f"{stub.seen.url}/out/" in str(raised.value)
    assert not stub.open
    # A claim that can be written and not be read cannot be known to be ours.
    left = [n for n in stub.names() if (op, key, n) != ("get", CLAIM, f"out/{CLAIM}")]
    assert left == []


def _record(want):
    """The last file that a conversion puts."""
    if want["to"] == "sharded":
        return "manifest.json"
    return "index.json" if "max_shard_size" in want else "config.json"


@pytest.mark.s3
@SHAPES
@pytest.mark.parametrize(("op", "key"), POINTS)
def test_a_failed_overwrite_harms_nothing(stub, there, small, tmp_path, want, op, key):
    """Other weights with another config over a checkpoint of the same format."""
    key = _record(want) if key == "RECORD" else key
    there(small, **want)
    before = stub.seen.objects()
    other = write_model(tmp_path / "other", Model(_doubled(), SMALL.config | {"note": "other"}))
    stub.fail(op, times=99, status=403, code="AccessDenied", key=key)
    with pytest.raises(CkptError):
        there(other, overwrite=True, **want)
    stub.faults.clear()
    stub.objects.pop(f"{stub.seen.url.removeprefix('s3://')}/out/{CLAIM}", None)
    assert stub.seen.objects() == before
    assert not stub.open


def _doubled():
    return {name: 2 * t for name, t in SMALL.tensors.items()}


@pytest.mark.s3
def test_the_first_cause_is_told_when_even_aborting_is_refused(stub, there, small, caplog):
    stub.fail("part", times=99, status=403, code="AccessDenied")
    stub.fail("abort", times=99, status=403, code="AbortDenied")
    with pytest.raises(StorageError, match=r"upload part 1 of s3://.*AccessDenied"):
        there(small, **SHARDED)
    assert "AbortDenied" in caplog.text
    # The claim stays: by it the next run knows whose uploads are left.
    assert stub.names() == [f"out/{CLAIM}"]


@pytest.mark.s3
def test_the_first_cause_is_told_when_even_deleting_is_refused(stub, there, small):
    stub.fail("complete", times=99, status=403, code="AccessDenied", key="rank-00001")
    stub.fail("delete", times=99, status=403, code="DeleteDenied")
    with pytest.raises(StorageError, match=r"complete s3://.*rank-00001.*AccessDenied"):
        there(small, **SHARDED)


@pytest.mark.s3
@pytest.mark.parametrize("cores", [96, 256])
def test_the_usual_memory_is_enough_on_a_machine_of_many_cores(
    stub, there, small, monkeypatch, cores
):
    monkeypatch.setattr(api, "_cores", lambda: cores)
    there(small, workers=None, memory="1GiB", **SHARDED)
    assert stub.names()


@pytest.mark.s3
def test_no_upload_is_said_to_be_left_that_is_not(stub, there, small, caplog):
    """One object is complete when another fails: there is nothing to abort of it."""
    stub.fail("complete", times=99, status=403, code="AccessDenied", key="rank-00001")
    with pytest.raises(StorageError, match="rank-00001"):
        there(small, **SHARDED)
    assert not stub.open
    assert stub.names() == []
    assert "left behind" not in caplog.text


@pytest.mark.s3
def test_d14_parts_that_are_never_answered(stub, there, small):
    stub.fail("part", "stall", times=99, key="rank-00001")
    options = stub.seen.options | {"config_kwargs": {"read_timeout": 0.3}}
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"upload part 1 of s3://.*timeout"):
        there(small, storage_options=options, **SHARDED)
    assert time.monotonic() - started < 3
    assert not stub.open
    assert stub.names() == []


@pytest.mark.s3
def test_an_interrupt_stops_what_has_not_begun(stub, there, large):
    want = HF | {"max_shard_size": 3_000_000}
    stub.fail("part", "call", times=99, call=lambda _: time.sleep(0.1))
    told = []

    def watch(*_):
        if not told:
            told.append(1)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        there(large, watch=watch, **want)
    assert not stub.open
    assert stub.names() == []
    assert stub.count("part") <= 4  # of 7, two at once


@pytest.mark.s3
@SHAPES
def test_d14_what_a_killed_conversion_has_begun_is_dropped_by_the_next(stub, there, small, want):
    """kill -9 while parts are under way: they are seen by nobody and paid for by somebody."""
    url = f"{stub.seen.url}/out"
    stub.fail("part", "stall", times=99)
    code = f"import d9d_ckpt; d9d_ckpt.convert({str(small)!r}, {url!r}, workers=2, **{want!r})"
    process = subprocess.Popen([sys.executable, "-c", code])  # noqa: S603 - our own code
    try:
        end = time.monotonic() + 20
        while not stub.count("part") and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert stub.open
    stub.faults.clear()
    other = f"{stub.seen.url.removeprefix('s3://')}/out/theirs.bin"
    stub.begun(other)
    there(small, overwrite=True, **want)
    assert [held.key for held in stub.open.values()] == [other]
    assert f"out/{CLAIM}" not in stub.names()


# -- the claim ---------------------------------------------------------------------------------


def theirs():
    return json.dumps({"save_id": "theirs", "host": "elsewhere", "pid": 4711, "time": 1.0}).encode()


@pytest.mark.s3
@SHAPES
def test_a_second_writer_is_refused(stub, there, small, want):
    stub.seen.put(f"out/{CLAIM}", theirs())
    for overwrite in (False, True):
        with pytest.raises(DestinationError, match="out") as raised:
            there(small, overwrite=overwrite, **want)
    assert "process 4711 on elsewhere" in str(raised.value)
    assert stub.seen.objects() == {f"out/{CLAIM}": theirs()}
    assert stub.count("create") == 0


@pytest.mark.s3
@SHAPES
def test_a_claim_lost_before_the_record_publishes_nothing(stub, there, small, want):
    place = f"{stub.seen.url.removeprefix('s3://')}/out/{CLAIM}"
    stub.fail("part", "call", call=lambda _: stub.objects.update({place: theirs()}))
    with pytest.raises(DestinationError, match=r"taken over .*process 4711 on elsewhere"):
        there(small, **want)
    assert stub.seen.objects() == {f"out/{CLAIM}": theirs()}
    assert not stub.open


@pytest.mark.s3
@SHAPES
def test_a_claim_lost_while_overwriting_leaves_the_old_checkpoint(
    stub, there, small, tmp_path, want
):
    there(small, **want)
    before = stub.seen.objects()
    place = f"{stub.seen.url.removeprefix('s3://')}/out/{CLAIM}"
    stub.fail("part", "call", call=lambda _: stub.objects.update({place: theirs()}))
    other = write_model(tmp_path / "other", Model(_doubled(), SMALL.config))
    with pytest.raises(DestinationError):
        there(other, overwrite=True, **want)
    stub.objects.pop(place, None)
    assert stub.seen.objects() == before


@pytest.mark.s3
def test_a_claim_that_is_gone_before_the_record_publishes_nothing(stub, there, small):
    place = f"{stub.seen.url.removeprefix('s3://')}/out/{CLAIM}"
    stub.fail("complete", "call", call=lambda _: stub.objects.pop(place))
    with pytest.raises(DestinationError, match="taken over"):
        there(small, **SHARDED)
    assert stub.names() == []


@pytest.mark.s3
def test_who_has_lost_the_claim_leaves_its_successors_objects_alone(stub, there, small):
    """Names of Hugging Face files are nobody's own: whoever holds the claim may have written them."""
    root = f"{stub.seen.url.removeprefix('s3://')}/out"

    def replaced(_):
        """When the claim is looked at with our objects there, its successor has written its own."""
        for key in [k for k in stub.objects if k.startswith(f"{root}/model")]:
            stub.objects[key] = b"theirs"
            stub.objects[f"{root}/{CLAIM}"] = theirs()

    stub.fail("head", "call", times=99, key=CLAIM, call=replaced)
    with pytest.raises(DestinationError, match="taken over"):
        there(small, **HF_FILES)
    names = [n for n in stub.names() if n.endswith(".safetensors")]
    assert names
    assert all(stub.seen.get(n) == b"theirs" for n in names)
