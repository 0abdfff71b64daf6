"""From a prompt to a picture: the only denoise loop of the project, for every backend.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. What depends on neither step nor latent is made once per run, the modulation once per schedule.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common import geometry, image, memory, noise, tokenizers
from qwenimg.common.backend import Array, Condition, Engine, Modulation, Transformer
from qwenimg.common.errors import NumericsError, UsageError
from qwenimg.common.metadata import FORMAT, Recipe
from qwenimg.common.model import Model
from qwenimg.common.parts import TEXT_TOKENS, Notify, Parts
from qwenimg.common.precision import BYTES, Precision
from qwenimg.common.probes import first_non_finite
from qwenimg.common.request import MULTIPLE, Defaults, Request
from qwenimg.common.result import Result, Step
from qwenimg.common.samplers import Schedule, euler_step, flow_schedule
from qwenimg.common.version import __version__

BATCHED_TOKENS = 1024  # images of at most this many tokens leave a GPU idle: both branches of guidance go in one batch


class Pipeline:
    """A model on a backend. Call it for a picture, or `stream` it for the steps as well. Not thread-safe."""

    batch_guidance: bool | None = None  # both branches in one batch: always, never, or (None) where it pays

    def __init__(
        self,
        engine: Engine,
        model: Model,
        precision: Precision,
        *,
        name: str,
        defaults: Defaults | None = None,
        tf32: bool = False,
        notify: Notify | None = None,
    ):
        self.engine, self.model, self.precision = engine, model, precision
        self.backend, self.device, self.model_name = engine.name, engine.device, name
        self.tf32 = tf32  # whether float32 products are rounded to fewer digits on this device
        self.defaults = defaults or Defaults()
        self.notify = notify or _ignore
        self.parts = Parts(engine, model, precision, self.notify)
        self.schedule_config = model.schedule_config()

    # For users

    def __call__(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        seed: int | None = None,
        latents: NDArray[np.float32] | None = None,
    ) -> Result:
        """A picture of `prompt`. What is None takes the model's default; the seed, 0. Raises QwenimgError."""
        for event in self.stream(
            prompt,
            negative_prompt=negative_prompt,
            width=width,
            height=height,
            steps=steps,
            guidance=guidance,
            seed=seed,
            latents=latents,
        ):
            if isinstance(event, Result):
                return event
        raise AssertionError("the stream ended without a result")

    def stream(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        seed: int | None = None,
        latents: NDArray[np.float32] | None = None,
    ) -> Iterator[Step | Result]:
        """The same, yielding each `Step` when it is done and the `Result` last."""
        request = self.check(
            prompt,
            negative_prompt=negative_prompt,
            width=width,
            height=height,
            steps=steps,
            guidance=guidance,
            seed=seed,
            latents=latents,
        )
        unused = negative_prompt is not None and not request.guided
        warnings = [f"the negative prompt has no effect at guidance {request.guidance:g}"] if unused else []
        return self._generate(request, warnings)

    def check(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        seed: int | None = None,
        latents: NDArray[np.float32] | None = None,
    ) -> Request:
        """What `stream` would make of the same arguments. Raises UsageError or NumericsError; loads nothing."""
        d = self.defaults
        request = Request(
            prompt=prompt,
            negative_prompt=d.negative_prompt if negative_prompt is None else negative_prompt,
            width=d.width if width is None else width,
            height=d.height if height is None else height,
            steps=d.steps if steps is None else steps,
            guidance=d.guidance if guidance is None else guidance,
            seed=0 if seed is None else seed,
            latents=latents,
        )
        rows, columns, grid = self._sizes(request)
        flow_schedule(self.schedule_config, request.steps, grid[1] * grid[2])
        if request.latents is not None:
            self._initial(request, rows, columns)
        return request

    def prepare(self, prompts: Sequence[str]) -> None:
        """Announces `prompts`, so that the text encoder is loaded once for all that fit into TEXT_BYTES, and before the
        transformer. The rest is encoded in its turn, again as much as fits."""
        self.parts.announce(prompts)

    def headline(self) -> str:
        """One line: backend, device, precision map and model."""
        return f"{self.backend} on {self.device} · {self.precision.summary()} · {self.model_name}"

    def free_transformer(self) -> None:
        """Frees the transformer, some two thirds of all memory; the next picture loads it again."""
        self.parts.free_transformer()

    def close(self) -> None:
        """Frees everything and closes the model's files."""
        self.parts.close()

    # The run

    def _generate(self, request: Request, warnings: list[str]) -> Iterator[Step | Result]:
        # What prepare() took belongs to the picture that follows, what an abandoned one took does not.
        timing = self.parts.timing
        self.parts.timing = {stage: timing[stage] for stage in ("load text encoder", "encode") if stage in timing}
        rows, columns, grid = self._sizes(request)
        tokens = grid[1] * grid[2]
        schedule = flow_schedule(self.schedule_config, request.steps, tokens)
        initial = self._initial(request, rows, columns)
        warnings += self._warnings(request)
        for warning in warnings:
            self.notify("warning", warning)

        prompts = [request.prompt, request.negative_prompt] if request.guided else [request.prompt]
        texts = self.parts.states(prompts)
        transformer = self.parts.transformer(self._run_bytes(tokens, schedule))
        modulation = self.parts.modulation(schedule.timesteps)
        conditions = [transformer.condition(batch, [grid]) for batch in self._batches(texts, tokens)]
        x = self.engine.array(geometry.pack(initial))
        for i, sigma in enumerate(schedule.sigmas[:-1]):
            start = time.perf_counter()
            before, x = x, self._step(transformer, x, conditions, modulation, schedule, i, request.guidance)
            if not self.engine.finite(x):
                self._fail_at(transformer, before, conditions, modulation, i)
            seconds = time.perf_counter() - start
            self.parts.timing["steps"] = self.parts.timing.get("steps", 0.0) + seconds
            yield Step(index=i + 1, total=request.steps, sigma=sigma, seconds=seconds)
        latents = geometry.unpack(self.engine.numpy(x), rows, columns).astype(np.float32)
        shapes = _shapes(texts, initial, grid)
        del x, before, texts, conditions, modulation, transformer

        pixels = image.crop(image.to_uint8(self._decode(latents)[0]), request.width, request.height)
        blank = image.blank_warning(pixels)
        if blank:
            self.notify("warning", blank)
        warnings += [blank] if blank else []
        timing, self.parts.timing = self.parts.timing, {}
        yield Result(
            pixels=pixels,
            latents=latents,
            recipe=self._recipe(request, schedule, initial, warnings),
            timing=timing,
            shapes=shapes | {"pixels": str(list(pixels.shape))},
            warnings=warnings,
        )

    def _run_bytes(self, tokens: int, schedule: Schedule) -> int:
        """What a run takes besides weights: one branch of a step, and modulation that is still to be made."""
        config = self.model.transformer_config
        step = memory.step_peak(config, 1, tokens + TEXT_TOKENS)
        if self.parts.has_modulation(schedule.timesteps):
            return step
        return step + memory.modulation_bytes(config, self.precision, len(schedule.timesteps))

    def _sizes(self, request: Request) -> tuple[int, int, tuple[int, int, int]]:
        """Rows and columns of latents, and the grid of tokens (frames, rows, columns)."""
        width, height = geometry.render_size(request.width, request.height, MULTIPLE)
        scale, patch = self.model.vae_config.scale, self.model.transformer_config.patch_size
        rows, columns = height // scale, width // scale
        return rows, columns, (1, rows // patch, columns // patch)

    def _step(
        self,
        transformer: Transformer,
        x: Array,
        conditions: Sequence[Condition],
        modulation: Modulation,
        schedule: Schedule,
        i: int,
        guidance: float,
    ) -> Array:
        """x after step i: one prediction for each branch, guidance, and Euler's step."""
        velocities = [transformer.predict(x, condition, modulation, i) for condition in conditions]
        if len(velocities) == 1 and guidance > 1:
            velocities = self.engine.split(velocities[0])
        velocity = velocities[0] if len(velocities) == 1 else self.engine.guide(velocities[0], velocities[1], guidance)
        return euler_step(x, velocity, schedule.sigmas[i], schedule.sigmas[i + 1])

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

    def _initial(self, request: Request, rows: int, columns: int) -> NDArray[np.float32]:
        """The initial latents [1, C, h, w]: the seed's noise, or what was given. Raises UsageError."""
        shape = (1, self.model.vae_config.z_dim, rows, columns)
        if request.latents is None:
            return noise.normal(shape, request.seed)
        given = np.asarray(request.latents)
        if given.shape != shape:
            raise UsageError(
                f"latents of shape {list(given.shape)} do not fit: {request.width}x{request.height} needs {list(shape)}"
            )
        with np.errstate(over="ignore"):
            given = given.astype(np.float32)
        if not np.isfinite(given).all():
            raise NumericsError("the latents have non-finite values in float32")
        return given

    def _warnings(self, request: Request) -> list[str]:
        found = []
        if request.latents is None and (warning := noise.low_bits_warning(request.seed)):
            found.append(warning)
        texts = {"prompt": request.prompt} | ({"negative prompt": request.negative_prompt} if request.guided else {})
        for name, text in texts.items():
            lost = tokenizers.prompt_ids(self.parts.tokenizer, text).lost(TEXT_TOKENS)
            if lost:
                found.append(f"the {name} is cut: the model sees its first {TEXT_TOKENS} tokens, not the last {lost}")
        return found

    def _decode(self, latents: NDArray[np.float32]) -> NDArray[Any]:
        """Pixels [1, 3, H, W], about -1 to 1, all finite."""
        config = self.model.vae_config
        mean, std = (np.asarray(v, np.float32)[:, None, None] for v in (config.latents_mean, config.latents_std))
        standard = latents * std + mean
        vae = self.parts.vae()
        itemsize = BYTES[self.precision.compute_dtype("vae")]
        self.engine.release()
        h, w = latents.shape[2:]
        tile = memory.decode_tile(config, h, w, itemsize, self.engine.free_memory(), self.engine.decode_buffers)
        self.notify("stage", "decoding" if tile is None else f"decoding in tiles of {tile * config.scale} pixels")
        with self.parts.timed("decode"):
            pixels = vae.decode(standard, tile)
        if not np.isfinite(pixels).all():
            where = first_non_finite(self.engine, lambda: self.engine.array(vae.decode(standard, tile)))
            raise NumericsError(f"vae: non-finite value at {where}; {self.parts.way_out('vae')}")
        return pixels

    def _fail_at(
        self, transformer: Transformer, x: Array, conditions: Sequence[Condition], modulation: Modulation, i: int
    ) -> None:
        """Runs step i again with probes and raises NumericsError that names component, block and operation."""
        for condition in conditions:
            where = first_non_finite(self.engine, lambda c=condition: transformer.predict(x, c, modulation, i))  # type: ignore[misc]
            if where:
                raise NumericsError(
                    f"transformer, step {i + 1}: non-finite value at {where}; {self.parts.way_out('transformer')}"
                )
        raise NumericsError(f"step {i + 1}: non-finite latents after guidance; lower --guidance")

    def _recipe(
        self, request: Request, schedule: Schedule, initial: NDArray[np.float32], warnings: list[str]
    ) -> Recipe:
        components = {name: self.precision.compute_dtype(name) for name in ("text", "transformer", "vae")}
        return Recipe(
            format=FORMAT,
            version=__version__,
            model=self.model_name,
            backend=self.backend,
            device=self.device,
            precision={"name": self.precision.name} | components | self.precision.places(),
            versions=self.engine.versions() | {"numpy": np.__version__},
            rng="torch-cpu" if request.latents is None else "given",
            prompt=request.prompt,
            negative_prompt=request.negative_prompt if request.guided else "",
            seed=request.seed,
            width=request.width,
            height=request.height,
            steps=request.steps,
            guidance=request.guidance,
            sampler="euler",
            sigmas_sha256=noise.sha256(np.asarray(schedule.sigmas, np.float32)),
            noise_sha256=noise.sha256(initial),
            tf32=self.tf32,
            warnings=list(warnings),
            created=datetime.now(UTC).replace(microsecond=0).isoformat(),
        )


def _shapes(texts: Sequence[Array], initial: NDArray[np.float32], grid: tuple[int, int, int]) -> dict[str, str]:
    return {
        "text": ", ".join(str(list(text.shape)) for text in texts),
        "latents": str(list(initial.shape)),
        "tokens": f"{grid[1]} x {grid[2]} = {grid[1] * grid[2]}",
    }


def _ignore(kind: str, text: str) -> None:
    """Where nobody listens."""
