"""The results of a run: its steps, and the image with its recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base import arguments
from qwenimg.common.base.atomic_files import picture_path, write_atomic
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.base.version import __version__
from qwenimg.common.pictures import layer_files
from qwenimg.common.pictures.contact_sheet import contact_sheet
from qwenimg.common.pipeline.encode import encode
from qwenimg.common.request.recipe import FORMAT, Recipe
from qwenimg.common.runtime.runtime import Runtime

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
    from PIL.Image import Image

# Of a PIL image, which a result has and is not
_OF_PIL = ("show", "size", "width", "height", "mode", "convert", "resize", "crop", "thumbnail", "getpixel", "tobytes")


def recorded_runtime(runtime: Runtime) -> dict[str, object]:
    """Return the entries of a recipe about the program, the device and the precision."""
    precision, engine = runtime.precision, runtime.engine
    components = {name: precision.compute_dtype(name) for name in ("text", "transformer", "vae")}
    return {
        "format": FORMAT,
        "version": __version__,
        "backend": engine.name,
        "device": engine.device,
        "precision": {"name": precision.name, **runtime.choice.recorded()} | components | precision.places(),
        "versions": engine.versions() | {"numpy": np.__version__},
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One finished step of the sampler."""

    index: int  # from 1
    total: int
    sigma: float  # the noise level at the step's start
    seconds: float
    size: tuple[int, int] = (0, 0)  # pixels of the picture of this pass: its width and its height
    read: Callable[[], NDArray[np.float32]] = field(repr=False)
    see: Callable[[], NDArray[np.uint8]] = field(repr=False)

    @property
    def latents(self) -> NDArray[np.float32]:
        """The latents after this step, with the noise that is left: float32 [1, C, H/8, W/8]. Every use copies them
        from the device, also after later steps; a step that is not used copies nothing."""
        return self.read()

    def preview(self) -> NDArray[np.uint8]:
        """Return a small picture of the estimate after this step: uint8 [H/8, W/8, 3], one pixel per latent, or by a
        tiny VAE [H, W, 3], where the sides of large pictures are halved until they are at most 512. Each call copies
        latents from the device; without a call nothing is computed. Raises UsageError if `Pipeline.fit_preview` was
        not called before the stream."""
        return self.see()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result:
    """An image, or an image in layers. `latents`: float32 [F, C, H/8, W/8] before the VAE's statistics; F is 1, or 1 +
    the number of layers, the composite first."""

    pixels: NDArray[np.uint8]  # [H, W, 3], or [H, W, 4] with alpha; of layers all of them, one over the other
    layers: tuple[NDArray[np.uint8], ...] = ()  # [H, W, 4] each, the lowest first; () for a model without
    latents: NDArray[np.float32]
    recipe: Recipe
    timing: dict[str, float] = field(default_factory=dict)  # seconds by stage
    shapes: dict[str, str] = field(default_factory=dict)  # shapes of the models' inputs, for --debug
    warnings: list[str] = field(default_factory=list)  # the recipe's
    control_pictures: tuple[NDArray[np.uint8], ...] = ()  # [H, W, 3] of each control, as its network sees it

    def __repr__(self) -> str:
        """Return one line, without the arrays."""
        height, width = self.pixels.shape[:2]
        r = self.recipe
        about = f"seed {r['seed']}, steps {r['steps']}, {clean(r['model'], 60)}"
        return f"<Result {width}x{height}, {about}, {clean(r['prompt'], 60)!r}>"

    def _repr_png_(self) -> bytes:
        """Return the bytes by which a notebook shows the image, with its recipe."""
        return self.png()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the pixels, for numpy.asarray."""
        return np.array(self.pixels, dtype=dtype, copy=copy if copy else None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            what = f": its picture is result.image, a PIL image: result.image.{name}" if name in _OF_PIL else ""
            raise AttributeError(f"Result has no attribute {clean(name, 60)!r}{what}", name=name, obj=self)

    def warn(self, lines: Iterable[str]) -> None:
        """Add warnings to the recipe's, each once."""
        self.warnings.extend(line for line in dict.fromkeys(lines) if line not in self.warnings)
        self.recipe["warnings"] = self.warnings

    @property
    def seed(self) -> int:
        return self.recipe["seed"]

    @property
    def image(self) -> Image:
        """The image as a PIL image; of layers all of them, one over the other."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    @property
    def images(self) -> list[Image]:
        """The layers as PIL images, the lowest first; of a model without, a list with only the image, as in
        diffusers."""
        from PIL import Image

        return [Image.fromarray(layer) for layer in self.layers or (self.pixels,)]

    def sheet(self) -> Image:
        """Return all layers side by side over squares of grey, as a PIL image."""
        from PIL import Image

        return Image.fromarray(contact_sheet(self.layers or (self.pixels,)))

    def save(self, path: str | Path, *, overwrite: bool = False, metadata: bool = True) -> Path:
        """Write `image` with its recipe, whole or not at all, in the format of the suffix (.png, .jpg, .jpeg or
        .webp; .png is added if there is none), and return its absolute path.

        Raises UsageError for a file that exists, unless `overwrite`, for another format, and for a size or prompt that
        the format cannot hold, and DoesNotFit for a full disk."""
        arguments.check_flags(overwrite=overwrite, metadata=metadata)
        file = picture_path(path)
        write_atomic(file, encode(self.pixels, self.recipe if metadata else None, file.suffix), overwrite=overwrite)
        return file.absolute()

    def save_layers(self, path: str | Path, *, overwrite: bool = False, metadata: bool = True) -> list[Path]:
        """Write each layer as `save` does, and return the paths. {layer} in the name stands for the number of a layer,
        from 0; without it the number goes before the suffix. Raises as `save` does, and UsageError for JPEG, which has
        no alpha, and if there are no layers."""
        arguments.check_flags(overwrite=overwrite, metadata=metadata)
        if not self.layers:
            raise UsageError("this picture has no layers; give save")
        files = layer_files.numbered(picture_path(path), len(self.layers))
        for file, layer in zip(files, self.layers, strict=True):
            write_atomic(file, encode(layer, self.recipe if metadata else None, file.suffix), overwrite=overwrite)
        return [file.absolute() for file in files]

    def png(self, metadata: bool = True) -> bytes:
        """Return the image as a PNG file, with its recipe and the mark of AI origin unless `metadata` is false."""
        arguments.check_flags(metadata=metadata)
        return encode(self.pixels, self.recipe if metadata else None, ".png")
