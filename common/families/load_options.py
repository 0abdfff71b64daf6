"""The options that open a model, for a call, a command or a server: checked before any file is opened.

The metadata of a field has all that the rest of the program needs to know about it: see `Option`. Modules that compute
are imported where they are used, since `qwenimg --help` reads the options.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from qwenimg.common.base import arguments
from qwenimg.common.base.amounts import parse_max
from qwenimg.common.base.arguments import home, shown
from qwenimg.common.base.errors import UsageError
from qwenimg.common.request.option import Option, option, options_of
from qwenimg.common.request.parts import PARTS, components_of
from qwenimg.common.runtime import compiling

Prediction = Literal["eps", "v", "x0"]
"""The prediction of a UNet: the noise, the velocity, or the image."""
PREDICTIONS: tuple[str, ...] = get_args(Prediction)


def check_prediction(value: object) -> None:
    """Check a value of --prediction. Raises UsageError."""
    if not (isinstance(value, str) and value in PREDICTIONS):
        raise UsageError(f"prediction is {shown(value)}; choose one of {', '.join(PREDICTIONS)}")


VARIANTS = ("text", "edit", "2509", "2511", "layered", "kontext", "dev", "schnell")
"""The models whose weights, or whose names, do not tell them apart: text to image, Qwen-Image-Edit, -2509, -2511 and
-Layered, FLUX.1 Kontext, dev and schnell."""


def check_variant(value: object) -> None:
    """Check a value of --variant. Raises UsageError."""
    if not (isinstance(value, str) and value in VARIANTS):
        raise UsageError(f"variant is {shown(value)}; choose one of {', '.join(VARIANTS)}")


_FILES = "Model's files"  # the second half of the section "Model" in the help


def _check_wildcards(folders: tuple[Path, ...]) -> None:
    from qwenimg.common.prompts.wildcards import OFF

    if OFF in map(str, folders) and len(folders) > 1:
        raise UsageError(f"--wildcards {OFF} draws prompts as text; leave the folders out, or write ./{OFF}")


def _check_preset(name: str) -> None:
    from qwenimg.common.precision import presets

    presets.check(name)


def _check_precision(text: str) -> None:
    from qwenimg.common.precision import precision

    precision.check(text)


def _check_quantize(text: str) -> None:
    from qwenimg.common.weights import quantize

    quantize.parse(text)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options that open a model, checked on construction. Raises UsageError."""

    model: str | None = option(None, Option(
        help="a name that was pulled (qwenimg models), a hub id, a folder or a file",
        call="a folder, a file, a known name or a pulled hub id; None: qwen-image, z-image-turbo or the built-in model",
        python="str | Path | None", section="Model", metavar="MODEL", flags=("-m",), config=True,
    ))  # fmt: skip
    backend: str = option("auto", Option(
        help="the backend that computes; auto takes a GPU if there is one",
        call="what computes, as `qwenimg devices` lists it; auto takes a GPU first", section="Model", config=True,
    ))  # fmt: skip
    compile: str = option("auto", Option(
        help="compile the model first; auto does so if it saves more time than it takes",
        call="the denoiser, on or off; auto: where it costs next to nothing", section="Model", words=compiling.MODES,
        checks=compiling.check,
    ))  # fmt: skip
    preset: str = option("auto", Option(
        help="speed, memory and exactness in one word: qwenimg presets lists them",
        call="quality, balanced, fast, memory, or auto", section="Model", metavar="NAME", checks=_check_preset,
        config=True,
    ))  # fmt: skip
    precision: str = option("auto", Option(
        help="the number format: fp32, bf16, fp16 ..., or by part, such as bf16,vae=fp32; default the preset's",
        call="fp32, bf16, fp16 ..., by part as bf16,vae=fp32; auto is the preset's", section="Model", metavar="POLICY",
        checks=_check_precision, config=True,
    ))  # fmt: skip
    fallback: bool = option(False, Option(
        help="if a value overflows, continue in a wider number format",
        call="where a value overflows, go on in the next dtype", section="Model", config=True,
    ))  # fmt: skip
    check: bool = option(False, Option(
        help="compare the first step with a plain one: compiled blocks, kept keys, quantized weights, step cache",
        call="compare compiled blocks, kept keys, quantized products and step cache with plain ones in the first step",
        section="Model",
    ))  # fmt: skip
    quantize: str | None = option(None, Option(
        help="quantize weights to 8, 6 or 4 bits, or by part, such as text=8,transformer=4",
        call="weights in 8, 6 or 4 bits, or text=8,transformer=4", python="int | str | None", section="Model",
        metavar="8|6|4", flags=("-q",), checks=_check_quantize,
    ))  # fmt: skip
    max_memory: str | int | None = option(None, Option(
        help="use at most this much memory, such as 12GB; weights that do not fit are read again in each step",
        call="bytes or '12GB'; blocks that do not fit are streamed", python="str | int | None", section="Model",
        metavar="AMOUNT", checks=parse_max,
    ))  # fmt: skip
    cache_prompts: bool = option(False, Option(
        help="keep encoded prompts and instructions to language models on disk, for later runs",
        call="keep encoded prompts and instructions on the disk", section="Model", config=True,
    ))  # fmt: skip
    offline: bool = option(False, Option(
        help="never use the network", call="name no download in messages", section="Model", config=True,
    ))  # fmt: skip
    parts: Mapping[str, Path] = field(default_factory=dict)  # {part, of PARTS: the folder or file of its weights}
    models_dir: tuple[Path, ...] = option((), Option(
        help="find models, parts and LoRAs by name in DIR, such as the folder of ComfyUI or A1111",
        call="folders where models, parts and LoRAs have names", python="str | Path | Sequence[str | Path] | None",
        section=_FILES, metavar="DIR", several=True, config=True,
    ))  # fmt: skip
    wildcards: tuple[Path, ...] = option((), Option(
        help="fill __name__ in prompts from the lines of DIR/name.txt; off draws {a|b} and __name__ as text",
        call="folders of the files that __name__ in a prompt is filled from; 'off' takes prompts as text",
        python="str | Path | Sequence[str | Path] | None", section=_FILES, metavar="DIR", several=True,
        checks=_check_wildcards, config=True,
    ))  # fmt: skip
    preview_with: Path | None = option(None, Option(
        help="make previews by this tiny VAE, such as taesd; those in the folders of --models-dir are found",
        call="a folder or file of a tiny VAE that makes previews", python="str | Path | None", section=_FILES,
        metavar="FILE", config=True,
    ))  # fmt: skip
    rewrite_with: str | None = option(None, Option(
        help="the language model of --rewrite, a folder or a file, in place of the model's own text encoder",
        call="a folder or file of the language model that rewrites prompts", python="str | Path | None",
        section=_FILES, metavar="FOLDER|FILE", config=True,
    ))  # fmt: skip
    refiner: str | None = option(None, Option(
        help="an SDXL refiner for the last steps", call="an SDXL refiner, named as `model`",
        python="str | Path | None", section=_FILES, metavar="MODEL",
    ))  # fmt: skip
    tokenizer: Path | None = option(None, Option(
        help="the tokenizer for a Stable Diffusion file or an mflux folder without one; found here by default",
        call="the folder of the tokenizer, for a model that has none", python="str | Path | None", section=_FILES,
        metavar="FOLDER",
    ))  # fmt: skip
    ip_encoder: Path | None = option(None, Option(
        help="the image encoder (CLIP vision, SigLIP) of --ip-adapter; found beside it or in --models-dir by default",
        call="the folder or file of the image encoder (CLIP vision) of IP-Adapters", python="str | Path | None",
        section=_FILES, metavar="FILE",
    ))  # fmt: skip
    prediction: Prediction | None = option(None, Option(
        help="what a Stable Diffusion file predicts, if the file does not tell",
        call="what a Stable Diffusion file predicts: eps, v or x0", section=_FILES, words=PREDICTIONS,
        checks=check_prediction,
    ))  # fmt: skip
    variant: str | None = option(None, Option(
        help="which model a Qwen-Image or FLUX.1 file is, if the file does not tell",
        call="which model a file is: text, edit, 2509, 2511 or layered of Qwen-Image, text or kontext of FLUX.1",
        section=_FILES,
        words=VARIANTS, checks=check_variant,
    ))  # fmt: skip

    for_rewrite: bool = False  # plan every stored tensor, to write the model again and not to draw
    for_plan: bool = False  # plan images and draw none: a missing tokenizer is a report
    refined_tokenizer: Path | None = None  # for a refiner without a tokenizer: that of the model that it refines

    def __post_init__(self) -> None:
        for name, one in LOAD_OPTIONS.items():
            if (value := self.value(name)) is not None:
                one.check(value)

    def value(self, name: str) -> Any:
        """Return the value of the option `name`, None for a part that is not given."""
        return self.parts.get(name) if name in PARTS else getattr(self, name)

    @property
    def limit(self) -> int | None:
        """The bytes of `max_memory`."""
        return parse_max(self.max_memory)

    def of_files(self) -> list[str]:
        """Return the names of the given options that only some families take."""
        names = ("prediction", "variant", "tokenizer", *PARTS)
        return [name for name in names if self.value(name) is not None]

    @property
    def replaced(self) -> frozenset[str]:
        """The components whose weights are given in place of the model's, and `tokenizer` if one is given."""
        given = components_of(self.parts)
        return given if self.tokenizer is None else given | {"tokenizer"}

    def variant_of(self, known: Collection[str], title: str) -> str | None:
        """Return the variant, one of the `known` ones of the models `title`; None if none was chosen. Raises
        UsageError."""
        if self.variant is not None and self.variant not in known:
            raise UsageError(f"--variant {self.variant} is no {title}; choose one of {', '.join(known)}")
        return self.variant

    def part(self, name: str) -> Path | None:
        """Return the folder or file that is given for one of PARTS."""
        return self.parts.get(name)


_FIELDS = options_of(LoadOptions)
LOAD_OPTIONS: Mapping[str, Option] = {
    **{name: _FIELDS[name] for name in _FIELDS if _FIELDS[name].section != _FILES},
    **PARTS,
    **{name: _FIELDS[name] for name in _FIELDS if _FIELDS[name].section == _FILES},
}
"""Every option that opens a model, parts included: the keywords of `qwenimg.load` except `notify`."""


def load_options_of(given: Mapping[str, Any]) -> LoadOptions:
    """Return the options with the values that are `given` by their names, None for the default. Raises UsageError."""
    values = {name: given[name] for name in LOAD_OPTIONS if given.get(name) is not None}
    parts = {name: values.pop(name) for name in PARTS if name in values}
    return LoadOptions(**values, parts=parts)


def from_call(given: Mapping[str, object]) -> LoadOptions:
    """Return the options for the keywords of a call of `qwenimg.load`. Raises UsageError."""
    return load_options_of({name: _converted(LOAD_OPTIONS[name], value) for name, value in given.items()})


def _converted(one: Option, value: object) -> object:
    """Return the `value` of an option in a call, in the type of its field. Raises UsageError."""
    if one.kind is bool:
        arguments.check_flags(**{one.name: value})
    elif one.several:
        return tuple(Path(path) for path in arguments.paths(one.name, value))
    elif "Path" in one.python:
        arguments.check_paths(**{one.name: value})
        if value is None or one.kind is str:
            return None if value is None else str(value)
        return Path(home(str(value)))
    elif one.name == "quantize":
        from qwenimg.common.request.coerce import quantize_text  # which imports numpy

        return quantize_text(value)
    elif not one.python and one.default is not None:
        arguments.check_texts(**{one.name: value})
    return value
