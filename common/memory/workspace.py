"""What the kernels of a backend take on a kind of device beside the arrays that the networks name."""

from __future__ import annotations

from dataclasses import dataclass

from qwenimg.common.weights.streaming import Moved


@dataclass(frozen=True, kw_only=True)
class Workspace:
    score_bytes: int  # most bytes of attention's scores, and what is made of them, at once; 0: a kernel holds none
    conv_inputs: float  # of a convolution in a VAE, how often what it takes is in memory at its peak,
    conv_outputs: float  # and what it makes
    decoded: float  # how often a weight in codes is in memory as it is decoded
    kept: int = 0  # most bytes of packed matrices that the library of products keeps
    moved: Moved = None  # how streamed blocks are read ahead
