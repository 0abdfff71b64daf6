"""Text to image on Apple Silicon (MLX) and NVIDIA (PyTorch), with Qwen-Image, Z-Image, FLUX and Stable Diffusion.

    pipe = qwenimg.load("path/to/Qwen-Image")
    pipe("a red circle", seed=1).image.save("circle.png")

Importing this imports neither framework; `load` does.
"""

from __future__ import annotations

from qwenimg.common.base.version import __version__

TYPE_CHECKING = False  # typing's own takes longer to import than this file: `cli/main.py` says why that matters
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Any, Never

    from qwenimg.common.base.errors import (
        BackendMissing,
        DoesNotFit,
        ModelError,
        NotHere,
        NumericsError,
        PipelineBusy,
        QwenimgError,
        UnknownOption,
        UsageError,
    )
    from qwenimg.common.families.load_options import LoadOptions, Prediction
    from qwenimg.common.pipeline.pipeline import Pipeline
    from qwenimg.common.pipeline.result import Result, Step

__all__ = [
    "BackendMissing",
    "DoesNotFit",
    "ModelError",
    "NotHere",
    "NumericsError",
    "Pipeline",
    "PipelineBusy",
    "QwenimgError",
    "Result",
    "Step",
    "UnknownOption",
    "UsageError",
    "__version__",
    "load",
]

_ERRORS = (
    "BackendMissing",
    "DoesNotFit",
    "ModelError",
    "NotHere",
    "NumericsError",
    "PipelineBusy",
    "QwenimgError",
    "UnknownOption",
    "UsageError",
)
_LAZY = {
    "Pipeline": "pipeline.pipeline",
    "Result": "pipeline.result",
    "Step": "pipeline.result",
    **dict.fromkeys(_ERRORS, "base.errors"),
}


def load(
    model: str | Path | None = None,
    backend: str = "auto",
    precision: str = "auto",
    *,
    compile: str = "auto",
    preset: str = "auto",
    fallback: bool = False,
    check: bool = False,
    quantize: int | str | None = None,
    max_memory: str | int | None = None,
    cache_prompts: bool = False,
    offline: bool = False,
    transformer: str | Path | None = None,
    text_encoder: str | Path | None = None,
    text_encoder_2: str | Path | None = None,
    text_encoder_3: str | Path | None = None,
    vae: str | Path | None = None,
    effnet: str | Path | None = None,
    models_dir: str | Path | Sequence[str | Path] | None = (),
    wildcards: str | Path | Sequence[str | Path] | None = (),
    preview_with: str | Path | None = None,
    rewrite_with: str | Path | None = None,
    refiner: str | Path | None = None,
    tokenizer: str | Path | None = None,
    ip_encoder: str | Path | None = None,
    prediction: Prediction | None = None,
    variant: str | None = None,
    notify: Callable[[str, str], None] | None = None,
    **unknown: Never,
) -> Pipeline:
    """Open a model on a backend; weights are read when they are first needed.

        model: a folder, a file, a known name or a pulled hub id; None: qwen-image, z-image-turbo or the built-in model.
        backend: what computes, as `qwenimg devices` lists it; auto takes a GPU first.
        precision: fp32, bf16, fp16 ..., by part as bf16,vae=fp32; auto is the preset's.
        compile: the denoiser, on or off; auto: where it costs next to nothing.
        preset: quality, balanced, fast, memory, or auto.
        fallback: where a value overflows, go on in the next dtype.
        check: compare compiled blocks, kept keys, quantized products and step cache with plain ones in the first step.
        quantize: weights in 8, 6 or 4 bits, or text=8,transformer=4.
        max_memory: bytes or '12GB'; blocks that do not fit are streamed.
        cache_prompts: keep encoded prompts and instructions on the disk.
        offline: name no download in messages.
        transformer: a folder or file of its weights, or of the UNet's.
        text_encoder: a folder or file of its weights.
        text_encoder_2: a folder or file of its weights.
        text_encoder_3: a folder or file of its weights.
        vae: a folder or file of its weights.
        effnet: a folder or file of its weights.
        models_dir: folders where models, parts and LoRAs have names.
        wildcards: folders of the files that __name__ in a prompt is filled from; 'off' takes prompts as text.
        preview_with: a folder or file of a tiny VAE that makes previews.
        rewrite_with: a folder or file of the language model that rewrites prompts.
        refiner: an SDXL refiner, named as `model`.
        tokenizer: the folder of the tokenizer, for a model that has none.
        ip_encoder: the folder or file of the image encoder (CLIP vision) of IP-Adapters.
        prediction: what a Stable Diffusion file predicts: eps, v or x0.
        variant: which model a file is: text, edit, 2509, 2511 or layered of Qwen-Image, text or kontext of FLUX.1.
        notify: a function that takes (kind, text), for stages, warnings and notices.

    Raises QwenimgError; UnknownOption, a TypeError too, for other keywords. `with` closes it at the end."""
    given = dict(locals())  # written by tools/write_call_types.py up to here
    from qwenimg.common.base import arguments
    from qwenimg.common.families.load_options import LOAD_OPTIONS, from_call
    from qwenimg.common.request import load_options

    load_options.check_names(unknown, [name for name in given if name != "unknown"])
    arguments.check_functions(notify=notify)
    return open_pipeline(from_call({name: given[name] for name in LOAD_OPTIONS}), notify)


def open_pipeline(opening: LoadOptions, notify: Callable[[str, str], None] | None = None) -> Pipeline:
    """Open the model that `opening` names, as `load` does, on its backend. Raises QwenimgError."""
    from qwenimg import backends
    from qwenimg.common.hub import open_model

    notify = notify or open_model.ignore
    return open_model.open_pipeline(opening, lambda: backends.load(opening.backend), notify)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"qwenimg.common.{_LAZY[name]}"), name)
    if name == "diffusers":
        from importlib import import_module

        return import_module("qwenimg.diffusers")
    from qwenimg.common.request import foreign_names

    raise AttributeError(foreign_names.no_attribute("module 'qwenimg'", name))


def __dir__() -> list[str]:
    return sorted(__all__)
