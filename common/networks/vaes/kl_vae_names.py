"""Stable Diffusion's VAE in files: ldm's names, as in `ae.safetensors`, and diffusers'.

Unusual about ldm's names: blocks are numbered by level, those of the decoder from the last one on; the attention's
matrices are 1x1 kernels in many files.
"""

from __future__ import annotations

import re
from itertools import count
from typing import Any

from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.weights.keys import Place

SIGN = "decoder.mid.block_1.norm1.weight"
"""A tensor that only a VAE in ldm's names has."""
DIFFUSERS_SIGN = "decoder.mid_block.resnets.0.norm1.weight"
ATTENTION = re.compile(r".*\.attentions\.0\.to_.*weight")
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
_VAE_BLOCK = re.compile(r"(?P<way>down|up)_blocks\.(?P<level>\d+)\.(?P<rest>.+)")


def place(name: str, config: KLVAEConfig) -> Place:
    """Return the place of a parameter in a file with ldm's names."""
    return Place(_key(name, len(config.block_out_channels)))


def _key(name: str, levels: int) -> str:
    side, _, rest = name.partition(".")
    if side not in ("encoder", "decoder"):
        return name
    if block := _VAE_BLOCK.fullmatch(rest):
        level = int(block["level"]) if block["way"] == "down" else levels - 1 - int(block["level"])
        inner = block["rest"].replace("resnets.", "block.").replace("conv_shortcut", "nin_shortcut")
        inner = inner.replace("downsamplers.0", "downsample").replace("upsamplers.0", "upsample")
        return f"{side}.{block['way']}.{level}.{inner}"
    for part, path in _VAE_PARTS.items():
        if rest.startswith(part + "."):
            return f"{side}.{path}{rest.removeprefix(part)}"
    return name


def sizes(stored: StoredShapes) -> dict[str, Any]:
    """Return the fields of a configuration that stored shapes show. Raises ModelError."""
    widths: list[int] = []
    for level in count():
        name = f"encoder.down_blocks.{level}.resnets.0.conv2.weight"
        if level and name not in stored:
            break
        widths.append(stored.shape(name, 4)[0])
    layers = (f"encoder.down_blocks.0.resnets.{layer}.conv2.weight" for layer in count())
    return {
        "in_channels": stored.shape("encoder.conv_in.weight", 4)[1],
        "out_channels": stored.shape("decoder.conv_out.weight", 4)[0],
        "block_out_channels": widths,
        "layers_per_block": next(number for number, name in enumerate(layers) if name not in stored),
        "latent_channels": stored.shape("decoder.conv_in.weight", 4)[1],
        "use_quant_conv": "quant_conv.weight" in stored,
        "use_post_quant_conv": "post_quant_conv.weight" in stored,
    }


def _config(stored: StoredShapes, like: KLVAEConfig) -> KLVAEConfig:
    """Return the configuration for stored shapes. `like` has what no tensor shows: the scale and the shift of the
    latents, and the groups of the norms."""
    return stored.config(like, **sizes(stored))


LAYOUTS = Layouts(
    network=kl_vae.NETWORK,
    title="a VAE",
    expected="VAE: expected one with ldm names, as ae.safetensors, or with diffusers' names",
    rows=(
        Layout(names="ldm names", signs=(SIGN,), place=place, kernels=ATTENTION),
        Layout(names="diffusers' names", signs=(DIFFUSERS_SIGN,)),
    ),
    config=_config,
    foreign={"bn.running_mean": "the VAE of FLUX.2"},
    ignored=("loss.", "model_ema."),  # for training: discriminator and perceptual loss, and averaged weights
)
