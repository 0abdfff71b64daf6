"""The class of which each pipeline's class is made: it opens a model and draws as diffusers' class of that name."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeAlias, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import NDArray

import qwenimg
from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError, QwenimgError, UsageError
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.base.text import by_name, clean
from qwenimg.common.numbers.noise import TorchCPUGenerator
from qwenimg.common.numbers.packing import image as from_tokens
from qwenimg.common.numbers.packing import unpack
from qwenimg.common.parts.texts.padded_texts import T5Texts
from qwenimg.common.pipeline import start
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.result import Result, Step
from qwenimg.common.sampling.table import SAMPLERS
from qwenimg.diffusers import generators, keywords, opening, pictures, pipelines, schedulers
from qwenimg.diffusers.adapters import Adapters
from qwenimg.diffusers.pipelines import Row

if TYPE_CHECKING:
    from pathlib import Path

    from qwenimg.common.request.coerce import Pictures
    from qwenimg.diffusers.call_types import CallKeywords, LoadKeywords, Tensor

# Methods that change nothing here, and why
NO_OPS = by_name({
    "weights are loaded when they are needed, freed after, and streamed where they do not fit: max_memory='8GB' in "
    "from_pretrained sets a limit":
        "enable_model_cpu_offload enable_sequential_cpu_offload enable_group_offload maybe_free_model_hooks "
        "remove_all_hooks reset_device_map free_model_hooks",
    "the fastest attention whose memory fits is chosen by itself":
        "enable_attention_slicing disable_attention_slicing enable_xformers_memory_efficient_attention "
        "disable_xformers_memory_efficient_attention set_attention_backend set_attn_processor fuse_qkv_projections "
        "unfuse_qkv_projections set_use_memory_efficient_attention_xformers",
    "the VAE takes tiles where memory asks for them":
        "enable_vae_slicing disable_vae_slicing enable_vae_tiling disable_vae_tiling enable_tiling disable_tiling "
        "enable_slicing disable_slicing",
    "there is no progress bar: pass callback_on_step_end": "set_progress_bar_config enable_progress_bar",
    "the precision is chosen by part: precision= in from_pretrained": "upcast_vae half float",
    "compile='on' in from_pretrained compiles": "compile compile_repeated_blocks",
    "a memory format and gradients are not chosen here": "requires_grad_ eval train",
})  # fmt: skip
# Methods that would do something, and what does it here
MISSING = by_name({
    "FreeU is not built": "enable_freeu disable_freeu",
    "`qwenimg convert MODEL FOLDER` writes a model": "save_pretrained save_lora_weights push_to_hub",
    "a call encodes its prompts and decodes itself": "encode_prompt prepare_latents decode_latents check_inputs",
    "the step cache is step_cache=0.1 of a call": "enable_cache disable_cache",
})  # fmt: skip
_FRESH = "give a list of fresh torch.Generator().manual_seed(n), one for each picture, for a recipe that does"
PARTS = ("unet", "transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
Shape: TypeAlias = tuple[int, ...]
Array: TypeAlias = NDArray[np.float32]
Picture = TypeVar("Picture")
"""A PIL image, or a list of them for a model that makes layers."""
Images = TypeVar("Images", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Output(Generic[Images]):
    """The pictures of a call. `results` has each with its recipe and its seed, to save it: results[0].save(path)."""

    images: Images  # a list of PIL images, or of such lists for layers; an array [N, H, W, 3] in 0..1 for "np"
    results: list[Result]
    nsfw_content_detected: None = None

    def __getitem__(self, index: int) -> Any:
        return (self.images, self.nsfw_content_detected)[index]


class DrawingPipeline(Generic[Picture]):
    """A model on a backend, called with the keywords of diffusers."""

    name: ClassVar[str] = ""
    row: ClassVar[Row | None] = None

    def __init__(self, pipe: Pipeline, adapters: Adapters | None = None) -> None:
        """Create it around an opened pipeline; `from_pretrained` opens one."""
        if not isinstance(pipe, Pipeline):
            raise UsageError(f"{self.name} is opened by from_pretrained(MODEL), or made of qwenimg.load(MODEL)")
        self._pipe, self._adapters = pipe, adapters or Adapters()
        self._scheduler: Any = None  # as it was set: ours, or one of diffusers
        self._warned: set[str] = set()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **asked: Unpack[LoadKeywords]) -> Self:
        """Open a folder, a known model's name or a pulled hub id. Keywords: those of diffusers and of `qwenimg.load`.
        Raises QwenimgError."""
        options, scheduler = opening.load_options(cls.name, pretrained_model_name_or_path, asked)
        pipe = qwenimg.load(**options)
        try:
            made = cls.from_pipe(pipe)
            if scheduler is not None:
                made.scheduler = scheduler
        except BaseException:
            pipe.close()
            raise
        return made

    @classmethod
    def from_single_file(cls, pretrained_model_link_or_path: str | Path, **asked: Unpack[LoadKeywords]) -> Self:
        """Open a model in one file, as `from_pretrained`."""
        return cls.from_pretrained(pretrained_model_link_or_path, **asked)

    @classmethod
    def from_pipe(cls, pipe: DrawingPipeline[Any] | Pipeline, **asked: Any) -> Self:
        """Return a pipeline of this class with the model of another one, which both then use."""
        if asked:
            raise UsageError(
                f"{cls.name}.from_pipe takes no {clean(next(iter(asked)), 40)}; give it to from_pretrained"
            )
        adapters, inner = (pipe._adapters, pipe._pipe) if isinstance(pipe, DrawingPipeline) else (None, pipe)
        if not isinstance(inner, Pipeline):
            raise UsageError(f"{cls.name}.from_pipe: {clean(type(pipe).__name__, 60)}; give a pipeline of qwenimg")
        try:
            name, row = pipelines.row_for(cls.name, _own_class(inner), inner.family)
        except StopIteration:
            raise ModelError(f"{cls.name}: {inner.model_name} has no pipeline for this task here") from None
        if row.family != inner.family:
            fitting = [title for title, one in pipelines.ROWS.items() if one.family == inner.family]
            raise ModelError(
                f"{cls.name}: {clean(inner.model_name, 60)} is another model; take {', '.join(fitting[:6])}"
            )
        made: Any = pipeline_class(name)(inner, adapters)
        return made  # type: ignore[no-any-return]

    # A call

    @overload
    def __call__(
        self,
        *positional: str | Sequence[str] | Pictures | Tensor,
        output_type: Literal["np"],
        return_dict: Literal[True] = True,
        **asked: Unpack[CallKeywords],
    ) -> Output[Array]: ...

    @overload
    def __call__(
        self,
        *positional: str | Sequence[str] | Pictures | Tensor,
        output_type: Literal["pil"] | None = None,
        return_dict: Literal[True] = True,
        **asked: Unpack[CallKeywords],
    ) -> Output[list[Picture]]: ...

    @overload
    def __call__(
        self,
        *positional: str | Sequence[str] | Pictures | Tensor,
        output_type: Literal["np"],
        return_dict: Literal[False],
        **asked: Unpack[CallKeywords],
    ) -> tuple[Array, None]: ...

    @overload
    def __call__(
        self,
        *positional: str | Sequence[str] | Pictures | Tensor,
        output_type: Literal["pil"] | None = None,
        return_dict: Literal[False],
        **asked: Unpack[CallKeywords],
    ) -> tuple[list[Picture], None]: ...

    def __call__(self, *positional: Any, **asked: Any) -> Any:
        """Draw, with the keywords of diffusers' class of this name, and the options of `qwenimg.load(...)`'s call.
        Raises QwenimgError; UnknownOption, which is a TypeError too, for other keywords."""
        row = self.row
        assert row is not None
        given = keywords.named(self.name, row, positional, asked)
        given |= {name: pictures.in_8_bits(name, given[name]) for name in pictures.NAMES if name in given}
        prompts, negatives = self._prompts(row, given)
        options = self._options(row, given)
        finished = _finisher(given)
        shape = partial(self._noise_shape, prompts[0], options)
        runs = generators.starts(given.get("generator"), len(prompts), shape)
        if any("latents" in run for run in runs):
            self._warn("generator", "generator: this noise has no seed, so that no recipe draws it again; " + _FRESH)
        if (latents := given.get("latents")) is not None:
            latents = _array(latents)
            if len(prompts) > 1 and len(latents) != len(prompts):
                raise UsageError(f"latents: {len(latents)} for {len(prompts)} pictures; give noise for each")
            runs = [
                run | {"latents": self._latents(latents[i : i + 1], prompts[0], options)}
                for i, run in zip(range(len(prompts)), runs, strict=True)
            ]
        if len(set(prompts)) > 1:
            self._pipe.prepare(list(dict.fromkeys(prompts)), **{k: options[k] for k in _ANNOUNCED if k in options})
        results = [
            self._draw(prompt, options | run | ({} if negative is None else {"negative_prompt": negative}), given)
            for prompt, negative, run in zip(prompts, negatives, runs, strict=True)
        ]
        output = Output(images=finished(results), results=results)
        return output if given.get("return_dict", True) else (output.images, None)

    def _prompts(self, row: Row, given: Mapping[str, Any]) -> tuple[list[str], list[str | None]]:
        """Return the prompt and the negative prompt of each picture."""
        prompt, each = given.get("prompt", ""), given.get("num_images_per_prompt", 1)
        if isinstance(each, bool) or not isinstance(each, int) or each < 1:
            raise UsageError(f"num_images_per_prompt is {clean(each, 40)}; expected 1 or more")
        prompts = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
        if not prompts or not all(isinstance(one, str) for one in prompts):
            raise UsageError(f"prompt is {clean(prompt, 40)}; give a text, or a list of texts")
        negative = given.get("negative_prompt")
        negatives = list(negative) if isinstance(negative, list | tuple) else [negative] * len(prompts)
        if len(negatives) != len(prompts):
            raise UsageError(f"{len(negatives)} negative prompts for {len(prompts)} prompts; give one for each")
        if not row.negative and negative is not None:
            raise UsageError(f"{self.name} takes no negative_prompt")
        if row.by_negative_prompt and "negative_prompt" not in keywords.guidance(row, given, 1.0):
            negatives = [None] * len(prompts)
        # diffusers: zeros for SDXL without a negative prompt, and the states of the empty text for ""
        negatives = [" " if one == "" and "XL" in self.name else one for one in negatives]
        return [one for one in prompts for _ in range(each)], [one for one in negatives for _ in range(each)]

    def _options(self, row: Row, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that all pictures of a call have."""
        model, pipe = self._pipe.model, self._pipe
        chosen = keywords.options(self.name, row, given, _prompt_tokens(pipe, row))
        off = min(model.guidance.off, 1.0)
        guided = keywords.guidance(row, given, off)
        guided.pop("negative_prompt", None)
        chosen = guided | chosen
        if row.by_negative_prompt and row.guidance is None and "guidance_scale" in given:
            self._warn("guidance_scale", f"guidance_scale has no effect in {self.name}; true_cfg_scale is its guidance")
        if row.by_negative_prompt and row.guidance is not None and pipe.defaults.guidance == 0:
            chosen.pop("guidance", None)  # a model that takes none, such as FLUX.1 schnell
        if not row.by_negative_prompt and guided["guidance"] > off:
            chosen.setdefault("negative_prompt", "")
        if chosen.get("clip_skip") and row.family == "stable-diffusion" and guided["guidance"] > 1:
            self._warn("clip_skip", "clip_skip is for the negative prompt too here, as in other programs")
        image = chosen.get("image")
        if isinstance(image, list | tuple) and row.task in ("image", "mask"):
            raise UsageError(f"{self.name}: one image for a call; call once for each")
        if row.task in ("image", "mask") and image is None:
            raise UsageError(f"{self.name} needs image=, a PIL image or the path of a file")
        if row.task == "mask" and "mask" not in chosen:
            raise UsageError(f"{self.name} needs mask_image=, a PIL image or the path of a file")
        if row.task == "text" and image is not None:
            raise UsageError(f"{self.name} takes no image; take a class with Img2Img or Edit in its name")
        chosen.update(self._sides(row, chosen))
        if loras := self._adapters.loras(keywords.lora_scale(given)):
            chosen["lora"] = loras
        if self._adapters.embeddings and "embedding" not in chosen:
            chosen["embedding"] = list(self._adapters.embeddings)
        if self._scheduler is not None:
            own = None if pipe.checkpoint is None else pipe.checkpoint.scheduler
            sampling, note = schedulers.options(self._scheduler, own)
            chosen = sampling | chosen
            if note:
                self._warn("scheduler", note)
        return chosen

    def _sides(self, row: Row, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return width and height as diffusers chooses them."""
        defaults, image = self._pipe.defaults, chosen.get("image")
        if row.image_size and image is not None:
            width, height = _size(image[0] if isinstance(image, list | tuple) and image else image)
            multiple, area = (8, width * height) if row.side is None else (16, row.side**2)
            scale = min(1.0, math.sqrt(area / (width * height)))
            usual = {"width": int(width * scale), "height": int(height * scale)}
            usual = {name: max(multiple, side - side % multiple) for name, side in usual.items()}
        elif row.side is None and (image is None or row.task == "edit"):
            usual = {}
        else:
            usual = {"width": row.side or defaults.width, "height": row.side or defaults.height}
        return {name: side for name, side in usual.items() if name not in chosen}

    def _noise_shape(self, prompt: str, options: Mapping[str, Any]) -> Shape | None:
        """Return the shape of a picture's noise; None if more random numbers are drawn."""
        pipe = self._pipe
        request = pipe.check(prompt, **options)
        sampler = pipe.model.plan(request).sampler
        if SAMPLERS[sampler].stochastic or (request.image is not None and pipe.model.vae.samples):
            return None
        return start.noise(pipe.model, request, TorchCPUGenerator(0)).shape

    def _latents(self, values: NDArray[np.float32], prompt: str, options: Mapping[str, Any]) -> NDArray[np.float32]:
        """Return the noise [F, C, h, w] of one picture, which diffusers has as tokens for some models."""
        shape = self._noise_shape(prompt, options)
        if shape is None or values.ndim == 4:
            return values
        if values.ndim == 5:  # the one frame of a VAE for video
            return values.reshape(shape) if values.size == np.prod(shape) else values[0]
        frames, channels, rows, columns = shape
        if values.shape == (1, rows * columns, channels):
            return from_tokens(values, rows, columns)
        return unpack(values, rows, columns) if frames == 1 and values.ndim == 3 else values

    def _draw(self, prompt: str, options: dict[str, Any], given: Mapping[str, Any]) -> Result:
        callback = given.get("callback_on_step_end")
        names = given.get("callback_on_step_end_tensor_inputs", ["latents"])
        if callback is not None and not callable(callback):
            raise UsageError(f"callback_on_step_end is {clean(callback, 40)}; expected a function")
        if not isinstance(names, list | tuple) or set(names) - {"latents"}:
            raise UsageError("callback_on_step_end_tensor_inputs: only 'latents' is passed here")
        with closing(self._pipe.stream(prompt, **options)) as events:
            for event in events:
                if isinstance(event, Result):
                    for line in event.warnings:
                        self._warn(line, line)
                    return event
                if callback is not None:
                    self._called(callback, event, names)
        raise AssertionError("a stream ends with its result")

    def _called(self, callback: Callable[..., Any], step: Step, names: Any) -> None:
        values = {"latents": step.latents} if "latents" in names else {}
        returned = callback(self, step.index - 1, step.sigma, {name: one.copy() for name, one in values.items()})
        changes = returned if isinstance(returned, Mapping) else {}
        if any(name not in values or not np.array_equal(changes[name], values[name]) for name in changes):
            raise UsageError("callback_on_step_end returned other values: a callback only looks on here")
        if self.__dict__.get("_interrupt"):
            self.__dict__.pop("_interrupt")
            raise UsageError("a run that is interrupted has no picture here: raise an error of yours in the callback")

    # LoRAs

    def load_lora_weights(self, pretrained_model_name_or_path_or_dict: str | Path, **asked: Any) -> None:
        """Add a LoRA: a file, a folder, or a hub id that was pulled. Its values are read when a picture is drawn.
        Raises UsageError, and ModelError for one that is not here or does not fit the model."""
        before = dict(self._adapters.weights)
        self._adapters.load(pretrained_model_name_or_path_or_dict, asked)
        try:
            found = self._pipe.resolve({"lora": tuple(self._adapters.loras())})["lora"]
            self._pipe.loras.deltas(found, "auto")  # for its errors: only headers are read
        except QwenimgError:
            self._adapters.delete(list(self._adapters.weights))
            self._adapters.weights = before
            raise

    def set_adapters(
        self, adapter_names: str | Sequence[str], adapter_weights: float | Sequence[float | None] | None = None
    ) -> None:
        self._adapters.set(adapter_names, adapter_weights)

    def get_active_adapters(self) -> list[str]:
        return list(self._adapters.weights)

    def get_list_adapters(self) -> dict[str, list[str]]:
        part = "unet" if self._pipe.family == "stable-diffusion" else "transformer"
        return {part: list(self._adapters.files)} if self._adapters.files else {}

    def delete_adapters(self, adapter_names: str | Sequence[str]) -> None:
        self._adapters.delete(adapter_names)

    def disable_lora(self) -> None:
        self._adapters.enabled = False

    def enable_lora(self) -> None:
        self._adapters.enabled = True

    def fuse_lora(self, components: Any = None, lora_scale: float = 1.0, **asked: Any) -> None:
        """Keep the active LoRAs, also when they are unloaded; they are added exactly as before."""
        if names := asked.get("adapter_names"):
            self._adapters.set(names, [self._adapters.weights.get(name, 1.0) for name in names])
        self._adapters.fuse(lora_scale)

    def unfuse_lora(self, components: Any = None, **asked: Any) -> None:
        self._adapters.fused = []

    def unload_lora_weights(self, reset_to_overwritten_params: bool = False) -> None:
        self._adapters.unload()

    # Textual inversion

    def load_textual_inversion(
        self,
        pretrained_model_name_or_path: str | Path | Sequence[str | Path],
        token: str | Sequence[str] | None = None,
        **asked: Any,
    ) -> None:
        """Add an embedding: a file, a folder, or a hub id that was pulled, or a list of these, whose token, or else its
        own or its name, stands in prompts. Raises UsageError, and ModelError for one that is not here or does not fit
        the model."""
        added = self._adapters.load_embedding(pretrained_model_name_or_path, token, asked)
        self._pipe.embeddings.check(added)
        names = {one.name for one in added if one.name}
        kept = [one for one in self._adapters.embeddings if not one.name or one.name not in names]
        self._adapters.embeddings = [*kept, *added]

    def unload_textual_inversion(
        self, tokens: str | Sequence[str] | None = None, tokenizer: Any = None, text_encoder: Any = None
    ) -> None:
        """Forget all embeddings, or those of `tokens`."""
        names = [tokens] if isinstance(tokens, str) else tokens
        kept = [one for one in self._adapters.embeddings if names is not None and one.name not in names]
        self._adapters.embeddings = kept

    # What there is

    @property
    def scheduler(self) -> schedulers.Scheduler:
        """The scheduler; set it to X.from_config(pipe.scheduler.config)."""
        checkpoint = self._pipe.checkpoint
        return self._scheduler or schedulers.of_model(None if checkpoint is None else checkpoint.scheduler)

    @scheduler.setter
    def scheduler(self, scheduler: object) -> None:  # of diffusers too
        checkpoint = self._pipe.checkpoint
        schedulers.options(scheduler, None if checkpoint is None else checkpoint.scheduler)  # for its errors
        self._scheduler = scheduler

    @property
    def device(self) -> str:
        return self._pipe.device

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of `qwenimg.load` that draws."""
        return self._pipe

    def to(self, *places: Any, **named: Any) -> Self:
        """Return the pipeline unchanged: the device and the precision are chosen when it is opened."""
        where = f"the model is on {self._pipe.device} in {self._pipe.precision.name}"
        self._warn("to", f"to() changes nothing here: {where}; from_pretrained takes backend= and torch_dtype=")
        return self

    def cuda(self, *places: Any) -> Self:
        return self.to(*places)

    def cpu(self) -> Self:
        return self.to()

    def close(self) -> None:
        """Free everything."""
        self._pipe.close(wait=True)

    def _warn(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=3)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_pipe", "_adapters", "_scheduler", "_warned"):
            raise AttributeError(name)
        if name in NO_OPS:
            return partial(self._nothing, name)
        if name in PARTS:
            return Part(self, name)
        raise _missing(self.name, name)

    def _nothing(self, name: str, *given: Any, **named: Any) -> None:
        self._warn(name, f"{name}() changes nothing here: {NO_OPS[name]}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in PARTS:
            what = "compile='on' in from_pretrained compiles" if name in ("unet", "transformer") else ""
            raise AttributeError(
                f"{self.name}: {name} is not replaced here: {what or f'give {name}= the file of its weights'}"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"<{self.name} {self._pipe!r}>"


class Part:
    """A part of a pipeline, such as its VAE, whose methods change nothing here."""

    def __init__(self, pipe: DrawingPipeline[Any], name: str) -> None:
        self._owner, self._name = pipe, name

    def to(self, *places: Any, **named: Any) -> Self:
        self._owner.to()
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in NO_OPS:
            return partial(self._owner._nothing, name)
        raise _missing(f"{self._owner.name}.{self._name}", name)


def _missing(owner: str, name: str) -> AttributeError:
    if advice := MISSING.get(name):
        return AttributeError(f"{owner} has no {name} here: {advice}")
    return AttributeError(f"{owner} has no attribute {clean(name, 60)!r} here; docs/python.md has what there is")


_ANNOUNCED = ("clip_skip", "lora", "lora_mode", "image", "embedding")


@cache
def pipeline_class(name: str) -> type[DrawingPipeline[Any]]:
    """Return the class with a name of `pipelines.ROWS` or `pipelines.AUTO`."""
    row = pipelines.ROWS.get(name)
    about = "A class that becomes that of its model" if row is None else f"diffusers' {name} with the models here"
    return type(
        name, (DrawingPipeline,), {"name": name, "row": row, "__doc__": about, "__module__": "qwenimg.diffusers"}
    )


def _prompt_tokens(pipe: Pipeline, row: Row) -> int:
    """Return the tokens to which T5's texts are padded, which other models count for nothing."""
    every = getattr(getattr(pipe.model, "texts", None), "every", ())
    return max((one.length for one in every if isinstance(one, T5Texts)), default=row.tokens)


def _own_class(pipe: Pipeline) -> str:
    """Return the class that the model's folder names, or one that its family has."""
    index = None if pipe.checkpoint is None else pipe.checkpoint.source / "model_index.json"
    return str(read_json(index).get("_class_name")) if index is not None and is_file(index) else ""


def _size(image: Any) -> tuple[int, int]:
    """Return width and height of a PIL image, an array or a file. Raises UsageError and ModelError."""
    from qwenimg.common.request import coerce

    values = coerce.read_pictures({"image": image})[0]["image"]
    if not isinstance(values, np.ndarray) or values.ndim != 3:
        raise UsageError(f"image is {clean(type(image).__name__, 40)}; give a PIL image or the path of a file")
    return values.shape[1], values.shape[0]


def _finisher(given: Mapping[str, Any]) -> Callable[[list[Result]], Any]:
    """Return the function from results to what a call returns as `images`. Raises UsageError."""
    kind = given.get("output_type", "pil")
    if kind == "pil":
        return lambda results: [one.images if one.layers else one.image for one in results]
    if kind == "np":
        return lambda results: np.stack([one.pixels for one in results]).astype(np.float32) / np.float32(255)
    does = "results[0].latents of what a call returns has them" if kind == "latent" else "give 'pil' or 'np'"
    raise UsageError(f"output_type={clean(kind, 30)!r} is not taken here: {does}")


def _array(latents: Any) -> NDArray[np.float32]:
    """Return latents, an array or a tensor, as an array. Raises UsageError."""
    try:
        values = np.asarray(latents.detach().cpu().float() if hasattr(latents, "detach") else latents, np.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"latents are {clean(latents, 40)}; expected an array or a tensor") from None
    if values.ndim < 3:
        raise UsageError(f"latents have the shape {list(values.shape)}; give noise for each picture")
    return values
