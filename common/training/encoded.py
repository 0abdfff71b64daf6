"""The pictures of a folder as a model learns them: latents and text states, made once, before the first step.

Both are kept on the disk, in this program's own cache, by the content of the picture or the caption and by all that
they depend on besides: so a changed picture or caption is encoded again, and neither VAE nor text encoder is opened for
what is there already."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import NumericsError, QwenimgError, UsageError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import shown_path
from qwenimg.common.memory import own_cache
from qwenimg.common.pictures import pixels
from qwenimg.common.pictures.input import read_image
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.request.request import Request
from qwenimg.common.runtime import text_store
from qwenimg.common.runtime.text_store import TextStore
from qwenimg.common.training import buckets
from qwenimg.common.training.example import Example
from qwenimg.common.training.folder import Folder, Picture

LATENTS_ON_DISK = 4 << 30  # bytes of all that are kept; those of 1024 x 1024 pixels take 1 MB
TEXTS_ON_DISK = 8 << 30  # bytes; states of 100 tokens of Qwen-Image take 1.4 MB
TOGETHER = 200  # captions that are announced at once
BLANK = " "  # the prompt of a caption that is dropped

Encoding = Callable[[int, int], None]
"""Called with the number of pictures that are done, and of all."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of the pictures that are learnt. dropout: the share of captions that are dropped. flips: mirror half of
    the pictures. alpha_mask: transparent parts are not learnt; else they are white. enlarge: make small pictures
    larger."""

    side: int
    dropout: float = 0.05
    flips: bool = False
    alpha_mask: bool = False
    enlarge: bool = False

    def __post_init__(self) -> None:
        if not 64 <= self.side <= 2048:
            raise UsageError(f"--size is {self.side}; choose 64 to 2048 pixels")
        if not 0 <= self.dropout <= 1:
            raise UsageError(f"--dropout is {self.dropout}; choose 0 to 1")

    def sizes(self, folder: Folder) -> dict[Path, tuple[int, int]]:
        """Return the size at which each picture is learnt. Raises ModelError for one that is too small."""
        found = {}
        for one in folder.pictures:
            try:
                found[one.path] = buckets.bucket(one.size, self.side, enlarge=self.enlarge)
            except UsageError as error:
                raise bad(one.path, str(error)) from None
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Encoded:
    """A picture as it is, and mirrored if it may be."""

    forms: tuple[Example, ...]


class EncodedPictures:
    """The pictures of a folder, encoded; see `Pictures`. Each is there as often as its repeats say."""

    def __init__(
        self, pipe: Pipeline, folder: Folder, options: DataOptions, done: Encoding = lambda count, total: None
    ):
        """Encode what is not in the cache. Raises QwenimgError for a picture that cannot be read or encoded."""
        self.options, self.store = options, _store(pipe)
        self.examples: list[_Encoded] = []
        sizes, digest = options.sizes(folder), hashlib.sha256()
        for number, one in enumerate(folder.pictures, 1):
            encoded, content = self._encode(pipe, one, sizes[one.path])
            digest.update(content.encode())
            self.examples += [encoded] * one.repeats
            done(number, len(folder.pictures))
        self.digest = digest.hexdigest()
        """The hash of pictures, captions, sizes and options: of all that decides what is learnt."""

    def __len__(self) -> int:
        return len(self.examples)

    def example(self, index: int, generator: np.random.Generator) -> Example:
        """Return picture `index`, perhaps mirrored, or without its caption."""
        return chosen(self.examples[index].forms, self.options.dropout, generator)

    @property
    def whole(self) -> list[Example]:
        """Each picture once, as it is, with its caption."""
        return list(dict.fromkeys(encoded.forms[0] for encoded in self.examples))

    @property
    def requests(self) -> list[Request]:
        """The requests of all captions, and of a dropped one."""
        requests = [encoded.forms[0].request for encoded in dict.fromkeys(self.examples)]
        dropped = [replace(one, prompt=BLANK) for one in requests] if self.options.dropout else []
        return [*requests, *dropped]

    def _encode(self, pipe: Pipeline, one: Picture, size: tuple[int, int]) -> tuple[_Encoded, str]:
        """Return a picture, encoded, and a text of all that it depends on."""
        picture = _read(one.path)
        seen = None if one.source is None else _read(one.source)
        content = [_hash(picture), one.caption, *size, self.options.flips, self.options.alpha_mask]
        content += [] if seen is None else [_hash(seen)]
        forms = [picture] if not self.options.flips else [picture, np.ascontiguousarray(picture[:, ::-1])]
        sources = (
            [seen] * len(forms) if seen is None or len(forms) == 1 else [seen, np.ascontiguousarray(seen[:, ::-1])]
        )
        examples = [
            self._form(pipe, one, fitted(form, *size), size, image) for form, image in zip(forms, sources, strict=True)
        ]
        return _Encoded(forms=tuple(examples)), repr(content)

    def _form(
        self, pipe: Pipeline, one: Picture, picture: Uint8, size: tuple[int, int], image: Uint8 | None
    ) -> Example:
        model = pipe.model
        asked: dict[str, Any] = {"width": size[0], "height": size[1], "seed": 0}
        if image is not None:
            asked["image"] = image
        try:
            # A caption is words: no choices, weights or parts
            request = replace(pipe.check("a picture", **asked), prompt=model.as_text(one.caption))
        except QwenimgError as error:
            raise bad(one.path, str(error)) from None
        shown = picture if model.inputs.alpha else pixels.over_white(picture)
        values = pixels.from_uint8(model.inputs.in_channels(shown))
        references = model.inputs.seen(request) if request.images else ()
        latents, *others = (self._latents(model, each, one.path) for each in (values, *references))
        masked = self.options.alpha_mask and pixels.has_alpha(picture)
        mask = share_of_latents(picture, *model.vae.sides(*picture.shape[:2])) if masked else None
        return Example(latents=latents, request=request, references=tuple(others), mask=mask)

    def _latents(self, model: DiffusionModel, values: Latents, path: Path) -> Latents:
        """Return the latents of pixels [1, C, H, W], from the disk or by the VAE: their mean."""
        shape = (1, model.channels, *model.vae.sides(*values.shape[2:]))
        name = self._name(model, values)
        if (kept := self.store.get(name, [shape])) is not None:
            return kept[0]
        latents = np.asarray(model.vae.latents(values, None), np.float32)
        if not np.isfinite(latents).all():
            raise NumericsError(f"{shown_path(path)}: its latents are not finite; give --precision fp32")
        if latents.shape == shape:
            self.store.put(name, [latents])
        return latents

    def _name(self, model: DiffusionModel, values: Latents) -> str | None:
        precision = model.runtime.precision
        asked = ["latents", hashlib.sha256(values.tobytes()).hexdigest(), list(values.shape)]
        plan = model.vae.component.plan
        return text_store.key(model.engine.name, precision.compute_dtype("vae"), [plan], asked)


def chosen(forms: Sequence[Example], dropout: float, generator: np.random.Generator) -> Example:
    """Return one of the forms of a picture, as it is and mirrored; without its caption in the share `dropout`."""
    flipped, dropped = generator.random(2)  # the same numbers, whatever the options
    example = forms[int(flipped < 0.5) if len(forms) > 1 else 0]
    return example if dropped >= dropout else without_caption(example)


def encode_texts(model: DiffusionModel, requests: Sequence[Request], request: Callable[[Request], Request]) -> None:
    """Encode all prompts of `requests`, each as a step asks for it by `request`, so that no step opens a text encoder
    again. Raises QwenimgError."""
    model.runtime.keep_prompts(TEXTS_ON_DISK)
    asked = [request(one) for one in requests]
    for first in range(0, len(asked), TOGETHER):
        some = asked[first : first + TOGETHER]
        for i in range(len(some)):
            model.announce(some[i:])


def without_caption(example: Example) -> Example:
    return replace(example, request=replace(example.request, prompt=BLANK))


def _store(pipe: Pipeline) -> TextStore:
    return TextStore(pipe.notify, own_cache.folder() / "latents", LATENTS_ON_DISK)


def _read(path: Path) -> Uint8:
    picture, _ = read_image(path)
    return picture


def _hash(picture: Uint8) -> str:
    return hashlib.sha256(repr(picture.shape).encode() + picture.tobytes()).hexdigest()


def fitted(picture: Uint8, width: int, height: int) -> Uint8:
    """Return a picture [H, W, C] scaled so that it covers width x height, and cut to that around its middle."""
    rows, columns = picture.shape[:2]
    scale = max(width / columns, height / rows)
    scaled = pixels.fit(picture, max(width, round(columns * scale)), max(height, round(rows * scale)))
    top, left = (scaled.shape[0] - height) // 2, (scaled.shape[1] - width) // 2
    return np.ascontiguousarray(scaled[top : top + height, left : left + width])


def share_of_latents(picture: Uint8, rows: int, columns: int) -> NDArray[np.float32]:
    """Return how opaque the pixels of each of rows x columns latents are [1, 1, h, w], 0 to 1."""
    return pixels.shares(picture[..., 3] / 255, rows, columns)[None, None].astype(np.float32)


def described(options: DataOptions) -> Mapping[str, object]:
    """Return the options as a LoRA's header has them."""
    return {"size": options.side, "dropout": options.dropout, "flips": options.flips, "alpha_mask": options.alpha_mask}
