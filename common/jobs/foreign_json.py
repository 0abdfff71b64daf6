"""The recipes that mflux and InvokeAI write: flat tables in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qwenimg.common.jobs.foreign import Foreign

OTHER_NOISE = "its noise was drawn by that program's own generator: the same seed gives another picture here"

# Their keys that are fields of ours under the name that follows.
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
# They change nothing, or are looked at by name below.
_ABOUT_MFLUX = ("mflux_version", "base_model", "model", "precision", "generation_time_seconds", "created_at")
_ABOUT_INVOKEAI = ("app_version", "generation_mode", "model", "scheduler", "rand_device", "clip_skip", "init_image")
_PICTURES_MFLUX = ("image_path", "image_paths", "masked_image_path")

# InvokeAI's schedulers without the _k that means Karras. dpmpp_2s and dpmpp_3m are solvers that we have not.
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
    """The table in the EXIF UserComment of mflux's pictures. Raises ModelError."""
    found = Foreign(program="mflux", path=path)
    for key, own in _MFLUX.items():
        found.put(own, data.get(key))
    found.put_model(data.get("model"))
    found.notes.append(OTHER_NOISE)
    _put_mflux_picture(found, data)
    known = (*_MFLUX, *_ABOUT_MFLUX, *_PICTURES_MFLUX, "image_strength")
    found.left_out += [_named(key, value) for key, value in data.items() if key not in known and value]
    return found


def _put_mflux_picture(found: Foreign, data: Mapping[str, object]) -> None:
    """mflux's strength is the share of the steps that is left out, ours the share that is run."""
    found.picture = any(data.get(key) for key in _PICTURES_MFLUX)
    found.mask = bool(data.get("masked_image_path"))
    given = data.get("image_strength")
    if given is None:
        return
    if type(given) not in (int, float) or not 0 <= given <= 1:  # type: ignore[operator]
        raise found.fault("image_strength", "a number from 0 to 1")
    if found.picture:
        found.put("strength", 1 - given)  # type: ignore[operator]


def read_invokeai(data: Mapping[str, object], path: Path) -> Foreign:
    """The table `invokeai_metadata`, of version 3 and later. Raises ModelError."""
    found = Foreign(program="InvokeAI", path=path)
    for key, own in _INVOKEAI.items():
        found.put(own, data.get(key))
    model = data.get("model")
    found.put_model(_name(model) if isinstance(model, Mapping) else model)
    _put_scheduler(found, data.get("scheduler"))
    _note_noise(found, data.get("rand_device"))
    _put_invokeai_picture(found, data)
    skip = data.get("clip_skip")
    if skip is not None:
        if type(skip) is not int or not 0 <= skip <= 100:
            raise found.fault("clip_skip", "an integer from 0 to 100")
        found.note_clip_skip(f"clip_skip {skip}", skip)
    known = (*_INVOKEAI, *_ABOUT_INVOKEAI, "strength")
    found.left_out += [_named(key, value) for key, value in data.items() if key not in known and value]
    return found


def _put_scheduler(found: Foreign, name: object) -> None:
    if name is None:
        return
    text = found.text("scheduler", name, 1_000)
    own = SCHEDULERS.get(text.removesuffix("_k"))
    if own is None:
        found.left_out.append(f"scheduler {text}")
    else:
        found.put_sampler(own, "karras" if text.endswith("_k") else None)


def _note_noise(found: Foreign, device: object) -> None:
    if device is None:
        found.notes.append("it does not say where its noise was drawn: the same seed may give another picture here")
    elif device != "cpu":
        found.notes.append("its noise was drawn on a GPU: the same seed gives another picture here")


def _put_invokeai_picture(found: Foreign, data: Mapping[str, object]) -> None:
    mode = found.text("generation_mode", data.get("generation_mode") or "txt2img", 1_000)
    found.picture = mode.endswith(("img2img", "inpaint", "outpaint")) or bool(data.get("init_image"))
    found.mask = mode.endswith(("inpaint", "outpaint"))
    if found.picture:
        found.put("strength", data.get("strength"))


def _named(key: str, value: object) -> str:
    """A key with what it holds: of paths and tables their names only."""
    if isinstance(value, list):
        return f"{key} {', '.join(filter(None, (_name(item) for item in value[:20])))}".strip()
    return f"{key} {_name(value)}".strip()


def _name(value: object) -> str:
    """Something to call `value` by."""
    if isinstance(value, Mapping):
        inner = (value.get(key) for key in ("name", "model_name", "model", "lora", "control_model", "image_name"))
        return next((_name(item) for item in inner if item), "")
    return str(value).replace("\\", "/").rsplit("/", 1)[-1] if isinstance(value, (str, int, float)) else ""
