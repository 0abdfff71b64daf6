"""Drawing in two passes: the picture of the first is made larger, and the second goes on from there.

The second pass is what a run from the enlarged picture would be: `-i ENLARGED --strength` at its size and with the same
seed, with new noise in the larger shape. What enlarges latents takes the place of decoding and encoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.latest import drop_oldest
from qwenimg.common.base.text import clean
from qwenimg.common.formats.file_hash import sha256
from qwenimg.common.numbers import resampling
from qwenimg.common.pictures import pixels
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pipeline import finish, start
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.request import names
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.upscaling.network_file import Upscaler, open_upscaler
from qwenimg.common.upscaling.upscaling import Upscaling

# Stages that the second pass leaves out: the texts are encoded, and at the same noise levels the modulation is known.
TEXT, MODULATION = "text", "modulation"
KEPT = 4  # upscalers whose files stay open


class Upscalers:
    """The upscalers that requests name, opened once and kept for later images."""

    def __init__(self, opens: Callable[[str], Upscaler] = lambda name: open_upscaler(Path(name))) -> None:
        """opens: opens the file of an upscaler by the user's name for it."""
        self._opens, self._opened = opens, dict[str, Upscaler]()

    def given(self, request: Request) -> Request:
        """Return a request with its upscaler opened (headers only). Raises UsageError and ModelError."""
        name = request.hires_with
        if request.hires is None or not names.is_upscaler(name):
            return request
        before = self._opened.pop(name, None)
        if before is None or any(file.is_replaced() for file in before.component.plan.files):
            before = self._opens(name)
        self._opened[name] = before
        drop_oldest(self._opened, KEPT)
        return replace(request, upscaler=before)

    def close(self) -> None:
        for one in self._opened.values():
            one.close()
        self._opened.clear()


def passes(request: Request) -> list[Request]:
    """Return the request of each pass: one, or two with `hires`."""
    if request.hires is None:
        return [request]
    width, height = request.enlarged_size
    second = replace(
        request,
        width=width,
        height=height,
        steps=request.steps if request.hires_steps is None else request.hires_steps,
        strength=request.hires_strength,
        hires=None,
        latents=None,
        goes_on_from="latents" if request.hires_with.startswith(names.LATENT) else "pixels",
    )
    return [request, second]


def recorded(request: Request) -> dict[str, str]:
    """Return the entries of a recipe for the upscaler: its file's name, never a path, and its hash."""
    if request.upscaler is None:
        return {}
    path = request.upscaler.path
    return {"hires_with": clean(path.name, 200), "hires_with_sha256": sha256(request.upscaler.component.plan.files[0])}


def check(model: DiffusionModel, request: Request) -> None:
    """Raise UsageError for a second pass that the model does not draw."""
    if request.hires is None:
        return
    if request.mask is not None:
        raise UsageError("hires is for whole pictures: leave out the mask, or draw the result on with -i and --mask")
    if model.inputs.most == 0:
        raise UsageError(f"hires: this model draws from text alone: {model.inputs.refusal}; leave it out")
    if model.inputs.layers is not None:
        raise UsageError("hires: this model takes a picture apart into layers in one pass; leave it out")
    if request.caches:
        raise UsageError("hires: calls of two passes are not cached; leave out step-cache")
    _, second = passes(request)
    try:
        start.check_size(model, second)
        model.plan(second)
        if request.upscaler is not None:
            _upscaling(model, request.upscaler).plan(request.height, request.width, request.hires)
    except (UsageError, ModelError) as error:
        raise UsageError(f"the second pass of hires: {error}") from None


def steps(model: DiffusionModel, request: Request) -> int:
    """Return the number of steps of all passes."""
    return sum(model.plan(one).steps for one in passes(request))


def stages(model: DiffusionModel, request: Request, counted: bool = True) -> list[Stage]:
    """Return the stages of all passes. counted: as in `DiffusionModel.stages`."""
    first, *more = passes(request)
    listed = model.stages(first, model.plan(first), start.latent_shape(model, first), counted)
    for second in more:
        if second.goes_on_from == "latents":
            listed.pop()  # what decodes the first picture
        if request.upscaler is not None and request.hires is not None:
            listed += _upscaling(model, request.upscaler).stages(request.height, request.width, request.hires)
        plan = model.plan(second)
        own = model.stages(second, plan, start.latent_shape(model, second), counted)
        same = plan.evaluated_sigmas() == model.plan(first).evaluated_sigmas()
        listed += [stage for stage in own if stage.name not in ((TEXT, MODULATION) if same else (TEXT,))]
    return listed


def enlarged(model: DiffusionModel, first: Request, second: Request, latents: Latents) -> Uint8 | Latents:
    """Return what the second pass starts from: the picture of the first pass, whose last latents are given, enlarged as
    pixels [H, W, C] or as latents [1, C, h, w]. Raises QwenimgError."""
    notify, name = model.runtime.notify, first.hires_with
    sizes = f"{first.width}x{first.height} to {second.width}x{second.height}"
    if second.goes_on_from == "latents":
        notify("stage", f"enlarging the latents, {sizes}")
        return _enlarged_latents(model, first, second, latents)
    picture, _ = finish.images(first, finish.decoded(model.vae, latents), layered=False)
    if first.upscaler is not None:
        assert first.hires is not None
        picture = _upscaling(model, first.upscaler).enlarged(picture, first.hires)
    elif name == "nearest":
        notify("stage", f"enlarging the picture, {sizes}")
        return pixels.nearest(picture, second.width, second.height)
    else:
        notify("stage", f"enlarging the picture, {sizes}")
    return pixels.fit(picture, second.width, second.height)


def _upscaling(model: DiffusionModel, upscaler: Upscaler) -> Upscaling:
    """Return the upscaler, to run next to the networks of `model` in the precision of its VAE."""
    return Upscaling(model.runtime, upscaler, model.residents)


def _enlarged_latents(model: DiffusionModel, first: Request, second: Request, latents: Latents) -> Latents:
    shape, factors = start.latent_shape(model, second), (second.height / first.height, second.width / first.width)
    patch = model.vae.patch
    if patch == 1:
        return resampling.resampled(latents, shape.rows, shape.columns, factors, first.hires_with)
    plain = _unpatched(model.vae.plain(latents), patch)
    larger = resampling.resampled(plain, patch * shape.rows, patch * shape.columns, factors, first.hires_with)
    return model.vae.normalized(_patched(larger, patch))


def _unpatched(latents: Latents, patch: int) -> Latents:
    """Return latents [1, C p p, h, w], patches in the order (c, dy, dx), as [1, C, h p, w p]."""
    count, channels, h, w = latents.shape
    parts = latents.reshape(count, channels // patch**2, patch, patch, h, w).transpose(0, 1, 4, 2, 5, 3)
    return np.ascontiguousarray(parts.reshape(count, channels // patch**2, h * patch, w * patch))


def _patched(latents: Latents, patch: int) -> Latents:
    """Return latents [1, C, h p, w p] as [1, C p p, h, w], the inverse of `_unpatched`."""
    count, channels, rows, columns = latents.shape
    parts = latents.reshape(count, channels, rows // patch, patch, columns // patch, patch)
    return np.ascontiguousarray(
        parts.transpose(0, 1, 3, 5, 2, 4).reshape(count, channels * patch**2, rows // patch, columns // patch)
    )
