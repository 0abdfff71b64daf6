"""The fields of AUTOMATIC1111's routes txt2img and img2img: which are done here, and which values ask for nothing.

Its own names and defaults are those of `StableDiffusionProcessing` in version 1.10. `python tools/write_sd_fields.py`
writes the table of docs/server.md from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwenimg.cli.serve.apis import body
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.foreign_a1111 import USUAL_STRENGTH, factor_of
from qwenimg.common.jobs.image_options import TEXT_OPTIONS, Options
from qwenimg.common.numbers.seeds import MAX_SEED
from qwenimg.common.numbers.variation import Variation
from qwenimg.common.request import names
from qwenimg.common.request.names import FILLS_THERE
from qwenimg.common.request.request import random_seed
from qwenimg.common.sampling.table import SAMPLERS


@dataclass(frozen=True, kw_only=True)
class FieldRow:
    """Fields of A1111's API. done: their effect here, in words; otherwise only `values` are accepted, which have no
    effect."""

    names: tuple[str, ...]
    done: str = ""
    values: tuple[Any, ...] = ()
    why: str = ""  # for `values`


# Both routes.
BOTH = (
    FieldRow(names=("prompt", "negative_prompt", "width", "height", "steps", "cfg_scale", "seed"), done="as there"),
    FieldRow(names=("sampler_name", "sampler_index", "scheduler"), done="by A1111's names"),
    FieldRow(names=("batch_size", "n_iter"), done="their product is the number of pictures, each with the next seed"),
    FieldRow(
        names=("override_settings",),
        done="`sd_model_checkpoint`, `CLIP_stop_at_last_layers`; what is about files has no effect; others are refused",
    ),
    FieldRow(
        names=("override_settings_restore_afterwards",),
        done="`false` keeps the model for later requests; refused with other settings",
    ),
    FieldRow(names=("alwayson_scripts",), done="ControlNet; other scripts are refused"),
    FieldRow(
        names=("save_images", "do_not_save_samples", "do_not_save_grid", "force_task_id", "comments"),
        done="nothing: pictures of this API are in the answer, and not kept",
    ),
    FieldRow(names=("disable_extra_networks",), done="nothing: LoRAs in tags of a prompt are refused"),
    FieldRow(names=("send_images",), values=(True,)),
    FieldRow(names=("restore_faces", "tiling"), values=(False,)),
    FieldRow(names=("script_name", "infotext"), values=("", "None")),
    FieldRow(names=("script_args", "styles"), values=([],)),
    FieldRow(
        names=("subseed", "subseed_strength"),
        done="as there: the noise of `seed`, turned towards that of `subseed` (-1: random)",
    ),
    FieldRow(names=("seed_resize_from_w", "seed_resize_from_h"), values=(0, -1)),
    FieldRow(names=("refiner_checkpoint",), values=("", "None"), why="`refiner_switch_at` does nothing then"),
    FieldRow(names=("s_churn", "s_tmin", "s_tmax", "s_min_uncond"), values=(0,)),
    FieldRow(names=("s_noise",), values=(1,)),
    FieldRow(names=("eta",), done="1, or 0 with a sampler without noise of its own; others are refused"),
)
# Of txt2img.
TEXT = (
    FieldRow(
        names=("enable_hr",),
        done="as there: two passes; without it `hr_...`, and `denoising_strength` of txt2img, do nothing",
    ),
    FieldRow(names=("hr_scale",), done="as there (2), 1 to 8"),
    FieldRow(names=("hr_resize_x", "hr_resize_y"), done="as there, in the proportions of the first pass"),
    FieldRow(
        names=("hr_upscaler",),
        done="a name of `upscalers` or `latent-upscale-modes` (`Latent`); others are refused by name",
    ),
    FieldRow(
        names=("hr_second_pass_steps",), done="as there: the steps that are run; 0 takes as many as the first pass"
    ),
    FieldRow(
        names=("hr_checkpoint_name", "hr_sampler_name", "hr_scheduler"),
        values=("", "Use same checkpoint", "Use same sampler", "Use same scheduler"),
    ),
    FieldRow(names=("hr_prompt", "hr_negative_prompt"), values=("",)),
    FieldRow(names=("hr_cfg",), values=(1, 0), why="guidance is that of the first pass"),
)
# Of img2img.
PICTURE = (
    FieldRow(names=("enable_hr",), values=(False,)),
    FieldRow(names=("init_images",), done="one picture, or for models that see several at most 16"),
    FieldRow(names=("denoising_strength",), done="as there"),
    FieldRow(
        names=("mask",),
        done="white is drawn anew, or paint of one colour on a transparent ground, or a transparent hole in a picture",
    ),
    FieldRow(names=("mask_blur", "mask_blur_x", "mask_blur_y"), done="as there (4); x and y have to be the same"),
    FieldRow(
        names=("inpainting_fill",), done="as there: 0 fill (without it), 1 original, 2 latent noise, 3 latent nothing"
    ),
    FieldRow(
        names=("inpaint_full_res", "inpaint_full_res_padding"),
        done="as there: `true` (without it) draws only the masked part, with so many pixels around it (0)",
    ),
    FieldRow(names=("inpainting_mask_invert",), done="as there: 1 draws black anew"),
    FieldRow(names=("include_init_images",), done="as there: `true` sends the pictures back in `parameters`"),
    FieldRow(names=("resize_mode",), values=(0,), why="a picture is stretched to the size"),
    FieldRow(names=("initial_noise_multiplier", "mask_round"), values=(1,)),
    FieldRow(
        names=("image_cfg_scale",), values=(1.5, 1), why="it is for InstructPix2Pix, and 1.5 is what clients send"
    ),
    FieldRow(names=("latent_mask",), values=("",)),
)
OVERRIDES: Mapping[str, tuple[Any, ...]] = {
    "sd_vae": ("Automatic", "None", ""),
    "eta_noise_seed_delta": (0,),
    "img2img_color_correction": (False,),
    "img2img_fix_steps": (False,),
    "face_restoration": (False,),
    "tiling": (False,),
    "return_grid": (False,),
    "samples_format": ("png",),
}
_OF_FILES = ("save_", "grid_", "outdir_", "directories_", "do_not_")  # beginnings of settings about files that are kept
# Fields of programs that have this API too, which are like one of A1111's and are no misspelled one
OF_FORKS = ("cfg_rescale", "distilled_cfg_scale", "hr_denoising_strength", "hr_distilled_cfg", "refiner_switch_at",
            "resize_name")  # fmt: skip
_MOST_LAYERS = 12  # of CLIP


def check(data: Mapping[str, Any], *, with_image: bool) -> None:
    """Raise HttpError for a field with an effect that is not supported, and for a misspelled one; A1111 ignores other
    unknown fields, and some clients send them."""
    known = [name for row in (*BOTH, *TEXT, *PICTURE) for name in row.names]
    for name in data:
        if name not in (*known, *OF_FORKS) and (near := body.misspelled(name, known)) is not None:
            raise HttpError(400, f"unknown field {clean(name, 40)!r}; did you mean {near}?", param=clean(name, 40))
    for row in (*BOTH, *(PICTURE if with_image else ())):
        for name in row.names if row.values else ():
            if name in data and data[name] not in row.values:
                raise _unsupported(name)
    if data.get("eta", 1) not in (0, 1):
        raise _unsupported("eta")
    for name in ("include_init_images", "override_settings_restore_afterwards"):
        _flag(data, name, 0)


def variation(data: Mapping[str, Any]) -> Options:
    """Return the variation of the seed; none for a strength of 0."""
    strength, seed = _number(data, "subseed_strength", 0.0), _whole(data, "subseed", -1)
    if strength is None or not 0 <= strength <= 1:
        raise HttpError(400, "subseed_strength is a number from 0 to 1", param="subseed_strength")
    if not -1 <= seed <= MAX_SEED:
        raise HttpError(400, f"subseed is a whole number from 0 to {MAX_SEED}, or -1", param="subseed")
    return {"variation": str(Variation(random_seed() if seed == -1 else seed, float(strength)))} if strength else {}


def check_eta(data: Mapping[str, Any], sampler: object) -> None:
    """Raise HttpError for `eta` 0 with a stochastic sampler (our name)."""
    known = SAMPLERS.get(str(sampler))
    if data.get("eta", 1) == 0 and known is not None and known.stochastic:
        raise _unsupported("eta")


def overrides(data: Mapping[str, Any]) -> tuple[object, Options]:
    """Return the model in `override_settings`, or None, and its options."""
    settings = data.get("override_settings", {})
    if not isinstance(settings, dict):
        raise HttpError(400, "override_settings is not an object", param="override_settings")
    options: Options = {}
    for name, value in settings.items():
        if value is None or name == "sd_model_checkpoint" or name.startswith(_OF_FILES):
            continue
        if name == "CLIP_stop_at_last_layers":
            value = body.number(value, int)
            if type(value) is not int or not 1 <= value <= _MOST_LAYERS:
                text = f"override_settings.{name} is a whole number from 1 to {_MOST_LAYERS}"
                raise HttpError(400, text, param="override_settings")
            options |= {"clip_skip": value - 1} if value > 1 else {}
        elif value not in OVERRIDES.get(name, ()):
            raise _unsupported(f"override_settings.{clean(name, 60)}", "override_settings")
    if options and not data.get("override_settings_restore_afterwards", True):
        raise _unsupported("override_settings_restore_afterwards")
    return settings.get("sd_model_checkpoint"), options


def second_pass(data: Mapping[str, Any]) -> Options:
    """Return the options of the second pass of txt2img; none without `enable_hr`. What is left out is as there: twice
    the size, latents, and as many steps as in the first pass, which are run. Raises HttpError."""
    if not _flag(data, "enable_hr", 0):
        return {}
    for row in TEXT:
        for name in row.names if row.values else ():
            if name in data and data[name] not in row.values:
                raise _unsupported(name)
    strength = _number(data, "denoising_strength", USUAL_STRENGTH)
    run = _whole(data, "hr_second_pass_steps", 0) or _whole(data, "steps", 0)
    name = data.get("hr_upscaler", "Latent")
    if not isinstance(name, str) or not name:
        raise HttpError(400, "hr_upscaler is not the name of an upscaler", param="hr_upscaler")
    options: Options = {"hires": _factor(data), "hires_strength": strength}
    options["hires_with"] = names.ENLARGERS_THERE.get(name, names.UPSCALERS_THERE.get(name, name))
    if run > 0 and strength and strength > 0:
        options["hires_steps"] = names.steps_for(run, strength)
    for ours, there in (("hires", "hr_scale"), ("hires_strength", "denoising_strength"),
                        ("hires_steps", "hr_second_pass_steps"), ("hires_with", "hr_upscaler")):  # fmt: skip
        try:
            TEXT_OPTIONS[ours].check(options.get(ours))
        except UsageError:
            told = f"choose {TEXT_OPTIONS[ours].bounds}" if ours != "hires_with" else "GET upscalers lists all"
            raise HttpError(400, f"{there} asks for {clean(options[ours], 40)}; {told}", param=there) from None
    return options


def _factor(data: Mapping[str, Any]) -> float:
    """Return how many times as large the second pass is. Raises HttpError."""
    larger = _whole(data, "hr_resize_x", 0), _whole(data, "hr_resize_y", 0)
    if not any(larger):
        return _number(data, "hr_scale", 2.0) or 0.0
    sides = _whole(data, "width", 512), _whole(data, "height", 512)
    factor = factor_of(sides, larger) if min(*sides, *larger) >= 0 and all(sides) else None
    if factor is None:
        raise HttpError(
            400, "hr_resize_x and hr_resize_y are in other proportions than width and height", param="hr_resize_x"
        )
    return factor


def mask_options(data: Mapping[str, Any], *, masked: bool) -> Options:
    """Return the options of a mask; {} without a mask. Missing fields have A1111's defaults: the edge is blurred, only
    the masked part is drawn, and it starts from the colours around it."""
    both = _number(data, "mask_blur", None)
    blurs = {_number(data, name, 4.0) if both is None else both for name in ("mask_blur_x", "mask_blur_y")}
    padding, fill = _whole(data, "inpaint_full_res_padding", 0), _whole(data, "inpainting_fill", 0)
    if not 0 <= fill < len(FILLS_THERE):
        raise HttpError(
            400, f"inpainting_fill is a whole number from 0 to {len(FILLS_THERE) - 1}", param="inpainting_fill"
        )
    only, outside = _flag(data, "inpaint_full_res", 1), _flag(data, "inpainting_mask_invert", 0)
    if not masked:
        return {}
    if len(blurs) > 1:
        raise HttpError(400, "mask_blur_x and mask_blur_y differ; give one number for both", param="mask_blur_x")
    options: Options = {"mask_blur": blurs.pop(), "mask_fill": list(FILLS_THERE.values())[fill]}
    options |= {"only_masked": padding} if only else {}
    for ours, there in (("mask_blur", "mask_blur"), ("only_masked", "inpaint_full_res_padding")):
        try:
            TEXT_OPTIONS[ours].check(options.get(ours))
        except UsageError:
            raise HttpError(
                400, f"{there} is {clean(options[ours], 40)}; choose {TEXT_OPTIONS[ours].bounds}", param=there
            ) from None
    return options | ({"mask_mode": "outside"} if outside else {})


def _number(data: Mapping[str, Any], name: str, default: float | None) -> float | None:
    value = body.number(data.get(name, default), float)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise HttpError(400, f"{name} is not a number", param=name)
    return value


def _whole(data: Mapping[str, Any], name: str, default: int) -> int:
    value = body.number(data.get(name, default), int)
    if type(value) is not int:
        raise HttpError(400, f"{name} is not a whole number", param=name)
    return value


def _flag(data: Mapping[str, Any], name: str, default: int) -> bool:
    value = data.get(name, default)
    if value not in (0, 1):
        raise HttpError(400, f"{name} is not true or false", param=name)
    return bool(value)


def _unsupported(name: str, param: str = "") -> HttpError:
    return HttpError(400, f"{name} is not supported here; leave it out", param=param or name, code="unsupported")
