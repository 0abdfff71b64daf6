"""Rows from which a FLUX.1 is opened: its networks, and the signs of its variants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import INDEX, read_json
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.hf_cache import cached_name, display_name
from qwenimg.common.base.safe_files import absolute, is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families import fits, text_parts, tokenizers
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.flux import mflux, variants
from qwenimg.common.families.flux.texts import CLIP, T5
from qwenimg.common.families.flux.variants import CANNY, DEV, FILL, SCHNELL, TEXT, FluxVariant
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.opening import CONFIG, SCHEDULER, Opening, Source, check_tensors
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.denoisers.flux_dit import PATCH, FluxConfig
from qwenimg.common.networks.denoisers.flux_names import LAYOUTS
from qwenimg.common.networks.encoders import clip, clip_names, t5, t5_names
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.parts import known_configs, merged_file
from qwenimg.common.parts.open_file import stored_shape
from qwenimg.common.prompts.clip import EOS_PAD
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling.flow_match import FlowMatchConfig

# The start of a class's name, and why it is not supported.
REFUSED = {
    "FluxControlNet": "has a ControlNet beside FLUX.1: not supported; give the folder of FLUX.1 alone",
    "FluxPrior": "is FLUX.1 Redux, which goes beside a model: give it as -m flux-dev --ip-adapter FOLDER",
}
PREFIXES = {CLIP: "text_encoders.clip_l.transformer.", T5: "text_encoders.t5xxl.transformer."}
"""Of the text encoders in the file of a whole model, as ComfyUI has it."""
NETWORKS = {"transformer": flux_dit.NETWORK, CLIP: clip.NETWORK, T5: t5.NETWORK, "vae": kl_vae.NETWORK}


def _patch_channels(vae: KLVAEConfig) -> int:
    return PATCH**2 * vae.latent_channels


FITS = (
    fits.text_states(lambda configs: configs[T5].d_model),
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
        "the transformer takes {} channels, the VAE's latents in patches, with a control picture's, or with FLUX.1 "
        "Fill's mask, have {}",
        lambda configs: configs["transformer"].in_channels,
        lambda configs: [
            _patch_channels(configs["vae"]),
            2 * _patch_channels(configs["vae"]),
            2 * _patch_channels(configs["vae"]) + (PATCH * configs["vae"].scale) ** 2,
        ],
    ),
)


def parts_of(header: Header) -> list[str]:
    """Return the parts in a file that has FLUX.1's transformer, in its authors' names; none of another file."""
    return merged_file.named_parts(header, LAYOUTS, PREFIXES)


def model_of(transformer: Path, options: LoadOptions) -> str:
    """Return the name of the published model that the transformer in a folder or file is of. Raises ModelError and
    UsageError."""
    inputs, outputs = (stored_shape(LAYOUTS, transformer, f"{name}.weight") for name in ("x_embedder", "proj_out"))
    more = None if inputs is None or outputs is None else of_channels(inputs[-1], outputs[0], transformer)
    if (kind := _kind_of_part(transformer, options, more)) not in (None, TEXT):
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
    if levels is not None and elsewhere is None:
        return not levels.use_dynamic_shifting
    if (named := variants.is_schnell(_name(elsewhere or path))) is not None:
        return named
    return levels is None or not levels.use_dynamic_shifting


def _kind(folder: Path, options: LoadOptions, dit: FluxConfig) -> FluxVariant:
    """Return the variant that the transformer's file or the user says, else that of `folder`. Raises UsageError and
    ModelError."""
    elsewhere = options.part("transformer")
    more = of_channels(dit.in_channels, dit.out_features, elsewhere or folder)
    if (kind := _kind_of_part(elsewhere, options, more)) is not None:
        return kind
    index = folder / INDEX
    if not is_file(index):
        return variants.of_name(folder.name) or TEXT
    kind = variants.of_pipeline(str(read_json(index).get("_class_name")))
    if kind not in (FILL, CANNY):
        return kind
    if elsewhere is None:
        what = "a mask" if kind is FILL else "a control picture"
        raise ModelError(f"{clean(folder)}: is of class {kind.pipeline}, but its transformer does not take {what}")
    return TEXT


def of_channels(taken: int, made: int, path: Path) -> FluxVariant | None:
    """Return the variant of a transformer at `path` that takes more channels than those that it makes: those of a
    control picture, as many again, or those of Fill's mask; None for another transformer."""
    if taken == made:
        return None
    return variants.of_control(_name(path)) if taken == 2 * made else FILL


def _name(path: Path) -> str:
    place = absolute(path)
    return cached_name(place) or display_name(place)


def _kind_of_part(elsewhere: Path | None, options: LoadOptions, more: FluxVariant | None) -> FluxVariant | None:
    """Return the variant of a transformer: `more`, that of its further channels, else the user's choice, else the
    variant in the name of the file `elsewhere` if the transformer is not the folder's own, else None. Raise
    UsageError."""
    chosen = options.variant_of(variants.ASKED, "FLUX.1")
    if more is not None:
        if chosen is not None:
            what = "the mask" if more is FILL else "a control picture"
            titles = "FLUX.1 Fill" if more is FILL else "FLUX.1 Canny or Depth"
            raise UsageError(f"--variant {chosen}: the transformer has {what} as an input, so it is {titles}")
        return more
    if chosen is not None:
        return variants.VARIANTS.get(chosen, TEXT)  # dev or schnell
    return variants.of_name(elsewhere.name) if elsewhere is not None and not is_folder(elsewhere) else None


def known_name(checkpoint: Checkpoint) -> str:
    """Return the name of the known model that `checkpoint` is like."""
    kind = (SCHNELL if checkpoint.distilled else DEV) if checkpoint.variant == TEXT.name else checkpoint.variant
    return f"flux-{kind}"


def _config(source: Source, part: str, config: Any) -> Any:
    """Return the configuration of a part, of a transformer without one that the model's own tensors show."""
    is_own = not source.in_one_file and part == "transformer" and part not in source.given
    if is_own and not is_file(source.path / part / CONFIG):
        return FluxConfig(**mflux.sizes(source.path))
    return text_parts.config(source, part, config)


def _complete(source: Source, checkpoint: Checkpoint) -> Checkpoint:
    """Return the model with its variant, and with the noise levels of that unless it has its own."""
    dit = checkpoint["transformer"].config
    kind, has_levels = _kind(source.path, source.options, dit), is_file(source.path / SCHEDULER)
    levels = checkpoint.scheduler if has_levels else None
    schnell = kind is TEXT and is_schnell(source.path, source.options, levels, guided=dit.guidance_embeds)
    return replace(
        checkpoint,
        scheduler=levels or known_configs.scheduler(f"flux-{SCHNELL if schnell else DEV}"),
        variant=kind.name,
        distilled=schnell,
    )


OPENING = Opening(
    networks=NETWORKS,
    layouts={
        "transformer": LAYOUTS,
        CLIP: clip_names.LAYOUTS,
        T5: t5_names.LAYOUTS,
        "vae": kl_vae_names.LAYOUTS,
    },
    model=lambda source: f"flux-{SCHNELL}",  # of a model without guidance
    tokenizers=lambda source, parts: tokenizers.of_clip_and_t5(source, parts, {CLIP: EOS_PAD}),
    given=lambda source: text_parts.named_by_tensors(source, T5, lambda source, path: CLIP),
    inside=parts_of,
    prefixes=PREFIXES,
    config=_config,
    # the projection is published with CLIP; the pooled text is not projected
    check_file=lambda source, parts: check_tensors(source, parts, "FLUX.1", [f"{PREFIXES[CLIP]}text_projection."]),
    complete=_complete,
)
