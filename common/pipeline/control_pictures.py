"""The pictures of control networks and LoRAs: resized, preprocessed, masked and encoded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.numbers import sizes
from qwenimg.common.numbers.noise import TorchCPUGenerator
from qwenimg.common.parts.control_net import PictureAdapter, Redux
from qwenimg.common.pictures import patches, pixels, preprocessors
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pipeline.controls import mask_of
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.request import Request


def prepared(request: Request) -> tuple[Uint8, ...]:
    """Return the picture [H, W, 3] of each control after its preprocessor: at the size of the image, or at its own if
    its network sees it apart from the image. Edges are found at that size, in which they keep their width."""
    ready = []
    for control, picture in zip(request.controls, request.control_pictures, strict=True):
        resized = picture if control.whole else pixels.fit(picture, request.width, request.height)
        preprocess = preprocessors.PREPROCESSORS.get(control.preprocessor)
        ready.append(resized if preprocess is None else preprocess(resized))
    return tuple(ready)


def seen(
    model: DiffusionModel, request: Request, pictures: Sequence[Uint8], generator: TorchCPUGenerator
) -> tuple[Latents, ...]:
    """Return each control's picture as its network sees it: latents, followed by the mask where it takes one, or
    pixels. Random numbers are drawn in the order of diffusers: before the noise."""
    pairs = zip(request.controls, pictures, strict=True)
    return tuple(_seen(model, request, control, picture, generator) for control, picture in pairs)


def hole(request: Request, width: int, height: int) -> NDArray[np.bool_]:
    """Return the request's mask [height, width]: True where the image is generated."""
    assert request.mask is not None
    inside = pixels.fit(request.mask, request.width, request.height) >= pixels.HALF
    return np.asarray(pixels.extend(inside, width, height), np.bool_)


def _seen(
    model: DiffusionModel, request: Request, control: Control, picture: Uint8, generator: TorchCPUGenerator
) -> Latents:
    net = model.nets[control.network]
    if isinstance(net, Redux):
        return np.zeros(0, np.float32)  # its picture becomes text
    if isinstance(net, PictureAdapter) and control.whole:
        assert net.encoder is not None
        return patches.centre_square(picture, net.encoder.config.image_size).transpose(2, 0, 1)[None]
    multiple = model.multiple if isinstance(net, PictureAdapter) else math.lcm(model.multiple, net.multiple)
    width, height = sizes.render_size(request.width, request.height, multiple)
    extended = pixels.extend(picture, width, height)
    if isinstance(net, PictureAdapter):
        return (preprocessors.grey(extended)[None, None, :, :, 0] >= pixels.HALF).astype(np.float32)
    masked = mask_of(net, control) != "none" and request.mask is not None
    inside = hole(request, width, height) if masked else np.zeros((height, width), np.bool_)
    if net.picture != "latents":
        ordered = extended[..., ::-1] if net.picture == "bgr" else extended
        values = pixels.zero_to_one(preprocessors.grey(extended)[..., :1] if net.picture == "grey" else ordered)
        return np.where(inside, np.float32(0 if net.kinds else -1), values)
    shown = pixels.from_uint8(extended) if net.fills else np.where(inside, np.float32(-1), pixels.from_uint8(extended))
    encoded = model.vae.latents(shown, generator.normal if net.samples else None)
    if net.mask == "none":
        return encoded
    kept = 1 - inside[None, None, :: model.scale, :: model.scale].astype(np.float32)
    if not net.fills:
        return np.concatenate((encoded, kept), axis=1)
    if not masked:
        return np.concatenate((encoded, np.zeros_like(kept), np.zeros_like(encoded)), axis=1)
    assert request.image is not None
    filled = pixels.extend(pixels.fit(request.image, request.width, request.height), width, height)
    grey = np.where(inside, np.float32(0), pixels.from_uint8(filled))
    return np.concatenate((encoded, kept, model.vae.latents(grey, None)), axis=1)
