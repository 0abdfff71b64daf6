"""Text to image with Qwen-Image and Stable Diffusion on Apple Silicon (MLX) and NVIDIA (PyTorch).

    pipe = qwenimg.load("path/to/Qwen-Image")
    pipe("a red circle", seed=1).image.save("circle.png")

Importing this imports neither framework; `load` does.
"""

from __future__ import annotations

from qwenimg.common.base.version import __version__

TYPE_CHECKING = False  # typing's own takes longer to import than this file: `cli/main.py` says why that matters
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import ExitStack
    from pathlib import Path
    from typing import Any, Never

    from qwenimg.common.base.errors import (
        BackendMissing,
        DoesNotFit,
        ModelError,
        NumericsError,
        PipelineBusy,
        QwenimgError,
        UnknownOption,
        UsageError,
    )
    from qwenimg.common.families.choices import Choices, Prediction
    from qwenimg.common.families.registry import Opened
    from qwenimg.common.families.running import Running
    from qwenimg.common.hub.model_folders import ModelFolders
    from qwenimg.common.hub.resolve import Resolved
    from qwenimg.common.pipeline.pipeline import Pipeline
    from qwenimg.common.pipeline.result import Result, Step
    from qwenimg.common.runtime.checkpoint import Checkpoint
    from qwenimg.common.runtime.runtime import Runtime

__all__ = [
    "BackendMissing",
    "DoesNotFit",
    "ModelError",
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

MAX_FP32_ERROR = 1e-5
_ERRORS = (
    "BackendMissing",
    "DoesNotFit",
    "ModelError",
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
    preset: str = "auto",
    offline: bool = False,
    refiner: str | Path | None = None,
    transformer: str | Path | None = None,
    text_encoder: str | Path | None = None,
    text_encoder_2: str | Path | None = None,
    vae: str | Path | None = None,
    tokenizer: str | Path | None = None,
    models_dir: str | Path | Sequence[str | Path] | None = (),
    prediction: Prediction | None = None,
    quantize: int | str | None = None,
    compile: str = "auto",
    max_memory: str | int | None = None,
    fallback: bool = False,
    cache_prompts: bool = False,
    notify: Callable[[str, str], None] | None = None,
    **unknown: Never,
) -> Pipeline:
    """Opens a model on a backend; weights are read when they are first needed.

    model: a folder, a file, a known name, or a hub id that is in the cache; None is qwen-image if it was pulled or has
    its parts elsewhere, else the built-in model, with a notice. backend: auto, mlx, cuda or cpu. precision: see
    `syntax` in `qwenimg.common.precision.precision`; `auto` is the preset's: quality, balanced, fast, memory, or auto.
    quantize: weights in 8, 6 or 4 bits, or text=8,transformer=4. compile: the denoiser, on or off; auto: where it costs
    next to nothing. max_memory: bytes or `12GB`; blocks that
    do not fit are streamed. fallback: where a value overflows, goes on in the next dtype. cache_prompts: keeps encoded
    prompts on the disk. notify(kind, text) gets stages, warnings and notices. transformer (or UNet), text_encoder,
    text_encoder_2, vae: folder or file of that part's weights. models_dir: folders where models, parts and LoRAs have
    names. For Stable Diffusion: refiner, of SDXL; tokenizer and prediction of one file. Forms are checked before files.
    Raises QwenimgError; UnknownOption, which is a TypeError too, for other keywords. As a context manager the pipeline
    is closed at the end of the block."""
    from qwenimg.common.base import arguments
    from qwenimg.common.families.running import Running
    from qwenimg.common.request import given as accepted

    if unknown:
        _check_names(unknown)
    arguments.check_flags(offline=offline)
    arguments.check_functions(notify=notify)
    bits = accepted.bits(quantize)
    running = Running(
        backend=backend, precision=precision, preset=preset, compile=compile, quantize=bits,
        max_memory=max_memory, fallback=fallback, cache_prompts=cache_prompts,
    )  # fmt: skip
    parts = {"transformer": transformer, "text_encoder": text_encoder, "text_encoder_2": text_encoder_2, "vae": vae}
    folders, given = _found(models_dir, {**parts, "model": model, "refiner": refiner, "tokenizer": tokenizer})
    resolved, choices = _resolved(given, prediction, bits, offline=offline)
    return _pipeline(resolved, choices, given, running, folders, notify or _ignore, offline=offline)


def _check_names(unknown: Iterable[str]) -> None:
    """Raises UnknownOption for the keywords of `load` that are `unknown`."""
    import inspect

    from qwenimg.common.request import load_options

    load_options.check_names(unknown, [name for name in inspect.signature(load).parameters if name != "unknown"])


def _pipeline(
    resolved: Resolved,
    choices: Choices,
    given: dict[str, str | Path | None],
    running: Running,
    folders: ModelFolders,
    notify: Callable[[str, str], None],
    *,
    offline: bool,
) -> Pipeline:
    """Opens files and backend, in this order."""
    from contextlib import ExitStack

    from qwenimg.common.families import catalog
    from qwenimg.common.hub.origin import model_hash
    from qwenimg.common.pipeline.pipeline import Pipeline
    from qwenimg.common.shapes import builtin

    with ExitStack() as stack:
        opened, refining, entries = _opened(stack, resolved, choices, given["refiner"], offline=offline)
        if given["model"] is None and resolved.known is catalog.BUILT_IN:
            notify("notice", builtin.notice(opened.checkpoint.parameters))
        runtime, error = _runtime(opened, running, notify)
        checkpoint, entries = _reduced(runtime, opened.checkpoint, entries)
        pipeline = Pipeline(
            opened.family.model(runtime, checkpoint, refining),
            name=resolved.name,
            family=opened.family.name,
            defaults=opened.defaults(resolved.known),
            tf32=error > MAX_FP32_ERROR,
            fallback=running.fallback,
            options=entries,
            checkpoint=checkpoint,
            find_lora=folders.lora,
            hashes=model_hash(opened),
        )
        if running.compile != "auto":
            pipeline.compile(running.compile)
        stack.pop_all()  # from here on the pipeline closes them
    return pipeline


def _found(
    models_dir: str | Path | Sequence[str | Path] | None, given: dict[str, str | Path | None]
) -> tuple[ModelFolders, dict[str, str | Path | None]]:
    """The folders, and what is `given` with the paths of what is found there by name. Raises UsageError and
    ModelError."""
    from pathlib import Path

    from qwenimg.common.base import arguments
    from qwenimg.common.hub.model_folders import read_folders
    from qwenimg.common.hub.part_files import located

    arguments.check_paths(**given)
    folders = read_folders([Path(folder) for folder in arguments.paths("models_dir", models_dir)])
    return folders, given | located(folders, given)


def _resolved(
    given: dict[str, str | Path | None], prediction: Prediction | None, quantize: str | None, *, offline: bool
) -> tuple[Resolved, Choices]:
    """The model, and what was chosen. Raises UsageError and ModelError."""
    import os
    from pathlib import Path

    from qwenimg.common.families.choices import PARTS, Choices
    from qwenimg.common.hub.part_files import check_alone
    from qwenimg.common.hub.resolve import resolve, with_parts_found

    said = {name: path for name in (*PARTS, "tokenizer") if (path := given[name])}
    paths: dict[str, Any] = {name: Path(os.path.expanduser(path)) for name, path in said.items()}  # noqa: PTH111
    choices = with_parts_found(Choices(prediction=prediction, quantize=quantize, **paths))
    model = given["model"]
    check_alone(None if model is None else str(model), choices)
    return resolve(None if model is None else str(model), offline=offline, without=choices.elsewhere), choices


def _opened(
    stack: ExitStack, resolved: Resolved, choices: Choices, refiner: str | Path | None, *, offline: bool
) -> tuple[Opened, Checkpoint | None, dict[str, Any]]:
    """The model and its refiner, which `stack` closes, and the entries of the recipe for both."""
    from qwenimg.common.families import registry
    from qwenimg.common.hub.origin import origin, with_refiner
    from qwenimg.common.hub.resolve import resolve

    opened = registry.open_model(resolved.folder, choices)
    stack.callback(opened.checkpoint.close)
    opened.checkpoint.read_tokenizers()
    entries = origin(resolved, opened, choices)
    if refiner is None:
        return opened, None, entries
    second = resolve(str(refiner), offline=offline)
    refining = registry.open_refiner(opened, second.folder)
    stack.callback(refining.close)
    return opened, refining, with_refiner(entries, second, opened, refining)


def _runtime(opened: Opened, running: Running, notify: Callable[[str, str], None]) -> tuple[Runtime, float]:
    """The backend with the policy that preset and precision give this model there, and the error of a float32 product.

    Tells what `auto` chose, and why."""
    from qwenimg import backends
    from qwenimg.common.precision import precision as policies
    from qwenimg.common.precision import presets
    from qwenimg.common.runtime.runtime import Runtime

    kind = opened.family.precision
    policies.parse(running.precision, on_gpu=False, kind=kind)  # before a framework is imported
    engine = backends.load(running.backend)
    error = engine.check_fp32()
    free = engine.free_memory()
    choice = presets.choose(running.preset, running.precision, kind, engine.facts, opened.checkpoint.largest, free)
    policy = policies.parse(choice.precision, on_gpu=engine.on_gpu, kind=kind)
    _check_fp32(error, policy.name, engine.device)
    if choice.reason:
        notify("stage", f"--preset {choice.preset}: {policy.name}, since {choice.reason}")
    runtime = Runtime(engine, policy, notify, choice, running.limit, running.quantize)
    if running.cache_prompts:
        runtime.keep_prompts()
    return runtime, error


def _reduced(runtime: Runtime, checkpoint: Checkpoint, entries: dict[str, Any]) -> tuple[Checkpoint, dict[str, Any]]:
    """The weights in the preset's bits where they do not fit as they are, which is told; and the recipe's entries."""
    from qwenimg.common.base.amounts import size_text

    smaller = runtime.reduced(checkpoint)
    if smaller is checkpoint:
        return checkpoint, entries
    bits, sizes = (
        runtime.choice.wishes.bits,
        [size_text(one.largest(runtime.precision)) for one in (checkpoint, smaller)],
    )
    room = size_text(runtime.room(0))
    text = f"weights in {bits} bits, {sizes[1]} at once, since they would take {sizes[0]} and {room} are free"
    runtime.notify("stage", f"--preset {runtime.choice.preset}: {text}")
    return smaller, entries | {"quantize": bits}


def _ignore(kind: str, text: str) -> None:
    """Where nobody listens."""


def _check_fp32(error: float, precision: str, device: str) -> None:
    from qwenimg.common.base.errors import NumericsError

    if precision.startswith("fp32") and not error <= MAX_FP32_ERROR:
        raise NumericsError(
            f"float32 matrix products on {device} are off by {error:.1e} (at most {MAX_FP32_ERROR:.0e}): "
            f"a reduced-precision mode such as TF32 is on; unset MLX_ENABLE_TF32 or use --precision bf16"
        )


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"qwenimg.common.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'qwenimg' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
