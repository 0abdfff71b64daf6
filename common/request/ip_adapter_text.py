"""The texts of `--ip-adapter`, `--ip-image` and `--ip-mask`: another way to give controls whose pictures are prompts.

A control by an IP-Adapter is `FILE=PICTURE:SCALE:START-END` too; a further picture of the same adapter is
`FILE=also@PICTURE`, and the part of the image in which a picture counts `FILE=mask@PICTURE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.request import control_text
from qwenimg.common.request.control_text import Control

FORM = "write FILE, FILE:SCALE or FILE:SCALE:START-END"


def parse(value: object, files: bool = True) -> tuple[Control, ...]:
    """Return the controls of `FILE[:SCALE[:START-END]]`, a text or a list of texts, without their pictures. files: as
    for the text of a control. Raises UsageError."""
    return tuple(_one(one, files) if isinstance(one, str) else one for one in _several(value, "ip-adapter"))


def parse_pictures(value: object, files: bool = True) -> tuple[str, ...]:
    """Return the names of pictures in a text or a list of texts. Raises UsageError."""
    return tuple(map(str, _several(value, "ip-image")))


def parse_masks(value: object, files: bool = True) -> tuple[str, ...]:
    """Return the names of masks in a text or a list of texts. Raises UsageError."""
    return tuple(map(str, _several(value, "ip-mask")))


def controls(adapters: Sequence[Control], pictures: Sequence[str], masks: Sequence[str]) -> tuple[Control, ...]:
    """Return the controls of adapters with their pictures: one for each, or one for all, or all for the only adapter.
    masks: one for each picture, or none. Raises UsageError."""
    if not adapters:
        raise UsageError("--ip-image and --ip-mask are for an IP-Adapter: give it with --ip-adapter FILE")
    if not pictures:
        from qwenimg.common.base.atomic_files import PICTURES  # with what writes files

        name = adapters[0].network
        if name.lower().endswith(PICTURES):
            raise UsageError(
                f"--ip-adapter {clean(name, 60)}: give a picture as --ip-image, and here the adapter's name"
            )
        raise UsageError(f"--ip-adapter {clean(name, 60)}: give its picture with --ip-image PICTURE")
    if masks and len(masks) != len(pictures):
        raise UsageError(
            f"--ip-mask: {len(masks)} for {len(pictures)} pictures of --ip-image; give one for each, or none"
        )
    own = [pictures] if len(adapters) == 1 else [[one] for one in pictures]
    own_masks = [masks] if len(adapters) == 1 else [[one] for one in masks]
    if len(own) == 1:
        own, own_masks = own * len(adapters), own_masks * len(adapters)
    if len(own) != len(adapters):
        raise UsageError(
            f"--ip-image: {len(pictures)} pictures for {len(adapters)} adapters; give one for each, or one for all"
        )
    return tuple(
        control
        for adapter, shown, hidden in zip(adapters, own, own_masks or [[]] * len(own), strict=True)
        for control in (
            replace(adapter, file=shown[0]),
            *(Control(adapter.network, one, "also") for one in shown[1:]),
            *(Control(adapter.network, one, "mask") for one in hidden),
        )
    )


def _several(value: object, name: str) -> list[str | Control]:
    values = value if isinstance(value, (list, tuple)) else [value]
    parts: list[str | Control] = []
    for one in values:
        if not isinstance(one, (str, Control)):
            raise UsageError(f"{name} has {clean(type(one).__name__, 40)}; expected a text")
        parts += [part.strip() for part in one.split(";") if part.strip()] if isinstance(one, str) else [one]
    if len(parts) > control_text.MOST:
        raise UsageError(f"--{name}: {len(parts)} are given; at most {control_text.MOST} are taken")
    return parts


def _one(text: str, files: bool) -> Control:
    if "=" in text.partition(":")[0] or text.startswith(":"):
        raise UsageError(f"--ip-adapter {clean(text, 80)}: {FORM}; its picture is --ip-image PICTURE")
    source, scale, (start, end), parts = control_text.numbers(text, "ip-adapter", FORM, files=files)
    try:
        return Control(source, "", "", scale, start, end, parts)
    except UsageError as error:
        raise UsageError(str(error).replace("--control", "--ip-adapter")) from None
