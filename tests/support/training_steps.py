"""Training steps of the tiny folders: the same examples, noise, levels and factors on every backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.runtime.factor_names import UP
from qwenimg.common.training import lora_step
from qwenimg.common.training.example import Example
from qwenimg.common.training.levels import level
from qwenimg.common.training.lora_step import Draw, LoraStep

RANK = 4
SIZES = ((64, 48), (48, 64))
PROMPTS = ("a red circle", "two green hexagons in a row")
PLACES = (0.3, 0.8)  # of the levels
SEEN = np.random.default_rng(4).integers(0, 256, (40, 32, 3), np.uint8)

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Opened:
    """A model that learns."""

    pipe: Any
    step: LoraStep
    draws: list[Draw]
    factors: Arrays

    def gradients(self) -> tuple[float, Arrays]:
        loss, found = self.step.gradients(self.draws)
        return loss, {name: self.pipe.model.engine.numpy(one) for name, one in found.items()}


def row_of(pipe: Any) -> TrainingRow:
    row = next(family.training for family in registry.FAMILIES if family.name == pipe.family)
    assert row is not None
    return row


@contextmanager
def opened(
    folder: Path | str, backend: str, *, recompute: bool = False, texts: bool = False, **options: Any
) -> Iterator[Opened]:
    """Open the model of a folder with adapters whose factors are not zero, and two examples: one with a mask. texts:
    its text encoders learn too."""
    with qwenimg.load(folder, backend=backend, **({"precision": "fp32"} | options)) as pipe:
        model = pipe.model
        generator = np.random.default_rng(5)
        row = row_of(pipe)
        layers = lora_step.paths(model, row) | (lora_step.text_paths(model, row) if texts else {})
        factors = lora_step.first_factors(layers, RANK, seed=1)
        for name in factors:
            if name.endswith(UP):
                factors[name] = (generator.standard_normal(factors[name].shape) * 0.05).astype(np.float32)
        component = model.checkpoint[lora_step.denoiser_name(model)]
        adapters = model.engine.adapters(factors, component.compiled if recompute else None)
        step = LoraStep(model, row, adapters)
        yield Opened(pipe, step, list(_draws(pipe, model, generator)), factors)


def _draws(pipe: Any, model: DiffusionModel, generator: np.random.Generator) -> Iterator[Draw]:
    for i, ((width, height), prompt) in enumerate(zip(SIZES, PROMPTS, strict=True)):
        images = {"image": SEEN if i else SEEN.transpose(1, 0, 2).copy()} if model.inputs.fewest else {}
        width, height = (-(-side // model.multiple) * model.multiple for side in (width, height))
        size = {} if images and pipe.family == "longcat" else {"width": width, "height": height}  # it has the picture's
        request = pipe.check(prompt, **size, **images)
        shape = (1, model.channels, *model.vae.sides(request.height, request.width))
        latents, noise = (generator.standard_normal(shape).astype(np.float32) for _ in range(2))
        mask = None if i else generator.uniform(0, 1, (1, 1, *shape[2:])).astype(np.float32)
        references = tuple(model.vae.latents(values, None) for values in model.inputs.seen(request)) if images else ()
        example = Example(latents=latents, request=request, mask=mask, references=references, weight=1.0 - 0.5 * i)
        yield Draw(example=example, noise=noise, sigma=level(model, request, PLACES[i]))


def apart(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> tuple[float, float, str]:
    """Return the relative difference (L2) of all gradients together, and that of the worst tensor, with its name."""
    assert found.keys() == expected.keys()
    wide = {name: one.astype(np.float64).reshape(expected[name].shape) for name, one in found.items()}
    errors = {name: float(np.linalg.norm(wide[name] - expected[name])) for name in wide}
    sizes = {name: float(np.linalg.norm(expected[name])) for name in wide}
    for name, size in sizes.items():
        assert size or not errors[name], f"{name} has a gradient, and should have none"
    whole = sum(e * e for e in errors.values()) ** 0.5 / sum(s * s for s in sizes.values()) ** 0.5
    worst = max((errors[name] / sizes[name], name) for name in wide if sizes[name])
    return whole, *worst
