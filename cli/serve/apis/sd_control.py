"""Control networks in the form of AUTOMATIC1111's ControlNet extension: units of `alwayson_scripts`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwenimg.cli.serve.apis import body
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.controlnet_names import IP_ADAPTER, KINDS, MODULES, mode_of
from qwenimg.common.request.names import CONTROL_MODES

NAME = "controlnet"
_PARAM = "alwayson_scripts"
_HASH = re.compile(r" \[[0-9a-f]{4,64}\]$")  # after a network's name
_EVERY_PASS = ("Both", "HiResFixOption.BOTH", 0, "0")  # `hr_option` of a unit that counts in both passes
_ALIASES = {"input_image": "image", "guidance": "guidance_end"}  # older names of fields
# Canny's thresholds here; -1 leaves them open, and `webuiapi` sends 64 for every module unless its user says more.
_THRESHOLDS = ((100, 200), (-1, -1), (64, 64))


@dataclass(frozen=True, kw_only=True)
class ControlUnits:
    """The controls that a request asks for, with their pictures."""

    controls: tuple[Control, ...]  # whose files are the numbers of their pictures
    pictures: tuple[bytes, ...]  # of each
    mode: str = CONTROL_MODES[0]  # of all


def units(scripts: object, images: Sequence[bytes]) -> ControlUnits:
    """Parse the enabled units of `alwayson_scripts`. A unit without a picture gets the first of `images`, the initial
    image of the request."""
    if not isinstance(scripts, dict):
        raise HttpError(400, f"{_PARAM} is not an object", param=_PARAM)
    controls, pictures, modes = list[Control](), list[bytes](), set[str]()
    for name, about in scripts.items():
        if name.lower() != NAME:
            raise _unsupported(f"the script {clean(name, 40)!r}")
        listed = about.get("args", []) if isinstance(about, dict) else None
        if not isinstance(listed, list) or not all(isinstance(unit, dict) for unit in listed):
            raise HttpError(400, f"args of {name} is not a list of units", param=_PARAM)
        for unit in listed:
            unit = {name: value for name, value in unit.items() if value not in (None, "")}
            unit = {new: unit[old] for old, new in _ALIASES.items() if old in unit} | unit
            if not unit.get("enabled", True):
                continue
            is_adapter = str(unit.get("module")).lower().startswith(IP_ADAPTER)
            first, *others = _pictures(unit, images, several=is_adapter)
            pictures.append(first)
            controls.append(_control(unit, len(pictures)))
            added = [("also", one) for one in others]
            if region := unit.get("effective_region_mask"):
                added.append(("mask", body.picture_bytes(region, "effective_region_mask of a ControlNet unit")))
            for role, picture in added:
                pictures.append(picture)
                controls.append(Control(controls[-1].network, str(len(pictures)), role))
            body.check_count(len(controls), body.CONTROL_IMAGE)
            if not is_adapter:
                modes.add(_mode(unit.get("control_mode", 0)))
    if len(modes) > 1:
        raise _unsupported("ControlNet units with several control_modes")
    return ControlUnits(controls=tuple(controls), pictures=tuple(pictures), mode=next(iter(modes), CONTROL_MODES[0]))


def _mode(value: object) -> str:
    """Return our name of a unit's control_mode. Raises HttpError."""
    if (name := mode_of(value)) is None:
        raise _unsupported(f"control_mode {clean(value, 40)!r}")
    return name


def _pictures(unit: Mapping[str, Any], images: Sequence[bytes], *, several: bool) -> list[bytes]:
    """Return the pictures of a unit: a text, a table with `image` and `mask`, such a pair, or for an IP-Adapter a list
    of tables; without one the first of `images`. Raises HttpError."""
    value = unit.get("image")
    if isinstance(value, list) and len(value) == 2 and not any(isinstance(one, dict) for one in value):
        value = {"image": value[0], "mask": value[1]}
    tables = value if isinstance(value, list) else [value if isinstance(value, dict) else {"image": value}]
    if not tables or not all(isinstance(one, dict) for one in tables):
        raise HttpError(400, "image of a ControlNet unit is a text in base64, or has image and mask", param=_PARAM)
    if len(tables) > 1 and not several:
        raise _unsupported("several pictures of one ControlNet unit, but of an IP-Adapter's,")
    if unit.get("mask") or unit.get("mask_image") or any(one.get("mask") for one in tables):
        raise _unsupported("a mask of a ControlNet unit")
    body.check_count(len(tables), body.CONTROL_IMAGE)
    found = [one.get("image") for one in tables]
    if not all(found) and not (found == [found[0]] and images):
        raise HttpError(400, "a ControlNet unit has no image", param=_PARAM)
    return [body.picture_bytes(one, "image of a ControlNet unit") if one else images[0] for one in found]


def _control(unit: Mapping[str, Any], number: int) -> Control:
    """Convert a unit to a control. number: the number of its picture."""
    module = str(unit.get("module") or "none").lower()
    if module not in MODULES:
        text = f"module {clean(module, 40)!r} is not here, but {', '.join(MODULES)}: send its picture, with none"
        raise HttpError(400, text, param=_PARAM, code="unsupported")
    thresholds = tuple(body.number(unit.get(name, -1), float) for name in ("threshold_a", "threshold_b"))
    if module == "canny" and thresholds not in _THRESHOLDS:
        raise _unsupported("a threshold of canny but 100 and 200")
    for name in ("ipadapter_input", "advanced_weighting"):
        if unit.get(name):
            raise _unsupported(f"{name} of a ControlNet unit")
    if unit.get("hr_option", _EVERY_PASS[0]) not in _EVERY_PASS:
        raise _unsupported(f"hr_option {clean(unit['hr_option'], 40)!r}: a unit counts in both passes, which")
    if unit.get("inpaint_crop_input_image", True) not in (True, 1):  # the picture is cut along with the masked part
        raise _unsupported("inpaint_crop_input_image: false")
    usual = {"weight": 1, "guidance_start": 0, "guidance_end": 1}
    weight, start, end = (body.number(unit.get(name, value), float) for name, value in usual.items())
    if not all(type(one) in (int, float) for one in (weight, start, end)):
        raise HttpError(400, "weight, guidance_start and guidance_end of a ControlNet unit are numbers", param=_PARAM)
    named = _HASH.sub("", str(unit.get("model")))
    name = "" if named == "None" else named  # "": the model itself sees the picture
    kind = str(unit.get("union_control_type", "unknown")).lower()
    if kind not in KINDS:
        raise _unsupported(f"union_control_type {clean(kind, 40)!r}")
    prepared = MODULES[module] or KINDS[kind]
    try:
        return Control(name, str(number), prepared, float(weight), float(start), float(end))
    except (UsageError, OverflowError) as error:
        raise HttpError(400, str(error), param="control") from None


def _unsupported(what: str) -> HttpError:
    return HttpError(400, f"{what} is not supported here; leave it out", param=_PARAM, code="unsupported")
