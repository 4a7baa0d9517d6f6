"""Bytes done, rate and time left: a bar on a terminal, else a line every 10 s."""

import sys
import time

from d9d_ckpt.tensors import format_bytes

_LINE = 10.0
_BAR = 0.1
_WIDTH = 28


class Progress:
    """Watches a run and tells stderr."""

    def __init__(self) -> None:
        self._started = self._told = time.monotonic()
        self._bytes = self._chunks = 0
        self._bar = sys.stderr.isatty()

    def __call__(self, nbytes: int, ended: int, total: int, chunks: int) -> None:
        """Note ``nbytes`` more of ``total`` and ``ended`` more of ``chunks``."""
        self._bytes += nbytes
        self._chunks += ended
        now = time.monotonic()
        if now - self._told >= (_BAR if self._bar else _LINE):
            self._told = now
            self._write(now - self._started, total, chunks)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def _write(self, seconds: float, total: int, chunks: int) -> None:
        share = self._bytes / total if total else 1.0
        left = seconds / share - seconds if share else 0.0
        text = (
            f"{self._chunks:,} of {chunks:,} chunks, "
            f"{format_bytes(self._bytes)} of {format_bytes(total)}, "
            f"{format_bytes(self._bytes / max(seconds, 1e-9))}/s, {left:.0f} s left"
        )
        if self._bar:
            filled = int(share * _WIDTH)
            sys.stderr.write(
                f"\r\033[K[{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%} {text}"
            )
        else:
            sys.stderr.write(f"{share:4.0%} {text}\n")
        sys.stderr.flush()
