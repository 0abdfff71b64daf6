"""The weight of a model to which a LoRA's module belongs: a table of names, made from the model's own.

Every linear layer and convolution is known by its path and by the other names that its family has for it, each flat,
with underscores for dots; the words that trainers and programs write for its component may come before, several of them
too. A layer of another layout that is several weights here, such as q, k and v in one, has a name of all of them, each
with its rows. Any other name of two weights is our mistake, which building the table finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.weights.keys import ALL, Place, Rows

# Words in front of a layer's name, flat: those of any component; then those of the denoiser, transformer or UNet, those
# of the only text encoder, and those of the first and the second of two
_ANY = ("base_model_model_", "model_", "module_", "pipe_")
DENOISER = (
    *("transformer_", "unet_", "diffusion_model_", "lora_unet_", "lora_transformer_", "lycoris_"),
    *("dit_", "net_", "lora_prior_unet_"),
)
TEXT = ("text_encoder_", "lora_te_", "lora_prior_te_", "lora_te1_", "lycoris_te_", "lycoris_text_encoder_")
TEXT_1 = ("text_encoder_", "lora_te1_", "lycoris_te1_")
TEXT_2 = ("text_encoder_2_", "lora_te2_", "lycoris_te2_")

MOST_WORDS = 8  # that are left out, with the layer itself
# Layers that diffusers fuses, in the order of their rows: attention to itself, to the text, and the text's own
_FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
_NORM = re.compile(r"\.norm_(added_)?[qk]$")


class Target(NamedTuple):
    """One weight of a model, and its rows in the layer that a name is of: all, or a range, or with swapped halves."""

    component: str
    name: str  # of the parameter
    shape: Shape
    rows: Rows = ALL
    swapped: bool = False
    used: bool = True  # False: the forward does without this layer
    has_bias: bool = False
    widths: tuple[int, ...] = ()  # other numbers of inputs that a LoRA may have for it

    @property
    def layer(self) -> Shape:
        """The shape of the layer's weight."""
        begin, end, of = self.rows
        return (self.shape[0] * of // (end - begin), *self.shape[1:])


@dataclass(frozen=True, kw_only=True, eq=False)
class ComponentNames:
    """The weights of one component by their flat names, which may have `words` in front; several for a layer of several
    weights."""

    words: re.Pattern[str]
    names: Mapping[str, tuple[Target, ...]]
    norms: Mapping[str, tuple[Target, ...]] = field(default_factory=dict)  # of queries and keys, one weight each


Names: TypeAlias = tuple[ComponentNames, ...]
Others: TypeAlias = Mapping[str, Iterable[str]]
"""Other dotted names of a layer, by its dotted path."""
Places: TypeAlias = Mapping[str, Iterable[Place]]
"""The places of a layer in others, whose dotted names are the keys, by its dotted path."""


def flat(name: str) -> str:
    """Return the name of a module or layer with underscores for dots, as kohya's programs write it."""
    return name.replace(".", "_")


def component_names(
    component: str,
    weights: Manifest,
    words: tuple[str, ...],
    others: Others | None = None,
    places: Places | None = None,
    unused: Manifest | None = None,
    widths: Mapping[str, tuple[int, ...]] | None = None,
) -> ComponentNames:
    """Return the table of `component` with these `weights` (parameter: shape). Only matrices and kernels are in it, and
    the norms of queries and keys. `words` are regular expressions. `unused`: those that files of the component have and
    the forward does not use. widths: of a weight, other numbers of inputs that LoRAs have for it."""
    names: dict[str, dict[Rows, Target]] = {}
    norms: dict[str, tuple[Target, ...]] = {}
    every = {**weights, **(unused or {})}
    for name, shape in every.items():
        path, _, leaf = name.rpartition(".")
        is_norm = len(shape) == 1 and _NORM.search(path) is not None
        if leaf != "weight" or (len(shape) not in (2, 4) and not is_norm):
            continue
        called = [Place(path), *map(Place, (others or {}).get(path, ())), *(places or {}).get(path, ())]
        for place in (*called, *_fused(path, every)):
            swapped, used, more = place.decode == "swapped", name in weights, (widths or {}).get(name, ())
            target = Target(component, name, shape, place.rows, swapped, used, f"{path}.bias" in every, more)
            if is_norm:
                norms[flat(place.key)] = (target,)
                continue
            owner = names.setdefault(flat(place.key), {}).setdefault(place.rows, target)
            assert owner == target, f"{place.key} is {target.name} and {owner.name}"
    for form, several in names.items():
        assert len(several) == 1 or all(rows.of > 1 for rows in several), f"{form} is {[*several.values()]}"
    return ComponentNames(
        words=re.compile("|".join(sorted((*_ANY, *words), key=len, reverse=True))),
        names={form: tuple(rows.values()) for form, rows in names.items()},
        norms=norms,
    )


def _fused(path: str, weights: Manifest) -> Iterator[Place]:
    """Yield, for a layer that diffusers fuses with its neighbours of the same shape, its rows in the fused weight."""
    owner, _, layer = path.rpartition(".")
    for fused, layers in _FUSED.items():
        shapes = [weights.get(f"{owner}.{one}.weight") for one in layers]
        if layer in layers and shapes.count(shapes[0]) == len(shapes):
            at = layers.index(layer)
            yield Place(f"{owner}.{fused}", Rows(at, at + 1, len(layers)))


def find(names: Names, module: str, *, norm: bool = False) -> tuple[Target, ...]:
    """Return the weights of the layer that a file calls `module`; none if it is no layer of the model, or one of
    several components that the name does not tell apart. norm: find the weight of a norm."""
    tables = ((one, one.norms if norm else one.names) for one in names)
    layers = [targets for one, table in tables if (targets := _inside(one.words, table, flat(module)))]
    return layers[0] if len(layers) == 1 else ()


def _inside(words: re.Pattern[str], table: Mapping[str, tuple[Target, ...]], path: str) -> tuple[Target, ...]:
    """Return the weights of `path` in the table of one component, whose words in front are left out one by one."""
    for _ in range(MOST_WORDS):
        targets, word = table.get(path, ()), words.match(path)
        if targets or not word:
            return targets
        path = path[word.end() :]
    return ()
