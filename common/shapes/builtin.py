"""The built-in model: its folder, its messages, and the prompts that it can draw.

It has the classes and the code path of the 20 B model, and draws coloured shapes only. It is used if no model is named
and no other is there; it never stands in for a model that was named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.config import data_folder
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families import catalog
from qwenimg.common.request.request import Request

NAME = catalog.BUILT_IN.name
SHOWN = 8  # the most unknown words that are listed
TRAINED_SIZES = ((128, 128), (160, 96), (96, 160), (192, 192), (256, 256), (336, 192), (192, 336))
"""Width and height in pixels of its training images."""
AREA_MARGIN = 1.05  # for an aspect, whose size in multiples of 16 has not exactly the area


def folder() -> Path:
    """Return the model's folder, whether or not it exists."""
    return data_folder(NAME)


def present() -> bool:
    """Return whether this installation has the model."""
    return (folder() / "model_index.json").is_file()


def absent() -> ModelError:
    """Return the error for a request for the model if it is not installed."""
    return ModelError(
        f"{NAME}: the built-in model is not in this installation ({clean(folder(), 120)}); install a released wheel, "
        f"or train one in a clone: python tools/train.py all --out FOLDER"
    )


def writes_nothing(cure: str = "") -> UsageError:
    """Return the error for a text that the model should write: it was trained without a head. cure: the end of it."""
    able = "Qwen-Image, Qwen-Image-2.1, Z-Image and FLUX.2 klein do"
    return UsageError(f"{NAME}: the built-in model writes no texts; {able}{cure}")


def another_writer() -> str:
    """Return the cure on a command line."""
    return f": {_pull('z-image-turbo')}; or name another one by --with, for a picture by --rewrite-with"


def known_prompts() -> list[str]:
    """Return prompts of all that it knows, in an order that is always the same: no two alike are neighbours."""
    from qwenimg.common.shapes.scenes import PALETTE, SHAPES, SIZES

    named = [f"a {size} {color} {shape}" for size in SIZES for color in PALETTE for shape in SHAPES]
    return [named[i * 37 % len(named)] for i in range(len(named))]


# Messages


def real_model() -> str:
    """Return the command that lists the models which fit this machine, and the one that downloads the smallest model.
    (`hub/forecast` names a fitting model itself.)"""
    return f"qwenimg plan lists what fits here, and how long it takes; the smallest: {_pull(catalog.smallest().name)}"


def _pull(name: str) -> str:
    return f"qwenimg pull {name} ({size_text(catalog.KNOWN[name].bytes)})"


def notice(parameters: int) -> str:
    """Return the line that is shown if the model was not named."""
    about = f"{parameters / 1e6:.1f} M parameters, draws coloured shapes only"
    return f'built-in demo model "shapes" ({about}); real models: qwenimg plan'


# Its limits


def check_prompts(prompts: Iterable[str], real: Callable[[], str] = real_model) -> None:
    """Raise ModelError for the first prompt that names no shape at all. real: returns the commands for a real model."""
    from qwenimg.common.shapes.words import parse

    for prompt in prompts:
        if not parse(prompt).has_noun:
            raise ModelError(
                f"the built-in demo model draws coloured shapes only, and {clean(prompt, 30)!r} names none; "
                f"real model: {real()}; or draw it: -m shapes"
            )


def unknown_words(prompts: Iterable[str], where: str = "") -> str | None:
    """Return a line with the words of `prompts` outside its vocabulary, once each, or None."""
    from qwenimg.common.shapes.words import parse

    words = list(dict.fromkeys(word for prompt in prompts for word in parse(prompt).unknown))
    if not words:
        return None
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return f"words{where} it does not know: " + ", ".join(clean(word, 24) for word in words[:SHOWN]) + more


def other_sizes(sizes: Iterable[tuple[int, int]]) -> str | None:
    """Return a line that lists the (width, height) pairs smaller, larger or longer than its training sizes, or None."""
    areas = [width * height for width, height in TRAINED_SIZES]
    longest = max(width / height for width, height in TRAINED_SIZES)

    def within(width: int, height: int) -> bool:
        area, aspect = width * height, max(width / height, height / width)
        return min(areas) / AREA_MARGIN <= area <= max(areas) * AREA_MARGIN and aspect <= longest

    others = [f"{width}x{height}" for width, height in sizes if not within(width, height)]
    if not others:
        return None
    more = f" and {len(others) - SHOWN} other sizes" if len(others) > SHOWN else ""
    trained = ", ".join(f"{width}x{height}" for width, height in TRAINED_SIZES)
    return f"it was trained at {trained}; at {', '.join(others[:SHOWN])}{more} shapes may be missing or drawn twice"


def advise(request: Request) -> list[str]:
    """Return warnings about a request: of words that it does not know, and of a size."""
    lines = (
        unknown_words([request.prompt]),
        unknown_words([request.negative_prompt], " of the negative prompt"),
        other_sizes([(request.width, request.height)]),
    )
    return [line for line in lines if line]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Checks of a request, before the model is opened. If it was `named`, every prompt is allowed."""

    named: bool
    real: Callable[[], str] = real_model  # returns the commands for a real model

    def check(self, prompt: str, few_steps: str | None = None) -> None:
        """Raise ModelError for a prompt that it cannot draw, and for few steps, unless it was named."""
        if self.named:
            return
        if few_steps:
            raise ModelError(
                f"few steps ({clean(few_steps, 40)}) are for real models, and without -m the built-in one draws; "
                f"real model: {_pull(catalog.DEFAULT)}, and after it the LoRA that is then named"
            )
        check_prompts([prompt], self.real)
