"""A run of one stage of the built-in model: the one loop of `common/training/loop.py`, its reports and its folder.

The saved weights are an exponential average of the trained ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from qwenimg.common.training import config as training
from qwenimg.common.training import files
from qwenimg.common.training.loop import Done, Loop
from qwenimg.common.training.loss_table import LossTable
from training.config import ShapesConfig, learning_rate
from training.learner import StageLearner, TrainingStage

LOG_EVERY = 50  # steps
MakeStage = Callable[[torch.device, Callable[[str], None]], TrainingStage]


class Run:
    """One stage from its present step to its last. `outputs` are the files that the stage writes."""

    def __init__(
        self,
        config: ShapesConfig,
        make_stage: MakeStage,
        outputs: Iterable[Path],
        tell: Callable[[str], None],
        device: torch.device,
    ):
        self.config = config
        files.prepare(config, outputs)
        self._tell = tell
        self.stage = make_stage(device, self.tell)
        self.learner = StageLearner(config, self.stage, device)
        self.optimizer = self.stage.optimizer(self.learner.parameters)
        precision, reason = recommend(device) if config.precision == "auto" else (config.precision, "")
        self.phases = training.plan_phases(precision, config.steps, config.shares)
        self.loop = Loop(
            config,
            self.learner,
            self.optimizer,
            self.phases,
            lambda step: learning_rate(step, config.steps, config.rate),
            self.tell,
            save_every=config.save_every,
            write=lambda: self.stage.write(self.optimizer.average),
        )
        self.table = LossTable(config.stem.with_suffix(".csv"), self.loop.step)
        if reason:
            self.tell(f"precision auto: {precision}, since {reason}")
        share = training.memory_estimate(self.phases)
        self.tell(f"phases: {training.describe_phases(self.phases)}; memory estimated at {share:.0%} of fp32's")

    def tell(self, text: str) -> None:
        """Tell a line, and add it to the log."""
        self._tell(text)
        files.add_line(self.config.stem.with_suffix(".log"), text)

    def all_steps(self) -> None:
        """Make the steps that are left. Raises NumericsError and DoesNotFit; the last checkpoint stays."""
        config = self.config
        count = sum(p.numel() for p in self.learner.parameters.values())
        self.tell(f"{config.stage}: steps {self.loop.step} to {config.steps}, {count / 1e6:.2f} M parameters")
        reported, recent = time.monotonic(), list[float]()
        try:
            for done in self.loop.steps():
                recent.append(done.loss)
                if done.step % LOG_EVERY == 0 or done.step == config.steps:
                    now = time.monotonic()
                    mean = replace(done, loss=sum(recent) / len(recent))
                    self._report(mean, len(recent) / max(now - reported, 1e-9))
                    reported, recent = now, []
        finally:
            self.learner.stop()
        self._tell_memory()

    def _report(self, done: Done, speed: float) -> None:
        """Report a step, whose loss is the mean since the last report. speed: steps per second."""
        config = self.config
        images = speed * config.batch
        self.table.add(done, images)
        self.table.write()
        remaining = time.strftime("%H:%M:%S", time.gmtime((config.steps - done.step) / speed))
        progress = f"{config.stage} {done.step}/{config.steps}  loss {done.loss:.4f}  {done.dtype}"
        self.tell(f"{progress}  {images:.1f} images/s  {remaining} left")

    def _tell_memory(self) -> None:
        activations = self.learner.kept
        shown = ", ".join(f"{value / 1e6:.1f} MB in {dtype}" for dtype, value in activations.items())
        if not activations:
            return
        text = f"memory: activations kept for the backward take {shown}"
        if "float32" in activations and all(phase.dtype in activations for phase in self.phases if phase.steps):
            share = training.weighted(self.phases, {d: v / activations["float32"] for d, v in activations.items()})
            text += f"; over the run {share:.0%} of fp32's, estimated {training.memory_estimate(self.phases):.0%}"
        self.tell(text)


def recommend(device: torch.device) -> tuple[str, str]:
    """Return the value of `--precision auto` on this device, and why."""
    if device.type == "cpu":
        return "fp32", "on a CPU 16-bit convolutions and small products are slower than fp32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "default", "this GPU multiplies in bf16, which needs no loss scaling; start and end stay fp32"
    return "fp16", "this GPU has no bf16; fp16 with a dynamic loss scale"
