"""Recording of some steps of a LoRA's training, and their repetition on another backend or machine.

The run is the one of `train lora`: its loop, levels, noise, clip and optimizer, with checkpointing. Pictures are random
latents. A check goes on from each station with what was recorded: its gradients are taken at the recorded factors, and
the optimizer moves these by the recorded gradients. So an error stays where it is made.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.base.version import __version__
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.numbers.noise import FEWEST, TorchCPUGenerator
from qwenimg.common.parity.passport.passport import Passport
from qwenimg.common.parity.passport.recorded_training import (
    MAX_STEPS,
    RANK,
    Factors,
    RecordedStep,
    RecordedTraining,
    shapes,
)
from qwenimg.common.parity.record import model as recorded_model
from qwenimg.common.parity.record import side
from qwenimg.common.parity.sample import SEEN, called
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.precision.precision import short
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.runtime.factor_names import UP
from qwenimg.common.training import encoded, lora_step
from qwenimg.common.training import optimizer as optimizers
from qwenimg.common.training.config import LoraConfig, lora_rate, plan_phases
from qwenimg.common.training.example import Example
from qwenimg.common.training.loop import Loop
from qwenimg.common.training.lora import LoraLearner
from qwenimg.common.training.optimizer import AdamW, Arrays
from qwenimg.common.training.session import training_of

VALUES = 2**19  # of the factors that learn: of a larger model some layers, from the first to the last
RATE, DROPOUT, LENGTH = 1e-2, 0.4, 4.0  # LENGTH: of a gradient, about, so that it is clipped
EXACT = 1e-5  # relative: of levels and rates, which are computed in float64, of clipped gradients and of updates
# Relative differences of losses and gradients (L2), and of the tensor that differs most.
LOSS = {"float32": 1e-5, "bfloat16": 4e-2, "float16": 1e-2}
GRADIENT = {"float32": 3e-5, "bfloat16": 6e-2, "float16": 2e-2}
WORST = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.2}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A figure of a check."""

    name: str
    error: float
    allowed: float
    what: str = "differs by"

    @property
    def failure(self) -> str:
        """The reason of a failure, or ""."""
        if self.error <= self.allowed:
            return ""
        return f"{self.name} {self.what} {self.error:.1e}, at most {self.allowed:.1e}"


# The run


class RandomPictures:
    """Pictures of random latents: as they are and mirrored, one with a mask, each with its caption."""

    def __init__(self, pipe: Pipeline, captions: Sequence[str], size: tuple[int, int], seed: int, weight: float):
        self.forms = [tuple(_forms(pipe, text, size, seed + i, weight)) for i, text in enumerate(captions)]

    def __len__(self) -> int:
        return len(self.forms)

    def example(self, index: int, generator: np.random.Generator) -> Example:
        return encoded.chosen(self.forms[index], DROPOUT, generator)


def _forms(pipe: Pipeline, caption: str, size: tuple[int, int], seed: int, weight: float) -> Iterator[Example]:
    model, (width, height) = pipe.model, size
    fewest = min(model.inputs.fewest, len(SEEN))
    request = pipe.check(**called({"prompt": caption, "width": width, "height": height, "seed": 0, "pictures": fewest}))
    shape = (1, model.channels, *model.vae.sides(height, width))
    generator = TorchCPUGenerator(seed)
    latents = _normal(generator, shape)
    mask = (np.abs(_normal(generator, (1, 1, *shape[2:]))) < 1).astype(np.float32)
    seen = model.inputs.seen(request) if request.images else ()
    references = tuple(np.asarray(model.vae.latents(values, None), np.float32) for values in seen)
    example = Example(latents=latents, request=request, references=references, mask=mask, weight=weight)
    yield example
    mirrored = (np.ascontiguousarray(one[..., ::-1]) for one in (latents, mask))
    latents, mask = mirrored
    yield replace(example, latents=latents, mask=mask)


def _normal(generator: TorchCPUGenerator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return normal numbers, also fewer than the generator draws at once."""
    numbers: NDArray[np.float32] = generator.normal((max(FEWEST, prod(shape)),))
    return numbers[: prod(shape)].reshape(shape)


class Taped:
    """A `Learner` and an `Optimizer` whose values are noted, and replaced by recorded ones where there are some."""

    def __init__(self, learner: LoraLearner, recorded: Sequence[RecordedStep]):
        self.learner, self.recorded = learner, recorded
        self.optimizer = AdamW(learner.parameters)
        self.state = self.optimizer.state
        self.notes: list[dict[str, Any]] = []

    # As `Learner`

    @property
    def parameters(self) -> Arrays:
        return self.learner.parameters

    def put(self, parameters: Arrays) -> None:
        self.notes[-1]["factors"] = self._numpy(parameters)
        if self.recorded:
            parameters = self._arrays(self.recorded[len(self.notes) - 1].factors)
        self.learner.put(parameters)

    def gradients(self, step: int, dtype: str, scale: float) -> tuple[float, Arrays]:
        loss, found = self.learner.gradients(step, dtype, scale)
        draws = self.learner.draws(step)
        note: dict[str, Any] = {
            "captions": tuple(draw.example.request.prompt.strip() for draw in draws),
            "sigmas": tuple(draw.sigma for draw in draws),
            "noises": tuple(hashlib.sha256(draw.noise.tobytes()).hexdigest() for draw in draws),
            "loss": loss,
            "length": optimizers.length(found) / scale,
            "gradients": {name: one / np.float32(scale) for name, one in self._numpy(found).items()},
        }
        self.notes = [*self.notes[:step], note]
        if self.recorded and math.isfinite(note["length"]):
            return loss, {name: one * scale for name, one in self._arrays(self.recorded[step].gradients).items()}
        return loss, found

    def evaluated(self, arrays: Arrays) -> Arrays:
        return self.learner.evaluated(arrays)

    def array(self, values: Any) -> Any:
        return self.learner.array(values)

    def numpy(self, array: Any) -> Any:
        return self.learner.numpy(array)

    # As `Optimizer`

    def step(self, parameters: Arrays, gradients: Arrays, rate: float, number: int) -> Arrays:
        self.notes[-1] |= {"clipped": optimizers.length(gradients), "rate": rate}
        return self.optimizer.step(parameters, gradients, rate, number)

    def _numpy(self, arrays: Arrays) -> dict[str, Any]:
        return {name: self.numpy(one) for name, one in arrays.items()}

    def _arrays(self, values: Factors) -> Arrays:
        return {name: self.array(np.array(one)) for name, one in values.items()}  # a file's are read-only


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The values that decide a run."""

    prompts: tuple[str, ...]
    size: tuple[int, int]
    seed: int
    weight: float
    steps: int


class _Run:
    """A training of `pipe`, to be recorded or repeated."""

    def __init__(self, pipe: Pipeline, asked: _Asked, recorded: Sequence[RecordedStep] = ()):
        _, row = training_of(pipe)
        model, self.asked = pipe.model, asked
        self.dtype = model.runtime.precision.compute_dtype(lora_step.denoiser_name(model))
        self.layers = layers_sum(lora_step.paths(model, row))
        self.config = LoraConfig(
            stem=Path("parity"), steps=asked.steps, rank=RANK, rate=RATE, batch=2, seed=asked.seed,
            precision=short(self.dtype),
        )  # fmt: skip
        pictures, known = (
            RandomPictures(pipe, [text], asked.size, asked.seed + 1000 * i, asked.weight)
            for i, text in enumerate(asked.prompts)
        )
        self.judged = [one.forms[0][0] for one in (pictures, known)]
        self.learner = LoraLearner(self.config, model, _some(model, row), pictures, known)
        generator = TorchCPUGenerator(asked.seed)
        first = {name: self.learner.numpy(one) for name, one in self.learner.parameters.items()}
        first |= {name: np.float32(0.05) * _normal(generator, first[name].shape) for name in first if name.endswith(UP)}
        self.first: Mapping[str, Any] = first
        self.learner.put({name: self.learner.array(one) for name, one in first.items()})
        self.taped = Taped(self.learner, recorded)

    def made(self) -> tuple[tuple[float, float], list[dict[str, Any]]]:
        """Make the steps; return the losses on fixed noise before and after, and the notes of each step."""
        phases = plan_phases(self.config.precision, self.config.steps)
        loop = Loop(
            self.config,
            self.taped,
            self.taped,
            phases,
            lambda step: lora_rate(step, self.config.steps, self.config.rate),
            lambda text: None,
            save_every=self.config.steps,
        )
        self.learner.compute_in(self.dtype)
        before = self.learner.fixed_loss(self.judged)
        for _ in range(self.config.steps):
            loop.one()
        return (before, self.learner.fixed_loss(self.judged)), self.taped.notes

    def close(self) -> None:
        self.learner.close()


def layers_sum(paths: Mapping[str, tuple[int, int]]) -> str:
    """Return the SHA-256 of the names and shapes of layers."""
    return hashlib.sha256(repr(sorted(paths.items())).encode()).hexdigest()


def _some(model: Any, row: TrainingRow) -> TrainingRow:
    """Return `row` with so many layers, evenly from the first to the last, that their factors have about VALUES."""
    paths = sorted(lora_step.paths(model, row).items())
    share = VALUES / sum(RANK * (outputs + inputs) for _, (outputs, inputs) in paths)
    if share >= 1:
        return row
    count = max(2, int(share * len(paths)))
    names = {paths[round(i * (len(paths) - 1) / (count - 1))][0] for i in range(count)}
    return replace(row, layers=re.compile("|".join(map(re.escape, sorted(names)))))


# Recording


def record(pipe: Pipeline, asked: Mapping[str, Any]) -> Passport:
    """Train for some steps, and record them. asked: prompt, width, height, steps, seed, and LoRAs that are loaded
    meanwhile. Raises QwenimgError."""
    if not 1 <= asked["steps"] <= MAX_STEPS:
        raise UsageError(f"--steps {asked['steps']}: a training is recorded for 1 to {MAX_STEPS} steps")
    pipe.adapt(asked.get("lora", ()))
    prompt = str(asked["prompt"])
    wanted = _Asked(
        prompts=(prompt, f"{prompt}, twice"),
        size=(asked["width"], asked["height"]),
        seed=asked["seed"],
        weight=1.0,
        steps=asked["steps"],
    )
    wanted = replace(wanted, weight=_weight(pipe, wanted))
    run = _Run(pipe, wanted)
    try:
        judged, notes = run.made()
    finally:
        run.close()
    training = RecordedTraining(
        prompts=wanted.prompts,
        width=wanted.size[0],
        height=wanted.size[1],
        seed=wanted.seed,
        weight=wanted.weight,
        layers=run.layers,
        judged=judged,
        steps=tuple(RecordedStep(**note) for note in notes),
    )
    return Passport(
        version=__version__,
        created=datetime.now(UTC).replace(microsecond=0).isoformat(),
        model=recorded_model(pipe, asked),
        precision=pipe.precision.name,
        places={},
        picture=None,
        blocks=(),
        sides=(side(pipe.engine, pipe.tf32),),
        training=training,
    )


def _weight(pipe: Pipeline, asked: _Asked) -> float:
    """Return the weight of a loss, a power of two, by which the gradient is about LENGTH long."""
    run = _Run(pipe, replace(asked, steps=1))
    try:
        _, [note] = run.made()
    finally:
        run.close()
    return float(2.0 ** round(math.log2(LENGTH / note["length"])))


# Checking


def check(passport: Passport, pipe: Pipeline, loras: Sequence[Lora] = ()) -> list[Compared]:
    """Repeat the recorded training, and return every figure. Raises ModelError for a model that it does not fit."""
    recorded = passport.training
    assert recorded is not None
    asked = _Asked(
        prompts=recorded.prompts,
        size=(recorded.width, recorded.height),
        seed=recorded.seed,
        weight=recorded.weight,
        steps=len(recorded.steps),
    )
    pipe.adapt(loras)
    try:
        run = _Run(pipe, asked, recorded.steps)
    except UsageError as error:
        raise ModelError(f"the passport's training is none for {clean(pipe.model_name, 60)}: {error}") from None
    try:
        other = run.layers != recorded.layers
        if not other and shapes(run.first) != shapes(recorded.steps[0].factors):
            raise ModelError("the passport's factors do not fit the layers that learn: record it again")
        if other:
            return [Compared(name="the layers that learn", error=1.0, allowed=0.0, what="are others:")]
        judged, notes = run.made()
    finally:
        run.close()
    return list(_compared(recorded, run, judged, notes))


def _compared(
    recorded: RecordedTraining, run: _Run, judged: tuple[float, float], notes: Sequence[Mapping[str, Any]]
) -> Iterator[Compared]:
    loss, before = LOSS[run.dtype], run.first
    yield Compared(name="the loss on fixed noise", error=_ratio(judged[0], recorded.judged[0]), allowed=loss)
    for number, (then, now) in enumerate(zip(recorded.steps, notes, strict=True), 1):
        name = f"step {number}:"
        for what, same in (
            ("the captions", now["captions"] == then.captions),
            ("the noise", now["noises"] == then.noises),
        ):
            yield Compared(name=f"{name} {what}", error=float(not same), allowed=0.0, what="are not the recorded ones:")
        levels = max(map(_ratio, now["sigmas"], then.sigmas), default=math.nan)
        yield Compared(name=f"{name} a noise level", error=levels, allowed=EXACT)
        yield Compared(name=f"{name} the loss", error=_ratio(now["loss"], then.loss), allowed=loss)
        whole, worst, tensor = apart(now["gradients"], then.gradients)
        yield Compared(name=f"{name} the gradient", error=whole, allowed=GRADIENT[run.dtype])
        yield Compared(name=f"{name} the gradient of {clean(tensor, 80)}", error=worst, allowed=WORST[run.dtype])
        yield Compared(
            name=f"{name} the length of the clipped gradient", error=_ratio(now["clipped"], then.clipped), allowed=EXACT
        )
        yield Compared(name=f"{name} the rate", error=_ratio(now["rate"], then.rate), allowed=EXACT)
        moves = (
            {key: one.astype(np.float64) - before[key] for key, one in some.items()}
            for some in (now["factors"], then.factors)
        )
        moved, _, _ = apart(*moves)
        yield Compared(name=f"{name} what the optimizer changes", error=moved, allowed=EXACT)
        before = then.factors
    yield Compared(
        name="the loss on fixed noise after the steps", error=_ratio(judged[1], recorded.judged[1]), allowed=loss
    )


def apart(now: Mapping[str, Any], then: Mapping[str, Any]) -> tuple[float, float, str]:
    """Return the relative difference of all arrays together, and that of the one that differs most, with its name."""
    errors = {name: float(np.linalg.norm(now[name].astype(np.float64) - one)) for name, one in then.items()}
    sizes = {name: float(np.linalg.norm(one.astype(np.float64))) for name, one in then.items()}
    ratios = {
        name: errors[name] / size if size else (math.inf if errors[name] else 0.0) for name, size in sizes.items()
    }
    worst = max(ratios, key=lambda name: math.inf if ratios[name] != ratios[name] else ratios[name])
    length = math.hypot(*sizes.values())
    return math.hypot(*errors.values()) / length if length else math.inf, ratios[worst], worst


def _ratio(now: float, then: float) -> float:
    return abs(now / then - 1) if then else math.inf


# Text


def headline(passport: Passport) -> str:
    """Return a line about the recorded training."""
    training, first = passport.training, passport.sides[0]
    assert training is not None
    count = sum(one.size for one in training.steps[0].factors.values())
    return (
        f"{clean(passport.model.name, 60)} in {clean(passport.precision, 40)}: "
        f"{counted(len(training.steps), 'step')} of training of {count:,} values, "
        f"recorded on {clean(first.device, 60)}, {clean(passport.created, 30)}"
    )


def lines(compared: Sequence[Compared]) -> list[str]:
    """Return the largest error of each kind of figure, and the failures."""
    kinds: dict[str, Compared] = {}
    for one in compared:
        kind = one.name.partition(": ")[2] or one.name
        kind = "the gradient of one factor" if kind.startswith("the gradient of") else kind
        if kind not in kinds or not one.error <= kinds[kind].error:
            kinds[kind] = one
    rows = [f"{kind}: {one.error:.1e} of {one.allowed:.1e}" for kind, one in kinds.items()]
    return [*rows, *(f"falls short: {one.failure}" for one in compared if one.failure)]


def verdict(compared: Sequence[Compared]) -> str:
    """Return why the check failed, in a line; "" if it passed."""
    failed = [one.failure for one in compared if one.failure]
    return f"the training: {failed[0]}" if failed else ""
