"""S3 and what speaks like it, on the asynchronous client of s3fs: ranges, parts, retries of our own.

s3fs's own calls fetch a file in one stream and buffer whole files; here every request is a range or
a part, as many at once as there are callers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import aiohttp
import botocore.exceptions
import fsspec.asyn
import s3fs

from d9d_ckpt.errors import CorruptError, MissingError, StorageError
from d9d_ckpt.storage.ranges import LARGEST, coalesced
from d9d_ckpt.storage.retry import persist
from d9d_ckpt.storage.store import Options, Upload

_CONFIG = {
    "retries": {"max_attempts": 0},
    "connect_timeout": 10,
    "read_timeout": 30,
    "max_pool_connections": 64,
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
"""Retries are ours; blocks carry checksums of ours from end to end, a second sum is wasted."""

_PIECE = 1 << 20
"""Bytes taken off the wire at once, at most."""

_BROKEN = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.ResponseStreamingError,
    aiohttp.ClientError,
    ConnectionError,
    asyncio.IncompleteReadError,
)
"""Connections that could not be made, were reset, timed out, or ended early."""

_THROTTLED = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestTimeout"})


class S3Store:
    """Objects of one S3 endpoint. Safe to share between threads: all of it runs on one event loop."""

    def __init__(self, options: Options) -> None:
        config = {**_CONFIG, **options.get("config_kwargs", {})}
        given = {k: v for k, v in options.items() if k != "config_kwargs"}
        if "endpoint_url" in given:
            client = {**given.pop("client_kwargs", {}), "endpoint_url": given.pop("endpoint_url")}
            given["client_kwargs"] = client
        self._fs = s3fs.S3FileSystem(config_kwargs=config, use_listings_cache=False, **given)

    def size(self, url: str) -> int:
        found = self._run("stat", url, lambda c: c.head_object(**_address(url)))
        return int(found["ContentLength"])

    def names(self, url: str) -> list[str]:
        files, directories = self._listed(url)
        return sorted([*files, *directories])

    def files(self, url: str) -> dict[str, int]:
        return dict(sorted(self._listed(url)[0].items()))

    def read(self, url: str, offset: int, nbytes: int) -> bytes:
        out = bytearray(nbytes)
        self.read_into(url, offset, [memoryview(out)])
        return bytes(out)

    def read_into(self, url: str, offset: int, views: Sequence[memoryview]) -> None:
        wanted: list[tuple[int, memoryview]] = []
        for view in views:
            steps = range(0, len(view), LARGEST)
            wanted += [(offset + at, view[at : at + LARGEST]) for at in steps]
            offset += len(view)
        fsspec.asyn.sync(self._fs.loop, self._fetch_all, url, wanted)

    def read_runs(self, url: str, offsets: Sequence[int], nbytes: int, view: memoryview) -> None:
        requests = list(coalesced(offsets, nbytes))
        buffers = [memoryview(bytearray(r.nbytes)) for r in requests]
        wanted = [(r.offset, buffer) for r, buffer in zip(requests, buffers, strict=True)]
        fsspec.asyn.sync(self._fs.loop, self._fetch_all, url, wanted)
        for request, buffer in zip(requests, buffers, strict=True):
            for run in request.runs:
                low = offsets[run] - request.offset
                view[run * nbytes : (run + 1) * nbytes] = buffer[low : low + nbytes]

    def claim(self, url: str, content: bytes) -> bool:
        """Conditional where the server honours it; elsewhere the last of two writers holds it."""
        try:
            self._run(
                "claim",
                url,
                lambda c: c.put_object(**_address(url), Body=content, IfNoneMatch="*"),
            )
        except StorageError as error:
            if _code(error.__cause__) not in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise
            # Ours after all, if the answer to an earlier try was lost.
        try:
            return self.read(url, 0, self.size(url)) == content
        except MissingError:
            return False

    def put(self, url: str, content: bytes, mode: int | None = None) -> None:
        del mode  # objects have none
        self._run("put", url, lambda c: c.put_object(**_address(url), Body=content))

    def delete(self, url: str) -> None:
        key = _address(url)["Key"]
        for found in self._pages(url, key):
            for entry in found.get("Contents", ()):
                if entry["Key"] == key or entry["Key"].startswith(f"{key}/"):
                    one = {"Bucket": _address(url)["Bucket"], "Key": entry["Key"]}
                    self._run("delete", url, partial(_delete, one))

    def remove_empty(self, url: str) -> None:
        """Nothing: a directory is no more than the names of its objects."""

    def mode(self, url: str) -> int | None:
        """Nothing: objects have no permissions of this kind."""

    def free(self, url: str) -> int | None:
        """Nobody knows."""

    def close(self) -> None:
        """Nothing: connections are shared and end with the process."""

    def upload(self, url: str) -> Upload:
        answer = self._run("begin", url, lambda c: c.create_multipart_upload(**_address(url)))
        return S3Upload(self, url, answer["UploadId"])

    def _listed(self, url: str) -> tuple[dict[str, int], list[str]]:
        """Objects directly under ``url`` with their sizes, and the names of what is deeper."""
        key = _address(url)["Key"]
        prefix = f"{key}/" if key else ""
        files: dict[str, int] = {}
        directories: list[str] = []
        for found in self._pages(url, prefix, Delimiter="/"):
            for entry in found.get("Contents", ()):
                if entry["Key"] != prefix:
                    files[entry["Key"].removeprefix(prefix)] = int(entry["Size"])
            deeper = found.get("CommonPrefixes", ())
            directories += [e["Prefix"].removeprefix(prefix).rstrip("/") for e in deeper]
        return files, directories

    def _pages(self, url: str, prefix: str, **more: str) -> Iterator[Any]:
        """The pages of a listing."""
        wanted = {"Bucket": _address(url)["Bucket"], "Prefix": prefix, **more}
        while True:
            page = self._run("list", url, partial(_list, wanted))
            yield page
            if not page.get("IsTruncated"):
                return
            wanted["ContinuationToken"] = page["NextContinuationToken"]

    async def _fetch_all(self, url: str, wanted: Sequence[tuple[int, memoryview]]) -> None:
        await asyncio.gather(*(self._fetch(url, offset, view) for offset, view in wanted))

    async def _fetch(self, url: str, offset: int, view: memoryview) -> None:
        """One range, begun again from where it broke off."""
        if not len(view):
            return
        done = 0
        same: dict[str, str] = {}

        async def attempt(client: Any) -> None:
            nonlocal done
            span = f"bytes={offset + done}-{offset + len(view) - 1}"
            answer = await client.get_object(**_address(url), Range=span, **same)
            if done == 0 and answer.get("ETag"):
                # What comes in several tries must come from one object.
                same["IfMatch"] = answer["ETag"]
            if answer["ContentLength"] > len(view) - done:
                answer["Body"].close()
                raise StorageError(
                    f"read {url}: the server sent {answer['ContentLength']} bytes for the "
                    f"{len(view) - done} of {span}; it must support ranges"
                )
            async with answer["Body"] as body:
                while piece := await body.read(_PIECE):
                    view[done : done + len(piece)] = piece
                    done += len(piece)
            if done < len(view):
                total = int(answer.get("ContentRange", "/0").rpartition("/")[2] or 0)
                if total < offset + len(view):
                    raise CorruptError(
                        f"{url}: ends at byte {total}, expected at least {offset + len(view)}; it "
                        "was cut short: fetch or write it again"
                    )
                raise ConnectionError(f"{done} of {len(view)} bytes came")

        await self._persist("read", url, attempt)

    def _run(self, operation: str, url: str, call: Callable[[Any], Awaitable[Any]]) -> Any:
        return fsspec.asyn.sync(self._fs.loop, self._persist, operation, url, call)

    async def _persist(
        self, operation: str, url: str, call: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        async def attempt() -> Any:
            return await call(await self._fs.set_session())

        try:
            return await persist(f"{operation} {url}", attempt, _passing)
        except botocore.exceptions.ClientError as error:
            if _code(error) in ("404", "NoSuchKey", "NoSuchBucket", "NotFound"):
                kind = "bucket" if _code(error) == "NoSuchBucket" else "object"
                raise MissingError(f"{url}: no such {kind}") from error
            if _code(error) == "PreconditionFailed" and operation == "read":
                raise CorruptError(f"{url}: was replaced while it was read; try again") from error
            if _code(error) in ("416", "InvalidRange"):
                raise CorruptError(
                    f"{url}: ends before the bytes that are wanted; it was cut short: fetch or write "
                    "it again"
                ) from error
            raise StorageError(f"{operation} {url}: {error}") from error
        except botocore.exceptions.BotoCoreError as error:
            raise StorageError(f"{operation} {url}: {error}") from error


class S3Upload:
    """A multipart upload."""

    def __init__(self, store: S3Store, url: str, upload_id: str) -> None:
        self._store, self._url, self._id = store, url, upload_id
        self._tags: dict[int, str] = {}
        self._sizes: dict[int, int] = {}

    def put(self, number: int, offset: int, view: memoryview) -> None:
        answer = self._store._run(  # noqa: SLF001 - one class in two parts
            f"upload part {number} of",
            self._url,
            lambda c: c.upload_part(
                **_address(self._url), UploadId=self._id, PartNumber=number, Body=bytes(view)
            ),
        )
        self._tags[number] = answer["ETag"]
        self._sizes[number] = len(view)

    def complete(self) -> None:
        parts = [{"PartNumber": n, "ETag": tag} for n, tag in sorted(self._tags.items())]
        try:
            self._store._run(  # noqa: SLF001
                "complete",
                self._url,
                lambda c: c.complete_multipart_upload(
                    **_address(self._url), UploadId=self._id, MultipartUpload={"Parts": parts}
                ),
            )
        except StorageError as error:
            # An earlier try may have done it and its answer been lost.
            if _code(error.__cause__) != "NoSuchUpload" or not self._exists():
                raise

    def _exists(self) -> bool:
        try:
            return self._store.size(self._url) == sum(self._sizes.values())
        except MissingError:
            return False

    def abort(self) -> None:
        try:
            self._store._run(  # noqa: SLF001
                "abort",
                self._url,
                lambda c: c.abort_multipart_upload(**_address(self._url), UploadId=self._id),
            )
        except StorageError as error:
            if _code(error.__cause__) != "NoSuchUpload":
                raise


async def _list(wanted: Mapping[str, str], client: Any) -> Any:
    return await client.list_objects_v2(**wanted)


async def _delete(wanted: Mapping[str, str], client: Any) -> Any:
    return await client.delete_object(**wanted)


def _address(url: str) -> dict[str, str]:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": key}


def _code(error: BaseException | None) -> str:
    if not isinstance(error, botocore.exceptions.ClientError):
        return ""
    return str(error.response.get("Error", {}).get("Code", ""))


def _passing(error: BaseException) -> bool:
    """Server faults and broken connections pass; what the server refuses does not."""
    if isinstance(error, botocore.exceptions.ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return status >= 500 or status == 429 or _code(error) in _THROTTLED
    return isinstance(error, _BROKEN)
