"""Vision towers of text encoders in files of their own, as llama.cpp has them (mmproj)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.base.text import clean
from qwenimg.common.formats import gguf
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.encoders import vision_tower

FIRST, SECOND = "text_encoder", "text_encoder_2"
_PROJECTOR = "clip.projector_type"  # of a vision tower for llama.cpp, the layers behind it


def is_tower(header: Header, projector: str) -> bool:
    """Return whether a file with this header is a vision tower alone with layers of the kind `projector` behind it."""
    return gguf.architecture(header) == vision_tower.MMPROJ and header.metadata.get(_PROJECTOR) == projector


def language_first(given: Mapping[str, Path], own: Path, is_own: Callable[[Header], bool]) -> Mapping[str, Path]:
    """Return the `given` parts with the file of the language model as the first text encoder and its vision tower, for
    which `is_own` is true, as the second. own: the model's own text encoder. Raises ModelError unless it is one of
    each."""
    if SECOND not in given:
        return given
    first, second = given.get(FIRST, own), given[SECOND]
    towers = [is_file(path) and is_own(peek(path)) for path in (first, second)]
    if sum(towers) != 1:
        what = "both are vision towers" if all(towers) else "neither is a vision tower (mmproj)"
        raise ModelError(
            f"{clean(first, 80)} and {clean(second, 80)}: {what}; a language model and a tower go together"
        )
    return {**given, FIRST: second, SECOND: first} if towers[0] else given
