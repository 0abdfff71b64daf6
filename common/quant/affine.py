"""Weights quantized to 2 to 8 bits in MLX's format: codes, and a scale and a bias for each group of a row.

W [out in] is three tensors: `weight` U32 [out, in * bits / 32], whose rows are strings of bits, little endian, the
first code in the lowest; `scales` and `biases` [out, in / group]. A value is float32(code) * float32(scale) +
float32(bias), rounded once to the dtype that is asked for. (MLX's own `dequantize` rounds twice, in the dtype of the
scales.)

With a rotation, which MLX's format does not have, these are the values of W R (`rotated`), and a tensor `rotation`, U32
[1], has its group. A layer rotates its input instead of decoding W, since x W^T = (x R) (W R)^T.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qwenimg.common.base.shape import Shape
from qwenimg.common.formats.arrays import empty
from qwenimg.common.quant.bits import widened
from qwenimg.common.quant.quantized_tensor import QuantizedTensor, QuantStorage, pack, unpack
from qwenimg.common.quant.rotated import rotated

if TYPE_CHECKING:
    import numpy as np

    from qwenimg.common.formats.stored import TensorSlice

WIDTHS = (2, 3, 4, 5, 6, 8)  # bits
GROUPS = (32, 64, 128)
VALUES = 1 << 18  # values that are quantized at once
# Rounds of fitting scale and bias to the codes by least squares and choosing the codes anew, by bits: Lloyd's method
# (https://doi.org/10.1109/TIT.1982.1056489) for levels at equal distances. From 6 bits on it gains little. It starts at
# codes with a zero among them, and ends near them: a search from many starts is closer to Gaussian weights by another
# 4 %, but a quarter worse where small weights meet large activations.
REFITS = {2: 2, 3: 2, 4: 2, 5: 2}


class Affine(NamedTuple):
    """Affine quantization in `bits` bits; each `group` of values along a row shares a scale and a bias. rotation: the
    size of the groups in which rows were rotated before, 0 for none."""

    bits: int
    group: int
    rotation: int = 0

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors stored with the codes."""
        return ("scales", "biases")

    def shape(self, pieces: Sequence[TensorSlice]) -> Shape:
        *rows, words = pieces[0].shape
        return (*rows, words * 32 // self.bits)

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the float32 values of codes [out words], scales and biases [out groups]."""
        import numpy as np

        codes, scales, biases = arrays
        values = unpack(codes, self.bits).astype(np.float32)
        grouped = values.reshape(*scales.shape, self.group)
        with np.errstate(over="ignore", invalid="ignore"):  # a later check refuses values that are not finite
            grouped *= widened(scales)[..., None]
            grouped += widened(biases)[..., None]
            return rotated(values, self.rotation) if self.rotation else values

    def storage(self, pieces: Sequence[TensorSlice]) -> QuantStorage[Affine]:
        return QuantStorage(self, 4 if pieces[1].dtype == "F32" else 2)

    def quantized_tensor(self, arrays: Sequence[np.ndarray], shape: Shape) -> QuantizedTensor:
        codes, scales, biases = arrays
        if scales.dtype == "u2":  # the bits of bfloat16, which numpy lacks
            scales, biases = widened(scales), widened(biases)
        return QuantizedTensor(codes, scales, biases)

    def fits(self, shape: Shape) -> bool:
        """Return whether a weight of this shape can be quantized: a matrix whose rows divide into groups."""
        return len(shape) == 2 and shape[1] % self.group == 0 and not (self.rotation and shape[1] % self.rotation)

    def nbytes(self, shape: Shape, scale: int = 2) -> int:
        """Return the bytes of a weight with scales and biases of `scale` bytes each."""
        rows, width = shape
        return rows * (width * self.bits // 8 + width // self.group * 2 * scale)


# In 4 bits a rotation gains 2 dB and more, in 6 less than one (docs/measured/weights.md).
BITS8, BITS6, BITS4 = Affine(8, 64), Affine(6, 64), Affine(4, 32, rotation=16)


def exact16(weight: QuantizedTensor) -> QuantizedTensor:
    """Return the weight with float16 scales and biases if that changes no value, else the weight as it is."""
    import numpy as np

    if weight.biases is None:
        return weight
    with np.errstate(over="ignore"):
        scales, biases = (part.astype(np.float16) for part in (weight.scales, weight.biases))
    same = np.array_equal(scales, weight.scales) and np.array_equal(biases, weight.biases)
    return QuantizedTensor(weight.codes, scales, biases) if same else weight


def of_widths(width: int, words: int, groups: int) -> Affine | None:
    """Return the only code with which rows of `width` values take this many words and groups, or None."""
    if not (width > 0 and words > 0 and groups > 0) or 32 * words % width or width % groups:
        return None
    code = Affine(32 * words // width, width // groups)
    return code if code.bits in WIDTHS and code.group in GROUPS else None


def encode(parts: Iterable[np.ndarray], shape: Shape, code: Affine) -> QuantizedTensor:
    """Quantize a weight of `shape`, whose rows come in `parts` (`plan.parts`), in float32.

    The codes follow from each group's least and largest value, as in MLX's `quantize`; in few bits (REFITS) they come
    closer to the values.
    """
    import numpy as np

    height, width = shape
    groups = (height, width // code.group)
    result = QuantizedTensor(
        empty((height, width * code.bits // 32), "<u4"), np.empty(groups, np.float32), np.empty(groups, np.float32)
    )
    at, step = 0, max(1, VALUES // max(1, width))
    for part in parts:
        for start in range(0, len(part), step):
            values = widened(np.ascontiguousarray(part[start : start + step]))
            with np.errstate(over="ignore", invalid="ignore"):  # scales or biases are not finite then
                coded = _encode(rotated(values, code.rotation) if code.rotation else values, code)
            for whole, part_of_it in zip(result.arrays, coded.arrays, strict=True):
                whole[at : at + len(values)] = part_of_it
            at += len(values)
    assert at == height
    return _narrow(result)


def _encode(values: np.ndarray, code: Affine) -> QuantizedTensor:
    """Quantize rows of values. The sign of the scale puts the group's value of largest size on a code, so that it is
    exact."""
    import numpy as np

    grouped = values.reshape(-1, code.group).T.copy()  # [group n]: one pass serves all groups
    most = np.float32(2**code.bits - 1)
    low, high = grouped.min(0), grouped.max(0)
    below = np.abs(low) > np.abs(high)
    scales = np.maximum((high - low) / most, np.float32(1e-7))
    scales = np.where(below, scales, -scales)
    edge = np.where(below, low, high)
    at = np.rint(edge / scales)
    on = at != 0
    scales = np.where(on, edge / np.where(on, at, np.float32(1)), scales)
    biases = np.where(on, edge, np.float32(0))
    grouped -= biases
    grouped /= scales
    codes = _nearest(grouped, most)
    for _ in range(REFITS.get(code.bits, 0)):
        factor, offset = _fit(grouped, codes)
        biases += scales * offset
        scales *= factor
        grouped -= offset
        grouped /= factor
        codes = _nearest(grouped, most)
    rows = np.ascontiguousarray(codes.T, np.uint8).reshape(values.shape)
    words = pack(rows, code.bits)
    shape = (len(values), -1)
    return QuantizedTensor(words, scales.reshape(shape), biases.reshape(shape))


def _nearest(grouped: np.ndarray, most: np.float32) -> np.ndarray:
    """Return the codes [group n] of values in units of their scale, counted from their bias."""
    import numpy as np

    codes: np.ndarray = np.rint(grouped)
    np.maximum(codes, np.float32(0), out=codes)
    np.minimum(codes, most, out=codes)
    return codes


def _fit(grouped: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return factor and offset [n] of least squares: grouped [group n] is about codes * factor + offset. Where all
    codes are equal they are 1 and 0."""
    import numpy as np

    count = np.float32(len(codes))
    middle, mean = _sum(codes) / count, _sum(grouped) / count
    spread = _sum(codes * codes) - count * middle * middle  # of whole numbers: exact
    varies = spread > 0
    factor = (_sum(codes * grouped) - count * middle * mean) / np.where(varies, spread, np.float32(1))
    factor = np.where(varies, factor, np.float32(1))
    return factor, np.where(varies, mean - factor * middle, np.float32(0))


def _sum(grouped: np.ndarray) -> np.ndarray:
    """Return the sum over the first axis, by halves: an order that no library chooses, so the same bits everywhere."""
    while len(grouped) > 1:
        half = len(grouped) // 2
        grouped = grouped[:half] + grouped[half:]
    total: np.ndarray = grouped[0]
    return total


def _narrow(weight: QuantizedTensor) -> QuantizedTensor:
    """Return the weight with float16 scales and biases, unless one overflows or one in use would be subnormal. float16
    has three bits more than bfloat16, whose scales make 8-bit weights 1.3 times worse."""
    import numpy as np

    assert weight.biases is not None
    limits = np.finfo(np.float16)
    scales = np.abs(weight.scales)
    largest = max(float(scales.max(initial=0)), float(np.abs(weight.biases).max(initial=0)))
    groups = weight.codes.reshape(*scales.shape, -1)  # a group is whole words: 32 codes or more
    least = float(scales[groups.any(-1)].min(initial=1))
    if largest <= float(limits.max) and least >= float(limits.tiny):
        return weight._replace(scales=weight.scales.astype(np.float16), biases=weight.biases.astype(np.float16))
    return weight
