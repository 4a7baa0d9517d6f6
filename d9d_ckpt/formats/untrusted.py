"""What files that nobody vouches for may say: JSON, and names of other files."""

import json
import re
from typing import Any

from d9d_ckpt.errors import CorruptError
from d9d_ckpt.storage.store import Store

WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|index\.json)")
"""Names that mean weights, or the index of weights, to somebody."""

DEEPEST = 64
"""Levels of nesting: far above any config, far below where encoding it again exhausts the stack."""


def read_object(store: Store, url: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CorruptError: There is none in it.
    """
    try:
        value = parse_json(store.read(url, 0, store.size(url)))
    except ValueError as error:
        raise CorruptError(f"{url}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptError(f"{url}: not a JSON object")
    return value


def parse_json(raw: bytes, *, levels: int = DEEPEST, flat: tuple[str, ...] = ()) -> Any:
    """The value in ``raw``, which can be encoded again.

    Args:
        raw: The content of a file.
        levels: How deep it may be nested.
        flat: Keys of the object that may be large and are checked elsewhere.

    Raises:
        ValueError: Not JSON, half a character in a string, or nested too deeply.
    """
    try:
        value = json.loads(raw.decode("utf-8-sig"))
        if b"\\u" in raw:
            # Only an escape can spell half a character, which no UTF-8 file can hold.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"it is nested deeper than {levels} levels") from None
    if isinstance(value, dict):
        _check_depth([inner for key, inner in value.items() if key not in flat], levels)
    return value


def _check_depth(level: list[Any], levels: int) -> None:
    for _ in range(levels):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {levels} levels")


def may_go_along(name: str) -> bool:
    """Whether a file of this name may lie beside weights of any format and mean nothing there."""
    return is_text(name) and not name.startswith(".") and not WEIGHTS.fullmatch(name)


def is_text(name: str) -> bool:
    """Whether a file's name is UTF-8, so that it can be written down in a file of ours."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
