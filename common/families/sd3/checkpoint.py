"""Rows from which a Stable Diffusion 3 is opened. Its third text encoder, T5, may be absent."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.base.text import clean
from qwenimg.common.families import fits, text_parts, tokenizers
from qwenimg.common.families.fits import Configs, Fit
from qwenimg.common.families.opening import CONFIG, Opening, Source, check_tensors
from qwenimg.common.families.sd3.texts import PADS, T5
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import sd3_dit, sd3_names
from qwenimg.common.networks.encoders import clip, clip_names, t5, t5_names
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.parts import merged_file
from qwenimg.common.parts.components import find_config
from qwenimg.common.parts.texts import clip_files
from qwenimg.common.request.parts import LEFT_OUT
from qwenimg.common.runtime.checkpoint import Checkpoint

NETWORKS: Mapping[str, Network] = {
    "transformer": sd3_dit.NETWORK,
    "text_encoder": clip.NETWORK,
    "text_encoder_2": clip.NETWORK,
    T5: t5.NETWORK,
    "vae": kl_vae.NETWORK,
}


_CLIPS = ("text_encoder", "text_encoder_2")
PREFIXES = {
    "text_encoder": "text_encoders.clip_l.transformer.",
    "text_encoder_2": "text_encoders.clip_g.transformer.",
    T5: "text_encoders.t5xxl.transformer.",
}
"""Of the text encoders in the file of a whole model."""


def parts_of(header: Header) -> list[str]:
    """Return the parts in a file that has a transformer in its authors' names; none of another file."""
    return merged_file.named_parts(header, sd3_names.LAYOUTS, PREFIXES)


def _clips(configs: Configs) -> list[CLIPConfig]:
    return [configs[name] for name in _CLIPS]


FITS = (
    Fit(
        "the transformer wants a pooled text of {} channels, the CLIPs make {}",
        lambda configs: configs["transformer"].pooled_projection_dim,
        lambda configs: [sum(clip.projection_dim or 0 for clip in _clips(configs))],
    ),
    Fit(
        "the transformer wants text states of {} channels, T5 makes {}",
        lambda configs: configs["transformer"].joint_attention_dim,
        lambda configs: [configs[T5].hidden_size] if T5 in configs else [],
    ),
    Fit(
        "the transformer wants text states of {} channels, the CLIPs make {}",
        lambda configs: configs["transformer"].joint_attention_dim,
        lambda configs: [
            max(configs["transformer"].joint_attention_dim, sum(clip.hidden_size for clip in _clips(configs)))
        ],
    ),
    fits.LATENTS,
    fits.MADE_LATENTS,
)


def _networks(source: Source) -> dict[str, Network]:
    """Return the networks of a model: T5 may be absent, given or left out."""
    has_t5 = T5 in parts_of(peek(source.path)) if source.in_one_file else is_file(source.path / T5 / CONFIG)
    wanted = LEFT_OUT not in source.options.parts.values() and (has_t5 or T5 in source.given)
    return {name: network for name, network in NETWORKS.items() if name != T5 or wanted}


def _clip_name(source: Source, path: Path) -> str:
    """Return the name of the CLIP in a folder or file, which its width shows. Raise ModelError."""
    return clip_files.name_of(path, {name: _width(source, name) for name in _CLIPS}, source.path)


def _width(source: Source, name: str) -> int:
    """Return the width of a CLIP of the model; of an absent one, the published width. Raise ModelError."""
    if source.in_one_file and name in parts_of(peek(source.path)):
        return clip_files.width_in(source.path, PREFIXES[name])
    published = partial(source.published, name, clip.NETWORK)
    config: CLIPConfig = find_config(clip.NETWORK, [source.path / name], published)
    return config.hidden_size


def _complete(source: Source, checkpoint: Checkpoint) -> Checkpoint:
    """Return the model. Raise ModelError for CLIPs that are not those of SD 3."""
    if any(checkpoint[name].config.projection_dim is None for name in _CLIPS):
        shown = clean(source.path)
        raise ModelError(f"{shown}: a text encoder has no projection; SD 3 takes CLIPTextModelWithProjection")
    return checkpoint


OPENING = Opening(
    networks=NETWORKS,
    layouts={
        "transformer": sd3_names.LAYOUTS,
        **dict.fromkeys(_CLIPS, clip_names.LAYOUTS),
        T5: t5_names.LAYOUTS,
        "vae": kl_vae_names.LAYOUTS,
    },
    model=lambda source: "sd3-medium",
    tokenizers=lambda source, parts: tokenizers.of_clip_and_t5(source, parts, PADS),
    given=lambda source: text_parts.named_by_tensors(source, T5, _clip_name),
    inside=parts_of,
    networks_of=_networks,
    prefixes=PREFIXES,
    config=text_parts.config,
    notes={T5: " (or --text-encoder none, to draw without T5)"},
    check_file=lambda source, parts: check_tensors(source, parts, "Stable Diffusion 3"),
    complete=_complete,
)
