"""Names of preprocessors, kinds of pictures and modes in AUTOMATIC1111's ControlNet extension, and ours for each. They
are in its API and in its recipes."""

from __future__ import annotations

from collections.abc import Mapping

from qwenimg.common.request.control_text import PREPROCESSORS
from qwenimg.common.request.names import CONTROL_MODES

IP_ADAPTER = "ip-adapter"
"""How the names of modules begin whose network is an IP-Adapter."""
MODULES: Mapping[str, str] = {
    "none": "",
    **{name: name for name in PREPROCESSORS},
    "invert (from white bg & black line)": "invert",
    "recolor_luminance": "grey",
    "blur_gaussian": "blur",
    **dict.fromkeys(("ip-adapter-auto", "ip-adapter_clip_sd15", "ip-adapter_clip_sdxl"), ""),
    **dict.fromkeys(("ip-adapter_clip_h", "ip-adapter_clip_g", "ip-adapter_clip_sdxl_plus_vith"), ""),
    "t2ia_color_grid": "colour",
}
KINDS: Mapping[str, str] = {
    "openpose": "openpose",
    "depth": "depth",
    "soft edge": "softedge",
    "hard edge": "lineart",
    "normal map": "normal",
    "segmentation": "segment",
    "tile": "tile",
    "inpaint": "inpaint",
    "unknown": "",
}
"""The kinds of pictures of a Union."""
_MODES = ("Balanced", "My prompt is more important", "ControlNet is more important")  # in the order of CONTROL_MODES


def mode_of(value: object) -> str | None:
    """Return our name of a control mode, a number or AUTOMATIC1111's words; None for another value."""
    for number, (words, name) in enumerate(zip(_MODES, CONTROL_MODES, strict=True)):
        if value in (words, str(number)) or (type(value) is int and value == number):
            return name
    return None
