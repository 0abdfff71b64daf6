"""The weight of a model to which a LoRA's module belongs: a table of names, made from the model's own.

Every linear layer and convolution is known by its dotted path, by that with dots as underscores, and by the other names
that its family has for it; one of the prefixes that trainers write for its component comes before. A layer of another
layout that is several weights here, such as q, k and v in one, has a name of all of them, each with its rows. Any other
name of two weights is our mistake, which building the table finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.weights.keys import ALL, Place, Rows

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
    """One weight of a model, and its rows in the layer that a name is of: all, or a range, or with swapped halves."""

    component: str
    name: str  # of the parameter
    shape: Shape
    rows: Rows = ALL
    swapped: bool = False

    @property
    def layer(self) -> Shape:
        """The shape of the layer's weight."""
        begin, end, of = self.rows
        return (self.shape[0] * of // (end - begin), *self.shape[1:])


@dataclass(frozen=True, kw_only=True, eq=False)
class ComponentNames:
    """The weights of one component by their names behind any of `prefixes`; several for a layer of several weights."""

    prefixes: tuple[str, ...]
    names: Mapping[str, tuple[Target, ...]]


Names: TypeAlias = tuple[ComponentNames, ...]
Others: TypeAlias = Mapping[str, Iterable[str]]
"""Other dotted names of a layer, by its dotted path."""
Places: TypeAlias = Mapping[str, Iterable[Place]]
"""The places of a layer in others, whose dotted names are the keys, by its dotted path."""


def component_names(
    component: str,
    weights: Manifest,
    prefixes: tuple[str, ...],
    others: Others | None = None,
    places: Places | None = None,
) -> ComponentNames:
    """Return the table of `component` with these `weights` (parameter: shape). Only matrices and kernels are in it."""
    names: dict[str, dict[Rows, Target]] = {}
    for name, shape in weights.items():
        path, _, leaf = name.rpartition(".")
        if leaf != "weight" or len(shape) not in (2, 4):
            continue
        called = [Place(path), *map(Place, (others or {}).get(path, ())), *(places or {}).get(path, ())]
        for place in called:
            target = Target(component, name, shape, place.rows, place.decode == "swapped")
            for form in {place.key, place.key.replace(".", "_")}:
                owner = names.setdefault(form, {}).setdefault(place.rows, target)
                assert owner == target, f"{form} is {target.name} and {owner.name}"
    for form, several in names.items():
        assert len(several) == 1 or all(rows.of > 1 for rows in several), f"{form} is {[*several.values()]}"
    return ComponentNames(prefixes=prefixes, names={form: tuple(rows.values()) for form, rows in names.items()})


def language_model_names(weights: Manifest, *starts: str) -> ComponentNames:
    """Return the table of a text encoder that is a language model, whose names may have one of `starts` in front."""
    paths = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    return component_names("text_encoder", weights, TEXT, {path: [start + path for start in starts] for path in paths})


def find(names: Names, module: str) -> tuple[Target, ...]:
    """Return the weights of the layer that a file calls `module`; none if it is no layer of the model."""
    for one in names:
        for prefix in one.prefixes:
            if module.startswith(prefix) and (targets := one.names.get(module.removeprefix(prefix))):
                return targets
    return ()
