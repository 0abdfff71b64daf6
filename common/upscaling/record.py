"""The texts of a picture that was made larger: those that it had, and how it was enlarged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qwenimg.common.base.text import clean
from qwenimg.common.base.version import __version__
from qwenimg.common.formats.file_hash import sha256 as file_sha256
from qwenimg.common.numbers.noise import sha256
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pictures.texts import UPSCALING, XMP_KEY
from qwenimg.common.upscaling.upscaling import Upscaling

FORMAT = 1
KEPT = ("parameters", "qwenimg")  # texts of the picture that stay as they are
OWN = ("postprocessing", UPSCALING)  # texts about how it was made larger
MOST = 5_000_000  # characters of a kept text
BY_A_MODEL, ENHANCED = "trainedAlgorithmicMedia", "algorithmicallyEnhanced"  # IPTC's words for a picture's origin


def texts(upscaling: Upscaling, pixels: Uint8, by: float, before: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of a picture made of `pixels`, by PNG's names. before: the texts of the file that it was read
    from. `postprocessing` is AUTOMATIC1111's line for other programs."""
    engine, upscaler = upscaling.engine, upscaling.upscaler
    name = clean(upscaler.path.name, 200)
    entries = {
        "format": FORMAT,
        "version": __version__,
        "by": int(by) if by == int(by) else by,
        "upscaler": name,
        "network": upscaler.kind,
        "scale": upscaler.scale,
        "upscaler_sha256": file_sha256(upscaler.component.plan.files[0]),
        "image_sha256": sha256(pixels),
        "width": pixels.shape[1],
        "height": pixels.shape[0],
        "backend": engine.name,
        "device": engine.device,
        "precision": upscaling.runtime.precision.name,
        "versions": engine.versions() | {"numpy": np.__version__},
    }
    kept = {key: before[key] for key in KEPT if len(before.get(key, "")) in range(1, MOST)}
    line = f"Postprocess upscale by: {by:g}, Postprocess upscaler: {json.dumps(Path(name).stem, ensure_ascii=False)}"
    return kept | {"postprocessing": line, UPSCALING: json.dumps(entries)}


@dataclass(frozen=True, kw_only=True)
class Enlargement:
    """The upscaling of every picture of a run before it is written."""

    upscaling: Upscaling
    by: int

    def __call__(self, pixels: Uint8, before: Mapping[str, str]) -> tuple[Uint8, dict[str, str]]:
        """Return larger pixels, and the texts of their file; none if the picture's own, `before`, are left out. Raises
        DoesNotFit and NumericsError."""
        larger = self.upscaling.enlarged(pixels, self.by)
        return larger, texts(self.upscaling, pixels, self.by, before) if before else {}


def mark(xmp: str, before: Mapping[str, str]) -> str:
    """Return `xmp`, the mark of a picture that a model made, or for another picture that of one that was enhanced."""
    drawn = "qwenimg" in before or BY_A_MODEL in before.get(XMP_KEY, "")
    return xmp if drawn else xmp.replace(BY_A_MODEL, ENHANCED)
