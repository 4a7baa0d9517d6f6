"""What a hostile pickle can make a reader hold: measured in processes of their own."""

import json
import struct
import subprocess
import sys
import zipfile

import pytest
import torch

import d9d_ckpt
from d9d_ckpt.formats.pickled import read_pickled
from d9d_ckpt.storage.local import LocalStore

PEAK = 300 << 20
MOST = 54 << 20

LOOK = """
import json, re, sys
import d9d_ckpt
from d9d_ckpt.errors import CkptError
try:
    said = f"opened {len(d9d_ckpt.open(sys.argv[1]).tensors)}"
except CkptError as error:
    said = f"{type(error).__name__}: {error}"
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(json.dumps([int(peak[1]) << 10, said]))
"""
"""The mark of the address space: that of the process begins with the peak of the one it came from."""

STORAGE = b"((\x8c\x07storagectorch\nFloatStorage\n\x8c\x010\x8c\x03cpuK\x01tQ"
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n"
    + STORAGE
    + b"K\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
)
SKIPPED = b"X" + struct.pack("<I", 4 << 20) + bytes(4 << 20)
"""A string of no interest that is long enough to earn every right a pickle can have."""


def repeated(unit, start=b"]"):
    """``start`` and then ``unit`` up to the bytes that are allowed."""
    return start + unit * ((MOST - len(start)) // len(unit))


def numbered(unit, count, start):
    """A dict of ``count`` items, each ``unit`` of its number."""
    body = bytearray(start)
    for low in range(0, count, 1000):
        body += b"(" + b"".join(unit(n) for n in range(low, low + 1000)) + b"u"
    return bytes(body)


def name(n):
    return b"\x8c\x06%06x" % n


WORST = {
    "memoised tuples": repeated(b"N\x85\x94", b"("),
    "numbers": repeated(b"(" + b"M\xff\xf0" * 1000 + b"e"),
    "strings": repeated(b"(" + b"\x8c\x02ab" * 1000 + b"e"),
    "names of one tensor": numbered(
        lambda n: name(n) + b"h\x00", 1_000_000, b"}\x8c\x01x" + TENSOR + b"q\x00s"
    ),
    "names of one tensor after a string": numbered(
        lambda n: name(n) + b"h\x00",
        1_000_000,
        b"](" + SKIPPED + b"e}\x8c\x01x" + TENSOR + b"q\x00s",
    ),
    "one dict again and again": (
        b"ccollections\nOrderedDict\nq\x02]q\x01("
        + b"".join(b"(\x8c\x04%04xNt" % n for n in range(10_000))
        + repeated(b"h\x02h\x01\x85R", b"e](")
    ),
}
"""Uncounted, each costs between 400 MiB and 4 GiB."""


def zipped(path, body):
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("a/data.pkl", b"\x80\x02" + body + b".")
        out.writestr("a/data/0", bytes(4))
    return path


def look(path):
    """Peak memory of a process that opens ``path``, and what it said."""
    argv = [sys.executable, "-c", LOOK, str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)  # noqa: S603
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", WORST)
def test_f19_a_hostile_pickle_is_refused_within_300_mib(tmp_path, kind):
    path = zipped(tmp_path / "x.bin", WORST[kind])
    peak, said = look(path)
    assert said.startswith("CorruptError: ")
    assert "objects of " in said
    assert "more than tensors take" in said
    assert peak < PEAK


def test_f19_a_string_of_wide_characters_is_skipped(tmp_path):
    text = "\N{GRINNING FACE}".encode() + b"a" * (MOST - 4)
    path = zipped(tmp_path / "x.bin", b"X" + struct.pack("<I", len(text)) + text)
    peak, said = look(path)
    assert "holds a str" in said
    assert peak < PEAK


def test_f19_a_zip_directory_of_names_alone(tmp_path):
    path = zipped(tmp_path / "x.bin", b"}")
    raw = path.read_bytes()
    at, end = raw.index(b"PK\x01\x02"), raw.rindex(b"PK\x05\x06")
    entry = raw[at : at + 46]
    count = 160_000
    more = b"".join(entry[:28] + b"\x06\0" + entry[30:] + b"%06x" % n for n in range(count))
    size = end - at + len(more)
    wide = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, *[count + 2] * 2, size, at)
    place = struct.pack("<4sLQL", b"PK\x06\x07", 0, at + size, 1)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, *[0xFFFF] * 2, *[0xFFFFFFFF] * 2, 0)
    path.write_bytes(raw[:end] + more + wide + place + last)
    peak, said = look(path)
    assert "no tensors by name" in said
    assert peak < PEAK
    path.write_bytes(raw[:end] + more + more + wide + place + last)
    assert look(path)[1].startswith("CorruptError: ")


@pytest.mark.parametrize("kind", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_f19_a_file_of_10_000_small_tensors_is_read(tmp_path, kind, protocol):
    names = [f"model.layers.{n // 100}.mlp.experts.{n % 100}.weight" for n in range(10_000)]
    weights = {name: torch.nn.Parameter(torch.tensor([[float(n)]])) for n, name in enumerate(names)}
    path = tmp_path / "x.bin"
    torch.save(weights, path, _use_new_zipfile_serialization=kind, pickle_protocol=protocol)
    store = LocalStore()
    found = read_pickled(store, str(path))
    store.close()
    assert list(found.entries) == names
    last = d9d_ckpt.open(str(path))[names[-1]].read()
    assert last.tolist() == [[9_999.0]]


def test_f19_long_strings_beside_the_tensors_are_no_trouble(tmp_path):
    value = {"model": {"w": torch.ones(3)}, "notes": "x" * 100_000, "raw": b"y" * 100_000}
    torch.save(value, tmp_path / "x.pt")
    opened = d9d_ckpt.open(str(tmp_path / "x.pt"))
    assert opened["w"].read().tolist() == [1.0] * 3
    assert "'notes' (str), 'raw' (bytes)" in " ".join(opened.opened.notes)
