"""Flux.1 as it is published, for code that reads no weight: dev and schnell differ in the embedding of the guidance,
and in the schedule."""

from __future__ import annotations

from dataclasses import replace

from qwenimg.common.base.config import parse
from qwenimg.common.families.flux.known import SCHNELL
from qwenimg.common.families.flux.small_files import scheduler
from qwenimg.common.families.flux.variants import FILL, KONTEXT, TEXT, VARIANTS
from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.encoders import clip, t5
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.parts.components import paper_checkpoint
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling.flow_match import FlowMatchConfig

KINDS = {"flux-dev": TEXT, "flux-schnell": TEXT, "flux-kontext": KONTEXT, "flux-fill": FILL}


def published(name: str) -> Checkpoint | None:
    """Return the model known as `name`, without its files; None for another name."""
    if (kind := KINDS.get(name)) is None:
        return None
    guided = name != "flux-schnell"
    transformer = FluxConfig(guidance_embeds=guided)
    if kind is FILL:
        transformer = replace(transformer, in_channels=384, out_channels=64)
    parts = {
        "transformer": (flux_dit.NETWORK, transformer),
        "text_encoder": (clip.NETWORK, clip.VIT_L),
        "text_encoder_2": (t5.NETWORK, T5Config()),
        "vae": (kl_vae.NETWORK, kl_vae.FLUX_1),
    }
    levels = parse(FlowMatchConfig, scheduler(distilled=not guided), source=name)
    return replace(paper_checkpoint(name, parts, levels), variant=kind.name, distilled=not guided)


def defaults(checkpoint: Checkpoint) -> Defaults:
    """Return the defaults of its variant, or of schnell. A model that is not told its guidance has none."""
    if checkpoint.distilled:
        return Defaults(**SCHNELL.usual)
    usual = VARIANTS[checkpoint.variant].defaults
    return usual if checkpoint["transformer"].config.guidance_embeds else replace(usual, guidance=0.0)
