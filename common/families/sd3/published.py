"""Stable Diffusion 3 and 3.5 as they are published, for code that reads no weight, and the defaults of their cards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from qwenimg.common.base.config import parse
from qwenimg.common.families.sd3.small_files import SCHEDULER
from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.networks import clip, kl_vae, sd3_dit, t5
from qwenimg.common.networks.kl_vae import KLVAEConfig
from qwenimg.common.networks.sd3_dit import SD3Config
from qwenimg.common.networks.t5 import T5Config
from qwenimg.common.parts.components import absent_tokenizer, on_paper
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling.flow_match import FlowMatchConfig

CLIP_L = replace(clip.VIT_L, projection_dim=768)
CLIP_G = clip.OPEN_CLIP_BIG_G
VAE = KLVAEConfig(
    block_out_channels=(128, 256, 512, 512),
    layers_per_block=2,
    latent_channels=16,
    sample_size=1024,
    scaling_factor=1.5305,
    shift_factor=0.0609,
    use_quant_conv=False,
    use_post_quant_conv=False,
)
MEDIUM = SD3Config()
MEDIUM_35 = SD3Config(
    pos_embed_max_size=384, dual_attention_layers=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), qk_norm="rms_norm"
)
LARGE_35 = SD3Config(num_layers=38, num_attention_heads=38, caption_projection_dim=2432, qk_norm="rms_norm")
TURBO = "turbo"  # in the name of a distilled model, whose files do not show it


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model: its transformer, and the dtype of its files."""

    transformer: SD3Config
    dtype: str


MODELS = {
    "sd3-medium": Published(transformer=MEDIUM, dtype="float16"),
    "sd3.5-medium": Published(transformer=MEDIUM_35, dtype="bfloat16"),
    "sd3.5-large": Published(transformer=LARGE_35, dtype="bfloat16"),
    "sd3.5-large-turbo": Published(transformer=LARGE_35, dtype="bfloat16"),
}


def published(name: str) -> Checkpoint | None:
    """Return the model known as `name`, without its files; None for another name."""
    if (model := MODELS.get(name)) is None:
        return None
    rows = {
        "transformer": (sd3_dit.NETWORK, model.transformer),
        "text_encoder": (clip.NETWORK, CLIP_L),
        "text_encoder_2": (clip.NETWORK, CLIP_G),
        T5: (t5.NETWORK, T5Config()),
        "vae": (kl_vae.NETWORK, VAE),
    }
    return Checkpoint(
        source=Path(name),
        components={part: on_paper(*row, model.dtype) for part, row in rows.items()},
        tokenizers={part: absent_tokenizer(name) for part in rows if "text" in part},
        scheduler=parse(FlowMatchConfig, SCHEDULER, source=name),
    )


def defaults(checkpoint: Checkpoint) -> Defaults:
    """Return the defaults of a variant, which its layers show; of the distilled one, its name."""
    config: SD3Config = checkpoint["transformer"].config
    usual = Defaults(steps=28, guidance=7.0, negative_prompt="")
    if TURBO in checkpoint.source.name.lower():
        return replace(usual, steps=4, guidance=0.0)
    if config.num_layers == LARGE_35.num_layers:
        return replace(usual, guidance=3.5)
    return replace(usual, steps=40, guidance=4.5) if config.dual_attention_layers else usual
