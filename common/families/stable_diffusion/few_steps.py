"""Stable Diffusion in a few steps: distilled models, and LoRAs by their files on the hub.

Steps, guidance and schedules are those of their model cards; `tests/reference/test_few_steps.py` compares their noise
levels with diffusers. Hyper-SD and Lightning are sampled at trailing times, LCM and Hyper-SD's LoRA for any number of
steps at their teacher's times. For one step there are also UNets, given as the model itself: SDXL-Lightning's, known by
its prediction of the image, and Hyper-SDXL's, which is called at time 800.
"""

from __future__ import annotations

from collections.abc import Mapping

from qwenimg.common.request.few_steps import FewSteps

_HYPER = "ByteDance/Hyper-SD/Hyper"
_WEIGHTS = "pytorch_lora_weights.safetensors"
_UNIFIED = "hyper-unified takes 1 to 8"
_X0 = "one step is a UNet of its own, with --prediction x0"
_LCM_STEPS = (4, 1, 2, 3, 5, 6, 7, 8)


def _turbo() -> FewSteps:
    return FewSteps(steps=(1, 2, 3, 4), sampler="euler_ancestral", schedule="trailing")


def _lcm(repo: str) -> FewSteps:
    return FewSteps(steps=_LCM_STEPS, sampler="lcm", loras={0: (f"latent-consistency/{repo}/{_WEIGHTS}",)})


def _hyper(kind: str) -> dict[str, FewSteps]:
    plain = {steps: (f"{_HYPER}-{kind}-{steps}steps-lora.safetensors",) for steps in (2, 4, 8)}
    guided = {steps: (f"{_HYPER}-{kind}-{steps}steps-CFG-lora.safetensors",) for steps in (8, 12)}
    return {
        "hyper": FewSteps(steps=(8, 4, 2), sampler="ddim", schedule="trailing", loras=plain, others=_UNIFIED),
        "hyper-cfg": FewSteps(steps=(8, 12), sampler="ddim", schedule="trailing", guidance=5.0, loras=guided),
        "hyper-unified": FewSteps(
            steps=tuple(range(1, 9)), sampler="tcd", loras={0: (f"{_HYPER}-{kind}-1step-lora.safetensors",)}
        ),
    }


def _lightning() -> FewSteps:
    files = {steps: (f"ByteDance/SDXL-Lightning/sdxl_lightning_{steps}step_lora.safetensors",) for steps in (2, 4, 8)}
    return FewSteps(steps=(4, 2, 8), sampler="euler", schedule="trailing", loras=files, others=_X0)


def few_steps(text_width: int, *, sdxl: bool, predicts: str = "epsilon") -> Mapping[str, FewSteps]:
    """Return the few-step recipes of a model whose UNet takes text states of `text_width` and `predicts` this."""
    if predicts == "sample":  # no LoRA is made for such a UNet
        return {"lightning": FewSteps(steps=(1,), sampler="euler", schedule="trailing")} if sdxl else {}
    if sdxl:
        distilled = {"hyper-unet": FewSteps(steps=(1,), sampler="lcm", schedule="hyper"), "turbo": _turbo()}
        return {"lightning": _lightning(), "lcm": _lcm("lcm-lora-sdxl"), **_hyper("SDXL"), **distilled}
    if text_width == 768:
        return {"lcm": _lcm("lcm-lora-sdv1-5")} | _hyper("SD15")
    return {"turbo": _turbo()}
