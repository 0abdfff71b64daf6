"""A tiny Stable Cascade, written by diffusers itself, with nothing in it that is all ones or zeros: the folder of its
decoder with that of its prior inside, and the folder of the prior's own pipeline; and the encoder of pictures as its
authors publish it. And the UNets by their authors' names."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.oracle_effnet import tiny_effnet
from support.tiny_clip import tiny_clip, write_tiny_clip_tokenizer
from support.tiny_model import randomise

_ALL = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
PRIOR: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "timestep_ratio_embedding_dim": 12,
    "patch_size": 1,
    "conditioning_dim": 44,
    "block_out_channels": (36, 36),
    "num_attention_heads": (3, 3),
    "down_num_layers_per_block": (1, 2),
    "up_num_layers_per_block": (2, 1),
    "down_blocks_repeat_mappers": (1, 1),
    "up_blocks_repeat_mappers": (1, 1),
    "block_types_per_layer": (_ALL, _ALL),
    "clip_text_in_channels": 80,
    "clip_text_pooled_in_channels": 52,
    "clip_image_in_channels": 24,
    "clip_seq": 2,
    "kernel_size": 3,
    "self_attn": True,
    "timestep_conditioning_type": ("sca", "crp"),
    "switch_level": (False,),
}
DECODER: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "timestep_ratio_embedding_dim": 12,
    "patch_size": 2,
    "conditioning_dim": 40,
    "block_out_channels": (12, 20, 24),
    "num_attention_heads": (0, 0, 3),
    "down_num_layers_per_block": (1, 1, 2),
    "up_num_layers_per_block": (2, 1, 1),
    "down_blocks_repeat_mappers": (1, 1, 1),
    "up_blocks_repeat_mappers": (3, 2, 1),
    "block_types_per_layer": (_ALL[:2], _ALL[:2], _ALL),
    "clip_text_pooled_in_channels": 52,
    "clip_seq": 2,
    "effnet_in_channels": 16,
    "pixel_mapper_in_channels": 3,
    "kernel_size": 3,
    "self_attn": True,
    "dropout": (0.0, 0.0, 0.1),
    "timestep_conditioning_type": ("sca",),
}
VQGAN: dict[str, Any] = {
    "levels": 2,
    "bottleneck_blocks": 2,
    "embed_dim": 12,
    "latent_channels": 4,
    "num_vq_embeddings": 16,
    "scale_factor": 0.004,
}
"""The scale is small: random weights, which do not know the noise, make latents a hundred times as large."""
# Widths of whole blocks of codes
WIDE_PRIOR = {"block_out_channels": (64, 64), "num_attention_heads": (2, 2), "conditioning_dim": 64}


def tiny_unet(seed: int, config: Mapping[str, Any], **changes: object) -> Any:
    """diffusers' UNet with such a configuration, float32, randomised."""
    from diffusers import StableCascadeUNet

    model = StableCascadeUNet(**({**config} | changes))
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if name.endswith((".gamma", ".beta")):  # of a norm that is added to its input
            value.data.copy_(0.4 * torch.randn(value.shape, generator=generator))
        elif "mapper" in name and name.endswith("weight") and "clip" not in name and "kv" not in name:
            value.data *= 0.5  # scales of many blocks multiply
    return model.eval()


def tiny_prior(seed: int = 21, **changes: object) -> Any:
    return tiny_unet(seed, PRIOR, **changes)


def tiny_decoder(seed: int = 22, **changes: object) -> Any:
    return tiny_unet(seed, DECODER, **changes)


def tiny_vqgan(seed: int = 23, **changes: object) -> Any:
    from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel

    model = PaellaVQModel(**(VQGAN | changes))
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if name.endswith("gammas"):
            value.data.copy_(0.5 + 0.3 * torch.randn(value.shape, generator=generator))
    model.out_block[0].weight.data *= 0.4  # pixels are from 0 to 1
    model.out_block[0].bias.data.fill_(0.5)
    return model.eval()


def authors_file(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a UNet in its authors' names, by hand."""
    given, out = dict(model.state_dict()), {}
    owners = [key.removesuffix(".to_q.weight") for key in given if key.endswith(".to_q.weight")]
    for owner in owners:
        for leaf in ("weight", "bias"):
            parts = [given.pop(f"{owner}.to_{x}.{leaf}") for x in "qkv"]
            out[f"{owner}.attn.in_proj_{leaf}"] = torch.cat(parts)
            out[f"{owner}.attn.out_proj.{leaf}"] = given.pop(f"{owner}.to_out.0.{leaf}")
    if "clip_txt_mapper.weight" not in given:
        for leaf in ("weight", "bias"):
            out[f"clip_mapper.{leaf}"] = given.pop(f"clip_txt_pooled_mapper.{leaf}")
    return {key: value.contiguous() for key, value in (given | out).items()}


def vqgan_file(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of the VAE in its authors' names."""
    return {key.replace("vquantizer.embedding", "vquantizer.codebook"): v for key, v in model.state_dict().items()}


def write_tiny_cascade(
    folder: Path, prior: Mapping[str, Any] = {}, decoder: Mapping[str, Any] = {}, encodes: bool = True
) -> None:
    """Write the folder of the decoder, with the prior in it, and beside it `folder`-prior, as the two are published.
    encodes: with the encoder of pictures."""
    import diffusers
    from transformers import CLIPTokenizer

    tokens = folder.parent / f"{folder.name}-tokenizer"
    write_tiny_clip_tokenizer(tokens, pad="<|endoftext|>")
    text = {"tokenizer": CLIPTokenizer.from_pretrained(tokens), "text_encoder": tiny_clip("bigG", seed=5)}
    scheduler = diffusers.DDPMWuerstchenScheduler()
    first = diffusers.StableCascadePriorPipeline(prior=tiny_prior(**prior), scheduler=scheduler, **text)
    second = diffusers.StableCascadeDecoderPipeline(
        decoder=tiny_decoder(**decoder), vqgan=tiny_vqgan(), scheduler=scheduler, **text
    )
    part, of_prior = folder.with_suffix(".part"), folder.with_name(f"{folder.name}-prior")
    first.save_pretrained(of_prior)
    second.save_pretrained(part)
    shutil.copytree(of_prior / "prior", part / "prior")
    if encodes:
        save_file(tiny_effnet(), part / "effnet_encoder.safetensors")
    part.rename(folder)
