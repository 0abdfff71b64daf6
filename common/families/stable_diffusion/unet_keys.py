"""Places of a UNet's parameters in a Stable Diffusion checkpoint in one file, and tensors that it may have besides.

The UNet numbers all its layers in order, downsamplers included: block b, layer j of the down blocks is `input_blocks`
number 1 + (layers of the blocks before, each with its downsampler) + j.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.parts.ldm_keys import Places
from qwenimg.common.weights.keys import Place

# Tensors that a file may have beside the models: whole names, and prefixes that end in a dot.
IGNORED = frozenset(
    {
        # the noise schedule, which follows from the type of the model
        "alphas_cumprod", "alphas_cumprod_prev", "betas", "log_one_minus_alphas_cumprod", "logvar",
        "posterior_log_variance_clipped", "posterior_mean_coef1", "posterior_mean_coef2", "posterior_variance",
        "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod", "sqrt_recip_alphas_cumprod",
        "sqrt_recipm1_alphas_cumprod", "scale_factor", "denoiser.sigmas", "global_step",
        # markers: see `prediction`
        "v_pred", "ztsnr",
    }
)  # fmt: skip
IGNORED_PREFIXES = (
    "model_ema.",  # averaged weights, a second copy of the UNet under names without dots
    "first_stage_model.loss.",  # the VAE's discriminator and perceptual loss, for training
    "first_stage_model.model_ema.",
    "loss.",
    "embedding_manager.",  # of textual inversion during training
)
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET_ENDS = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}


def unet_places(names: Iterable[str], config: UNetConfig, prefix: str) -> Places:
    """Map each parameter of the UNet to its tensor behind `prefix`."""
    paths = _unet_paths(config)
    return {name: Place(prefix + _unet_key(name, paths)) for name in names}


def _unet_paths(config: UNetConfig) -> Mapping[str, str]:
    """Map the path of each part of a block to its path in the file."""
    paths = dict(_UNET_ENDS)
    number = 1
    for i, level in enumerate(config.down):
        for j in range(len(level.resnets)):
            paths[f"down_blocks.{i}.resnets.{j}"] = f"input_blocks.{number}.0"
            paths[f"down_blocks.{i}.attentions.{j}"] = f"input_blocks.{number}.1"
            number += 1
        if level.resampled:
            paths[f"down_blocks.{i}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
            number += 1
    number = 0
    for i, level in enumerate(config.up):
        for j in range(len(level.resnets)):
            paths[f"up_blocks.{i}.resnets.{j}"] = f"output_blocks.{number}.0"
            paths[f"up_blocks.{i}.attentions.{j}"] = f"output_blocks.{number}.1"
            number += 1
        paths[f"up_blocks.{i}.upsamplers.0.conv"] = f"output_blocks.{number - 1}.{2 if level.depth else 1}.conv"
    return paths


def _unet_key(name: str, paths: Mapping[str, str]) -> str:
    owner, _, rest = name.rpartition(".")
    while owner not in paths:
        owner, _, part = owner.rpartition(".")
        rest = f"{part}.{rest}"
    if ".resnets." in owner:
        part, _, leaf = rest.rpartition(".")
        rest = f"{_RESNET[part]}.{leaf}"
    return f"{paths[owner]}.{rest}"
