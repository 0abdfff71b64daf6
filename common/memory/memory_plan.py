"""The memory and the operations of one image, stage by stage, planned from configurations alone."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The bytes of one stage, on top of the idle framework."""

    name: str  # encode, text, modulation, denoise, refine or decode
    title: str  # the part of the model that takes them, for messages: `the transformer`
    weights: int  # bytes of weights in memory while it runs, including those that stay from stages before
    activations: int
    about: str = ""  # the change that makes it fit, for messages: `in bands of 32 rows`

    @property
    def peak(self) -> int:
        return self.weights + self.activations

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "weights_bytes": self.weights,
            "activation_bytes": self.activations,
            "peak_bytes": self.peak,
        }


@dataclass(kw_only=True)
class MemoryPlan:
    """The stages of an image in their order."""

    budget: int  # bytes that the run may take, including `loaded`
    loaded: int  # bytes of weights that are in memory already
    stages: list[StageMemory] = field(default_factory=list)
    steps: float = 0.0  # multiplications and additions of all steps
    decoding: float = 0.0  # the same of the decoder
    streamed: float = 0.0  # bytes of streamed blocks that all steps read
    small_denoiser: bool = False  # True: few parameters compute the steps
    small_decoder: bool = False
    quantized: bool = False  # True: the steps multiply by quantized weights

    @property
    def largest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.peak)

    def fits(self, budget: int) -> bool:
        return self.largest.peak <= budget

    def add(self, stage: StageMemory) -> None:
        """Append a stage. For stages with one name in a row, such as two text encoders, the largest counts."""
        if self.stages and self.stages[-1].name == stage.name:
            self.stages[-1] = max(self.stages[-1], stage, key=lambda one: one.peak)
        else:
            self.stages.append(stage)
