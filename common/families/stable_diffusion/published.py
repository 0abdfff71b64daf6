"""Stable Diffusion models as they are published, for code that reads no weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.parts.components import paper_checkpoint
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling.discrete import parse_diffusion


@dataclass(frozen=True, kw_only=True)
class Published:
    """Configurations of one model; its files are float32."""

    unet: UNetConfig
    texts: Mapping[str, CLIPConfig]
    scheduler: Mapping[str, object]


_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
_PNDM = {"_class_name": "PNDMScheduler", "skip_prk_steps": True, "set_alpha_to_one": False, **_BETAS}
_EULER = {"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "leading", **_BETAS}
_TRAILING = {"_class_name": "EulerAncestralDiscreteScheduler", "timestep_spacing": "trailing", **_BETAS}
_SDXL_TEXTS = {"text_encoder": clip.VIT_L, "text_encoder_2": clip.OPEN_CLIP_BIG_G}


def models() -> dict[str, Published]:
    """Return the published models by their known names."""
    sd15 = UNetConfig(cross_attention_dim=768, sample_size=64)
    return {
        "sd15": Published(unet=sd15, texts={"text_encoder": clip.VIT_L}, scheduler=_PNDM),
        "sdxl": Published(unet=_sdxl(), texts=_SDXL_TEXTS, scheduler=_EULER),
        "sdxl-turbo": Published(unet=_sdxl(), texts=_SDXL_TEXTS, scheduler=_TRAILING),
    }


def vae() -> KLVAEConfig:
    return KLVAEConfig(block_out_channels=(128, 256, 512, 512), layers_per_block=2)


def _sdxl() -> UNetConfig:
    return UNetConfig(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=(2, 2, 2),
        attention_head_dim=(5, 10, 20),
        transformer_layers_per_block=(1, 2, 10),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )


def published(name: str) -> Checkpoint | None:
    """Return the model known as `name`, without its files; None for another name."""
    if (model := models().get(name)) is None:
        return None
    parts: dict[str, tuple[Network, Any]] = {"unet": (unet.NETWORK, model.unet), "vae": (kl_vae.NETWORK, vae())}
    parts |= {part: (clip.NETWORK, config) for part, config in model.texts.items()}
    checkpoint = paper_checkpoint(name, parts, parse_diffusion(model.scheduler, name), "float32")
    return replace(checkpoint, zeros_for_empty=len(model.texts) > 1)
