"""Z-Image: text states and the prediction for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. The branches of guidance run in turn, since texts of different length have different positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.z_image import memory
from qwenimg.common.memory.memory import scores
from qwenimg.common.networks.zimage_conditioning import padded, time_row
from qwenimg.common.networks.zimage_dit import PATCH
from qwenimg.common.numbers import packing, sizes
from qwenimg.common.parts import vae
from qwenimg.common.parts.template_texts import TemplateTexts
from qwenimg.common.parts.vae import Shape, VAEHalves
from qwenimg.common.pipeline import inpaint
from qwenimg.common.pipeline.denoiser import Denoiser, phases
from qwenimg.common.pipeline.guidance import Guidance, passes
from qwenimg.common.pipeline.inpaint import Initial, Latents
from qwenimg.common.pipeline.plan import SamplingPlan, Segment, flow_plan
from qwenimg.common.pipeline.step_cache import Pass
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.request.few_steps import FewSteps
from qwenimg.common.request.request import MULTIPLE, Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Engine
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Change, Runtime
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.weights.lora import Deltas
from qwenimg.common.weights.lora_names import Names

TEMPLATE = Template(text="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", dropped=0, limit=512, seen=512)


def _from_conditional(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
    """Apply classifier-free guidance that counts from the prompt's prediction: its scale is one less than the usual."""
    conditional, unconditional = predictions
    return conditional + request.guidance * (conditional - unconditional)


class ZImage:
    """A Z-Image model for `Pipeline`."""

    multiple = MULTIPLE
    guidance = Guidance(formula=_from_conditional, off=0.0)
    options: frozenset[str] = frozenset()
    sees_mask = False
    lora_names: Names = ()

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        self.runtime, self.engine, self.checkpoint = runtime, runtime.engine, checkpoint
        self.schedule_config = checkpoint.scheduler
        self.config, vae_config = checkpoint["transformer"].config, checkpoint["vae"].config
        self.scale, self.channels = vae_config.scale, vae_config.latent_channels
        self.few_steps: Mapping[str, FewSteps] = {}
        self.residents = Residents(runtime)
        self.texts = TemplateTexts(self.residents, checkpoint, TEMPLATE)
        statistics = vae.scaled(vae_config.scaling_factor, vae_config.shift_factor or 0.0)
        self.vae = VAEHalves(self.residents, checkpoint["vae"], vae_config.block_out_channels[0], statistics)

    def plan(self, request: Request) -> SamplingPlan:
        width, height = sizes.render_size(request.width, request.height, MULTIPLE)
        rows, columns = self.config.axes_lens[1:]
        if height > rows * MULTIPLE or width > columns * MULTIPLE:
            raise UsageError(
                f"{request.width}x{request.height} is too large for this model, which knows the positions of "
                f"{columns * MULTIPLE}x{rows * MULTIPLE} pixels; choose a smaller size"
            )
        return flow_plan(self.schedule_config, request, width * height // MULTIPLE**2)

    def warnings(self, request: Request) -> list[str]:
        lines = []
        for name, branch in zip(("prompt", "negative prompt"), self.guidance.branches(request), strict=False):
            if lost := self.texts.fill(branch.prompt).lost:
                lines.append(f"the {name} is cut: the model sees {TEMPLATE.seen} tokens, not the last {lost}")
        return lines

    def stages(self, request: Request, plan: SamplingPlan, shape: Shape, counted: bool = True) -> list[Stage]:
        prompts = [branch.prompt for branch in self.guidance.branches(request)]
        lengths = [len(self.texts.fill(prompt).ids) if counted else TEMPLATE.seen for prompt in prompts]
        return [
            *([] if request.image is None else [self.vae.encoding(shape)]),
            *([] if self.texts.has(prompts) else [self.texts.encoding(max(lengths))]),
            self.steps(request, plan, shape[0] * shape[1] // PATCH**2, lengths),
            self.vae.decoding(shape),
        ]

    def steps(self, request: Request, plan: SamplingPlan, tokens: int, lengths: Sequence[int]) -> Stage:
        """Return the stage of all steps. `tokens`: those of the image; `lengths`: those of each branch's text."""
        branches, counts = self.guidance.branches(request), [padded(tokens) + padded(length) for length in lengths]
        component, longest = self.checkpoint["transformer"], max(counts)
        score_bytes = scores(self.config.n_heads, 1, longest, self.engine.workspace.score_bytes)
        activations = self.runtime.call_bytes(component, memory.step_peak(self.config, longest) + score_bytes)
        operations = (memory.step_operations(self.config, count) for count in counts)
        per_evaluation = sum(branch.share * one for branch, one in zip(branches, operations, strict=True))
        return Stage(
            name="denoise",
            resident="transformer",
            component=component,
            splits=(Split(activations=activations, size=1, passes=plan.evaluations * passes(branches, 1)),),
            operations=plan.evaluations * per_evaluation,
        )

    def variant(self, change: Change) -> ZImage:
        return ZImage(*self.runtime.changed(self.checkpoint, change, self.residents.weights))

    def check_weights(self) -> None:
        self.vae.check_weights()

    def announce(self, prompts: Sequence[str], clip_skip: int = 0) -> None:
        self.texts.announce(prompts)

    def adapt(self, deltas: Deltas) -> None:
        assert not deltas, "no layer has a name for LoRAs"

    @contextmanager
    def prepare(self, request: Request, plan: SamplingPlan, shape: Shape) -> Iterator[ZImageRun]:
        run = ZImageRun(self, request, plan, (shape[0] // PATCH, shape[1] // PATCH))
        try:
            yield run
        finally:
            run.close()

    def forget(self) -> None:
        self.texts.forget()

    def close(self) -> None:
        self.texts.close()
        self.residents.free()
        self.checkpoint.close()


# One image


class ZImageRun:
    """A run for one request. The denoised latents are x + sigma prediction, for the model predicts latents - noise.

    `grid`: rows and columns of tokens."""

    def __init__(self, model: ZImage, request: Request, plan: SamplingPlan, grid: tuple[int, int]):
        self.model, self.request, self.grid = model, request, grid
        branches, tokens = model.guidance.branches(request), grid[0] * grid[1]
        self.texts = model.texts.states([branch.prompt for branch in branches])
        stage = model.steps(request, plan, tokens, [text.shape[1] for text in self.texts])
        self.transformer, _ = model.residents.enter(stage)
        self.phases = phases(plan, branches, 1, self._pass)
        self.shapes = {
            "text": ", ".join(str(list(text.shape)) for text in self.texts),
            "tokens": f"{grid[0]} x {grid[1]} = {tokens}",
        }

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser:
        return Denoiser(
            self.model.runtime,
            "transformer",
            self.phases,
            lambda x, sigma, prediction: x + sigma * prediction,
            partial(self.model.guidance.combined, self.model.engine, self.request),
            blend=inpaint.blend(initial, segment.schedule, self.array),
        )

    def _pass(self, positions: tuple[int, ...]) -> Pass:
        """Return the pass of the transformer for one branch."""
        [position] = positions
        condition = self.transformer.condition(self.texts[position], self.grid)
        dtype, timestep = self.model.runtime.precision.time_dtype(), self.model.schedule_config.timestep
        return Pass(self.transformer, condition, lambda x, sigma: (x, time_row(timestep(sigma), dtype)))

    def array(self, latents: Latents) -> Array:
        return self.model.engine.array(packing.pack(latents, channels_last=True))

    def latents(self, x: Array) -> Latents:
        shape = self.grid[0] * PATCH, self.grid[1] * PATCH
        return packing.unpack(self.model.engine.numpy(x), *shape, channels_last=True).astype(np.float32)

    def close(self) -> None:
        """Free the run's arrays on the device, before the VAE decodes."""
        self.phases, self.texts = [], []
        del self.transformer  # which may be freed for the VAE
