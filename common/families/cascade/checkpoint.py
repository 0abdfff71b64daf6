"""Rows from which a Stable Cascade is opened. Its halves are published apart: the decoder with text encoder and VAE,
and the prior. The encoder of pictures, a file beside the decoder, may be absent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.hf_cache import find_cached
from qwenimg.common.base.safe_files import is_file, is_folder
from qwenimg.common.families import tokenizers
from qwenimg.common.families.cascade.known import CASCADE, EFFNET_FILE, NAME, PRIOR
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.opening import SCHEDULER, Given, Opening, Source, check_tensors, lacks
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import cascade_names, cascade_unet
from qwenimg.common.networks.encoders import clip, clip_names
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import effnet, paella_names, paella_vae
from qwenimg.common.prompts.clip import EOS_PAD
from qwenimg.common.sampling import wuerstchen

EFFNET = "effnet"
"""The encoder of pictures, which makes the latents that the prior learnt."""
NETWORKS: dict[str, Network] = {
    "transformer": cascade_unet.NETWORK,
    "decoder": cascade_unet.NETWORK,
    "text_encoder": replace(clip.NETWORK, stated={"masks_padding": True}),
    "vae": paella_vae.NETWORK,
    EFFNET: effnet.NETWORK,
}
"""The prior is the transformer."""
LAYOUTS = {
    "transformer": cascade_names.PRIOR,
    "decoder": cascade_names.DECODER,
    "text_encoder": clip_names.LAYOUTS,
    "vae": paella_names.LAYOUTS,
    EFFNET: effnet.LAYOUTS,
}
TEXT = "text_encoder.clip_g."
"""The start of the names of the text encoder in ComfyUI's files."""
FITS = (
    Fit(
        "the prior wants text states of {} channels, the text encoder makes {}",
        lambda configs: configs["transformer"].clip_text_in_channels or 0,
        lambda configs: [configs["text_encoder"].hidden_size],
    ),
    Fit(
        "the prior wants a pooled text of {} channels, the text encoder makes {}",
        lambda configs: configs["transformer"].clip_text_pooled_in_channels,
        lambda configs: [configs["text_encoder"].projection_dim or 0],
    ),
    Fit(
        "the decoder wants a pooled text of {} channels, the text encoder makes {}",
        lambda configs: configs["decoder"].clip_text_pooled_in_channels,
        lambda configs: [configs["text_encoder"].projection_dim or 0],
    ),
    Fit(
        "the decoder wants an embedding of {} channels, the prior makes {}",
        lambda configs: configs["decoder"].effnet_in_channels or 0,
        lambda configs: [configs["transformer"].out_channels],
    ),
    Fit(
        "the decoder takes {} channels, the VAE's latents have {}",
        lambda configs: configs["decoder"].in_channels,
        lambda configs: [configs["vae"].latent_channels],
    ),
    Fit(
        "the prior takes {} channels, the encoder of pictures makes {}",
        lambda configs: configs["transformer"].in_channels,
        lambda configs: [configs[EFFNET].latent_channels] if EFFNET in configs else [],
    ),
)


_PRIOR_APART = f" (or: qwenimg pull {PRIOR.name})"


def _given(source: Source) -> Given:
    """Return the parts that are given: the prior, unless it is, is in the folder of the model, or the one of its own
    repository in the hub's cache; and the encoder of pictures. A folder of the prior's own pipeline is taken for its
    prior."""
    given = dict(source.options.parts)
    prior = given.get("transformer")
    if prior is None and (source.in_one_file or not is_folder(source.own("transformer"))):
        prior = find_cached(f"{PRIOR.repo}/prior")
        if prior is None and not source.in_one_file:
            raise lacks(source.path, ["transformer"], _PRIOR_APART)
    if prior is not None:
        inside = prior / "prior"
        given["transformer"] = inside if is_folder(inside) else prior
    encoder = given.get(EFFNET) or _encoder(source, prior)
    return given | ({EFFNET: encoder} if encoder is not None else {})


def _encoder(source: Source, prior: Path | None) -> Path | None:
    """Return the file of the encoder of pictures: beside the parts of the model, in the file of the prior, where
    ComfyUI's has it, or in the hub's cache; None without one."""
    beside = source.path / EFFNET_FILE
    if is_file(beside):
        return beside
    if prior is not None and is_file(prior) and effnet.LAYOUTS.find(peek(prior).tensors) is not None:
        return prior
    return None if is_folder(source.own(EFFNET)) else find_cached(f"{CASCADE.repo}/{EFFNET_FILE}")


def _networks(source: Source) -> dict[str, Network]:
    has_encoder = EFFNET in source.given or is_folder(source.own(EFFNET))
    return {name: network for name, network in NETWORKS.items() if name != EFFNET or has_encoder}


def _levels(source: Source) -> Any:
    path = source.small_file(SCHEDULER)
    return wuerstchen.parse_cosine(read_json(path), path)


def parts_of(header: Header) -> list[str]:
    """Return the parts in a file that has a decoder; none of another file."""
    if cascade_names.DECODER.find_in(header) is None:
        return []
    has_text = any(name.startswith(TEXT) for name in header.tensors)
    has_vae = paella_names.LAYOUTS.find(header.tensors) is not None
    return ["decoder", *(["text_encoder"] if has_text else []), *(["vae"] if has_vae else [])]


OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=lambda source: NAME,
    tokenizers=lambda source, parts: tokenizers.of_clip_and_t5(source, parts, {"text_encoder": EOS_PAD}),
    levels=_levels,
    given=_given,
    folders={"transformer": ("prior", "prior_prior"), "vae": ("vqgan",)},
    inside=parts_of,
    networks_of=_networks,
    prefixes={"text_encoder": TEXT},
    notes={"transformer": _PRIOR_APART},
    check_file=lambda source, parts: check_tensors(source, parts, "Stable Cascade", ("vae.down_blocks.",)),
)
