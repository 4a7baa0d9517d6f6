"""Clients of botocore, from the options that s3fs takes and the usual environment.

A call of such a client takes 0.8 ms of processor time, which no other thread has meanwhile. Ranges
therefore go past it, over its connections: one signature serves all ranges of an object.
"""

import importlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import botocore
import botocore.auth
import botocore.awsrequest
import botocore.config
import botocore.exceptions
import botocore.parsers
import botocore.response
import botocore.session

from d9d_ckpt.errors import UsageError
from d9d_ckpt.storage.retry import PATIENCE
from d9d_ckpt.storage.store import Options
from d9d_ckpt.storage.throttle import MOST, Throttle

_CONNECT = 20.0
"""Seconds to connect, and for each piece that is sent: the client has one limit for both."""

_FRESH = 300.0
"""Seconds for which a signature is used, of the 15 minutes for which it is valid."""

_CONFIG: Mapping[str, Any] = {
    "signature_version": "s3v4",
    "retries": {"max_attempts": 0},
    "connect_timeout": _CONNECT,
    "read_timeout": PATIENCE.stall,
    "max_pool_connections": MOST,
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
"""Retries are ours; blocks carry checksums of ours from end to end, a second sum is wasted."""

_CREDENTIALS = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
}
_PASSED_ON = ("endpoint_url", "use_ssl")
_KNOWN = (*_CREDENTIALS, *_PASSED_ON, "anon", "profile", "client_kwargs", "config_kwargs")


class Answer(NamedTuple):
    """An object's bytes on their way.

    Attributes:
        body: To be read, and closed.
        nbytes: How many come.
        total: Bytes of the object, 0 where the server does not say.
        tag: What tells this content from another, or empty.
    """

    body: Any
    nbytes: int
    total: int
    tag: str


class Signed(NamedTuple):
    """What reads an object, whichever range of it: the signature does not cover that.

    Attributes:
        url: The object's.
        headers: To be sent.
        since: When it was signed, on the monotonic clock.
    """

    url: str
    headers: Mapping[str, str]
    since: float


@dataclass(frozen=True)
class Connection:
    """What all stores of one process and one set of options share.

    Attributes:
        session: Of botocore; it has the credentials.
        client: Of botocore; safe to use from any thread.
        throttle: Turns at the server.
        signed: By bucket and key.
    """

    session: Any
    client: Any
    throttle: Throttle = field(default_factory=Throttle)
    signed: dict[tuple[str, str], Signed] = field(default_factory=dict)

    def get(self, bucket: str, key: str, headers: Mapping[str, str]) -> Answer:
        """Begin to read an object.

        Raises:
            ClientError: The server refuses.
            BotoCoreError: No answer came, or one without its length.
        """
        signed = self.signed.get((bucket, key))
        if signed is None or time.monotonic() - signed.since > _FRESH:
            signed = self.signed[bucket, key] = self._sign(bucket, key)
        request = botocore.awsrequest.AWSPreparedRequest(
            "GET", signed.url, {**signed.headers, **headers}, None, stream_output=True
        )
        # Its pool of connections, with the proxies, certificates and limits that it was given.
        answer = self.client._endpoint.http_session.send(request)  # noqa: SLF001
        if answer.status_code >= 300:
            raise _refusal(answer)
        if "Content-Length" not in answer.headers:
            raise botocore.exceptions.ResponseStreamingError(error="an answer without its length")
        nbytes = int(answer.headers["Content-Length"])
        return Answer(
            body=botocore.response.StreamingBody(answer.raw, nbytes),
            nbytes=nbytes,
            total=int(answer.headers.get("Content-Range", "/0").rpartition("/")[2] or 0),
            tag=answer.headers.get("ETag", ""),
        )

    def _sign(self, bucket: str, key: str) -> Signed:
        """A signature in headers: one in the URL takes the pool longer to parse than all the rest."""
        where = {"Bucket": bucket, "Key": key}
        parts = urlsplit(self.client.generate_presigned_url("get_object", where))
        request = botocore.awsrequest.AWSRequest("GET", parts._replace(query="").geturl())
        scope = parse_qs(parts.query).get("X-Amz-Credential")
        if scope is not None:
            _, _, region, service, _ = scope[0].rsplit("/", 4)
            credentials = self.session.get_credentials().get_frozen_credentials()
            botocore.auth.S3SigV4Auth(credentials, service, region).add_auth(request)
        return Signed(request.url, dict(request.headers.items()), time.monotonic())


def connection(options: Options) -> Connection:
    """The connection of this process with these options.

    Raises:
        UsageError: An option is unknown, or the client does not take it.
    """
    wanted = {**_configured(), **options}
    key = (os.getpid(), repr(sorted(wanted.items())))
    with _LOCK:
        if key not in _MADE:
            _MADE[key] = _connected(wanted)
        return _MADE[key]


def forget() -> None:
    """Make new connections from now on: the environment has changed."""
    with _LOCK:
        for made in _MADE.values():
            made.client.close()
        _MADE.clear()


_MADE: dict[tuple[int, str], Connection] = {}
"""By process: a fork has none of its parent's."""

_LOCK = threading.Lock()
os.register_at_fork(
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)


def _refusal(answer: Any) -> botocore.exceptions.ClientError:
    """The error that the client itself would raise."""
    whole = {"status_code": answer.status_code, "headers": answer.headers, "body": answer.content}
    parsed = botocore.parsers.create_parser("rest-xml").parse(whole, None)
    return botocore.exceptions.ClientError(parsed, "GetObject")


def _connected(options: Options) -> Connection:
    if unknown := sorted(set(options) - set(_KNOWN)):
        raise UsageError(
            f"storage option {', '.join(unknown)}: not known for s3://; known are "
            f"{', '.join(_KNOWN)}; what else a client takes goes into client_kwargs and config_kwargs"
        )
    more = {**_CONFIG, **_mapping(options, "config_kwargs")}
    if _truth(options, "anon"):
        more["signature_version"] = botocore.UNSIGNED
    given = _mapping(options, "client_kwargs")
    given |= {name: options[name] for name in _PASSED_ON if name in options}
    if "use_ssl" in given:
        given["use_ssl"] = _truth(given, "use_ssl")
    ours = {name: given.pop(theirs, None) for name, theirs in _CREDENTIALS.items()}
    key, secret, token = (options.get(name, ours[name]) for name in _CREDENTIALS)
    try:
        session = botocore.session.Session(profile=options.get("profile"))
        if key is not None:
            session.set_credentials(key, secret, token)
        config = botocore.config.Config(**more)
        return Connection(session, session.create_client("s3", config=config, **given))
    except (TypeError, ValueError, botocore.exceptions.BotoCoreError) as error:
        raise UsageError(f"storage options for s3://: {error}") from error


def _configured() -> Options:
    """What fsspec's own configuration has for s3: FSSPEC_S3_... and its files."""
    files = Path(os.environ.get("FSSPEC_CONFIG_DIR", "~/.config/fsspec")).expanduser()
    if not files.is_dir() and not any(name.startswith("FSSPEC_") for name in os.environ):
        return {}
    # Rarely there, and a tenth of the start-up.
    found: Options = importlib.import_module("fsspec.config").conf.get("s3", {})
    return found


def _mapping(options: Options, name: str) -> dict[str, Any]:
    """An option that holds others, as JSON where the command line gives it."""
    value = options.get(name, {})
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UsageError(f"storage option {name}={value}: not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise UsageError(f"storage option {name}={value!r}: must be a JSON object")
    return dict(value)


def _truth(options: Options, name: str) -> bool:
    value = options.get(name, False)
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in known:
        raise UsageError(f"storage option {name}={value}: must be true or false")
    return known[str(value).lower()]
