"""Flux.1: text states and the prediction for the denoise loop.

dev is guidance-distilled: its scale is an input. A negative prompt needs a second prediction, by guidance of its own
(`true_cfg`). The branches run in turn, since each has its own modulation. Kontext sees the image of a request as a
reference; below a strength of 1, and with a mask, the run starts from it too. Fill has the mask as an input, Canny and
Depth a control picture: its latents, a sample, are further channels of each token, behind those of the image. The
pictures of Redux are a part of the prompt's text.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from qwenimg.common.families.flux import references, variants
from qwenimg.common.families.flux.controlnet import ControlNetworks, ControlRun
from qwenimg.common.families.flux.redux import PictureTexts, SeenPicture
from qwenimg.common.families.flux.texts import FluxTexts, PooledText
from qwenimg.common.families.flux.variants import CANNY, DEPTH, FILL, KONTEXT, TEXT
from qwenimg.common.networks.denoisers.flux_conditioning import guidance_row, time_rows
from qwenimg.common.networks.denoisers.flux_dit import PATCH, FluxConfig
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import flux_blocks, vae
from qwenimg.common.parts.control_net import OwnInput, is_seen
from qwenimg.common.pipeline.models.flow_model import FlowRun, ReferenceRun, shapes_of
from qwenimg.common.pipeline.models.inputs import MaskInput, PictureInputs, each_picture
from qwenimg.common.pipeline.models.pooled_flow_model import PooledFlowModel
from qwenimg.common.pipeline.steps.denoiser import Phase, phases
from qwenimg.common.pipeline.steps.guidance import TRUE_CFG
from qwenimg.common.pipeline.steps.inpaint import Initial
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Modulation
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.weights.plan import LoadPlan

REFERENCES = each_picture(
    lambda image: references.size(image), lambda image: references.values(image), lambda i: "the picture"
)
LENGTHS = {True: 256, False: 512}  # tokens of T5, of schnell and of all others


class Flux(PooledFlowModel):
    """A Flux.1 model for `Pipeline`."""

    guidance = TRUE_CFG
    options = frozenset({"step_cache", "cached_calls"})
    texts: FluxTexts
    config: FluxConfig
    controls: ControlNetworks

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents, guided = Residents(runtime), checkpoint["transformer"].config.guidance_embeds
        texts, kind = FluxTexts(residents, checkpoint, LENGTHS[checkpoint.distilled]), checkpoint.variant
        halves = vae.scaled_halves(residents, checkpoint["vae"], samples=kind != KONTEXT.name)
        super().__init__(runtime, checkpoint, residents, texts, halves)
        self.controls = ControlNetworks(residents, self.config)
        self.channels = self.vae.config.latent_channels
        if kind == KONTEXT.name:
            self.inputs = PictureInputs(references=REFERENCES)
        elif kind == FILL.name:
            self.inputs = PictureInputs(mask=MaskInput(side=self.scale, samples_unused=True))
        elif kind in (CANNY.name, DEPTH.name):
            self.inputs, self.nets = PictureInputs(control=True), {"": OwnInput()}
        self.few_steps = variants.few_steps(guided=guided) if kind == TEXT.name else {}
        self.controls.give(self.nets)
        self.pictures = PictureTexts(residents)

    def warnings(self, request: Request) -> list[str]:
        seen = self.config.guidance_embeds or request.controls  # whose networks see it
        unguided = request.guidance and not seen
        lines = ["guidance has no effect: this model is not told it; give true-cfg"] if unguided else []
        return lines + super().warnings(request)

    # Texts, with the pictures in them

    def in_text(self, request: Request) -> list[SeenPicture]:
        """Return the pictures of a request that are text."""
        return self.pictures.seen(request, self.nets) if request.controls else []

    def encodings(self, request: Request, counted: bool) -> list[Stage]:
        prompts = self._read_prompts(request)
        texts = [] if self.texts.has(prompts) else self.texts.encodings(prompts, counted)
        return [*self.pictures.stages(self.in_text(request)), *texts]

    def lengths(self, request: Request, counted: bool) -> list[int]:
        own, *others = super().lengths(request, counted)
        return [own + sum(one.count for one in self.in_text(request)[:1]), *others]

    def pooled_keys(self, request: Request) -> list[Hashable]:
        return list(dict.fromkeys(self._pooled(request)))

    def announce(self, requests: Sequence[Request]) -> None:
        super().announce([one for one in requests if one.prompt.strip()])  # a blank prompt stands beside a picture

    def forget(self) -> None:
        super().forget()
        self.pictures.forget()

    def _pooled(self, request: Request) -> list[str | PooledText]:
        """Return the pooled text of each branch: its prompt, or in the first with pictures their scale too."""
        own, *others = (branch.prompt for branch in self.guidance.branches(request))
        scale = sum(one.pooled for one in seen) if (seen := self.in_text(request)) else 1.0
        plain = not seen or (scale == 1 and own.strip())
        return [own if plain else PooledText(own, scale), *others]

    def _read_prompts(self, request: Request) -> list[str]:
        """Return the prompts that text encoders read: a blank one beside a picture is not."""
        prompts = self.prompts(request)
        return prompts[1:] if self.in_text(request) and not request.prompt.strip() else prompts

    def _states(self, request: Request) -> list[Array]:
        """Return the text states of each branch: in the first with the tokens of its pictures."""
        if not (seen := self.in_text(request)):
            return [states for states, _ in self.texts.states(self.prompts(request))]
        tokens, prompts = self.pictures.tokens(seen), self._read_prompts(request)
        self.texts.clip.arrays(prompts)
        states = [made for (made,) in self.texts.t5.arrays(prompts)]
        if len(prompts) < len(self.prompts(request)):
            states.insert(0, np.zeros((1, self.texts.rows, tokens.shape[2]), np.float32))
        states[0] = np.concatenate([np.float32(sum(one.scale for one in seen)) * states[0], tokens], axis=1)
        return list(map(self.engine.array, states))

    # The transformer

    def seen(self, request: Request) -> list[int]:
        """Return which controls of a request have a picture that the transformer itself sees."""
        return [i for i, one in enumerate(request.controls) if one.scale and is_seen(self.nets[one.network])]

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        """Return the stages of the ControlNets and of the transformer."""
        own = self._own_steps(request, plan, shape, lengths)
        return [*self.controls.stages(request, self._control_run(request, plan, shape, lengths), own), *own]

    def _control_run(
        self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]
    ) -> ControlRun:
        return ControlRun(
            plan=plan,
            timesteps=self.timesteps(plan),
            guidance=self.controls.guidance(request),
            pooled=self._pooled(request)[0],
            tokens=shape.count // PATCH**2,
            length=lengths[0],
        )

    def _own_steps(
        self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]
    ) -> list[Stage]:
        """Return the stages of the transformer: the modulation, unless it is kept, and all steps."""
        sharing, count = self.sharing(request), len(lengths)
        tokens = sum(one.count for one in [shape, *self.reference_shapes(request)]) // PATCH**2
        text = max(lengths)
        peak = flux_blocks.step_peak(self.config, sharing.part(tokens) + text)
        activations = self.call_bytes(peak, tokens, tokens + text, sharing)
        activations += self.controls.kept_bytes(request, tokens)
        operations = [flux_blocks.step_operations(self.config, tokens + text)] * count
        co_resident = self.controls.co_resident(request)
        denoise = self.denoising(request, plan, activations, operations, [tokens] * count, co_resident)
        return self.with_modulation(request, plan, denoise)

    def modulation_rows(self, plan: LoadPlan, rows: int) -> int:
        return flux_blocks.modulation_rows(self.config, plan, rows)

    def schedule(self, request: Request, plan: SamplingPlan) -> Hashable:
        return self.timesteps(plan), request.guidance if self.config.guidance_embeds else 0.0

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid, branches = shape.grid(PATCH), self.guidance.branches(request)
        everything = [] if request.mask is not None else self.inputs.mask.everything(self.vae, shape)
        seen = self.seen(request)
        texts, pooled = self._states(request), self._pooled(request)
        lengths = [states.shape[1] for states in texts]
        stages = self._own_steps(request, plan, shape, lengths)
        [leading] = self.texts.pooled(pooled[:1]) if self.controls.nets_of(request) else [None]
        nets = self.controls.open(request, self._control_run(request, plan, shape, lengths), stages, leading)
        modulation, first = self.modulate(request, plan, stages[0], partial(self._modulation, request, plan))
        transformer, _ = self.residents.acquire(stages[-1])
        rows = {sigma: i for i, sigma in enumerate(plan.evaluated_sigmas())}

        def make_phases(initial: Initial) -> list[Phase]:
            grids = [grid, *((one.shape[2] // PATCH, one.shape[3] // PATCH) for one in initial.references)]
            tokens = [self.engine.array(packing.pack(latents)) for latents in initial.references]
            channels = everything if initial.mask is None else initial.mask.channels
            packed = [packing.pack(one) for one in reversed(channels)]  # the picture's first
            packed += [packing.pack(initial.controls[i]) for i in seen]
            more = self.engine.array(np.concatenate(packed, axis=-1)) if packed else None

            def make_pass(positions: tuple[int, ...]) -> Pass:
                [position] = positions
                start = first[pooled[position]]
                condition = transformer.condition(texts[position], grids, tokens, more)
                return Pass(transformer, condition, lambda x, sigma: (x, (modulation, start + rows[sigma])))

            return phases(plan, branches, 1, make_pass)

        return ReferenceRun(
            self,
            request,
            make_phases,
            shapes_of(texts, grid),
            packing=packing.squares(shape.rows, shape.columns),
            make_control=partial(self.controls.controlling, request, plan, nets, grid, texts[0]),
        )

    def _modulation(
        self, request: Request, plan: SamplingPlan, transformer: Any, texts: Sequence[str | PooledText]
    ) -> Modulation:
        """Compute the modulation of a run's schedule for pooled `texts`."""
        pooled, dtype = self.texts.pooled(texts), self.runtime.precision.time_dtype()
        times, guidance = time_rows(self.timesteps(plan), dtype), guidance_row(request.guidance, dtype)
        return transformer.modulate(times, guidance, pooled)
