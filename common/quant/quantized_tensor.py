"""Quantized weights in memory, and their codes as strings of bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np


Code = TypeVar("Code", covariant=True)


class QuantStorage(NamedTuple, Generic[Code]):
    """The storage of a file's codes that stay quantized in memory."""

    code: Code
    scale: int  # bytes of a group's scale, and of its bias if it has one


class QuantizedTensor(NamedTuple):
    """A quantized weight in memory: codes U32 [out words], scales and biases [out groups], both float16 or both
    float32; or scales alone, of 8 bits."""

    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None = None

    @property
    def arrays(self) -> list[np.ndarray]:
        return [part for part in self if part is not None]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes [... n], uint8, into words [... n * bits / 32]."""
    import numpy as np

    if bits == 8:
        return codes.view("<u4")
    if 8 % bits == 0:
        parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
        raw = parts[..., 0].copy()
        for i in range(1, 8 // bits):
            raw |= parts[..., i] << np.uint8(i * bits)
        return raw.view("<u4")
    fields = np.array(codes, order="C").view("<u8")  # eight codes, whose fields are joined two by two
    slot, width = 8, bits
    while slot < 64:
        even = sum((1 << width) - 1 << at for at in range(0, 64, 2 * slot))
        odd = fields >> np.uint64(slot - width)
        odd &= np.uint64(even << width)
        fields &= np.uint64(even)
        fields |= odd
        slot, width = 2 * slot, 2 * width
    low = fields[..., None].view(np.uint8)[..., :bits]
    return np.ascontiguousarray(low).reshape(*codes.shape[:-1], -1).view("<u4")


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack words [... n * bits / 32] into codes [... n], uint8."""
    import numpy as np

    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    count, size = unit(bits)
    units, mask = raw.reshape(*raw.shape[:-1], -1, size), np.uint8(2**bits - 1)
    codes = np.empty((*units.shape[:-1], count), np.uint8)
    for i in range(count):  # each is in one byte or in two
        byte, shift = divmod(i * bits, 8)
        code = units[..., byte] >> np.uint8(shift)
        if shift + bits > 8:
            code |= units[..., byte + 1] << np.uint8(8 - shift)
        codes[..., i] = code & mask
    return codes.reshape(*raw.shape[:-1], -1)


def unit(bits: int) -> tuple[int, int]:
    """Return the smallest number of codes that fills whole bytes, and the number of bytes."""
    return {2: (4, 1), 3: (8, 3), 4: (2, 1), 5: (8, 5), 6: (4, 3)}[bits]
