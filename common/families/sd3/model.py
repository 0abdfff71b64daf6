"""Stable Diffusion 3: text states, modulation, and the prediction for the denoise loop.

The text encoders are in memory one after the other, and none of them while the transformer is; so are the weights that
only make its modulation, a third of it. The branches of guidance run in turn, since each has its own modulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nextafter

from qwenimg.common.families.sd3 import memory
from qwenimg.common.families.sd3.texts import SD3Texts
from qwenimg.common.networks.denoisers.sd3_conditioning import time_rows, window
from qwenimg.common.networks.denoisers.sd3_dit import PATCH, SD3Config
from qwenimg.common.numbers import sizes
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.pipeline.models.flow_model import FlowRun, shapes_of
from qwenimg.common.pipeline.models.pooled_flow_model import PooledFlowModel
from qwenimg.common.pipeline.steps.denoiser import phases
from qwenimg.common.pipeline.steps.guidance import Branch, Guidance, rescaled_cfg
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.request import skip_layers
from qwenimg.common.request.few_steps import FewSteps
from qwenimg.common.request.request import MULTIPLE, Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Engine
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.sampling.flow_match import SHIFTED_TWICE
from qwenimg.common.weights.plan import LoadPlan

HYPER = "ByteDance/Hyper-SD/Hyper-SD3-8steps-CFG-lora.safetensors"
SKIPPING = (0.01, 0.2)  # shares of the steps: skip-layer guidance is in those between, without either


def _few_steps(config: SD3Config) -> dict[str, FewSteps]:
    """Return the LoRA for SD 3 medium, the model without norms of queries and keys, with the settings of its card."""
    if config.qk_norm is not None:
        return {}
    return {"hyper-cfg": FewSteps(steps=(8,), sampler="euler", guidance=5.0, loras={8: (HYPER,)}, strength=0.125)}


def _with_skipped(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
    """Apply classifier-free guidance, and where there is a third prediction, of fewer layers, guidance away from it."""
    guided = rescaled_cfg(engine, request, predictions[:2])
    if len(predictions) == 2:
        return guided
    return guided + request.family_options.skip_layer_scale * (predictions[0] - predictions[2])


def _skipping(request: Request) -> tuple[Branch, ...]:
    """Return the branch of the prompt without the layers that the user chose, as long as there is guidance."""
    layers, (start, end) = skip_layers.parse(request.family_options.skip_layers), SKIPPING
    start, end = nextafter(start, 1.0), min(end, request.cfg_end)
    if not layers or end <= start:
        return ()
    return (Branch(prompt=request.prompt, steps=(start, end), options={"skip_layers": layers}),)


class SD3(PooledFlowModel):
    """A Stable Diffusion 3 model for `Pipeline`."""

    guidance = Guidance(formula=_with_skipped, more=_skipping)
    levels = SHIFTED_TWICE
    options = frozenset({"step_cache", "cached_calls", "guidance_rescale", "skip_layers", "skip_layer_scale"})
    texts: SD3Texts
    config: SD3Config

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        texts = SD3Texts(residents, checkpoint, checkpoint["transformer"].config.joint_attention_dim)
        super().__init__(runtime, checkpoint, residents, texts, vae.scaled_halves(residents, checkpoint["vae"]))
        self.channels = self.vae.config.latent_channels
        self.few_steps = _few_steps(self.config)

    def plan(self, request: Request) -> SamplingPlan:
        width, height = sizes.render_size(request.width, request.height, MULTIPLE)
        window(self.config, height // MULTIPLE, width // MULTIPLE)
        skip_layers.check(request.family_options.skip_layers, self.config.num_layers, request.caches)
        return super().plan(request)

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        sharing, tokens, text = self.sharing(request), shape.count // PATCH**2, max(lengths)
        peak = memory.step_peak(self.config, sharing.part(tokens) + text)
        activations = self.call_bytes(peak, tokens, tokens + text, sharing)
        operations = [memory.step_operations(self.config, tokens, text)] * len(lengths)
        denoise = self.denoising(request, plan, activations, operations, [tokens] * len(lengths))
        return self.with_modulation(request, plan, denoise)

    def modulation_rows(self, plan: LoadPlan, rows: int) -> int:
        return memory.modulation_rows(self.config, plan, rows)

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid, branches = shape.grid(PATCH), self.guidance.branches(request)
        every = self.texts.states([branch.prompt for branch in branches])
        states = {branch.prompt: one for branch, one in zip(branches, every, strict=True)}
        texts = [states[branch.prompt][0] for branch in branches]
        stages = self.steps(request, plan, shape, [text.shape[1] for text in texts])
        times = time_rows(self.timesteps(plan))
        modulation, first = self.modulate(
            request,
            plan,
            stages[0],
            lambda transformer, prompts: transformer.modulate(times, self.texts.pooled(prompts)),
        )
        transformer, _ = self.residents.acquire(stages[-1])
        rows = {sigma: i for i, sigma in enumerate(plan.evaluated_sigmas())}

        def make_pass(positions: tuple[int, ...]) -> Pass:
            [position] = positions
            branch, text = branches[position], texts[position]
            condition = transformer.condition(text, grid, **branch.options)
            return Pass(transformer, condition, lambda x, sigma: (x, (modulation, first[branch.prompt] + rows[sigma])))

        return FlowRun(self, request, phases(plan, branches, 1, make_pass), shapes_of(texts, grid))
