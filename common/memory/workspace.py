"""The memory that a backend's kernels take on a kind of device, besides the networks' arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from qwenimg.common.weights.streaming import Moved


class Values(NamedTuple):
    """Numbers of values that are kept, for each value of an array."""

    product: float  # in the dtype of products
    wide: float  # in float32

    def bytes(self, itemsize: int) -> float:
        return self.product * itemsize + 4 * self.wide


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The values that a framework keeps of a forward for the gradients, and its arrays on the way back."""

    gelu: Values  # of a GELU's input
    gated: Values  # of the results of layers of which one half, after its activation, multiplies the other
    normed: Values  # of an image in a residual block: by its second norm,
    silu: Values  # by a SiLU,
    convolved: Values  # and by a convolution
    attended: Values  # of queries, keys and values
    scores: int  # arrays of attention's scores in float32
    decoded: bool  # decoded weights of layers that learn
    arrays: Values  # of the largest array, in memory at once while gradients are computed


@dataclass(frozen=True, kw_only=True)
class Workspace:
    score_bytes: int  # most bytes of attention's scores at once; 0: no kernel stores them
    conv_inputs: float  # copies of a convolution's input in memory at its peak, in a VAE
    conv_outputs: float  # copies of its output
    decoded: float  # copies of a quantized weight in memory while it is decoded
    kept: int = 0  # most bytes of packed matrices that the library of products keeps
    wide_inputs: bool = False  # True: convolutions in 16 bit copy their inputs in float32
    int8: bool = False  # True: layers can multiply 8-bit whole numbers
    ordered: bool = False  # True: 16-bit images whose channels are last are convolved without a copy
    kept_values: Kept  # for gradients
    moved: Moved = None  # dtypes in which the backend reorders the values of convolutions: see `Moved`

    def inputs(self, itemsize: int) -> float:
        """Return the copies of a convolution's input, in the size of its values."""
        return self.conv_inputs * (4 / itemsize if self.wide_inputs and itemsize < 4 else 1)
