"""Rows from which a PixArt is opened: whether it is alpha or sigma, whose texts and latents differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.config import INDEX, read_json
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.opening import SCHEDULER, Opening, Source
from qwenimg.common.families.pixart.known import ALPHA, LCM, LENGTHS, SIGMA
from qwenimg.common.formats.headers import peek
from qwenimg.common.networks.denoisers import pixart_dit, pixart_names
from qwenimg.common.networks.encoders import t5, t5_names
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling.discrete import DiffusionConfig, parse_diffusion

T5 = "text_encoder"
PIPELINES: Mapping[str, str] = {"PixArtAlphaPipeline": ALPHA, "PixArtSigmaPipeline": SIGMA}
"""The variant of each class in model_index.json."""
NETWORKS = {"transformer": pixart_dit.NETWORK, T5: t5.NETWORK, "vae": kl_vae.NETWORK}
LAYOUTS = {"transformer": pixart_names.LAYOUTS, T5: t5_names.LAYOUTS, "vae": kl_vae_names.LAYOUTS}
FITS = (
    fits.text_states(lambda configs: configs[T5].d_model, lambda configs: configs["transformer"].caption_channels),
    fits.LATENTS,
)


def variant_of(transformer: Path) -> str:
    """Return the variant of a transformer in a folder or file: alpha's is shown by its embedding of sizes or the length
    of its empty caption, else by its name. Raises ModelError."""
    if is_file(transformer):
        tensors = peek(transformer).tensors
        caption = next((one for name, one in tensors.items() if name.endswith(pixart_names.EMPTY_CAPTION)), None)
        if any(pixart_names.SEES_SIZE.search(name) for name in tensors):
            return ALPHA
        if caption is not None and len(caption.shape) == 2:
            return ALPHA if caption.shape[0] == LENGTHS[ALPHA] else SIGMA
    name = display_name(transformer).lower()
    return ALPHA if "sigma" not in name and ("alpha" in name or "xl-2" in name) else SIGMA


def of_folder(folder: Path) -> str:
    """Return the variant of a folder in diffusers layout, by its pipeline. Raises ModelError."""
    return PIPELINES[str(read_json(folder / INDEX).get("_class_name"))]


def _variant(source: Source) -> str:
    return of_folder(source.path) if source.has_index else variant_of(_transformer(source))


def _transformer(source: Source) -> Path:
    return source.given.get("transformer", source.path)


def model_of(transformer: Path) -> str:
    """Return the name of the known model that a transformer in a folder or file is of. Raises ModelError."""
    return LCM.name if "lcm" in display_name(transformer).lower() else variant_of(transformer)


def _levels(source: Source) -> DiffusionConfig:
    path = source.small_file(SCHEDULER)
    return parse_diffusion(read_json(path, infinities=True), path)


def complete(checkpoint: Checkpoint, variant: str) -> Checkpoint:
    """Return a checkpoint with its variant; one that is sampled as a latent consistency model is distilled."""
    return replace(checkpoint, variant=variant, distilled=checkpoint.scheduler.class_name == "LCMScheduler")


OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=lambda source: model_of(_transformer(source)),
    variant=_variant,
    levels=_levels,
    tokenizers=lambda source, parts: tokenizers.of_clip_and_t5(source, parts, {}),
    complete=lambda source, checkpoint: complete(checkpoint, source.variant),
)


def described(folder: Path) -> str:
    """Return the model in `folder` and its purpose."""
    return f"{title(of_folder(folder) if is_file(folder / INDEX) else variant_of(folder))}, text to image"


def title(variant: str) -> str:
    """Return the title of a variant."""
    return "PixArt-alpha" if variant == ALPHA else "PixArt-Sigma"
