"""Rows from which a Z-Image is opened: its networks, and the sign of Turbo."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.opening import Opening
from qwenimg.common.families.z_image.known import SMALL_FILES, TURBO, of_name
from qwenimg.common.networks.denoisers import zimage_dit, zimage_names
from qwenimg.common.networks.encoders import language_names, qwen
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.parts import known_configs
from qwenimg.common.sampling.flow_match import FlowMatchConfig

NETWORKS = {"transformer": zimage_dit.NETWORK, "text_encoder": qwen.QWEN3, "vae": kl_vae.NETWORK}
FITS = (
    fits.text_states(
        lambda configs: configs["text_encoder"].hidden_size, lambda configs: configs["transformer"].cap_feat_dim
    ),
    fits.LATENTS,
)


OPENING = Opening(
    networks=NETWORKS,
    layouts={
        "transformer": zimage_names.LAYOUTS,
        "text_encoder": language_names.QWEN3,
        "vae": kl_vae_names.LAYOUTS,
    },
    model=lambda source: of_name(display_name(source.path)).name,
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES),
)


def purpose(folder: Path) -> str:
    """Return the model in `folder`, which the shift of its noise levels tells, and its purpose."""
    try:
        levels = OPENING.levels(OPENING.source(folder, LoadOptions()))
    except ModelError:  # opening the folder says why
        return "Z-Image, text to image"
    return f"{'Z-Image-Turbo' if is_turbo(levels) else 'Z-Image'}, text to image"


def is_turbo(levels: FlowMatchConfig) -> bool:
    """Return whether `levels` are the noise levels of Turbo: nothing else in its files tells it from the base model."""
    return bool(levels.shift == known_configs.scheduler(TURBO.name).shift)
