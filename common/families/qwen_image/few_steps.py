"""Qwen-Image in a few steps: the Lightning LoRAs of ModelTC, by their files on the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping

from qwenimg.common.families.qwen_image.known import BUILT_IN
from qwenimg.common.request.few_steps import FewSteps

_REPO = "lightx2v/Qwen-Image-Lightning/Qwen-Image-Lightning"
_REPO_2512 = "lightx2v/Qwen-Image-2512-Lightning/Qwen-Image-2512-Lightning"


def _files(start: str, versions: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{start}-{version}.safetensors" for version in versions)


def few_steps(folder: str) -> Mapping[str, FewSteps]:
    """Return the few-step LoRAs of the model in `folder`. The model of December 2025, known by its name only, has its
    own LoRAs; the built-in model has none."""
    if folder.endswith(BUILT_IN.name):
        return {}
    if re.search("image[-_.]2512", folder.lower()):
        loras = {steps: _files(f"{_REPO_2512}-{steps}steps", ("V1.0-bf16", "V1.0-fp32")) for steps in (4, 8)}
    else:
        versions = ("V2.0-bf16", "V2.0", "V1.1-bf16", "V1.1", "V1.0-bf16", "V1.0")
        loras = {steps: _files(f"{_REPO}-{steps}steps", versions) for steps in (4, 8)}
    return {"lightning": FewSteps(steps=(8, 4), sampler="euler", schedule="lightning", loras=loras)}
