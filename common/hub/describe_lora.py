"""The output of `qwenimg info` for a LoRA file: its kind, the program that wrote it, and the model that it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean
from qwenimg.common.families.description import Description, listed
from qwenimg.common.families.family import Family
from qwenimg.common.weights.loras import delta, lora_metadata
from qwenimg.common.weights.loras.lora import LoraFile, counts, fit, read_lora, scale_of, widened
from qwenimg.common.weights.loras.lora_keys import Module
from qwenimg.common.weights.loras.lora_names import Names, find

FITS, NO_USE = "fits: ", "use it: no"
Layers: TypeAlias = Mapping[str, tuple[Family, Names]]
"""Models by their names: the family, and the names that LoRAs give the layers."""
# The start of a module's name, and the program that writes it.
_WRITERS = (
    ("base_model.model.", "PEFT"),
    ("lora_unet_", "kohya, musubi"),
    ("lora_te", "kohya"),
    ("lora_transformer_", "OneTrainer"),
    ("lycoris_", "LyCORIS"),
    ("model.diffusion_model.", "ComfyUI"),
    ("diffusion_model.", "ComfyUI, ai-toolkit"),
    ("transformer.", "diffusers"),
    ("unet.", "diffusers"),
    ("text_encoders.", "ComfyUI"),
    ("text_encoder", "diffusers"),
)


def describe_lora(path: Path, models: Layers) -> Description:
    """Describe the LoRA at `path` and compare it with known `models`. Raises ModelError for a file that is not
    read."""
    lora = read_lora(path)
    try:
        modules = lora.modules
        kinds = Counter(_kind(module) for module in modules.values())
        writers = dict.fromkeys(_writer(name) for name in modules)
        kind = " and ".join(f"{kind} ({count})" if kinds.keys() - {kind} else kind for kind, count in kinds.items())
        errors = _errors(lora, models)
        fits = [name for name in models if name not in errors] or _nearest(lora, models)
        use, faults = _use(lora, models, fits, errors)
        families = (models[name][0] for name in fits)
        titles = dict.fromkeys(one.lora_title(modules) if one.lora_title else one.title for one in families)
        return Description(
            lines=[
                f"layout: {kind}, as written by {' and '.join(writers)}",
                f"modules: {counted(len(modules), 'module')}, {_ranks(lora)}",
                f"{FITS}{' or '.join(titles) or 'unknown'}",
                f"first modules: {listed(modules)}",
                *lora_metadata.lines(lora.metadata),
                *use,
            ],
            faults=faults,
        )
    finally:
        lora.close()


def _errors(lora: LoraFile, models: Layers) -> dict[str, str]:
    """Return the errors that generation with each of `models` would report, by its name; no entry for a model that
    takes the file."""
    errors = dict[str, str]()
    for name, (_, names) in models.items():
        try:
            fit(lora, names)
        except ModelError as error:
            errors[name] = str(error).removeprefix(f"{clean(lora.file.path)}: ")
    return errors


def _nearest(lora: LoraFile, models: Layers) -> list[str]:
    """Return the models that have most of the modules, and of these most with the same number of inputs."""
    matches = {name: _matches(lora, names) for name, (_, names) in models.items()}
    most = max(matches.values())
    return [name for name in matches if matches[name] == most and most[0]]


def _matches(lora: LoraFile, names: Names) -> tuple[int, int]:
    """Return how many modules are layers of a model, and how many of those have the layer's number of inputs."""
    targets = [(module, weights[0]) for name, module in lora.modules.items() if (weights := find(names, name))]
    inputs = [module.parts["down"].shape[1] == target.shape[1] for module, target in targets if "down" in module.parts]
    return len(targets), sum(inputs)


def _use(lora: LoraFile, models: Layers, fits: Sequence[str], errors: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the line that says how the file is used, and its faults: the errors that generation with the first
    model of `fits` reports."""
    count = len(lora.modules)
    if not fits:
        return [f"{NO_USE}, none of its modules is a layer of {' or '.join(models)}"], []
    first = fits[0]
    if first not in errors:
        by_count: dict[str, list[str]] = {}
        for name in fits:
            by_count.setdefault(counts(lora, models[name][1]), []).append(name)
        used = "; ".join(f"{some} by {' or '.join(names)}" for some, names in by_count.items())
        return [f"used: {used}", f"use it: qwenimg PROMPT -m {first} {_option(lora, *models[first])}"], []
    fault = f"for {first}: {errors[first]}"
    known, _ = _matches(lora, models[first][1])
    if known < count or None in (delta.kind_of(frozenset(one.parts)) for one in lora.modules.values()):
        return [], [fault]
    return [f"use it: only with a model of its own sizes; {fault}"], []


def _option(lora: LoraFile, family: Family, names: Names) -> str:
    """Return the option that takes the file, and why where only its name says it."""
    if widened(fit(lora, names), names):
        return "--control FILE=PICTURE (the model sees a control picture with it)"
    if family.control is None or not family.control.names_lora(lora.file.path):
        return "--lora FILE:SCALE"
    return "--control FILE=PICTURE (by its name it is for control pictures; its tensors are those of any LoRA)"


def _kind(module: Module) -> str:
    kind = delta.kind_of(frozenset(module.parts)) or "incomplete"
    return f"DoRA of {kind}" if module.scales.keys() - {"alpha"} else kind


def _writer(name: str) -> str:
    return next((writer for start, writer in _WRITERS if name.startswith(start)), "bare names")


def _ranks(lora: LoraFile) -> str:
    """Return the different ranks and scales: `rank 64, alpha 8 (scale 0.125)`."""
    ranks: dict[str, None] = {}
    for name, module in lora.modules.items():
        rank = delta.rank_of(module.parts)
        if rank is None:
            ranks["whole factors"] = None
            continue
        try:
            scale = scale_of(lora, name, rank)
        except ValueError as error:
            ranks[f"rank {rank}, {error}"] = None
            continue
        ranks[f"rank {rank}, alpha {scale * rank:g} (scale {scale:g})"] = None
    return listed(ranks).replace(" and ", "; and ")
