"""Opening of a model as a pipeline: on an engine, or on paper for a plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import ModelError, NumericsError, UsageError
from qwenimg.common.base.safe_files import bad, closed_on_error
from qwenimg.common.base.text import clean
from qwenimg.common.families import catalog, registry
from qwenimg.common.families.family import ControlFiles, Family
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.registry import OpenModel
from qwenimg.common.hub.model_folders import ModelFolders, read_folders
from qwenimg.common.hub.network_search import (
    KNOWN_CONTROLS,
    embeddings,
    find_control,
    find_embedding,
    find_encoders,
    find_upscaler,
    read_upscaler,
)
from qwenimg.common.hub.open_writer import prompt_writer
from qwenimg.common.hub.origin import model_hash, origin
from qwenimg.common.hub.part_files import completed, located
from qwenimg.common.hub.preview_vae import find_preview_vae
from qwenimg.common.hub.resolve import resolve
from qwenimg.common.measure import exactness
from qwenimg.common.parts.control_net import Controller, PictureAdapter
from qwenimg.common.parts.downloads import Download
from qwenimg.common.pipeline.controls import Controls
from qwenimg.common.pipeline.models.inputs import OtherModels
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.rank_pipeline import RankPipeline
from qwenimg.common.pipeline.rewriting import Rewriters
from qwenimg.common.pipeline.second_pass import Upscalers
from qwenimg.common.precision import precision as policies
from qwenimg.common.precision import presets
from qwenimg.common.precision.precision import DenoiserKind, Precision
from qwenimg.common.prompts.wildcards import Wildcards
from qwenimg.common.request.embeddings import Embeddings
from qwenimg.common.request.loras import Loras
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.paper import OnPaper
from qwenimg.common.runtime.runtime import Notices, Runtime
from qwenimg.common.shapes import builtin
from qwenimg.common.weights.quantize import in_4_bits

MAX_FP32_ERROR = 1e-5  # relative error of a product
OTHERS = OtherModels(several=catalog.SEVERAL, describing=catalog.DESCRIBING)
Notify = Callable[[str, str], None]


def ignore(kind: str, text: str) -> None:
    """Drop a message."""


# Files


def open_files(options: LoadOptions, *, planned: bool = False, published: bool = False) -> OpenModel:
    """Open the files of the model and of the refiner that `options` name and check everything about them; no weight is
    read. Raises QwenimgError.

    planned: read only headers and configurations, and take a known model that is not here as it is published.
    published: take a known model so although it is here."""
    options = replace(completed(options), for_plan=planned)
    model = _open(options, planned=planned, published=published)
    with closed_on_error(model):
        if not planned:
            model.checkpoint.read_tokenizers()
        if options.refiner is None:
            return model
        path = resolve(options.refiner, offline=options.offline)
        checkpoint = replace(model.checkpoint, refiner=registry.open_refiner(model, path.folder))
        return replace(model, checkpoint=checkpoint, refiner=path)


def _open(options: LoadOptions, *, planned: bool, published: bool) -> OpenModel:
    """Open the model without its refiner."""
    if published and (model := _published(options)) is not None:
        return model
    try:
        path = resolve(options.model, offline=options.offline, without=options.replaced)
    except ModelError:
        if not planned or (model := _published(options)) is None:
            raise
        return model
    return replace(registry.open_model(path.folder, options), path=path)


def _published(options: LoadOptions) -> OpenModel | None:
    """Return a known model as it is published; None for another one, and if parts of it are given."""
    name = options.model
    known = None if name is None or os.path.lexists(name) or options.of_files() else catalog.find(name)
    model = None if known is None else registry.published(known)
    if model is None or options.quantize is None:
        return model
    return replace(model, checkpoint=model.checkpoint.quantized(options.quantize), options=options)


# Pipelines


def open_pipeline(options: LoadOptions, engine: Callable[[], Engine], notify: Notify = ignore) -> Pipeline:
    """Open the model that `options` name on `engine`, which is called once its files have passed all checks. Weights
    are read when they are first needed. notify(kind, text) gets stages, warnings and notices. Raises QwenimgError."""
    folders, options = located(options)
    notify = Notices(notify)
    model = open_files(options)
    with closed_on_error(model):
        entries = origin(model)
        for report in model.reports:
            notify(*report)
        policies.parse(options.precision, on_gpu=False, kind=model.family.precision)  # before a framework is imported
        ready, built_in = engine(), model.path.known is catalog.BUILT_IN
        if options.check and ready.group is not None:
            raise UsageError("--check: the devices that share a picture are not compared; leave one of both out")
        if options.model is None and built_in:
            notify("notice", builtin.notice(model.checkpoint.parameters))
        error = exactness.float32_error(ready)
        runtime = runtime_of(model.family.precision, model.checkpoint, options, ready, notify, error)
        if options.cache_prompts:
            runtime.keep_prompts()
        checkpoint, entries = _reduced(runtime, model.checkpoint, entries)
        kind = runtime.precision.kind
        if kind.in_4_bits and in_4_bits(checkpoint[kind.denoiser].plan):
            notify("warning", kind.in_4_bits)
        preview_vae = _preview_vae(model, folders, options)
        pipeline = _pipeline(
            replace(model, checkpoint=checkpoint),
            runtime,
            folders,
            options,
            tf32=error > MAX_FP32_ERROR,
            fallback=options.fallback,
            options=entries,
            checkpoint=checkpoint,
            find_loras=folders.loras,
            hashes=model_hash(model),
            preview_vae=preview_vae,
            **({"advise": builtin.advise} if built_in else {}),
        )
        if options.compile != "auto":
            pipeline.compile(options.compile)
        if options.check:
            from qwenimg.common.parity import shortcuts  # which no other run needs

            shortcuts.watch(pipeline)
    return pipeline


def plan_pipeline(options: LoadOptions, engine: OnPaper, *, published: bool = False) -> tuple[Pipeline, bool]:
    """Open the model on an engine that is only described, to plan images; return it, and whether its files are here.
    published: take a known model as it is published, although it may be here. Raises QwenimgError."""
    model = open_files(options, planned=True, published=published)
    with closed_on_error(model):
        policies.parse(options.precision, on_gpu=False, kind=model.family.precision)
        runtime = runtime_of(model.family.precision, model.checkpoint, options, engine, ignore)
        reduced = replace(model, checkpoint=runtime.reduced(model.checkpoint))
        folders = read_folders(options.models_dir)
        tiny = _preview_vae(model, folders, options)
        return _pipeline(reduced, runtime, folders, options, preview_vae=tiny), not model.on_paper


def _preview_vae(model: OpenModel, folders: ModelFolders, options: LoadOptions) -> Component | None:
    """Return the tiny VAE that makes previews, or None; the built-in model, and one on paper, take only a given one."""
    looks = options.preview_with is not None or not (model.on_paper or model.path.known is catalog.BUILT_IN)
    return find_preview_vae(model, folders, options) if looks else None


def _pipeline(model: OpenModel, runtime: Runtime, folders: ModelFolders, load: LoadOptions, **more: Any) -> Pipeline:
    """Return the pipeline of an open model, which closes its files from here on. load: the options that were given,
    with paths in place of names; more: of a pipeline that draws."""
    kind = Pipeline if runtime.engine.group is None else RankPipeline  # one rank of several
    drawn = model.family.model(runtime, model.checkpoint)
    planned = isinstance(runtime.engine, OnPaper)
    return kind(
        drawn,
        loras=Loras(cache(lambda: model.family.lora_names(model.checkpoint))),
        others=OTHERS,
        name=model.path.name,
        family=model.family.name,
        defaults=model.defaults(),
        controls=_controls(model, folders, load.ip_encoder, own=drawn.inputs.control, planned=planned),
        wildcards=Wildcards(load.wildcards),
        upscalers=_upscalers(folders),
        embeddings=_embeddings(model, folders),
        rewriters=Rewriters(lambda: prompt_writer(model, load, open_files)),
        **more,
    )


def _controls(model: OpenModel, folders: ModelFolders, encoder: Path | None, *, own: bool, planned: bool) -> Controls:
    """Return the control networks of a model, found by their names on this machine. encoder: the image encoder of
    IP-Adapters that is given. own: the model itself sees a picture. planned: take a known one that is not here as it is
    published."""
    family, checkpoint = model.family, model.checkpoint
    if family.control is None:

        def no_control() -> str:
            able = registry.titles(lambda other: other.control is not None)
            return f"control networks are for {able}, and the model is {family.title}"

        return Controls(refusal=no_control, own=own)
    control, published = family.control, family.control.published if planned else None

    @cache
    def fitting() -> tuple[Download, ...]:
        every = [(one, net) for one in KNOWN_CONTROLS if (net := control.published(one.name)) is not None]
        return tuple(one for one, net in every if _is_for(control, one.name, net, checkpoint)) or KNOWN_CONTROLS

    def find(name: str) -> Path:
        try:
            return find_control(name, folders, fitting)
        except ModelError:
            known = catalog.find_download(name)
            if known is not None and known.controls not in ("", family.name):
                able = registry.titles(lambda other: other.name == known.controls)
                raise ModelError(f"{clean(name, 80)}: is for {able}; the model is {family.title}") from None
            if published is None or published(name) is None:
                raise
            return Path(name)

    def opened_net(path: Path) -> Controller:
        net = published(str(path)) if published is not None and not os.path.lexists(path) else None
        if net is not None:
            control.check_published(str(path), net, checkpoint)
        else:
            _check_family(path, family)
        net = net or control.open(path, checkpoint)
        if not isinstance(net, PictureAdapter) or net.encoder is not None or control.with_encoder is None:
            return net
        with closed_on_error(net):
            return control.with_encoder(net, find_encoders(net.path, checkpoint.source, folders, encoder))

    return Controls(opened_net, find, own=own)


def _is_for(control: ControlFiles, name: str, net: Controller, checkpoint: Checkpoint) -> bool:
    try:
        control.check_published(name, net, checkpoint)
    except (ModelError, UsageError):
        return False
    return True


def _check_family(path: Path, family: Family) -> None:
    """Raise ModelError for an IP-Adapter of another family. One that cannot be read passes: who opens it says why."""
    try:
        other = registry.adapter_family(path)
    except (ModelError, OSError):
        return
    if other is not None and other is not family:
        raise bad(path, f"is an IP-Adapter for {other.title}; the model is {family.title}")


def _embeddings(model: OpenModel, folders: ModelFolders) -> Embeddings:
    """Return the embeddings of a model's prompts, found by their names on this machine."""
    if not model.family.embeddings:

        def no_embeddings() -> str:
            able = registry.titles(lambda other: other.embeddings)
            return f"embeddings (textual inversion) are for {able}; the model is {model.family.title}"

        return Embeddings(refusal=no_embeddings)
    widths = {name: text.config.hidden_size for name, text in model.checkpoint.texts.items()}
    find = partial(find_embedding, folders=folders)
    return Embeddings(refusal=None, widths=widths, find=find, listed=partial(embeddings, folders))


def _upscalers(folders: ModelFolders) -> Upscalers:
    """Return the upscalers of second passes, found by their names on this machine."""
    return Upscalers(lambda name: read_upscaler(find_upscaler(name, folders, "--hires-with")))


def runtime_of(
    kind: DenoiserKind,
    checkpoint: Checkpoint,
    options: LoadOptions,
    engine: Engine | OnPaper,
    notify: Notify,
    error: float = 0.0,
) -> Runtime:
    """Return the engine with the policy that preset and precision choose for weights of a `kind` of model, and report
    the choice of `auto` and its reason. error: of a float32 product. Raises UsageError and NumericsError."""
    free = engine.free_memory()
    choice = presets.choose(options.preset, options.precision, kind, engine.facts, checkpoint.largest, free)
    policy = policies.parse(choice.precision, on_gpu=engine.on_gpu, kind=kind)
    _check_fp32(error, policy.name, engine.device)
    check_int8(policy, checkpoint, engine)
    if choice.reason:
        notify("stage", f"--preset {choice.preset}: {policy.name}, since {choice.reason}")
    return Runtime(engine, policy, notify, choice, options.limit, options.quantize)  # type: ignore[arg-type]


def _check_fp32(error: float, precision: str, device: str) -> None:
    """Raise NumericsError if float32 is requested and products are less precise."""
    if precision.startswith("fp32") and not error <= MAX_FP32_ERROR:
        raise NumericsError(
            f"float32 matrix products on {device} are off by {error:.1e} (at most {MAX_FP32_ERROR:.0e}): "
            f"a reduced-precision mode such as TF32 is on; unset MLX_ENABLE_TF32 or use --precision bf16"
        )


def check_int8(policy: Precision, checkpoint: Checkpoint, engine: Engine | OnPaper) -> None:
    """Raise UsageError if `policy` multiplies in 8 bits and `engine` does not, or no weight of a denoiser is a rotated
    8-bit number."""
    if not policy.int8:
        return
    if not engine.workspace.int8:
        raise UsageError(
            f"--precision {clean(policy.name, 40)}: {engine.name} has no products in 8 bits; take --precision bf16, "
            "under which such weights stay in 8 bits too, or another --backend"
        )
    if not any(part.multiplies_int8(policy) for part in checkpoint.denoisers):
        name, part = clean(checkpoint.source.name, 60), policy.kind.denoiser
        raise UsageError(
            f"--precision {clean(policy.name, 40)}: the {part} of {name} is not in int8_convrot, which this is for; "
            f"give one with --{part} (docs/weights.md lists ComfyUI's files), or take --precision bf16 with -q 8"
        )


def _reduced(runtime: Runtime, checkpoint: Checkpoint, entries: dict[str, Any]) -> tuple[Checkpoint, dict[str, Any]]:
    """Return the weights, quantized to the preset's bits and reported if they do not fit otherwise, and the recipe's
    entries."""
    smaller = runtime.reduced(checkpoint)
    if smaller is checkpoint:
        return checkpoint, entries
    bits = runtime.choice.wishes.bits
    sizes = [size_text(one.largest(runtime.precision)) for one in (checkpoint, smaller)]
    budget = size_text(runtime.budget(0))
    text = f"weights in {bits} bits, {sizes[1]} at once, since they would take {sizes[0]} and {budget} are free"
    runtime.notify("stage", f"--preset {runtime.choice.preset}: {text}")
    return smaller, entries | {"quantize": bits}
