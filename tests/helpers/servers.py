"""Object stores that tests start and stop: rclone, moto, and a stub whose faults are scripted.

Test modules name this file in ``pytest_plugins``. PYTEST_DONT_REWRITE
"""

import contextlib
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import botocore.session
import pytest

from d9d_ckpt.storage import s3_client

KEY, SECRET = "accesskey123", "secretsecretsecret"
BUCKET = "bucket"


def use(endpoint: str, patch: pytest.MonkeyPatch) -> None:
    """The usual environment variables of a server."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "NO_PROXY": "127.0.0.1",
    }.items():
        patch.setenv(name, value)


def close_clients() -> None:
    """End the connections of every client of this process, and forget the clients."""
    s3_client.forget()


@dataclass(frozen=True)
class Server:
    """A running server, seen through a client that shares nothing with the engine's.

    Attributes:
        endpoint: Its URL.
        client: Of botocore, blocking.
        url: A prefix of the bucket that no other test writes to.
    """

    endpoint: str
    client: Any
    url: str

    @property
    def options(self) -> dict[str, str]:
        """Storage options; clients made from them are shared by the tests of a server."""
        return {"endpoint_url": self.endpoint}

    @property
    def prefix(self) -> str:
        """The key under which this test's objects lie, with its slash."""
        return self.url.removeprefix(f"s3://{BUCKET}/") + "/"

    def put(self, name: str, content: bytes) -> None:
        """An object beside ours."""
        self.client.put_object(Bucket=BUCKET, Key=self.prefix + name, Body=content)

    def get(self, name: str) -> bytes:
        """An object's bytes."""
        return self.client.get_object(Bucket=BUCKET, Key=self.prefix + name)["Body"].read()

    def delete(self, name: str) -> None:
        """Remove an object."""
        self.client.delete_object(Bucket=BUCKET, Key=self.prefix + name)

    def objects(self, under: str = "") -> dict[str, bytes]:
        """Everything under the prefix, by name."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=BUCKET, Prefix=self.prefix + under
        )
        names = [e["Key"].removeprefix(self.prefix) for p in pages for e in p.get("Contents", ())]
        return {name: self.get(name) for name in sorted(names)}

    def uploads(self) -> list[str]:
        """Keys of multipart uploads that nobody has ended."""
        found = self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
        return [e["Key"] for e in found if e["Key"].startswith(self.prefix)]

    def send(self, path: Path, name: str) -> str:
        """Copy a directory file by file; its URL."""
        for file in sorted(path.rglob("*")):
            if file.is_file():
                self.put(f"{name}/{file.relative_to(path)}", file.read_bytes())
        return f"{self.url}/{name}"

    def fetch(self, name: str, path: Path) -> Path:
        """Copy everything under ``name`` to a directory."""
        for key, content in self.objects(f"{name}/").items():
            file = path / key.removeprefix(f"{name}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return path


def client(endpoint: str) -> Any:
    """A client without retries and waits."""
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=botocore.config.Config(
            retries={"max_attempts": 0},
            request_checksum_calculation="when_required",
            s3={"addressing_style": "path"},
        ),
    )


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running(*argv: object, port: int) -> Iterator[str]:
    """A server program until the block ends; its URL once it answers."""
    endpoint = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(  # noqa: S603 - our own list
        [str(a) for a in argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait(endpoint, process)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def _wait(endpoint: str, process: "subprocess.Popen[bytes]") -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < end:
        try:
            opener.open(endpoint, timeout=5).close()
        except urllib.error.HTTPError as error:
            error.close()
            return
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"no server at {endpoint}")


def _bin(name: str) -> Path:
    return Path(sys.executable).parent / name


@pytest.fixture(scope="session")
def _rclone(tmp_path_factory):
    root = tmp_path_factory.mktemp("rclone")
    (root / BUCKET).mkdir()
    port = free_port()
    argv = [_bin("rclone"), "serve", "s3", "--config", "/dev/null", "--vfs-cache-mode", "off"]
    argv += ["--auth-key", f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{port}", root]
    with running(*argv, port=port) as endpoint:
        yield endpoint, client(endpoint)
        close_clients()


@pytest.fixture(scope="session")
def _moto():
    port = free_port()
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    with running(*argv, port=port) as endpoint:
        made = client(endpoint)
        made.create_bucket(Bucket=BUCKET)
        yield endpoint, made
        close_clients()


@pytest.fixture
def rclone(_rclone, monkeypatch, request):
    """rclone's server: no conditional puts, parts in order, no list of open uploads."""
    return _served(*_rclone, monkeypatch, request)


@pytest.fixture
def moto(_moto, monkeypatch, request):
    """moto's server: all of what these tests ask for."""
    return _served(*_moto, monkeypatch, request)


@pytest.fixture(scope="session")
def _stub():
    with Stub() as made:
        yield made, client(made.endpoint)
    close_clients()


@pytest.fixture
def stub(_stub, monkeypatch, request):
    """A server of this process whose faults the test scripts: `Stub`."""
    made, viewer = _stub
    made.renew()
    use(made.endpoint, monkeypatch)
    made.seen = Server(made.endpoint, viewer, _url(request))
    yield made
    made.ended.set()


@pytest.fixture
def fresh():
    """No client that other tests have made, for those that depend on the environment."""
    close_clients()
    yield
    close_clients()


@pytest.fixture
def server(request):
    """The server that an indirect parameter names."""
    return request.getfixturevalue(request.param)


def _served(endpoint, made, monkeypatch, request):
    use(endpoint, monkeypatch)
    return Server(endpoint, made, _url(request))


def _url(request):
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    return f"s3://{BUCKET}/{name}-{id(request):x}"


# -- a stub with scripted faults ---------------------------------------------------------------


class Seen(NamedTuple):
    """One request: operation, key, range or part number, and what became of it."""

    op: str
    key: str
    detail: str
    fault: str
    at: float


@dataclass
class Fault:
    """What happens to the next ``times`` requests of an operation.

    Attributes:
        op: The operation.
        kind: ``status``; ``reset`` before an answer; ``lost``: done, but the connection is reset
            before the answer; ``cut`` and ``torn``: ``after`` bytes of the body, then the connection
            ends or is reset; ``stall``: no answer; ``hang``: ``after`` bytes, then nothing more;
            ``slow``: the body comes ``after`` bytes at a time, 20 times a second;
            ``whole``: the range is ignored; ``call``: done after ``call`` was called.
        times: How many requests.
        status: Of the answer.
        code: S3's word for it.
        key: Only keys that contain this.
        after: Bytes of the body.
        call: Called with the key.
        raw: Body in place of S3's XML.
    """

    op: str
    kind: str = "status"
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    key: str = ""
    after: int = 0
    call: Callable[[str], None] | None = None
    raw: bytes | None = None


@dataclass
class Held:
    """Parts of an open upload."""

    key: str
    parts: dict[int, bytes] = field(default_factory=dict)


class Stub:
    """Enough of S3 for the engine, in threads of this process.

    Attributes:
        objects: Content by bucket/key.
        open: Uploads that nobody has ended.
        log: Every request.
        faults: What is still to go wrong.
        conditional: Whether ``If-None-Match`` and ``If-Match`` are honoured.
        page: Keys in a page of a listing.
        drag: Seconds for every 256 KiB of a body that it takes.
        seen: The server as tests look at it.
    """

    seen: Server

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.ended = threading.Event()
        self.renew()

    def renew(self) -> None:
        """Forget everything."""
        self.ended.set()
        self.ended = threading.Event()
        self.objects: dict[str, bytes] = {}
        self.open: dict[str, Held] = {}
        self.log: list[Seen] = []
        self.faults: list[Fault] = []
        self.conditional, self.page, self.drag = True, 1000, 0.0

    def __enter__(self) -> Self:
        self._start(0)
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.away()

    def _start(self, port: int) -> None:
        self._http = _Http(("127.0.0.1", port), _Handler)
        self._http.stub = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def away(self) -> None:
        """Refuse connections, and end those there are."""
        self._http.shutdown()
        self._thread.join()
        self._http.end()

    def back(self) -> None:
        """Be there again, at the same port."""
        self._start(self._http.server_address[1])

    def fail(self, op: str, kind: str = "status", **more: Any) -> None:
        """Add a `Fault`."""
        with self.lock:
            self.faults.append(Fault(op, kind, **more))

    def count(self, op: str, key: str = "") -> int:
        """Requests of an operation so far."""
        return sum(s.op == op and key in s.key for s in self.log)

    def details(self, op: str) -> list[str]:
        """Ranges or part numbers of an operation's requests."""
        return [s.detail for s in self.log if s.op == op]

    def begun(self, key: str) -> None:
        """Begin an upload that nobody will end."""
        with self.lock:
            self.open[f"left-{len(self.open)}"] = Held(key)

    def names(self, under: str = "") -> list[str]:
        """Objects under this test's prefix."""
        start = f"{BUCKET}/{self.seen.prefix}"
        return sorted(k.removeprefix(start) for k in self.objects if k.startswith(start + under))

    def begin(self, op: str, key: str, detail: str) -> Fault | None:
        """Note a request; its fault."""
        with self.lock:
            fault = next((f for f in self.faults if f.op == op and f.key in key), None)
            if fault is not None:
                fault.times -= 1
                if not fault.times:
                    self.faults.remove(fault)
            kind = "" if fault is None else fault.kind
            self.log.append(Seen(op, key, detail, kind, time.monotonic()))
            return fault


class _Http(ThreadingHTTPServer):
    stub: Stub
    daemon_threads = True
    block_on_close = True
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*args)

    def get_request(self):
        made, address = super().get_request()
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.stub.drag:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.connections.add(made)
        return made, address

    def handle_error(self, *_: object) -> None:
        """Clients that hang up are part of the script."""

    def end(self) -> None:
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


class _Reset(Exception):  # noqa: N818 - not an error, a way out of the handler
    """The connection is to be reset."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()
        self.server.connections.discard(self.connection)

    def _handle(self) -> None:
        stub = self.server.stub
        body = self._body()
        path = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(path.query, keep_blank_values=True).items()}
        key = unquote(path.path).lstrip("/")
        op, detail = self._operation(query)
        fault = stub.begin(op, key, detail)
        try:
            self._fault(fault, key)
            if fault is None or fault.kind != "status":
                with stub.lock:
                    answer = getattr(self, f"_{op}")(key, query, body, fault)
                self._answer(*answer, fault=fault)
        except _Reset:
            self._reset()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815 - the library's names

    def _operation(self, query: dict[str, str]) -> tuple[str, str]:
        match self.command:
            case "HEAD":
                return "head", ""
            case "GET":
                return ("list", "") if "list-type" in query else self._get_kind(query)
            case "PUT":
                number = query.get("partNumber")
                return ("put", "") if number is None else ("part", number)
            case "POST":
                return ("create", "") if "uploads" in query else ("complete", "")
            case _:
                return ("abort", "") if "uploadId" in query else ("delete", "")

    def _get_kind(self, query: dict[str, str]) -> tuple[str, str]:
        return ("uploads", "") if "uploads" in query else ("get", self.headers.get("Range", ""))

    def _fault(self, fault: Fault | None, key: str) -> None:
        if fault is None:
            return
        if fault.call is not None:
            fault.call(key)
        if fault.kind == "status":
            raw = _error(fault.code) if fault.raw is None else fault.raw
            self._answer(fault.status, raw, {})
        elif fault.kind == "reset":
            raise _Reset
        elif fault.kind == "stall":
            self.server.stub.ended.wait(60)
            raise _Reset

    def _body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        data = self._taken(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            raise AssertionError("bodies are sent plainly")
        return data

    def _taken(self, nbytes: int) -> bytes:
        if not self.server.stub.drag:
            return self.rfile.read(nbytes)
        pieces = []
        while nbytes:
            pieces.append(self.rfile.read(min(nbytes, 256 << 10)))
            nbytes -= len(pieces[-1])
            time.sleep(self.server.stub.drag)
        return b"".join(pieces)

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str], fault: Fault | None = None
    ) -> None:
        if fault is not None and fault.kind == "lost":
            raise _Reset
        size = headers.pop("Content-Length", str(len(body)))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", size)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.kind == "slow":
            for low in range(0, len(body), fault.after):
                self.wfile.write(body[low : low + fault.after])
                time.sleep(0.05)
            return
        if fault is not None and fault.kind in ("cut", "torn", "hang"):
            self.wfile.write(body[: fault.after])
            self.wfile.flush()
            if fault.kind == "torn":
                time.sleep(0.05)  # a reset overtakes what has not been read yet
                raise _Reset
            if fault.kind == "hang":
                self.server.stub.ended.wait(60)
            self.close_connection = True
            return
        self.wfile.write(body)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    # Operations; each returns status, body, headers.

    def _head(self, key, query, body, fault):
        del query, body, fault
        content = self.server.stub.objects.get(key)
        if content is None:
            return 404, b"", {}
        return 200, b"", {"Content-Length": str(len(content)), "ETag": _tag(content)}

    def _get(self, key, query, body, fault):
        del query, body
        content = self.server.stub.objects.get(key)
        if content is None:
            return 404, _error("NoSuchKey"), {}
        if self.headers.get("If-Match", _tag(content)) != _tag(content):
            return 412, _error("PreconditionFailed"), {}
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span is None or (fault is not None and fault.kind == "whole"):
            return 200, content, {"ETag": _tag(content)}
        first, last = int(span[1]), min(int(span[2]), len(content) - 1)
        if first >= len(content):
            return 416, _error("InvalidRange"), {}
        where = f"bytes {first}-{last}/{len(content)}"
        return 206, content[first : last + 1], {"Content-Range": where, "ETag": _tag(content)}

    def _put(self, key, query, body, fault):
        del query, fault
        stub = self.server.stub
        if stub.conditional and self.headers.get("If-None-Match") == "*" and key in stub.objects:
            return 412, _error("PreconditionFailed"), {}
        stub.objects[key] = body
        return 200, b"", {"ETag": _tag(body)}

    def _create(self, key, query, body, fault):
        del query, body, fault
        stub = self.server.stub
        name = f"upload-{len(stub.log)}"
        stub.open[name] = Held(key)
        bucket, _, rest = key.partition("/")
        return (
            200,
            _xml("InitiateMultipartUploadResult", Bucket=bucket, Key=rest, UploadId=name),
            {},
        )

    def _part(self, key, query, body, fault):
        del key, fault
        held = self.server.stub.open.get(query["uploadId"])
        if held is None:
            return 404, _error("NoSuchUpload"), {}
        held.parts[int(query["partNumber"])] = body
        return 200, b"", {"ETag": _tag(body)}

    def _complete(self, key, query, body, fault):
        del fault
        stub = self.server.stub
        held = stub.open.get(query["uploadId"])
        if held is None:
            return 404, _error("NoSuchUpload"), {}
        numbers = [int(n) for n in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        if any(len(held.parts[n]) < 5 << 20 for n in numbers[:-1]):
            return 400, _error("EntityTooSmall"), {}
        del stub.open[query["uploadId"]]
        content = b"".join(held.parts[n] for n in numbers)
        stub.objects[key] = content
        bucket, _, rest = key.partition("/")
        tag = _tag(content)
        return 200, _xml("CompleteMultipartUploadResult", Bucket=bucket, Key=rest, ETag=tag), {}

    def _abort(self, key, query, body, fault):
        del key, body, fault
        if self.server.stub.open.pop(query["uploadId"], None) is None:
            return 404, _error("NoSuchUpload"), {}
        return 204, b"", {}

    def _delete(self, key, query, body, fault):
        del query, body, fault
        self.server.stub.objects.pop(key, None)
        return 204, b"", {}

    def _uploads(self, key, query, body, fault):
        del query, body, fault
        open_ = self.server.stub.open.items()
        found = [(n, h.key.partition("/")[2]) for n, h in open_ if h.key.startswith(f"{key}/")]
        rows = "".join(
            f"<Upload><Key>{escape(k)}</Key><UploadId>{n}</UploadId></Upload>" for n, k in found
        )
        return 200, _xml("ListMultipartUploadsResult", _inner=rows), {}

    def _list(self, key, query, body, fault):
        del body, fault
        stub, start = self.server.stub, f"{key.rstrip('/')}/"
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        rows: dict[str, str] = {}
        for name in sorted(k.removeprefix(start) for k in stub.objects if k.startswith(start)):
            if not name.startswith(prefix):
                continue
            head, found, _ = name[len(prefix) :].partition(delimiter or "\0")
            if found:
                deeper = prefix + head + delimiter
                rows[deeper] = f"<CommonPrefixes><Prefix>{escape(deeper)}</Prefix></CommonPrefixes>"
            else:
                size = len(stub.objects[start + name])
                rows[name] = f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size></Contents>"
        left = [name for name in sorted(rows) if name > query.get("continuation-token", "")]
        shown = left[: stub.page]
        more = {"IsTruncated": str(len(left) > len(shown)).lower()}
        if len(left) > len(shown):
            more["NextContinuationToken"] = shown[-1]
        inner = "".join(rows[name] for name in shown)
        return 200, _xml("ListBucketResult", _inner=inner, Name=key, Prefix=prefix, **more), {}


def _tag(content: bytes) -> str:
    return f'"{md5(content, usedforsecurity=False).hexdigest()}"'


def _error(code: str) -> bytes:
    return _xml("Error", Code=code, Message=f"scripted {code}")


def _xml(name: str, _inner: str = "", **values: str) -> bytes:
    rows = "".join(f"<{k}>{escape(v)}</{k}>" for k, v in values.items())
    return f'<?xml version="1.0"?><{name}>{rows}{_inner}</{name}>'.encode()
