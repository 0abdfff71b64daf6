"""The stages of the built-in model's training, by name, and a run of one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qwenimg.backends.torch.training.loop import MakeStage, Run
from qwenimg.common.training.config import TrainConfig
from training.config import outputs
from training.dit import DiTStage
from training.text import TextStage
from training.vae import VAEStage

STAGES: dict[str, MakeStage] = {"vae": VAEStage, "text": TextStage, "dit": DiTStage}


def open_run(config: TrainConfig, tell: Callable[[str], None], device: torch.device) -> Run:
    """Return the run of `config`'s stage, from its checkpoint with `resume`."""
    return Run(config, STAGES[config.stage], outputs(config), tell, device)


def train(config: TrainConfig, tell: Callable[[str], None], *, device: str) -> None:
    """Run one stage and write its part of `config.out`; checkpoints and logs are in its folder `training`.

    Raises UsageError, ModelError, NumericsError (a loss that is not finite) and DoesNotFit (a full disk); the last
    checkpoint stays whole."""
    open_run(config, tell, torch.device(device)).all_steps()
