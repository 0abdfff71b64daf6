"""The pipeline from a prompt to an image: the only denoise loop of the project, for every family and backend."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Never, Self, Unpack, cast, overload

import numpy as np

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import NumericsError, QwenimgError, UsageError, out_of_memory
from qwenimg.common.memory.estimate import Estimate
from qwenimg.common.numbers import noise
from qwenimg.common.numbers.noise import TorchCPUGenerator
from qwenimg.common.parts import tiny_vae
from qwenimg.common.pictures.pixels import blank_warning
from qwenimg.common.pipeline import finish, masked_area, outpainting, preview, rewriting, second_pass, start
from qwenimg.common.pipeline.controls import Controls
from qwenimg.common.pipeline.fair_lock import FairLock
from qwenimg.common.pipeline.fallback import CAUSES, Fallback
from qwenimg.common.pipeline.fit import FitCheck, with_inputs
from qwenimg.common.pipeline.masked_area import MaskedArea
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel, PreparedRun
from qwenimg.common.pipeline.models.inputs import NO_OTHERS, OtherModels
from qwenimg.common.pipeline.result import Result, Step, recorded_runtime
from qwenimg.common.pipeline.steps.inpaint import Initial, Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment
from qwenimg.common.pipeline.steps.step_cache import StepCache
from qwenimg.common.precision.precision import Precision
from qwenimg.common.prompts.wildcards import TEMPLATES, Wildcards
from qwenimg.common.request import call_options, coerce, few_steps, foreign_names
from qwenimg.common.request.call_types import CallOptions
from qwenimg.common.request.embeddings import Embeddings
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.loras import Key, Loras
from qwenimg.common.request.option import recorded
from qwenimg.common.request.recipe import Recipe
from qwenimg.common.request.request import OPTIONS, Defaults, Request, random_seed, request_of
from qwenimg.common.runtime import compiling
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.compiling import Decision
from qwenimg.common.runtime.engine import Array
from qwenimg.common.runtime.residents import DENOISERS
from qwenimg.common.sampling import table


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """The end of a pass."""

    latents: Latents
    steps: int  # done so far
    shapes: dict[str, str]
    cache: StepCache | None


class Pipeline:
    """A model on a backend. Call it for an image, or `stream` it for the steps as well.

    It draws one image at a time: meanwhile, every other call, of any thread, raises PipelineBusy at once, or with
    `wait` waits in line for its turn. A stream that ends, fails, is closed or is dropped makes it free again. `with`
    closes it at the end of the block.
    """

    def __init__(
        self,
        model: DiffusionModel,
        *,
        name: str,
        defaults: Defaults,
        family: str = "",
        loras: Loras | None = None,
        others: OtherModels = NO_OTHERS,
        tf32: bool = False,
        fallback: bool = False,
        options: Mapping[str, Any] | None = None,
        checkpoint: Checkpoint | None = None,
        find_loras: Callable[[Sequence[Lora]], tuple[Lora, ...]] = tuple,
        hashes: Callable[[], Mapping[str, str]] = dict,
        controls: Controls | None = None,
        wildcards: Wildcards | None = None,
        upscalers: second_pass.Upscalers | None = None,
        embeddings: Embeddings | None = None,
        rewriters: rewriting.Rewriters | None = None,
        preview_vae: Component | None = None,
        advise: Callable[[Request], list[str]] = lambda request: [],
    ):
        """Create a pipeline of an opened model. family: its family's name. loras: the model's LoRAs. others: models
        that messages name. fallback: continue under the next wider policy if a value overflows. options: entries of
        recipes; `hashes` returns the entries that need the files' contents. checkpoint: the weights, without LoRAs.
        find_loras: replaces names of LoRAs by paths. controls: the control networks. wildcards: the choices in prompts.
        upscalers: for second passes. embeddings: of its prompts. rewriters: of its prompts, too. preview_vae: makes
        previews. advise: returns more warnings about a request."""
        self.options, self.checkpoint = dict(options or {}), checkpoint
        self._find_loras, self._hashes = find_loras, hashes
        self.model, self.model_name, self.family, self.defaults = model, name, family, defaults
        self.runtime, self.engine, self.notify = model.runtime, model.runtime.engine, model.runtime.notify
        self.backend, self.device = self.engine.name, self.engine.device
        self.tf32 = tf32  # True: float32 products are rounded to fewer digits on this device
        self.fallback = Fallback(model, wanted=fallback, tf32=tf32)
        self.loras, self.controls, self.others = loras or Loras(tuple), controls or Controls(), others
        self.upscalers, self.embeddings = upscalers or second_pass.Upscalers(), embeddings or Embeddings()
        self.wildcards, self._advise = wildcards or Wildcards(), advise
        self.rewriters = rewriters or rewriting.Rewriters()
        self._adapted: Key | None = ()  # the LoRAs in the model now; None after a change that failed
        self._lock: FairLock[Step | Result] = FairLock()
        self._fit = FitCheck(model)
        self._preview: preview.PreviewMap | preview.TinyPreview | None = None
        self._preview_vae = preview_vae

    def __repr__(self) -> str:
        return f"<Pipeline {'closed · ' if self._lock.closed else ''}{self.headline()}>"

    @property
    def precision(self) -> Precision:
        """The policy of the next image; `fallback` may have changed it."""
        return self.runtime.precision

    # Public

    @overload
    def __call__(self, prompt: str, *, wait: bool | float = False, **asked: Unpack[CallOptions]) -> Result: ...

    @overload
    def __call__(
        self, prompt: list[str] | tuple[str, ...], *, wait: bool | float = False, **asked: Unpack[CallOptions]
    ) -> list[Result]: ...

    @call_options.described
    def __call__(
        self, prompt: str | list[str] | tuple[str, ...], *, wait: bool | float = False, **asked: Unpack[CallOptions]
    ) -> Result | list[Result]:
        """Return an image of `prompt`, or of a list of prompts a list of images, each with the options that are given;
        without a seed each has its own. `wait`: wait in line while the pipeline draws for another thread; a number
        limits the seconds. Raises QwenimgError; UnknownOption, which is a TypeError too, for other keywords."""
        if isinstance(prompt, list | tuple):
            return self._each(prompt, wait, asked)
        *_, result = self.stream(prompt, wait=wait, **asked)
        assert isinstance(result, Result)
        return result

    @call_options.described
    def stream(
        self, prompt: str, *, wait: bool | float = False, **asked: Unpack[CallOptions]
    ) -> Generator[Step | Result, None, None]:
        """Yield each `Step` when it is done, and the `Result` last; arguments as for a call.

        The pipeline is taken from the first `next` until the stream ends or is closed; `wait` waits in that `next`."""
        timeout = coerce.timeout(wait)
        if not timeout:
            self._lock.check_free()
        converted, notes = coerce.read_pictures(asked)
        request = self.check(prompt, **cast(CallOptions, converted))
        notes += start.picture_warnings(self.model, request, converted, coerce.noise_hashes(asked))
        notes += start.no_effects(self.model, request, asked, self.options)
        return self._lock.run(self._generate(request, notes), timeout)

    @call_options.described
    def check(self, prompt: str, **asked: Unpack[CallOptions]) -> Request:
        """Return the request of a call. Loads nothing. Raises UsageError and NumericsError."""
        call_options.check_names(asked)
        values = self.resolve(coerce.read_pictures(asked)[0])
        values = outpainting.on_canvas(values)
        part, sides = values.get("only_masked") is not None, (values.get("width"), values.get("height"))
        values["width"], values["height"] = self.defaults.sides(*sides, start.given_images(values), only_masked=part)
        values["seed"] = values.get("seed", random_seed())
        usual = self.defaults.values(masked="mask" in values)
        chosen = self.wildcards.chosen(values | {"prompt": prompt}, values["seed"])
        whole = self.controls.placed(self.controls.prompted(request_of(usual | chosen)))
        has_text = self.controls.has_text(whole)
        whole = self.upscalers.given(self.model.inputs.checked(whole, self.model_name, self.others, has_text))
        whole = self.rewriters.given(self.model, self.embeddings.given(whole))
        self.controls.check(whole)
        if self.model.inputs.encodes(whole):
            self.model.vae.check_encodes()
        second_pass.check(self.model, whole)
        request = masked_area.split(whole).drawn
        sampler = self.model.plan(request).sampler
        if request.caches and table.find(sampler).adaptive:
            raise UsageError(f"step-cache: {sampler} chooses its steps by what calls of the model differ; give another")
        self.loras.check(request.loras)
        self.loras.deltas(*self.controls.loras(request))  # only for its errors, before anything is loaded
        start.check_size(self.model, request)
        if request.latents is not None:
            start.noise(self.model, request, TorchCPUGenerator(request.seed))  # only for its errors
        return whole

    def resolve(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call with the settings of its `few_steps`: steps, sampler, schedule, guidance and
        LoRA, unless the call gives them itself. Raises UsageError."""
        self._lock.check_open()
        options = few_steps.resolve(self.model.guidance.resolve(call_options.converted(asked)), self.model.few_steps)
        return options | {"lora": self._find_loras(options["lora"])} if options.get("lora") else options

    @call_options.described
    def estimate(self, prompt: str, **asked: Unpack[CallOptions]) -> Estimate:
        """Return the memory and time of the image. Loads no weight. Raises as `check` does, and DoesNotFit."""
        self._lock.check_process()
        request = masked_area.split(self.check(prompt, **asked)).drawn
        return self._fit.estimate(request, self._with_inputs(request))

    def prepare(
        self,
        prompts: Sequence[str],
        clip_skip: int = 0,
        lora: coerce.Loras = (),
        lora_mode: str = "auto",
        image: coerce.Pictures | None = None,
        embedding: coerce.Embeddings = (),
        rewrite: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Announce `prompts`, so that the text encoder is loaded once, before the transformer, for as many as fit into
        memory. The rest is encoded when needed, again as many as fit. `lora`, `lora_mode`: of the first image. `image`:
        the picture of all prompts, for a model whose texts depend on it. `embedding`: files that the prompts name.
        `rewrite`: further prompts, each with the value of that option, which are rewritten together first."""
        texts = call_options.checked_prompts(prompts)
        request = call_options.checked_request(image, clip_skip, self.model.inputs.alpha)
        added, mode, files = call_options.checked(lora=lora, lora_mode=lora_mode, embedding=embedding)
        added, seeds = self._find_loras(added), call_options.checked_rewrites(rewrite)

        def announced() -> None:
            self.adapt(added, mode)
            self.model.check_weights()
            inversions = self.embeddings.of_prompts(texts, files)
            asked = [replace(request, prompt=text, rewrite=seed, loras=added) for text, seed in seeds.items()]
            made = rewriting.rewritten(self.model, [self.rewriters.given(self.model, one) for one in asked])
            plain = [replace(request, prompt=text, inversions=inversions) for text in texts]
            self.model.announce([*made, *plain])

        with self._lock.acquired(), self._in_memory():
            self.fallback.retried(announced)

    def fit_preview(self) -> None:
        """Prepare `Step.preview`: by the tiny VAE that is here, or by a map from latents to colours, which is read if
        this machine has it, else fitted to one small picture of noise. From then on the map learns from each picture.
        Raises QwenimgError."""
        with self._lock.acquired(), self._in_memory():
            if self._preview is None:
                self.plan_preview()
                tiny = self.model.preview_vae
                if tiny is None:
                    vae = None if self.checkpoint is None else self.checkpoint.components.get("vae")
                    self._preview = preview.fitted(self.model, vae)
                else:
                    self._preview = preview.TinyPreview(self.model, tiny, lambda: self._fit.spare)

    def plan_preview(self) -> None:
        """Count previews by the tiny VAE that is here in the memory of images from now on. Loads nothing."""
        self._lock.check_open()
        vae = self.model.checkpoint.components.get("vae")
        own = vae if vae is not None and tiny_vae.is_tiny(vae) else None
        self.model.preview_vae = None if self.engine.group is not None else self._preview_vae or own

    def headline(self) -> str:
        """Return one line: backend, device, precision, model, and its weights' bytes in files and in memory at once."""
        line = f"{self.backend} on {self.device} · {self.precision.summary()} · {self.model_name}"
        if self.checkpoint is None:
            return line
        held, stored = self.checkpoint.largest(self.precision), self.checkpoint.file_bytes
        return f"{line}, weights {size_text(stored)} in files, {size_text(held)} at a time"

    def compile(self, mode: str = "auto", seconds: float = 0.0) -> Decision:
        """Decide whether the denoiser is compiled when it is next loaded: `on`, `off`, or by the preset and by the time
        that it would save in a run whose steps take about `seconds`. Raises UsageError."""
        self._lock.check_open()
        wanted, kinds = self.runtime.choice.wishes.compiled, compiling.kinds(self.checkpoint)
        decision = compiling.decide(mode, self.engine.compiler(), seconds, kinds=kinds, wanted=wanted)
        self.runtime.compiles = decision.on
        return decision

    def free_transformer(self) -> None:
        """Free the transformer, some two thirds of all memory; the next image loads it again."""
        with self._lock.acquired():
            self.model.residents.free(DENOISERS)

    def close(self, *, wait: bool | float = False) -> None:
        """Free everything and close the model's files. Every later call but `close` and `headline` raises UsageError,
        and so does every call that waits in line. `wait`: for the image that is being drawn, as in a call."""
        with self._lock.closing(coerce.timeout(wait)) as is_open:
            if is_open:
                self.model.close()
                self.loras.close()
                self.controls.close()
                self.upscalers.close()
                self.rewriters.close()
                if self._preview_vae is not None:
                    self._preview_vae.plan.close()

    def __enter__(self) -> Self:
        self._lock.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        """Close the pipeline, once the image of another thread is done; a stream of this thread ends here."""
        self._lock.end_mine()
        self.close(wait=True)

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> Never:
            raise AttributeError(foreign_names.no_attribute("Pipeline", name), name=name, obj=self)

    # The run

    def _each(self, prompts: Sequence[str], wait: bool | float, asked: CallOptions) -> list[Result]:
        """Return an image of each prompt. All are checked before the first is drawn."""
        texts = call_options.checked_prompts(list(prompts))
        if not texts:
            raise UsageError("prompt is an empty list; give one or more texts")
        for text in texts:
            self.check(text, **asked)
        return [self(text, wait=wait, **asked) for text in texts]

    def _generate(self, request: Request, notes: Sequence[str]) -> Generator[Step | Result, None, None]:
        area = masked_area.split(request, self.model.inputs.mask.put_back)
        plan = self.model.plan(area.drawn)
        about = *notes, *start.warnings(request, plan), *self.model.warnings(area.drawn)
        about += (
            *self.controls.warnings(request, plan.steps),
            *self.embeddings.warnings(request),
            *self._advise(request),
        )
        try:
            with self.notify.of_picture(), self._in_memory():
                for warning in about:
                    self.notify("warning", warning)
                for line in self.embeddings.lines(area.drawn):
                    self.notify("stage", line)
                yield from self._with_fallback(area)
        finally:  # a run that failed or was abandoned leaves no times to the next
            self.runtime.clock.clear()

    def _with_fallback(self, area: MaskedArea) -> Iterator[Step | Result]:
        """Yield the run's events. It starts again under the next wider policy if a value overflows, with `fallback`."""
        while True:
            try:
                yield from self._run(area)
                return
            except CAUSES as error:
                wider = self.fallback.next_policy(error)
            self.fallback.adopt(wider)

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        """Replace a failed allocation's error in the context by DoesNotFit with the numbers of the last plan."""
        try:
            yield
        except Exception as error:
            if isinstance(error, QwenimgError) or not out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold arrays
            self.model.residents.free(DENOISERS)
            raise self._fit.ran_out() from None

    def _run(self, area: MaskedArea) -> Iterator[Step | Result]:
        model, request = self.model, area.drawn
        self.controls.give(model, request)
        self._fit.check(request, self._with_inputs(request))
        self.adapt(*self.controls.loras(request))
        model.residents.begin()
        model.check_weights()
        request = rewriting.announced(model, request)
        generator = TorchCPUGenerator(request.seed)
        initial = start.initial_state(model, request, generator)
        first, *more = second_pass.passes(model.inputs.described(request))
        plan, total = model.plan(first), second_pass.steps(model, request)
        drawn = yield from self._sampled(first, plan, initial, generator, total)
        request = first
        for request in more:
            picture = second_pass.enlarged(model, first, request, drawn.latents)
            generator = TorchCPUGenerator(request.seed)
            again = start.initial_state(model, request, generator, picture)
            drawn = yield from self._sampled(request, model.plan(request), again, generator, total, drawn.steps)
        latents = drawn.latents

        decoded = self._decoded(request, latents)
        if self._preview is not None and drawn.steps > 1:  # one step leaves latents that are no picture
            self._preview.learn(finish.frames(latents), decoded)
        pixels, layers = finish.images(
            request, decoded, layered=len(latents) > 1, origin=self.model.inputs.origin(request)
        )
        if blank := blank_warning(pixels):
            self.notify("warning", blank)
        warnings = self.notify.warnings
        yield Result(
            pixels=area.completed(pixels),
            layers=layers,
            latents=latents,
            recipe=self._recipe(
                replace(area.whole, prompt=request.prompt, rewritten=request.rewritten),
                plan,
                initial.noise,
                warnings,
                drawn.cache,
            ),
            timing=dict(self.runtime.clock.seconds),
            shapes=drawn.shapes | {"latents": str(list(latents.shape)), "pixels": str(list(pixels.shape))},
            warnings=warnings,
            control_pictures=initial.control_pictures,
        )

    def _sampled(
        self,
        request: Request,
        plan: SamplingPlan,
        initial: Initial,
        generator: TorchCPUGenerator,
        total: int,
        done: int = 0,
    ) -> Generator[Step, None, Sampled]:
        """Yield the steps of one pass, and return its latents. done: the steps before it, of `total` in all."""
        model, shape = self.model, start.latent_shape(self.model, request)
        cache = StepCache(self.engine, request) if request.caches and "step_cache" in self.model.options else None
        with model.prepare(request, plan, shape) as run:
            x, before = run.array(start.first(plan, initial)), done
            seen = -(-request.height // model.scale), -(-request.width // model.scale)
            for i, segment in enumerate(plan.segments):
                at = done - before
                if segment.shape is not None:
                    seen_before = (start.last(run.latents(x), plan.segments[i - 1], initial),)
                    initial = Initial(noise=generator.normal(segment.shape), references=seen_before)
                    x = run.array(initial.noise * np.float32(segment.schedule.initial))
                for moved, denoised, sigma, seconds in self._walk(run, segment, x, initial, generator, at, cache):
                    x, done = moved, done + 1
                    self.runtime.clock.add("steps", seconds)
                    read, most = partial(run.latents, x), max(total, done)
                    see = partial(preview.seen, self._preview, partial(run.latents, denoised), *seen)
                    if segment is not plan.segments[-1] and plan.segments[-1].shape is not None:
                        see = partial(preview.hidden, *seen)
                    size = request.width, request.height
                    yield Step(index=done, total=most, sigma=sigma, seconds=seconds, size=size, read=read, see=see)
            latents = start.last(run.latents(x), plan.segments[-1], initial)
            del x
            if cache is not None:
                cache.free()
            return Sampled(latents=latents, steps=done, shapes=dict(run.shapes), cache=cache)

    def _decoded(self, request: Request, latents: Latents) -> finish.Decoded:
        """Return the values of each image. Decoding falls back alone only if the VAE has not encoded for it too."""
        decoded = partial(finish.decoded, self.model.vae, latents)
        return decoded() if self.model.inputs.encodes(request) else self.fallback.retried(decoded)

    def _with_inputs(self, request: Request) -> DiffusionModel:
        return with_inputs(self.model, self.loras, self.controls, request, self._adapted)

    def adapt(self, lora: coerce.Loras = (), lora_mode: str = "auto") -> None:
        """Replace the model's LoRAs, if they differ, as each picture does by its own. Raises ModelError and
        UsageError."""
        self._lock.check_open()
        loras, mode = call_options.checked(lora=lora, lora_mode=lora_mode)
        key = self.loras.key(loras, mode)
        if key == self._adapted:
            return
        deltas = self.loras.deltas(loras, mode)
        self._adapted = None
        self.model.adapt(deltas)
        self._adapted = key
        for line in self.loras.lines(loras):
            self.notify("stage", line)

    def _walk(
        self,
        run: PreparedRun,
        segment: Segment,
        x: Array,
        initial: Initial,
        generator: TorchCPUGenerator,
        done: int,
        cache: StepCache | None,
    ) -> Iterator[tuple[Array, Array, float, float]]:
        """Yield, after each step of `segment`, x, the denoised latents, the noise level at its start, its seconds."""
        denoiser, sigmas, state = run.denoiser(segment, initial), segment.schedule.sigmas, None
        denoiser.cache = cache
        steps = segment.solver(x, segment.schedule, denoiser, lambda: run.array(generator.normal(initial.noise.shape)))
        for i in count():
            self._lock.check_process()  # a stream that the parent process began
            begun = time.perf_counter()
            try:
                x = steps.send(state)
            except NumericsError:  # from a sampler that reads x itself
                raise denoiser.explain(done + i + 1) from None
            except StopIteration:
                return
            if not self.engine.finite(x):
                raise denoiser.explain(done + i + 1)
            seconds = time.perf_counter() - begun
            if cache is not None:
                cache.timed(seconds)
            state = denoiser.stepped(x, i)
            yield state, denoiser.latest, sigmas[min(i, len(sigmas) - 2)], seconds

    # Warnings and the recipe

    def _recipe(
        self, request: Request, plan: SamplingPlan, initial: Latents, warnings: list[str], cache: StepCache | None
    ) -> Recipe:
        rng = "torch-cpu" if request.latents is None else "given"
        about = {"model": self.model_name, "rng": rng, **recorded_runtime(self.runtime)}
        asked = recorded(OPTIONS.values(), request.value, start.met(self.model, request, self.options))
        asked |= {"sampler": plan.sampler, "schedule": plan.schedule} | self.controls.recorded(request)
        asked |= self.loras.recorded(request.loras) | second_pass.recorded(request)
        asked |= self.embeddings.recorded(request, guided=self.model.guidance.is_on(request))
        asked |= {"outpaint": OPTIONS["outpaint"].plain(request.outpaint)} if request.outpaint else {}
        asked |= rewriting.recorded(request)
        asked |= {name: text for name in TEMPLATES.values() if (text := getattr(request, name))}
        if not self.model.guidance.is_on(request):  # it was not used
            asked["negative_prompt"] = ""
            asked.pop(TEMPLATES["negative_prompt"], None)
        if cache is not None:
            asked |= cache.recorded()
            self.notify("stage", f"step cache: {asked['step_cache_effect']}")
        hashes: dict[str, Any] = {
            "sigmas_sha256": noise.sha256(np.asarray(plan.sigmas, np.float32)),
            "noise_sha256": noise.sha256(initial),
            "tf32": self.tf32,
            "warnings": warnings,
            "created": datetime.now(UTC).replace(microsecond=0).isoformat(),
        }
        hashes |= {**start.image_hashes(request), **self._hashes(), **self.loras.hashes(request.loras)}
        return cast(Recipe, about | asked | hashes | self.options)
