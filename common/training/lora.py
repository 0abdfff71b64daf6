"""A run that trains a LoRA on pictures, on either backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import NumericsError, UsageError
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.precision.precision import DenoiserKind, Precision, parse, short
from qwenimg.common.runtime.engine import Array, Engine
from qwenimg.common.runtime.factor_names import UP
from qwenimg.common.training import config as training
from qwenimg.common.training import files, levels, lora_step
from qwenimg.common.training.config import LoraConfig, TrainingPhase
from qwenimg.common.training.example import Example, Pictures
from qwenimg.common.training.loop import ADVICE, Done, Loop
from qwenimg.common.training.lora_step import Draw, LoraStep
from qwenimg.common.training.optimizer import OPTIMIZERS, Arrays

AHEAD = 64  # draws whose noise levels are prepared at once
TRIED = 20  # steps after which up factors that are all zero mean that nothing is learnt
_ORDER, _NOISE, _FIXED = 1, 2, 3  # kinds of random numbers


class LoraRun:
    """The training of one LoRA: its steps, its losses, and its factors."""

    def __init__(
        self,
        config: LoraConfig,
        model: DiffusionModel,
        row: TrainingRow,
        pictures: Pictures,
        known: Pictures | None,
        tell: Callable[[str], None],
    ):
        """Start, or go on. known: pictures of what the model must not forget, half of each step. Raises UsageError and
        ModelError."""
        if reason := row.refusal(model.checkpoint):
            raise UsageError(f"no LoRA is trained on this model: it {reason}")
        if config.text_encoder and row.text_layers is None:
            raise UsageError("the text encoder of this model is not trained; leave out --train-text-encoder")
        precision = config.precision
        if precision == "auto":
            precision, reason = recommend(model.engine, model.runtime.precision.kind)
            tell(f"precision auto: {precision}, since {reason}")
        phases = training.plan_phases(precision, config.steps, config.shares)
        check_precision(model, precision, phases)  # before anything is written
        files.prepare(config, ())
        tell(f"phases: {training.describe_phases(phases)}")
        self.learner = LoraLearner(config, model, row, pictures, known)
        self.loop = Loop(
            config,
            self.learner,
            OPTIMIZERS[config.optimizer](self.learner.parameters),
            phases,
            lambda step: training.lora_rate(step, config.steps, config.rate),
            tell,
            save_every=config.save_every,
            check=self._check,
        )

    def steps(self) -> Iterator[Done]:
        """Make the steps that are left, as `Loop.steps`."""
        return self.loop.steps()

    def fixed_loss(self, examples: Sequence[Example]) -> float:
        """Return the mean loss of `examples` on noise that is the same each time, at `levels.EVALUATED` levels evenly
        over the distribution of those that are trained; in the dtype of the present step. Raises NumericsError for one
        that is not finite."""
        dtype = self.loop.dtype(min(self.loop.step, self.loop.config.steps - 1))
        self.learner.compute_in(dtype)
        loss = self.learner.fixed_loss(examples)
        if not math.isfinite(loss):
            raise NumericsError(
                f"step {self.loop.step}: the loss on fixed noise is {loss} in {dtype}; {self.loop.kept()}{ADVICE}"
            )
        return loss

    def factors(self) -> dict[str, NDArray[np.float32]]:
        """Return the factors by the names of `Adapters.parameters`; the scale of their product is 1."""
        return {name: self.learner.numpy(one) for name, one in self.learner.parameters.items()}

    def _check(self, step: int) -> None:
        """Raise NumericsError if nothing was learnt in the first steps."""
        ups = (one for name, one in self.learner.parameters.items() if name.endswith(UP))
        if step == TRIED and not any(float(abs(one).sum().item()) for one in ups):
            raise NumericsError(
                f"step {step}: no layer has learnt anything, all up factors are zero; give a larger rate"
            )

    def close(self) -> None:
        """Let the model compute as without the LoRA."""
        self.learner.close()


class LoraLearner:
    """The factors of a LoRA and their gradients, in the dtype of each phase: a `Learner`."""

    def __init__(
        self,
        config: LoraConfig,
        model: DiffusionModel,
        row: TrainingRow,
        pictures: Pictures,
        known: Pictures | None,
    ):
        self.config, self.model, self.pictures, self.known = config, model, pictures, known
        self.before = model.runtime.precision
        self.name = lora_step.denoiser_name(model)
        layers = lora_step.paths(model, row) | (lora_step.text_paths(model, row) if config.text_encoder else {})
        factors = lora_step.first_factors(layers, config.rank, config.seed)
        recomputed = model.checkpoint[self.name].compiled if config.checkpointing else None
        self.adapters = model.engine.adapters(factors, recomputed)
        self.training = LoraStep(model, row, self.adapters)
        self._order: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._coming: dict[int, list[Draw]] = {}  # the draws of the next steps

    # As `Learner`

    @property
    def parameters(self) -> Arrays:
        return self.adapters.parameters

    def put(self, parameters: Arrays) -> None:
        self.adapters.put(parameters)

    def gradients(self, step: int, dtype: str, scale: float) -> tuple[float, Arrays]:
        self.compute_in(dtype)
        return self.training.gradients(self.expected(step), scale)

    def evaluated(self, arrays: Arrays) -> Arrays:
        return self.adapters.evaluated(arrays)

    def array(self, values: NDArray[np.float32]) -> Array:
        return self.model.engine.array(values)

    def numpy(self, array: Array) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.model.engine.numpy(array)
        return values

    # Precision

    def compute_in(self, dtype: str) -> None:
        """Open the denoiser again if it computes in another dtype than `dtype`; other parts stay as they are."""
        runtime = self.model.runtime
        if runtime.precision.compute_dtype(self.name) != dtype:
            self.reopen(with_denoiser(self.model, dtype, texts=self.config.text_encoder))

    def reopen(self, precision: Precision) -> None:
        """Free the networks that learn; they are opened again when they are needed, under `precision`."""
        self.adapters.detach()
        for name in self.training.parts.values():
            self.model.residents.drop(name)
        self.model.runtime.precision = precision
        if (modulations := getattr(self.model, "modulations", None)) is not None:
            modulations.clear()

    def close(self) -> None:
        self.training.close()
        self.reopen(self.before)

    # What is drawn

    def draws(self, step: int) -> list[Draw]:
        """Return the examples of a step, each with noise and level."""
        sources = self._sources(step)
        return [self._draw(step, place, source, index) for place, (source, index) in enumerate(sources)]

    def _sources(self, step: int) -> list[tuple[Pictures, int]]:
        """Return where each example of a step comes from: pictures in an order that is new each time round, and, where
        there are known ones, these in every second place."""
        batch, known = self.config.batch, self.known
        share = batch if known is None else batch - batch // 2
        first = [(self.pictures, self._index(0, len(self.pictures), step * share + i)) for i in range(share)]
        if known is None:
            return first
        rest = batch - share
        return first + [(known, self._index(1, len(known), step * rest + i)) for i in range(rest)]

    def _index(self, kind: int, count: int, number: int) -> int:
        """Return the picture that is `number` in the run's order, of `count`."""
        key = kind, number // count
        if key not in self._order:
            self._order = {one: order for one, order in self._order.items() if one[0] != kind}
            self._order[key] = np.random.default_rng([self.config.seed, _ORDER, *key]).permutation(count)
        return int(self._order[key][number % count])

    def _generator(self, step: int, place: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, _NOISE, step, place])

    def _draw(self, step: int, place: int, source: Pictures, index: int) -> Draw:
        generator = self._generator(step, place)
        at = generator.random()
        noise_of = np.random.default_rng(generator.integers(0, 2**63))  # however many numbers the example takes
        return self._at(source.example(index, generator), at, noise_of)

    def _at(self, example: Example, at: float, generator: np.random.Generator) -> Draw:
        check_example(example)
        noise = generator.standard_normal(example.latents.shape, np.float32)
        return Draw(example=example, noise=noise, sigma=levels.level(self.model, example.request, at))

    def expected(self, step: int) -> list[Draw]:
        """Return the draws of a step. The levels of several steps are prepared together, the same ones in a resumed
        run: the bits of a product's rows may depend on how many there are."""
        if step not in self._coming:
            count = max(1, AHEAD // self.config.batch)
            first = step // count * count
            self._coming = {one: self.draws(one) for one in range(first, first + count)}
            self.training.expect(draw.sigma for draws in self._coming.values() for draw in draws)
        return self._coming[step]

    def fixed_loss(self, examples: Sequence[Example]) -> float:
        draws = []
        for number, example in enumerate(examples):
            generator = np.random.default_rng([self.config.seed, _FIXED, number])
            for i in range(levels.EVALUATED):
                draws.append(self._at(example, (i + 0.5) / levels.EVALUATED, generator))
        self._coming = {}
        self.training.expect(draw.sigma for draw in draws)
        return self.training.loss(draws)


def check_example(example: Example) -> None:
    """Raise NumericsError for latents or a mask with values that are not finite."""
    named: Mapping[str, Any] = {"latents": example.latents, "mask": example.mask}
    for what, values in named.items():
        if values is not None and not np.isfinite(values).all():
            raise NumericsError(
                f"the {what} of the picture with caption {example.request.prompt[:60]!r} are not finite"
            )


def with_denoiser(model: DiffusionModel, dtype: str, *, texts: bool = False) -> Precision:
    """Return the policy of the model's run with the denoiser in `dtype`, as the policy of that name has it; with
    `texts` the text encoders too. Raises UsageError for a dtype that it does not compute in."""
    now = model.runtime.precision
    policy = parse(short(dtype), on_gpu=model.engine.on_gpu, kind=now.kind)
    return replace(policy, text=policy.text if texts else now.text, vae=now.vae, name=f"{policy.name} while training")


def check_precision(model: DiffusionModel, precision: str, phases: Sequence[TrainingPhase]) -> None:
    """Raise UsageError for phases in a dtype that the model does not compute in, and for float16 with a model whose
    activations exceed it, unless --phases names it. precision: as it was asked for."""
    if precision == "fp16" and model.runtime.precision.kind.scales:
        raise UsageError(
            "--precision fp16: activations of this kind of model exceed float16, which ends at 65504, and their "
            "gradients may; use bf16 or fp32. To try it all the same: --phases full=100:fp16"
        )
    for phase in phases:
        with_denoiser(model, phase.dtype)


def recommend(engine: Engine, kind: DenoiserKind) -> tuple[str, str]:
    """Return the value of `--precision auto` for this kind of model on this device, and why."""
    units = engine.facts.units
    if not engine.on_gpu:
        unknown = ", by which no training was measured" if "bfloat16" in units else ""
        return "fp32", f"{engine.facts.name} {engine.facts.about}{unknown}"
    if "bfloat16" in units:
        return "bf16", f"{engine.facts.name} multiplies in bf16, which needs no loss scaling"
    if kind.scales or "float16" in kind.refused:
        return "fp32", f"{engine.facts.name} {engine.facts.about}, and this kind of model exceeds fp16"
    return "fp16", f"{engine.facts.name} {engine.facts.about}; fp16 with a dynamic loss scale"
