"""The keywords of a call of diffusers as options of a call here, or a refusal with what does it here."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from qwenimg.common.base.errors import UnknownOption, UsageError
from qwenimg.common.base.text import by_name, clean
from qwenimg.common.request import call_options
from qwenimg.common.request.option import as_number
from qwenimg.common.request.request import OPTIONS
from qwenimg.diffusers.pipelines import Row

SAME = {
    "image": "image",
    "height": "height",
    "width": "width",
    "num_inference_steps": "steps",
    "strength": "strength",
    "mask_image": "mask",
    "padding_mask_crop": "only_masked",
    "guidance_rescale": "guidance_rescale",
    "cfg_truncation": "cfg_truncation",
    "clip_skip": "clip_skip",
    "layers": "layers",
    "skip_layer_guidance_scale": "skip_layer_scale",
}
"""Keywords that only have another name here, or the same."""
# Read by the pipeline itself
_OWN = (
    "prompt", "negative_prompt", "guidance_scale", "true_cfg_scale", "generator", "num_images_per_prompt",
    "output_type", "return_dict", "callback_on_step_end", "callback_on_step_end_tensor_inputs", "latents",
)  # fmt: skip
_SCALES = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")
# Keywords that are taken at these values alone, and what to do for another
_REFUSED = by_name({
    "the noise levels are schedule=, as schedule='karras'": "sigmas timesteps mu",
    "texts are encoded from prompt and negative_prompt alone":
        "prompt_embeds negative_prompt_embeds pooled_prompt_embeds negative_pooled_prompt_embeds prompt_embeds_mask "
        "negative_prompt_embeds_mask text_encoder_out_layers",
    "give from_pretrained a refiner=, and the call refine_at=0.8": "denoising_start denoising_end",
    "the sizes that SDXL is told are those of the picture":
        "original_size target_size negative_original_size negative_target_size crops_coords_top_left "
        "negative_crops_coords_top_left",
    "the refiner is told the scores 6 and 2.5": "aesthetic_score negative_aesthetic_score",
    "give image and mask_image": "masked_image_latents image_reference",
    "noise in the steps is the sampler's: sampler='euler_ancestral' or 'ddpm' has some": "eta",
    "its steps are the share from 0.01 to 0.2": "skip_layer_guidance_start skip_layer_guidance_stop",
    "a picture is seen at about 1024 x 1024 pixels": "max_area _auto_resize",
    "layers are drawn in the proportions of the picture, at the size of width and height":
        "resolution output_resolution",
    "guidance is not normalized here": "cfg_normalize",
    "keys and values of pictures are always kept": "use_kv_cache",
    "read the steps by callback_on_step_end": "callback callback_steps",
    "a control network is control=(model, picture, scale)":
        "control_image controlnet_conditioning_scale control_guidance_start control_guidance_end",
    "an IP-Adapter is control=(file, picture, scale) of qwenimg's own call":
        "ip_adapter_image ip_adapter_image_embeds negative_ip_adapter_image negative_ip_adapter_image_embeds",
})  # fmt: skip
_USUAL: Mapping[str, tuple[object, ...]] = {
    "eta": (0,), "crops_coords_top_left": ((0, 0),), "negative_crops_coords_top_left": ((0, 0),),
    "aesthetic_score": (6,), "negative_aesthetic_score": (2.5,), "skip_layer_guidance_start": (0.01,),
    "skip_layer_guidance_stop": (0.2,), "max_area": (1024**2,), "_auto_resize": (True,), "resolution": (640,),
    "cfg_normalize": (False,), "text_encoder_out_layers": ((9, 18, 27), [9, 18, 27]),
    "output_resolution": (1024,), "use_kv_cache": (True, False),
}  # fmt: skip
PROMPTS = ("prompt_2", "prompt_3", "negative_prompt_2", "negative_prompt_3")


def named(name: str, row: Row, positional: tuple[object, ...], asked: Mapping[str, object]) -> dict[str, Any]:
    """Return all keywords of a call by their names; those of None are left out. Raises UnknownOption."""
    if len(positional) > len(row.first):
        raise UsageError(f"{name}: {len(positional)} values without a name; name all but {', '.join(row.first)}")
    given = dict(zip(row.first, positional, strict=False))
    if twice := next((one for one in given if one in asked), None):
        raise UsageError(f"{name}: {twice} is given twice")
    every = {key: value for key, value in {**given, **asked}.items() if value is not None}
    for key in every:
        _check_known(name, row, key)
    return every


def _check_known(name: str, row: Row, key: str) -> None:
    mapped = (*SAME, *_OWN, *_SCALES, *_REFUSED, *PROMPTS, "max_sequence_length", "skip_guidance_layers")
    if key in ("true_cfg_scale",) and row.true_cfg is None:
        raise UnknownOption(f"{name} takes no true_cfg_scale; give guidance_scale")
    if key in (*mapped, "cfg_normalization", "use_en_prompt") or key in OPTIONS:
        return
    taken = [one for one in mapped if one not in _REFUSED]
    if near := ["num_inference_steps"] if "steps" in key else get_close_matches(key[:100], taken, n=1):
        raise UnknownOption(f"{name}: unknown option {clean(key, 40)!r}: did you mean {near[0]}?")
    try:
        call_options.check_names([key])
    except UnknownOption as error:
        raise UnknownOption(f"{name}: {error}") from None


def options(name: str, row: Row, given: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return the options of a call for the keywords `given`, without prompts, guidance, noise and LoRAs. length: the
    largest max_sequence_length that the model has. Raises UsageError for a keyword that is not taken."""
    for key, value in given.items():
        if key in _REFUSED and not any(_equal(value, usual) for usual in _usual(key, given)):
            raise UsageError(f"{name}: {key}={clean(value, 30)} is not taken here: {_REFUSED[key]}")
        if key in PROMPTS and not _equal(value, given.get(key[:-2])):
            raise UsageError(f"{name}: {key} is not taken here: every text encoder reads {key[:-2]}")
    if (asked := given.get("max_sequence_length", length)) != length:
        raise UsageError(f"{name}: max_sequence_length={clean(asked, 30)} is not taken here: this model's is {length}")
    for theirs, ours in SAME.items():
        if theirs != ours and theirs in given and ours in given and not _equal(given[theirs], given[ours]):
            raise UsageError(f"{name}: {ours} and {theirs} are one option; give one of them")
    chosen = {ours: given[theirs] for theirs, ours in SAME.items() if theirs in given}
    chosen |= {key: value for key, value in given.items() if key in OPTIONS and key not in (*SAME, *_OWN)}
    chosen.setdefault("steps", row.steps)
    if row.strength is not None:
        chosen.setdefault("strength", row.strength)
    if "cfg_normalization" in given:
        chosen["cfg_normalization"] = as_number("cfg_normalization", float(given["cfg_normalization"]))
    if "use_en_prompt" in given or name == "QwenImageLayeredPipeline":
        chosen.setdefault("caption", "en" if given.get("use_en_prompt") else "zh")
    if "skip_guidance_layers" in given:
        layers = given["skip_guidance_layers"]
        if not isinstance(layers, list | tuple) or not all(isinstance(one, int) for one in layers):
            raise UsageError(f"skip_guidance_layers is {clean(layers, 40)}; give a list of numbers, as [7, 8, 9]")
        chosen["skip_layers"] = ",".join(map(str, layers))
    return chosen


def guidance(row: Row, given: Mapping[str, Any], off: float) -> dict[str, Any]:
    """Return the options of guidance. off: the scale at which the model has none."""
    negative = given.get("negative_prompt")
    if row.by_negative_prompt:
        scale = as_number("true_cfg_scale", given.get("true_cfg_scale", row.true_cfg))
        guided = negative is not None and scale > 1
        chosen = {"negative_prompt": negative} if guided else {}
        if row.guidance is None:
            return chosen | {"guidance": scale if guided else 1.0}
        own = as_number("guidance_scale", given.get("guidance_scale", row.guidance))
        return chosen | {"guidance": own} | ({"true_cfg": scale} if guided else {})
    scale = as_number("guidance_scale", given.get("guidance_scale", row.guidance))
    return {"guidance": max(scale, off)} | ({} if negative is None else {"negative_prompt": negative})


def lora_scale(given: Mapping[str, Any]) -> float:
    """Return the factor of all LoRAs, in the keywords of attention. Raises UsageError for others of these."""
    scale = 1.0
    for name in _SCALES:
        values = given.get(name)
        if values is None:
            continue
        if not isinstance(values, Mapping) or set(values) - {"scale"}:
            raise UsageError(f"{name} is {clean(values, 40)}; only {{'scale': x}}, for LoRAs, is taken here")
        scale *= as_number(f"scale of {name}", values.get("scale", 1.0))
    return scale


def _usual(key: str, given: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the values of a keyword that change nothing."""
    if key in ("original_size", "target_size"):
        size = given.get("height"), given.get("width")
        return (size, list(size))
    return _USUAL.get(key, ())


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # arrays
        return False
