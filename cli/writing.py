"""A finished picture to its file or to standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwenimg.cli import streams
from qwenimg.common.base import atomic_files
from qwenimg.common.jobs.pictures import Picture, makes_folder

if TYPE_CHECKING:
    from qwenimg import Result
    from qwenimg.cli.drawing import Flags


def check(picture: Picture, *, no_metadata: bool) -> None:
    """Raises UsageError where the file could not hold the picture or its recipe."""
    from qwenimg.common.pipeline import encode

    if picture.path is not None:
        texts = "" if no_metadata else picture.prompt + (picture.said("negative_prompt") or "")
        encode.check(picture.path.suffix, picture.said("width"), picture.said("height"), texts)


def write(picture: Picture, result: Result, flags: Flags) -> None:
    """In the format that the name ends in; standard output takes a PNG. Raises UsageError and DoesNotFit."""
    from qwenimg.common.pipeline.encode import encode

    recipe = None if flags.no_metadata else result.recipe
    if picture.path is None:
        streams.put(encode(result.pixels, recipe, ".png"))
        return
    if makes_folder(flags.output):
        atomic_files.make_folder(picture.path.parent)
    atomic_files.write_atomic(
        picture.path, encode(result.pixels, recipe, picture.path.suffix), overwrite=flags.overwrite
    )
