"""Frequencies of RoPE in language models, also scaled for texts longer than those of their training."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Frequencies = NDArray[np.float64]


class RopeScaling(NamedTuple):
    """kind: default, linear, llama3 or yarn; original: tokens of a text in training; low and high: of llama3, the
    factors of frequencies, of yarn, the rotations within a text (beta_slow and beta_fast), between which the scaling
    begins; attention: the factor of the tables."""

    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 1.0
    attention: float = 1.0


DEFAULT = RopeScaling()


def frequencies(theta: float, head_dim: int, scaling: RopeScaling = DEFAULT) -> Frequencies:
    """Return the frequencies of the pairs of a head's channels [D/2]."""
    base = np.array([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    scaled: Frequencies = _SCALED[scaling.kind](base, theta, scaling)
    return scaled


def yarn_attention(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Return the factor of the tables that yarn has where a file states none (B. Peng et al., "YaRN", 2023)."""

    def longer(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1

    return longer(mscale) / longer(mscale_all_dim) if mscale and mscale_all_dim else longer(1)


def _linear(base: Frequencies, theta: float, scaling: RopeScaling) -> Frequencies:
    """S. Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation", 2023."""
    return base / scaling.factor


def _llama3(base: Frequencies, theta: float, scaling: RopeScaling) -> Frequencies:
    """Long waves are scaled, short ones are not, and those between in part (Llama 3.1)."""
    waves = scaling.original * base / (2 * math.pi)  # within a text of the training
    share = np.clip((waves - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return (1 - share) * base / scaling.factor + share * base


def _yarn(base: Frequencies, theta: float, scaling: RopeScaling) -> Frequencies:
    """Interpolation by parts: B. Peng et al., "YaRN", 2023."""
    dim = 2 * len(base)

    def place(rotations: float) -> float:
        return dim * math.log(scaling.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = max(math.floor(place(scaling.high)), 0), min(math.ceil(place(scaling.low)), dim - 1)
    share = np.clip((np.arange(len(base)) - first) / max(last - first, 1e-3), 0, 1)
    return share * base / scaling.factor + (1 - share) * base


_SCALED = {"default": lambda base, theta, scaling: base, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
KINDS = ("default", "linear", "llama3", "yarn")
