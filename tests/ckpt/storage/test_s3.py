"""S3: requests of our own against real servers, and against one that misbehaves as it is told."""

import multiprocessing
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import fsspec.config
import pytest

from d9d_ckpt.errors import CkptError, CorruptError, MissingError, StorageError, UsageError
from d9d_ckpt.storage import s3, s3_client
from d9d_ckpt.storage.opening import store_for
from d9d_ckpt.storage.retry import Patience, persist
from d9d_ckpt.storage.s3 import S3Store

pytest_plugins = ["helpers.servers"]
pytestmark = pytest.mark.s3

FIVE = 5 << 20
BYTES = bytes(range(251)) * 17_000  # 4 MiB and a little


def patience(monkeypatch, **limits):
    """Short limits for the rest of a test."""
    short = {"first_pause": 0.01, "longest_pause": 0.02} | limits
    monkeypatch.setattr(s3, "persist", partial(persist, patience=Patience(**short)))


def impatient(stub, stall):
    """A store that breaks off what has not moved for so many seconds."""
    limits = {"read_timeout": stall, "connect_timeout": stall}
    return store_for(stub.seen.url, {**stub.seen.options, "config_kwargs": limits})


@pytest.fixture
def quick(monkeypatch):
    patience(monkeypatch)


@pytest.fixture
def store(stub, quick):
    return store_for(stub.seen.url, stub.seen.options)


both = pytest.mark.parametrize("server", ["rclone", "moto"], indirect=True)


# -- real servers ------------------------------------------------------------------------------


@both
def test_ranges(server):
    server.put("a", BYTES)
    store, url = store_for(server.url, server.options), f"{server.url}/a"
    assert isinstance(store, S3Store)
    assert store.size(url) == len(BYTES)
    assert store.read(url, 0, len(BYTES)) == BYTES
    assert store.read(url, 10, 5) == BYTES[10:15]
    assert store.read(url, 0, 0) == b""
    views = [memoryview(bytearray(n)) for n in (3, 0, 100_000)]
    store.read_into(url, 9, views)
    assert b"".join(views) == BYTES[9 : 9 + 100_003]
    offsets = [3_000_000, 0, 70, 5, 200_000, 3_000_040]
    out = bytearray(50 * len(offsets))
    store.read_runs(url, offsets, 50, memoryview(out))
    assert out == b"".join(BYTES[n : n + 50] for n in offsets)


@both
def test_a_read_larger_than_any_request(server):
    content = BYTES * 5
    server.put("a", content)
    store = store_for(server.url, server.options)
    assert store.read(f"{server.url}/a", 1, len(content) - 2) == content[1:-1]


@both
@pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (90, 20), (100, 1), (1000, 5)])
def test_f21_an_early_end(server, offset, nbytes):
    server.put("a", bytes(100))
    with pytest.raises(CorruptError, match=r"/a: ends .*cut short"):
        store_for(server.url, server.options).read(f"{server.url}/a", offset, nbytes)


@both
def test_listings(server):
    store = store_for(server.url, server.options)
    for name in ("d/a", "d/b", "d/sub/x", "d/sub/y/z", "dd/other"):
        server.put(name, name.encode())
    assert store.names(f"{server.url}/d") == ["a", "b", "sub"]
    assert store.files(f"{server.url}/d") == {"a": 3, "b": 3}
    assert store.names(f"{server.url}/none") == []


@both
def test_deleting_a_prefix_leaves_its_neighbours(server):
    store = store_for(server.url, server.options)
    for name in ("d/a", "d/sub/x", "dd/other", "d.txt"):
        server.put(name, b"x")
    store.delete(f"{server.url}/d")
    assert sorted(server.objects()) == ["d.txt", "dd/other"]
    store.delete(f"{server.url}/d.txt")
    store.delete(f"{server.url}/absent")
    assert sorted(server.objects()) == ["dd/other"]


@both
def test_an_object_in_parts(server):
    store, url = store_for(server.url, server.options), f"{server.url}/big"
    parts = [bytes([n]) * FIVE for n in range(3)] + [b"end"]
    upload = store.upload(url)
    for n, part in enumerate(parts):
        upload.put(n + 1, n * FIVE, memoryview(part))
        assert server.objects() == {}
    upload.complete()
    assert server.get("big") == b"".join(parts)
    assert server.uploads() == []


@both
def test_d14_an_aborted_upload_leaves_nothing(server):
    upload = store_for(server.url, server.options).upload(f"{server.url}/big")
    upload.put(1, 0, memoryview(bytes(FIVE)))
    assert server.uploads()
    upload.abort()
    assert server.uploads() == []
    assert server.objects() == {}


def test_parts_in_any_order(moto):
    upload = store_for(moto.url, moto.options).upload(f"{moto.url}/big")
    upload.put(2, FIVE, memoryview(b"end"))
    upload.put(1, 0, memoryview(bytes(FIVE)))
    upload.complete()
    assert moto.get("big") == bytes(FIVE) + b"end"


@both
def test_d15_what_another_client_writes_is_seen_at_once(server):
    store, url = store_for(server.url, server.options), f"{server.url}/d/late"
    assert store.names(f"{server.url}/d") == []
    with pytest.raises(MissingError, match="late"):
        store.size(url)
    server.put("d/late", b"12")
    assert store.names(f"{server.url}/d") == ["late"]
    assert store.read(url, 0, 2) == b"12"
    server.put("d/late", b"34567")
    assert store.files(f"{server.url}/d") == {"late": 5}
    assert store.read(url, 0, store.size(url)) == b"34567"
    server.put("d/late", b"8")
    assert store.read(url, 0, store.size(url)) == b"8"
    server.delete("d/late")
    assert store.names(f"{server.url}/d") == []
    with pytest.raises(MissingError):
        store.size(url)


@both
@pytest.mark.parametrize("call", ["size", "names", "files", "put", "read", "upload"])
def test_a_missing_bucket(server, call):
    store, url = store_for(server.url, server.options), "s3://nosuchbucket/x"
    arguments = {"put": (b"1",), "read": (0, 1)}.get(call, ())
    with pytest.raises(MissingError, match="nosuchbucket"):
        getattr(store, call)(url, *arguments)


def test_the_second_claim_is_refused_by_the_server(moto):
    store, url = store_for(moto.url, moto.options), f"{moto.url}/claim"
    assert store.claim(url, b"first")
    assert not store.claim(url, b"second")
    assert moto.get("claim") == b"first"


def test_of_many_claims_at_once_one_wins(moto):
    store, url = store_for(moto.url, moto.options), f"{moto.url}/claim"
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: store.claim(url, b"%d" % n), range(8)))
    assert won.count(True) == 1
    assert moto.get("claim") == b"%d" % won.index(True)


def test_where_nothing_is_conditional_the_last_claim_holds(rclone):
    store, url = store_for(rclone.url, rclone.options), f"{rclone.url}/claim"
    assert store.claim(url, b"first")
    assert store.claim(url, b"second")
    assert rclone.get("claim") == b"second"


@both
def test_the_usual_environment(server, fresh):
    server.put("a", b"1")
    assert store_for(server.url, {}).read(f"{server.url}/a", 0, 1) == b"1"


def test_options_take_the_place_of_the_environment(moto, fresh, monkeypatch):
    moto.put("a", b"1")
    endpoint = moto.endpoint
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options = {"endpoint_url": endpoint, "key": "someone", "secret": "something"}
    assert store_for(moto.url, options).read(f"{moto.url}/a", 0, 1) == b"1"


def test_without_credentials_the_message_says_so(moto, fresh, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StorageError, match=r"stat s3://.*[Cc]redentials"):
        store_for(moto.url, moto.options).size(f"{moto.url}/a")


# -- faults that pass --------------------------------------------------------------------------

HTML = b"<html><body>503 Service Unavailable</body></html>"
PASSING = {
    "503": {"status": 503, "code": "SlowDown"},
    "500": {"status": 500, "code": "InternalError"},
    "429": {"status": 429, "code": "TooManyRequests"},
    "400 RequestTimeout": {"status": 400, "code": "RequestTimeout"},
    "page of a proxy": {"status": 503, "raw": HTML},
    "an empty body": {"status": 502, "raw": b""},
    "reset": {"kind": "reset"},
}


def everything(store, url):
    """Every operation once."""
    store.put(f"{url}/a", b"content")
    assert store.size(f"{url}/a") == 7
    assert store.read(f"{url}/a", 2, 5) == b"ntent"
    assert store.names(url) == ["a"]
    upload = store.upload(f"{url}/b")
    upload.put(1, 0, memoryview(b"in one part"))
    upload.complete()
    dropped = store.upload(f"{url}/c")
    dropped.abort()
    store.delete(f"{url}/a")
    assert store.files(url) == {"b": 11}
    assert store.read(f"{url}/b", 0, 11) == b"in one part"


ALL = ["put", "head", "get", "list", "create", "part", "complete", "abort", "delete"]


# An answer to HEAD has no body that could say RequestTimeout.
@pytest.mark.parametrize(
    ("op", "fault"),
    [(o, f) for o in ALL for f in PASSING if (o, f) != ("head", "400 RequestTimeout")],
)
def test_d13_the_first_two_fail(stub, store, op, fault):
    everything(store, f"{stub.seen.url}/plain")
    usual = stub.count(op)
    stub.fail(op, times=2, **PASSING[fault])
    everything(store, f"{stub.seen.url}/d")
    assert stub.count(op) == 2 * usual + 2
    assert not stub.open


def test_d13_an_error_in_an_answer_that_promised_success(stub, store):
    url = f"{stub.seen.url}/b"
    upload = store.upload(url)
    upload.put(1, 0, memoryview(b"12345"))
    stub.fail("complete", status=200, code="InternalError")
    upload.complete()
    assert stub.count("complete") == 2
    assert store.read(url, 0, 5) == b"12345"


@pytest.mark.parametrize("op", ["put", "create", "part", "delete"])
def test_an_answer_that_is_lost(stub, store, op):
    stub.fail(op, "lost")
    everything(store, f"{stub.seen.url}/d")


def test_d14_an_upload_whose_begin_was_answered_to_nobody_does_not_stay(stub, store):
    stub.fail("create", "lost")
    upload = store.upload(f"{stub.seen.url}/a")
    assert stub.count("create") == 2
    assert len(stub.seen.uploads()) == 1
    upload.put(1, 0, memoryview(b"x" * 10))
    upload.complete()
    assert stub.seen.uploads() == []


def test_an_answer_to_complete_that_is_lost(stub, store):
    stub.fail("complete", "lost")
    everything(store, f"{stub.seen.url}/d")


def test_an_answer_to_abort_that_is_lost(stub, store):
    stub.fail("abort", "lost")
    everything(store, f"{stub.seen.url}/d")


def test_a_claim_whose_answer_is_lost_is_still_ours(stub, store):
    stub.fail("put", "lost")
    assert store.claim(f"{stub.seen.url}/claim", b"mine")


def test_a_claim_that_conflicts_with_another_is_refused(stub, store):
    stub.fail("put", status=409, code="ConditionalRequestConflict")
    assert not store.claim(f"{stub.seen.url}/claim", b"mine")


def test_d13_64_writers_while_the_server_is_busy(stub, store):
    def write(n):
        upload = store.upload(f"{stub.seen.url}/{n:02}")
        upload.put(1, 0, memoryview(b"%d" % n * 1000))
        upload.complete()

    for op in ("create", "part", "complete"):
        stub.fail(op, times=40)
    with ThreadPoolExecutor(64) as pool:
        list(pool.map(write, range(64)))
    assert len(stub.names()) == 64
    assert all(v == b"%d" % int(k[-2:]) * 1000 for k, v in stub.objects.items())
    assert not stub.open


def test_a_server_that_is_not_there_yet(stub, store, monkeypatch):
    """Connections that are refused may be accepted a moment later."""
    patience(monkeypatch, tries=50, first_pause=0.05, longest_pause=0.05)
    stub.away()
    timer = threading.Timer(0.3, stub.back)
    timer.start()
    try:
        store.put(f"{stub.seen.url}/a", b"1")
    finally:
        timer.join()
    assert stub.names() == ["a"]


def test_a_server_that_never_comes(stub, store, monkeypatch):
    patience(monkeypatch, tries=3)
    stub.away()
    try:
        with pytest.raises(StorageError, match=r"put s3://.*/a: .*127\.0\.0\.1"):
            store.put(f"{stub.seen.url}/a", b"1")
    finally:
        stub.back()


# -- faults that do not pass -------------------------------------------------------------------


def once(store, url, op):
    """One operation whose first request is ``op``."""
    match op:
        case "put":
            store.put(url, b"1")
        case "head":
            store.size(url)
        case "get":
            store.read(url, 0, 1)
        case "list":
            store.names(url)
        case "create":
            store.upload(url)
        case _:
            upload = store.upload(url)
            {
                "part": lambda: upload.put(1, 0, memoryview(b"1")),
                "complete": lambda: upload.complete(),
                "abort": lambda: upload.abort(),
            }[op]()


OPERATIONS = ["put", "head", "get", "list", "create", "part", "complete", "abort"]


@pytest.mark.parametrize("op", OPERATIONS)
def test_d13_403_fails_at_the_first_try(stub, store, op):
    stub.fail(op, times=9, status=403, code="AccessDenied")
    with pytest.raises(StorageError, match=r"\w+ s3://.*(AccessDenied|403)") as raised:
        once(store, f"{stub.seen.url}/a", op)
    assert f"{stub.seen.url}/a" in str(raised.value)
    assert raised.value.exit_code == 5
    assert stub.count(op) == 1


@pytest.mark.parametrize("op", ["head", "get"])
def test_d13_404_fails_at_the_first_try(stub, store, op):
    with pytest.raises(MissingError, match="/a: no such object"):
        once(store, f"{stub.seen.url}/a", op)
    assert stub.count(op) == 1


@pytest.mark.parametrize("op", OPERATIONS)
def test_d13_after_the_budget_the_message_has_it_all(stub, store, op, monkeypatch):
    patience(monkeypatch, tries=3)
    stub.fail(op, times=99)
    with pytest.raises(StorageError) as raised:
        once(store, f"{stub.seen.url}/a", op)
    text = str(raised.value)
    assert f"{stub.seen.url}/a" in text
    assert "gave up after 3 tries" in text
    assert "SlowDown" in text or "503" in text
    assert stub.count(op) == 3


# -- answers that break off --------------------------------------------------------------------


def spans(stub):
    """First and last byte of every range asked for."""
    return [tuple(map(int, d.removeprefix("bytes=").split("-"))) for d in stub.details("get")]


@pytest.mark.parametrize("kind", ["cut", "torn"])
@pytest.mark.parametrize("after", [0, 100, 3 << 20])
def test_d13_a_body_that_breaks_off_goes_on_from_there(stub, store, kind, after):
    stub.seen.put("a", BYTES)
    stub.fail("get", kind, after=after)
    assert store.read(f"{stub.seen.url}/a", 7, len(BYTES) - 9) == BYTES[7:-2]
    first, second = spans(stub)
    assert first == (7, len(BYTES) - 3)
    assert second[1] == first[1]
    assert 7 <= second[0] <= 7 + after
    if after > 1 << 20:
        assert second[0] > 7


def test_d13_a_body_that_breaks_off_again_and_again(stub, store):
    stub.seen.put("a", BYTES)
    stub.fail("get", "torn", times=6, after=500_000)
    assert store.read(f"{stub.seen.url}/a", 0, len(BYTES)) == BYTES
    starts = [low for low, _ in spans(stub)]
    assert starts == sorted(starts)
    assert starts[-1] > starts[0]


def test_d14_a_body_that_stops_coming_goes_on_from_there(stub, quick):
    store = impatient(stub, 0.5)
    stub.seen.put("a", BYTES)
    stub.fail("get", "hang", after=3 << 20)
    started = time.monotonic()
    assert store.read(f"{stub.seen.url}/a", 0, len(BYTES)) == BYTES
    assert time.monotonic() - started < 2
    assert spans(stub)[1] == (3 << 20, len(BYTES) - 1)


def test_d14_a_part_that_is_never_answered_once(stub, quick):
    stub.fail("part", "stall")
    everything(impatient(stub, 0.3), f"{stub.seen.url}/d")


def test_d14_a_body_that_keeps_coming_may_take_its_time(stub, quick):
    """Five times as long as an attempt may stall."""
    stub.seen.put("a", BYTES)
    stub.fail("get", "slow", after=len(BYTES) // 30)
    started = time.monotonic()
    assert impatient(stub, 0.3).read(f"{stub.seen.url}/a", 0, len(BYTES)) == BYTES
    assert time.monotonic() - started > 1.4
    assert stub.count("get") == 1


def test_d14_a_part_that_keeps_going_may_take_its_time(stub, quick):
    """What the server takes is progress: 3 s for a part, of which none may stall for 1.2."""
    stub.drag = 0.05
    stub.away()
    stub.back()
    part = bytes(range(256)) * (60 << 10)
    upload = impatient(stub, 1.2).upload(f"{stub.seen.url}/big")
    started = time.monotonic()
    upload.put(1, 0, memoryview(part))
    assert time.monotonic() - started > 2.4
    upload.complete()
    assert stub.count("part") == 1
    assert stub.seen.get("big") == part


@pytest.mark.parametrize("op", OPERATIONS)
def test_d14_no_answer_ends_in_bounded_time(stub, op, monkeypatch):
    patience(monkeypatch, tries=2)
    store = impatient(stub, 0.2)
    stub.fail(op, "stall", times=9)
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"gave up after 2 tries in .*timeout") as raised:
        once(store, f"{stub.seen.url}/a", op)
    assert time.monotonic() - started < 2
    assert f"{stub.seen.url}/a" in str(raised.value)


def test_an_object_that_is_too_short_is_not_asked_for_again(stub, store):
    stub.seen.put("a", bytes(100))
    with pytest.raises(CorruptError, match="ends at byte 100, expected at least 120"):
        store.read(f"{stub.seen.url}/a", 20, 100)
    assert stub.count("get") == 1


@pytest.mark.parametrize("offset", [0, 50])
def test_a_server_that_ignores_ranges_never_gives_wrong_bytes(stub, store, offset):
    content = bytes(range(200))
    stub.seen.put("a", content)
    stub.fail("get", "whole", times=99)
    try:
        found = store.read(f"{stub.seen.url}/a", offset, 20)
    except CkptError:
        return
    assert found == content[offset : offset + 20]


def test_an_object_that_is_replaced_between_two_tries_is_not_mixed(stub, store):
    """The first half of the old object and the second of the new one are nobody's bytes."""
    old, new = b"o" * (4 << 20), b"n" * (4 << 20)
    stub.seen.put("a", old)
    stub.fail("get", "cut", after=3 << 20)
    stub.fail("get", "call", call=lambda key: stub.objects.update({key: new}))
    try:
        found = store.read(f"{stub.seen.url}/a", 0, len(old))
    except CkptError:
        return
    assert found in (old, new)


# -- many ranges at once -----------------------------------------------------------------------


@pytest.fixture
def ranges(stub, store, monkeypatch):
    """An object of 4 MiB that is read in four ranges."""
    monkeypatch.setattr(s3, "_STREAM", 1 << 20)
    stub.seen.put("a", bytes(4 << 20))
    return f"{stub.seen.url}/a"


def test_after_a_range_has_failed_nothing_is_written_any_more(stub, store, ranges):
    stub.fail("get", status=403, code="AccessDenied")
    stub.fail("get", "slow", times=3, after=100_000)
    buffer = bytearray(b"x") * (4 << 20)
    with pytest.raises(StorageError, match="AccessDenied"):
        store.read_into(ranges, 0, [memoryview(buffer)])
    found = bytes(buffer)
    time.sleep(0.8)
    assert bytes(buffer) == found
    assert b"x" in found


def test_the_ranges_beside_one_that_has_failed_are_not_tried_again(
    stub, store, ranges, monkeypatch
):
    patience(monkeypatch, first_pause=60, longest_pause=60)
    stub.fail("get", status=403, code="AccessDenied")
    stub.fail("get", times=3)
    started = time.monotonic()
    with pytest.raises(StorageError, match="AccessDenied"):
        store.read(ranges, 0, 4 << 20)
    assert time.monotonic() - started < 2
    assert stub.count("get") <= 4


def test_runs_that_fail_write_nothing_any_more(stub, store, ranges):
    stub.fail("get", status=403, code="AccessDenied")
    stub.fail("get", "slow", times=3, after=10_000)
    buffer = bytearray(b"x") * 400_000
    offsets = [0, 1 << 20, 2 << 20, 3 << 20]
    with pytest.raises(StorageError, match="AccessDenied"):
        store.read_runs(ranges, offsets, 100_000, memoryview(buffer))
    found = bytes(buffer)
    time.sleep(0.8)
    assert bytes(buffer) == found


# -- a busy server -----------------------------------------------------------------------------


def test_d13_after_503_fewer_are_in_flight(stub, quick):
    here, most, lock = [0], [0], threading.Lock()

    def stay(_):
        with lock:
            here[0] += 1
            most[0] = max(most[0], here[0])
        time.sleep(0.2)
        with lock:
            here[0] -= 1

    def put_twenty():
        most[0] = 0
        at_once(20, lambda n: store.put(f"{stub.seen.url}/{n}", b"1"))
        return most[0]

    # Options of its own: the turns are those of all stores with the same.
    store = store_for(stub.seen.url, {**stub.seen.options, "config_kwargs": {"user_agent": "busy"}})
    stub.fail("put", "call", times=20, call=stay)
    assert put_twenty() > 14
    stub.fail("put", times=20, call=stay)
    stub.fail("put", "call", times=40, call=stay)
    put_twenty()
    assert [s.fault for s in stub.log].count("status") == 20
    assert put_twenty() <= 14


def at_once(count, work):
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


# -- what is sent ------------------------------------------------------------------------------


def test_a_part_is_sent_from_where_it_is(rclone):
    part = memoryview(bytes(range(256)) * (128 << 10))
    store = store_for(rclone.url, rclone.options)
    store.names(rclone.url)
    upload = store.upload(f"{rclone.url}/big")
    tracemalloc.start()
    try:
        upload.put(1, 0, part)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    upload.complete()
    assert rclone.get("big") == part
    assert peak < len(part) / 8


# -- uploads that nobody will end --------------------------------------------------------------


def left(server, *names):
    for name in names:
        server.client.create_multipart_upload(Bucket="bucket", Key=server.prefix + name)


def test_d14_an_object_is_begun_without_what_was_left_of_it(moto):
    left(moto, "big", "big", "bigger", "big/er", "other")
    store = store_for(moto.url, moto.options)
    upload = store.upload(f"{moto.url}/big")
    names = [key.removeprefix(moto.prefix) for key in moto.uploads()]
    assert sorted(names) == ["big", "bigger", "other"]
    upload.put(1, 0, memoryview(b"1"))
    upload.complete()
    assert moto.get("big") == b"1"


def test_d14_what_is_deleted_cannot_come_to_be_any_more(moto):
    left(moto, "d/a", "d/sub/b", "dd/c", "d.txt")
    moto.put("d/x", b"1")
    store_for(moto.url, moto.options).delete(f"{moto.url}/d")
    assert moto.objects() == {}
    names = [key.removeprefix(moto.prefix) for key in moto.uploads()]
    assert sorted(names) == ["d.txt", "dd/c"]


@pytest.mark.parametrize("code", ["NotImplemented", "MethodNotAllowed", "AccessDenied"])
def test_who_may_not_list_uploads_sends_all_the_same(stub, store, code):
    status = {"NotImplemented": 501, "MethodNotAllowed": 405, "AccessDenied": 403}[code]
    stub.fail("uploads", times=99, status=status, code=code)
    everything(store, f"{stub.seen.url}/d")


# -- connections -------------------------------------------------------------------------------


def test_one_signature_serves_all_ranges_of_an_object_for_a_while(stub, quick, monkeypatch):
    stub.seen.put("a", BYTES)
    store, url = store_for(stub.seen.url, stub.seen.options), f"{stub.seen.url}/a"
    for low in range(10):
        assert store.read(url, low, 5) == BYTES[low : low + 5]
    signed = store._s3.signed["bucket", f"{stub.seen.prefix}a"]
    assert "Authorization" in signed.headers
    store.read(url, 0, 1)
    assert store._s3.signed["bucket", f"{stub.seen.prefix}a"] is signed
    monkeypatch.setattr(s3_client, "_FRESH", -1.0)
    store.read(url, 0, 1)
    assert store._s3.signed["bucket", f"{stub.seen.prefix}a"] is not signed


def test_keys_that_need_escaping_are_read(rclone):
    """rclone checks signatures."""
    names = ["a b", "ä+&", "x=%41", "q'(1)~"]
    store = store_for(rclone.url, rclone.options)
    for n in names:
        rclone.put(n, n.encode())
        assert store.read(f"{rclone.url}/{n}", 0, len(n.encode())) == n.encode()


def test_a_wrong_secret_is_refused(rclone, fresh):
    rclone.put("a", b"1")
    store = store_for(rclone.url, {**rclone.options, "key": "accesskey123", "secret": "wrong"})
    with pytest.raises(StorageError, match="SignatureDoesNotMatch"):
        store.read(f"{rclone.url}/a", 0, 1)


def test_without_a_signature(moto, fresh, monkeypatch):
    """Public buckets, on a machine without credentials."""
    moto.client.put_object(Bucket="bucket", Key=moto.prefix + "a", Body=b"1", ACL="public-read")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for anon in (True, "true"):
        store = store_for(moto.url, {**moto.options, "anon": anon})
        assert store.read(f"{moto.url}/a", 0, 1) == b"1"
        assert "Authorization" not in store._s3.signed["bucket", moto.prefix + "a"].headers


def test_a_profile(rclone, fresh, monkeypatch, tmp_path):
    file = tmp_path / "credentials"
    file.write_text(
        "[other]\naws_access_key_id = accesskey123\naws_secret_access_key = secretsecretsecret\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    rclone.put("a", b"1")
    store = store_for(rclone.url, {**rclone.options, "profile": "other"})
    assert store.read(f"{rclone.url}/a", 0, 1) == b"1"


def test_a_token_goes_along(stub, quick):
    options = {**stub.seen.options, "key": "k", "secret": "s", "token": "temporary"}
    stub.seen.put("a", b"1")
    store = store_for(stub.seen.url, options)
    assert store.read(f"{stub.seen.url}/a", 0, 1) == b"1"
    headers = store._s3.signed["bucket", f"{stub.seen.prefix}a"].headers
    assert headers["X-Amz-Security-Token"] == "temporary"


def test_options_of_the_client_as_json(moto, fresh, monkeypatch):
    moto.put("a", b"1")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    options = {
        "client_kwargs": f'{{"endpoint_url": "{moto.endpoint}", "region_name": "eu-west-1"}}',
        "config_kwargs": '{"s3": {"addressing_style": "path"}}',
    }
    store = store_for(moto.url, options)
    assert store.read(f"{moto.url}/a", 0, 1) == b"1"
    assert store._s3.client.meta.region_name == "eu-west-1"


def test_what_fsspec_is_configured_with(moto, fresh, monkeypatch):
    moto.put("a", b"1")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": moto.endpoint})
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", moto.endpoint)
    assert store_for(moto.url, {}).read(f"{moto.url}/a", 0, 1) == b"1"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"requester_pays": True}, "requester_pays: not known for s3://; known are key, secret"),
        ({"anon": "perhaps"}, "anon=perhaps: must be true or false"),
        ({"client_kwargs": "{"}, "client_kwargs={: not JSON"),
        ({"config_kwargs": "3"}, "config_kwargs=3: must be a JSON object"),
        ({"config_kwargs": {"no_such": 1}}, "no_such"),
        ({"client_kwargs": {"no_such": 1}}, "no_such"),
        ({"profile": "nobody"}, "nobody"),
    ],
)
def test_options_that_are_not_known_are_refused(stub, fresh, options, text):
    with pytest.raises(UsageError) as raised:
        store_for(stub.seen.url, options)
    assert text in str(raised.value)


def test_a_fork_has_connections_of_its_own(rclone):
    """Two processes on one socket would get each other's bytes."""
    rclone.put("a", BYTES)
    store = store_for(rclone.url, rclone.options)
    assert store.read(f"{rclone.url}/a", 0, 5) == BYTES[:5]
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()

    def child():
        own = store_for(rclone.url, rclone.options)
        queue.put((own._s3.client is store._s3.client, own.read(f"{rclone.url}/a", 1, 5)))

    process = fork.Process(target=child)
    process.start()
    assert queue.get() == (False, BYTES[1:6])
    process.join()
    assert store.read(f"{rclone.url}/a", 2, 5) == BYTES[2:7]


def test_no_thread_is_left_behind(rclone):
    """One that stayed would keep later local work from being shared by processes."""
    rclone.put("a", BYTES)
    before = threading.active_count()
    store = store_for(rclone.url, rclone.options)
    out = bytearray(300)
    store.read_runs(f"{rclone.url}/a", [0, 1 << 20, 3 << 20], 100, memoryview(out))
    assert threading.active_count() == before


# -- listings ----------------------------------------------------------------------------------


def test_every_page_of_a_listing(stub, store):
    stub.page = 3
    for n in range(10):
        stub.seen.put(f"d/{n}", b"x" * n)
        stub.seen.put(f"d/sub-{n}/y", b"y")
    names = [*map(str, range(10)), *(f"sub-{n}" for n in range(10))]
    assert store.names(f"{stub.seen.url}/d") == names
    assert store.files(f"{stub.seen.url}/d") == {str(n): n for n in range(10)}
    stub.fail("list", times=2)
    store.delete(f"{stub.seen.url}/d")
    assert stub.names() == []


def test_names_that_need_escaping(stub, store):
    names = ["a b", "ä+&", "x=%41", "model.safetensors"]
    for n in names:
        store.put(f"{stub.seen.url}/d/{n}", n.encode())
    assert store.names(f"{stub.seen.url}/d") == sorted(names)
    for n in names:
        assert store.read(f"{stub.seen.url}/d/{n}", 0, len(n.encode())) == n.encode()


def test_the_first_calls_may_come_from_many_threads(stub, store):
    """One client is made, not one for each: the others would never be closed."""
    stub.seen.put("a", b"1")
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: store.read(f"{stub.seen.url}/a", 0, 1), range(64)))
    assert found == [b"1"] * 64
