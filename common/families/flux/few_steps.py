"""Flux.1 dev in a few steps: LoRAs by their files on the hub, with the settings of their model cards. schnell is made
for a few steps itself."""

from __future__ import annotations

from collections.abc import Mapping

from qwenimg.common.request.few_steps import FewSteps

_HYPER = "ByteDance/Hyper-SD/Hyper-FLUX.1-dev"
_TURBO = "alimama-creative/FLUX.1-Turbo-Alpha/diffusion_pytorch_model.safetensors"


def few_steps(*, guided: bool) -> Mapping[str, FewSteps]:
    """Return the few-step LoRAs of a model that is told its guidance; the other one has none."""
    if not guided:
        return {}
    hyper = {steps: (f"{_HYPER}-{steps}steps-lora.safetensors",) for steps in (8, 16)}
    return {
        "hyper": FewSteps(steps=(8, 16), sampler="euler", guidance=3.5, loras=hyper, strength=0.125),
        "turbo": FewSteps(steps=(8,), sampler="euler", guidance=3.5, loras={8: (_TURBO,)}),
    }
