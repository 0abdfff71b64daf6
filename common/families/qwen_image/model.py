"""Qwen-Image: text states, modulation and velocity for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. What depends on neither step nor latent is made once per run, the modulation once per schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import NumericsError
from qwenimg.common.families.qwen_image.checkpoint import Model
from qwenimg.common.families.qwen_image.parts import TEXT_TOKENS, Parts
from qwenimg.common.numbers import packing, sizes
from qwenimg.common.pipeline import flow_plan, inpaint
from qwenimg.common.pipeline.diffusion_model import CALLS, Latents, Run, Start
from qwenimg.common.pipeline.plan import Plan, Stage
from qwenimg.common.pipeline.request import MULTIPLE, Request
from qwenimg.common.prompts import qwen
from qwenimg.common.runtime import estimate, memory
from qwenimg.common.runtime.engine import Array, Condition, Engine, Modulation, Transformer
from qwenimg.common.runtime.estimate import Needs
from qwenimg.common.runtime.runtime import Notify
from qwenimg.common.weights.precision import Precision

BATCHED_TOKENS = 1024  # images of at most this many tokens leave a GPU idle: both branches of guidance go in one batch


class QwenImage:
    """A Qwen-Image model for `Pipeline`."""

    batch_guidance: bool | None = None  # both branches in one batch: always, never, or (None) where it pays
    multiple = MULTIPLE
    sees_mask = False

    def __init__(self, engine: Engine, model: Model, precision: Precision, notify: Notify):
        self.engine, self.model = engine, model
        self.parts = Parts(engine, model, precision, notify)
        self.keeper = self.parts.keeper
        self.schedule_config = model.schedule_config()
        self.scale, self.channels = model.vae_config.scale, model.vae_config.z_dim
        self._run: Prepared | None = None

    # What is asked

    def plan(self, request: Request) -> Plan:
        rows, columns = sizes.render_size(request.width, request.height, MULTIPLE)
        return flow_plan.plan(self.schedule_config, request, rows * columns // MULTIPLE**2)

    def warnings(self, request: Request) -> list[str]:
        found = []
        texts = {"prompt": request.prompt} | ({"negative prompt": request.negative_prompt} if request.guided else {})
        for name, text in texts.items():
            lost = qwen.prompt_ids(self.parts.tokenizer, text).lost(TEXT_TOKENS)
            if lost:
                found.append(f"the {name} is cut: the model sees its first {TEXT_TOKENS} tokens, not the last {lost}")
        if request.clip_skip:
            found.append("--clip-skip has no effect: this model's text encoder is not CLIP")
        if request.guidance_rescale:  # whatever the guidance
            found.append("--guidance-rescale has no effect: this model's guidance always keeps the prediction's norm")
        return found

    # The run

    def announce(self, prompts: Sequence[str], clip_skip: int = 0) -> None:
        self.parts.announce(prompts)

    def needs(self, request: Request, plan: Plan, shape: tuple[int, int]) -> Needs:
        model, parts, asked = self.model, self.parts, flow_plan.asked(plan)
        tokens = shape[0] * shape[1] // model.transformer_config.patch_size**2
        run = self._run_bytes(tokens, tuple(self.schedule_config.timestep(sigma) for sigma in asked))
        texts = [request.prompt, request.negative_prompt] if request.guided else [request.prompt]
        seen = [min(TEXT_TOKENS, len(qwen.prompt_ids(parts.tokenizer, text).ids)) for text in texts]
        one = sum(estimate.dit_operations(model.transformer_config, tokens + text) for text in seen)
        return Needs(
            memory=parts.needs(texts, run) | self.keeper.decoding(model.vae_config, model.vae, shape, parts.waiting()),
            operations=len(asked) * one + estimate.decoder_operations(model.vae, *shape),
        )

    def begin(self, request: Request, plan: Plan, shape: tuple[int, int]) -> None:
        patch = self.model.transformer_config.patch_size
        grid = (1, shape[0] // patch, shape[1] // patch)
        tokens = grid[1] * grid[2]
        asked = flow_plan.asked(plan)
        timesteps = tuple(self.schedule_config.timestep(sigma) for sigma in asked)
        prompts = [request.prompt, request.negative_prompt] if request.guided else [request.prompt]
        texts = self.parts.states(prompts)
        transformer = self.parts.transformer(self._run_bytes(tokens, timesteps))
        self._run = Prepared(
            transformer=transformer,
            modulation=self.parts.modulation(timesteps),
            rows={sigma: i for i, sigma in enumerate(asked)},
            conditions=[transformer.condition(batch, [grid]) for batch in self._batches(texts, tokens)],
            guidance=request.guidance,
            told={
                "text": ", ".join(str(list(text.shape)) for text in texts),
                "tokens": f"{grid[1]} x {grid[2]} = {tokens}",
            },
        )

    def end(self) -> None:
        self._run = None

    def run(self, stage: Stage, start: Start) -> Run:
        assert self._run is not None
        return inpaint.wrap(QwenRun(self, self._run), self, stage, start)

    def _run_bytes(self, tokens: int, timesteps: tuple[float, ...]) -> int:
        """What a run takes besides weights: one branch of a step, and modulation that is still to be made."""
        config = self.model.transformer_config
        step = memory.step_peak(config, 1, tokens + TEXT_TOKENS)
        step += memory.scores(config.num_attention_heads, 1, tokens + TEXT_TOKENS, self.engine.score_bytes)
        if self.parts.has_modulation(timesteps):
            return step
        return step + memory.modulation_bytes(config, self.keeper.precision, len(timesteps))

    def _batches(self, texts: list[Array], tokens: int) -> list[list[Array]]:
        """The branches of guidance, in one batch or in turn.

        Small images leave a GPU idle between kernels, so there both go together if memory allows; large ones gain
        nothing, and texts of different length would need a mask that keeps attention from its fastest kernel.
        """
        together = self.batch_guidance
        if together is None:
            need = memory.step_peak(self.model.transformer_config, len(texts), tokens + TEXT_TOKENS)
            together = self.engine.on_gpu and tokens <= BATCHED_TOKENS and need < self.engine.free_memory() // 2
        return [texts] if together else [[text] for text in texts]

    # Latents

    def array(self, latents: Latents) -> Array:
        return self.engine.array(packing.pack(latents))

    def latents(self, x: Array, shape: tuple[int, int]) -> Latents:
        self._told = self._run.told if self._run else {}
        self.end()  # its arrays are free before the VAE decodes
        return packing.unpack(self.engine.numpy(x), *shape).astype(np.float32)

    def shapes(self) -> dict[str, str]:
        return dict(self._told)

    def check_encoding(self, height: int, width: int) -> None:
        self.keeper.check_encoding(height, width, self.model.vae_config.base_dim)

    def encode(self, pixels: NDArray[np.float32]) -> tuple[Latents, Latents]:
        mean, std = self._statistics()
        center, deviation = self.keeper.encode(self.parts.vae(), pixels, self.model.vae_config.base_dim)
        return ((center - mean) / std).astype(np.float32), (deviation / std).astype(np.float32)

    def decode(self, latents: Latents) -> NDArray[Any]:
        mean, std = self._statistics()
        return self.keeper.decode(self.parts.vae(), self.model.vae_config, latents * std + mean)

    def _statistics(self) -> tuple[Latents, Latents]:
        config = self.model.vae_config
        mean, std = (np.asarray(v, np.float32)[:, None, None] for v in (config.latents_mean, config.latents_std))
        return mean, std

    def free_transformer(self) -> None:
        self.parts.free_transformer()

    def close(self) -> None:
        self.parts.close()


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """What a run uses at every step. `rows` is the modulation's row of each noise level that is asked for."""

    transformer: Transformer
    modulation: Modulation
    rows: dict[float, int]
    conditions: list[Condition]
    guidance: float
    told: dict[str, str]


class QwenRun:
    """The denoiser: image = x - sigma velocity."""

    def __init__(self, family: QwenImage, prepared: Prepared):
        self.family, self.prepared = family, prepared
        self.calls: deque[tuple[Array, float]] = deque(maxlen=CALLS)

    def __call__(self, x: Array, sigma: float) -> Array:
        velocities = self._velocities(x, sigma)
        engine, scale = self.family.engine, self.prepared.guidance
        velocity = velocities[0] if len(velocities) == 1 else engine.guide(velocities[0], velocities[1], scale)
        return x - sigma * velocity

    def both(self, x: Array, sigma: float) -> tuple[Array, Array]:
        velocities = self._velocities(x, sigma)
        if len(velocities) == 1:
            image = x - sigma * velocities[0]
            return image, image
        guided = self.family.engine.guide(velocities[0], velocities[1], self.prepared.guidance)
        return x - sigma * guided, x - sigma * velocities[1]

    def _velocities(self, x: Array, sigma: float) -> list[Array]:
        self.calls.append((x, sigma))
        found = [self._predict(x, sigma, i) for i in range(len(self.prepared.conditions))]
        return self.family.engine.split(found[0]) if len(found) == 1 and self.prepared.guidance > 1 else found

    def _predict(self, x: Array, sigma: float, branch: int) -> Array:
        p = self.prepared
        return p.transformer.predict(x, p.conditions[branch], p.modulation, p.rows[sigma])

    def explain(self, step: int) -> NumericsError:
        branches = range(len(self.prepared.conditions))
        again = (partial(self._predict, x, sigma, branch) for x, sigma in self.calls for branch in branches)
        return self.family.keeper.explain("transformer", step, again)
