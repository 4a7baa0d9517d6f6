"""Names as long as a file system takes them."""

import os

import pytest
from helpers.checkpoints import convert, everything, model, write_model

from d9d_ckpt.errors import StorageError
from d9d_ckpt.storage.local import LocalStore

LONG = ["a" * 250 + ".json", "模" * 83 + ".json", "b" * 242 + ".jinja"]


@pytest.mark.parametrize("name", LONG)
def test_a_small_file_of_the_longest_name_is_put_whole(tmp_path, name):
    store = LocalStore()
    for content in (b"1", b"two"):
        store.put(f"{tmp_path}/{name}", content)
        assert everything(tmp_path) == {name: content}


def test_what_a_put_leaves_when_it_fails_has_a_name_of_ours(tmp_path, monkeypatch):
    def full(*_):
        raise StorageError("disk full")

    monkeypatch.setattr(LocalStore, "publish", full)
    with pytest.raises(StorageError, match="disk full"):
        LocalStore().put(f"{tmp_path}/{LONG[0]}", b"1")
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".d9d-")
    assert left.endswith(".tmp")


@pytest.mark.parametrize("to", [("huggingface",), ("sharded", "--layout", "tp=2")])
def test_small_files_of_the_longest_names_go_along(tmp_path, to):
    src = write_model(tmp_path / "src", model("llama"))
    for name in LONG:
        (src / name).write_text(name)
    convert(src, tmp_path / "dst", *to)
    assert {n: (tmp_path / "dst" / n).read_text() for n in LONG} == {n: n for n in LONG}
