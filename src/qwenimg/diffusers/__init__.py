"""The names of diffusers' pipelines, for scripts that are written for them.

    from qwenimg.diffusers import StableDiffusionXLPipeline

    pipe = StableDiffusionXLPipeline.from_pretrained("path/to/sdxl")
    pipe("a red circle", num_inference_steps=30, guidance_scale=5.0).images[0].save("circle.png")

Each class is made from its row of `pipelines.ROWS`. A keyword of diffusers is mapped to an option here, or refused by
its name with what does it here. Importing this imports neither framework.
"""

from __future__ import annotations

from typing import Any

from qwenimg.common.base.text import clean
from qwenimg.diffusers import drawing, pipelines, schedulers


def __getattr__(name: str) -> Any:
    if name in pipelines.ROWS or name in pipelines.AUTO:
        return drawing.pipeline_class(name)
    if name in schedulers.NAMES:
        return schedulers.scheduler_class(name)
    if name.endswith(("Pipeline", "Scheduler")):
        known = pipelines.ROWS if name.endswith("Pipeline") else schedulers.NAMES
        raise AttributeError(f"qwenimg.diffusers has no {clean(name, 60)}; it has {', '.join(known)}")
    raise AttributeError(f"module 'qwenimg.diffusers' has no attribute {clean(name, 60)!r}")


def __dir__() -> list[str]:
    return sorted((*pipelines.ROWS, *pipelines.AUTO, *schedulers.NAMES))
