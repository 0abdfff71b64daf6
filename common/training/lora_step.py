"""One step of training: the loss of a model on its examples, and the gradients of the LoRA's factors.

The denoiser's inputs, its noise levels and the meaning of its prediction come from the code that draws: an example is
prepared as an image whose steps are the levels that are learnt, and the prediction that would give back its latents is
what the loss compares with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import DoesNotFit
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.models.pooled_flow_model import PooledFlowModel
from qwenimg.common.pipeline.steps.denoiser import Denoiser
from qwenimg.common.pipeline.steps.inpaint import Initial, Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment
from qwenimg.common.request.request import Request
from qwenimg.common.runtime import factor_names
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.engine import Adapters, Array
from qwenimg.common.runtime.factor_names import DOWN, UP
from qwenimg.common.sampling.discrete import DiffusionConfig
from qwenimg.common.sampling.types import DenoiseFunction, Noise, Schedule, States
from qwenimg.common.sampling.wuerstchen import CosineConfig
from qwenimg.common.training.example import Example
from qwenimg.common.training.levels import weight
from qwenimg.common.weights import streaming

DENOISERS = ("transformer", "unet")


@dataclass(frozen=True, kw_only=True, eq=False)
class Draw:
    """An example at one noise level, with its noise."""

    example: Example
    noise: Latents  # [1, C, h, w]
    sigma: float


def paths(model: DiffusionModel, row: TrainingRow) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of the denoiser's layers that learn, by their paths."""
    return _learning(model.checkpoint[denoiser_name(model)], row.layers)


def text_paths(model: DiffusionModel, row: TrainingRow) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of the text encoders' layers that can learn, by their names in `factor_names`."""
    if row.text_layers is None:
        return {}
    parts = {part: _learning(component, row.text_layers) for part, component in model.checkpoint.texts.items()}
    return {factor_names.joined(part, path): shape for part, found in parts.items() for path, shape in found.items()}


def _learning(component: Component, layers: re.Pattern[str]) -> dict[str, tuple[int, int]]:
    shapes = component.plan.shapes.items()
    named = ((key.removesuffix(".weight"), shape) for key, shape in shapes if key.endswith(".weight"))
    return {path: (shape[0], shape[1]) for path, shape in named if len(shape) == 2 and layers.fullmatch(path)}


def denoiser_name(model: DiffusionModel) -> str:
    """Return the folder of the model's denoiser."""
    return next(name for name in DENOISERS if name in model.checkpoint.components)


def first_factors(layers: dict[str, tuple[int, int]], rank: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """Return the factors at the start, by the names of `Adapters.parameters`: up is zero, so that nothing changes, and
    down is uniform within 1 / sqrt(inputs) (E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models")."""
    generator, factors = np.random.default_rng([seed, 0]), dict[str, NDArray[np.float32]]()
    for path, (outputs, inputs) in sorted(layers.items()):
        bound = 1.0 / sqrt(inputs)
        factors[path + DOWN] = generator.uniform(-bound, bound, (rank, inputs)).astype(np.float32)
        factors[path + UP] = np.zeros((outputs, rank), np.float32)
    return factors


class LoraStep:
    """The losses and gradients of a model with adapters. Levels that come soon are prepared at once, since a model may
    make all that depends on the level from weights that are loaded for that alone."""

    def __init__(self, model: DiffusionModel, row: TrainingRow, adapters: Adapters):
        self.model, self.row, self.adapters, self.engine = model, row, adapters, model.engine
        self._levels: tuple[float, ...] = ()
        parts = dict.fromkeys(factor_names.split(layer)[0] for layer in factor_names.layers(adapters.parameters))
        self.parts = {part: part or denoiser_name(model) for part in parts}
        """The folder of each part that learns."""
        self._attach()
        model.runtime.observers.append(self._opened)

    @property
    def learns_texts(self) -> bool:
        return any(self.parts)

    def _attach(self) -> None:
        """Give the networks in memory their factors."""
        for part, name in self.parts.items():
            if name in self.model.residents.opened:
                self.adapters.attach(self.model.residents.network(name), part)

    def _opened(self, component: Component, opened: Any) -> Any:
        """Give a network that is opened, also while pictures are drawn, its factors."""
        for part, name in self.parts.items():
            if component.config is self.model.checkpoint[name].config:
                if streaming.streamed_blocks(component.plan):
                    what = "a text encoder" if part else "a denoiser"
                    raise DoesNotFit(
                        f"{what} whose blocks are streamed is not trained; give more memory, or fewer bits"
                    )
                self.adapters.attach(opened, part)
        return opened

    def close(self) -> None:
        """Let the model compute as without the factors."""
        self.adapters.detach()
        if self.learns_texts:
            self.model.forget()
        self.model.runtime.observers.remove(self._opened)

    def expect(self, sigmas: Iterable[float]) -> None:
        """Name the noise levels of the coming steps. A modulation that depends on the prompt too is made for each draw
        alone: rows for all levels and all prompts would take too much memory."""
        alone = isinstance(self.model, PooledFlowModel)
        self._levels = () if alone else tuple(sorted(set(sigmas), reverse=True))

    def gradients(self, draws: Sequence[Draw], scale: float = 1.0) -> tuple[float, dict[str, Array]]:
        """Return the mean loss of `draws`, and `scale` times its gradients."""
        total, gradients = 0.0, dict[str, Array]()
        for draw in draws:
            with self._loss(draw) as loss:
                value, found = self.adapters.gradients(loss, scale / len(draws))
            total += value / len(draws)
            gradients = {name: gradients[name] + one if gradients else one for name, one in found.items()}
        return total, self.adapters.evaluated(gradients)

    def loss(self, draws: Sequence[Draw]) -> float:
        """Return the mean loss of `draws`, computed without gradients."""
        total = 0.0
        for draw in draws:
            with self._loss(draw) as loss:
                total += self.adapters.value(loss) / len(draws)
        return total

    @contextmanager
    def _loss(self, draw: Draw) -> Iterator[Callable[[], Array]]:
        """Prepare `draw`, and give the function of its loss: the mean square of what the prediction differs from the
        one that gives the example's latents, by the weights of level, mask and example."""
        model, example, sigma = self.model, draw.example, draw.sigma
        request = self.request(example.request)
        segment = self.segment(sigma)
        plan = SamplingPlan(sampler="euler", schedule="model", segments=(segment,))
        shape = LatentShape(1, *example.latents.shape[2:])
        initial = Initial(noise=draw.noise, references=example.references)
        alpha = segment.schedule.alpha(sigma)
        noised = (example.latents.astype(np.float64) * alpha + draw.noise.astype(np.float64) * sigma).astype(np.float32)
        texts = model.learning_texts() if self.learns_texts else nullcontext()
        with self.adapters.learning(), texts, model.prepare(request, plan, shape) as run:
            if denoiser_name(model) not in model.residents.opened:
                run.denoiser(segment, initial)
            self._attach()  # pictures are drawn by text encoders that are opened for them
            shares = np.ones_like(noised) if example.mask is None else np.broadcast_to(example.mask, noised.shape)
            weights = run.array(np.ascontiguousarray(shares * np.float32(weight(model, sigma) * example.weight)))
            x = run.array(noised)

            def loss() -> Array:
                denoiser = run.denoiser(segment, initial)  # makes the inputs too: some of them depend on factors
                [prediction] = denoiser.predictions(x, sigma)
                difference = prediction - run.array(sought(denoiser, noised, example.latents, sigma))
                return (weights * difference * difference).mean()

            yield loss

    def request(self, request: Request) -> Request:
        """Return `request` for one branch: that of its prompt."""
        return replace(request, guidance=self.row.guidance, true_cfg=1.0, sampler="", schedule="", cfg_end=1.0)

    def segment(self, sigma: float) -> Segment:
        levels = self._levels if sigma in self._levels else (sigma,)
        flow = not isinstance(self.model.checkpoint.scheduler, DiffusionConfig | CosineConfig)
        return Segment(schedule=Schedule(sigmas=(*levels, 0.0), flow=flow), solver=each_level)


def each_level(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Evaluate the model at each level: a sampler that draws nothing."""
    for sigma in schedule.sigmas[:-1]:
        denoise(x, sigma)
        yield x


def sought(denoiser: Denoiser, x: Latents, latents: Latents, sigma: float) -> Latents:
    """Return the prediction for x at a level by which `latents` are the denoised ones: noise - latents of a flow model,
    the noise, the velocity or the latents of a diffusion model. The denoised latents are linear in x and prediction."""
    of_x, of_prediction = denoiser.denoised(1.0, sigma, 0.0), denoiser.denoised(0.0, sigma, 1.0)
    wide = (latents.astype(np.float64) - of_x * x.astype(np.float64)) / of_prediction
    target: Latents = wide.astype(np.float32)
    return target
