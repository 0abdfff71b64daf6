"""The names that options of an image take as their values, and the check of each. Tables of samplers and schedules are
imported where they are used, for `qwenimg --help` reads the options.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

CAPTIONS = ("en", "zh")
FILLS = ("original", "fill", "noise", "nothing")  # of a masked part
MODES = ("inside", "outside")  # of a mask
CONTROL_MODES = ("balanced", "prompt", "control")  # AUTOMATIC1111's three, in the order of its numbers for them
ENLARGERS = ("lanczos", "nearest", "latent", "latent-nearest", "latent-nearest-exact", "latent-bicubic")
LATENT = "latent"  # how the names of those begin that enlarge latents, not pixels
# AUTOMATIC1111's names of them: without an upscaler a picture is resampled by Lanczos there, and an antialiased linear
# interpolation is the plain one where latents become more.
ENLARGERS_THERE = {
    "Latent": "latent",
    "Latent (antialiased)": "latent",
    "Latent (bicubic)": "latent-bicubic",
    "Latent (nearest)": "latent-nearest",
    "Latent (nearest-exact)": "latent-nearest-exact",
    "Lanczos": "lanczos",
    "Nearest": "nearest",
    "None": "lanczos",
}
# AUTOMATIC1111's names of upscalers, where the file is called otherwise.
UPSCALERS_THERE = {
    "R-ESRGAN 4x+": "RealESRGAN_x4plus",
    "R-ESRGAN 4x+ Anime6B": "RealESRGAN_x4plus_anime_6B",
    "R-ESRGAN 2x+": "RealESRGAN_x2plus",
    "R-ESRGAN General 4xV3": "realesr-general-x4v3",
    "R-ESRGAN General WDN 4xV3": "realesr-general-wdn-x4v3",
    "R-ESRGAN AnimeVideo": "realesr-animevideov3",
}
# AUTOMATIC1111's names of the fills, in the order of their numbers in its API.
FILLS_THERE = {"fill": "fill", "original": "original", "latent noise": "noise", "latent nothing": "nothing"}


def captions() -> Sequence[str]:
    return CAPTIONS


def check_caption(language: str) -> None:
    if language not in CAPTIONS:
        raise UsageError(f"caption is {clean(language, 40)!r}; choose en or zh, as in --caption en")


def control_modes() -> Sequence[str]:
    return CONTROL_MODES


def check_control_mode(mode: str) -> None:
    if mode not in CONTROL_MODES:
        raise UsageError(f"control-mode is {clean(mode, 40)!r}; choose one of {', '.join(CONTROL_MODES)}")


def samplers() -> Sequence[str]:
    from qwenimg.common.sampling import table

    return tuple(table.SAMPLERS)


def check_sampler(name: str) -> None:
    from qwenimg.common.sampling import table

    table.find(name)


def schedules() -> Sequence[str]:
    from qwenimg.common.sampling import schedules

    return schedules.SCHEDULES


def check_schedule(name: str) -> None:
    from qwenimg.common.sampling import schedules

    schedules.check_name(name)


def check_few_steps(text: str) -> None:
    from qwenimg.common.request import few_steps

    few_steps.parse(text)


def check_variation(text: str) -> None:
    from qwenimg.common.numbers import variation

    variation.check(text)


def fills() -> Sequence[str]:
    return FILLS


def check_fill(name: str) -> None:
    if name not in FILLS:
        raise UsageError(f"mask-fill is {clean(name, 40)!r}; choose one of {', '.join(FILLS)}")


def modes() -> Sequence[str]:
    return MODES


def check_mode(name: str) -> None:
    if name not in MODES:
        raise UsageError(f"mask-mode is {clean(name, 40)!r}; choose inside (white is drawn anew) or outside (black)")


def is_upscaler(enlarger: str) -> bool:
    """Return whether the value of `hires_with` names the file of an upscaler."""
    return enlarger not in ENLARGERS


def check_enlarger(name: str) -> None:
    if not name.strip() or (name.lower().startswith(LATENT) and is_upscaler(name)):
        known = ", ".join(ENLARGERS)
        raise UsageError(f"hires-with is {clean(name, 40)!r}; choose one of {known}, or the file of an upscaler")


def steps_run(steps: int, strength: float) -> int:
    """Return how many of `steps` a run from a picture computes; AUTOMATIC1111 counts these for a second pass."""
    return steps - int(max(steps - min(steps * strength, steps), 0))


def steps_for(run: int, strength: float) -> int:
    """Return the number of steps for which `run` steps are computed, as in AUTOMATIC1111."""
    return int(run / min(strength, 0.999))
