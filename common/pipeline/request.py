"""What is asked for: a prompt and the numbers that go with it, checked before anything is loaded."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, SupportsFloat, TypedDict

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import short
from qwenimg.common.numbers import noise, sizes
from qwenimg.common.prompts import check
from qwenimg.common.sampling.flow_match import MAX_STEPS

MULTIPLE = 16  # pixels: sizes are rendered at the next multiple and cropped
MAX_GUIDANCE = 100
MAX_CLIP_SKIP = 11


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
    sampler: str = ""  # the model's own
    schedule: str = ""  # the model's own
    image: NDArray[np.uint8] | None = None  # [H, W, 3], the picture to start from
    mask: NDArray[np.uint8] | None = None  # [H, W], from 128 on where `image` is to be made anew
    strength: float = 0.8  # how much of the schedule is run on `image`
    clip_skip: int = 0  # last layers of a CLIP text encoder that are left out
    guidance_rescale: float = 0.0  # 0 to 1
    refine_at: float = 0.8  # of the trained times, where a refiner takes over

    def __post_init__(self) -> None:
        for name in ("width", "height", "steps", "seed", "clip_skip"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name in ("guidance", "strength", "guidance_rescale", "refine_at"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        for name in ("prompt", "negative_prompt", "sampler", "schedule"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name} is {type(getattr(self, name)).__name__}; expected a text")
        sizes.render_size(self.width, self.height, MULTIPLE)
        noise.check_seed(self.seed)
        for text in (self.prompt, self.negative_prompt):
            check.check_prompt(text)
        if not 1 <= self.steps <= MAX_STEPS:
            raise UsageError(f"steps is {short(self.steps, 40)}; choose 1 to {MAX_STEPS}")
        if not 0 <= self.guidance <= MAX_GUIDANCE:
            raise UsageError(f"guidance is {self.guidance}; choose 0 to {MAX_GUIDANCE}")
        if not 0 < self.strength <= 1:
            raise UsageError(f"strength is {self.strength:g}; choose more than 0 and at most 1")
        if not 0 <= self.clip_skip <= MAX_CLIP_SKIP:
            raise UsageError(f"clip-skip is {short(self.clip_skip, 40)}; choose 0 to {MAX_CLIP_SKIP}")
        if not 0 <= self.guidance_rescale <= 1:
            raise UsageError(f"guidance-rescale is {self.guidance_rescale:g}; choose 0 to 1")
        if not 0 < self.refine_at < 1:
            raise UsageError(f"refine-at is {self.refine_at:g}; choose more than 0 and less than 1")
        self._check_pictures()

    def _check_pictures(self) -> None:
        image, mask = self.image, self.mask
        for name, picture in (("image", image), ("mask", mask)):
            if picture is not None and not isinstance(picture, np.ndarray):
                raise UsageError(f"{name} is {type(picture).__name__}; expected a uint8 array, as numpy.asarray gives")
        if image is not None and (image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0):
            raise UsageError(f"image is {image.dtype} {list(image.shape)}; expected uint8 [H, W, 3]")
        if mask is None:
            return
        if image is None:
            raise UsageError("a mask needs the image that it belongs to")
        if mask.dtype != np.uint8 or mask.shape != image.shape[:2]:
            raise UsageError(f"mask is {mask.dtype} {list(mask.shape)}; expected uint8 {list(image.shape[:2])}")

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
    strength: float = 0.6  # of a picture to start from
    mask_strength: float = 0.6  # where it comes with a mask
    qwen_sizes: bool = False  # whether it was trained for the sizes of Qwen-Image

    def size(self, aspect: Fraction) -> tuple[int, int]:
        """Width and height for `aspect`: those that Qwen-Image was trained for, else of about the usual area."""
        if not self.qwen_sizes:
            return sizes.aspect_size(aspect, self.width * self.height)
        return sizes.ASPECT_SIZES.get(aspect) or sizes.aspect_size(aspect, sizes.ASPECT_AREA)

    def sides(self, width: int | None, height: int | None, picture: NDArray[np.uint8] | None = None) -> tuple[int, int]:
        """Width and height where one or both are not said: with a `picture` [H, W, 3] to start from in its proportions,
        else the usual ones. Raises UsageError."""
        if picture is None or (width is not None and height is not None):
            return self.width if width is None else width, self.height if height is None else height
        rows, columns = picture.shape[:2]
        if width is not None:
            return width, max(1, round(Fraction(_whole("width", width) * rows, columns)))
        if height is not None:
            return max(1, round(Fraction(_whole("height", height) * columns, rows))), height
        return columns, rows


class Asked(TypedDict, total=False):
    """What a call may say besides the prompt. None takes the model's default; the seed's is 0."""

    negative_prompt: Annotated[str | None, "what to steer away from; needs guidance above 1"]
    width: Annotated[int | None, "pixels; beside image, in its proportions"]
    height: Annotated[int | None, "pixels; beside image, in its proportions"]
    steps: Annotated[int | None, f"1 to {MAX_STEPS}"]
    guidance: Annotated[float | None, f"0 to {MAX_GUIDANCE}; at 1 or below one pass, without a negative prompt"]
    seed: Annotated[int | None, "0 to 2**64 - 1; 0 unless given"]
    latents: Annotated[NDArray[np.float32] | None, "noise [1, C, H/8, W/8] in place of the seed's"]
    sampler: Annotated[str | None, "a name that `qwenimg samplers` lists"]
    schedule: Annotated[str | None, "noise levels: model, karras, exponential, beta, ays, ..."]
    image: Annotated[NDArray[np.uint8] | None, "[H, W, 3], the picture to start from"]
    mask: Annotated[NDArray[np.uint8] | None, "[H, W], from 128 on where image is to be made anew"]
    strength: Annotated[float | None, "above 0 to 1, the share of the schedule that is run on image"]
    clip_skip: Annotated[int | None, f"0 to {MAX_CLIP_SKIP}, last layers of CLIP that are left out"]
    guidance_rescale: Annotated[float | None, "0 to 1, against pictures that guidance overexposes"]
    refine_at: Annotated[float | None, "between 0 and 1 of the trained times, where a refiner takes over"]


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise UsageError(f"{name} is {short(value, 40)!r}; expected a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # an integer beyond every float, an array of several numbers
        raise UsageError(f"{name} is {short(value, 40)}; expected a number") from None


def _whole(name: str, value: object) -> int:
    """`value` as an int, NumPy's integers included; a UsageError for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} is {short(value, 40)!r}; expected a whole number") from None
