"""Rotary position embedding: angles of positions, for every way of stretching the context.

Frequencies follow ``modeling_rope_utils`` of transformers operation by operation, in the wider of the
compute dtype and float32, so that angles agree to the bit on one device.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from d9d_kernels import rope
from d9d_train.batch import Batch

Kind = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclass(frozen=True)
class Angles:
    """What turns queries and keys; a leaf to FSDP, which would cast bare tensors to bfloat16.

    Attributes:
        cos: [S, D/2], or [B, S, D/2] where documents are packed; each pair of channels once.
        sin: The same of sines.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the channels (i, i + D/2) of each head of ``x`` [B, S, ..., D]."""
        return rope(x, self.cos, self.sin)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding of one model.

    Attributes:
        dim: Channels of a head, an even number.
        theta: Base of the wavelengths.
        kind: How the context is stretched: not at all; by ``linear`` interpolation; ``dynamic``, which
            raises the base with the length of a token's document (NTK); ``yarn``; ``llama3``.
        factor: By how much.
        trained: Positions of pre-training; for ``dynamic`` the ones that need no stretching.
        low: llama3: wavelengths above ``trained / low`` are interpolated.
        high: llama3: wavelengths below ``trained / high`` are kept.
        beta_fast: yarn: turns within ``trained`` from which frequencies are kept.
        beta_slow: yarn: turns below which they are interpolated.
        truncate: yarn: round the channels between which the two are mixed.
        attention_factor: What cosines and sines are multiplied by.
    """

    dim: int
    theta: float
    kind: Kind = "default"
    factor: float = 1.0
    trained: int = 0
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def angles(self, batch: Batch, dtype: torch.dtype) -> Angles:
        """The angles of a batch's tokens, for activations of ``dtype``."""
        wide = torch.promote_types(dtype, torch.float32)
        positions = batch.positions if batch.packed else batch.index
        frequencies = self._frequencies(batch, wide)
        turned = positions[..., None].to(wide) * frequencies
        scale = self.attention_factor
        return Angles(turned.cos() * scale, turned.sin() * scale)

    def _frequencies(self, batch: Batch, wide: torch.dtype) -> torch.Tensor:
        """[D/2], or [..., S, D/2] where they depend on a token's document."""
        exponents = torch.arange(0, self.dim, 2, device=batch.index.device).to(wide) / self.dim
        if self.kind == "dynamic":
            return 1.0 / self._raised(batch, wide)[..., None] ** exponents
        powers = self.theta**exponents
        if self.kind == "yarn":
            return self._yarn(powers)
        plain = 1.0 / powers
        if self.kind == "linear":
            return plain / self.factor
        return self._llama3(plain) if self.kind == "llama3" else plain

    def _raised(self, batch: Batch, wide: torch.dtype) -> torch.Tensor:
        """The base at the length of each token's document: 0-D or [B, S]."""
        if batch.packed:
            length = _document_lengths(batch.starts)[:, batch.index]
        else:
            length = torch.full((), batch.starts.shape[1], device=batch.index.device)
        length = length.clamp(min=self.trained).to(wide)
        stretch = self.factor * length / self.trained - (self.factor - 1)
        return self.theta * stretch ** (self.dim / (self.dim - 2))

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        wavelengths = 2 * math.pi / plain
        longest, shortest = self.trained / self.low, self.trained / self.high
        out = torch.where(wavelengths > longest, plain / self.factor, plain)
        smooth = (self.trained / wavelengths - self.low) / (self.high - self.low)
        mixed = (1 - smooth) * out / self.factor + smooth * out
        between = (wavelengths >= shortest) & (wavelengths <= longest)
        return torch.where(between, mixed, out)

    def _yarn(self, powers: torch.Tensor) -> torch.Tensor:
        low, high = self._channel(self.beta_fast), self._channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001  # as transformers does, against a division by zero
        channels = torch.arange(self.dim // 2, device=powers.device).to(powers.dtype)
        kept = 1 - ((channels - low) / (high - low)).clamp(0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _channel(self, turns: float) -> float:
        """The channel whose pair turns so often within the positions of pre-training."""
        whole = math.log(self.trained / (turns * 2 * math.pi))
        return self.dim * whole / (2 * math.log(self.theta))


def _document_lengths(starts: torch.Tensor) -> torch.Tensor:
    """[B, T]: tokens of each token's document."""
    ends = torch.searchsorted(starts, starts, right=True)
    return ends - starts
