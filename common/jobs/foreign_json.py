"""Recipes of mflux and InvokeAI: flat tables in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qwenimg.common.jobs.foreign import Foreign
from qwenimg.common.jobs.foreign_a1111 import number

OTHER_NOISE = "its noise was drawn by that program's own generator: the same seed gives another picture here"

# Their keys with an equivalent here, and our names.
_MFLUX = {key: key for key in ("prompt", "negative_prompt", "seed", "steps", "guidance", "width", "height")}
_INVOKEAI = {
    "positive_prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "width": "width",
    "height": "height",
    "seed": "seed",
    "steps": "steps",
    "cfg_scale": "guidance",
    "cfg_rescale_multiplier": "guidance_rescale",
}
# Keys that change nothing, or are read by name below.
_ABOUT_MFLUX = ("mflux_version", "base_model", "model", "precision", "generation_time_seconds", "created_at")
_ABOUT_INVOKEAI = ("app_version", "generation_mode", "model", "scheduler", "rand_device", "clip_skip", "init_image")
_LORAS_MFLUX = ("lora_paths", "lora_scales")
# The lists of control networks and IP-Adapters; in each item the key of the network, and that of its weight.
_CONTROLS_INVOKEAI = {
    "controlnets": ("control_model", "control_weight"),
    "t2iAdapters": ("t2i_adapter_model", "weight"),
    "ipAdapters": ("ip_adapter_model", "weight"),
}
_MODES_INVOKEAI = {"balanced": "balanced", "more_prompt": "prompt", "more_control": "control", "unbalanced": "control"}
_METHODS_INVOKEAI = {"style": "style", "composition": "composition"}  # of an IP-Adapter: the part where it counts
_PICTURES_MFLUX = ("image_path", "image_paths", "masked_image_path")

# InvokeAI's schedulers without the _k for Karras. Its solvers dpmpp_2s and dpmpp_3m have no equivalent here.
SCHEDULERS = {
    "ddim": "ddim",
    "ddpm": "ddpm",
    "deis": "deis",
    "dpmpp_2m": "dpmpp_2m",
    "dpmpp_2m_sde": "dpmpp_2m_sde",
    "dpmpp_sde": "dpmpp_sde",
    "euler": "euler",
    "euler_a": "euler_ancestral",
    "heun": "heun",
    "kdpm_2": "dpm2",
    "kdpm_2_a": "dpm2_ancestral",
    "lcm": "lcm",
    "lms": "lms",
    "pndm": "pndm",
    "tcd": "tcd",
    "unipc": "unipc",
}


def read_mflux(data: Mapping[str, object], path: Path) -> Foreign:
    """Return the recipe in the EXIF UserComment of an image of mflux. Raises ModelError."""
    recipe = Foreign(program="mflux", path=path)
    for key, option in _MFLUX.items():
        recipe.put(option, data.get(key))
    recipe.put_model(data.get("model"))
    recipe.notes.append(OTHER_NOISE)
    _put_mflux_picture(recipe, data)
    _put_mflux_loras(recipe, *(data.get(key) for key in _LORAS_MFLUX))
    if isinstance(short := data.get("loras"), str):  # of XMP: NAME:STRENGTH, several with commas between
        for name, _, strength in (part.rpartition(":") for part in short.split(",")):
            if not isinstance(scale := number(strength.strip()), int | float) or not recipe.put_lora(name, scale):
                recipe.left_out.append(f"LoRA {name or strength}")
    known = (*_MFLUX, *_ABOUT_MFLUX, *_PICTURES_MFLUX, *_LORAS_MFLUX, "loras", "image_strength")
    recipe.left_out += [_named(key, value) for key, value in data.items() if key not in known and value]
    return recipe


def _put_mflux_loras(recipe: Foreign, paths: object, scales: object) -> None:
    """Set the LoRAs of a list of paths and one of strengths, which may be shorter."""
    paths, scales = (value if isinstance(value, list) else [] for value in (paths, scales))
    for i, path in enumerate(paths):
        if not isinstance(path, str) or not recipe.put_lora(path, scales[i] if i < len(scales) else 1.0):
            recipe.left_out.append(f"LoRA {_name(path)}")


def _put_mflux_picture(recipe: Foreign, data: Mapping[str, object]) -> None:
    """Set an initial image's strength: mflux's is the share of the steps that are left out, ours the share of the
    steps that run."""
    recipe.picture = any(data.get(key) for key in _PICTURES_MFLUX)
    recipe.mask = bool(data.get("masked_image_path"))
    strength = data.get("image_strength")
    if strength is None:
        return
    if type(strength) not in (int, float) or not 0 <= strength <= 1:  # type: ignore[operator]
        raise recipe.fault("image_strength", "a number from 0 to 1")
    if recipe.picture:
        recipe.put("strength", 1 - strength)  # type: ignore[operator]


def read_invokeai(data: Mapping[str, object], path: Path) -> Foreign:
    """Return the recipe in the table `invokeai_metadata`, of version 3 and later. Raises ModelError."""
    recipe = Foreign(program="InvokeAI", path=path)
    for key, option in _INVOKEAI.items():
        recipe.put(option, data.get(key))
    model = data.get("model")
    recipe.put_model(_name(model) if isinstance(model, Mapping) else model)
    _put_scheduler(recipe, data.get("scheduler"))
    _note_noise(recipe, data.get("rand_device"))
    _put_invokeai_picture(recipe, data)
    for one in _tables(recipe, data, "loras"):
        name = _name({key: one.get(key) for key in ("model", "lora")})
        if not name or not recipe.put_lora(name, one.get("weight", 1.0)):
            recipe.left_out.append(_named("loras", [one]))
    modes = {
        mode for key in _CONTROLS_INVOKEAI for one in _tables(recipe, data, key) for mode in _put_unit(recipe, key, one)
    }
    if len(modes) == 1:
        recipe.put_control_mode(modes.pop())
    elif modes:
        recipe.notes.append("its control networks have several modes; balanced is taken for all")
    skip = data.get("clip_skip")
    if skip is not None:
        if type(skip) is not int or not 0 <= skip <= 100:
            raise recipe.fault("clip_skip", "an integer from 0 to 100")
        recipe.note_clip_skip(f"clip_skip {skip}", skip)
    known = (*_INVOKEAI, *_ABOUT_INVOKEAI, *_CONTROLS_INVOKEAI, "loras", "strength")
    recipe.left_out += [_named(key, value) for key, value in data.items() if key not in known and value]
    return recipe


def _tables(recipe: Foreign, data: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    """Return the objects in the list `key`; anything else there is named as left out."""
    value = data.get(key)
    items = value if isinstance(value, list) else [value] if value else []
    recipe.left_out += [_named(key, item) for item in items if not isinstance(item, Mapping)]
    return [item for item in items if isinstance(item, Mapping)]


def _put_unit(recipe: Foreign, key: str, unit: Mapping[str, object]) -> list[str]:
    """Set one control, and return the mode of a ControlNet."""
    named, weighed = _CONTROLS_INVOKEAI[key]
    scale, start, end = (unit.get(name, usual) for name, usual in (
        (weighed, 1.0), ("begin_step_percent", 0.0), ("end_step_percent", 1.0),
    ))  # fmt: skip
    part = _METHODS_INVOKEAI.get(str(unit.get("method")))
    network = _name({"model": unit.get(named)})
    if isinstance(scale, list) or not recipe.put_control(network, "", scale, start, end, *([part] if part else [])):
        recipe.left_out.append(_named(key, [unit]))
        return []
    return [_MODES_INVOKEAI.get(str(unit.get("control_mode")), "balanced")] if key == "controlnets" else []


def _put_scheduler(recipe: Foreign, name: object) -> None:
    if name is None:
        return
    text = recipe.text("scheduler", name, 1_000)
    sampler = SCHEDULERS.get(text.removesuffix("_k"))
    if sampler is None:
        recipe.left_out.append(f"scheduler {text}")
    else:
        recipe.put_sampler(sampler, "karras" if text.endswith("_k") else None)


def _note_noise(recipe: Foreign, device: object) -> None:
    if device is None:
        recipe.notes.append("it does not say where its noise was drawn: the same seed may give another picture here")
    elif device != "cpu":
        recipe.notes.append("its noise was drawn on a GPU: the same seed gives another picture here")


def _put_invokeai_picture(recipe: Foreign, data: Mapping[str, object]) -> None:
    mode = recipe.text("generation_mode", data.get("generation_mode") or "txt2img", 1_000)
    recipe.picture = mode.endswith(("img2img", "inpaint", "outpaint")) or bool(data.get("init_image"))
    recipe.mask = mode.endswith(("inpaint", "outpaint"))
    if recipe.picture:
        recipe.put("strength", data.get("strength"))


def _named(key: str, value: object) -> str:
    """Return a key with its value, or only the names in a path or table."""
    if isinstance(value, list):
        return f"{key} {', '.join(filter(None, (_name(item) for item in value[:20])))}".strip()
    return f"{key} {_name(value)}".strip()


def _name(value: object) -> str:
    """Return a name for `value`, or ""."""
    if isinstance(value, Mapping):
        inner = (value.get(key) for key in ("name", "model_name", "model", "lora", "control_model", "image_name"))
        return next((_name(item) for item in inner if item), "")
    return str(value).replace("\\", "/").rsplit("/", 1)[-1] if isinstance(value, (str, int, float)) else ""
