"""Qwen-Image: text states, modulation and velocity for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. Inputs that depend on neither step nor latent are made once per run, the modulation once per schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from qwenimg.common.families.qwen_image import captions, memory, variants
from qwenimg.common.families.qwen_image.control import ControlNetworks, ControlSchedule
from qwenimg.common.memory.memory import kept_bytes
from qwenimg.common.networks.denoisers import qwen_conditioning
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.parts.texts.captions import CaptionTexts
from qwenimg.common.parts.texts.picture_texts import PictureTexts
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun, ReferenceRun, shapes_of
from qwenimg.common.pipeline.steps.denoiser import Phase, phases
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg_with_norm
from qwenimg.common.pipeline.steps.inpaint import Initial
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.group import ALONE, Sharing
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Split, Stage

BATCHED_TOKENS = 1024  # images of at most this many tokens leave a GPU idle: both branches of guidance go in one batch


class QwenImage(FlowModel):
    """A Qwen-Image model for `Pipeline`."""

    batch_guidance: bool | None = None  # both branches in one batch: always, never, or (None) where it pays
    guidance = Guidance(formula=cfg_with_norm)
    options = frozenset({"step_cache", "cached_calls"})
    texts: TemplateTexts | PictureTexts
    config: QwenDiTConfig
    controls: ControlNetworks

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents, vae_config = Residents(runtime), checkpoint["vae"].config
        kind = variants.VARIANTS[checkpoint.variant]
        halves = vae.standardized_halves(residents, checkpoint["vae"], samples=not kind.images[0])
        texts: TemplateTexts | PictureTexts
        if kind.edits:
            texts = PictureTexts(residents, checkpoint, kind.around)
        elif kind.layered:
            texts = CaptionTexts(residents, checkpoint, kind.template, captions.describing())
        else:
            texts = TemplateTexts(residents, checkpoint, kind.template)
        super().__init__(runtime, checkpoint, residents, texts, halves)
        self.kind = kind
        self.controls = ControlNetworks(residents, self.config.num_layers)
        self.channels = vae_config.z_dim
        self.few_steps = variants.few_steps(str(checkpoint.source), kind)

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        """Return the stages of the control networks and of the transformer."""
        steps = self._own_steps(request, plan, shape, lengths)
        return [*self.controls.stages(request, self._schedule(request, plan, shape, lengths), steps), *steps]

    def _schedule(
        self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]
    ) -> ControlSchedule:
        return ControlSchedule(
            plan=plan,
            timesteps=self.timesteps(plan),
            tokens=shape.rows * shape.columns // self.config.patch_size**2,
            length=lengths[0],
            branches=plan.passes(self.guidance.branches(request)) / plan.evaluations,
        )

    def _own_steps(
        self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]
    ) -> list[Stage]:
        """Return the stages of the transformer: the modulation, unless it is kept, and all steps."""
        branches, timesteps = self.guidance.branches(request), self.timesteps(plan)
        shapes = [*self.reference_shapes(request), *(shape for _ in self.controls.seen(request))]
        seen = sum(one.count for one in shapes) // self.config.patch_size**2
        tokens = shape.count // self.config.patch_size**2 + seen
        count, text, sharing = len(branches), max(lengths), self.sharing(request)
        sizes = self._batches(count, tokens) if sharing == ALONE else [1]
        co_resident, more = self.controls.co_resident(request), self.controls.kept_bytes(request, tokens)
        more += memory.reference_bytes(self.config, count, seen, tokens)
        more += kept_bytes(self.config.dim, [tokens] * count) if request.caches else 0
        operations = [memory.step_operations(self.config, tokens + length) for length in lengths]
        denoise = Stage(
            name="denoise",
            resident="transformer",
            component=self.checkpoint["transformer"],
            splits=tuple(
                Split(
                    activations=self._step_bytes(size, tokens, text, sharing) + more,
                    size=size,
                    passes=plan.passes(branches, size * sharing.branches),
                )
                for size in sizes
            ),
            co_resident=co_resident,
            checked=self.modulations.has(timesteps),
            operations=sharing.operations(
                plan.passes([branch]) * one for branch, one in zip(branches, operations, strict=True)
            ),
        )
        if self.modulations.has(timesteps):
            return [denoise]
        steps = len(timesteps) + self.config.zero_cond_t
        rows = memory.modulation_rows(self.config, self.runtime.load_plan(denoise.component), steps)
        activations = [split.activations for split in denoise.splits]
        modulation = self.modulations.stage(
            denoise.component, rows, "transformer_blocks.0.", activations, co_resident=co_resident
        )
        return [modulation, denoise]

    def _step_bytes(self, branches: int, tokens: int, text: int, sharing: Sharing) -> int:
        """Return the bytes of a step with `branches` in one batch, each of `tokens` image tokens and `text` text
        tokens."""
        peak = memory.step_peak(self.config, branches, sharing.part(tokens) + text)
        return self.call_bytes(peak, tokens, tokens + text, sharing, branches)

    def _batches(self, count: int, tokens: int) -> list[int]:
        """Return how many of the `count` branches of guidance may go in one batch, the preferred number first.

        Small images leave a GPU idle between kernels, so both branches go together if memory allows. Large ones gain
        nothing, and texts of different length would need a mask that keeps attention from its fastest kernel."""
        if self.batch_guidance is not None:
            return [count if self.batch_guidance else 1]
        gains = self.engine.on_gpu and tokens <= BATCHED_TOKENS
        return list(dict.fromkeys([count, 1])) if gains else [1]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        patch = self.config.patch_size
        grid = shape.grid(patch)
        rows = {sigma: i for i, sigma in enumerate(plan.evaluated_sigmas())}  # of the modulation
        branches = self.guidance.branches(request)
        texts = self.texts.states(self.prompts(request))
        lengths = [text.shape[1] for text in texts]
        stages = self._own_steps(request, plan, shape, lengths)
        timesteps, dtype = self.timesteps(plan), self.runtime.precision.time_dtype()
        nets = self.controls.open(request, self._schedule(request, plan, shape, lengths), stages)
        modulation, _ = self.modulations.get(
            timesteps,
            stages[0],
            lambda transformer, _: transformer.modulate(qwen_conditioning.time_rows(self.config, timesteps, dtype)),
        )
        transformer, split = self.residents.acquire(stages[-1])

        def make_phases(initial: Initial) -> list[Phase]:
            pictures = [*initial.references, *(initial.controls[i] for i in self.controls.seen(request))]
            tokens = [self.engine.array(packing.pack_frames(latents)) for latents in pictures]
            seen = ((1, one.shape[2] // patch, one.shape[3] // patch) for one in pictures)
            grids = [*[(1, *grid)] * shape.frames, *seen]

            def make_pass(positions: tuple[int, ...]) -> Pass:
                condition = transformer.condition([texts[i] for i in positions], grids, tokens)
                return Pass(transformer, condition, lambda x, sigma: (x, (modulation, rows[sigma])))

            return phases(plan, branches, split.size or len(branches), make_pass)

        return ReferenceRun(
            self,
            request,
            make_phases,
            shapes_of(texts, grid),
            packing=packing.frames(shape.frames, shape.rows, shape.columns),
            make_control=partial(self.controls.controlling, request, plan, nets, grid, texts[0]),
        )
