"""Stable Diffusion 1.x, 2.x and XL for the denoise loop: text states, UNet predictions, guidance, an optional refiner.

Both branches of guidance go through the UNet in one batch. Text states and what the UNet makes of them are computed
once per run. The base's UNet is freed before the refiner's is loaded where both do not fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import NumericsError
from qwenimg.common.families.stable_diffusion import plan as sd_plan
from qwenimg.common.families.stable_diffusion.checkpoint import SDModel
from qwenimg.common.families.stable_diffusion.texts import ClipTexts
from qwenimg.common.networks import clip, qwen_conditioning
from qwenimg.common.networks.unet import UNetConfig
from qwenimg.common.pipeline import inpaint
from qwenimg.common.pipeline.diffusion_model import CALLS, Latents, Run, Start
from qwenimg.common.pipeline.plan import Plan, Stage
from qwenimg.common.pipeline.request import Request
from qwenimg.common.runtime import estimate, memory
from qwenimg.common.runtime.engine import VAE, Array, Condition, Engine, UNet
from qwenimg.common.runtime.estimate import Needs
from qwenimg.common.runtime.runtime import Keeper, Notify
from qwenimg.common.sampling import discrete
from qwenimg.common.weights.precision import Precision

AESTHETIC, POOR_AESTHETIC = 6.0, 2.5  # scores that the refiner is told of the picture and of the negative branch


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """What a run uses at every step. `added` are rows for SDXL's sizes and pooled text, None for others."""

    texts: Latents  # [B, S, C]; the prompt's first, then the negative one's
    added: Latents | None
    request: Request


class Side:
    """One model of a run, the base or the refiner: its texts and its UNet."""

    def __init__(self, model: SDModel, keeper: Keeper, make_room: Callable[[int], None]):
        self.model, self.keeper, self.make_room = model, keeper, make_room
        self.texts = ClipTexts(model, keeper, make_room)
        self._unet: UNet | None = None
        self.prepared: Prepared | None = None

    def prepare(self, request: Request) -> None:
        prompts = [request.prompt, request.negative_prompt] if request.guided else [request.prompt]
        states, pooled = self.texts.states(prompts, request.clip_skip)
        if self.model.zeros_for_empty and request.guided and not request.negative_prompt:
            states[1], pooled[1] = 0, 0
        self.prepared = Prepared(texts=states, added=self._added(request, pooled), request=request)

    def _added(self, request: Request, pooled: Latents) -> Latents | None:
        """SDXL's pooled text and sinusoids of original size, crop, and target size or aesthetic score: [B, A]."""
        model = self.model
        if not model.sdxl:
            return None
        sizes: list[float] = [request.height, request.width, 0, 0]
        last = [[AESTHETIC], [POOR_AESTHETIC]] if model.refiner else [[request.height, request.width]] * 2
        channels = model.unet_config.addition_time_embed_dim or 256
        rows = [_sinusoids(model.unet_config, [*sizes, *last[i]], channels).reshape(-1) for i in range(len(pooled))]
        return np.concatenate([pooled, np.stack(rows)], axis=1).astype(np.float32)

    def unet(self, more: int = 0) -> UNet:
        """The UNet, once it is known that its weights and `more` bytes of a step fit."""
        if self._unet is not None:
            self.keeper.check_fit("a step of this size", more)
            return self._unet
        plan, precision = self.model.unet, self.keeper.precision
        weights = memory.weight_bytes(plan, precision, "transformer")
        self.make_room(weights + more)
        with self.keeper.loading("refiner" if self.model.refiner else "unet", weights, more):
            self._unet = self.keeper.engine.open("unet", self.model.unet_config, plan, precision)
        return self._unet

    def waiting(self) -> int:
        """Bytes of the UNet's weights that are still to be loaded."""
        return 0 if self.loaded else memory.weight_bytes(self.model.unet, self.keeper.precision, "transformer")

    def needs(self, branches: int, shape: tuple[int, int]) -> dict[str, int]:
        """Bytes for its UNet and a step."""
        what = "a step of this size" if self.loaded else "the refiner" if self.model.refiner else "the unet"
        return {what: self.waiting() + self.step_bytes(branches, *shape)}

    def step_bytes(self, branches: int, height: int, width: int) -> int:
        config = self.model.unet_config
        scores = memory.scores(max(config.attention_head_dim), branches, height * width, self.keeper.engine.score_bytes)
        return memory.unet_step_peak(config, branches, height, width) + scores

    @property
    def loaded(self) -> bool:
        return self._unet is not None

    def free(self) -> None:
        self._unet = None
        self.keeper.engine.release()


class StableDiffusion:
    """A Stable Diffusion model for `Pipeline`, with a refiner behind it if one is given."""

    def __init__(
        self, engine: Engine, model: SDModel, precision: Precision, notify: Notify, refiner: SDModel | None = None
    ):
        self.engine, self.model = engine, model
        self.keeper = Keeper(engine, precision, notify)
        self.base = Side(model, self.keeper, self._make_room)
        self.refiner = None if refiner is None else Side(refiner, self.keeper, self._make_room)
        config = model.vae_config
        self.scale, self.multiple, self.channels = config.scale, config.scale, config.latent_channels
        self.sees_mask = model.sees_mask
        self._vae: VAE | None = None
        self._told: dict[str, str] = {}

    # What is asked

    def plan(self, request: Request) -> Plan:
        for side in self._sides():
            for text in side.model.texts:
                clip.used_states(text.config, side.model.sdxl, request.clip_skip)
        return sd_plan.plan(self.model, request, self.engine, refined=self.refiner is not None)

    def warnings(self, request: Request) -> list[str]:
        rescaled = request.guidance_rescale and not request.guided
        return ["--guidance-rescale has no effect without guidance"] if rescaled else []

    # The run

    def _sides(self) -> list[Side]:
        return [side for side in (self.base, self.refiner) if side is not None]

    def _make_room(self, need: int) -> None:
        """Frees the UNets where `need` bytes are not free: a text encoder or the other UNet is to be loaded."""
        if need > self.engine.free_memory() and any(side.loaded for side in self._sides()):
            self.keeper.notify("stage", "freeing the UNet, since what comes next does not fit beside it")
            self.free_transformer()

    def announce(self, prompts: Sequence[str], clip_skip: int = 0) -> None:
        for side in self._sides():
            side.texts.announce(prompts, clip_skip)

    def needs(self, request: Request, plan: Plan, shape: tuple[int, int]) -> Needs:
        branches, found, model = 1 + request.guided, dict[str, int](), self.model
        for side in self._sides():
            found |= side.needs(branches, shape)
        base = self.base.waiting() if self.refiner is None else 0  # with a refiner the base makes room
        levels = len(model.unet_config.block_out_channels)
        one = branches * estimate.unet_operations(model.unet, levels, *shape)
        return Needs(
            memory=found | self.keeper.decoding(model.vae_config, model.vae, shape, base),
            operations=plan.steps * one + estimate.decoder_operations(model.vae, *shape),
        )

    def begin(self, request: Request, plan: Plan, shape: tuple[int, int]) -> None:
        for side in self._sides():
            side.prepare(request)
        assert self.base.prepared is not None
        self._told = {"text": str(list(self.base.prepared.texts.shape))}

    def end(self) -> None:
        for side in self._sides():
            side.prepared = None

    def run(self, stage: Stage, start: Start) -> Run:
        side = self.refiner if stage.refines else self.base
        assert side is not None
        return inpaint.wrap(DiffusionRun(self, side, stage, start), self, stage, start)

    # Latents

    def array(self, latents: Latents) -> Array:
        return self.engine.array(latents)

    def latents(self, x: Array, shape: tuple[int, int]) -> Latents:
        self.end()
        return self.engine.numpy(x).astype(np.float32)

    def shapes(self) -> dict[str, str]:
        return dict(self._told)

    def check_encoding(self, height: int, width: int) -> None:
        self.keeper.check_encoding(height, width, self.model.vae_config.block_out_channels[0])

    def encode(self, pixels: NDArray[np.float32]) -> tuple[Latents, Latents]:
        scale, shift = self._statistics()
        mean, deviation = self.keeper.encode(self._open_vae(), pixels, self.model.vae_config.block_out_channels[0])
        return (mean - shift) * scale, deviation * scale

    def decode(self, latents: Latents) -> NDArray[Any]:
        scale, shift = self._statistics()
        return self.keeper.decode(self._open_vae(), self.model.vae_config, latents / scale + shift)

    def _statistics(self) -> tuple[np.float32, np.float32]:
        config = self.model.vae_config
        return np.float32(config.scaling_factor), np.float32(config.shift_factor or 0)

    def _open_vae(self) -> VAE:
        if self._vae is None:
            self._vae = self.engine.open("kl_vae", self.model.vae_config, self.model.vae, self.keeper.precision)
        return self._vae

    def free_transformer(self) -> None:
        for side in self._sides():
            side.free()

    def close(self) -> None:
        self._vae = None
        for side in self._sides():
            side.texts.close()
            side.free()
            side.model.close()


class DiffusionRun:
    """The denoiser: image = c_skip x + c_out UNet(c_in x, time), guidance taken on the prediction."""

    def __init__(self, family: StableDiffusion, side: Side, stage: Stage, start: Start):
        assert side.prepared is not None
        self.time = discrete.clock(side.model.scheduler.levels, stage.grid)
        self.family, self.model, self.request = family, side.model, side.prepared.request
        h, w = start.noise.shape[2:]
        self.unet = side.unet(side.step_bytes(len(side.prepared.texts), h, w))
        self.condition: Condition = self.unet.condition(side.prepared.texts, side.prepared.added)
        self.extra: list[Array] = []
        if self.model.sees_mask:
            self.extra = [family.array(part) for part in self._mask(start)]
        self.calls: deque[tuple[Array, float]] = deque(maxlen=CALLS)

    def _mask(self, start: Start) -> list[Latents]:
        """Mask and masked picture; where none is given all is to be made, of an empty (gray) picture's latents."""
        if start.mask is not None and start.masked is not None:
            return [start.mask, start.masked]
        everything = np.ones_like(start.noise[:, :1])
        height, width = (side * self.family.scale for side in start.noise.shape[2:])
        return [everything, self.family.encode(np.zeros((1, 3, height, width), np.float32))[0]]

    def __call__(self, x: Array, sigma: float) -> Array:
        return self._image(x, sigma, self._guided(self._predictions(x, sigma)))

    def both(self, x: Array, sigma: float) -> tuple[Array, Array]:
        predictions = self._predictions(x, sigma)
        return self._image(x, sigma, self._guided(predictions)), self._image(x, sigma, predictions[-1])

    def _guided(self, predictions: list[Array]) -> Array:
        if len(predictions) == 1:
            return predictions[0]
        conditional, unconditional = predictions
        guided = unconditional + self.request.guidance * (conditional - unconditional)
        share = self.request.guidance_rescale
        return self.family.engine.rescale(guided, conditional, share) if share else guided

    def _image(self, x: Array, sigma: float, prediction: Array) -> Array:
        _, c_skip, c_out = self._scalings(sigma)
        return c_skip * x + c_out * prediction

    def _scalings(self, sigma: float) -> tuple[float, float, float]:
        return discrete.scalings(self.model.scheduler.prediction_type, sigma)

    def _predictions(self, x: Array, sigma: float) -> list[Array]:
        self.calls.append((x, sigma))
        return self.family.engine.split(self._predict(x, sigma))

    def _predict(self, x: Array, sigma: float) -> Array:
        config = self.model.unet_config
        features = _sinusoids(config, [self.time(sigma)], config.time_channels)
        scaled = self._scalings(sigma)[0] * x
        shown = self.family.engine.join([scaled, *self.extra]) if self.extra else scaled
        return self.unet.predict(shown, features, self.condition)

    def explain(self, step: int) -> NumericsError:
        return self.family.keeper.explain("unet", step, (partial(self._predict, x, sigma) for x, sigma in self.calls))


def _sinusoids(config: UNetConfig, values: Sequence[float], channels: int) -> NDArray[np.float64]:
    """Of times and of sizes alike, [N, channels], in the model's own order."""
    return qwen_conditioning.sinusoids(values, channels, cosines_first=config.flip_sin_to_cos, shift=config.freq_shift)
