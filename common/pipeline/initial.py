"""What a run starts from: noise, a picture's latents, and what of them may change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Latents: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """What of a picture is made anew. `masked` is there for a model that gets the mask itself."""

    inside: Latents  # [1, 1, h, w], 1 where the picture is made anew
    masked: Latents | None = None  # [1, C, h, w], latents of the picture without what the mask covers

    @property
    def channels(self) -> list[Latents]:
        """What a model that gets the mask takes beside its latents."""
        return [] if self.masked is None else [self.inside, self.masked]

    def paste(self, latents: Latents, outside: Latents | None) -> Latents:
        """`latents` inside the mask and `outside` elsewhere; `latents` alone where the model itself gets the mask."""
        return latents if outside is None or self.masked is not None else np.where(self.inside > 0, latents, outside)


@dataclass(frozen=True, kw_only=True, eq=False)
class Initial:
    """What a run starts from: the noise, and of a picture that is given its latents and what of them may change."""

    noise: Latents  # [1, C, h, w]
    latents: Latents | None = None  # [1, C, h, w] of the picture to start from, as the sampler sees them
    mask: Mask | None = None

    @property
    def blends(self) -> bool:
        """Whether the picture is kept outside a mask that the model does not get."""
        return self.mask is not None and self.latents is not None and self.mask.masked is None
