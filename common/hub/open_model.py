"""Opening of a model as a pipeline: on an engine, or on paper for a plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import ModelError, NumericsError
from qwenimg.common.families import catalog, registry
from qwenimg.common.families.opening import Opening
from qwenimg.common.families.registry import Opened
from qwenimg.common.hub.model_folders import ModelFolders, read_folders
from qwenimg.common.hub.network_search import find_control, find_upscaler, read_upscaler
from qwenimg.common.hub.origin import model_hash, origin, with_refiner
from qwenimg.common.hub.part_files import completed, located
from qwenimg.common.hub.resolve import Resolved, resolve
from qwenimg.common.measure import exactness
from qwenimg.common.parts.control_net import Controller
from qwenimg.common.pipeline.controls import Controls
from qwenimg.common.pipeline.models.inputs import OtherModels
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.rank_pipeline import RankPipeline
from qwenimg.common.pipeline.second_pass import Upscalers
from qwenimg.common.precision import precision as policies
from qwenimg.common.precision import presets
from qwenimg.common.prompts.wildcards import Wildcards
from qwenimg.common.request.loras import Loras
from qwenimg.common.runtime.checkpoint import Checkpoint, Reports
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.paper import OnPaper
from qwenimg.common.runtime.runtime import Notices, Runtime
from qwenimg.common.shapes import builtin

MAX_FP32_ERROR = 1e-5  # relative error of a product
OTHERS = OtherModels(several=catalog.SEVERAL, describing=catalog.DESCRIBING)
Notify = Callable[[str, str], None]


def ignore(kind: str, text: str) -> None:
    """Drop a message."""


# Files


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """The files of a model and of its refiner: checked, and open until they are closed."""

    opening: Opening  # with paths in place of names
    resolved: Resolved
    opened: Opened
    here: bool = True  # False: the files are not here, and `opened` is a known model's published configuration
    refining: tuple[Resolved, Checkpoint] | None = None

    @property
    def reports(self) -> Reports:
        """The messages on the files of both."""
        refiner = () if self.refining is None else self.refining[1].reports
        return self.opened.checkpoint.reports + refiner

    def close(self) -> None:
        self.opened.checkpoint.close()


def open_files(opening: Opening, *, planned: bool = False, published: bool = False) -> ModelFiles:
    """Open the files that `opening` names and check everything about them; no weight is read. Raises QwenimgError.

    planned: read only headers and configurations, and take a known model that is not here as it is published.
    published: take a known model so although it is here."""
    opening = completed(opening)
    with ExitStack() as stack:
        resolved, opened, here = _model(opening, planned=planned, published=published)
        stack.callback(opened.checkpoint.close)
        if not planned:
            opened.checkpoint.read_tokenizers()
        refining = None
        if opening.refiner is not None:
            second = resolve(opening.refiner, offline=opening.offline)
            refining = second, registry.open_refiner(opened, second.folder)
            opened = replace(opened, checkpoint=replace(opened.checkpoint, refiner=refining[1]))
        stack.pop_all()
        return ModelFiles(opening=opening, resolved=resolved, opened=opened, here=here, refining=refining)


def _model(opening: Opening, *, planned: bool, published: bool) -> tuple[Resolved, Opened, bool]:
    """Return the files of the model, and whether they are here."""
    choices = opening.choices
    if published and (model := _published(opening)) is not None:
        return *model, False
    try:
        resolved = resolve(opening.model, offline=opening.offline, without=choices.elsewhere)
    except ModelError:
        model = _published(opening) if planned else None
        if model is None:
            raise
        return *model, False
    return resolved, registry.open_model(resolved.folder, choices), True


def _published(opening: Opening) -> tuple[Resolved, Opened] | None:
    """Return a known model as it is published; None for another one, and if parts of it are given."""
    name, choices = opening.model, opening.choices
    known = None if name is None or os.path.lexists(name) or choices.made() else catalog.find(name)
    opened = None if known is None else registry.published(known)
    if known is None or opened is None:
        return None
    checkpoint = opened.checkpoint
    if choices.quantize is not None:
        checkpoint = checkpoint.quantized(choices.quantize)
    return Resolved(folder=checkpoint.source, name=known.name, known=known), replace(opened, checkpoint=checkpoint)


# Pipelines


def open_pipeline(
    opening: Opening,
    engine: Callable[[], Engine],
    notify: Notify = ignore,
    real_model: Callable[[Engine], str] = lambda engine: builtin.real_model(),
) -> Pipeline:
    """Open the model that `opening` names on `engine`, which is called once its files have passed all checks. Weights
    are read when they are first needed. notify(kind, text) gets stages, warnings and notices. real_model: returns the
    commands for a real model, for the notice of the built-in one. Raises QwenimgError."""
    folders, opening = located(opening)
    wildcards, notify = Wildcards(opening.wildcards), Notices(notify)
    with ExitStack() as stack:
        files = open_files(opening)
        stack.callback(files.close)
        entries = _entries(files)
        for report in files.reports:
            notify(*report)
        kind = files.opened.family.precision
        policies.parse(opening.precision, on_gpu=False, kind=kind)  # before a framework is imported
        ready = engine()
        if opening.model is None and files.resolved.known is catalog.BUILT_IN:
            notify("notice", builtin.notice(files.opened.checkpoint.parameters, real_model(ready)))
        error = exactness.float32_error(ready)
        runtime = _runtime(files, opening, ready, notify, error)
        if opening.cache_prompts:
            runtime.keep_prompts()
        checkpoint, entries = _reduced(runtime, files.opened.checkpoint, entries)
        pipeline = _kind_of(ready)(
            files.opened.family.model(runtime, checkpoint),
            loras=Loras(cache(lambda: files.opened.family.lora_names(checkpoint))),
            others=OTHERS,
            name=files.resolved.name,
            family=files.opened.family.name,
            defaults=files.opened.defaults(files.resolved.known),
            tf32=error > MAX_FP32_ERROR,
            fallback=opening.fallback,
            options=entries,
            checkpoint=checkpoint,
            find_loras=folders.loras,
            hashes=model_hash(files.opened),
            controls=_controls(files.opened, checkpoint, folders),
            wildcards=wildcards,
            upscalers=_upscalers(folders),
            **({"advise": builtin.advise} if files.resolved.known is catalog.BUILT_IN else {}),
        )
        if opening.compile != "auto":
            pipeline.compile(opening.compile)
        stack.pop_all()  # from here on the pipeline closes them
    return pipeline


def plan_pipeline(opening: Opening, engine: OnPaper, *, published: bool = False) -> tuple[Pipeline, bool]:
    """Open the model on an engine that is only described, to plan images; return it, and whether its files are here.
    published: take a known model as it is published, although it may be here. Raises QwenimgError."""
    with ExitStack() as stack:
        files = open_files(opening, planned=True, published=published)
        stack.callback(files.close)
        kind = files.opened.family.precision
        policies.parse(opening.precision, on_gpu=False, kind=kind)
        runtime = _runtime(files, opening, engine, ignore)
        checkpoint, folders = runtime.reduced(files.opened.checkpoint), read_folders(opening.models_dir)
        pipeline = _kind_of(engine)(
            files.opened.family.model(runtime, checkpoint),
            loras=Loras(cache(lambda: files.opened.family.lora_names(checkpoint))),
            others=OTHERS,
            name=files.resolved.name,
            family=files.opened.family.name,
            defaults=files.opened.defaults(files.resolved.known),
            controls=_controls(files.opened, checkpoint, folders, planned=True),
            wildcards=Wildcards(opening.wildcards),
            upscalers=_upscalers(folders),
        )
        stack.pop_all()
        return pipeline, files.here


def _kind_of(engine: Engine | OnPaper) -> type[Pipeline]:
    """Return the class of a pipeline on `engine`, which may be that of one rank of several."""
    return Pipeline if engine.group is None else RankPipeline


def _controls(opened: Opened, checkpoint: Checkpoint, folders: ModelFolders, *, planned: bool = False) -> Controls:
    """Return the control networks of a model, found by their names on this machine. planned: take a known one that is
    not here as it is published."""
    family = opened.family
    if family.control is None:
        able = registry.titles(lambda other: other.control is not None)
        return Controls(refusal=f"control networks are for {able}, and the model is {family.title}")
    open_net, published = family.control, (family.published_control or (lambda name: None)) if planned else None

    def find(name: str) -> Path:
        try:
            return find_control(name, folders)
        except ModelError:
            if published is None or published(name) is None:
                raise
            return Path(name)

    def opened_net(path: Path) -> Controller:
        net = published(str(path)) if published is not None and not os.path.lexists(path) else None
        return net or open_net(path, checkpoint)

    return Controls(opened_net, find)


def _upscalers(folders: ModelFolders) -> Upscalers:
    """Return the upscalers of second passes, found by their names on this machine."""
    return Upscalers(lambda name: read_upscaler(find_upscaler(name, folders, "--hires-with")))


def _entries(files: ModelFiles) -> dict[str, Any]:
    """Return the entries of a recipe for the files."""
    entries = origin(files.resolved, files.opened, files.opening.choices)
    if files.refining is None:
        return entries
    resolved, checkpoint = files.refining
    return with_refiner(entries, resolved, files.opened, checkpoint)


def _runtime(
    files: ModelFiles, opening: Opening, engine: Engine | OnPaper, notify: Notify, error: float = 0.0
) -> Runtime:
    """Return the engine with the policy that preset and precision choose for this model, and report the choice of
    `auto` and its reason. error: of a float32 product."""
    opened, kind = files.opened, files.opened.family.precision
    free = engine.free_memory()
    choice = presets.choose(opening.preset, opening.precision, kind, engine.facts, opened.checkpoint.largest, free)
    policy = policies.parse(choice.precision, on_gpu=engine.on_gpu, kind=kind)
    _check_fp32(error, policy.name, engine.device)
    if choice.reason:
        notify("stage", f"--preset {choice.preset}: {policy.name}, since {choice.reason}")
    return Runtime(engine, policy, notify, choice, opening.limit, opening.quantize)  # type: ignore[arg-type]


def _check_fp32(error: float, precision: str, device: str) -> None:
    """Raise NumericsError if float32 is requested and products are less precise."""
    if precision.startswith("fp32") and not error <= MAX_FP32_ERROR:
        raise NumericsError(
            f"float32 matrix products on {device} are off by {error:.1e} (at most {MAX_FP32_ERROR:.0e}): "
            f"a reduced-precision mode such as TF32 is on; unset MLX_ENABLE_TF32 or use --precision bf16"
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
