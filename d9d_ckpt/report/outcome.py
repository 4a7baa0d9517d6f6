"""Plans, conversions, verifications and differences, as text."""

from collections.abc import Mapping
from typing import Any

from d9d_ckpt.tensors import format_bytes

_SHOWN = 16


def converted(r: Mapping[str, Any]) -> str:
    """The last lines of a convert or reshard."""
    rate = r["bytes_written"] / max(r["seconds"], 1e-9)
    summary = (
        f"wrote {r['tensors']:,} tensors, {format_bytes(r['bytes_written'])}, to {r['destination']} "
        f"({r['format']}) in {r['seconds']:.1f} s: {format_bytes(rate)}/s, {r['ranks']} processes, "
        f"peak {format_bytes(r['peak_rss'])} each"
    )
    lines = [summary]
    if r["dtypes_in"] != r["dtypes_out"]:
        lines.append(f"dtypes: {_sizes(r['dtypes_in'])} -> {_sizes(r['dtypes_out'])}")
    lines.extend(_listed("kept in their dtype", r["kept_fp32"]))
    lines.extend(_listed("dropped by rule", r["dropped"]))
    lines.extend(f"note: {note}" for note in r["notes"])
    return "\n".join(lines)


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(n)}" for name, n in sizes.items())


def _listed(what: str, names: Any) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"]


def planned(r: Mapping[str, Any]) -> str:
    """A plan as a table of its ranks."""
    summary = (
        f"{r['tensors']:,} tensors, {r['copies']:,} copies; reads {format_bytes(r['bytes_read'])} of "
        f"{format_bytes(r['bytes_source'])}, amplification {r['read_amplification']:.4f}; planned in "
        f"{r['seconds_to_plan']:.2f} s"
    )
    lines = [
        summary,
        f"{'rank':>6} {'reads':>12} {'writes':>12} {'requests':>10} {'buffers':>10}",
    ]
    ranks = r["ranks"]
    shown = ranks if len(ranks) <= 2 * _SHOWN else [*ranks[:_SHOWN], None, *ranks[-_SHOWN:]]
    for rank in shown:
        if rank is None:
            lines.append(f"{'...':>6}")
            continue
        lines.append(
            f"{rank['rank']:>6} {format_bytes(rank['bytes_read']):>12} "
            f"{format_bytes(rank['bytes_written']):>12} {rank['requests']:>10,} "
            f"{format_bytes(rank['buffer_bytes']):>10}"
        )
    return "\n".join(lines)


def verified(r: Mapping[str, Any]) -> str:
    """What verify has found."""
    if r["reason"]:
        return f"not verified: {r['reason']}"
    if r["ok"]:
        return f"ok: {r['chunks']:,} chunks, {format_bytes(r['bytes'])}"
    lines = [f"damaged: {len(r['damaged'])} blocks or headers"]
    lines.extend(
        f"  {d['file']}: {d['tensor'] or 'header or file'}: expected {d['expected']}, found {d['found']}"
        for d in r["damaged"]
    )
    return "\n".join(lines)


def compared(r: Mapping[str, Any]) -> str:
    """What diff has found."""
    if r["equal"]:
        return "equal"
    lines = [f"only in A: {name}" for name in r["only_in_a"]]
    lines += [f"only in B: {name}" for name in r["only_in_b"]]
    for d in r["different"]:
        what = d["detail"] or f"{d['count']:,} elements, by up to {d['max_abs']:g}"
        lines.append(f"differs: {d['name']}: {what}")
    return "\n".join(lines)
