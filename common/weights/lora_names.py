"""The weight of a model to which a LoRA's module belongs: a table of names, made from the model's own.

Every linear layer and convolution is known by its dotted path, by that with dots as underscores, and by the other names
that its family has for it; one of the prefixes that trainers write for its component comes before. A name of two
weights is our mistake, which building the table finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from qwenimg.common.base.shape import Manifest, Shape

# Prefixes of the denoiser, transformer or unet: trainers write one that they know, or none
DENOISER = (
    "transformer.", "unet.", "diffusion_model.", "model.diffusion_model.", "base_model.model.",
    "base_model.model.transformer.", "base_model.model.unet.", "lora_unet_", "lora_transformer_", "lycoris_",
    "lycoris_unet_", "lycoris_transformer_", "",
)  # fmt: skip
# Prefixes of the only text encoder, and of the first and the second of two
TEXT = ("text_encoder.", "lora_te_", "lora_te1_", "lycoris_te_", "lycoris_text_encoder_")
TEXT_1 = ("text_encoder.", "lora_te1_", "lycoris_te1_")
TEXT_2 = ("text_encoder_2.", "lora_te2_", "lycoris_te2_")


class Target(NamedTuple):
    """One weight of a model."""

    component: str
    name: str  # of the parameter
    shape: Shape


@dataclass(frozen=True, kw_only=True, eq=False)
class ComponentNames:
    """The weights of one component by their names behind any of `prefixes`."""

    prefixes: tuple[str, ...]
    names: Mapping[str, Target]


Names: TypeAlias = tuple[ComponentNames, ...]
Others: TypeAlias = Mapping[str, Iterable[str]]
"""Other dotted names of a layer, by its dotted path."""


def component_names(
    component: str, weights: Manifest, prefixes: tuple[str, ...], others: Others | None = None
) -> ComponentNames:
    """Return the table of `component` with these `weights` (parameter: shape). Only matrices and kernels are in it."""
    names: dict[str, Target] = {}
    for name, shape in weights.items():
        path, _, leaf = name.rpartition(".")
        if leaf != "weight" or len(shape) not in (2, 4):
            continue
        target = Target(component, name, shape)
        for called in (path, *(others or {}).get(path, ())):
            for form in {called, called.replace(".", "_")}:
                assert names.setdefault(form, target) is target, f"{form} is {target.name} and {names[form].name}"
    return ComponentNames(prefixes=prefixes, names=names)


def find(names: Names, module: str) -> Target | None:
    """Return the weight that a file calls `module`, or None."""
    for one in names:
        for prefix in one.prefixes:
            if module.startswith(prefix) and (target := one.names.get(module.removeprefix(prefix))):
                return target
    return None
