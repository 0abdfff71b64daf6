"""Pictures that a worker makes larger: by resampling or an upscaler for a client that sent one, or once it is drawn."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenimg.cli.workers import messages
from qwenimg.common.base.amounts import duration
from qwenimg.common.base.errors import DoesNotFit, ModelError, UsageError
from qwenimg.common.base.safe_files import in_memory
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.run import encoded, kept
from qwenimg.common.numbers.sizes import MAX_SIDE

if TYPE_CHECKING:
    from qwenimg import Pipeline
    from qwenimg.common.pictures.pixels import Uint8
    from qwenimg.common.pipeline.result import Result
    from qwenimg.common.upscaling.record import Enlargement
    from qwenimg.common.upscaling.upscaling import Upscaling


def enlarged(pipe: Pipeline, task: messages.Draw, how: messages.Enlarging) -> messages.PictureDrawn:
    """Return the larger picture of a task, with the texts of the one that was sent. Raises UsageError for a picture
    that cannot be read or becomes too large, and DoesNotFit."""
    from qwenimg.common.jobs.legal import read_pictures
    from qwenimg.common.pictures import pixels
    from qwenimg.common.pipeline.encode import encode_texts
    from qwenimg.common.request.recipe import XMP
    from qwenimg.common.upscaling import record

    [sent] = task.job.files.images
    assert isinstance(sent, bytes)
    try:
        inputs, _ = read_pictures(task.job.files)
    except ModelError as error:
        raise UsageError(str(error)) from None
    picture = inputs.images[0]
    height, width = picture.shape[:2]
    by = how.by or max(how.size[0] / width, how.size[1] / height)
    sides = max(1, round(width * by)), max(1, round(height * by))
    if max(sides) > MAX_SIDE:
        raise UsageError(f"upscaling makes it {sides[0]}x{sides[1]}; at most {MAX_SIDE} pixels a side are made")
    before = _texts(sent)
    if how.upscaler == "lanczos":
        larger = pixels.fit(picture, *sides)
    elif how.upscaler == "nearest":
        larger = pixels.nearest(picture, *sides)
    else:
        larger, before = _by_network(pipe, how, picture, by, before)
    texts = {name: text for name, text in before.items() if name in (*record.KEPT, *record.OWN)}
    if not how.by and how.crops:
        larger = _cropped(larger, *how.size)
    data = encode_texts(larger, texts, record.mark(XMP, before), task.suffix)
    return messages.PictureDrawn(id=task.id, index=0, data=data, recipe={}, seconds=0.0)


def _by_network(
    pipe: Pipeline, how: messages.Enlarging, picture: Uint8, by: float, before: dict[str, str]
) -> tuple[Uint8, dict[str, str]]:
    from qwenimg.common.hub.network_search import read_upscaler, upscaling
    from qwenimg.common.upscaling import record

    try:
        opened = read_upscaler(Path(how.upscaler))
    except ModelError as error:
        raise UsageError(str(error)) from None
    with closing(opened) as upscaler:
        ready = upscaling(upscaler, pipe.engine, "fp32", pipe.runtime.max_memory, lambda kind, text: None)
        try:
            _check(ready, picture.shape[0], picture.shape[1], by, how.seconds)
            larger = ready.enlarged(picture, by)
        except DoesNotFit:
            pipe.free_transformer()  # beside which it does not fit
            larger = ready.enlarged(picture, by)
        finally:
            ready.residents.free()
        return larger, record.texts(ready, picture, by, before)


def check(larger: Enlargement, width: int, height: int, most: float) -> None:
    """Raise UsageError for a picture of width x height that becomes too large, or takes longer than `most` seconds, and
    DoesNotFit for one that no memory holds."""
    sides = larger.by * width, larger.by * height
    if max(sides) > MAX_SIDE:
        raise UsageError(
            f"--upscale {larger.by} makes it {sides[0]}x{sides[1]}; at most {MAX_SIDE} pixels a side are made"
        )
    try:
        _check(larger.upscaling, height, width, larger.by, most)
    except UsageError as error:
        raise UsageError(f"--upscale {larger.by}: {error}") from None


def drawn(
    pipe: Pipeline, larger: Enlargement | None, result: Result, pixels: Uint8, suffix: str
) -> tuple[bytes, dict[str, Any]]:
    """Return the file of a picture that was drawn, made larger by `larger`, and what that adds to its recipe for
    clients. One that cannot be made larger has its own size, and a warning in its recipe."""
    if larger is None:
        return encoded(pixels, result.recipe, suffix, None)[0], {}
    data, fault = encoded(pixels, result.recipe, suffix, larger)
    if isinstance(fault, DoesNotFit):
        pipe.free_transformer()  # beside which it does not fit
        data, fault = encoded(pixels, result.recipe, suffix, larger)
    if fault is None:
        return data, {"upscale": larger.by, "upscale_with": clean(larger.upscaling.upscaler.path.stem, 200)}
    result.warn([str(kept(fault, "the picture has its own size"))])
    return encoded(pixels, result.recipe, suffix, None)[0], {}


def _check(ready: Upscaling, height: int, width: int, by: float, most: float) -> None:
    """Raise UsageError for a picture that takes longer than `most` seconds."""
    ready.passes(by)
    seconds = ready.seconds(height, width, by)
    if most and seconds > most:
        raise UsageError(
            f"upscaling takes {duration(seconds)} here, and the server ends what takes more than {duration(most)}; "
            "send a smaller picture"
        )


def _cropped(picture: Uint8, width: int, height: int) -> Uint8:
    top, left = max(0, (len(picture) - height) // 2), max(0, (picture.shape[1] - width) // 2)
    return picture[top : top + height, left : left + width]


def _texts(data: bytes) -> dict[str, str]:
    """Return the texts in a picture's file; none in one that has no readable ones."""
    from qwenimg.common.pictures.texts import read_texts

    try:
        return read_texts(in_memory("image", data))
    except ModelError:
        return {}
