"""FLUX.3 Image Klein: its references, and the times of a step for the denoise loop.

The distilled model is a flow map: it is also given the noise level that a step goes to, which is the next one of the
schedule for any sampler.
"""

from __future__ import annotations

from qwenimg.common.families.flux3 import memory, references
from qwenimg.common.networks.denoisers.flux3_conditioning import next_level, time_rows
from qwenimg.common.networks.denoisers.flux3_dit import Flux3Config
from qwenimg.common.numbers.timesteps import TimeDtype
from qwenimg.common.pipeline.models.inputs import BlendedMask, PictureInputs
from qwenimg.common.pipeline.models.patch_model import PatchModel
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.engine import NumpyArray

TEMPLATE = Template(
    text="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    dropped=0,
    limit=4096,
    seen=4096,
    pad="<|endoftext|>",
    multiple=80,
)


class Flux3(PatchModel):
    """A FLUX.3 model for `Pipeline`."""

    inputs = PictureInputs(
        most=references.MOST,
        mask=BlendedMask(soft=True),
        references=references.REFERENCES,
        origin=references.origin,
    )
    template, shares_references = TEMPLATE, False
    config: Flux3Config

    def step_peak(self, tokens: int) -> int:
        return memory.step_peak(self.config, tokens)

    def step_operations(self, image: int, text: int, references: int) -> float:
        return memory.step_operations(self.config, (image, text, references))

    def time_rows(self, request: Request, plan: SamplingPlan, sigma: float, dtype: TimeDtype) -> NumpyArray:
        timestep = self.schedule_config.timestep
        return time_rows(self.config, timestep(sigma), dtype, timestep(next_level(plan.sigmas, sigma)))
