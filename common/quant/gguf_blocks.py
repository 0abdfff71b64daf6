"""GGUF's blocks of codes: their values, and the affine codes that some of them can stay in memory as.

A tensor is blocks of 32 or 256 values, row by row. A block has a scale d, float16, and in some types a minimum. A block
of 256 has smaller groups with their own scale, and perhaps a minimum, in 4 or 6 bits. The values equal the reference's
in float32, bit for bit. Where all values of a group share one scale and one bias, a value is float32(code) * scale +
bias in exactly those bits. Such weights can stay quantized (`Affine`) without rounding, but a zero may lose its sign.

The nibbles of n bytes come in this order: all low ones, then all high ones.
(https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-quants.c)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qwenimg.common.base.shape import Shape
from qwenimg.common.formats.arrays import empty
from qwenimg.common.formats.gguf_types import named
from qwenimg.common.quant.affine import Affine, exact16
from qwenimg.common.quant.quantized_tensor import QuantizedTensor, QuantStorage, pack

if TYPE_CHECKING:
    import numpy as np

    from qwenimg.common.formats.stored import TensorSlice

CHUNK = 1 << 20  # values that are decoded at once


class Groups(NamedTuple):
    """Blocks [n bytes] split into groups: values are codes * scales + biases, or codes * scales."""

    codes: np.ndarray  # [n groups size], unsigned where there are biases
    scales: np.ndarray  # float32 [n groups]
    biases: np.ndarray | None  # float32 [n groups]


class GGUFBlocks(NamedTuple):
    """The code of a tensor of GGML's type `type`."""

    type: str

    def shape(self, pieces: Sequence[TensorSlice]) -> Shape:
        return pieces[0].shape

    def storage(self, pieces: Sequence[TensorSlice]) -> QuantStorage[Affine] | None:
        return storage_of(self.type)

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values of the bytes, float32, flat."""
        import numpy as np

        size = named(self.type)
        blocks = arrays[0].reshape(-1, size.bytes)
        values = np.empty((len(blocks), size.values), np.float32)
        step = CHUNK // values.shape[1]
        with np.errstate(over="ignore", invalid="ignore"):  # a later check refuses values that are not finite
            for start in range(0, len(blocks), step):
                codes, scales, biases = READERS[self.type](blocks[start : start + step])
                grouped = values[start : start + step].reshape(codes.shape)
                np.multiply(codes, scales[..., None], out=grouped, dtype=np.float32)
                if biases is not None:
                    grouped += biases[..., None]
        return values.reshape(-1)

    def quantized_tensor(self, arrays: Sequence[np.ndarray], shape: Shape) -> QuantizedTensor:
        """Return a weight [out in] in the affine code of its storage, with the same values."""
        import numpy as np

        storage, size = storage_of(self.type), named(self.type)
        assert storage is not None
        code, blocks = storage.code, arrays[0].reshape(-1, size.bytes)
        step, groups = CHUNK // size.values, size.values // code.group  # of a block
        words = empty((len(blocks) * groups, code.group * code.bits // 32), "<u4")
        scales, biases = (np.empty((len(blocks), groups), np.float32) for _ in range(2))
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(blocks), step):
                part = slice(start, start + step)
                codes, scales[part], biases[part] = _unsigned(READERS[self.type](blocks[part]), code.bits)
                words[start * groups : (start + step) * groups] = pack(codes.reshape(-1, code.group), code.bits)
        by_rows = (words, scales, biases)
        return exact16(QuantizedTensor(*(part.reshape(shape[0], -1) for part in by_rows)))


def _unsigned(groups: Groups, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return unsigned codes, scales and biases. Signed codes are moved up by half of their range, which the bias
    takes back."""
    import numpy as np

    codes, scales, biases = groups
    if biases is None:
        half = 1 << (bits - 1)
        return codes.view(np.uint8) + np.uint8(half), scales, scales * np.float32(-half)  # modulo 256
    return codes, scales, biases


# Types


def _halves(raw: np.ndarray) -> np.ndarray:
    """Return pairs of bytes, which are float16, as float32."""
    import numpy as np

    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _fields(blocks: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Split the columns of `blocks` into runs of these sizes in bytes, and the rest."""
    import numpy as np

    return np.split(blocks, np.cumsum(sizes), axis=1)


def _bits(raw: np.ndarray, width: int, run: int) -> np.ndarray:
    """Return the codes [n, bytes * 8 / width] of `width` bits as uint8: of each `run` bytes all lowest codes, then
    all next ones."""
    import numpy as np

    raw, count = np.ascontiguousarray(raw), 8 // width
    codes = np.empty((len(raw), raw.shape[1] // run, count, run), np.uint8)
    for i in range(count):
        part = raw >> np.uint8(i * width)
        part &= np.uint8(2**width - 1)
        codes[:, :, i] = part.reshape(len(raw), -1, run)
    return codes.reshape(len(raw), -1)


def _signed(codes: np.ndarray, half: int) -> np.ndarray:
    import numpy as np

    return codes.astype(np.int8) - np.int8(half)


def _q8_0(blocks: np.ndarray) -> Groups:
    d, codes = _fields(blocks, 2)
    return Groups(codes.view("i1")[:, None], _halves(d), None)


def _q4_0(blocks: np.ndarray) -> Groups:
    d, codes = _fields(blocks, 2)
    return Groups(_signed(_bits(codes, 4, 16), 8)[:, None], _halves(d), None)


def _q4_1(blocks: np.ndarray) -> Groups:
    d, low, codes = _fields(blocks, 2, 2)
    return Groups(_bits(codes, 4, 16)[:, None], _halves(d), _halves(low))


def _q5_0(blocks: np.ndarray) -> Groups:
    d, high, codes = _fields(blocks, 2, 4)
    return Groups(_signed(_five(codes, high), 16)[:, None], _halves(d), None)


def _q5_1(blocks: np.ndarray) -> Groups:
    d, low, high, codes = _fields(blocks, 2, 2, 4)
    return Groups(_five(codes, high)[:, None], _halves(d), _halves(low))


def _five(codes: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return 32 codes of 5 bits: 4 bits of each, and the fifth of each in bit i for value i."""
    import numpy as np

    joined: np.ndarray = _bits(codes, 4, 16) | np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return joined


_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_nl(blocks: np.ndarray) -> Groups:
    """Read codes of values that lie closer to each other near zero."""
    import numpy as np

    d, codes = _fields(blocks, 2)
    return Groups(np.array(_IQ4_NL, np.int8)[_bits(codes, 4, 16)][:, None], _halves(d), None)


def _iq4_xs(blocks: np.ndarray) -> Groups:
    """Read the codes of IQ4_NL in 8 groups of 32. A group's scale has 2 bits in `high` and 4 in `low`, group by
    group."""
    import numpy as np

    d, high, low, codes = _fields(blocks, 2, 2, 4)
    scales = _signed(_bits(low, 4, 1) | _bits(high, 2, 1) << np.uint8(4), 32)
    values = np.array(_IQ4_NL, np.int8)[_bits(codes, 4, 16)]
    return Groups(values.reshape(-1, 8, 32), _halves(d) * scales.astype(np.float32), None)


def _q2_k(blocks: np.ndarray) -> Groups:
    """Read 16 groups of 16. The low nibble of a byte is the group's scale, the high one its minimum."""
    import numpy as np

    both, codes, d, low = _fields(blocks, 16, 64, 2)
    scales = _halves(d) * (both & np.uint8(15)).astype(np.float32)
    biases = -(_halves(low) * (both >> np.uint8(4)).astype(np.float32))
    return Groups(_bits(codes, 2, 32).reshape(-1, 16, 16), scales, biases)


def _q3_k(blocks: np.ndarray) -> Groups:
    """Read 16 groups of 16. The third bit of a code lies apart, and stands for -4 if it is not set."""
    import numpy as np

    high, codes, raw, d = _fields(blocks, 32, 64, 12)
    low, top = _fields(raw, 8)
    scales = _signed(_bits(low, 4, 8) | _bits(top, 2, 4) << np.uint8(4), 32)
    signed = _bits(codes, 2, 32).view("i1") - ((_bits(high, 1, 32) ^ np.uint8(1)) << np.uint8(2)).view("i1")
    return Groups(signed.reshape(-1, 16, 16), _halves(d) * scales.astype(np.float32), None)


def _q4_k(blocks: np.ndarray) -> Groups:
    head, codes = _fields(blocks, 16)
    return Groups(_bits(codes, 4, 32).reshape(-1, 8, 32), *_eight(head))


def _q5_k(blocks: np.ndarray) -> Groups:
    import numpy as np

    head, high, codes = _fields(blocks, 16, 32)
    whole = _bits(codes, 4, 32) | _bits(high, 1, 32) << np.uint8(4)
    return Groups(whole.reshape(-1, 8, 32), *_eight(head))


def _eight(head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and biases of 8 groups, of 6 bits each. The first four have theirs in the low bits of a byte
    each. The last four have the low 4 bits in a nibble, and the high 2 in the high bits of the first four's bytes."""
    import numpy as np

    d, low, scales, minima, both = _fields(head, 2, 2, 4, 4)
    scale_high, minimum_high = (part >> np.uint8(2) & np.uint8(48) for part in (scales, minima))
    scale = np.concatenate([scales & np.uint8(63), both & np.uint8(15) | scale_high], axis=1)
    minimum = np.concatenate([minima & np.uint8(63), both >> np.uint8(4) | minimum_high], axis=1)
    return _halves(d) * scale.astype(np.float32), -(_halves(low) * minimum.astype(np.float32))


def _q6_k(blocks: np.ndarray) -> Groups:
    """Read 16 groups of 16 with scales of 8 bits."""
    import numpy as np

    low, high, scales, d = _fields(blocks, 128, 64, 16)
    codes = _signed(_bits(low, 4, 64) | _bits(high, 2, 32) << np.uint8(4), 32)
    return Groups(codes.reshape(-1, 16, 16), _halves(d) * scales.view("i1").astype(np.float32), None)


READERS: dict[str, Callable[[np.ndarray], Groups]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip

# Types whose groups are as long as `Affine`'s: bits of a code, and bytes of a group's scale and of its bias. In blocks
# of 256 the scales are products, which need float32.
STORAGE = {
    "Q8_0": (8, 2), "Q4_0": (4, 2), "Q4_1": (4, 2), "Q5_0": (5, 2), "Q5_1": (5, 2), "Q4_K": (4, 4), "Q5_K": (5, 4),
}  # fmt: skip


def storage_of(type: str) -> QuantStorage[Affine] | None:
    """Return the storage in which blocks of this type stay quantized, or None if they are decoded."""
    if type not in STORAGE:
        return None
    bits, scale = STORAGE[type]
    return QuantStorage(Affine(bits, 32), scale)
