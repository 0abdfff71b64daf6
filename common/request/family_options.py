"""The options of an image that only some families of models take.

Each is one field here; the models that take it name it in their `options`. A `Request` has all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwenimg.common.base.errors import UsageError
from qwenimg.common.request import cached_calls, names, skip_layers
from qwenimg.common.request.option import Option, checked_fields, converted_fields, option, options_of

MAX_GUIDANCE = 100
MAX_CLIP_SKIP = 11
MAX_LAYERS = 20


def _check_layers(count: int) -> None:
    if not 1 <= count <= MAX_LAYERS:
        raise UsageError(f"layers is {count}; choose 1 to {MAX_LAYERS}, as in --layers 4")


@dataclass(frozen=True, kw_only=True)
class FamilyOptions:
    """Options of one image, checked on construction. Raises UsageError."""

    caption: str = option("en", Option(
        help="the language, en or zh, in which qwen-image-layered describes a picture if you give no prompt",
        section="Prompt", metavar="en|zh", checks=names.check_caption, names=names.captions, config=True,
        unsupported="this model describes no picture",
        after="negative_prompt",
    ))  # fmt: skip
    step_cache: float = option(0.0, Option(
        help="{bounds}, skip most of a step if its first block barely changed; 0.1 takes about half the time, 0 is off",
        section="Picture", metavar="X", least=0, most=1, config=True, recorded="changed",
        unsupported="this model is always computed whole",
        after="cfg_end",
    ))  # fmt: skip
    cached_calls: str = option("", Option(
        help="the model calls to skip, such as 3-5,7, instead of --step-cache",
        call="the model calls to skip, as 3-5,7, in place of step_cache", section="Picture", metavar="CALLS",
        longest=8_000, checks=cached_calls.parse, recorded="changed",
        unsupported="this model is always computed whole",
        after="step_cache",
    ))  # fmt: skip
    guidance_rescale: float = option(0.0, Option(
        help="{bounds}, reduce overexposure at high guidance; 0.7 is usual", section="Picture", metavar="X",
        least=0, most=1,
        recorded="changed", needs="guidance",
        unsupported="this model's guidance always keeps the prediction's norm",
        after="cached_calls",
    ))  # fmt: skip
    cfg_normalization: float = option(0.0, Option(
        help="{bounds}, limit the norm of the guided prediction to this multiple of the prompt's; 1 is usual, 0 off",
        section="Picture", metavar="X", least=0, most=MAX_GUIDANCE, recorded="changed", needs="guidance",
        unsupported="this model's guidance has no such limit",
        after="guidance_rescale",
    ))  # fmt: skip
    cfg_truncation: float = option(1.0, Option(
        help="{bounds}, end guidance when this share of the noise is gone", section="Picture", metavar="X",
        least=0, most=1, recorded="changed", needs="guidance",
        unsupported="this model's guidance ends by --cfg-end",
        after="cfg_normalization",
    ))  # fmt: skip
    skip_layers: str = option("", Option(
        help="skip-layer guidance: the layers that a third prediction skips, such as 7-9 for SD 3.5 medium",
        section="Picture", metavar="LAYERS", longest=2_000, checks=skip_layers.parse, recorded="changed",
        needs="guidance", unsupported="this model has no guidance by skipped layers",
        after="cfg_truncation",
    ))  # fmt: skip
    skip_layer_scale: float = option(2.8, Option(
        help="{bounds}, the strength of --skip-layers", call="{bounds}, how far skip_layers leads", section="Picture",
        metavar="X", least=0, most=MAX_GUIDANCE, recorded="changed", needs="guidance",
        unsupported="this model has no guidance by skipped layers",
        after="skip_layers",
    ))  # fmt: skip
    layers: int = option(4, Option(
        help="{bounds}, the number of layers into which qwen-image-layered takes the -i picture apart",
        call="{bounds}, layers that image is taken apart into, for qwen-image-layered", section="Picture",
        metavar="N", least=1, most=MAX_LAYERS, checks=_check_layers, recorded="changed",
        unsupported="this model draws one picture",
        after="few_steps",
    ))  # fmt: skip
    control_mode: str = option("balanced", Option(
        help="what leads under --control: balanced, prompt (weaker control of the picture's parts), or control (the "
        "negative prompt is not controlled too)", section="Model", metavar="MODE", recorded="changed",
        checks=names.check_control_mode, names=names.control_modes, needs="control",
        unsupported="this model's control has one mode",
        after="control",
    ))  # fmt: skip
    refine_at: float = option(0.8, Option(
        help="{bounds}, the share of the steps after which the refiner takes over; 0.8 leaves it the last fifth",
        section="Model", metavar="X",
        least=0,
        most=1, open="both", recorded="used", needs="refiner",
        after="control_mode",
    ))  # fmt: skip
    clip_skip: int = option(0, Option(
        help="{bounds}, skip this many of CLIP's last layers", section="Model", metavar="N", least=0,
        most=MAX_CLIP_SKIP, config=True, recorded="changed",
        unsupported="this model's text encoder is not CLIP",
        after="refine_at",
    ))  # fmt: skip

    decoder_steps: int = option(10, Option(
        help="{bounds}, the steps of Stable Cascade's decoder, which makes the picture of what --steps drew",
        call="{bounds}, the steps of Stable Cascade's decoder", section="Model", metavar="N", least=1, most=1000,
        recorded="changed",
        unsupported="this model's decoder makes one step",
        after="clip_skip",
    ))  # fmt: skip
    decoder_guidance: float = option(0.0, Option(
        help="{bounds}, how closely Stable Cascade's decoder follows the prompt; up to 1 it is off",
        call="{bounds}, guidance of Stable Cascade's decoder; up to 1 it is off", section="Model", metavar="X",
        least=0, most=MAX_GUIDANCE, recorded="changed",
        unsupported="this model's decoder has no guidance",
        after="decoder_steps",
    ))  # fmt: skip

    def __post_init__(self) -> None:
        converted_fields(self)
        checked_fields(self)

    @property
    def caches(self) -> bool:
        """True if calls of the model may reuse results of an earlier call."""
        return self.step_cache > 0 or bool(self.cached_calls)


FAMILY_OPTIONS = options_of(FamilyOptions)
"""Each of them by its name."""
