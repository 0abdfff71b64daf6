"""What is asked for: a prompt and the numbers that go with it, checked before anything is loaded."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from qwenimg.common import geometry, noise, tokenizers
from qwenimg.common.errors import UsageError
from qwenimg.common.samplers import MAX_STEPS

MULTIPLE = 16  # pixels: sizes are rendered at the next multiple and cropped
MAX_GUIDANCE = 100


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for; checked on construction. Raises UsageError."""

    prompt: str
    negative_prompt: str = " "
    width: int = 1024  # pixels
    height: int = 1024
    steps: int = 50
    guidance: float = 4.0
    seed: int = 0
    latents: NDArray[np.float32] | None = None  # [1, C, H/8, W/8], standard normal, instead of the seed's noise

    def __post_init__(self) -> None:
        for name in ("width", "height", "steps", "seed"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name in ("prompt", "negative_prompt"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name} is {type(getattr(self, name)).__name__}; expected a text")
        if isinstance(self.guidance, bool) or not isinstance(self.guidance, SupportsFloat):
            raise UsageError(f"guidance is {self.guidance!r}; expected a number")
        object.__setattr__(self, "guidance", float(self.guidance))
        geometry.render_size(self.width, self.height, MULTIPLE)
        noise.check_seed(self.seed)
        for text in (self.prompt, self.negative_prompt):
            tokenizers.check_prompt(text)
        if not 1 <= self.steps <= MAX_STEPS:
            raise UsageError(f"steps is {self.steps}; choose 1 to {MAX_STEPS}")
        if not 0 <= self.guidance <= MAX_GUIDANCE:
            raise UsageError(f"guidance is {self.guidance}; choose 0 to {MAX_GUIDANCE}")

    @property
    def guided(self) -> bool:
        """Whether a second, negative branch runs."""
        return self.guidance > 1


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What holds where a call does not say: the recipe's values, or those for a model without one."""

    width: int = 1024
    height: int = 1024
    steps: int = 50
    guidance: float = 4.0
    negative_prompt: str = " "


def _whole(name: str, value: object) -> int:
    """`value` as an int, NumPy's integers included; a UsageError for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} is {value!r}; expected a whole number") from None
