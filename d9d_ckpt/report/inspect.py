"""What a checkpoint holds."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from d9d_ckpt.errors import MissingError
from d9d_ckpt.formats.base import Opened
from d9d_ckpt.tensors import format_bytes


def as_json(opened: Opened, globs: Sequence[str] = ()) -> dict[str, Any]:
    """The keys of ``inspect --json``.

    Raises:
        MissingError: A glob matches no tensor.
    """
    entries = opened.catalogue.entries
    dtypes: dict[str, int] = {}
    files = set()
    parameters = 0
    for spec, chunks in entries.values():
        nbytes = spec.nbytes
        dtypes[spec.dtype.name] = dtypes.get(spec.dtype.name, 0) + nbytes
        parameters += spec.numel
        for chunk in chunks:
            files.add(chunk.file)
    model = opened.family or (opened.config or {}).get("model_type")
    out: dict[str, Any] = {
        "url": opened.url,
        "format": opened.format,
        "model": model,
        "tensors": len(entries),
        "parameters": parameters,
        "bytes": sum(dtypes.values()),
        "dtypes": dtypes,
        "files": len(files),
        "layout": opened.layout.to_json() if opened.layout else None,
        "step": opened.step,
        "save_id": opened.save_id,
        "notes": list(opened.notes),
    }
    if globs:
        out["entries"] = [_entry(name, entries) for name in _matching(entries, globs)]
    return out


def _matching(entries: Mapping[str, Any], globs: Sequence[str]) -> list[str]:
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in entries):
            raise MissingError(f"--tensors {glob}: matches none of {len(entries)} tensors")
    return [name for name in entries if any(fnmatchcase(name, glob) for glob in globs)]


def _entry(name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    spec, chunks = entries[name]
    return {
        "name": name,
        "dtype": spec.dtype.name,
        "shape": list(spec.shape),
        "bytes": spec.nbytes,
        "chunks": len(chunks),
    }


def as_text(found: Mapping[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"{found['url']}",
        f"  format      {found['format']}" + (f", {found['model']}" if found["model"] else ""),
        f"  tensors     {found['tensors']:,} in {found['files']:,} files",
        f"  parameters  {found['parameters']:,}",
        f"  bytes       {format_bytes(found['bytes'])} ({_dtypes(found['dtypes'])})",
    ]
    if found["layout"] is not None:
        axes = ", ".join(f"{axis}={n}" for axis, n in found["layout"].items() if n != 1)
        lines.append(f"  layout      {axes or 'one rank'}")
        lines.append(f"  save        {found['save_id']}" + _step(found["step"]))
    lines.extend(f"  note        {note}" for note in found["notes"])
    for entry in found.get("entries", ()):
        pieces = f" in {entry['chunks']} chunks" if entry["chunks"] != 1 else ""
        lines.append(f"  {entry['name']}  {entry['dtype']} {entry['shape']}{pieces}")
    return "\n".join(lines)


def _step(step: int | None) -> str:
    return "" if step is None else f", step {step}"


def _dtypes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(n)}" for name, n in sizes.items())
