"""A request: a prompt and the numbers that go with it, checked before anything is loaded.

Each field says everything that the rest of the program needs to know about it: see `Option`. numpy is imported only
where it is used, for `qwenimg --help` reads the options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.numbers import sizes
from qwenimg.common.numbers.seeds import MAX_SEED, check_seed
from qwenimg.common.prompts.check import MAX_CHARACTERS, check_prompt
from qwenimg.common.request import control_text, embedding_text, lora_text, names, outpaint_text
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.embedding_text import Embedding
from qwenimg.common.request.family_options import FAMILY_OPTIONS, MAX_GUIDANCE, FamilyOptions
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.option import (
    Option,
    as_integer,
    checked_fields,
    converted_fields,
    inserted,
    option,
    options_of,
    required,
)
from qwenimg.common.request.outpaint_text import Border
from qwenimg.common.sampling.types import MAX_STEPS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qwenimg.common.parts.texts.rewriting import PromptWriter, Rewritten
    from qwenimg.common.prompts.inversion import Inversion
    from qwenimg.common.upscaling.network_file import Upscaler

MULTIPLE = 16  # pixels: sizes are rendered at the next multiple and cropped
MAX_BLUR = 256
ONLY_MASKED = 32  # pixels around a mask
MAX_HIRES = 8


def enlarged(width: int, height: int, factor: float | None) -> tuple[int, int]:
    """Return width and height `factor` times as large, unless it is None."""
    return (width, height) if factor is None else (max(1, round(width * factor)), max(1, round(height * factor)))


def random_seed() -> int:
    """Return a random seed, so far below 2**32 that counting up 10,000 images from it stays below."""
    import secrets  # which imports hashes

    return secrets.randbelow(2**32 - 10_000)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of one image, checked on construction. Raises UsageError."""

    prompt: str = required(Option(
        help="the prompt; use it if the prompt begins with a dash or is the name of a command",
        section="Prompt", metavar="TEXT", flags=("-p",),
        longest=MAX_CHARACTERS, checks=check_prompt, recorded="always",
    ))  # fmt: skip
    rewrite: int | None = option(None, Option(  # the seed of the text; None: the prompt is drawn as it is
        help="have a language model make the prompt better first; another number gives another text",
        call="{bounds}: have a language model make the prompt better first; another number gives another text",
        section="Prompt", metavar="[N]", least=0, most=MAX_SEED, bare=0, config=True,
        aliases=("enhance-prompt", "improve-prompt", "prompt-upsampling", "upsample-prompt"),
    ))  # fmt: skip
    negative_prompt: str = option(" ", Option(
        help="what the picture should not show; has no effect without guidance",
        section="Prompt", metavar="TEXT", flags=("-n",),
        title="the negative prompt", longest=MAX_CHARACTERS, checks=check_prompt, config=True, recorded="always",
        needs="guidance",
    ))  # fmt: skip
    width: int = option(1024, Option(  # pixels
        help="width; default the model's", call="pixels; beside image, in its proportions", section="Picture",
        metavar="PIXELS", flags=("-W",), least=1, most=sizes.MAX_SIDE, recorded="always",
    ))  # fmt: skip
    height: int = option(1024, Option(
        help="height; default the model's", call="pixels; beside image, in its proportions", section="Picture",
        metavar="PIXELS", flags=("-H",), least=1, most=sizes.MAX_SIDE, recorded="always",
    ))  # fmt: skip
    steps: int = option(50, Option(
        help="the number of steps, {bounds}; default the model's",
        section="Picture", metavar="N", aliases=("num-inference-steps",),
        least=1, most=MAX_STEPS, config=True, recorded="always",
    ))  # fmt: skip
    guidance: float = option(4.0, Option(
        help="{bounds}, how closely to follow the prompt; 1 turns it off (0 in Z-Image, and where that is the "
        "model's default), and halves the time", section="Picture", metavar="X",
        aliases=("cfg", "cfg-scale"), least=0, most=MAX_GUIDANCE, config=True,
        recorded="always",
    ))  # fmt: skip
    true_cfg: float = option(1.0, Option(
        help="{bounds}, guidance by the negative prompt in Flux.1, beside --guidance; elsewhere the same as "
        "--guidance (in Z-Image one more)",
        call="{bounds}, guidance by the negative prompt: beside Flux.1's own, elsewhere another word for guidance "
        "(in Z-Image one more)",
        section="Picture", metavar="X", aliases=("true-cfg-scale",), least=1, most=MAX_GUIDANCE, config=True,
        recorded="changed",
    ))  # fmt: skip
    cfg_end: float = option(1.0, Option(
        help="{bounds}, use guidance only in this share of the steps; the others take half the time", section="Picture",
        metavar="X",
        least=0, most=1, open="least", config=True, recorded="changed", needs="guidance",
    ))  # fmt: skip
    sampler: str = option("", Option(  # "": the model's own
        help="the sampler; qwenimg samplers lists all. Default the model's", section="Picture", metavar="NAME",
        aliases=("sampling-method",), checks=names.check_sampler, names=names.samplers, config=True, recorded="always",
    ))  # fmt: skip
    schedule: str = option("", Option(  # "": the model's own
        help="the noise levels: model, karras, exponential, beta, ays, ...; default the model's",
        section="Picture", metavar="NAME", checks=names.check_schedule, names=names.schedules, config=True,
        recorded="always",
    ))  # fmt: skip
    seed: int = option(0, Option(
        help="a number, a list such as 1,2,3 or a range such as 1-4; random by default",
        call="0 to 2**64 - 1; by chance unless given, and then in the result",
        section="Picture", metavar="SEEDS", flags=("-s",), least=0, most=MAX_SEED, several=True, longest=20_000,
        checks=check_seed, recorded="always",
    ))  # fmt: skip
    variation: str = option("", Option(  # "": none
        help="a picture like that of the seed: its noise, turned towards that of a second seed by 0 to 1, as 7:0.2; -N "
        "counts up the second seed", call="turn the seed's noise towards that of a second seed by 0 to 1, as 7:0.2",
        section="Picture", metavar="SEED:STRENGTH", checks=names.check_variation, recorded="changed",
    ))  # fmt: skip
    loras: tuple[Lora, ...] = option((), Option(
        name="lora", help="a LoRA file or hub id, with its strength; may be repeated",
        call="FILE:SCALE, a path, a pair (path, strength), or a list of these", python="Loras", section="Model",
        metavar="FILE[:SCALE]",
        aliases=("lora-path",), longest=8_000, parse=lora_text.parse, checks=lora_text.check, config=True,
        recorded="changed",
    ))  # fmt: skip
    lora_mode: str = option("auto", Option(
        help="fuse merges LoRAs into the weights, side keeps them apart; auto keeps them apart from quantized weights",
        section="Model", metavar="auto|fuse|side", checks=lora_text.mode, names=lora_text.modes, config=True,
        recorded="changed",
    ))  # fmt: skip
    few_steps: str = option("", Option(
        help="draw in 1 to 8 steps: lightning, lcm, hyper, hyper-cfg, hyper-unified, hyper-unet, turbo",
        section="Model", metavar="NAME[:STEPS]", checks=names.check_few_steps, config=True,
    ))  # fmt: skip
    embeddings: tuple[Embedding, ...] = option((), Option(
        name="embedding", help="a file of textual inversion, whose NAME (the file's unless given) stands in the prompt "
        "as embedding:NAME or NAME; may be repeated", call="FILE, NAME=FILE, a path, or a list of these: textual "
        "inversion, whose name stands in the prompt", python="Embeddings", section="Model", metavar="[NAME=]FILE",
        aliases=("textual-inversion", "ti"), longest=8_000, parse=embedding_text.parse, checks=embedding_text.check,
        config=True, recorded="changed",
    ))  # fmt: skip
    latents: NDArray[np.float32] | None = option(None, Option(  # [1, C, H/8, W/8], standard normal
        help="start from the noise in a .npy or .safetensors file instead of the seed's",
        call="noise [1, C, H/8, W/8] in place of the seed's", section="Model", metavar="FILE",
    ))  # fmt: skip
    image: NDArray[np.uint8] | None = option(None, Option(  # [H, W, 3], or [H, W, 4] with alpha
        help="a picture to start from or to edit: PNG, JPEG, WebP, BMP, GIF or TIFF; may be repeated for some models",
        call="a PIL image, an array [H, W, 3 or 4] or a file to start from or to edit; a list for a model of several",
        python="Pictures", several=True, section="Picture to start from", metavar="FILE", flags=("-i",),
        aliases=("init-img", "init-image", "image-path"),
    ))  # fmt: skip
    strength: float = option(0.8, Option(
        help="{bounds}, how much of the -i picture to replace",
        call="{bounds}, how much of image is drawn anew: the share of the schedule that is run",
        section="Picture to start from", metavar="X",
        least=0, most=1, open="least", recorded="used", needs="image",
    ))  # fmt: skip
    mask: NDArray[np.uint8] | None = option(None, Option(  # [H, W]
        help="a mask for the -i picture: white is drawn anew, black is kept; it is scaled to the picture's size",
        call="where image is made anew, from 128 on: a PIL image, an array [H, W] or a file", python="Picture",
        section="Picture to start from", metavar="FILE",
        aliases=("mask-image",),
    ))  # fmt: skip
    only_masked: int | None = option(None, Option(  # pixels of padding; None: all of the picture
        help="draw only the masked part with this many pixels around it (32 if none are given), at the size that is "
        "asked for, and put it back into the picture",
        call="{bounds}, pixels around the mask: draw only this part, at width x height, and put it back into image",
        section="Picture to start from", metavar="[PIXELS]", aliases=("padding-mask-crop", "inpaint-full-res-padding"),
        least=0, most=sizes.MAX_SIDE, bare=ONLY_MASKED, recorded="changed",
    ))  # fmt: skip
    mask_blur: float = option(0.0, Option(
        help="{bounds}, blend the edge of the mask over about twice this many pixels, and keep the picture outside "
        "exactly", section="Picture to start from", metavar="PIXELS", least=0, most=MAX_BLUR, recorded="changed",
        needs="mask",
    ))  # fmt: skip
    mask_fill: str = option("original", Option(
        help="what the masked part starts from: original, fill (the colours around it), noise or nothing",
        section="Picture to start from", metavar="NAME", aliases=("inpainting-fill",), checks=names.check_fill,
        names=names.fills, recorded="changed", needs="mask",
    ))  # fmt: skip
    mask_mode: str = option("inside", Option(
        help="inside draws the white of the mask anew, outside the black", section="Picture to start from",
        metavar="inside|outside", checks=names.check_mode, names=names.modes, recorded="changed", needs="mask",
    ))  # fmt: skip
    outpaint: tuple[Border, ...] = option((), Option(
        help="extend the -i picture by so many pixels, such as left=200,top=100, and draw what is new; also right, "
        "bottom", call="left=200,top=100 in pixels, also right and bottom: extend image, and draw what is new",
        python="str | dict[str, int]", section="Picture to start from", metavar="SIDE=PIXELS,...",
        aliases=("outpainting", "uncrop"), longest=200, parse=outpaint_text.parse, recorded="changed",
    ))  # fmt: skip
    hires: float | None = option(None, Option(  # None: one pass
        help="{bounds}, draw in two passes: make the picture so many times as wide and high, and draw on",
        section="Second pass", metavar="FACTOR", aliases=("hr-scale", "hires-scale"), least=1,
        most=MAX_HIRES, recorded="changed",
    ))  # fmt: skip
    hires_strength: float = option(0.5, Option(
        help="{bounds}, how much the second pass draws anew: the share of its steps that is run; default {default}",
        section="Second pass", metavar="X", least=0, most=1, open="least", recorded="used", needs="hires",
    ))  # fmt: skip
    hires_steps: int | None = option(None, Option(  # None: as many as `steps`
        help="the steps of which the second pass runs a share, {bounds}; default those of --steps",
        call="{bounds}, the steps of which the second pass runs a share; as many as steps unless given",
        section="Second pass", metavar="N", least=1, most=MAX_STEPS, recorded="changed", needs="hires",
    ))  # fmt: skip
    hires_with: str = option("lanczos", Option(
        help="what enlarges the picture: lanczos, nearest, latent, latent-bicubic, ..., or an upscaler: its file, or "
        "its name in the folders of models; default {default}", section="Second pass", metavar="NAME|FILE",
        aliases=("hires-upscaler", "hr-upscaler"), checks=names.check_enlarger, recorded="used", needs="hires",
        spellings=names.ENLARGERS_THERE | names.UPSCALERS_THERE,
    ))  # fmt: skip
    controls: tuple[Control, ...] = option((), Option(
        name="control",
        help="follow the edges, depth or pose in PICTURE, by a control network, or by a model that sees it itself; "
        "canny@PICTURE finds the edges first",
        call="MODEL=PICTURE:SCALE:START-END, PICTURE, a tuple (model, picture, scale, (start, end)), or a list",
        python="Controls", section="Control", metavar="[MODEL=]PICTURE[:SCALE[:START-END]]",
        longest=8_000, parse=control_text.parse, checks=control_text.check, recorded="changed",
    ))  # fmt: skip

    family_options: FamilyOptions = FamilyOptions()  # noqa: RUF009  (it is frozen)
    more_images: tuple[NDArray[np.uint8], ...] = ()  # behind the first; a tuple of all may be given as `image`
    template: str = ""  # that the seed chose `prompt` from
    negative_template: str = ""  # likewise
    inversions: tuple[Inversion, ...] = ()  # the embeddings that the prompts name, read
    upscaler: Upscaler | None = None  # the file that `hires_with` names, opened
    writer: PromptWriter | None = None  # the language model that rewrites the prompt, opened
    rewritten: Rewritten | None = None  # how `prompt` was written
    goes_on_from: Literal["", "pixels", "latents"] = ""  # of the first pass, in the second

    def __post_init__(self) -> None:
        if isinstance(self.image, tuple):
            first, *more = self.image
            object.__setattr__(self, "image", first)
            object.__setattr__(self, "more_images", tuple(more))
        converted_fields(self)
        sizes.render_size(self.width, self.height, MULTIPLE)
        checked_fields(self)
        if self.hires is not None and max(self.enlarged_size) > sizes.MAX_SIDE:
            shown, most = "x".join(map(str, self.enlarged_size)), sizes.MAX_SIDE
            raise UsageError(f"hires {self.hires:g} makes the picture {shown}; at most {most} pixels a side are drawn")
        if self.variation and self.latents is not None:
            raise UsageError("variation turns the noise of a seed, latents is noise of a file; leave one out")
        self._check_pictures()

    def _check_pictures(self) -> None:
        import numpy as np

        image, mask = self.image, self.mask
        for name, picture in (*(("image", one) for one in self.images), ("mask", mask)):
            if picture is not None and not isinstance(picture, np.ndarray):
                raise UsageError(f"{name} is {type(picture).__name__}; expected a uint8 array, as numpy.asarray gives")
        for one in self.images:
            if one.dtype != np.uint8 or one.ndim != 3 or one.shape[2] not in (3, 4) or one.size == 0:
                raise UsageError(f"image is {one.dtype} {list(one.shape)}; expected uint8 [H, W, 3] or [H, W, 4]")
        self._check_control()
        if mask is None and self.only_masked is not None:
            raise UsageError("only-masked draws what a mask covers: give one, as in -i PICTURE --mask MASK")
        if mask is None:
            return
        if image is None:
            image = next(iter(self.control_pictures), None)
        if image is None:
            raise UsageError("a mask needs the image that it belongs to")
        if mask.dtype != np.uint8 or mask.shape != image.shape[:2]:
            raise UsageError(f"mask is {mask.dtype} {list(mask.shape)}; expected uint8 {list(image.shape[:2])}")

    def _check_control(self) -> None:
        import numpy as np

        for one in self.controls:
            picture = np.zeros(0) if one.picture is None else one.picture
            if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or picture.size == 0:
                shown = f"{picture.dtype} {list(picture.shape)}"
                raise UsageError(
                    f"the picture of control {clean(one.network or one.file, 60)} is {shown}; expected uint8 [H, W, 3]"
                )

    @property
    def control_pictures(self) -> tuple[NDArray[np.uint8], ...]:
        """The picture [H, W, 3] of each control."""
        return tuple(one.picture for one in self.controls if one.picture is not None)

    @property
    def images(self) -> tuple[NDArray[np.uint8], ...]:
        """All images, the initial one first."""
        return () if self.image is None else (self.image, *self.more_images)

    def opaque(self) -> Request:
        """Return the request with its images on white, for a model that sees no alpha."""
        from qwenimg.common.pictures import pixels

        if not any(map(pixels.has_alpha, self.images)):
            return self
        first, *more = map(pixels.over_white, self.images)
        return replace(self, image=first, more_images=tuple(more))

    def value(self, one: Option) -> Any:
        """Return the value of an option."""
        return getattr(self.family_options if one.name in FAMILY_OPTIONS else self, one.field)

    @property
    def caches(self) -> bool:
        """True if calls of the model may reuse results of an earlier call."""
        return self.family_options.caches

    @property
    def enlarged_size(self) -> tuple[int, int]:
        """Width and height of the result; with `hires`, of the second pass."""
        return enlarged(self.width, self.height, self.hires)

    @property
    def starts_from_picture(self) -> bool:
        """True if the run leaves out steps, since it starts from a picture with noise."""
        return self.image is not None or self.goes_on_from != ""

    @property
    def encodes_start(self) -> bool:
        """True if the picture from which the run starts is encoded for it."""
        return self.goes_on_from == "pixels" or (self.image is not None and not self.goes_on_from)

    @property
    def starts_from_noise(self) -> bool:
        """True if the run of a model that sees the images itself starts from noise alone, and keeps no part of them."""
        return self.mask is None and self.strength == 1


OPTIONS = inserted(options_of(Request), FAMILY_OPTIONS)
"""Every option of an image, by its name, in the order of help and recipes."""


def request_of(values: Mapping[str, Any]) -> Request:
    """Return the request with these option `values`, by name. Raises UsageError."""
    family = {name: value for name, value in values.items() if name in FAMILY_OPTIONS}
    fields = {OPTIONS[name].field if name in OPTIONS else name: values[name] for name in values.keys() - family.keys()}
    return Request(**fields, family_options=FamilyOptions(**family))


def _as_large(width: int, height: int) -> tuple[int, int]:  # a lambda could not be sent to a worker
    return width, height


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Values of options that a call leaves out: a known model's own, or these."""

    width: int = 1024
    height: int = 1024
    steps: int = 50
    guidance: float = 4.0
    negative_prompt: str = " "
    strength: float = 0.6  # for an initial image
    mask_strength: float = 0.6  # for one with a mask
    trained: Mapping[Fraction, tuple[int, int]] = field(default_factory=dict)  # width and height by aspect
    edited: int = 0  # pixels of an image in the proportions of another; 0: as many as that one has
    edited_size: Callable[[int, int, int], tuple[int, int]] | None = None  # from `edited`, width, height; None: of_area
    # Width and height of an image that is as large as another, from the other's
    fitted: Callable[[int, int], tuple[int, int]] = _as_large

    def values(self, *, masked: bool) -> dict[str, Any]:
        """Return the values of options; masked: for an image with a mask."""
        names = ("width", "height", "steps", "guidance", "negative_prompt", "strength")
        values = {name: getattr(self, name) for name in names}
        return values | ({"strength": self.mask_strength} if masked else {})

    def size(self, aspect: Fraction) -> tuple[int, int]:
        """Return width and height for `aspect`: a trained size, else one of about the trained or the usual area."""
        areas = sorted(width * height for width, height in self.trained.values()) or [self.width * self.height]
        return self.trained.get(aspect) or sizes.aspect_size(aspect, areas[len(areas) // 2])

    def sides(
        self,
        width: int | None,
        height: int | None,
        pictures: Sequence[NDArray[np.uint8]] = (),
        *,
        only_masked: bool = False,
    ) -> tuple[int, int]:
        """Return width and height if one or both are missing: in the proportions of the last of `pictures` [H, W, 3],
        initial images, else the usual ones. only_masked: a part of the first is drawn, which has about the usual area.
        Raises UsageError."""
        if not pictures or (width is not None and height is not None):
            return self.width if width is None else width, self.height if height is None else height
        rows, columns = pictures[0 if only_masked else -1].shape[:2]
        if width is not None:
            return width, max(1, round(Fraction(as_integer("width", width) * rows, columns)))
        if height is not None:
            return max(1, round(Fraction(as_integer("height", height) * columns, rows))), height
        if self.edited:
            from qwenimg.common.pictures.patches import check_aspect

            check_aspect(columns, rows)
            return (self.edited_size or sizes.of_area)(self.edited, columns, rows)
        return self.size(Fraction(columns, rows)) if only_masked else self.fitted(columns, rows)
