"""The steps of a run and what prune does to them, as JSON and as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from d9d_ckpt.formats.steps import Run
from d9d_ckpt.tensors import format_bytes

_SHOWN = 16


def as_json(run: Run) -> dict[str, Any]:
    """The keys of ``list --json``."""
    steps = [
        {
            "step": s.step,
            "complete": s.complete,
            "bytes": s.contents.nbytes,
            "layout": s.layout,
            "reason": s.reason,
            "name": s.name,
            "claim": s.contents.claim
            and {"host": s.contents.claim.host, "pid": s.contents.claim.pid},
        }
        for s in run.steps
    ]
    return {"url": run.url, "steps": steps, "latest": run.latest}


def listed(found: Mapping[str, Any]) -> str:
    """The steps of a run as a table."""
    if not found["steps"]:
        return f"{found['url']}: no steps"
    lines = [f"{'step':>10} {'bytes':>12}  state"]
    for s in found["steps"]:
        state = f"incomplete: {s['reason']}"
        if s["complete"]:
            state = "complete, " + _axes(s["layout"])
            state += ", latest" if s["step"] == found["latest"] else ""
        if s["claim"]:
            state += f", claimed by process {s['claim']['pid']} on {s['claim']['host'] or '?'}"
        lines.append(f"{s['step']:>10} {format_bytes(s['bytes']):>12}  {state}")
    if found["latest"] is None:
        lines.append("no whole step")
    return "\n".join(lines)


def _axes(layout: Mapping[str, Any]) -> str:
    return " ".join(f"{axis}={n}" for axis, n in layout.items() if n != 1) or "one rank"


def pruned(r: Mapping[str, Any]) -> str:
    """What has gone, or would go, and what has not."""
    lines = []
    for step in r["removed"]:
        what = ", ".join(_gathered(step["files"])) or "an empty directory"
        verb = "would delete" if r["dry_run"] else "deleted"
        lines.append(f"{verb} {step['name']}, {format_bytes(step['bytes'])}: {what}")
        if step["left"]:
            lines.append(f"  not ours, so they stay with it: {', '.join(step['left'])}")
    lines.append(f"kept {_some([str(step) for step in r['kept']]) or 'no whole step'}")
    unknown = [s["name"] for s in r["skipped"] if s["reason"] == "not a step directory"]
    lines += [
        f"skipped {s['name']}: {s['reason']}" for s in r["skipped"] if s["name"] not in unknown
    ]
    if unknown:
        lines.append(f"not steps, not touched: {_some(unknown)}")
    freed = "would be freed" if r["dry_run"] else "freed"
    lines.append(f"{format_bytes(r['bytes'])} {freed}")
    return "\n".join(lines)


def _gathered(files: Sequence[str]) -> list[str]:
    """Names; those of one directory as their number."""
    counts: dict[str, int] = {}
    for name in files:
        directory, slash, _ = name.rpartition("/")
        key = directory + slash or name
        counts[key] = counts.get(key, 0) + 1
    return [f"{key} ({n} files)" if key.endswith("/") else key for key, n in counts.items()]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
