"""Tiny folders of every family with random widths, heads, depths and weights: healthy models that nobody measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import random_weights
from safetensors.torch import save_file

from qwenimg.common.networks.encoders import ip_adapter
from qwenimg.common.networks.vaes.tiny_vae import TinyVAEConfig
from support import (
    oracle_effnet,
    tiny_anima,
    tiny_auraflow,
    tiny_autoencoder,
    tiny_bert,
    tiny_cascade,
    tiny_chroma,
    tiny_edit,
    tiny_ernie,
    tiny_flux,
    tiny_flux2,
    tiny_flux2_dev,
    tiny_flux3,
    tiny_flux_control,
    tiny_hunyuan,
    tiny_ip_adapter,
    tiny_krea2,
    tiny_layered,
    tiny_longcat,
    tiny_lumina,
    tiny_model,
    tiny_ovis,
    tiny_pixart,
    tiny_qwen21,
    tiny_redux,
    tiny_sana,
    tiny_sd,
    tiny_sd3,
    tiny_zimage,
)
from support.tiny_adapter import write_adapter
from support.tiny_clip import tiny_clip
from support.tiny_control import tiny_controlnet, tiny_patches
from support.tiny_controlnet import tiny_controlnet as tiny_unet_controlnet
from support.tiny_controlnet import write_union
from support.tiny_t5 import tiny_t5

WORDS = ("a", "large", "blue", "star", "and", "two", "red circles", "on the green hill", "a photo of", "an astronaut")
# Pictures that a family sees
PICTURES = {
    "edit": (1, 2),
    "layered": (1, 1),
    "flux2": (0, 2),
    "flux2-kv": (1, 2),
    "flux2-dev": (0, 2),
    "flux3": (0, 2),
    "qwen21": (1, 2),
}
# The families that are recorded with control networks
CONTROLLED = frozenset(
    {
        "controlled", "sd15-controlled", "sdxl-controlled", "sd15-pictured", "z-image-controlled", "flux-controlled",
        "flux-pictured",
    }
)  # fmt: skip
# The families that are recorded with a tiny VAE, and its name
TINY_VAES = {"sd15-tiny": "taesd", "flux2-tiny": "taef2", "qwen-tiny": "taew2_1"}
WITHOUT_TOWER = ("qwen21-text", "text_encoder")
LOUDEST = 2.0  # times weights of unit gain
HEALTHY = 100.0  # units of roundoff by which diffusers' own UNet may be off in float32; of unit gain they are off by 10
Parts = Mapping[str, torch.nn.Module]  # by folder


class Sizes:
    """A source of random sizes."""

    def __init__(self, seed: int):
        self.random, self.seed = np.random.default_rng(seed), 1000 * seed

    def whole(self, low: int, high: int, of: int = 1) -> int:
        """A multiple of `of` from low to high."""
        return of * int(self.random.integers(-(-low // of), high // of + 1))

    def next_seed(self) -> int:
        self.seed += 1
        return self.seed


def write(folder: Path, family: str, seed: int) -> None:
    """Write a folder of the `family` with the random sizes of `seed`. Its tokenizers and scheduler are those of the
    family's tiny folder."""
    fixed, parts = FAMILIES[family]
    fixed(folder)
    sizes = Sizes(seed)
    for name, model in parts(sizes).items():
        if sizes.whole(0, 1):
            gain = sizes.random.uniform(1, LOUDEST)
            _louder(model, gain)
            if name == "unet" and rounding(model) > HEALTHY:  # some lose all digits: up to 1e6 units
                _louder(model, 1 / gain)
        shutil.rmtree(folder / name, ignore_errors=name == "effnet")  # a file in the tiny folder
        words = {key: value for key, value in model.state_dict().items() if ".visual." not in key}
        model.save_pretrained(folder / name, **({"state_dict": words} if (family, name) == WITHOUT_TOWER else {}))


def _louder(model: torch.nn.Module, gain: float) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name and "relative" not in name:
            parameter.data.mul_(gain)


def rounding(unet: torch.nn.Module) -> float:
    """The error of diffusers' own UNet in float32 against float64 in units of roundoff: what no backend can be below,
    and far above which a model draws noise of rounding."""
    config, random = unet.config, torch.Generator().manual_seed(0)
    latents = torch.randn(1, config.in_channels, 16, 16, generator=random)
    text = torch.randn(1, 24, config.cross_attention_dim, generator=random)
    added: dict[str, torch.Tensor] = {}
    if config.addition_embed_type == "text_time":
        width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added["text_embeds"] = torch.randn(1, width, generator=random)
        added["time_ids"] = torch.tensor([[64.0, 64, 0, 0, 64, 64]])

    def drawn(dtype: torch.dtype) -> torch.Tensor:
        more = {name: value.to(dtype) for name, value in added.items()}
        with torch.no_grad():
            made: torch.Tensor = unet.to(dtype)(latents.to(dtype), 500, text.to(dtype), added_cond_kwargs=more).sample
        return made.double()

    exact, own = drawn(torch.float64), drawn(torch.float32)
    return float((own - exact).norm() / exact.norm()) * 2**24


def write_controls(model: Path, seed: int) -> list[str]:
    """Write control networks for the model in the folder `model` beside it, of random depths for Qwen-Image, and return
    their paths; for sd15-pictured IP-Adapters, for flux-pictured a Redux."""
    if (model / "unet").is_dir():
        return (_write_ip_adapters if model.name.endswith("-pictured") else _write_controlnets)(model, seed)
    folder, config = model.parent / "controls", json.loads((model / "transformer" / "config.json").read_text())
    if "cap_feat_dim" in config:
        return _write_zimage_controls(folder, config, seed)
    if "pooled_projection_dim" in config:
        return (_write_redux if model.name.endswith("-pictured") else _write_flux_controls)(folder, config, seed)
    names = ("attention_head_dim", "num_attention_heads", "joint_attention_dim", "axes_dims_rope")
    fields, sizes = {name: config[name] for name in names}, Sizes(seed)
    width = config["attention_head_dim"] * config["num_attention_heads"]
    for i in range(2):
        tiny_controlnet(sizes.next_seed(), layers=sizes.whole(1, 3), **fields).save_pretrained(folder / f"net{i}")
    patches = tiny_patches(sizes.next_seed(), layers=config["num_layers"], width=width)
    save_file(patches, folder / "patches.safetensors")
    return [str(folder / name) for name in ("net0", "net1", "patches.safetensors")]


def _write_zimage_controls(folder: Path, config: dict[str, Any], seed: int) -> list[str]:
    """Write a control network of each version, of random depths, for a transformer with this `config`."""
    sizes = Sizes(seed)
    fields = {name: config[name] for name in ("dim", "n_heads", "n_kv_heads", "n_refiner_layers")}
    for version in tiny_zimage.CONTROLS:
        places = list(range(sizes.whole(1, config["n_layers"])))
        net = tiny_zimage.tiny_control(
            version,
            sizes.next_seed(),
            control_layers_places=places,
            control_refiner_layers_places=list(range(min(len(places), config["n_refiner_layers"]))),
            **fields,
        )
        net.save_pretrained(folder / version)
    return [str(folder / version) for version in tiny_zimage.CONTROLS]


def _write_flux_controls(folder: Path, config: dict[str, Any], seed: int) -> list[str]:
    """Write a ControlNet without blocks of one stream and a Union with some, of random depths, for a transformer with
    this `config`."""
    sizes, own = Sizes(seed), ("_class_name", "_diffusers_version", "_name_or_path", "out_channels", "patch_size")
    fields = {name: value for name, value in config.items() if name not in own}
    for kind, least in (("pro-2", 0), ("union", 1)):
        layers = {"num_layers": sizes.whole(1, 3), "num_single_layers": least and sizes.whole(1, 3)}
        tiny_flux_control.write_controlnet(folder / kind, kind, sizes.next_seed(), **(fields | layers))
    return [str(folder / "pro-2"), str(folder / "union")]


def _write_redux(folder: Path, config: dict[str, Any], seed: int) -> list[str]:
    """Write a Redux with its image encoder, whose pictures have pixels beyond their patches, for a transformer with
    this `config`."""
    sizes = Sizes(seed)
    heads, patch = sizes.whole(1, 4), sizes.whole(4, 9)
    encoder = {
        "hidden_size": heads * sizes.whole(8, 32), "intermediate_size": sizes.whole(16, 240),
        "num_hidden_layers": sizes.whole(1, 5), "num_attention_heads": heads, "patch_size": patch,
        "image_size": patch * sizes.whole(2, 6) + sizes.whole(0, 3),
    }  # fmt: skip
    widths = {"redux_dim": encoder["hidden_size"], "txt_in_features": config["joint_attention_dim"]}
    tiny_redux.tiny_siglip(sizes.next_seed(), **encoder).save_pretrained(folder / "image_encoder")
    tiny_redux.tiny_redux(sizes.next_seed(), **widths).save_pretrained(folder / "image_embedder")
    return [str(folder)]


def _write_controlnets(model: Path, seed: int) -> list[str]:
    """Write ControlNets, whose convolutions of a picture have random widths, for the Stable Diffusion in `model`."""
    folder, sizes = model.parent / "controls", Sizes(seed)
    unet = json.loads((model / "unet" / "config.json").read_text())
    for i in range(2):
        widths = tuple(sizes.whole(2, 12) for _ in range(4))
        net = tiny_unet_controlnet(unet, sizes.next_seed(), conditioning_embedding_out_channels=widths)
        net.save_pretrained(folder / f"net{i}")
    nets, channels = [str(folder / f"net{i}") for i in range(2)], unet["block_out_channels"]
    if unet.get("addition_time_embed_dim"):
        sizes_of_xl = {"channels": [*channels, channels[-1]], "downscale_factor": 16, "adapter_type": "full_adapter_xl"}
        write_union(folder / "union", unet, sizes.next_seed(), num_trans_head=1)
        write_adapter(folder / "adapter", sizes.next_seed(), **sizes_of_xl)
        return [*nets, str(folder / "union"), str(folder / "adapter")]
    write_adapter(folder / "adapter", sizes.next_seed(), channels=channels)
    return [*nets, str(folder / "adapter")]


def write_tiny_vae(model: Path, family: str, seed: int) -> Path:
    """Write a tiny VAE of random sizes for the model of the `family` in the folder `model` beside it."""
    name, sizes, folder = TINY_VAES[family], Sizes(seed), model.parent / "tiny"
    channels, levels = tiny_autoencoder.latents_of(model)
    if name == "taew2_1":
        widths = tuple(sizes.whole(3, 24) for _ in range(levels))
        video = replace(tiny_autoencoder.video_config(channels, levels - 1), width=sizes.whole(3, 24), widths=widths)
        return tiny_autoencoder.write_video(folder, name, tiny_autoencoder.weights(video, seed))
    made = TinyVAEConfig(
        latent_channels=channels,
        encoder_block_out_channels=(sizes.whole(4, 32),) * levels,
        decoder_block_out_channels=(sizes.whole(4, 32),) * levels,
        num_encoder_blocks=tuple(sizes.whole(1, 3) for _ in range(levels)),
        num_decoder_blocks=tuple(sizes.whole(1, 3) for _ in range(levels)),
        pooled=name == "taef2",
    )
    return tiny_autoencoder.write_authors(folder, name, tiny_autoencoder.weights(made, seed))


def _write_ip_adapters(model: Path, seed: int) -> list[str]:
    """Write an IP-Adapter of each kind, and an image encoder, for the Stable Diffusion in `model`."""
    folder, sizes = model.parent / "controls", Sizes(seed)
    unet = json.loads((model / "unet" / "config.json").read_text())
    heads, patch = sizes.whole(1, 4), sizes.whole(4, 9)
    encoder = {
        "hidden_size": heads * sizes.whole(8, 32), "intermediate_size": sizes.whole(16, 240),
        "projection_dim": sizes.whole(8, 64), "num_hidden_layers": sizes.whole(2, 5), "num_attention_heads": heads,
        "patch_size": patch, "image_size": patch * sizes.whole(2, 6),
    }  # fmt: skip
    tiny_ip_adapter.tiny_image_encoder(sizes.next_seed(), **encoder).save_pretrained(folder / "image_encoder")
    shared = {"text": unet["cross_attention_dim"], "widths": tuple(tiny_ip_adapter.cross_attentions(unet))}
    states, tokens, inner = encoder["hidden_size"], sizes.whole(1, 8), sizes.whole(16, 96)
    resampler = {"inner": inner, "attention": ip_adapter.HEAD_DIM * sizes.whole(1, 3), "feed_forward": 4 * inner}
    kinds: dict[str, dict[str, int]] = {
        "base": {"features": encoder["projection_dim"], "tokens": tokens},
        "plus": {"features": states, "tokens": tokens, **resampler, "depth": sizes.whole(1, 4)},
        "full-face": {"features": states, "tokens": 0, "inner": sizes.whole(16, 96)},
    }
    for kind, own in kinds.items():
        config = ip_adapter.IPAdapterConfig(kind=kind, **shared, **own)
        values = random_weights(ip_adapter.manifest(config), sizes.next_seed())
        tensors = {ip_adapter.published(name): torch.from_numpy(value) for name, value in values.items()}
        save_file(tensors, folder / f"{kind}.safetensors")
    return [str(folder / f"{kind}.safetensors") for kind in kinds]


def asked(family: str, seed: int) -> dict[str, Any]:
    """The keywords of a call with a random prompt and size."""
    sizes = Sizes(seed)
    seen = {"pictures": pictures} if (pictures := sizes.whole(*PICTURES.get(family, (0, 0)))) else {}
    prompt = " ".join(sizes.random.choice(WORDS, sizes.whole(1, 16)))
    width, height = (sizes.whole(32, 112, of=16) for _ in "wh")
    return {"prompt": prompt, "width": width, "height": height, "steps": 2, "seed": seed, **seen}


# Parts


def _axes(sizes: Sizes, count: int = 3) -> list[int]:
    return [sizes.whole(2, 20, of=2) for _ in range(count)]


def _denoiser(sizes: Sizes, axes: int = 3) -> dict[str, Any]:
    chosen = _axes(sizes, axes)
    return {
        "attention_head_dim": sum(chosen),
        "num_attention_heads": sizes.whole(1, 6),
        "axes_dims_rope": chosen,
        "num_layers": sizes.whole(1, 4),
    }


def _language(sizes: Sizes) -> dict[str, Any]:
    """Sizes of a Qwen3."""
    shared = sizes.whole(1, 3)
    return {
        "hidden_size": sizes.whole(16, 160, of=2),
        "intermediate_size": sizes.whole(16, 320),
        "num_attention_heads": shared * sizes.whole(1, 3),
        "num_key_value_heads": shared,
        "head_dim": sizes.whole(8, 48, of=2),
    }


def _kl_vae(sizes: Sizes, least: int = 1) -> dict[str, Any]:
    groups = sizes.whole(2, 6)
    return {
        "block_out_channels": [groups * sizes.whole(least, 8) for _ in range(4)],
        "norm_num_groups": groups,
        "layers_per_block": sizes.whole(1, 2),
    }


def _clip(sizes: Sizes, kind: str, *, width: int = 0, **changes: Any) -> torch.nn.Module:
    heads = sizes.whole(1, 4)
    fields = {
        "hidden_size": width or heads * sizes.whole(8, 32),
        "intermediate_size": sizes.whole(16, 240),
        "num_hidden_layers": sizes.whole(2, 5),
        "num_attention_heads": heads if not width else 1,
    }
    return tiny_clip(kind, sizes.next_seed(), **(fields | changes))


def _t5(sizes: Sizes, vocabulary: int, width: int = 0) -> torch.nn.Module:
    fields = {"d_model": width or sizes.whole(16, 160), "d_kv": sizes.whole(6, 64), "num_heads": sizes.whole(1, 6)}
    fields |= {"d_ff": sizes.whole(16, 320), "num_layers": sizes.whole(1, 4), "vocab_size": vocabulary}
    model = tiny_t5(sizes.next_seed(), **fields)
    loud = sizes.random.uniform(1, fields["d_kv"] ** 0.5)  # scores are not divided by the root of their length
    for block in model.encoder.block:
        block.layer[0].SelfAttention.q.weight.data.mul_(loud if sizes.seed % 2 else 1)
    return model


# Families


def _flux(sizes: Sizes) -> Parts:
    clip, t5 = _clip(sizes, "ViT-L"), _t5(sizes, 1000)
    fields = _denoiser(sizes) | {"num_single_layers": sizes.whole(1, 4)}
    fields |= {"joint_attention_dim": t5.config.d_model, "pooled_projection_dim": clip.config.hidden_size}
    return {
        "text_encoder": clip,
        "text_encoder_2": t5,
        "transformer": tiny_flux.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_zimage.tiny_vae(sizes.next_seed(), **_kl_vae(sizes)),
    }


def _chroma(sizes: Sizes) -> Parts:
    t5 = _t5(sizes, 1000)
    fields = _denoiser(sizes) | {"num_single_layers": sizes.whole(1, 4), "joint_attention_dim": t5.config.d_model}
    fields |= {"approximator_hidden_dim": sizes.whole(8, 64, of=2), "approximator_layers": sizes.whole(1, 4)}
    return {
        "text_encoder": t5,
        "transformer": tiny_chroma.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_zimage.tiny_vae(sizes.next_seed(), **_kl_vae(sizes)),
    }


def _flux2(sizes: Sizes, text_encoder: Callable[..., Any] = tiny_flux2.tiny_text_encoder, **more: object) -> Parts:
    text = _language(sizes)
    fields = _denoiser(sizes, 4) | {"num_single_layers": sizes.whole(1, 4)}
    fields |= {"joint_attention_dim": 3 * text["hidden_size"]}
    fields |= {"timestep_guidance_channels": sizes.whole(16, 256, of=2), **more}
    return {
        "text_encoder": text_encoder(sizes.next_seed(), **text),
        "transformer": tiny_flux2.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_flux2.tiny_vae(sizes.next_seed(), **_kl_vae(sizes)),
    }


def _flux2_dev(sizes: Sizes) -> Parts:
    return _flux2(sizes, tiny_flux2_dev.tiny_text_encoder, guidance_embeds=True)


def _flux3(sizes: Sizes) -> Parts:
    text = _language(sizes) | {"num_hidden_layers": tiny_flux3.LAYERS}
    sections = [sizes.whole(2, 6) for _ in range(3)]
    rope = tiny_qwen21.TEXT["rope_parameters"] | {"mrope_section": sections}
    text |= {"head_dim": 2 * sum(sections), "rope_parameters": rope}
    vision = _tower(sizes, sizes.whole(1, 3), text["hidden_size"])
    fields = _denoiser(sizes, 4) | {"num_single_layers": sizes.whole(1, 4), "flow_map": True}
    fields |= {"joint_attention_dim": 8 * text["hidden_size"], "timestep_channels": sizes.whole(16, 256, of=2)}
    return {
        "text_encoder": tiny_qwen21.tiny_seeing_encoder(sizes.next_seed(), text, vision),
        "transformer": tiny_flux3.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_flux2.tiny_vae(sizes.next_seed(), **_kl_vae(sizes)),
    }


def _ernie(sizes: Sizes) -> Parts:
    axes, heads, text = _axes(sizes), sizes.whole(1, 6), _language(sizes) | {"num_hidden_layers": sizes.whole(2, 5)}
    fields = {
        "hidden_size": heads * sum(axes),
        "num_attention_heads": heads,
        "rope_axes_dim": axes,
        "num_layers": sizes.whole(2, 5),
        "ffn_hidden_size": sizes.whole(16, 240),
        "text_in_dim": text["hidden_size"],
    }
    return {
        "text_encoder": tiny_ernie.tiny_text_encoder(sizes.next_seed(), **text),
        "transformer": tiny_ernie.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_flux2.tiny_vae(sizes.next_seed(), **_kl_vae(sizes)),
    }


def _krea2(sizes: Sizes) -> Parts:
    text = _language(sizes) | {"num_hidden_layers": tiny_krea2.LAYERS}
    sections, heads = [sizes.whole(2, 6) for _ in range(3)], sizes.whole(1, 3)
    rope = tiny_qwen21.TEXT["rope_parameters"] | {"mrope_section": sections}
    text |= {"head_dim": 2 * sum(sections), "rope_parameters": rope, "hidden_size": heads * sizes.whole(8, 48, of=2)}
    shared = sizes.whole(1, 3)
    fields = _denoiser(sizes) | {
        "num_attention_heads": shared * sizes.whole(1, 3),
        "num_key_value_heads": shared,
        "intermediate_size": sizes.whole(16, 240),
        "timestep_embed_dim": sizes.whole(16, 256, of=2),
        "text_hidden_dim": text["hidden_size"],
        "text_num_attention_heads": heads,
        "text_num_key_value_heads": heads,
        "text_intermediate_size": sizes.whole(16, 120),
    }
    vision = _tower(sizes, sizes.whole(1, 3), text["hidden_size"])
    return {
        "text_encoder": tiny_krea2.tiny_text_encoder(sizes.next_seed(), text, vision),
        "transformer": tiny_krea2.tiny_dit(sizes.next_seed(), **fields),
        "vae": _qwen_vae(sizes),
    }


def _anima(sizes: Sizes) -> Parts:
    from support.spiece_files import hugging_face, trained

    text, heads = _language(sizes) | {"num_hidden_layers": sizes.whole(2, 5)}, sizes.whole(1, 6)
    width = heads * sizes.whole(8, 24, of=2)
    fields = {
        "num_attention_heads": sizes.whole(1, 6),
        "attention_head_dim": sizes.whole(18, 40, of=2),
        "num_layers": sizes.whole(2, 5),
        "mlp_ratio": sizes.whole(2, 5),
        "text_embed_dim": width,
        "adaln_lora_dim": sizes.whole(8, 40),
    }
    conditioner = {
        "source_dim": text["hidden_size"],
        "target_dim": width,
        "model_dim": width,
        "num_attention_heads": heads,
        "num_layers": sizes.whole(1, 4),
        "target_vocab_size": len(hugging_face(trained())) + sizes.whole(0, 40),
    }
    return {
        "text_encoder": tiny_zimage.tiny_text_encoder(sizes.next_seed(), **text),
        "text_conditioner": tiny_anima.tiny_conditioner(sizes.next_seed(), **conditioner),
        "transformer": tiny_anima.tiny_dit(sizes.next_seed(), **fields),
        "vae": _qwen_vae(sizes),
    }


def _auraflow(sizes: Sizes) -> Parts:
    heads, width = sizes.whole(1, 4), sizes.whole(8, 30)
    text = {
        "d_model": sizes.whole(16, 90),
        "d_kv": sizes.whole(4, 24),
        "d_ff": sizes.whole(16, 240),
        "num_layers": sizes.whole(2, 5),
        "num_heads": sizes.whole(1, 6),
    }
    fields = {
        "num_mmdit_layers": sizes.whole(1, 4),
        "num_single_dit_layers": sizes.whole(1, 5),
        "num_attention_heads": heads,
        "attention_head_dim": width,
        "caption_projection_dim": heads * width,
        "joint_attention_dim": text["d_model"],
        "pos_embed_max_size": sizes.whole(12, 20) ** 2,
    }
    return {
        "text_encoder": tiny_auraflow.tiny_text_encoder(sizes.next_seed(), **text),
        "transformer": tiny_auraflow.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_auraflow.tiny_vae(sizes.next_seed(), **_kl_vae(sizes)),
    }


def _lumina(sizes: Sizes) -> Parts:
    heads, shared, layers = sizes.whole(1, 4), sizes.whole(1, 3), sizes.whole(2, 5)
    queries = shared * sizes.whole(1, 3)
    axes = [2 * sizes.whole(1, 5) for _ in range(3)]
    text = {
        "hidden_size": queries * sizes.whole(8, 24),
        "intermediate_size": sizes.whole(16, 240),
        "num_hidden_layers": sizes.whole(2, 5),
        "head_dim": sizes.whole(4, 32, of=2),
        "num_key_value_heads": shared,
        "num_attention_heads": queries,
        "query_pre_attn_scalar": sizes.whole(4, 40),
        "sliding_window": sizes.whole(4, 60),
    }
    fields = {
        "num_attention_heads": 2 * heads,
        "num_kv_heads": heads,
        "hidden_size": 2 * heads * sum(axes),
        "num_layers": layers,
        "num_refiner_layers": sizes.whole(1, 3),
        "multiple_of": sizes.whole(1, 20),
        "ffn_dim_multiplier": None,
        "axes_dim_rope": axes,
        "cap_feat_dim": text["hidden_size"],
    }
    return {
        "text_encoder": tiny_lumina.tiny_text_encoder(sizes.next_seed(), **text),
        "transformer": tiny_lumina.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_zimage.tiny_vae(sizes.next_seed(), **_kl_vae(sizes)),
    }


def _pixart(sizes: Sizes) -> Parts:
    """Of alpha, which has all that Sigma has."""
    t5, heads, side = _t5(sizes, 1000), sizes.whole(1, 6), 12 * sizes.whole(1, 4)
    fields = tiny_pixart.ALPHA | {
        "num_attention_heads": heads,
        "attention_head_dim": side,
        "cross_attention_dim": heads * side,
        "num_layers": sizes.whole(2, 5),
        "caption_channels": t5.config.d_model,
    }
    return {
        "text_encoder": t5,
        "transformer": tiny_pixart.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_pixart.tiny_vae(sizes.next_seed(), scaling_factor=0.18215, **_kl_vae(sizes)),
    }


def _sana(sizes: Sizes) -> Parts:
    shared = sizes.whole(1, 3)
    queries = shared * sizes.whole(1, 3)
    text = {
        "hidden_size": queries * sizes.whole(8, 24),
        "intermediate_size": sizes.whole(16, 240),
        "num_hidden_layers": sizes.whole(2, 5),
        "head_dim": sizes.whole(4, 32, of=2),
        "num_key_value_heads": shared,
        "num_attention_heads": queries,
        "query_pre_attn_scalar": sizes.whole(4, 40),
        "sliding_window": sizes.whole(4, 60),
    }
    heads, size, across = 4 * sizes.whole(1, 2), sizes.whole(4, 16), sizes.whole(1, 4)
    fields = {
        "num_attention_heads": heads,
        "attention_head_dim": size,
        "num_layers": sizes.whole(2, 5),
        "num_cross_attention_heads": across,
        "cross_attention_head_dim": sizes.whole(4, 40),
        "cross_attention_dim": heads * size,
        "caption_channels": text["hidden_size"],
        "mlp_ratio": sizes.whole(2, 6) / 2,
        "qk_norm": (None, "rms_norm_across_heads")[sizes.whole(0, 1)],
    }
    inner = 8 * sizes.whole(1, 2)
    widths = [sizes.whole(1, 2) * 4, 8, 8, inner, inner, 2 * inner]
    layers = {f"{way}_layers_per_block": [sizes.whole(1, 2) for _ in widths] for way in ("encoder", "decoder")}
    vae = {f"{way}_block_out_channels": widths for way in ("encoder", "decoder")} | layers
    return {
        "text_encoder": tiny_lumina.tiny_text_encoder(sizes.next_seed(), **text),
        "transformer": tiny_sana.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_sana.tiny_vae(sizes.next_seed(), **vae),
    }


def _cascade(sizes: Sizes) -> Parts:
    text = _clip(sizes, "bigG", projection_dim=sizes.whole(16, 80))
    pooled, embedding = {"clip_text_pooled_in_channels": text.config.projection_dim}, sizes.whole(4, 20)

    def times() -> dict[str, Any]:
        return {
            "timestep_ratio_embedding_dim": sizes.whole(4, 24, of=2),
            "conditioning_dim": sizes.whole(8, 64),
            "clip_seq": sizes.whole(1, 4),
            "kernel_size": 2 * sizes.whole(0, 2) + 1,
        }

    heads = sizes.whole(1, 4)
    prior = tiny_cascade.PRIOR | pooled | times() | {
        "in_channels": embedding,
        "out_channels": embedding,
        "num_attention_heads": (heads, heads),
        "block_out_channels": (heads * sizes.whole(6, 20),) * 2,
        "down_num_layers_per_block": (sizes.whole(1, 3), sizes.whole(1, 3)),
        "up_num_layers_per_block": (sizes.whole(1, 3), sizes.whole(1, 3)),
        "clip_text_in_channels": text.config.hidden_size,
        "clip_image_in_channels": sizes.whole(8, 48),
    }  # fmt: skip
    heads = sizes.whole(1, 4)
    decoder = tiny_cascade.DECODER | pooled | times() | {
        "num_attention_heads": (0, 0, heads),
        "block_out_channels": (sizes.whole(6, 24), sizes.whole(6, 32), heads * sizes.whole(6, 16)),
        "down_num_layers_per_block": tuple(sizes.whole(1, 3) for _ in range(3)),
        "up_num_layers_per_block": tuple(sizes.whole(1, 3) for _ in range(3)),
        "up_blocks_repeat_mappers": tuple(sizes.whole(1, 3) for _ in range(3)),
        "effnet_in_channels": embedding,
    }  # fmt: skip
    return {
        "text_encoder": text,
        "prior": tiny_cascade.tiny_unet(sizes.next_seed(), prior),
        "decoder": tiny_cascade.tiny_unet(sizes.next_seed(), decoder),
        "vqgan": tiny_cascade.tiny_vqgan(
            sizes.next_seed(), embed_dim=4 * sizes.whole(2, 10), bottleneck_blocks=sizes.whole(1, 4)
        ),
        "effnet": oracle_effnet.Encoder(
            sizes.next_seed(),
            widths=tuple(sizes.whole(3, 20) for _ in range(7)),
            layers=tuple(sizes.whole(1, 3) for _ in range(6)),
            features=sizes.whole(8, 40),
            latent_channels=embedding,
        ),
    }


def _hunyuan(sizes: Sizes) -> Parts:
    """Of 1.1, which has all that 1.2 has."""
    t5, heads = _t5(sizes, 1000, 8 * sizes.whole(3, 20)), sizes.whole(1, 4)
    bert = tiny_bert.tiny_bert(
        sizes.next_seed(),
        hidden_size=heads * sizes.whole(8, 32),
        intermediate_size=sizes.whole(16, 240),
        num_hidden_layers=sizes.whole(1, 4),
        num_attention_heads=heads,
    )
    heads, side = sizes.whole(1, 6), 4 * sizes.whole(2, 12)
    fields = tiny_hunyuan.KINDS["hunyuan-1.1"] | {
        "num_attention_heads": heads,
        "attention_head_dim": side,
        "hidden_size": heads * side,
        "num_layers": 2 * sizes.whole(1, 3),
        "mlp_ratio": sizes.whole(15, 50) / 10,
        "cross_attention_dim": bert.config.hidden_size,
        "cross_attention_dim_t5": t5.config.d_model,
        "pooled_projection_dim": sizes.whole(8, 64),
    }
    return {
        "text_encoder": bert,
        "text_encoder_2": t5,
        "transformer": tiny_hunyuan.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_hunyuan.tiny_vae(sizes.next_seed(), **_kl_vae(sizes)),
    }


def _sd3(sizes: Sizes) -> Parts:
    from support.spiece_files import hugging_face, trained

    heads, size = sizes.whole(1, 6), sizes.whole(8, 48, of=2)
    size += heads * size % 4  # the positions have sines and cosines of two axes
    clips = [_clip(sizes, kind, projected=True, projection_dim=sizes.whole(8, 64)) for kind in ("ViT-L", "bigG")]
    widths = [clip.config.hidden_size for clip in clips]
    t5 = _t5(sizes, len(hugging_face(trained())), sum(widths) + sizes.whole(0, 40))
    fields = {
        "attention_head_dim": size,
        "num_attention_heads": heads,
        "caption_projection_dim": heads * size,
        "joint_attention_dim": t5.config.d_model,
        "pooled_projection_dim": sum(clip.config.projection_dim for clip in clips),
        "num_layers": sizes.whole(2, 5),
    }
    kind = ("medium", "large", "sd3")[sizes.whole(0, 2)]
    return {
        "text_encoder": clips[0],
        "text_encoder_2": clips[1],
        "text_encoder_3": t5,
        "transformer": tiny_sd3.tiny_dit(kind, sizes.next_seed(), **fields),
        "vae": tiny_sd3.tiny_vae(sizes.next_seed(), **_kl_vae(sizes)),
    }


def _zimage(sizes: Sizes) -> Parts:
    text, axes, heads = _language(sizes), _axes(sizes), sizes.whole(1, 6)
    fields = {
        "dim": heads * sum(axes),
        "n_heads": heads,
        "n_kv_heads": heads,
        "axes_dims": axes,
        "n_layers": sizes.whole(1, 4),
        "n_refiner_layers": sizes.whole(1, 3),
        "cap_feat_dim": text["hidden_size"],
    }
    layers = {"num_hidden_layers": sizes.whole(2, 5)}
    return {
        "text_encoder": tiny_zimage.tiny_text_encoder(sizes.next_seed(), **text, **layers),
        "transformer": tiny_zimage.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_zimage.tiny_vae(sizes.next_seed(), **_kl_vae(sizes)),
    }


def _qwen_text(sizes: Sizes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sizes of a Qwen2.5-VL's language model and of its vision tower."""
    sections = [sizes.whole(1, 6) for _ in range(3)]
    shared = sizes.whole(1, 3)
    heads = shared * sizes.whole(1, 3)
    text = {
        "hidden_size": heads * 2 * sum(sections),
        "intermediate_size": sizes.whole(16, 240),
        "num_hidden_layers": sizes.whole(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "rope_parameters": tiny_model.TEXT["rope_parameters"] | {"mrope_section": sections},  # type: ignore[operator]
    }
    vision_heads = sizes.whole(1, 3)
    vision = _tower(sizes, vision_heads, text["hidden_size"])
    return text, vision


def _tower(sizes: Sizes, heads: int, width: int) -> dict[str, Any]:
    """Sizes of a vision tower whose states are `width` wide."""
    return {
        "hidden_size": heads * sizes.whole(8, 32, of=4),
        "num_heads": heads,
        "intermediate_size": sizes.whole(16, 96),
        "out_hidden_size": width,
    }


def _qwen_vae(sizes: Sizes, **changes: int) -> torch.nn.Module:
    fields = {"base_dim": sizes.whole(4, 24, of=2), "num_res_blocks": sizes.whole(1, 2)}
    return tiny_model.tiny_vae(sizes.next_seed(), **fields, **changes)


def _qwen(sizes: Sizes) -> Parts:
    text, vision = _qwen_text(sizes)
    fields = _denoiser(sizes) | {"joint_attention_dim": text["hidden_size"]}
    return {
        "text_encoder": tiny_model.tiny_text_encoder(sizes.next_seed(), text, vision),
        "transformer": tiny_model.tiny_dit(sizes.next_seed(), **fields),
        "vae": _qwen_vae(sizes),
    }


def _longcat(sizes: Sizes) -> Parts:
    text, vision = _qwen_text(sizes)
    fields = _denoiser(sizes) | {"num_single_layers": sizes.whole(1, 4), "joint_attention_dim": text["hidden_size"]}
    return {
        "text_encoder": tiny_model.tiny_text_encoder(sizes.next_seed(), text, vision),
        "transformer": tiny_longcat.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_zimage.tiny_vae(sizes.next_seed(), **_kl_vae(sizes)),
    }


def _ovis(sizes: Sizes) -> Parts:
    text = _language(sizes) | {"num_hidden_layers": sizes.whole(2, 5)}
    fields = _denoiser(sizes) | {"num_single_layers": sizes.whole(1, 4), "joint_attention_dim": text["hidden_size"]}
    return {
        "text_encoder": tiny_zimage.tiny_text_encoder(sizes.next_seed(), **text),
        "transformer": tiny_ovis.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_zimage.tiny_vae(sizes.next_seed(), **_kl_vae(sizes)),
    }


def _edit(sizes: Sizes) -> Parts:
    text, vision = _qwen_text(sizes)
    fields = _denoiser(sizes) | {"joint_attention_dim": text["hidden_size"], "zero_cond_t": True}
    return {
        "text_encoder": tiny_edit.tiny_seeing_encoder(sizes.next_seed(), text, vision),
        "transformer": tiny_edit.louder(tiny_model.tiny_dit(sizes.next_seed(), **fields)),
        "vae": _qwen_vae(sizes),
    }


def _layered(sizes: Sizes) -> Parts:
    text, vision = _qwen_text(sizes)
    fields = _denoiser(sizes) | {"joint_attention_dim": text["hidden_size"]}
    return {
        "text_encoder": tiny_layered.tiny_writing_encoder(sizes.next_seed(), text, vision),
        "transformer": tiny_layered.tiny_layered_dit(sizes.next_seed(), **fields),
        "vae": _qwen_vae(sizes, input_channels=4),
    }


def _qwen21(sizes: Sizes) -> Parts:
    text, vision_heads = _language(sizes), sizes.whole(1, 3)
    sections = [sizes.whole(2, 6) for _ in range(3)]
    text |= {
        "head_dim": 2 * sum(sections),
        "num_hidden_layers": sizes.whole(3, 5),
        "rope_parameters": tiny_qwen21.TEXT["rope_parameters"] | {"mrope_section": sections},
    }
    vision = _tower(sizes, vision_heads, text["hidden_size"])
    fields = _denoiser(sizes) | {"context_in_dim": text["hidden_size"]}
    vae = {"base_dim": sizes.whole(3, 12), "decoder_base_dim": sizes.whole(4, 16)}
    return {
        "text_encoder": tiny_qwen21.tiny_seeing_encoder(sizes.next_seed(), text, vision),
        "transformer": tiny_qwen21.tiny_dit(sizes.next_seed(), **fields),
        "vae": tiny_qwen21.tiny_vae(sizes.next_seed(), **vae),
    }


def _sd(sizes: Sizes, kind: str) -> Parts:
    names = ("text_encoder", "text_encoder_2")
    clips = {name: _clip(sizes, text) for name, text in zip(names, tiny_sd.TEXTS[kind], strict=False)}
    if kind == "sdxl":
        clips["text_encoder_2"] = _clip(sizes, "bigG", projection_dim=52)
    heads, groups = sizes.whole(1, 4), sizes.whole(2, 4)
    unit = int(np.lcm(heads, groups))
    levels = len(tiny_sd.UNETS[kind]["block_out_channels"])
    fields: dict[str, Any] = {
        "block_out_channels": [unit * sizes.whole(2, 6) for _ in range(levels)],
        "norm_num_groups": groups,
        "attention_head_dim": heads,
        "layers_per_block": sizes.whole(1, 2),
        "cross_attention_dim": sum(clip.config.hidden_size for clip in clips.values()),
    }
    channels = fields["block_out_channels"]
    channels[0] += unit * (channels[0] % 2)  # the times have sines and cosines
    scale = 0.13025 if kind == "sdxl" else 0.18215
    return {
        **clips,
        "unet": tiny_sd.tiny_unet(kind, sizes.next_seed(), **fields),
        "vae": tiny_sd.tiny_kl_vae(sizes.next_seed(), scaling_factor=scale, **_kl_vae(sizes)),
    }


FAMILIES: dict[str, tuple[Callable[[Path], None], Callable[[Sizes], Parts]]] = {
    "flux": (partial(tiny_flux.write_tiny_flux, variant="dev"), _flux),
    "flux-controlled": (partial(tiny_flux.write_tiny_flux, variant="dev"), _flux),
    "flux-pictured": (partial(tiny_flux.write_tiny_flux, variant="dev"), _flux),
    "chroma": (tiny_chroma.write_tiny_chroma, _chroma),
    "longcat": (partial(tiny_longcat.write_tiny_longcat, kind="text"), _longcat),
    "ovis": (tiny_ovis.write_tiny_ovis, _ovis),
    "flux2": (partial(tiny_flux2.write_tiny_flux2, distilled=False), _flux2),
    "flux2-kv": (partial(tiny_flux2.write_tiny_flux2, distilled=True, kv=True), _flux2),
    "flux2-dev": (tiny_flux2_dev.write_tiny_flux2_dev, _flux2_dev),
    "flux3": (partial(tiny_flux3.write_tiny_flux3, distilled=True, tokenizer="tokenizer"), _flux3),
    "ernie": (tiny_ernie.write_tiny_ernie, _ernie),
    "krea2": (tiny_krea2.write_tiny_krea2, _krea2),
    "anima": (tiny_anima.write_tiny_anima, _anima),
    "auraflow": (tiny_auraflow.write_tiny_auraflow, _auraflow),
    "sana": (tiny_sana.write_tiny_sana, _sana),
    "lumina": (tiny_lumina.write_tiny_lumina, _lumina),
    "hunyuan": (partial(tiny_hunyuan.write_tiny_hunyuan, kind="hunyuan-1.1"), _hunyuan),
    "cascade": (partial(tiny_cascade.write_tiny_cascade, encodes=False), _cascade),
    "pixart": (partial(tiny_pixart.write_tiny_pixart, kind="pixart-alpha"), _pixart),
    "sd3": (tiny_sd3.write_tiny_sd3, _sd3),
    "z-image": (tiny_zimage.write_tiny_zimage, _zimage),
    "z-image-controlled": (tiny_zimage.write_tiny_zimage, _zimage),
    "qwen": (tiny_model.write_tiny_model, _qwen),
    "controlled": (tiny_model.write_tiny_model, _qwen),
    "edit": (partial(tiny_edit.write_tiny_edit, kind="2511"), _edit),
    "layered": (tiny_layered.write_tiny_layered, _layered),
    "qwen21": (tiny_qwen21.write_tiny_qwen21, _qwen21),
    "qwen21-text": (partial(tiny_qwen21.write_tiny_qwen21, tower=False), _qwen21),
    "sd15": (partial(tiny_sd.write_tiny_sd, kind="sd15"), partial(_sd, kind="sd15")),
    "sdxl": (partial(tiny_sd.write_tiny_sd, kind="sdxl"), partial(_sd, kind="sdxl")),
    "sd15-controlled": (partial(tiny_sd.write_tiny_sd, kind="sd15"), partial(_sd, kind="sd15")),
    "sdxl-controlled": (partial(tiny_sd.write_tiny_sd, kind="sdxl"), partial(_sd, kind="sdxl")),
    "sd15-tiny": (partial(tiny_sd.write_tiny_sd, kind="sd15"), partial(_sd, kind="sd15")),
    "flux2-tiny": (partial(tiny_flux2.write_tiny_flux2, distilled=False), _flux2),
    "qwen-tiny": (tiny_model.write_tiny_model, _qwen),
    "sd15-pictured": (partial(tiny_sd.write_tiny_sd, kind="sd15"), partial(_sd, kind="sd15")),
}
