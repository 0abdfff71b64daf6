"""Stable Diffusion 3 and 3.5 as they are published, for code that reads no weight, and the defaults of their cards."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.config import parse
from qwenimg.common.base.hf_cache import told_name
from qwenimg.common.families.sd3.known import LARGE, LARGE_TURBO, MEDIUM, SD3_MEDIUM
from qwenimg.common.families.sd3.small_files import SCHEDULER
from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.networks.denoisers import sd3_dit
from qwenimg.common.networks.denoisers.sd3_dit import SD3Config
from qwenimg.common.networks.encoders import clip, t5
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.parts.components import paper_checkpoint
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling.flow_match import FlowMatchConfig

TURBO = "turbo"  # in the name of a distilled model, whose files do not show it
LARGE_LAYERS = 38
_BLOCK = re.compile(r"(?:joint|transformer)_blocks\.(\d{1,4})\.")
_DTYPES = {
    "sd3-medium": "float16",
    "sd3.5-medium": "bfloat16",
    "sd3.5-large": "bfloat16",
    "sd3.5-large-turbo": "bfloat16",
}


def transformer(name: str) -> SD3Config:
    """Return the configuration of the transformer of the model known as `name`."""
    if name == "sd3-medium":
        return SD3Config()
    if name == "sd3.5-medium":
        return SD3Config(pos_embed_max_size=384, dual_attention_layers=tuple(range(13)), qk_norm="rms_norm")
    return SD3Config(num_layers=LARGE_LAYERS, num_attention_heads=38, caption_projection_dim=2432, qk_norm="rms_norm")


def model_of(transformer: Path) -> str:
    """Return the name of the published model that the transformer in a folder or file is of, by its layers, and for
    the distilled one by its name. Raises ModelError."""
    names = [key for file in find_files(transformer).files for key in peek(file).tensors]
    count = len({match[1] for key in names if (match := _BLOCK.search(key))})
    if count == LARGE_LAYERS:
        return f"sd3.5-large{'-turbo' if TURBO in told_name(transformer).lower() else ''}"
    return "sd3.5-medium" if any(".attn2." in key for key in names) else "sd3-medium"


def text(name: str) -> CLIPConfig | T5Config:
    """Return the configuration of the text encoder with this name in every model."""
    clips = {"text_encoder": replace(clip.VIT_L, projection_dim=768), "text_encoder_2": clip.OPEN_CLIP_BIG_G}
    return clips.get(name) or T5Config()


def published(name: str) -> Checkpoint | None:
    """Return the model known as `name`, without its files; None for another name."""
    if name not in _DTYPES:
        return None
    rows = {
        "transformer": (sd3_dit.NETWORK, transformer(name)),
        "text_encoder": (clip.NETWORK, text("text_encoder")),
        "text_encoder_2": (clip.NETWORK, text("text_encoder_2")),
        T5: (t5.NETWORK, text(T5)),
        "vae": (kl_vae.NETWORK, kl_vae.STABLE_DIFFUSION_3),
    }
    return paper_checkpoint(name, rows, parse(FlowMatchConfig, SCHEDULER, source=name), _DTYPES[name])


def defaults(checkpoint: Checkpoint) -> Defaults:
    """Return the defaults of a variant, which its layers show; of the distilled one, its name."""
    config: SD3Config = checkpoint["transformer"].config
    if TURBO in checkpoint.source.name.lower():
        return Defaults(**LARGE_TURBO.usual)
    if config.num_layers == LARGE_LAYERS:
        return Defaults(**LARGE.usual)
    return Defaults(**(MEDIUM if config.dual_attention_layers else SD3_MEDIUM).usual)
