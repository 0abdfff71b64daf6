"""The initial state of a request's run. Random numbers are drawn in the order of diffusers."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import NumericsError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.numbers import sizes, variation
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.numbers.noise import FEWEST, TorchCPUGenerator, low_bits_warning, sha256
from qwenimg.common.pictures import masks, pixels
from qwenimg.common.pipeline import control_pictures
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.steps.inpaint import Initial, Latents, Mask
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment
from qwenimg.common.request.option import no_effect
from qwenimg.common.request.request import OPTIONS, Request


def latent_shape(model: DiffusionModel, request: Request) -> LatentShape:
    """Return the shape of the latents."""
    return LatentShape(model.inputs.frames(request), *model.latent_sides(request.width, request.height))


def check_size(model: DiffusionModel, request: Request) -> None:
    """Raise UsageError for an image that is too small to be drawn."""
    if not is_drawn(model, request.width, request.height):
        size = f"{request.width}x{request.height}"
        raise UsageError(f"{size} is too small: its noise would have fewer than {FEWEST} numbers")


def is_drawn(model: DiffusionModel, width: int, height: int) -> bool:
    """Return whether the latents have at least FEWEST values, the fewest that torch's vectorized generator draws."""
    rows, columns = model.latent_sides(width, height)
    return rows * columns * model.channels >= FEWEST


def given_images(values: Mapping[str, object]) -> list[NDArray[np.uint8]]:
    """Return the pictures of `image`, one or a tuple among the `values` of options, that have the proportions of a
    picture; a request refuses the others with a reason."""
    value = values.get("image")
    images = value if isinstance(value, tuple) else (value,)
    return [one for one in images if isinstance(one, np.ndarray) and one.ndim == 3 and one.size]


def picture_warnings(
    model: DiffusionModel, request: Request, values: Mapping[str, object], noises: Sequence[str]
) -> list[str]:
    """Return warnings about the pictures in the `values` of a call's options. noises: the hashes of their noise."""

    def own() -> str:
        return sha256(noise(model, request, TorchCPUGenerator(request.seed)))

    return model.inputs.warnings(request, given_images(values), noises, own)


def met(model: DiffusionModel, request: Request, entries: Container[str]) -> frozenset[str]:
    """Return which `needs` of options a run meets. entries: of its recipe."""
    has = {
        "control": bool(request.controls),
        "guidance": model.guidance.is_on(request),
        "image": request.image is not None,
        "mask": request.mask is not None,
        "refiner": "refiner" in entries,
        "hires": request.hires is not None,
    }
    return frozenset(name for name in has if has[name])


def no_effects(
    model: DiffusionModel, request: Request, asked: Mapping[str, object], entries: Container[str]
) -> list[str]:
    """Return a warning for each option of a call, `asked`, that changes nothing."""
    there, guidance = met(model, request, entries), model.guidance.text(request)
    lines = (no_effect(one, asked.get(name), model.options, there, guidance) for name, one in OPTIONS.items())
    return [line for line in lines if line]


def image_hashes(request: Request) -> dict[str, str | list[str]]:
    """Return the hashes of the request's images and mask, by the keys of a recipe."""
    own = None if request.outpaint else request.mask
    named = {"image_sha256": request.image, "mask_sha256": own}
    hashes: dict[str, str | list[str]] = {key: sha256(one) for key, one in named.items() if one is not None}
    return hashes | ({"more_images_sha256": list(map(sha256, request.more_images))} if request.more_images else {})


def initial_state(
    model: DiffusionModel, request: Request, generator: TorchCPUGenerator, begun: NDArray[Any] | None = None
) -> Initial:
    """Return the pictures of the request, encoded, and the noise. begun: the enlarged picture of the first pass, pixels
    [H, W, C] or latents [1, C, h, w], from which the second starts. Raises UsageError and NumericsError."""
    pictures = control_pictures.prepared(request)
    controls = control_pictures.seen(model, request, pictures, generator)
    started = partial(Initial, controls=controls, control_pictures=pictures)
    if not request.starts_from_picture:
        return started(noise=noise(model, request, generator))
    inputs, encode = model.inputs, partial(_encode, model, generator=generator)
    for line in inputs.notes(request):
        model.runtime.notify("stage", line)
    references = tuple(encode(values) for values in inputs.seen(request)) if request.images else ()
    if references and request.starts_from_noise:
        return started(noise=noise(model, request, generator), references=references)
    width, height = sizes.render_size(request.width, request.height, model.multiple)
    if request.goes_on_from == "latents":
        return started(noise=noise(model, request, generator), latents=begun, references=references)
    whole = request.image if begun is None else begun
    assert whole is not None
    picture = pixels.fit(whole, request.width, request.height)
    if request.mask is not None and request.mask_fill != "original":
        picture = masks.filled(picture, pixels.fit(request.mask, request.width, request.height))
    values = pixels.from_uint8(pixels.extend(inputs.in_channels(picture), width, height))
    if request.mask is None:
        latents = encode(values)
        return started(noise=noise(model, request, generator), latents=latents, references=references)
    draw = partial(generator.normal, _noise_shape(model, request))
    start = inputs.mask.started(request, partial(encode, values), draw)
    initial = noise(model, request, generator)
    hole = control_pictures.hole(request, width, height)
    mask = Mask(
        inside=inputs.mask.in_latents(hole, model.scale),
        masked=inputs.mask.masked(lambda: encode(values * ~hole)),
        filling={"noise": initial, "nothing": np.zeros_like(initial)}.get(request.mask_fill),
    )
    return started(noise=initial, latents=start, references=references, mask=mask)


def warnings(request: Request, plan: SamplingPlan) -> list[str]:
    """Return the warnings about a request and its plan that do not depend on the model."""
    seeds = [request.seed] if request.latents is None else []
    seeds += [variation.parse(request.variation).seed] if request.variation else []
    schedule = plan.segments[0].schedule
    from_noise = request.image is None or plan.whole or schedule.alpha(schedule.sigmas[0]) == 0
    fills = from_noise and request.mask is not None and request.mask_fill != "original"
    lines = [
        *map(low_bits_warning, seeds),
        "mask-fill has no effect: the masked part is drawn from noise alone; give a strength below 1"
        if fills
        else None,
        *(one.warning for one in request.loras),
    ]
    return [line for line in lines if line]


def noise(model: DiffusionModel, request: Request, generator: TorchCPUGenerator) -> Latents:
    """Return the initial noise [F, C, h, w]: the seed's, or the given one. Raises UsageError and NumericsError."""
    shape = _noise_shape(model, request)
    if request.latents is None:
        drawn = generator.normal(shape)
        return variation.parse(request.variation).applied(drawn) if request.variation else drawn
    try:
        given = np.asarray(request.latents)
    # Lists of several lengths, values that are no numbers, or a range of more numbers than fit into memory
    except (TypeError, ValueError, OverflowError, MemoryError):
        raise UsageError(f"latents are {clean(request.latents, 40)}; expected an array {list(shape)}") from None
    if given.shape != shape:
        raise UsageError(
            f"latents of shape {list(given.shape)} do not fit: {request.width}x{request.height} needs {list(shape)}"
        )
    if given.dtype.kind not in "fiu":
        raise UsageError(f"latents are of {clean(given.dtype, 40)}; expected float32")
    with np.errstate(over="ignore"):
        given = given.astype(np.float32)
    if not np.isfinite(given).all():
        raise NumericsError("the latents have non-finite values in float32")
    return given


def _noise_shape(model: DiffusionModel, request: Request) -> tuple[int, int, int, int]:
    size = latent_shape(model, request)
    return size.frames, model.channels, size.rows, size.columns


def _encode(model: DiffusionModel, values: Latents, generator: TorchCPUGenerator) -> Latents:
    """Return the image's latents, their mean or a sample, drawn like diffusers."""
    return model.vae.latents(values, generator.normal if model.vae.samples else None)


def first(plan: SamplingPlan, initial: Initial) -> Latents:
    """Return the state at the first noise level: noise alone, or the image with noise added."""
    schedule = plan.segments[0].schedule
    if initial.latents is None or (
        initial.mask is not None and plan.whole
    ):  # like diffusers: a mask may start from noise
        return initial.noise * np.float32(schedule.initial)
    sigma, latents = schedule.sigmas[0], initial.latents
    if initial.mask is not None:
        latents = initial.mask.filled(latents)
    return latents * np.float32(schedule.alpha(sigma)) + initial.noise * np.float32(sigma)


def last(latents: Latents, segment: Segment, initial: Initial) -> Latents:
    """Return the latents behind a segment, scaled for its schedule's end, with the initial image's outside a mask."""
    latents = latents * np.float32(segment.schedule.final)
    return latents if initial.mask is None else initial.mask.paste(latents, initial.latents)
