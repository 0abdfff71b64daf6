"""What a run yields: its steps, and the picture with everything that made it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.errors import clean
from qwenimg.common.metadata import XMP, Recipe, png_text

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the sampler that is done."""

    index: int  # from 1
    total: int
    sigma: float  # the noise level that the step started from
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result:
    """A picture. `latents` are float32 [1, C, H/8, W/8], before the VAE's statistics."""

    pixels: NDArray[np.uint8]  # [H, W, 3]
    latents: NDArray[np.float32]
    recipe: Recipe
    timing: dict[str, float] = field(default_factory=dict)  # seconds by stage
    shapes: dict[str, str] = field(default_factory=dict)  # what went through the models, for people
    warnings: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        """One line, without the arrays."""
        height, width = self.pixels.shape[:2]
        r = self.recipe
        made = f"seed {r['seed']}, steps {r['steps']}, {clean(r['model'], 60)}"
        return f"<Result {width}x{height}, {made}, {clean(r['prompt'], 60)!r}>"

    @property
    def seed(self) -> int:
        return self.recipe["seed"]

    @property
    def image(self) -> Image:
        """The picture as a PIL image."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    def save(self, path: str | Path, *, overwrite: bool = False, metadata: bool = True) -> Path:
        """Writes the picture as a PNG with its recipe, whole or not at all; its absolute path.

        .png is added to a name without a suffix. Raises UsageError for a file that exists, unless `overwrite`, and for
        another format, and DoesNotFit for a full disk."""
        from qwenimg.common.files import picture_path, write_atomic

        file = picture_path(path)
        write_atomic(file, self.png(metadata), overwrite=overwrite)
        return file.absolute()

    def png(self, metadata: bool = True) -> bytes:
        """The picture as a PNG file, with its recipe and the mark of AI origin unless `metadata` is false."""
        from qwenimg.common.image import encode_png

        text: dict[str, Any] = png_text(self.recipe) if metadata else {}
        return encode_png(self.pixels, text, XMP if metadata else None)
