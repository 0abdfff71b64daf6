"""Small pictures of latents in the middle of a run: by a tiny VAE, or one pixel for each latent, by a linear map to
colours.

The map belongs to a VAE, and is fitted on the user's machine to what this very VAE decodes, by least squares: at first
to one small picture of noise, then to each picture that is drawn, whose decoding costs nothing more. So nothing is
downloaded. One matrix of sums is kept in the user's cache folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.atomic_files import make_folder, write_atomic
from qwenimg.common.base.errors import QwenimgError, UsageError
from qwenimg.common.base.safe_files import open_regular
from qwenimg.common.base.text import clean
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.vae import TinyHalves
from qwenimg.common.pictures.pixels import crop, to_uint8
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.stages import Stage

Uint8: TypeAlias = NDArray[np.uint8]
Sums: TypeAlias = NDArray[np.float64]  # [C + 4, C + 4], of v v' with v = (1, latents, red, green, blue)

ENOUGH = 32  # pictures, after which a map learns no more
RIDGE = 1e-3  # of the mean variance of the latents' channels: colours of latents that were never seen stay moderate
SIDE = 32  # latents a side of the picture of noise
FOR_EACH = 4  # samples of noise for each channel, if that needs a larger picture
MOST = 512  # pixels a side of a preview by a tiny VAE
FULL = 255 / 2  # levels of a pixel in one of -1..1


class TinyPreview:
    """Previews by a tiny VAE. It is loaded for the first one, beside all that is in memory, if it fits there."""

    def __init__(self, model: DiffusionModel, component: Component, spare: Callable[[], int]) -> None:
        """Set the model and its tiny VAE. spare: returns the bytes that the run's plan leaves, in which the weights
        may stay loaded until the next preview."""
        self._model, self._halves, self._spare = model, TinyHalves(model.residents, component), spare
        self._failed = False

    def seen(self, latents: NDArray[np.float32], rows: int, columns: int) -> Uint8:
        """Return the picture of the first of latents [F, C, h, w], of their top left rows x columns: at most MOST
        pixels a side. Grey, after a warning, once it does not fit."""
        try:
            return _smaller(crop(self._decoded(latents[:1]), columns * self._halves.scale, rows * self._halves.scale))
        except QwenimgError as error:
            if not self._failed:
                self._model.runtime.notify("warning", f"there is no preview by the tiny VAE: {clean(error, 150)}")
            self._failed = True
            return hidden(rows, columns)

    def _decoded(self, latents: NDArray[np.float32]) -> Uint8:
        residents, halves = self._model.residents, self._halves
        stage = decoding(halves, LatentShape(1, *latents.shape[2:]))
        keeps = self._model.runtime.weight_bytes(stage.component) <= self._spare()
        decoder, split = residents.acquire(replace(stage, keeps=keeps))
        pixels = decoder.decode(halves.plain(np.nan_to_num(latents)), split.size)
        return to_uint8(np.nan_to_num(pixels[0]))

    def learn(self, latents: Sequence[NDArray[np.float32]], pixels: Sequence[NDArray[Any]]) -> None:
        """Do nothing: it has learned."""


def decoding(halves: TinyHalves, shape: LatentShape) -> Stage:
    """Return the stage that decodes latents of `shape` for a preview, beside all that is in memory."""
    return replace(
        halves.decoding(shape), name="preview", resident="preview decoder", title="a preview by the tiny VAE",
        keeps=False, checked=True, optional=True, operations=0.0,
    )  # fmt: skip


def with_preview(model: DiffusionModel, stages: Sequence[Stage], shape: LatentShape) -> list[Stage]:
    """Return the stages of a run with latents of `shape`, with the one of previews after the last of the denoiser."""
    if model.preview_vae is None:
        return list(stages)
    last = max(place for place, stage in enumerate(stages) if stage.name in ("denoise", "refine"))
    preview = decoding(TinyHalves(model.residents, model.preview_vae), LatentShape(1, shape.rows, shape.columns))
    return [*stages[: last + 1], preview, *stages[last + 1 :]]


def _smaller(picture: Uint8) -> Uint8:
    """Return a picture of at most MOST pixels a side, each the mean of a square."""
    step = 1
    while max(picture.shape[:2]) > step * MOST:
        step *= 2
    height, width = (side // step * step for side in picture.shape[:2])
    squares = picture[:height, :width].reshape(height // step, step, width // step, step, 3)
    small: Uint8 = np.rint(squares.mean(axis=(1, 3), dtype=np.float32)).astype(np.uint8)
    return small


class PreviewMap:
    """The map of one VAE."""

    def __init__(self, sums: Sums, file: Path | None) -> None:
        """Set the map. file: where it is kept, or None."""
        self._sums, self._file = sums, file
        self._weights = _fitted(sums)

    def seen(self, latents: NDArray[np.float32], rows: int, columns: int) -> Uint8:
        """Return the top left rows x columns colours of the first of latents [F, C, h, w]."""
        return crop(self.colours(latents), columns, rows)

    def colours(self, latents: NDArray[np.float32]) -> Uint8:
        """Return the colours [h, w, 3] of latents [F, C, h, w], of the first of several frames: their composite."""
        return to_uint8(_applied(self._weights, np.nan_to_num(latents[0])))

    def learn(self, latents: Sequence[NDArray[np.float32]], pixels: Sequence[NDArray[Any]]) -> None:
        """Fit the map also to images: the latents [1, C, h, w] of each, and the pixels [1, C, H, W] in -1..1 that they
        were decoded to."""
        more = list(zip(latents, pixels, strict=True))[: ENOUGH - round(self._sums[0, 0])]
        if not more:
            return
        self._sums = sum((sums_of(*one) for one in more), self._sums)
        self._weights = _fitted(self._sums)
        self.keep()

    def keep(self) -> None:
        """Write the file, if the disk allows it; otherwise the next process fits the map again."""
        if self._file is not None:
            with suppress(QwenimgError, OSError):
                make_folder(self._file.parent, parents=True)
                write_atomic(self._file, self._sums.astype("<f8").tobytes(), overwrite=True)


def folder() -> Path:
    """Return the user's folder of maps."""
    from platformdirs import user_cache_path

    return user_cache_path("qwenimg") / "previews"


def fitted(model: DiffusionModel, vae: Component | None) -> PreviewMap:
    """Return the map that is kept for the weights of `vae`, or one that is fitted now to a picture of noise. Without
    weights it is not kept. Raises DoesNotFit, ModelError and NumericsError."""
    file = None if vae is None else folder() / f"{fingerprint(vae.plan.files)[:32]}.f64"
    kept = None if file is None else _read(file, model.decoded_channels)
    if kept is not None:
        return PreviewMap(kept, file)
    latents, scale = noise(model.decoded_channels), model.scale
    pixels = model.vae.decode(latents)
    half = latents.shape[2] // 2
    error = difference(_fitted(sums_of(latents[:, :, :half], pixels[:, :, : half * scale])),
                       latents[:, :, half:], pixels[:, :, half * scale :])  # fmt: skip
    model.runtime.notify(
        "stage", f"previews are fitted to this VAE; colours differ by {error:.0f} of 255 (RMS, of noise)"
    )
    fresh = PreviewMap(sums_of(latents, pixels), file)
    fresh.keep()
    return fresh


def seen(
    fit: PreviewMap | TinyPreview | None, read: Callable[[], NDArray[np.float32]], rows: int, columns: int
) -> Uint8:
    """Return the preview of the top left rows x columns latents that `read` copies from the device. Raises UsageError
    if no map is fitted."""
    if fit is None:
        raise UsageError("a preview needs pipe.fit_preview() before the stream")
    return fit.seen(read(), rows, columns)


def hidden(rows: int, columns: int) -> Uint8:
    """Return the preview of latents that no VAE decodes: grey."""
    return np.full((rows, columns, 3), 128, np.uint8)


def noise(channels: int) -> NDArray[np.float32]:
    """Return latents [1, C, h, w] of noise in squares of 2 x 2: a VAE decodes single latents of noise to grey."""
    half = max(SIDE // 2, math.isqrt(FOR_EACH * channels) + 1)
    values = np.random.RandomState(0).standard_normal((1, channels, half, half)).astype(np.float32)
    return values.repeat(2, axis=2).repeat(2, axis=3)


def sums_of(latents: NDArray[np.float32], pixels: NDArray[Any]) -> Sums:
    """Return the sums of one picture, divided by the number of its latents."""
    count = latents.shape[2] * latents.shape[3]
    rows = (np.ones((1, count)), latents[0].reshape(-1, count), means(latents, pixels).reshape(3, count))
    values = np.concatenate(rows, dtype=np.float64)
    sums: Sums = values @ values.T / count
    return sums


def means(latents: NDArray[np.float32], pixels: NDArray[Any]) -> NDArray[np.float64]:
    """Return the mean colours [3, h, w] of the pixels [1, C, H, W] of each latent, on white."""
    rows, columns = latents.shape[2:]
    tiles = _on_white(np.clip(pixels[0], -1, 1)).reshape(
        3, rows, pixels.shape[2] // rows, columns, pixels.shape[3] // columns
    )
    colours: NDArray[np.float64] = tiles.mean(axis=(2, 4), dtype=np.float64)
    return colours


def _on_white(pixels: NDArray[Any]) -> NDArray[Any]:
    """Return pixels [3 or 4, H, W] in -1..1 as [3, H, W]."""
    alpha = (pixels[3:] + 1) / 2
    return 1 - alpha * (1 - pixels[:3]) if len(alpha) else pixels


def difference(weights: NDArray[np.float64], latents: NDArray[np.float32], pixels: NDArray[Any]) -> float:
    """Return the RMS difference between colours computed with `weights` and `pixels`, in levels of 255."""
    colours = np.clip(_applied(weights, latents[0]), -1, 1)
    return FULL * float(np.sqrt(np.mean((colours - means(latents, pixels)) ** 2)))


def _applied(weights: NDArray[np.float64], latents: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the colours [3, h, w], about -1 to 1, of latents [C, h, w]."""
    small = weights.astype(np.float32)
    colours: NDArray[np.float32] = np.tensordot(small[1:].T, latents, 1) + small[0][:, None, None]
    return colours


def _fitted(sums: Sums) -> NDArray[np.float64]:
    """Return the weights [1 + C, 3] of least squares, the constant first."""
    second = sums / sums[0, 0]
    mean, colour = second[0, 1:-3], second[0, -3:]
    spread = second[1:-3, 1:-3] - np.outer(mean, mean)
    ridge = RIDGE * np.trace(spread) / len(mean) + 1e-9
    slopes = np.linalg.solve(spread + ridge * np.eye(len(mean)), second[1:-3, -3:] - np.outer(mean, colour))
    return np.concatenate([(colour - mean @ slopes)[None], slopes])


def _read(file: Path, channels: int) -> Sums | None:
    """Return the sums in `file`; None for no file, and for one that `keep` would not have written."""
    side = 1 + channels + 3
    try:
        opened = open_regular(file)
        try:
            data = opened.read(0, opened.size) if opened.size == 8 * side * side else b""
        finally:
            opened.close()
    except QwenimgError:
        return None
    sums = np.frombuffer(data, "<f8").reshape(-1, side)
    is_whole = len(sums) and np.isfinite(sums).all() and np.array_equal(sums, sums.T)
    return sums if is_whole and 1 <= sums[0, 0] <= ENOUGH and (np.diagonal(sums) >= 0).all() else None
