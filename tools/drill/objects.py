"""Object stores behind a proxy that lets single requests go wrong."""

import contextlib
import http.client
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import botocore.config
import botocore.exceptions
import botocore.session

from d9d_ckpt import api
from d9d_ckpt.run import upload
from drill.board import Board, Fault

KEY, SECRET, BUCKET = "accesskey123", "secretsecretsecret", "bucket"
_PART = 1 << 20
"""Bytes of a part in the drill, so that small objects have several."""

_IMPATIENT = 2
"""Seconds without an answer after which the drill's clients try again."""

_KILLS = ("kill", "kill after")
EFFECTS: Mapping[str, tuple[str, ...]] = {
    "HEAD": ("503", "reset", "kill"),
    "GET": ("503", "500", "reset", "cut", "late", "kill"),
    "LIST": ("503", "reset", "cut", "kill"),
    "PUT": ("503", "500", "reset", "lost answer", "twice", "late", *_KILLS),
    "BEGIN": ("503", "reset", "lost answer", "twice", *_KILLS),
    "PART": ("503", "500", "reset", "lost answer", "twice", "late", "lost part", *_KILLS),
    "COMPLETE": ("503", "reset", "lost answer", "twice", "late", *_KILLS),
    "ABORT": ("503", "reset", "kill"),
    "DELETE": ("503", "reset", "lost answer", "twice", *_KILLS),
    "UPLOADS": ("503", "reset", "kill"),
}
"""What happens to a request.

``reset`` before the server has it, ``lost answer`` after; ``cut`` ends in the middle of the answer;
``late`` reaches the server when the client has given up and asked again; ``twice`` reaches it two
times; a ``lost part`` is acknowledged and forgotten; the kills end the client before and after.
"""


class Objects:
    """A bucket of an S3 server, asked by the engine through the proxy."""

    disk = False

    def __init__(self, name: str, endpoint: str, proxy: str, board: Board) -> None:
        self.name, self._board = name, board
        self._s3 = _client(endpoint)
        self.options = _options(proxy)
        self.direct = _options(endpoint)

    def url(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    def seen(self, name: str) -> str:
        return self.url(name)

    def send(self, tree: Path, name: str) -> None:
        self.clear(name)
        for file in sorted(p for p in tree.rglob("*") if p.is_file()):
            key = f"{name}/{file.relative_to(tree)}"
            self._s3.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())

    def fetch(self, name: str, tree: Path) -> None:
        for file in self.files(name):
            target = tree / file
            target.parent.mkdir(parents=True, exist_ok=True)
            answer = self._s3.get_object(Bucket=BUCKET, Key=f"{name}/{file}")
            target.write_bytes(answer["Body"].read())

    def clear(self, name: str) -> None:
        for key, upload_id in self._uploads(name):
            self._s3.abort_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload_id)
        for entry in self._entries(name):
            self._s3.delete_object(Bucket=BUCKET, Key=entry["Key"])

    def files(self, name: str) -> dict[str, int]:
        found = {e["Key"].removeprefix(f"{name}/"): int(e["Size"]) for e in self._entries(name)}
        return found | {f"unfinished {key}": 0 for key, _ in self._uploads(name)}

    def mark(self, name: str) -> object:
        return [(e["Key"], e["ETag"], e["Size"], e["LastModified"]) for e in self._entries(name)]

    def arm(self, fault: Fault | None) -> None:
        vars(upload)["PART"] = vars(api)["PART"] = _PART
        self._board.victim = os.getpgid(0)
        self._board.fault = fault

    def disarm(self) -> None:
        self._board.fault = None

    def end(self) -> None:
        """Nothing more can go wrong."""

    def settles(self) -> bool:
        return False

    def faults(self, counts: Mapping[str, int]) -> list[Fault]:
        return [
            Fault(kind, number, effect)
            for kind, count in counts.items()
            for number in range(1, count + 1)
            for effect in EFFECTS[kind]
        ]

    def _entries(self, name: str) -> list[dict[str, Any]]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{name}/")
        return [entry for page in pages for entry in page.get("Contents", ())]

    def _uploads(self, name: str) -> list[tuple[str, str]]:
        """Key and id of the uploads that nobody has ended; none where the server cannot say."""
        try:
            found = self._s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
        except botocore.exceptions.ClientError:
            return []
        return [(e["Key"], e["UploadId"]) for e in found if e["Key"].startswith(f"{name}/")]


def _options(endpoint: str) -> Mapping[str, Any]:
    return {
        "endpoint_url": endpoint,
        "key": KEY,
        "secret": SECRET,
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"read_timeout": _IMPATIENT},
    }


@contextlib.contextmanager
def served(name: str, root: Path, board: Board) -> Iterator[Objects]:
    """A server, ``rclone`` or ``moto``, with an empty bucket and the proxy before it."""
    port = _free_port()
    program = {"rclone": _rclone, "moto": _moto}[name](root, port)
    environment = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1"}
    process = subprocess.Popen(  # noqa: S603 - our own list
        program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        _wait(endpoint, process)
        with contextlib.suppress(botocore.exceptions.ClientError):
            _client(endpoint).create_bucket(Bucket=BUCKET)
        with _proxied(port, board) as proxy:
            yield Objects(name, endpoint, proxy, board)
    finally:
        process.kill()
        process.wait()


def _rclone(root: Path, port: int) -> list[str]:
    (root / "rclone" / BUCKET).mkdir(parents=True)
    return [
        str(Path(sys.executable).parent / "rclone"), "serve", "s3", "--config", os.devnull,
        "--vfs-cache-mode", "off", "--auth-key", f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{port}",
        str(root / "rclone"),
    ]  # fmt: skip


def _moto(root: Path, port: int) -> list[str]:
    del root
    return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]


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
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"no server at {endpoint}")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _client(endpoint: str) -> Any:
    """A client that shares nothing with the engine's."""
    config = botocore.config.Config(
        retries={"max_attempts": 0},
        request_checksum_calculation="when_required",
        s3={"addressing_style": "path"},
    )
    return botocore.session.Session().create_client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=KEY,
        aws_secret_access_key=SECRET, config=config,
    )  # fmt: skip


# -- the proxy ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _proxied(port: int, board: Board) -> Iterator[str]:
    """The proxy in a process of its own: its threads must not be there when others fork."""
    server = _Proxy(("127.0.0.1", 0), _Handler)
    server.board, server.upstream = board, port
    pid = os.fork()
    if not pid:
        server.serve_forever()
    address = server.server_address
    server.socket.close()
    try:
        yield f"http://127.0.0.1:{address[1]}"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class _Proxy(ThreadingHTTPServer):
    board: Board
    upstream: int
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Clients that hang up are part of the drill."""


class _Answer:
    """What the server has said."""

    def __init__(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Proxy

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        board, kind = self.server.board, self._kind()
        number, fault = board.count(kind), board.fault
        if fault is None or (fault.kind, fault.number) != (kind, number):
            self._answer(self._forward(body))
        else:
            board.hit()
            self._wrong(fault.effect, body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815 - the library's names

    def _kind(self) -> str:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        match self.command:
            case "GET" if "uploads" in query:
                return "UPLOADS"
            case "GET" if "list-type" in query:
                return "LIST"
            case "PUT" if "partNumber" in query:
                return "PART"
            case "POST":
                return "BEGIN" if "uploads" in query else "COMPLETE"
            case "DELETE" if "uploadId" in query:
                return "ABORT"
        return self.command

    def _wrong(self, effect: str, body: bytes) -> None:
        match effect:
            case "500" | "503":
                text = b"<Error><Code>InternalError</Code><Message>drill</Message></Error>"
                self._answer(_Answer(int(effect), [("Content-Type", "application/xml")], text))
            case "reset":
                self._reset()
            case "lost answer":
                self._forward(body)
                self._reset()
            case "twice":
                self._forward(body)
                self._answer(self._forward(body))
            case "late":
                time.sleep(_IMPATIENT + 0.5)
                self._forward(body)
                self._reset()
            case "lost part":
                tag = f'"{md5(body).hexdigest()}"'  # noqa: S324 - what S3 answers
                self._answer(_Answer(200, [("ETag", tag)], b""))
            case "cut":
                self._answer(self._forward(body), cut=True)
            case "kill":
                self._kill()
            case "kill after":
                self._forward(body)
                self._kill()

    def _forward(self, body: bytes) -> _Answer:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=20)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            found = upstream.getresponse()
            content = found.read()
            skipped = ("connection", "transfer-encoding", "content-length")
            headers = [(n, v) for n, v in found.getheaders() if n.lower() not in skipped]
            if self.command == "HEAD":
                headers.append(("Content-Length", found.getheader("Content-Length") or "0"))
            return _Answer(found.status, headers, content)
        finally:
            upstream.close()

    def _answer(self, answer: _Answer, *, cut: bool = False) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: len(answer.body) // 2] if cut else answer.body)
        self.close_connection = self.close_connection or cut

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.board.victim, signal.SIGKILL)
        self.close_connection = True
