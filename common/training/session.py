"""The training of a LoRA from its pictures to its file: losses on fixed noise, pictures on the way, and the files of a
run. The caller shows what comes, and may stop after any step."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.base.errors import UsageError
from qwenimg.common.families import registry
from qwenimg.common.families.family import Family
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.runtime import factor_names
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.factor_names import DOWN, UP
from qwenimg.common.training import lora_step, run_files
from qwenimg.common.training.config import LoraConfig
from qwenimg.common.training.encoded import EncodedPictures, encode_texts
from qwenimg.common.training.example import Example
from qwenimg.common.training.loop import Done
from qwenimg.common.training.lora import LoraRun
from qwenimg.common.weights.loras import lora_metadata
from qwenimg.common.weights.loras.factors import Factors
from qwenimg.common.weights.loras.lora_metadata import Json
from qwenimg.common.weights.loras.lora_writing import LayerChange, write_lora

JUDGED = 4  # examples of each kind whose loss on fixed noise is computed
RECENT = 30  # steps whose median time is shown
SAMPLE_SEED = 42


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The pictures that are drawn before the first step and after every `every` steps."""

    prompts: tuple[str, ...]
    every: int
    size: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The losses on fixed noise after a step: of pictures that are learnt, and of those that are held out; and the
    picture of each sample prompt."""

    step: int
    learnt: float
    held_out: float | None
    pictures: tuple[Uint8, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Made:
    """A step that was made. `seconds`: of one; `left`: of the rest."""

    done: Done
    seconds: float
    left: float


def training_of(pipe: Pipeline, *, texts: bool = False) -> tuple[Family, TrainingRow]:
    """Return the family of a model, and how it is trained. Raises UsageError for one that is not, or with `texts` for
    one whose text encoder is not."""
    family = next(one for one in registry.FAMILIES if one.name == pipe.family)
    checkpoint = pipe.model.checkpoint
    reason = "it is not trained yet" if family.training is None else family.training.refusal(checkpoint)
    if family.training is None or reason:
        raise UsageError(f"a LoRA for {family.title}: {reason}")
    if texts and family.training.text_layers is None:
        able = registry.titles(lambda one: one.training is not None and one.training.text_layers is not None)
        raise UsageError(
            f"--train-text-encoder: that of {family.title} is not trained; leave it out (it is for {able})"
        )
    return family, family.training


def base_hashes(pipe: Pipeline, *, texts: bool = False) -> dict[str, str]:
    """Return the fingerprint of the denoiser's files, and of the text encoders' if they learn."""
    model = pipe.model
    hashes = {"base_sha256": fingerprint(model.checkpoint[lora_step.denoiser_name(model)].plan.files)}
    parts = model.checkpoint.texts if texts else {}
    return hashes | {f"{name}_sha256": fingerprint(part.plan.files) for name, part in parts.items()}


def free_others(model: DiffusionModel, learning: Collection[str]) -> None:
    """Free all networks but those that learn, since a step's memory is planned for these alone."""
    for name in [one for one in model.residents.opened if one not in learning]:
        model.residents.drop(name)


class LoraSession:
    """One run. `steps` makes it, `write` writes the LoRA."""

    def __init__(
        self,
        pipe: Pipeline,
        config: LoraConfig,
        learnt: EncodedPictures,
        known: EncodedPictures | None,
        held_out: EncodedPictures | None,
        samples: Samples,
        tell: Callable[[str], None],
        loras: Sequence[Lora] = (),
    ):
        """Start, or go on. loras: those that are loaded while the factors learn, and stay out of pictures and file."""
        self.loras = loras
        self.pipe, self.config, self.samples, self.tell = pipe, config, samples, tell
        self.family, row = training_of(pipe)
        self.run = LoraRun(config, pipe.model, row, learnt, known, tell)
        self.files = run_files.RunFiles(config.stem.parent)
        self.files.resume(self.run.loop.step)
        self._learnt = self._judged(learnt)
        self._held_out = [] if held_out is None else self._judged(held_out)
        self._times = deque[float](maxlen=RECENT)
        pipe.model.runtime.observers.append(self._opened)
        self._load(loras)
        if config.text_encoder:
            pipe.model.runtime.prompts = None  # text states change with each step
        else:
            requests = [one for some in (learnt, known, held_out) if some is not None for one in some.requests]
            encode_texts(pipe.model, requests, self.run.learner.training.request)
        free_others(pipe.model, self.run.learner.training.parts.values())

    @staticmethod
    def _judged(pictures: EncodedPictures) -> list[Example]:
        whole = pictures.whole
        return whole[:: max(1, len(whole) // JUDGED)][:JUDGED]

    @property
    def step(self) -> int:
        return self.run.loop.step

    def steps(self) -> Iterator[Made | Judged]:
        """Make the steps that are left. Losses on fixed noise and pictures come before the first step, every so many
        steps, and at the end. Raises NumericsError and DoesNotFit; the last checkpoint stays."""
        if self.step == 0:
            yield self._look()
        begun = time.perf_counter()
        for done in self.run.steps():
            self._times.append(time.perf_counter() - begun)
            seconds = statistics.median(self._times)
            self.files.add_step(done, self._times[-1], self.config.batch)
            if done.step % self.config.save_every == 0:
                self.files.write_steps()
            yield Made(done=done, seconds=seconds, left=seconds * (self.config.steps - done.step))
            if done.step % self.samples.every == 0 or done.step == self.config.steps:
                yield self._look()
            begun = time.perf_counter()

    def save(self) -> None:
        """Write the checkpoint of the present step, and the table."""
        self.run.loop.save()
        self.files.write_steps()

    def _look(self) -> Judged:
        """Return the losses on fixed noise, and draw the pictures of this step."""
        learnt = self.run.fixed_loss(self._learnt)
        held_out = self.run.fixed_loss(self._held_out) if self._held_out else None
        self.files.add_judged(self.step, learnt, held_out)
        self._load(())
        if self.config.text_encoder:
            self.pipe.model.forget()
        pictures = list[Uint8]()
        for number, prompt in enumerate(self.samples.prompts):
            pictures.append(self.draw(prompt, SAMPLE_SEED + number))
            self.files.put_picture(self.step, number, pictures[-1])
        free_others(self.pipe.model, self.run.learner.training.parts.values())
        self._load(self.loras)
        self.files.write_page(self.config, self.samples.prompts)
        return Judged(step=self.step, learnt=learnt, held_out=held_out, pictures=tuple(pictures))

    def _load(self, loras: Sequence[Lora]) -> None:
        """Replace the LoRAs that the denoiser has beside the factors."""
        if self.loras:
            self.run.learner.reopen(self.pipe.model.runtime.precision)
            self.pipe.adapt(loras)

    def draw(self, prompt: str, seed: int) -> Uint8:
        """Return the picture of `prompt` with the LoRA as it is now."""
        width, height = self.samples.size
        pixels: Uint8 = self.pipe(prompt, width=width, height=height, seed=seed).pixels
        return pixels

    def _opened(self, component: Component, opened: Any) -> Any:
        """Put the factors beside a denoiser that was opened again, to draw."""
        if component is self.pipe.model.checkpoint.components.get(self.run.learner.name):
            self.run.learner.adapters.attach(opened)
            zero = self.pipe.engine.array(np.zeros((), np.float32))
            self.run.learner.adapters.value(lambda: zero)
        return opened

    # The file

    def write(self, path: Path, *, dtype: str, word: str, captions: Sequence[str], overwrite: bool) -> None:
        """Write the LoRA; dtype: as headers name it. captions: those that its owner wants in it. Raises
        QwenimgError."""
        factors, model = self.run.factors(), self.pipe.model
        names, layer = self.family.lora_names(model.checkpoint), self.family.lora_layer_names(model.checkpoint)
        layers = []
        for name in factor_names.layers(factors):
            part, within = factor_names.split(name)
            component, parameter = part or self.run.learner.name, f"{within}.weight"
            made = Factors(down=factors[name + DOWN], up=factors[name + UP])
            layers.append(
                LayerChange(
                    component=component,
                    parameter=parameter,
                    layer=layer(component, parameter),
                    weight=model.checkpoint[component].plan.shapes[parameter],
                    rank=self.config.rank,
                    factors=lambda made=made: made,  # type: ignore[misc]
                )
            )
        run: dict[str, Json] = {
            "made": "training",
            "base": self.pipe.model_name,
            "steps": self.step,
            "rank": self.config.rank,
            "rate": self.config.rate,
            "batch": self.config.batch,
            "optimizer": self.config.optimizer,
            "precision": self.config.precision,
            "seed": self.config.seed,
            **dict(self.config.facts),
        }
        metadata = lora_metadata.made(
            self.family.base_of_loras(model.checkpoint),
            title=path.stem,
            rank=self.config.rank,
            run=run | ({"captions": list(captions)} if captions else {}),
            trigger=word,
            resolution=self.samples.size,
        )
        write_lora(path, layers, [], metadata, names, dtype=dtype, overwrite=overwrite)

    def close(self) -> None:
        self._load(())
        self.pipe.model.runtime.observers.remove(self._opened)
        self.run.close()
