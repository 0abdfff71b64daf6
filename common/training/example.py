"""A picture to learn from, and where a training run takes its pictures from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.request.request import Request


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """A picture as the model learns it.

    `request` is that of drawing it: its caption as the prompt, its size, and in `images` the pictures that the model
    sees, of an edit. Guidance, seed and steps in it have no effect."""

    latents: Latents  # [1, C, h, w], as the model's VAE encodes the picture
    request: Request
    references: tuple[Latents, ...] = ()  # [1, C, h_i, w_i] of `request.images`, for a model that sees their latents
    mask: Latents | None = None  # [1, 1, h, w], the share of each latent in the loss, 0 to 1
    weight: float = 1.0  # of its loss


class Pictures(Protocol):
    """The pictures of a folder, encoded."""

    def __len__(self) -> int: ...

    def example(self, index: int, generator: np.random.Generator) -> Example:
        """Return picture `index`. What differs from time to time (a caption that is dropped, a flip) is drawn from
        `generator`, which is that of the step and of the picture's place in it: so resumed runs are equal."""
        ...
