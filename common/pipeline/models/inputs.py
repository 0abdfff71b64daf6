"""Pictures as inputs of a model: how many it takes, alpha, masks, reference pictures, and layers. Each family has one
`PictureInputs`; its fields say what differs, as `Guidance` does for guidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.vae import VAEHalves
from qwenimg.common.pictures import pixels
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.prompts import check
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.request import Request

# Masks


@dataclass(frozen=True, kw_only=True)
class BlendedMask:
    """A mask that the model does not see: the picture outside it is kept by blending."""

    is_input: ClassVar[bool] = False
    soft: bool = False  # True: a latent at its edge is regenerated in part; else each is wholly or not at all
    put_back: bool = False  # True: the picture outside is put back as pixels, since the model draws it anew

    def started(self, request: Request, encode: Callable[[], Latents], draw: Callable[[], object]) -> Latents | None:
        return encode()

    def masked(self, encode: Callable[[], Latents]) -> Latents | None:
        return None

    def in_latents(self, hole: NDArray[np.bool_], scale: int) -> Latents:
        return scaled(hole, scale) if self.soft else in_latents(hole, scale, 1)

    def everything(self, vae: VAEHalves, shape: LatentShape) -> list[Latents]:
        return []


@dataclass(frozen=True, kw_only=True)
class MaskInput:
    """A mask as an input of the model, together with the picture without its masked part. Same methods as
    `BlendedMask`."""

    is_input: ClassVar[bool] = True
    put_back: ClassVar[bool] = False
    side: int = 1  # the values of the mask along a side of a latent
    samples_unused: bool = False  # True: random numbers are drawn for the latents of a picture that is not used

    def started(self, request: Request, encode: Callable[[], Latents], draw: Callable[[], object]) -> Latents | None:
        """Return the latents of the picture, which `encode` makes; None for a run from pure noise. draw: draws the
        random numbers for them."""
        if request.strength < 1:
            return encode()
        if self.samples_unused:  # like diffusers, which encodes it all the same
            draw()
        return None

    def masked(self, encode: Callable[[], Latents]) -> Latents | None:
        """Return the latents of the picture without its masked part, which `encode` makes; None if no input."""
        return encode()

    def in_latents(self, hole: NDArray[np.bool_], scale: int) -> Latents:
        """Return `hole` [H, W] as [1, side * side, h, w] for latents of `scale` pixels a side: each latent gets the
        first pixel of side x side equal cells."""
        return in_latents(hole, scale, self.side)

    def everything(self, vae: VAEHalves, shape: LatentShape) -> list[Latents]:
        """Return the channels of a run without a mask, which draws everything: a mask of ones, and the latents of a
        gray picture."""
        height, width = shape.rows * vae.scale, shape.columns * vae.scale
        latents, _ = vae.encode(np.zeros((1, 3, height, width), np.float32))
        return [np.ones((1, self.side**2, shape.rows, shape.columns), np.float32), latents]


def scaled(hole: NDArray[np.bool_], scale: int) -> Latents:
    """Return `hole` [H, W] scaled to latents [1, 1, h, w] bilinearly: of each the mean of its four pixels in the
    middle."""
    middle = scale // 2
    above, below = (hole[at::scale].astype(np.float32) for at in (middle - 1, middle))
    rows = above + below
    mean = np.float32(0.25) * (rows[:, middle - 1 :: scale] + rows[:, middle::scale])
    return mean[None, None]


def in_latents(hole: NDArray[np.bool_], scale: int, values: int) -> Latents:
    """Return `hole` [H, W] as [1, values * values, h, w] for latents of `scale` pixels a side: a latent's channels are
    the first pixels of values x values equal cells."""
    rows = hole[:: scale // values, :: scale // values]
    h, w = rows.shape[0] // values, rows.shape[1] // values
    parts = rows.reshape(h, values, w, values).transpose(1, 3, 0, 2)
    return parts.reshape(1, values**2, h, w).astype(np.float32)


# Pictures that the model sees besides the text

Size: TypeAlias = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True, kw_only=True)
class References:
    """The pictures of a request that a model sees besides the text."""

    sizes: Callable[[Request], list[Size]]  # in which it sees them, which the VAE takes. Raises UsageError
    values: Callable[[Request], list[Latents]]  # each [1, C, h, w] in -1..1, for the VAE
    notes: Callable[[Request], list[str]] = lambda request: []  # lines about them for the user


def each_picture(
    size: Callable[[Uint8], Size], values: Callable[[Uint8], Latents], name: Callable[[int], str] | None = None
) -> References:
    """Return references whose sizes and values depend on the picture alone. name: returns a picture's name by its
    number (from 1), for a note about its size; None: no note."""

    def notes(request: Request) -> list[str]:
        if name is None:
            return []
        named = ((name(i), "x".join(map(str, size(image)))) for i, image in enumerate(request.images, 1))
        return [f"{one} is seen at {shown}, whatever the size of the result" for one, shown in named]

    return References(
        sizes=lambda request: list(map(size, request.images)),
        values=lambda request: list(map(values, request.images)),
        notes=notes,
    )


# All of it


@dataclass(frozen=True, kw_only=True)
class OtherModels:
    """Models that take what another one refuses, for its message; "": none is named."""

    several: str = ""  # they see several pictures
    describing: str = ""  # they write the prompt of a picture


NO_OTHERS = OtherModels()


@dataclass(frozen=True, kw_only=True)
class PictureInputs:
    """The use that a model makes of the pictures of a request. By default it starts from one, and sees none."""

    fewest: int = 0  # pictures of a request
    most: int = 1
    refusal: str = ""  # of a model that takes none, the reason
    alpha: bool = False  # True: pictures keep their alpha; else they are put on white
    repeats: bool = False  # True: from the noise that a picture was made of, the model draws it again
    mask: BlendedMask | MaskInput = BlendedMask()
    references: References | None = None
    # The left and top of the image in what is drawn, for a model whose reference has edges of its own
    origin: Callable[[Request], tuple[int, int]] = lambda request: (0, 0)
    control: bool = False  # True: it needs a control picture, which it sees itself
    layers: Callable[[Request], int] | None = None  # the number of layers that a picture is taken apart into
    # Returns a request without a prompt with one that the model writes for its picture. Raises UsageError
    describe: Callable[[Request], Request] | None = None

    def frames(self, request: Request) -> int:
        """Return the number of images that are drawn at once: 1, or one more than the layers. The first is then their
        composite, which is dropped."""
        return 1 if self.layers is None else self.layers(request) + 1

    def sizes(self, request: Request) -> list[Size]:
        """Return the size in which the model sees each picture. Raises UsageError."""
        return [] if self.references is None else self.references.sizes(request)

    def seen(self, request: Request) -> list[Latents]:
        """Return the pixels [1, C, h, w] in -1..1 of each picture that the model sees."""
        return [] if self.references is None else self.references.values(request)

    def notes(self, request: Request) -> list[str]:
        """Return lines about the pictures that the model sees, for the user."""
        return [] if self.references is None else self.references.notes(request)

    def encodes(self, request: Request) -> bool:
        """Return whether a run encodes a picture."""
        return bool(request.images or request.controls) or request.encodes_start or self.mask.is_input

    def in_channels(self, picture: Uint8) -> Uint8:
        """Return `picture` with alpha if the model sees it."""
        return pixels.with_alpha(picture) if self.alpha else picture

    def described(self, request: Request) -> Request:
        """Return the request with the prompt that is encoded: its own, or one that the model writes. Raises
        UsageError for one that cannot be written."""
        return request if self.describe is None else self.describe(request)

    def placeholder(self) -> dict[str, Any]:
        """Return the options of a call without pictures that plans or measures an image: a grey picture for a model
        that needs one."""
        grey = np.full((1024, 1024, 3), pixels.HALF, np.uint8)
        control = {"control": (Control("", "grey", picture=grey),)} if self.control else {}
        return control | ({"image": grey} if self.fewest else {})

    def checked(self, request: Request, name: str, others: OtherModels, has_text: bool = False) -> Request:
        """Return a request as the model `name` takes it: with its pictures on white, unless it sees alpha. has_text:
        a control makes text of its picture, so that no prompt is needed. Raises UsageError."""
        if not has_text:
            self._check_prompt(request, others)
        self.check_count(len(request.images), name, others)
        if self.control and not any(not one.network for one in request.controls):
            shown = clean(name, 60)
            raise UsageError(
                f"{shown} needs a control picture: give it, as in qwenimg PROMPT --control canny@PICTURE -m {shown}"
            )
        return request if self.alpha else request.opaque()

    def _check_prompt(self, request: Request, others: OtherModels) -> None:
        if self.describe is not None:
            return
        if others.describing and request.images and not request.prompt.strip():
            able = f"only {others.describing} describes a picture itself"
            raise UsageError(f"the prompt is empty; say what to draw: {able}")
        check.check_not_blank(request.prompt)

    def check_count(self, count: int, name: str, others: OtherModels) -> None:
        """Raise UsageError for `count` pictures that the model `name` does not take."""
        shown = clean(name, 60)
        if count < self.fewest:
            raise UsageError(f"{shown} needs a picture: give it, as in qwenimg PROMPT -i PICTURE -m {shown}")
        if count > self.most == 0:
            raise UsageError(f"{shown} draws from text alone: {self.refusal}; leave the picture out")
        if count > self.most:
            several = f"; several are for {others.several}" if others.several and self.most == 1 else ""
            taken = "one" if self.most == 1 else f"at most {self.most}"
            raise UsageError(f"{count} pictures are given, {shown} takes {taken}{several}")

    def warnings(
        self, request: Request, pictures: Sequence[Uint8], noises: Sequence[str], own: Callable[[], str]
    ) -> list[str]:
        """Return warnings about the `pictures` of a call: about alpha that the model ignores, and about a picture made
        from the same noise as this request, if the model would repeat it. noises: the hashes of the pictures' noise;
        own: returns the request's."""
        lines = []
        if not self.alpha and any(map(pixels.has_alpha, pictures)):
            lines.append("image is transparent in parts; they are taken as white")
        if self.repeats and noises and request.starts_from_noise and own() in noises:
            again = "image was made with this seed at this size, and the model tends to draw it again, with halos"
            lines.append(f"{again}: give another seed or size")
        return lines
