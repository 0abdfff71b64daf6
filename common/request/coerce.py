"""Conversion of a Python call's values to the types of a `Request`.

Besides arrays, numbers and texts a call may have images as PIL images and files, and bits as a number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.arguments import home, path_text
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.prompts.wildcards import TEMPLATES
from qwenimg.common.request import control_text
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.embedding_text import Embedding
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.option import as_number

if TYPE_CHECKING:
    from PIL.Image import Image

Picture: TypeAlias = "NDArray[np.uint8] | Image | str | os.PathLike[str]"
"""An initial image or a mask: an array, a PIL image, or a file."""
Pictures: TypeAlias = "Picture | Sequence[Picture]"
"""Initial images, or those that a model sees."""
_Lora: TypeAlias = "Lora | str | os.PathLike[str] | tuple[str | os.PathLike[str], float]"
Loras: TypeAlias = "_Lora | Sequence[_Lora]"
"""One LoRA or several: each `FILE[:SCALE]`, a path, or either with its strength."""
_Embedding: TypeAlias = "Embedding | str | os.PathLike[str]"
Embeddings: TypeAlias = "_Embedding | Sequence[_Embedding]"
"""One embedding or several: each `FILE` or `NAME=FILE`, or a path."""
_Control: TypeAlias = (
    "Control | str | tuple[str | os.PathLike[str], Picture] | tuple[str | os.PathLike[str], Picture, float]"
    " | tuple[str | os.PathLike[str], Picture, float, tuple[float, float]]"
    " | tuple[str | os.PathLike[str], list[Picture | tuple[Picture, Picture]], float | Mapping[str, float]]"
)
Controls: TypeAlias = "_Control | Sequence[_Control]"
"""One control or several: each `MODEL=PICTURE[:SCALE[:START-END]]`, or model and picture, with its scale and shares of
the steps."""
INTERNAL = (*TEMPLATES.values(),)
"""Fields of a request that no user names."""


def read_pictures(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a call with images as arrays, and a line for each conversion of one. Raises UsageError, and
    ModelError for a file."""
    converted, notes = dict(options), list[str]()
    if converted.get("image") is not None:
        converted["image"], lines = _images(converted["image"])
        notes += lines
    if converted.get("control") is not None:
        converted["control"], lines = controls(converted["control"])
        notes += lines
    if converted.get("mask") is not None:
        first = next((one.picture for one in converted.get("control") or ()), None)
        converted["mask"], lines = _mask(
            converted["mask"], first if converted.get("image") is None else converted["image"]
        )
        notes += lines
    return converted, notes


# Pictures


def _images(value: object) -> tuple[object, list[str]]:
    """Return an image, or a tuple of several, and a line for each conversion."""
    if not _is_list(value):
        return _image(value)
    images = [_image(one) for one in value]  # type: ignore[attr-defined]
    if not images:
        raise UsageError("image is an empty list; give one or more pictures, or leave it out")
    return tuple(image for image, _ in images), [line for _, lines in images for line in lines]


def _image(value: object, name: str = "image") -> tuple[object, list[str]]:
    from qwenimg.common.pictures import in_memory, input

    if isinstance(value, np.ndarray):
        return value, []
    if _is_pil(value):
        return in_memory.srgb(name, value)  # type: ignore[arg-type]
    return input.read_image(_file(name, value))


def noise_hashes(options: Mapping[str, Any]) -> list[str]:
    """Return the hashes of the noise from which a call's images were made, for files and PIL images that carry a
    recipe."""
    from qwenimg.common.pictures.texts import read_texts
    from qwenimg.common.request.recipe import recipe_from_texts

    value: Any = options.get("image")
    hashes = list[str]()
    for one in value if _is_list(value) else [value]:
        with suppress(ModelError, UsageError):  # most have none
            path = Path("image") if _is_pil(one) else _file("image", one)
            info = getattr(one, "info", {})
            texts = {key: text for key, text in info.items() if isinstance(text, str)} if info else read_texts(path)
            hashes.append(recipe_from_texts(texts, path)["noise_sha256"])
    return hashes


def _mask(value: object, image: object) -> tuple[object, list[str]]:
    from qwenimg.common.pictures import in_memory, input

    if isinstance(image, tuple):
        image = image[0]
    if not isinstance(image, np.ndarray) or image.ndim != 3:
        raise UsageError("a mask needs the image that it belongs to")
    if isinstance(value, np.ndarray):
        grey = value.dtype == np.uint8 and value.ndim == 2 and value.size  # the request refuses another
        return in_memory.fitted("mask", value, image) if grey else (value, [])
    if _is_pil(value):
        mask, notes = in_memory.mask("mask", value)  # type: ignore[arg-type]
        mask, more = in_memory.fitted("mask", mask, image)
        return mask, notes + more
    return input.read_mask(_file("mask", value), image)


def _is_pil(value: object) -> bool:
    from PIL.Image import Image

    return isinstance(value, Image)


def _file(name: str, value: object) -> Path:
    path = path_text(value)
    if not path:
        kind = type(value).__name__ if path is None else "empty"
        raise UsageError(f"{name} is {clean(kind, 40)}; expected a PIL image, a uint8 array or the path of a file")
    return Path(home(path))


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


# Controls


def controls(value: object) -> tuple[tuple[Control, ...], list[str]]:
    """Return one control or several with their pictures, and a line for each conversion of one. Raises UsageError, and
    ModelError for a file."""
    typed = isinstance(value, tuple) and all(isinstance(one, Control) for one in value)
    several = value if typed or isinstance(value, list) else [value]
    read, notes = list[Control](), list[str]()
    for control, source in (pair for one in several for pair in _sources(one)):  # type: ignore[attr-defined]
        picture, lines = _image(source, "control")
        read.append(replace(control, picture=_opaque(picture)))
        notes += lines
    return tuple(read), notes


def _opaque(picture: object) -> Any:
    """Return a control's picture on white, if it has alpha."""
    from qwenimg.common.pictures import pixels

    is_picture = isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.size
    return pixels.over_white(picture) if is_picture else picture  # type: ignore[arg-type]


def _sources(value: object) -> list[tuple[Control, object]]:
    """Return the controls that one value of a call holds, and the source of the picture of each."""
    if isinstance(value, Control):
        return [(value, value.file if value.picture is None else value.picture)]
    if isinstance(value, str):
        return [(one, one.file) for one in control_text.parse(value)]
    network = path_text(value[0]) if isinstance(value, tuple) and 2 <= len(value) <= 4 else None
    if network is None or not isinstance(value, tuple):
        raise UsageError(
            f"control has {clean(type(value).__name__, 40)}; expected MODEL=PICTURE or a tuple (model, picture, scale, "
            "(start, end)), of which the last two may be left out"
        )
    usual: tuple[Any, ...] = (1.0, (0.0, 1.0))
    _, picture, scale, steps = (*value, *usual[len(value) - 2 :])
    if not isinstance(steps, tuple) or len(steps) != 2:
        shown = clean(steps, 40)
        raise UsageError(f"control {clean(network, 80)}: its steps are {shown}; expected a pair (start, end)")
    told = f"a number of control {clean(network, 60)}"
    start, end = (as_number(told, one) for one in steps)
    named = scale if isinstance(scale, Mapping) else {}
    parts = tuple((str(name), as_number(told, one)) for name, one in named.items())
    scale = 1.0 if parts else as_number(told, scale)
    first, *more = _pictures(network, picture)
    file = path_text(first)
    if file is None:
        control = Control(network, "a picture", "", scale, start, end, parts)
        return [(control, first), *more]
    control = control_text.named(network, file, scale, start, end, parts)
    return [(control, control.file), *more]


def _pictures(network: str, value: object) -> tuple[Any, ...]:
    """Return the first picture of an adapter, and a control with its source for each further one and each mask: `value`
    is a picture, or a list of pictures and of pairs (picture, mask)."""
    if not isinstance(value, list):
        return (value,)
    if not value:
        raise UsageError(f"control {clean(network, 80)}: its list of pictures is empty")
    pairs = [one if isinstance(one, tuple) and len(one) == 2 else (one, None) for one in value]
    further = [(Control(network, _named(one), "also"), one) for one, _ in pairs[1:]]
    masks = [(Control(network, _named(mask), "mask"), mask) for _, mask in pairs if mask is not None]
    return (pairs[0][0], *further, *masks)


def _named(picture: object) -> str:
    return path_text(picture) or "a picture"


# Options of `qwenimg.load`, and `wait`


def quantize_text(value: object) -> str | None:
    """Return the text for `quantize`, which may be a number of bits. Raises UsageError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is not None and not isinstance(value, str):
        shown = clean(value, 40)
        raise UsageError(f"quantize is {shown}; expected 8, 6 or 4, or a text such as text=8,transformer=4")
    return value


def timeout(wait: object) -> float:
    """Return the seconds that a call waits for its turn: 0 for False, infinity for True, else `wait` itself. Raises
    UsageError."""
    if isinstance(wait, bool):
        return math.inf if wait else 0.0
    if not isinstance(wait, (int, float)) or not wait >= 0:
        raise UsageError(f"wait is {clean(wait, 40)}; expected True, False or a number of seconds")
    return math.inf if wait > TIMEOUT_MAX else float(wait)
