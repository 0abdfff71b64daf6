"""Noise levels of flow models whose published scheduler is not flow-match Euler's: DPM-Solver++ with flow sigmas, and
that of consistency models in trigonometric time (SCM)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.config import parse
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.sampling import flow_match
from qwenimg.common.sampling.flow_match import USUAL, FlowLevels, FlowMatchConfig

DPM, SCM = "DPMSolverMultistepScheduler", "SCMScheduler"
# Fields that must have this value, which is also diffusers' own where none is given
_OF_DPM: Mapping[str, object] = {
    "algorithm_type": "dpmsolver++",
    "euler_at_final": False,
    "final_sigmas_type": "zero",
    "lower_order_final": True,
    "prediction_type": "epsilon",
    "solver_order": 2,
    "solver_type": "midpoint",
    "thresholding": False,
    "use_beta_sigmas": False,
    "use_dynamic_shifting": False,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
    "use_lu_lambdas": False,
}
_OF_FLOW: Mapping[str, object] = {**_OF_DPM, "prediction_type": "flow_prediction"}
_LAST, _MIDDLE = 1.57080, 1.3  # times in 0 .. pi/2 of SCM's first step, and of the second of two


@dataclass(frozen=True, kw_only=True)
class DPMFlowConfig(FlowMatchConfig):
    """DPM-Solver++ with `use_flow_sigmas`. The model's times are whole numbers, rounded down, as its scheduler has
    them."""

    sampler: ClassVar[str] = "dpmpp_2m"
    class_name: ClassVar[str] = DPM

    def timestep(self, sigma: float) -> float:
        return float(int(sigma * self.num_train_timesteps))


@dataclass(frozen=True, kw_only=True)
class TrigFlowConfig(FlowMatchConfig):
    """SCM's trigonometric flow, x = cos(t) image + sin(t) noise: divided by cos(t) + sin(t) this is a flow model's x at
    the level sin(t) / (cos(t) + sin(t)), which is the model's time (J. Chen et al., "SANA-Sprint", 2025). A step
    there draws fresh noise, as LCM's does."""

    sampler: ClassVar[str] = "lcm"
    class_name: ClassVar[str] = SCM

    def timestep(self, sigma: float) -> float:
        return float(np.float32(sigma))


def _before_shift(config: FlowMatchConfig, steps: int) -> NDArray[np.float64]:
    alphas = np.linspace(1, 1 / config.num_train_timesteps, steps + 1)
    return np.flip(1.0 - alphas)[:-1]


def _trigonometric(config: FlowMatchConfig, steps: int) -> NDArray[np.float32]:
    times = [_LAST, _MIDDLE] if steps == 2 else np.linspace(_LAST, 0, steps + 1)[:-1]
    t = np.asarray(times, np.float32)
    levels: NDArray[np.float32] = np.sin(t) / (np.cos(t) + np.sin(t))
    return levels


_LEVELS: Mapping[type[FlowMatchConfig], FlowLevels] = MappingProxyType(
    {DPMFlowConfig: FlowLevels(spacing=_before_shift), TrigFlowConfig: FlowLevels(spacing=_trigonometric)}
)


def levels(config: FlowMatchConfig) -> FlowLevels:
    """Return the rule of the levels of a scheduler."""
    return _LEVELS.get(type(config), USUAL)


def is_flow(data: Mapping[str, object]) -> bool:
    """Return whether `data`, the content of a scheduler_config.json, is read here."""
    name = data.get("_class_name", flow_match.CLASS_NAME)
    return name in (flow_match.CLASS_NAME, SCM) or (name == DPM and data.get("use_flow_sigmas") is True)


def read_config(data: Mapping[str, object], path: Path) -> FlowMatchConfig:
    """Return the configuration of a flow model's scheduler from `data`, the content of the file `path`. Raises
    ModelError."""
    trained = {"num_train_timesteps": data.get("num_train_timesteps", 1000)}
    if data.get("_class_name") == SCM:
        _check(data, {"prediction_type": "trigflow"}, {"prediction_type": "trigflow"}, path)
        return parse(TrigFlowConfig, trained, source=path)
    if data.get("_class_name") == DPM and is_flow(data):
        _check(data, _OF_FLOW, _OF_DPM, path)
        return parse(DPMFlowConfig, trained | {"shift": data.get("flow_shift", 1.0)}, source=path)
    return flow_match.read_config(data, path)


def _check(data: Mapping[str, object], wanted: Mapping[str, object], default: Mapping[str, object], path: Path) -> None:
    for name, value in wanted.items():
        if (given := data.get(name, default[name])) != value:
            raise bad(path, f"{name} is {clean(given, 40)!r}: not supported; expected {value!r}")
