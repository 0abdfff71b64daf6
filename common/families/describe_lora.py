"""The output of `qwenimg info` for a LoRA file: its kind, the program that wrote it, and the model that it fits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean
from qwenimg.common.families.description import Description, listed
from qwenimg.common.formats.stored import Header
from qwenimg.common.weights import delta
from qwenimg.common.weights.lora import LoraFile, Module, fit, read_lora, scale_of
from qwenimg.common.weights.lora_names import Names, find

NO_USE = "use it: no"
_KEY = re.compile(r".*(\.lora_|[._]lora\.|\.hada_w|\.lokr_|\.oft_|\.lora_linear_layer\.|lora_controlnet).*")
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
    ("text_encoder", "diffusers"),
)
_FLUX = ("single_transformer_blocks", "double_blocks", "single_blocks")
_SD3 = ("ff_context", "joint_blocks")
_CROSS = re.compile(r".*attn2[._](processor[._])?to_k")
_WIDTHS = {768: "Stable Diffusion 1.x", 1024: "Stable Diffusion 2.x", 2048: "SDXL", 1280: "the refiner of SDXL"}
_Z_IMAGE = re.compile(r".*((?:layers|noise_refiner|context_refiner)[._]\d+)[._](?:attention[._]|feed_forward|adaLN).*")
_QWEN = re.compile(r".*transformer_blocks[._](\d+)[._](attn|img_|txt_).*")


def is_lora(header: Header) -> bool:
    return any(_KEY.fullmatch(key) for key in header.tensors)


def describe_lora(path: Path, models: Mapping[str, Names]) -> Description:
    """Describe the LoRA at `path` and compare it with known `models`: the names of their layers by the model's name.
    Raises ModelError for a file that is not read."""
    lora = read_lora(path)
    try:
        modules = lora.modules
        kinds = Counter(_kind(module) for module in modules.values())
        writers = dict.fromkeys(_writer(name) for name in modules)
        kind = " and ".join(f"{kind} ({count})" if kinds.keys() - {kind} else kind for kind, count in kinds.items())
        use, faults = _use(lora, models)
        return Description(
            lines=[
                f"layout: {kind}, as written by {' and '.join(writers)}",
                f"modules: {counted(len(modules), 'module')}, {_ranks(lora)}",
                f"fits: {_fits(modules)}",
                f"first modules: {listed(modules)}",
                *use,
            ],
            faults=faults,
        )
    finally:
        lora.close()


def _use(lora: LoraFile, models: Mapping[str, Names]) -> tuple[list[str], list[str]]:
    """Return how the file is used, and its faults: those that generation with each of `models` would report."""
    count, errors = len(lora.modules), dict[str, str]()
    for name, names in models.items():
        try:
            fit(lora, names)
        except ModelError as error:
            errors[name] = str(error).removeprefix(f"{clean(lora.file.path)}: ")
    if able := [name for name in models if name not in errors]:
        used = f"used: {count} of {count} modules by {' or '.join(able)}"
        return [used, f"use it: qwenimg PROMPT -m {able[0]} --lora FILE:SCALE"], []
    matches = {name: _known(lora, names) for name, names in models.items()}
    nearest = max(matches, key=lambda name: matches[name])
    if not matches[nearest][0]:
        return [f"{NO_USE}, none of its modules is a layer of {' or '.join(models)}"], []
    fault = f"for {nearest}: {errors[nearest]}"
    if matches[nearest][0] < count or any(delta.kind_of(frozenset(one.parts)) is None for one in lora.modules.values()):
        return [], [fault]
    return [f"use it: only with a model of its own sizes; {fault}"], []


def _known(lora: LoraFile, names: Names) -> tuple[int, int]:
    """Return how many modules are layers of a model, and how many of those have the layer's number of inputs."""
    targets = [(module, weights[0]) for name, module in lora.modules.items() if (weights := find(names, name))]
    fits = [module.parts["down"].shape[1] == target.shape[1] for module, target in targets if "down" in module.parts]
    return len(targets), sum(fits)


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


def _fits(modules: Mapping[str, Module]) -> str:
    """Return the likely model, by the names and widths of the layers. Only opening that model makes it certain."""
    names = list(modules)
    if width := _cross_width(modules):
        return _WIDTHS.get(width, f"a UNet with text states of {width} channels")
    if any(block in name for name in names for block in _FLUX):
        return "Flux"
    if any(other in name for name in names for other in _SD3):
        return "Stable Diffusion 3"
    if blocks := {match[1] for name in names if (match := _Z_IMAGE.fullmatch(name))}:
        return f"Z-Image ({counted(len(blocks), 'block')})"
    blocks = {match[1] for name in names if (match := _QWEN.fullmatch(name)) and "attn1" not in name}
    if blocks and not any("attn2" in name for name in names):
        return f"Qwen-Image ({counted(len(blocks), 'block')})"
    if any("input_blocks" in name or "down_blocks" in name for name in names):
        return "Stable Diffusion"
    return "unknown"


def _cross_width(modules: Mapping[str, Module]) -> int | None:
    """Return the width of the text states that the UNet's layers take, or None."""
    for name, module in modules.items():
        if _CROSS.fullmatch(name) and "down" in module.parts:
            return module.parts["down"].shape[1]
    return None
