"""The error for a weight that is not finite, in its file or in the dtype of its storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean

if TYPE_CHECKING:
    from qwenimg.common.weights.plan import Entry


def not_finite(entry: Entry, count: int, largest: float, dtype: object) -> ModelError:
    """Return the error for `entry`, which has `count` values that are not finite in its file, or reaches `largest`,
    too large for `dtype`."""
    if count:
        where = f"{clean(entry.source.first.file.path)}: tensor {clean(entry.source.first.key)}"
        return ModelError(f"{where} has {count} non-finite values; the file is damaged, fetch it again")
    return TooLarge(entry, f"reaches {largest:.3g}, too large for {dtype}")


class TooLarge(ModelError):
    """A weight, `entry`, too large for the dtype of its storage. Its part alone determines which dtype holds it."""

    def __init__(self, entry: Entry, what: str):
        path, key = entry.source.first.file.path, clean(entry.source.first.key)
        cure = "--fp32-vae, or --vae-precision bf16" if entry.role == "vae" else "--precision bf16 or fp32"
        super().__init__(f"{clean(path)}: tensor {key} {what}; use {cure}")
        self.what = f"{clean(path.name)}: tensor {key} {what}"  # for a recipe, which contains no paths
        self.part, self.entry = entry.role, entry
