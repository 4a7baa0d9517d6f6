"""The floor: two processes copy a directory's bytes and hash them on the way.

    python hashed_copy.py SRC DST

Each process reads its half of the bytes with pread into one reused buffer, takes the xxh3 of every
block and writes to files of its own (two writers of one tmpfs file serialise on its inode).
"""

import json
import os
import sys
from collections.abc import Iterator

import xxhash

BLOCK = 1 << 20
PROCESSES = 2


def main() -> None:
    src, dst = sys.argv[1:]
    os.makedirs(dst)
    files = sorted(_files(src))
    total = sum(size for _, size in files)
    bounds = [total * index // PROCESSES for index in range(PROCESSES + 1)]
    pids = []
    for index in range(PROCESSES):
        pid = os.fork()
        if pid == 0:
            _copy(files, bounds[index], bounds[index + 1], os.path.join(dst, f"part{index}"))
            os._exit(0)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    print(json.dumps({"bytes_read": total, "bytes_written": total}))
    sys.exit(int(any(statuses)))


def _files(root: str) -> Iterator[tuple[str, int]]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            yield path, os.path.getsize(path)


def _copy(files: list[tuple[str, int]], first: int, last: int, dst: str) -> None:
    """Copies bytes first to last of the files laid end to end."""
    os.makedirs(dst)
    buffer = memoryview(bytearray(BLOCK))
    sums = {}
    start = 0
    for number, (path, size) in enumerate(files):
        begin, end = max(first - start, 0), min(last - start, size)
        start += size
        if begin < end:
            sums[path] = _copy_run(path, begin, end, os.path.join(dst, f"{number:05d}"), buffer)
    with open(os.path.join(dst, "xxh3.json"), "w") as out:
        json.dump(sums, out)


def _copy_run(path: str, begin: int, end: int, target: str, buffer: memoryview) -> list[str]:
    source = os.open(path, os.O_RDONLY)
    sink = os.open(target, os.O_CREAT | os.O_WRONLY)
    hasher = xxhash.xxh3_64()
    sums = []
    position = begin
    while position < end:
        count = os.preadv(source, [buffer[: end - position]], position)
        hasher.reset()
        hasher.update(buffer[:count])
        sums.append(hasher.hexdigest())
        os.pwrite(sink, buffer[:count], position - begin)
        position += count
    os.close(source)
    os.close(sink)
    return sums


if __name__ == "__main__":
    main()
