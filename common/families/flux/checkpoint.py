"""A Flux.1 folder in diffusers layout, or as mflux saves it, or one file, with parts in other folders and files: its
configurations and load plans, all checked before a weight is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.hf_cache import cached_name, display_name
from qwenimg.common.base.safe_files import absolute, bad, is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.flux import mflux, single_file, variants
from qwenimg.common.families.flux.texts import CLIP, T5
from qwenimg.common.families.flux.variants import DEV, FILL, KONTEXT, SCHNELL, TEXT, FluxVariant
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.formats.headers import peek
from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.denoisers.flux_dit import PATCH, FluxConfig
from qwenimg.common.networks.denoisers.flux_names import LAYOUTS
from qwenimg.common.networks.encoders import clip, t5
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.components import (
    find_config,
    given_twice,
    is_bare,
    open_component,
    open_tokenizer,
    read_config,
)
from qwenimg.common.parts.open_file import open_part, stored_shape
from qwenimg.common.parts.texts import clip_files, t5_files
from qwenimg.common.parts.texts.clip_tokenizer import find_clip_tokenizer
from qwenimg.common.parts.texts.t5_tokenizer import find_t5_tokenizer
from qwenimg.common.prompts import clip as clip_tokenizer
from qwenimg.common.prompts import t5 as t5_tokenizer
from qwenimg.common.runtime.checkpoint import Checkpoint, Component, TokenizerFiles
from qwenimg.common.sampling import flow_match
from qwenimg.common.sampling.flow_match import FlowMatchConfig
from qwenimg.common.weights.plan import closed_on_failure

# The start of a class's name, and why it is not supported.
REFUSED = {
    "FluxControl": "is a Flux.1 model for control images: not supported",
    "FluxPrior": "is Flux.1 Redux: not supported",
}
_SCHEDULER = Path("scheduler") / "scheduler_config.json"
NETWORKS = {"transformer": flux_dit.NETWORK, CLIP: clip.NETWORK, T5: t5.NETWORK, "vae": kl_vae.NETWORK}


def _patch_channels(vae: KLVAEConfig) -> int:
    return PATCH**2 * vae.latent_channels


FITS = (
    Fit(
        "the transformer wants text states of {} channels, the text encoder makes {}",
        lambda configs: configs["transformer"].joint_attention_dim,
        lambda configs: [configs[T5].d_model],
    ),
    Fit(
        "the transformer wants a pooled text of {} channels, CLIP makes {}",
        lambda configs: configs["transformer"].pooled_projection_dim,
        lambda configs: [configs[CLIP].hidden_size],
    ),
    Fit(
        "the transformer makes {} channels, the VAE's latents have {} in patches",
        lambda configs: configs["transformer"].out_features,
        lambda configs: [_patch_channels(configs["vae"])],
    ),
    Fit(
        "the transformer takes {} channels, the VAE's latents in patches, or with FLUX.1 Fill's mask, have {}",
        lambda configs: configs["transformer"].in_channels,
        lambda configs: [
            _patch_channels(configs["vae"]),
            2 * _patch_channels(configs["vae"]) + (PATCH * configs["vae"].scale) ** 2,
        ],
    ),
)


def open_checkpoint(path: Path, options: LoadOptions) -> Checkpoint:
    """Open the model in the folder or file `path`, with the parts that `options` has elsewhere. Raises ModelError and
    UsageError."""
    return _open_file(path, options) if is_file(path) else _open_folder(path, options)


def model_of(transformer: Path, options: LoadOptions) -> str:
    """Return the name of the published model that the transformer in a folder or file is of. Raises ModelError and
    UsageError."""
    inputs, outputs = (stored_shape(LAYOUTS, transformer, f"{name}.weight") for name in ("x_embedder", "proj_out"))
    sees_mask = inputs is not None and outputs is not None and inputs[-1] != outputs[0]
    if (kind := _kind_of_part(transformer, options, sees_mask=sees_mask)) in (KONTEXT, FILL):
        return f"flux-{kind.name}"
    guided = stored_shape(LAYOUTS, transformer, "time_text_embed.guidance_embedder.linear_1.weight") is not None
    return "flux-schnell" if is_schnell(transformer, options, None, guided=guided) else "flux-dev"


def is_schnell(path: Path, options: LoadOptions, levels: FlowMatchConfig | None, *, guided: bool) -> bool:
    """Return whether the text-to-image model in the folder or file `path` was distilled to few steps: as the user says,
    or the name of a file, or `levels`, those of the model's own scheduler. A file without guidance that says nothing is
    taken for schnell. Raises UsageError."""
    chosen = options.variant_of(variants.ASKED, "FLUX.1")
    if guided and chosen == SCHNELL:
        raise UsageError(f"--variant {chosen}: the transformer is guidance-distilled, so it is FLUX.1 dev")
    if guided or chosen in (DEV, SCHNELL):
        return chosen == SCHNELL
    elsewhere = options.part("transformer")
    place = absolute(elsewhere or path)
    if levels is not None and elsewhere is None:
        return not levels.use_dynamic_shifting
    if (named := variants.is_schnell(cached_name(place) or display_name(place))) is not None:
        return named
    return levels is None or not levels.use_dynamic_shifting


def _open_file(path: Path, options: LoadOptions) -> Checkpoint:
    parts, inside = _places(options), single_file.parts_of(peek(path))
    _check_there(path, {*inside, *parts})
    components: dict[str, Component] = {}
    with closed_on_failure() as keep:
        for name in NETWORKS:
            if (place := parts.get(name)) is None:
                components[name] = single_file.open_part(path, name, for_rewrite=options.for_rewrite)
            else:
                components[name] = _component(path, name, place, _published(name), for_rewrite=options.for_rewrite)
            keep(components[name].plan)
        inner = {name: part for name, part in components.items() if name not in parts}
        single_file.check_known(path, inner, [name for name in inside if name in parts])
        dit = components["transformer"].config
        kind = _kind(path, options, dit)
        tokenizers = _tokenizers(path, options, components)
        schnell = _is_distilled(path, options, dit, kind, None)
    return Checkpoint(
        source=path,
        components=components,
        tokenizers=tokenizers,
        scheduler=known_configs.scheduler(f"flux-{SCHNELL if schnell else DEV}"),
        variant=kind.name,
        distilled=schnell,
    )


def _open_folder(folder: Path, options: LoadOptions) -> Checkpoint:
    """Read every configuration and header of `folder` and of the parts that `options` has elsewhere, and check them
    against the manifests. Raises ModelError and UsageError."""
    parts, has_index = _places(options), is_file(folder / "model_index.json")
    configs = {name: _config(folder, name, has_index=has_index, replaced=name in parts) for name in NETWORKS}
    _check_there(folder, [name for name in NETWORKS if name in parts or not is_bare(folder / name)])
    components: dict[str, Component] = {}
    with closed_on_failure() as keep:
        for name in NETWORKS:
            components[name] = _component(folder, name, parts.get(name), configs[name], for_rewrite=options.for_rewrite)
            keep(components[name].plan)
        dit = components["transformer"].config
        kind = _kind(folder, options, dit)
        tokenizers = _tokenizers(folder, options, components)
        levels = read_levels(folder) if has_index or is_file(folder / _SCHEDULER) else None
        schnell = _is_distilled(folder, options, dit, kind, levels)
    return Checkpoint(
        source=folder,
        components=components,
        tokenizers=tokenizers,
        scheduler=levels or known_configs.scheduler(f"flux-{SCHNELL if schnell else DEV}"),
        variant=kind.name,
        distilled=schnell,
    )


def _check_there(path: Path, there: Collection[str]) -> None:
    """Raise ModelError unless all parts of the model at `path` are `there`."""
    if absent := [name for name in NETWORKS if name not in there]:
        options = " ".join(f"--{'text-encoder' if 'text' in name else name} FILE" for name in absent)
        raise bad(path, f"lacks {', '.join(absent)}: add {options}, or give a file or folder of the whole model")


def _tokenizers(path: Path, options: LoadOptions, components: Mapping[str, Component]) -> dict[str, TokenizerFiles]:
    """Return the tokenizers of the model in the folder or file `path`, which may have none. Raise ModelError and
    UsageError."""
    clip_config, t5_config = components[CLIP].config, components[T5].config
    inside = path / "tokenizer"
    if is_folder(inside):
        if options.tokenizer is not None:
            raise UsageError(f"--tokenizer is for a model that has none; {clean(path, 80)} has its own")
        return {
            CLIP: open_tokenizer(inside, clip_tokenizer.load, clip_config),
            T5: open_tokenizer(path / "tokenizer_2", t5_tokenizer.load, t5_config),
        }
    near = (options.part("transformer") if is_folder(path) else None) or path  # beside its files
    words = find_clip_tokenizer(near, clip_config.vocab_size, options.tokenizer)
    pieces = find_t5_tokenizer(near, t5_config.vocab_size, options.tokenizer)
    return {
        CLIP: open_tokenizer(words, partial(clip_tokenizer.load, pad=clip_tokenizer.EOS_PAD), clip_config),
        T5: open_tokenizer(pieces, t5_tokenizer.load, t5_config),
    }


def _kind(folder: Path, options: LoadOptions, dit: FluxConfig) -> FluxVariant:
    """Return the variant that the transformer's file or the user says, else that of `folder`. Raises UsageError and
    ModelError."""
    elsewhere, sees_mask = options.part("transformer"), dit.in_channels != dit.out_features
    if (kind := _kind_of_part(elsewhere, options, sees_mask=sees_mask)) is not None:
        return kind
    index = folder / "model_index.json"
    if not is_file(index):
        return variants.of_name(folder.name) or TEXT
    kind = variants.of_pipeline(str(read_json(index).get("_class_name")))
    if kind is FILL and elsewhere is None:
        raise ModelError(f"{clean(folder)}: is of class {FILL.pipeline}, but its transformer does not take a mask")
    return TEXT if kind is FILL else kind


def _kind_of_part(elsewhere: Path | None, options: LoadOptions, *, sees_mask: bool) -> FluxVariant | None:
    """Return the variant of a transformer: Fill if it takes a mask, else the user's choice, else the variant in the
    name of the file `elsewhere` if the transformer is not the folder's own, else None. Raise UsageError."""
    chosen = options.variant_of(variants.ASKED, "FLUX.1")
    if sees_mask:
        if chosen is not None:
            raise UsageError(f"--variant {chosen}: the transformer has the mask as an input, so it is FLUX.1 Fill")
        return FILL
    if chosen is not None:
        return variants.VARIANTS.get(chosen, TEXT)  # dev or schnell
    return variants.of_name(elsewhere.name) if elsewhere is not None and not is_folder(elsewhere) else None


def _is_distilled(
    path: Path, options: LoadOptions, dit: FluxConfig, kind: FluxVariant, levels: FlowMatchConfig | None
) -> bool:
    return kind is TEXT and is_schnell(path, options, levels, guided=dit.guidance_embeds)


def read_levels(folder: Path) -> FlowMatchConfig:
    """Return the noise levels of the model in `folder`, of its own scheduler. Raises ModelError."""
    path = folder / _SCHEDULER
    return flow_match.read_config(read_json(path), path)


def known_name(checkpoint: Checkpoint) -> str:
    """Return the name of the known model that `checkpoint` is like."""
    kind = (SCHNELL if checkpoint.distilled else DEV) if checkpoint.variant == TEXT.name else checkpoint.variant
    return f"flux-{kind}"


def _places(options: LoadOptions) -> dict[str, Path]:
    """Return the folders and files of parts that are elsewhere, by component. What a text encoder is, its file shows.
    Raises ModelError and UsageError."""
    places: dict[str, Path] = {}
    for part, path in options.parts.items():
        name = (T5 if t5_files.is_t5(path) else CLIP) if part.startswith("text_encoder") else part
        if name in places:
            raise given_twice(name, places[name], path)
        places[name] = path
    return places


def _config(folder: Path, name: str, *, has_index: bool, replaced: bool) -> Any:
    """Return the configuration of a component in `folder`, or the published one if `folder` has no
    model_index.json or the weights are `replaced`. Raises ModelError."""

    def published() -> Any:
        if name == "transformer" and not replaced:
            return FluxConfig(**mflux.sizes(folder))
        return _published(name)

    return find_config(NETWORKS[name], [folder / name], published if replaced or not has_index else None, REFUSED)


def _published(name: str) -> Any:
    """Return the published configuration of a component: of a model without guidance."""
    return known_configs.read(f"flux-{SCHNELL}", name, NETWORKS[name])


def _component(folder: Path, name: str, place: Path | None, config: Any, *, for_rewrite: bool) -> Component:
    """Open the component `name` in `folder`, or in `place`, with the `config` of the model's own. Raises ModelError."""
    if place is None:
        return open_component(NETWORKS[name], folder / name, config, name, for_rewrite=for_rewrite)
    if name == "transformer":
        return open_part(LAYOUTS, place, config, name, for_rewrite=for_rewrite)
    if name == "vae":
        return open_part(kl_vae_names.LAYOUTS, place, config, name, for_rewrite=for_rewrite)
    if name == T5:
        return t5_files.open_t5(place, name, for_rewrite=for_rewrite)
    if is_folder(place):
        return open_component(clip.NETWORK, place, read_config(clip.NETWORK, place), name, for_rewrite=for_rewrite)
    return clip_files.open_file(place, name, config, is_known=is_file(folder / name / "config.json"))
