"""The stages of the built-in model's training, by name, and a run of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from training.config import ShapesConfig, outputs
from training.dit import DiTStage
from training.learner import TrainingStage
from training.run import Run
from training.text import TextStage
from training.vae import VAEStage

MakeStage = Callable[[ShapesConfig, torch.device, Callable[[str], None]], TrainingStage]
STAGES: dict[str, MakeStage] = {"vae": VAEStage, "text": TextStage, "dit": DiTStage}


def open_run(config: ShapesConfig, tell: Callable[[str], None], device: torch.device) -> Run:
    """Return the run of `config`'s stage, from its checkpoint with `resume`."""
    return Run(config, partial(STAGES[config.stage], config), outputs(config), tell, device)


def train(config: ShapesConfig, tell: Callable[[str], None], *, device: str) -> None:
    """Run one stage and write its part of `config.out`; checkpoints and logs are in its folder `training`.

    Raises UsageError, ModelError, NumericsError (a loss that is not finite) and DoesNotFit (a full disk); the last
    checkpoint stays whole."""
    open_run(config, tell, torch.device(device)).all_steps()
