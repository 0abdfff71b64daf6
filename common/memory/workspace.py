"""The memory that a backend's kernels take on a kind of device, besides the networks' arrays."""

from __future__ import annotations

from dataclasses import dataclass

from qwenimg.common.weights.streaming import Moved


@dataclass(frozen=True, kw_only=True)
class Workspace:
    score_bytes: int  # most bytes of attention's scores at once; 0: no kernel stores them
    conv_inputs: float  # copies of a convolution's input in memory at its peak, in a VAE
    conv_outputs: float  # copies of its output
    decoded: float  # copies of a quantized weight in memory while it is decoded
    kept: int = 0  # most bytes of packed matrices that the library of products keeps
    wide_inputs: bool = False  # True: convolutions in 16 bit copy their inputs in float32
    ordered: bool = False  # True: 16-bit images whose channels are last are convolved without a copy
    moved: Moved = None  # dtypes in which the backend reorders the values of convolutions: see `Moved`

    def inputs(self, itemsize: int) -> float:
        """Return the copies of a convolution's input, in the size of its values."""
        return self.conv_inputs * (4 / itemsize if self.wide_inputs and itemsize < 4 else 1)
