"""The loop of a training run: steps, precision, optimizer and checkpoints. It knows neither framework nor model.

- Everything random in step N comes from (seed, N), and a checkpoint is whole or not written: a run that was killed and
  resumed equals the unbroken one, on a CPU bit for bit.
- No step is skipped: if a float16 gradient overflows, the same step runs again with a smaller scale. When the scale
  collapses, bfloat16 replaces float16.
- A value that is not finite elsewhere ends the run; the last checkpoint stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from qwenimg.common.base.atomic_files import check_space
from qwenimg.common.base.errors import DoesNotFit, NumericsError
from qwenimg.common.base.text import clean
from qwenimg.common.training import files, optimizer, state
from qwenimg.common.training.config import TrainingPhase, phase_at
from qwenimg.common.training.optimizer import CLIP, Arrays, Optimizer
from qwenimg.common.training.scaler import LossScaler
from qwenimg.common.training.state import Progress

Array: TypeAlias = Any  # of a backend
ADVICE = ", with a lower --rate or --precision fp32"


class Learner(Protocol):
    """The parameters of a run, and the gradients of its steps. An optimizer may change the arrays of `parameters`
    themselves, and return them: `put` is called with the new ones in any case."""

    @property
    def parameters(self) -> Arrays: ...

    def put(self, parameters: Arrays) -> None:
        """Replace the parameters."""
        ...

    def gradients(self, step: int, dtype: str, scale: float) -> tuple[float, Arrays]:
        """Return the loss of a step, counted from 0, with products in `dtype`, and `scale` times the gradients of the
        parameters that have one. A step is computed again after an overflow."""
        ...

    def evaluated(self, arrays: Arrays) -> Arrays:
        """Return the arrays, computed."""
        ...

    def array(self, values: Any) -> Array:
        """Return a numpy array on the device."""
        ...

    def numpy(self, array: Array) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Done:
    """A step that was made, of `step` until now. `gradient` is the length of the gradient before it was clipped."""

    step: int
    loss: float
    rate: float
    gradient: float
    dtype: str
    scale: float
    growths: int
    back_offs: int


class Loop:
    """A run from its present step to its last. Whoever iterates over `steps` may stop after any, and `save`."""

    def __init__(
        self,
        config: files.RunOptions,
        learner: Learner,
        made: Optimizer,
        phases: Sequence[TrainingPhase],
        rate: Callable[[int], float],
        tell: Callable[[str], None],
        *,
        save_every: int,
        check: Callable[[int], None] = lambda step: None,
        write: Callable[[], None] = lambda: None,
    ):
        """Start, or go on from the checkpoint. rate: of each step, from 0; check: called after each step with their
        number, raises to end the run; write: called before each checkpoint, for other files of this step, which a run
        that is killed between the two writes again. Raises ModelError for a checkpoint that is broken or of another
        run, and DoesNotFit without space for one."""
        self.config, self.learner, self.optimizer, self.phases = config, learner, made, phases
        self.rate, self.tell, self.save_every = rate, tell, save_every
        self.check, self.write = check, write
        self.checkpoint = config.stem.with_suffix(".safetensors")
        self.step, self.scaler = 0, LossScaler()
        check_space(self.checkpoint, sum(one.nbytes for one in self._tensors().values()))
        if config.resume:
            self._resume()

    def _resume(self) -> None:
        shapes = {name: tuple(one.shape) for name, one in self._tensors().items()}
        progress, values = state.load_checkpoint(self.checkpoint, self.config, shapes)
        self.step, self.scaler = progress.step, progress.scaler
        arrays = {name: self.learner.array(one) for name, one in values.items()}
        self.learner.put({name: arrays[f"model.{name}"] for name in self.learner.parameters})
        self.optimizer.state = {name: arrays[name] for name in self.optimizer.state}

    def _tensors(self) -> Arrays:
        return {f"model.{name}": one for name, one in self.learner.parameters.items()} | self.optimizer.state

    # Steps

    def steps(self) -> Iterator[Done]:
        """Make the steps, and save every `save_every` and after the last. Raises NumericsError and DoesNotFit; the last
        checkpoint stays."""
        while self.step < self.config.steps:
            done = self.one()
            if self.step % self.save_every == 0 or self.step == self.config.steps:
                self.save()
            yield done

    def one(self) -> Done:
        """Make one step. Raises NumericsError, and changes nothing then."""
        step, rate = self.step, self.rate(self.step)
        loss, gradients, length = self.gradients(step)
        if length > CLIP:
            gradients = {name: one * (CLIP / length) for name, one in gradients.items()}
        parameters = self.optimizer.step(self.learner.parameters, gradients, rate, step + 1)
        self.learner.evaluated({**parameters, **self.optimizer.state})
        self.learner.put(parameters)
        self.step = step + 1
        self.check(self.step)
        dtype, scaler = self.dtype(step), self.scaler
        return Done(
            step=self.step,
            loss=loss,
            rate=rate,
            gradient=length,
            dtype=dtype,
            scale=scaler.scale if dtype == "float16" else 1.0,
            growths=scaler.growths,
            back_offs=scaler.back_offs,
        )

    def dtype(self, step: int) -> str:
        """Return the dtype of this step's products."""
        dtype = phase_at(self.phases, step).dtype
        return "bfloat16" if dtype == "float16" and self.scaler.collapsed else dtype

    def gradients(self, step: int) -> tuple[float, Arrays, float]:
        """Return the loss of a step, its gradients, and their length, which is finite."""
        while True:
            dtype = self.dtype(step)
            scale = self.scaler.scale if dtype == "float16" else 1.0
            loss, gradients = self.learner.gradients(step, dtype, scale)
            length = optimizer.length(gradients) / scale
            finite = math.isfinite(loss) and math.isfinite(length)
            if dtype != "float16":
                if not finite:
                    what = f"the loss is {loss}" if not math.isfinite(loss) else "the gradient is not finite"
                    raise NumericsError(f"step {step}: {what} in {dtype}; {self.kept()}{ADVICE}")
                return loss, gradients, length
            if finite:
                self.scaler.finite()
                return loss, {name: one * (1 / scale) for name, one in gradients.items()}, length
            self.scaler.overflow()
            if self.scaler.collapsed:
                self.tell(
                    f"step {step}: float16 overflows at loss scale {self.scaler.scale:g}; bfloat16 from here on, "
                    "this step included"
                )

    # Checkpoints

    def save(self) -> None:
        """Write the checkpoint. Raises NumericsError for a value that is not finite, and DoesNotFit for a full disk;
        the old checkpoint stays then."""
        values = {name: self.learner.numpy(one) for name, one in self._tensors().items()}
        progress = Progress(self.step, self.scaler)
        try:
            state.check_finite(self.step, values)
            self.write()
            state.save_checkpoint(self.checkpoint, self.config, progress, values)
        except NumericsError as error:
            raise NumericsError(f"{error}; {self.kept()}{ADVICE}") from None
        except DoesNotFit as error:
            raise DoesNotFit(f"{error}; {self.kept()}") from None

    def kept(self) -> str:
        """Return what is left of a run that ends, for a message."""
        if not files.is_file(self.checkpoint):
            return "nothing was saved yet: start again"
        return f"the last checkpoint, {clean('/'.join(self.checkpoint.parts[-2:]))}, is whole: go on with --resume"
