"""Training on torch: the loop for any stage. Only this backend trains.

- The wheel does not call it yet: `tools/train.py` trains the built-in model with it, and LoRA training will.
- A batch is made in a thread while the step before it runs. On a CPU, threads take a part of each batch.
- The saved weights are an exponential average of the trained ones.
- On the CPU a run that was killed and resumed equals the unbroken one bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qwenimg.backends.torch.training.precision import LossScaler, MixedPrecision, Part, recommend
from qwenimg.backends.torch.training.state import Log, Progress, check_finite, load_checkpoint, save_checkpoint
from qwenimg.backends.torch.training.threads import Workers
from qwenimg.common.base.atomic_files import check_space
from qwenimg.common.base.errors import DoesNotFit, NumericsError
from qwenimg.common.base.text import clean
from qwenimg.common.training import config as training
from qwenimg.common.training import files
from qwenimg.common.training.config import TrainConfig

CLIP = 1.0  # the longest gradient
AVERAGE = 0.999  # decay of the average once it is warm
LOG_EVERY = 50  # steps
AT_ONCE = 4  # the most parts of a step on a CPU: with more, Python itself takes longer than the products


class Optimizer(Protocol):
    def state(self) -> dict[str, Tensor]:
        """Return all tensors of its state for a checkpoint; they are those in use."""

    def step(self, rate: float) -> None:
        """Apply the parameters' gradients."""


class TrainingStage(Protocol):
    @property
    def model(self) -> torch.nn.Module: ...
    def blocks(self) -> list[torch.nn.Module]: ...
    def optimizer(self, parameters: Mapping[str, torch.nn.Parameter]) -> Optimizer: ...
    def count(self, step: int) -> int: ...
    def batch(self, step: int) -> Any: ...
    def loss(self, batch: Any, rows: slice) -> Tensor: ...
    def write(self, weights: Mapping[str, Tensor]) -> None: ...


MakeStage = Callable[[torch.device, Callable[[str], None]], TrainingStage]


class Run:
    """One stage from its present step to its last. `outputs` are the files that the stage writes."""

    def __init__(
        self,
        config: TrainConfig,
        make_stage: MakeStage,
        outputs: Iterable[Path],
        tell: Callable[[str], None],
        device: torch.device,
    ):
        self.config = config
        self.stem = files.stem(config)
        files.prepare(config, outputs)
        threads = config.threads or torch.get_num_threads()
        self.at_once = min(threads, AT_ONCE) if device.type == "cpu" else 1
        self.maker = Workers(1, cores=1)
        self.workers = Workers(self.at_once, cores=threads // self.at_once) if self.at_once > 1 else None
        torch.set_num_threads(threads)
        self.tell = self.say(tell)
        self.stage = make_stage(device, self.tell)
        self.parameters = dict(self.stage.model.named_parameters())
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.optimizer = self.stage.optimizer(self.parameters)
        if config.checkpointing:
            _checkpoint_blocks(self.stage.blocks())
        progress = self._start()
        self.step = progress.step
        self.log = Log(self.stem, self.step)
        self.phases = self._phases(device)
        self.precision = MixedPrecision(self.phases, device, progress.scaler, self.tell, self.workers)

    def say(self, tell: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that calls `tell` and adds the line to the log."""

        def both(text: str) -> None:
            tell(text)
            files.add_line(self.stem.with_suffix(".log"), text)

        return both

    # Starting

    @property
    def checkpoint(self) -> Path:
        return self.stem.with_suffix(".safetensors")

    def _phases(self, device: torch.device) -> tuple[training.TrainingPhase, ...]:
        config, precision = self.config, self.config.precision
        if precision == "auto":
            precision, reason = recommend(device)
            self.tell(f"precision auto: {precision}, since {reason}")
        phases = training.plan_phases(precision, config.steps, config.shares)
        share = training.memory_estimate(phases)
        self.tell(f"phases: {training.describe_phases(phases)}; memory estimated at {share:.0%} of fp32's")
        return phases

    def _start(self) -> Progress:
        check_space(self.checkpoint, sum(value.nbytes for value in self._tensors().values()))
        if not self.config.resume:
            return Progress(0, LossScaler())
        return load_checkpoint(self.checkpoint, self.config, self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        """Return all tensors of a checkpoint; they are those in use."""
        tensors: dict[str, Tensor] = {f"model.{name}": p for name, p in self.parameters.items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        return tensors | self.optimizer.state()

    # Steps

    def all_steps(self) -> None:
        config, first = self.config, self.step
        self.tell(f"{config.stage}: steps {first} to {config.steps}, {_count(self.parameters) / 1e6:.2f} M parameters")
        reported, recent = time.monotonic(), []
        waiting = self.maker.submit(self.stage.batch, first)
        try:
            while self.step < config.steps:
                batch = waiting.result()
                if self.step + 1 < config.steps:
                    waiting = self.maker.submit(self.stage.batch, self.step + 1)
                loss, length = self.one_step(batch)
                recent.append(loss)
                last = self.step == config.steps
                if self.step % LOG_EVERY == 0 or last:
                    now = time.monotonic()
                    self._report(sum(recent) / len(recent), length, len(recent) / max(now - reported, 1e-9))
                    reported, recent = now, []
                if self.step % config.save_every == 0 or last:
                    self.save()
        except NumericsError as error:
            raise NumericsError(f"{error}; {self._kept()}, with a lower --rate or --precision fp32") from None
        except DoesNotFit as error:
            raise DoesNotFit(f"{error}; {self._kept()}") from None
        finally:
            for threads in (self.maker, self.workers):
                if threads is not None:
                    threads.stop()
        self._tell_memory()

    def one_step(self, batch: Any) -> tuple[float, float]:
        """Run one step. Return the loss and the unclipped gradient's length. Raises NumericsError, and changes nothing
        then."""
        config, step = self.config, self.step
        loss = self.precision.gradients(step, self._parts(batch), list(self.parameters.values()))
        length = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), CLIP))
        if not length < float("inf"):
            raise NumericsError(f"step {step}: the gradient is not finite")
        self.optimizer.step(training.learning_rate(step, config.steps, config.rate))
        self.step = step + 1
        decay = min(AVERAGE, self.step / (self.step + 9))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(self.parameters.values()), 1 - decay)
        return loss, length

    def _parts(self, batch: Any) -> list[Part]:
        """Split the batch into parts of about one size: `accumulate` of them, times the parts that run at once."""
        count = self.stage.count(self.step)
        parts = min(count, self.config.accumulate * self.at_once)
        edges = [count * i // parts for i in range(parts + 1)]
        rows = [slice(a, b) for a, b in pairwise(edges)]
        return [((r.stop - r.start) / count, partial(self.stage.loss, batch, r)) for r in rows]

    # Reports and checkpoints

    def _report(self, loss: float, length: float, rate: float) -> None:
        """Report the step. `loss` is the mean since the last report; `rate`, steps per second."""
        config, scaler = self.config, self.precision.scaler
        dtype = self.precision.dtype(self.step - 1)
        self.log.row(
            step=self.step,
            loss=f"{loss:.6g}",
            rate=f"{training.learning_rate(self.step - 1, config.steps, config.rate):.4g}",
            gradient=f"{length:.4g}",
            dtype=dtype,
            scale=scaler.scale if dtype == "float16" else 1,
            growths=scaler.growths,
            back_offs=scaler.back_offs,
            images_per_second=f"{rate * config.batch:.1f}",
        )
        self.log.write()
        remaining = time.strftime("%H:%M:%S", time.gmtime((config.steps - self.step) / rate))
        self.tell(
            f"{config.stage} {self.step}/{config.steps}  loss {loss:.4f}  {dtype}  {rate * config.batch:.1f} images/s"
            f"  {remaining} left"
        )

    def save(self) -> None:
        """Save the folder with the average of the weights, then the checkpoint: a run that is killed between the two
        writes the folder again. Raises NumericsError before either if a value is not finite."""
        check_finite(self.step, self._tensors())
        self.stage.write(self.average)
        save_checkpoint(self.checkpoint, self.config, Progress(self.step, self.precision.scaler), self._tensors())

    def _kept(self) -> str:
        if not files.is_file(self.checkpoint):
            return "nothing was saved yet: start again"
        return f"the last checkpoint, {clean('/'.join(self.checkpoint.parts[-2:]))}, is whole: go on with --resume"

    def _tell_memory(self) -> None:
        activations = self.precision.kept
        shown = ", ".join(f"{value / 1e6:.1f} MB in {dtype}" for dtype, value in activations.items())
        if not activations:
            return
        text = f"memory: activations kept for the backward take {shown}"
        if "float32" in activations and all(phase.dtype in activations for phase in self.phases if phase.steps):
            share = training.weighted(self.phases, {d: v / activations["float32"] for d, v in activations.items()})
            text += f"; over the run {share:.0%} of fp32's, estimated {training.memory_estimate(self.phases):.0%}"
        self.tell(text)


def _checkpoint_blocks(blocks: list[torch.nn.Module]) -> None:
    """Make each block keep only its input, and run again in the backward."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _count(parameters: Mapping[str, Tensor]) -> int:
    return sum(p.numel() for p in parameters.values())
