"""The memory and the time of a run, counted before anything is loaded, and what is changed so that it fits.

Memory is the base's weights, the adapter in float32 (weights, gradients and the optimizer's state) with its copy in the
dtype of products, what the blocks keep for the gradients (`kept.py`), and the arrays of the way back. With
checkpointing each block keeps its input, and one block at a time the rest."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from qwenimg.common.base.amounts import duration, size_text
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.memory.memory_plan import MemoryPlan
from qwenimg.common.networks.denoisers.cascade_unet import CascadeConfig
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.pipeline.fit import seconds
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.models.flow_model import FlowModel
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.prompts.weighted import LENGTH
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.rates import SMALL
from qwenimg.common.training import kept, lora_step
from qwenimg.common.training.optimizer import OPTIMIZERS

TEXT_VALUES = 1.15 * 4  # bytes of a text encoder for a value of a linear layer: norms too, in float32
SIDES = (1024, 768, 512, 384, 256, 128)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The bytes of a run by their purpose, and the seconds of a step as estimated (None: unknown)."""

    parts: Mapping[str, int]
    side: int
    checkpointing: bool
    bits: str | None
    budget: int
    step: float | None
    reduced: bool = False  # whether the side is smaller than was asked for

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.budget

    @property
    def label(self) -> str:
        """The choices that decide the memory."""
        kept = "checkpointing" if self.checkpointing else "no checkpointing"
        return f"{self.side} pixels, {kept}, {f'base in {self.bits} bits' if self.bits else 'base not quantized'}"

    def lines(self, steps: int) -> list[str]:
        """Return the table of the plan."""
        rows = [f"  {title}: {size_text(count)}" for title, count in self.parts.items() if count]
        total = f"memory: {size_text(self.peak)} at the peak, of {size_text(self.budget)} that it may take"
        time = (
            "unknown before the first steps"
            if self.step is None
            else f"{duration(steps * self.step)} for {steps} steps"
        )
        return [f"{total} ({self.label})", *rows, f"time: {time}"]


def plan(
    pipe: Pipeline,
    row: TrainingRow,
    *,
    side: int,
    rank: int,
    batch: int,
    checkpointing: bool,
    dtype: str,
    bits: str | None,
    optimizer: str = "adamw",
    texts: bool = False,
    caption: str | None = None,
) -> TrainingPlan:
    """Return the plan of a run. dtype: of the dearest phase's products; texts: the text encoders learn too; caption:
    the longest one, or None for one of usual length."""
    model = pipe.model
    component, width = model.checkpoint[lora_step.denoiser_name(model)], BYTES[dtype]
    request = replace(pipe.check("a picture", width=side, height=side, **_picture(model)), prompt=caption or "")
    total = _counted(model, row, request, rank, width, bits is not None, counted=caption is not None)
    inputs, blocks = total.peak(checkpointing)
    text_widths = sum(map(sum, (lora_step.text_paths(model, row) if texts else {}).values()))
    encoders = model.checkpoint.texts.values() if texts else ()
    parameters = rank * (sum(map(sum, lora_step.paths(model, row).values())) + text_widths)
    copies = width if width < kept.WIDE else 0
    parts = {
        "weights of the base": model.runtime.weight_bytes(component),
        "weights of the text encoders": sum(map(model.runtime.weight_bytes, encoders)),
        "the text encoders' values, kept for the gradients": int(TEXT_VALUES * LENGTH * text_widths),
        f"adapter, its gradients and the moments of {optimizer}": int(
            (OPTIMIZERS[optimizer].bytes + copies) * parameters
        ),
        "inputs of the blocks, kept for the gradients": int(inputs),
        "one block's own values" if checkpointing else "the blocks' values, kept for the gradients": int(blocks),
        "working set of a step": model.runtime.call_bytes(component, int(max(total.arrays))),
    }
    return TrainingPlan(
        parts=parts,
        side=side,
        checkpointing=checkpointing,
        bits=bits,
        budget=model.runtime.budget(0),
        step=_seconds(model, request, batch, checkpointing),
    )


def _picture(model: DiffusionModel) -> dict[str, Any]:
    import numpy as np

    return {"image": np.zeros((64, 64, 3), np.uint8)} if model.inputs.fewest else {}


def _counted(
    model: DiffusionModel,
    row: TrainingRow,
    request: Request,
    rank: int,
    width: int,
    quantized: bool,
    *,
    counted: bool,
) -> kept.Total:
    """Return what a step of one picture keeps. counted: count the tokens of the prompt."""
    component = model.checkpoint[lora_step.denoiser_name(model)]
    assert component.compiled is not None
    count = kept.Count(
        layers=lora_step.paths(model, row),
        workspace=model.engine.workspace,
        compiled=component.compiled,
        width=width,
        rank=rank,
        quantized=quantized,
    )
    if isinstance(model, FlowModel):
        texts = model.texts
        with texts.of_usual_length() if isinstance(texts, TemplateTexts) else nullcontext():
            text = model.lengths(request, counted)[0]
        sizes = [(request.width, request.height), *model.inputs.sizes(request)]
        return count.transformer(sum(w * h for w, h in sizes) // model.token**2, text, model.heads)
    rows, columns = model.vae.sides(request.height, request.width)
    if isinstance(component.config, CascadeConfig):
        return count.prior(component.config, rows * columns, component.config.text_tokens(LENGTH))
    shapes = component.plan.shapes.items()
    kernels = {name: shape for name, shape in shapes if len(shape) == 4 and prod(shape[2:]) > 1}
    return count.unet(component.config, kernels, rows * columns)


def _seconds(model: DiffusionModel, request: Request, batch: int, checkpointing: bool) -> float | None:
    """Return the seconds of a step at the rate of this device, if it is known: the gradients by the inputs take as many
    operations as the forward, and with checkpointing that is computed again."""
    component = model.checkpoint[lora_step.denoiser_name(model)]
    shape = LatentShape(1, *model.vae.sides(request.height, request.width))
    stages = model.stages(request, model.plan(request), shape, False)
    forward = sum(stage.operations for stage in stages if stage.component.network == component.network)
    forward /= max(1, request.steps) * max(1, len(model.guidance.branches(request)))
    operations = forward * batch * (3 if checkpointing else 2)
    small = component.plan.parameters < SMALL
    needs = MemoryPlan(budget=0, loaded=0, steps=operations, small_denoiser=small, quantized=component.is_quantized)
    expected = seconds(model, needs)
    return None if expected is None or not operations else expected[0]
