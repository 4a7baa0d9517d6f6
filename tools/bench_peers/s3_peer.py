"""Moves the files of a prefix of a bucket to a directory, or back, and prints the seconds it took.

    s3_peer.py {ours,raw,s3fs,boto3} {down,up} s3://BUCKET/PREFIX DIRECTORY

The server and the credentials come from the usual environment. Seconds are those of the work itself,
client and connections included, the imports of the peers not.
"""

import asyncio
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PIECE = 8 << 20
IN_FLIGHT = 16
THREADS = 4
PLAIN = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
"""No second sum over what is moved: the quickest that the clients have to offer."""


def main() -> None:
    who, way, url, directory = sys.argv[1:]
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    move: Callable[[str, str, Path], float] = PEERS[who, way]
    print(json.dumps({"seconds": move(bucket, prefix, Path(directory))}))


# -- ours --------------------------------------------------------------------------------------


def ours_down(bucket: str, prefix: str, directory: Path) -> float:
    return convert(f"s3://{bucket}/{prefix}", str(directory))


def ours_up(bucket: str, prefix: str, directory: Path) -> float:
    return convert(str(directory), f"s3://{bucket}/{prefix}")


def convert(source: str, destination: str) -> float:
    d9d_ckpt = importlib.import_module("d9d_ckpt")
    start = time.perf_counter()
    d9d_ckpt.convert(source, destination, to="sharded", layout=os.environ["BENCH_LAYOUT"])
    return time.perf_counter() - start


# -- an asynchronous client by itself ----------------------------------------------------------


def raw_down(bucket: str, prefix: str, directory: Path) -> float:
    return raw(bucket, lambda client, one: _raw_down(client, one, prefix, directory))


def raw_up(bucket: str, prefix: str, directory: Path) -> float:
    return raw(bucket, lambda client, one: _raw_up(client, one, prefix, directory))


def raw(bucket: str, work: Callable[[Any, dict[str, str]], Any]) -> float:
    session = importlib.import_module("aiobotocore.session").get_session()
    config = importlib.import_module("aiobotocore.config").AioConfig

    async def run() -> None:
        made = config(max_pool_connections=IN_FLIGHT, **PLAIN)
        async with session.create_client("s3", config=made) as client:
            await work(client, {"Bucket": bucket})

    start = time.perf_counter()
    asyncio.run(run())
    return time.perf_counter() - start


async def _raw_down(client: Any, where: dict[str, str], prefix: str, directory: Path) -> None:
    free = asyncio.Semaphore(IN_FLIGHT)

    async def fetch(fd: int, key: str, low: int, high: int) -> None:
        async with free:
            answer = await client.get_object(**where, Key=key, Range=f"bytes={low}-{high - 1}")
            async with answer["Body"] as body:
                os.pwrite(fd, await body.read(), low)

    page = await client.list_objects_v2(**where, Prefix=f"{prefix}/")
    jobs, files = [], []
    for entry in page["Contents"]:
        fd = _created(directory / entry["Key"].rpartition("/")[2], entry["Size"])
        files.append(fd)
        jobs += [fetch(fd, entry["Key"], low, high) for low, high in pieces(entry["Size"])]
    await asyncio.gather(*jobs)
    for fd in files:
        os.close(fd)


async def _raw_up(client: Any, where: dict[str, str], prefix: str, directory: Path) -> None:
    free = asyncio.Semaphore(IN_FLIGHT)

    async def send(fd: int, to: dict[str, str], number: int, low: int, high: int) -> dict[str, Any]:
        async with free:
            data = os.pread(fd, high - low, low)
            answer = await client.upload_part(**to, PartNumber=number, Body=data)
            return {"PartNumber": number, "ETag": answer["ETag"]}

    async def whole(path: Path) -> None:
        to = {**where, "Key": f"{prefix}/{path.name}"}
        to["UploadId"] = (await client.create_multipart_upload(**to))["UploadId"]
        fd = os.open(path, os.O_RDONLY)
        cuts = enumerate(pieces(path.stat().st_size), 1)
        parts = await asyncio.gather(*(send(fd, to, n, low, high) for n, (low, high) in cuts))
        os.close(fd)
        await client.complete_multipart_upload(**to, MultipartUpload={"Parts": parts})

    for path in sorted(directory.iterdir()):
        # One after the other: the server takes the parts of an object in order.
        await whole(path)


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    return ((low, min(low + PIECE, nbytes)) for low in range(0, nbytes, PIECE))


def _created(path: Path, nbytes: int) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.ftruncate(fd, nbytes)
    return fd


# -- s3fs --------------------------------------------------------------------------------------


def s3fs_down(bucket: str, prefix: str, directory: Path) -> float:
    """Ranges: whole files come in one stream each, which is slower."""
    s3fs = importlib.import_module("s3fs")
    start = time.perf_counter()
    fs = s3fs.S3FileSystem(config_kwargs=PLAIN)
    cuts = []
    for entry in fs.ls(f"{bucket}/{prefix}", detail=True):
        fd = _created(directory / entry["name"].rpartition("/")[2], entry["size"])
        cuts += [(fd, entry["name"], low, high) for low, high in pieces(entry["size"])]
    for first in range(0, len(cuts), 2 * IN_FLIGHT):
        group = cuts[first : first + 2 * IN_FLIGHT]
        _, names, lows, highs = zip(*group, strict=True)
        found = fs.cat_ranges(list(names), list(lows), list(highs), batch_size=IN_FLIGHT)
        for (fd, _, low, _), data in zip(group, found, strict=True):
            os.pwrite(fd, data, low)
    return time.perf_counter() - start


def s3fs_up(bucket: str, prefix: str, directory: Path) -> float:
    s3fs = importlib.import_module("s3fs")
    start = time.perf_counter()
    fs = s3fs.S3FileSystem(config_kwargs=PLAIN)
    names = sorted(directory.iterdir())
    to = [f"{bucket}/{prefix}/{path.name}" for path in names]
    fs.put([str(path) for path in names], to, chunksize=PIECE, max_concurrency=IN_FLIGHT)
    return time.perf_counter() - start


# -- boto3 -------------------------------------------------------------------------------------


def boto3_down(bucket: str, prefix: str, directory: Path) -> float:
    def move(client: Any, transfer: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for entry in client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]:
            to = directory / entry["Key"].rpartition("/")[2]
            client.download_file(bucket, entry["Key"], str(to), Config=transfer)

    return boto3(move)


def boto3_up(bucket: str, prefix: str, directory: Path) -> float:
    def move(client: Any, transfer: Any) -> None:
        for path in sorted(directory.iterdir()):
            client.upload_file(str(path), bucket, f"{prefix}/{path.name}", Config=transfer)

    return boto3(move)


def boto3(move: Callable[[Any, Any], None]) -> float:
    module = importlib.import_module("boto3")
    config = importlib.import_module("botocore.config").Config(**PLAIN)
    transfer = importlib.import_module("boto3.s3.transfer").TransferConfig(
        multipart_threshold=PIECE, multipart_chunksize=PIECE, max_concurrency=THREADS
    )
    start = time.perf_counter()
    move(module.client("s3", config=config), transfer)
    return time.perf_counter() - start


PEERS = {
    ("ours", "down"): ours_down,
    ("ours", "up"): ours_up,
    ("raw", "down"): raw_down,
    ("raw", "up"): raw_up,
    ("s3fs", "down"): s3fs_down,
    ("s3fs", "up"): s3fs_up,
    ("boto3", "down"): boto3_down,
    ("boto3", "up"): boto3_up,
}

if __name__ == "__main__":
    main()
