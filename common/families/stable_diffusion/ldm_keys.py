"""Where a Stable Diffusion checkpoint in one file (CompVis, "ldm" names) has each parameter: strings only.

A map goes from the manifest's names to the file's. So what is missing and what is unknown both follow from the
manifest, and no tensor is taken by a rule that happens to match it.

What is unusual about these files:
- the UNet counts its blocks through, downsamplers included: block b, layer j of the down blocks is `input_blocks`
  number 1 + (layers of the blocks before, each with its downsampler) + j;
- the VAE numbers its decoder's levels from the last to the first, and stores attention as 1x1 convolutions;
- OpenCLIP has q, k and v in one matrix, and its projection with rows and columns exchanged;
- OpenCLIP-H has its 24th layer there, which Stable Diffusion 2 never uses;
- stable-diffusion.cpp, when it converts, gives OpenCLIP the names of transformers, in older versions with q, k and v
  apart, and leaves the projection as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from qwenimg.common.networks.kl_vae import KLVAEConfig
from qwenimg.common.networks.unet import UNetConfig
from qwenimg.common.weights.keys import Place

Places = dict[str, Place]

CLIP_H_LAYERS = 23  # of OpenCLIP-H that are used

# What a file may hold beside the models, as whole names or as prefixes that end in a dot.
IGNORED = frozenset(
    {
        # the noise schedule, which follows from the type of the model
        "alphas_cumprod", "alphas_cumprod_prev", "betas", "log_one_minus_alphas_cumprod", "logvar",
        "posterior_log_variance_clipped", "posterior_mean_coef1", "posterior_mean_coef2", "posterior_variance",
        "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod", "sqrt_recip_alphas_cumprod",
        "sqrt_recipm1_alphas_cumprod", "scale_factor", "denoiser.sigmas", "global_step",
        # markers: see `single_file`
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
# Of a text encoder, behind its prefix: buffers, and what belongs to CLIP's image side.
IGNORED_TEXT = frozenset(
    {
        "logit_scale",
        "model.logit_scale",
        "model.attn_mask",
        "model.text_projection",  # of OpenCLIP-H
        "text_projection",  # beside a ViT-L, whose projection no pipeline uses
        "transformer.text_projection.weight",
        "transformer.text_model.text_projection",
        "transformer.text_model.embeddings.position_ids",
        "transformer.embeddings.position_ids",
    }
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
_VAE_PARTS = {
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0.group_norm": "mid.attn_1.norm",
    "mid_block.attentions.0.to_q": "mid.attn_1.q",
    "mid_block.attentions.0.to_k": "mid.attn_1.k",
    "mid_block.attentions.0.to_v": "mid.attn_1.v",
    "mid_block.attentions.0.to_out.0": "mid.attn_1.proj_out",
    "conv_norm_out": "norm_out",
}
_OPEN_CLIP = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_OPEN_CLIP_ENDS = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
    "text_projection.weight": "text_projection",
}
_FUSED = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
_LAYER = re.compile(r"encoder\.layers\.(?P<layer>\d+)\.(?P<part>.+)\.(?P<leaf>weight|bias)")
_PROJECTION = re.compile(r"(?P<attention>.+\.self_attn)\.(?P<part>[qkv]_proj)\.(?P<leaf>weight|bias)")
_VAE_BLOCK = re.compile(r"(?P<way>down|up)_blocks\.(?P<level>\d+)\.(?P<rest>.+)")


def unet_places(names: Iterable[str], config: UNetConfig, prefix: str) -> Places:
    """Of each parameter of the UNet its tensor behind `prefix`."""
    paths = _unet_paths(config)
    return {name: Place(prefix + _unet_key(name, paths)) for name in names}


def vae_places(names: Iterable[str], config: KLVAEConfig, prefix: str) -> Places:
    """Of each parameter of the VAE its tensor behind `prefix`."""
    levels = len(config.block_out_channels)
    return {name: Place(prefix + _vae_key(name, levels)) for name in names}


def clip_places(names: Iterable[str], prefix: str) -> Places:
    """Of each parameter of a CLIP in transformers' names its tensor behind `prefix`."""
    return {name: Place(prefix + name) for name in names}


def open_clip_places(names: Iterable[str], prefix: str) -> Places:
    """Of each parameter of a CLIP in OpenCLIP's names its place behind `prefix`."""
    return {name: (found := _open_clip(name))._replace(key=prefix + found.key) for name in names}


def converted_places(names: Iterable[str], prefix: str, fused: bool) -> Places:
    """Of each parameter of OpenCLIP's text encoder its place where stable-diffusion.cpp gave it transformers' names;
    `fused`: with q, k and v still in one matrix."""
    return {name: (found := _converted(name, fused))._replace(key=prefix + found.key) for name in names}


def _converted(name: str, fused: bool) -> Place:
    if name == "text_projection.weight":
        return Place("text_projection", decode="transposed")
    projection = _PROJECTION.fullmatch(name) if fused else None
    if projection is None:
        return Place(name)
    key = f"{projection['attention']}.in_proj.{projection['leaf']}"
    return Place(key, part=_FUSED[projection["part"]], parts=3)


def _unet_paths(config: UNetConfig) -> Mapping[str, str]:
    """{path of a block's part: its path in the file}."""
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


def _vae_key(name: str, levels: int) -> str:
    side, _, rest = name.partition(".")
    if side not in ("encoder", "decoder"):
        return name
    if block := _VAE_BLOCK.fullmatch(rest):
        level = int(block["level"]) if block["way"] == "down" else levels - 1 - int(block["level"])
        inner = block["rest"].replace("resnets.", "block.").replace("conv_shortcut", "nin_shortcut")
        inner = inner.replace("downsamplers.0", "downsample").replace("upsamplers.0", "upsample")
        return f"{side}.{block['way']}.{level}.{inner}"
    for part, found in _VAE_PARTS.items():
        if rest.startswith(part + "."):
            return f"{side}.{found}{rest.removeprefix(part)}"
    return name


def _open_clip(name: str) -> Place:
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return Place(_OPEN_CLIP_ENDS[name], decode="transposed" if name == "text_projection.weight" else None)
    block = f"transformer.resblocks.{layer['layer']}"
    projection = layer["part"].removeprefix("self_attn.")
    if projection in _FUSED:
        return Place(f"{block}.attn.in_proj_{layer['leaf']}", part=_FUSED[projection], parts=3)
    return Place(f"{block}.{_OPEN_CLIP[layer['part']]}.{layer['leaf']}")
