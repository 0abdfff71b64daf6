"""The initial state of a run, and inpainting with any model and any sampler: outside the mask the image is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.runtime.engine import Array
from qwenimg.common.sampling.types import Schedule

Latents: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """The part of an image that is regenerated. `masked` is for a model that has the mask as an input."""

    inside: (
        Latents  # [1, K, h, w], 1 where the image is regenerated; K is 1, or that of a model with the mask as an input
    )
    masked: Latents | None = None  # [1, C, h, w], latents of the image without the masked part
    filling: Latents | None = None  # [1, C, h, w], what the masked part starts from; None: the image

    @property
    def channels(self) -> list[Latents]:
        """Further channels of a model that has the mask as an input: the mask, then the masked picture."""
        return [] if self.masked is None else [self.inside, self.masked]

    def filled(self, latents: Latents) -> Latents:
        """Return the `latents` of an image with what their masked part starts from."""
        if self.filling is None:
            return latents
        share = self.inside.mean(axis=1, keepdims=True)  # of the pixels of a latent, if a model sees each of them
        return np.asarray(latents + share * (self.filling - latents), np.float32)

    def paste(self, latents: Latents, outside: Latents | None) -> Latents:
        """Return `latents` inside the mask and `outside` elsewhere; only `latents` if the model itself has the mask."""
        return latents if outside is None or self.masked is not None else np.where(self.inside > 0, latents, outside)


@dataclass(frozen=True, kw_only=True, eq=False)
class Initial:
    """The initial state of a run: the noise, and for an initial image its latents and mask."""

    noise: Latents  # [1, C, h, w]
    latents: Latents | None = None  # [1, C, h, w] of the initial image, in the sampler's scale
    mask: Mask | None = None
    references: tuple[Latents, ...] = ()  # [1, C, h_i, w_i] of images that the model itself sees
    controls: tuple[Latents, ...] = ()  # [1, C, h, w] of each control's picture, with a channel for a mask or without
    control_pictures: tuple[NDArray[np.uint8], ...] = ()  # [H, W, 3] of each control, as it is encoded

    @property
    def blends(self) -> bool:
        """True if the image outside the mask is kept by blending, since the mask is no input of the model."""
        return self.mask is not None and self.latents is not None and self.mask.masked is None


@dataclass(frozen=True, kw_only=True, eq=False)
class Blend:
    """Inpainting by blending: outside the mask the model's input is the image at the step's noise level, and its
    prediction is replaced by the image, so that a sampler removes the noise there itself.

    With deterministic samplers this equals diffusers' method, which blends the latents after every step. A latent that
    the mask covers in part is blended in just that way: how much of it is left depends on the number of steps."""

    schedule: Schedule
    inside: Array  # 1 where the image is regenerated, wholly or in part
    latents: Array
    noise: Array
    share: Array | None = None  # of each latent that is regenerated; None: each is wholly or not at all

    def shown(self, x: Array, sigma: float) -> Any:
        if sigma == self.schedule.sigmas[0]:  # the initial state, which may be noise alone
            return x
        known = self._known(sigma)
        return known + self.inside * (x - known)

    def kept(self, denoised: Array) -> Any:
        return self.latents + self.inside * (denoised - self.latents)

    def stepped(self, x: Array, step: int) -> Any:
        """Return the state that the sampler goes on from, for x after a step, counted from 0."""
        if self.share is None:
            return x
        known = self._known(self.schedule.sigmas[step + 1])
        return known + self.share * (x - known)

    def _known(self, sigma: float) -> Any:
        return self.schedule.alpha(sigma) * self.latents + sigma * self.noise


def blend(initial: Initial, schedule: Schedule, array: Callable[[Latents], Array]) -> Blend | None:
    """Return the blending along `schedule`; None without a mask, or if the mask is an input of the model."""
    if not initial.blends:
        return None
    assert initial.mask is not None and initial.latents is not None
    share = initial.mask.inside.repeat(initial.latents.shape[1], axis=1)
    inside = np.ceil(share)
    return Blend(
        schedule=schedule,
        inside=array(inside),
        latents=array(initial.latents),
        noise=array(initial.noise),
        share=None if np.array_equal(inside, share) else array(share),
    )
