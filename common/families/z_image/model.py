"""Z-Image: text states and the prediction for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. The branches of guidance run in turn, since texts of different length have different positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.z_image import memory
from qwenimg.common.families.z_image.control import ControlNetworks, ControlRun
from qwenimg.common.networks.denoisers.zimage_conditioning import padded, time_row
from qwenimg.common.networks.denoisers.zimage_dit import PATCH, ZImageConfig
from qwenimg.common.numbers import packing, sizes
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun, ReferenceRun, shapes_of
from qwenimg.common.pipeline.steps.denoiser import phases
from qwenimg.common.pipeline.steps.guidance import Guidance
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.request.request import MULTIPLE, Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Engine
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage

TEMPLATE = Template(text="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", dropped=0, limit=512, seen=512)


def _from_conditional(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
    """Apply classifier-free guidance that counts from the prompt's prediction: its scale is one less than the usual.
    The result may have a largest length, in lengths of the prompt's prediction."""
    conditional, unconditional = predictions
    guided = conditional + request.guidance * (conditional - unconditional)
    most = request.family_options.cfg_normalization
    return engine.shortened(guided, conditional, most) if most else guided


class ZImage(FlowModel):
    """A Z-Image model for `Pipeline`."""

    guidance = Guidance(formula=_from_conditional, off=0.0, until=lambda request: request.family_options.cfg_truncation)
    options = frozenset({"step_cache", "cached_calls", "cfg_normalization", "cfg_truncation"})
    texts: TemplateTexts
    config: ZImageConfig
    controls: ControlNetworks

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        texts = TemplateTexts(residents, checkpoint, TEMPLATE)
        super().__init__(runtime, checkpoint, residents, texts, vae.scaled_halves(residents, checkpoint["vae"]))
        self.channels = self.vae.config.latent_channels
        self.controls = ControlNetworks(residents)

    def plan(self, request: Request) -> SamplingPlan:
        width, height = sizes.render_size(request.width, request.height, MULTIPLE)
        rows, columns = self.config.axes_lens[1:]
        if height > rows * MULTIPLE or width > columns * MULTIPLE:
            raise UsageError(
                f"{request.width}x{request.height} is too large for this model, which knows the positions of "
                f"{columns * MULTIPLE}x{rows * MULTIPLE} pixels; choose a smaller size"
            )
        return super().plan(request)

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        """Return the stages of the control networks and of the transformer."""
        own = self._own_steps(request, plan, shape, lengths)
        return [*self.controls.stages(request, self._control_run(request, plan, shape, lengths), own), *own]

    def _control_run(
        self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]
    ) -> ControlRun:
        tokens = padded(shape.count // PATCH**2) + max(map(padded, lengths))
        return ControlRun(plan=plan, tokens=tokens, calls=plan.passes(self.guidance.branches(request)))

    def _own_steps(
        self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]
    ) -> list[Stage]:
        """Return the stage of the transformer."""
        tokens = padded(shape.count // PATCH**2)
        counts, sharing = [tokens + padded(length) for length in lengths], self.sharing(request)
        peak = memory.block_peak(self.config, max(counts) - tokens + sharing.part(tokens))
        activations = self.call_bytes(peak, tokens, max(counts), sharing)
        activations += self.controls.kept_bytes(request, max(counts))
        operations = (memory.step_operations(self.config, count) for count in counts)
        co_resident = self.controls.co_resident(request)
        return [self.denoising(request, plan, activations, operations, counts, co_resident)]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid = shape.grid(PATCH)
        branches = self.guidance.branches(request)
        texts = self.texts.states([branch.prompt for branch in branches])
        lengths = [text.shape[1] for text in texts]
        [stage] = self._own_steps(request, plan, shape, lengths)
        nets = self.controls.open(request, self._control_run(request, plan, shape, lengths), [stage])
        transformer, _ = self.residents.acquire(stage)
        dtype, timestep = self.runtime.precision.time_dtype(), self.schedule_config.timestep

        def make_pass(positions: tuple[int, ...]) -> Pass:
            condition = transformer.condition(texts[positions[0]], grid)
            return Pass(transformer, condition, lambda x, sigma: (x, time_row(timestep(sigma), dtype)))

        return ReferenceRun(
            self,
            request,
            lambda initial: phases(plan, branches, 1, make_pass),
            shapes_of(texts, grid),
            packing=packing.Packing(
                partial(packing.pack, channels_last=True),
                partial(packing.unpack, h=shape.rows, w=shape.columns, channels_last=True),
            ),
            make_control=partial(self.controls.controlling, request, plan, nets, grid),
            denoised=lambda x, sigma, prediction: x + sigma * prediction,  # it predicts latents - noise
        )
