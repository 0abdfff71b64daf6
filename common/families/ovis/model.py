"""Ovis-Image: text states and guidance for the denoise loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qwenimg.common.families.ovis.texts import TEMPLATE, OvisTexts
from qwenimg.common.networks.denoisers.flux_conditioning import guidance_row, time_rows
from qwenimg.common.numbers.timesteps import TimeDtype
from qwenimg.common.pipeline.models.time_modulated import TimeModulated
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Modulation
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime


class Ovis(TimeModulated):
    """An Ovis-Image model for `Pipeline`."""

    guidance = Guidance(formula=cfg)
    made_by = ("transformer_blocks.0.", "transformer_blocks.0.norm1.linear")

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        super().__init__(runtime, checkpoint, residents, OvisTexts(residents, checkpoint, TEMPLATE))

    def modulate(self, transformer: Any, timesteps: Sequence[float], dtype: TimeDtype) -> Modulation:
        made: Modulation = transformer.modulate(time_rows(timesteps, dtype), guidance_row(0.0, dtype), [None])
        return made
