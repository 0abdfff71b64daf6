"""GGUF files, by gguf's own writer; and by hand, for those that it would not write."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quantize

ENCODED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # what gguf can encode; of the others it decodes only
SHAPED = "comfy.gguf.orig_shape."


def write(
    path: Path,
    tensors: Mapping[str, tuple[np.ndarray, str]],
    architecture: str | None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    **values: int | str,
) -> None:
    """`tensors`: float32 values and the type to encode them in, or uint8 bytes by rows that are of that type.
    `shapes`: what ComfyUI's converter says of convolutions."""
    writer = GGUFWriter(path, architecture or "")
    if architecture is None:
        writer.kv_data[0].clear()
    for name, shape in (shapes or {}).items():
        writer.add_array(SHAPED + name, list(shape))
    if "general__alignment" in values:
        writer.add_custom_alignment(int(values.pop("general__alignment")))
    for key, value in values.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key.replace("__", "."), value)
    for name, (array, type) in tensors.items():
        kind = GGMLQuantizationType[type]
        raw = array if array.dtype == np.uint8 else quantize(array, kind)
        writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fitting(values: np.ndarray, type: str) -> str:
    """`type`, or F32 where a row of the values is no whole number of its blocks, or there is one row only."""
    size = GGML_QUANT_SIZES[GGMLQuantizationType[type]][0]
    return type if values.ndim == 2 and values.shape[-1] % size == 0 else "F32"


# By hand


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def array(name: str, kind: int, count: int, value: bytes = b"") -> bytes:
    return key(name, 9, struct.pack("<IQ", kind, count) + value)


def info(name: str | bytes, dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    """Of one tensor; `dims` as they are written, that of a row first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw(
    keys: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
    magic: bytes = b"GGUF",
) -> bytes:
    tensors, count = counts or (len(infos), len(keys))
    head = magic + struct.pack("<IQQ", version, tensors, count) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data if infos or data else head


def random_blocks(type: str, rows: int, width: int, seed: int) -> np.ndarray:
    """Bytes [rows, bytes of a row] with random codes whose float16 scales are finite: of every size, zeros, subnormal
    ones and negative ones among them."""
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * width // values, size), dtype=np.uint8)
    for at in HALVES[type]:
        scales = rng.standard_normal(len(blocks)) * np.exp(rng.uniform(-20, 6, len(blocks)))
        scales[rng.random(len(blocks)) < 0.1] = 0
        blocks[:, at : at + 2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


HALVES: dict[str, Any] = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,),
}  # fmt: skip
"""Where the float16 numbers are in a block of each type."""
