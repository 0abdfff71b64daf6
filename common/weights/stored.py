"""What the header of a weight file says, of whichever format it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.base.shape import Shape

MAX_DIM = 2**31 - 1  # frameworks hold a dimension in 32 bits
MAX_BITS = 2**63  # of one tensor, counting empty dimensions as 1, so that no product wraps
MAX_NAME = 512  # characters


class Stored(NamedTuple):
    """One tensor as stored; `begin` and `end` are byte offsets in the file."""

    dtype: str
    shape: Shape
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a file holds, in the order of the data, and the file, still open."""

    file: OpenFile
    tensors: dict[str, Stored]
    metadata: dict[str, str]
    format: Literal["safetensors", "GGUF"]
