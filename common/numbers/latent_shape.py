"""The size of latents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentShape:
    """The size of latents: `frames` images of `rows` x `columns`, one frame but for a model of several images."""

    frames: int
    rows: int
    columns: int

    @property
    def count(self) -> int:
        """The latents of all frames, each counted once for all of its channels."""
        return self.frames * self.rows * self.columns

    def grid(self, patch: int) -> tuple[int, int]:
        """Return the rows and columns of tokens of a frame, of patch x patch latents each."""
        return self.rows // patch, self.columns // patch
