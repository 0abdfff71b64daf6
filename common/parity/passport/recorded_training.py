"""The part of a passport that records the training of a LoRA: some steps, each from what the one before left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.text import clean
from qwenimg.common.prompts.check import check_not_blank

MAX_STEPS = 8
MAX_PICTURES = 8  # of a step
MAX_PROMPT = 2000  # characters
MAX_LAYERS = 4000
RANK = 2

Factors = Mapping[str, NDArray[np.float32]]
_POSITIVE = {"min": 0, "max": 3e38}


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One step: what it learns from, its loss and gradients, and the optimizer's next factors.

    `length` and `clipped`: of all gradients as one vector, before and after they are clipped."""

    captions: tuple[str, ...]  # "" for one that was dropped
    sigmas: tuple[float, ...] = field(metadata=_POSITIVE)
    noises: tuple[str, ...]  # SHA-256
    loss: float = field(metadata=_POSITIVE)
    length: float = field(metadata=_POSITIVE)
    clipped: float = field(metadata=_POSITIVE)
    rate: float = field(metadata={"min": 0, "max": 10})
    gradients: dict[str, NDArray[np.float32]]
    factors: dict[str, NDArray[np.float32]]

    def __post_init__(self) -> None:
        if not 1 <= len(self.sigmas) <= MAX_PICTURES or {len(self.captions), len(self.noises)} != {len(self.sigmas)}:
            raise ValueError(f"a step of {len(self.sigmas)} noise levels, {len(self.captions)} captions")
        if not all((self.loss, self.length, self.clipped, self.rate)):
            raise ValueError("a step whose loss, gradient or rate is 0")
        check_factors(self.gradients)
        check_factors(self.factors)
        if shapes(self.gradients) != shapes(self.factors):
            raise ValueError("a step whose gradients are not those of its factors")


@dataclass(frozen=True, kw_only=True)
class RecordedTraining:
    """The training that was recorded. `judged`: the losses on fixed noise before the first step and after the last."""

    prompts: tuple[str, ...]  # the captions
    width: int = field(metadata={"min": 16, "max": 4096})
    height: int = field(metadata={"min": 16, "max": 4096})
    seed: int = field(metadata={"min": 0, "max": 2**63 - 1})
    weight: float = field(metadata={"min": 2.0**-60, "max": 2.0**60})  # of each picture's loss: gradients are clipped
    layers: str  # SHA-256 of the names and shapes of all layers that learn
    judged: tuple[float, float] = field(metadata=_POSITIVE)
    steps: tuple[RecordedStep, ...]

    def __post_init__(self) -> None:
        if len(self.prompts) != 2 or not all(0 < len(one) <= MAX_PROMPT for one in self.prompts):
            raise ValueError(f"a training of {len(self.prompts)} captions; there are two")
        for prompt in self.prompts:
            check_not_blank(prompt)
        if not 1 <= len(self.steps) <= MAX_STEPS or not all(self.judged):
            raise ValueError(f"a training of {len(self.steps)} steps; there are 1 to {MAX_STEPS}, with losses")
        if any(shapes(step.factors) != shapes(self.steps[0].factors) for step in self.steps):
            raise ValueError("steps that train different factors")


def shapes(factors: Factors) -> dict[str, tuple[int, ...]]:
    return {name: one.shape for name, one in factors.items()}


def check_factors(factors: Factors) -> None:
    """Raise ValueError for factors that no training has."""
    if not 1 <= len(factors) <= 2 * MAX_LAYERS:
        raise ValueError(f"{len(factors)} factors")
    for name, one in factors.items():
        if one.ndim != 2 or not np.isfinite(one).all():
            raise ValueError(
                f"factor {clean(name, 60)!r} of shape {clean(one.shape, 40)} is no matrix of finite numbers"
            )
    if not any(one.any() for one in factors.values()):
        raise ValueError("factors or gradients that are all 0")
