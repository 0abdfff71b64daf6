"""An opened control network of any family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qwenimg.common.runtime.checkpoint import Component


@dataclass(frozen=True, kw_only=True, eq=False)
class ControlNet:
    """A network by which a picture controls a denoiser. Its plan holds the files open."""

    name: str  # of its component in memory, and in messages: no other network of the model has it
    component: Component
    mask: Literal["none", "optional", "needed"] = "none"  # whether it takes a mask of its picture
    samples: bool = False  # whether the picture becomes a sample of its latents; else it becomes their mean
