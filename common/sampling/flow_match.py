"""The noise levels of a flow-match model's run.

A flow-match model receives x(sigma) = (1 - sigma) image + sigma noise and predicts the velocity dx/dsigma = noise -
image. Sampling integrates from sigma = 1 (noise) to sigma = 0 (image).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.config import parse
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.sampling.spacing import at_beta_quantiles, even_in_log, even_in_root
from qwenimg.common.sampling.types import MAX_STEPS

CLASS_NAME = "FlowMatchEulerDiscreteScheduler"
_IGNORED = frozenset({"steps_offset", "max_sigma"})
_LARGEST_SHIFT = 100.0
_LARGEST_MU = 80.0  # exp(mu) stays below the largest float32
LIGHTNING_SHIFT = 1.0986122886681098  # ln 3: Qwen-Image-Lightning was distilled with a shift of 3
_UNSUPPORTED = (
    "invert_sigmas",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "stochastic_sampling",
)


@dataclass(frozen=True, kw_only=True)
class FlowMatchConfig:
    """The fields of a flow-match Euler scheduler's `scheduler_config.json`, with their own names and defaults."""

    sampler: ClassVar[str] = "euler"  # the one that a run takes if none is asked for
    class_name: ClassVar[str] = CLASS_NAME
    num_train_timesteps: int = 1000
    shift: float = 1.0
    use_dynamic_shifting: bool = False
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    shift_terminal: float | None = None
    time_shift_type: str = "exponential"
    invert_sigmas: bool = False
    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    use_beta_sigmas: bool = False
    stochastic_sampling: bool = False
    sample_sigmas: tuple[float, ...] = ()  # the only levels, of a model that was distilled for them

    def __post_init__(self) -> None:
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise ModelError(f"scheduler: {name} is true; only false is supported")
        if self.time_shift_type not in ("exponential", "linear"):
            kind = clean(self.time_shift_type, 40)
            raise ModelError(f"scheduler: time_shift_type is {kind!r}, expected 'exponential' or 'linear'")
        terminal = 0.0 if self.shift_terminal is None else self.shift_terminal
        self._check(self.num_train_timesteps >= 1, "num_train_timesteps", "1 or more")
        self._check(0 < self.shift <= _LARGEST_SHIFT, "shift", f"above 0, at most {_LARGEST_SHIFT}")
        self._check(abs(self.base_shift) <= _LARGEST_SHIFT, "base_shift", f"within +-{_LARGEST_SHIFT}")
        self._check(abs(self.max_shift) <= _LARGEST_SHIFT, "max_shift", f"within +-{_LARGEST_SHIFT}")
        self._check(0 <= terminal < 1, "shift_terminal", "0 or more, below 1")
        if self.use_dynamic_shifting:
            base = self.base_image_seq_len
            self._check(base < self.max_image_seq_len, "max_image_seq_len", f"above base_image_seq_len {base}")

    def _check(self, good: bool, name: str, expected: str) -> None:
        if not good:
            raise ModelError(f"scheduler: {name} is {getattr(self, name)}, expected {expected}")

    def lightning(self) -> FlowMatchConfig:
        """Return the schedule of Qwen-Image-Lightning: a shift of 3 at every size, and no stretching towards a
        terminal level."""
        return replace(
            self,
            use_dynamic_shifting=True,
            base_shift=LIGHTNING_SHIFT,
            max_shift=LIGHTNING_SHIFT,
            time_shift_type="exponential",
            shift_terminal=None,
        )

    def timestep(self, sigma: float) -> float:
        """Return the model's timestep of a noise level, as float32 arithmetic has it: 0 to `num_train_timesteps`."""
        return float(np.float32(sigma) * np.float32(self.num_train_timesteps))


def gone(sigma: float) -> float:
    """Return the share of the noise that is gone at a noise level, 1 - sigma, as float32 arithmetic on timesteps has
    it in diffusers."""
    thousand = np.float32(1000)
    return float((thousand - np.float32(sigma) * thousand) / thousand)


def read_config(data: Mapping[str, object], path: Path) -> FlowMatchConfig:
    """Return the configuration of a flow-match scheduler from `data`, the content of the file `path`. Raises
    ModelError."""
    name = data.get("_class_name", CLASS_NAME)
    if name != CLASS_NAME:
        raise ModelError(f"{clean(path)}: is of class {clean(name, 60)!r}; expected {CLASS_NAME!r}")
    return parse(FlowMatchConfig, data, source=path, ignored=_IGNORED)


def checked_levels(levels: Sequence[float]) -> tuple[float, ...]:
    """Return the noise `levels` of a model that was distilled for them alone. Raises ModelError."""
    falling = all(0 < low < high for high, low in pairwise(levels)) and all(0 < level <= 1 for level in levels)
    if not falling or len(levels) > MAX_STEPS:
        raise ModelError(f"has {len(levels)} numbers that are not at most {MAX_STEPS} falling noise levels in 0..1")
    return tuple(map(float, levels))


def _only(config: FlowMatchConfig, steps: int) -> NDArray[np.float32]:
    """Return the levels of a model that has no others. Raise UsageError for another number of steps."""
    count = len(config.sample_sigmas)
    if steps != count:
        raise UsageError(f"steps is {clean(steps, 40)}: this model draws in {count} steps only; leave the option out")
    return np.array(config.sample_sigmas, np.float32)


def evenly(config: FlowMatchConfig, steps: int) -> NDArray[np.float32]:
    """Return the levels 1 .. 1/steps."""
    return np.linspace(1.0, 1.0 / steps, steps).astype(np.float32)


def trained(config: FlowMatchConfig, steps: int) -> NDArray[np.float64]:
    """Return levels that are even between the largest and the smallest trained one, as Stable Diffusion 3's pipelines
    have them. A static shift is in the trained levels already, so that it counts twice."""
    ends = np.array([1.0, 1.0 / config.num_train_timesteps], np.float32)
    first, last = (ends if config.use_dynamic_shifting else shifted(config, ends, 0.0)).astype(np.float64)
    return np.linspace(first * config.num_train_timesteps, last * config.num_train_timesteps, steps) / (
        config.num_train_timesteps
    )


def by_size(config: FlowMatchConfig, tokens: int, steps: int) -> float:
    """Return the shift on the line through the two trained sizes."""
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    return tokens * slope + (config.base_shift - slope * config.base_image_seq_len)


@dataclass(frozen=True, kw_only=True)
class FlowLevels:
    """The rule of a family's noise levels: those before the shift, and the shift if it is dynamic."""

    spacing: Callable[[FlowMatchConfig, int], NDArray[np.floating]] = evenly  # of a number of steps
    mu: Callable[[FlowMatchConfig, int, int], float] = by_size  # of image tokens and a number of steps


USUAL = FlowLevels()
SHIFTED_TWICE = FlowLevels(spacing=trained)

Spread = Callable[[float, float, int], list[float]]
SPREADS: Mapping[str, Spread] = MappingProxyType(
    {"karras": even_in_root, "exponential": even_in_log, "beta": at_beta_quantiles}
)
"""By the name of a schedule, levels from the first to the last one of the model's own schedule."""


def flow_schedule(
    config: FlowMatchConfig, steps: int, tokens: int, levels: FlowLevels = USUAL, spread: Spread | None = None
) -> tuple[float, ...]:
    """Return the noise levels of the flow-match Euler schedule for an image of `tokens` latent tokens (width/16 *
    height/16): steps + 1 levels, from 1 down to 0, each exactly a float32 value.

    The levels of `levels.spacing`, shifted towards 1 (P. Esser et al., "Scaling Rectified Flow Transformers for
    High-Resolution Image Synthesis", 2024), then stretched so that the last one is `shift_terminal`; `spread` then
    places those between the first and the last again. They are computed in float32 as in diffusers and equal its levels
    bit for bit, with one exception: a single step with a terminal starts at 1, where diffusers divides 0 by 0. Raises
    UsageError for steps outside 1 .. 1000, and for a size so far from the trained ones that float32 holds no schedule.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise UsageError(f"steps is {clean(steps, 40)}; choose 1 to {MAX_STEPS}")
    if tokens < 1:
        raise ValueError(f"an image of {tokens} tokens has no schedule")
    with np.errstate(all="ignore"):
        mu = levels.mu(config, tokens, steps) if config.use_dynamic_shifting else 0.0
        if not abs(mu) <= _LARGEST_MU:
            raise UsageError(f"{tokens} image tokens are too many for this model's schedule; choose a smaller size")
        spacing = _only if config.sample_sigmas else levels.spacing
        sigmas = shifted(config, spacing(config, steps), mu)
        if config.shift_terminal and steps > 1:
            sigmas = _stretched(sigmas, config.shift_terminal)
        if spread:
            sigmas = np.array(spread(float(sigmas[0]), float(sigmas[-1]), steps), np.float32)
    # A NaN fails this condition. A static shift may round the first level to just above 1.
    if not (sigmas[0] < 1.001 and sigmas[-1] > 0 and np.all(sigmas[1:] <= sigmas[:-1])):
        raise UsageError(f"{counted(steps, 'step')}: no schedule for {tokens} image tokens; choose another size")
    return (*map(float, sigmas.astype(np.float32)), 0.0)


def shifted(config: FlowMatchConfig, sigmas: NDArray[Any], mu: float) -> NDArray[Any]:
    """Return levels shifted towards 1 by the scheduler's fixed shift, or by `mu` if its shift is dynamic; in the dtype
    of `sigmas`."""
    number = sigmas.dtype.type
    one = number(1)
    if not config.use_dynamic_shifting:
        fixed: NDArray[Any] = number(config.shift) * sigmas / (one + number(config.shift - 1) * sigmas)
        return fixed
    weight = number(math.exp(mu) if config.time_shift_type == "exponential" else mu)
    moved: NDArray[Any] = weight / (weight + (one / sigmas - one))
    return moved


def _stretched(sigmas: NDArray[np.float32], terminal: float) -> NDArray[np.float32]:
    one = np.float32(1)
    remaining = one - sigmas
    stretched: NDArray[np.float32] = one - remaining / (remaining[-1] / np.float32(1 - terminal))
    return stretched
