"""Chroma: text states and guidance for the denoise loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qwenimg.common.families.chroma.checkpoint import T5
from qwenimg.common.families.chroma.texts import ChromaTexts
from qwenimg.common.networks.denoisers import chroma_conditioning
from qwenimg.common.networks.denoisers.chroma_dit import APPROXIMATOR
from qwenimg.common.numbers.timesteps import TimeDtype
from qwenimg.common.pipeline.models.time_modulated import TimeModulated
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Modulation
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime

LENGTH = 512  # tokens of T5


class Chroma(TimeModulated):
    """A Chroma model for `Pipeline`."""

    guidance = Guidance(formula=cfg)
    made_by = (APPROXIMATOR, f"{APPROXIMATOR}out_proj")

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        super().__init__(runtime, checkpoint, residents, ChromaTexts(residents, checkpoint, T5, LENGTH))

    def modulate(self, transformer: Any, timesteps: Sequence[float], dtype: TimeDtype) -> Modulation:
        made: Modulation = transformer.modulate(chroma_conditioning.features(self.config, timesteps, dtype))
        return made
