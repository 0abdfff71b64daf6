"""A pipeline on paper: a model opened for an engine that is only described, to be asked what a picture takes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import catalog, registry
from qwenimg.common.families.choices import Choices
from qwenimg.common.families.registry import Opened
from qwenimg.common.hub.part_files import check_alone
from qwenimg.common.hub.resolve import Resolved, resolve, with_parts_found
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.precision import precision as policies
from qwenimg.common.precision import presets
from qwenimg.common.runtime.paper import OnPaper
from qwenimg.common.runtime.runtime import Runtime


def planned(
    model: str | None,
    engine: OnPaper,
    *,
    precision: str,
    preset: str,
    choices: Choices,
    refiner: str | Path | None = None,
    max_memory: int | None = None,
    offline: bool = False,
) -> tuple[Pipeline, bool]:
    """Headers and configurations are read and checked, and nothing else; and whether they are here. A model that is
    known by name and is not here is planned as it is published. Raises QwenimgError."""
    presets.check(preset)
    choices = with_parts_found(choices)
    check_alone(model, choices)
    with ExitStack() as stack:
        resolved, model_opened, here = opened(model, choices, offline=offline)
        stack.callback(model_opened.checkpoint.close)
        refining = None
        if refiner is not None:
            refining = registry.open_refiner(model_opened, resolve(str(refiner), offline=offline).folder)
            stack.callback(refining.close)
        kind = model_opened.family.precision
        policies.parse(precision, on_gpu=False, kind=kind)
        choice = presets.choose(preset, precision, kind, engine.facts, model_opened.checkpoint.largest, engine.free)
        policy = policies.parse(choice.precision, on_gpu=engine.on_gpu, kind=kind)
        runtime = Runtime(engine, policy, lambda kind, text: None, choice, max_memory, choices.quantize)  # type: ignore[arg-type]
        pipeline = Pipeline(
            model_opened.family.model(runtime, runtime.reduced(model_opened.checkpoint), refining),
            name=resolved.name,
            family=model_opened.family.name,
            defaults=model_opened.defaults(resolved.known),
        )
        stack.pop_all()
        return pipeline, here


def opened(model: str | None, choices: Choices, *, offline: bool) -> tuple[Resolved, Opened, bool]:
    """Return a model's files, and whether they are here: where they are not, the published configuration of a known
    name. Raises QwenimgError."""
    try:
        resolved = resolve(model, offline=offline, without=choices.elsewhere)
    except ModelError:
        known = None if model is None or os.path.lexists(model) or choices.made() else catalog.find(model)
        found = None if known is None else registry.published(known)
        if known is None or found is None:
            raise
        kept = found.checkpoint if choices.quantize is None else found.checkpoint.quantised(choices.quantize)
        return Resolved(folder=kept.source, name=known.name, known=known), replace(found, checkpoint=kept), False
    return resolved, registry.open_model(resolved.folder, choices), True
