"""Qwen-Image in a few steps: the Lightning LoRAs of ModelTC, by their files on the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from qwenimg.common.families.qwen_image.known import BUILT_IN
from qwenimg.common.families.qwen_image.variants import EDIT_2511, QwenVariant
from qwenimg.common.request.few_steps import FewSteps

_REPO = "lightx2v/Qwen-Image-Lightning/Qwen-Image-Lightning"
_REPO_2512 = "lightx2v/Qwen-Image-2512-Lightning/Qwen-Image-2512-Lightning"
_EDITS = {
    "edit": "lightx2v/Qwen-Image-Lightning/Qwen-Image-Edit-Lightning",
    "2509": "lightx2v/Qwen-Image-Lightning/Qwen-Image-Edit-2509/Qwen-Image-Edit-2509-Lightning",
    "2511": "lightx2v/Qwen-Image-Edit-2511-Lightning/Qwen-Image-Edit-2511-Lightning",
}


def _files(start: str, versions: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{start}-{version}.safetensors" for version in versions)


def few_steps(folder: str, kind: QwenVariant) -> Mapping[str, FewSteps]:
    """Return the few-step LoRAs of the model in `folder`. The model of December 2025, known by its name only, has its
    own LoRAs, and so does each that edits; the built-in model and the one that makes layers have none."""
    if folder.endswith(BUILT_IN.name) or kind.layered:
        return {}
    versions: tuple[str, ...]
    steps = (4,) if kind is EDIT_2511 else (8, 4)
    if kind.edits:
        start, versions = _EDITS[kind.name], ("V1.0-bf16", "V1.0", "V1.0-fp32")
    elif re.search("image[-_.]2512", folder.lower()):
        start, versions = _REPO_2512, ("V1.0-bf16", "V1.0-fp32")
    else:
        start, versions = _REPO, ("V2.0-bf16", "V2.0", "V1.1-bf16", "V1.1", "V1.0-bf16", "V1.0")
    loras = {count: _files(f"{start}-{count}steps", versions) for count in steps}
    return {"lightning": FewSteps(steps=steps, sampler="euler", schedule="lightning", loras=loras)}
