"""Flux.1 as it is published, for code that reads no weight: dev and schnell differ in the embedding of the guidance,
and in the schedule."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.config import parse
from qwenimg.common.families.flux.small_files import scheduler
from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.encoders import clip, t5
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.parts.components import absent_tokenizer, on_paper
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling.flow_match import FlowMatchConfig

GUIDED = {"flux-dev": True, "flux-schnell": False}
"""Whether each published model is told its guidance."""


def published(name: str) -> Checkpoint | None:
    """Return the model known as `name`, without its files; None for another name."""
    if name not in GUIDED:
        return None
    transformer, tokenizer = FluxConfig(guidance_embeds=GUIDED[name]), absent_tokenizer(name)
    return Checkpoint(
        source=Path(name),
        components={
            "transformer": on_paper(flux_dit.NETWORK, transformer, "bfloat16"),
            "text_encoder": on_paper(clip.NETWORK, clip.VIT_L, "bfloat16"),
            "text_encoder_2": on_paper(t5.NETWORK, T5Config(), "bfloat16"),
            "vae": on_paper(kl_vae.NETWORK, kl_vae.FLUX_1, "bfloat16"),
        },
        tokenizers={"text_encoder": tokenizer, "text_encoder_2": tokenizer},
        scheduler=parse(FlowMatchConfig, scheduler(guided=GUIDED[name]), source=name),
    )


def defaults(*, guided: bool) -> Defaults:
    """Return the defaults of a model that is told its guidance, or of one distilled to a few steps."""
    if guided:
        return Defaults(steps=28, guidance=3.5, negative_prompt="")
    return Defaults(steps=4, guidance=0.0, negative_prompt="")
