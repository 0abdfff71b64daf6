"""Tiny Stable Diffusion models of every type, made by diffusers and transformers, and the same in one file.

The names of a single file are written here by rules of their own, from the other side than `clip_names`; that
they are right is checked with diffusers' converters.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from support.tiny_clip import EOS, tiny_clip, write_tiny_clip_tokenizer
from support.tiny_model import randomise

LAYERS = 2  # residual blocks in a level
TEXT = {"hidden_size": 64, "num_attention_heads": 1}
OPEN_TEXT = {"hidden_size": 128, "intermediate_size": 136, "num_attention_heads": 2}
CROSS, PLAIN = ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"), ("DownBlock2D", "UpBlock2D")

UNETS: dict[str, dict[str, Any]] = {
    "sd1": {
        "block_out_channels": (32, 32, 64),
        "attends": (True, True, False),
        "attention_head_dim": 8,
        "cross_attention_dim": 64,
    },
    "sd2": {
        "block_out_channels": (64, 128),
        "attends": (True, False),
        "attention_head_dim": (1, 2),
        "cross_attention_dim": 128,
        "use_linear_projection": True,
    },
    "sdxl": {
        "block_out_channels": (64, 128, 64),
        "attends": (False, True, True),
        "attention_head_dim": (1, 2, 1),
        "cross_attention_dim": 192,
        "transformer_layers_per_block": (1, 2, 3),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 52 + 6 * 256,
    },
    "sdxl-refiner": {
        "block_out_channels": (64, 128, 64),
        "attends": (False, True, False),
        "attention_head_dim": (1, 2, 1),
        "cross_attention_dim": 128,
        "transformer_layers_per_block": (1, 2, 2),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 52 + 5 * 256,
    },
}
VAE = {
    "block_out_channels": (32, 64, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "latent_channels": 4,
}


def tiny_unet(kind: str, channels: int = 4) -> torch.nn.Module:
    model = empty_unet(UNETS[kind], channels)
    randomise(model, 11)
    return model.eval()


def empty_unet(fields: dict[str, Any], channels: int = 4) -> torch.nn.Module:
    """diffusers' model with these fields; `attends` says of each level whether it has attention."""
    from diffusers import UNet2DConditionModel

    config = dict(fields)
    attends = config.pop("attends")
    return UNet2DConditionModel(
        in_channels=channels,
        layers_per_block=LAYERS,
        sample_size=64,
        down_block_types=[(CROSS if a else PLAIN)[0] for a in attends],
        up_block_types=[(CROSS if a else PLAIN)[1] for a in reversed(attends)],
        **config,
    )


def tiny_kl_vae() -> torch.nn.Module:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(**VAE)
    randomise(model, 12)
    return model.eval()


def tiny_texts(kind: str) -> dict[str, torch.nn.Module]:
    """The text encoders by component; SD 2's with 23 layers, all that a published folder has."""
    if kind == "sd1":
        return {"text_encoder": tiny_clip("ViT-L", **TEXT)}
    if kind == "sd2":
        return {"text_encoder": tiny_clip("OpenCLIP-H", **OPEN_TEXT, num_hidden_layers=23)}
    second = {"text_encoder_2": tiny_clip("bigG", **OPEN_TEXT)}
    return {"text_encoder": tiny_clip("ViT-L", **TEXT)} | second if kind == "sdxl" else second


def models_of(kind: str, channels: int = 4) -> dict[str, torch.nn.Module]:
    """Every component by its folder's name."""
    return {"unet": tiny_unet(kind, channels), "vae": tiny_kl_vae(), **tiny_texts(kind)}


def write_folder(folder: Path, models: dict[str, torch.nn.Module]) -> None:
    for name, model in models.items():
        model.save_pretrained(folder / name)


def pipeline(folder: Path, kind: str, models: dict[str, torch.nn.Module]) -> Any:
    """diffusers' text-to-image pipeline of these models, with tokenizers whose files it leaves in `folder`."""
    import diffusers
    from transformers import CLIPTokenizer

    parts: dict[str, Any] = dict(models)
    for name in models:
        if "text" in name:
            tokens = folder / name.replace("text_encoder", "tokenizer")
            write_tiny_clip_tokenizer(tokens, EOS if name == "text_encoder" and kind != "sd2" else "!")
            parts[tokens.name] = CLIPTokenizer.from_pretrained(tokens)
    trained = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    parts["scheduler"] = diffusers.DDIMScheduler(**trained, clip_sample=False, set_alpha_to_one=False)
    if "xl" in kind:
        missing = dict.fromkeys(("text_encoder", "tokenizer"))
        return diffusers.StableDiffusionXLPipeline(**(missing | parts))
    extra = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return diffusers.StableDiffusionPipeline(**parts, **extra)


# In one file

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}


def unet_file(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The UNet in ldm names, without prefix."""
    attends = [hasattr(block, "attentions") for block in model.up_blocks]
    out = {}
    for name, value in model.state_dict().items():
        name = re.sub(r"(resnets\.\d+)\.(\w+)\.", lambda m: f"{m[1]}.{RESNET[m[2]]}.", name)
        for pattern, target in (
            (r"time_embedding\.linear_(\d)", lambda m: f"time_embed.{2 * int(m[1]) - 2}"),
            (r"add_embedding\.linear_(\d)", lambda m: f"label_emb.0.{2 * int(m[1]) - 2}"),
            (r"conv_in", lambda m: "input_blocks.0.0"),
            (r"conv_norm_out", lambda m: "out.0"),
            (r"conv_out", lambda m: "out.2"),
            (r"mid_block\.resnets\.(\d)", lambda m: f"middle_block.{2 * int(m[1])}"),
            (r"mid_block\.attentions\.0", lambda m: "middle_block.1"),
            (
                r"down_blocks\.(\d+)\.(resnets|attentions)\.(\d+)",
                lambda m: f"input_blocks.{1 + 3 * int(m[1]) + int(m[3])}.{int(m[2] == 'attentions')}",
            ),
            (r"down_blocks\.(\d+)\.downsamplers\.0\.conv", lambda m: f"input_blocks.{3 * int(m[1]) + 3}.0.op"),
            (
                r"up_blocks\.(\d+)\.(resnets|attentions)\.(\d+)",
                lambda m: f"output_blocks.{3 * int(m[1]) + int(m[3])}.{int(m[2] == 'attentions')}",
            ),
            (
                r"up_blocks\.(\d+)\.upsamplers\.0\.conv",
                lambda m: f"output_blocks.{3 * int(m[1]) + 2}.{1 + attends[int(m[1])]}.conv",
            ),
        ):
            found, count = re.subn(f"^{pattern}", target, name)
            if count:
                name = found
                break
        out[name] = value
    return out


def vae_file(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The VAE in ldm names, without prefix."""
    last = len(model.config.block_out_channels) - 1
    out = {}
    for name, value in model.state_dict().items():
        if ".to_" in name and name.endswith("weight"):
            value = value[:, :, None, None].contiguous()
        name = re.sub(r"down_blocks\.(\d)\.resnets\.", r"down.\1.block.", name)
        name = re.sub(r"up_blocks\.(\d)\.resnets\.", lambda m: f"up.{last - int(m[1])}.block.", name)
        name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
        name = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"up.{last - int(m[1])}.upsample", name)
        name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
        name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("conv_norm_out", "norm_out")
        name = name.replace("conv_shortcut", "nin_shortcut").replace("group_norm", "norm")
        name = name.replace("to_out.0", "proj_out")
        out[re.sub(r"attn_1\.to_(.)\.", r"attn_1.\1.", name)] = value
    return out


def clip_file(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A ViT-L as it is in a file, with the prefix of the published ones and their buffer."""
    out = {"text_model." + key.removeprefix("text_model."): value for key, value in model.state_dict().items()}
    return out | {"text_model.embeddings.position_ids": torch.arange(77)[None]}


def open_clip_file(model: torch.nn.Module, extra_layer: bool = False) -> dict[str, torch.Tensor]:
    """A text encoder in OpenCLIP's names; `extra_layer` adds one that is not used, and a projection."""
    tensors = {key.removeprefix("text_model."): value for key, value in model.state_dict().items()}
    out = {
        "token_embedding.weight": tensors["embeddings.token_embedding.weight"],
        "positional_embedding": tensors["embeddings.position_embedding.weight"],
        "ln_final.weight": tensors["final_layer_norm.weight"],
        "ln_final.bias": tensors["final_layer_norm.bias"],
        "logit_scale": torch.tensor(4.6),
    }
    if "text_projection.weight" in tensors:
        out["text_projection"] = tensors["text_projection.weight"].T.contiguous()
    layers = 1 + max(int(key.split(".")[2]) for key in tensors if key.startswith("encoder.layers."))
    for layer in range(layers):
        ours, theirs = f"transformer.resblocks.{layer}.", f"encoder.layers.{layer}."
        for leaf in ("weight", "bias"):
            fused = [tensors[f"{theirs}self_attn.{x}_proj.{leaf}"] for x in "qkv"]
            out[f"{ours}attn.in_proj_{leaf}"] = torch.cat(fused)
            out[f"{ours}attn.out_proj.{leaf}"] = tensors[f"{theirs}self_attn.out_proj.{leaf}"]
            for new, old in (("ln_1", "layer_norm1"), ("ln_2", "layer_norm2")):
                out[f"{ours}{new}.{leaf}"] = tensors[f"{theirs}{old}.{leaf}"]
            out[f"{ours}mlp.c_fc.{leaf}"] = tensors[f"{theirs}mlp.fc1.{leaf}"]
            out[f"{ours}mlp.c_proj.{leaf}"] = tensors[f"{theirs}mlp.fc2.{leaf}"]
    if extra_layer:
        last = [(key, value) for key, value in out.items() if f"resblocks.{layers - 1}." in key]
        out |= {key.replace(f"resblocks.{layers - 1}.", f"resblocks.{layers}."): value + 1 for key, value in last}
        out["text_projection"] = torch.ones(4, 5)
        out["attn_mask"] = torch.zeros(77, 77)
    return out


def behind(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + key: value for key, value in tensors.items()}


def one_file(kind: str, models: dict[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """All models of this type in one file, with what published files have beside them."""
    out = behind("model.diffusion_model.", unet_file(models["unet"]))
    out |= behind("first_stage_model.", vae_file(models["vae"]))
    if kind == "sd1":
        out |= behind("cond_stage_model.transformer.", clip_file(models["text_encoder"]))
    elif kind == "sd2":
        out |= behind("cond_stage_model.model.", open_clip_file(models["text_encoder"], extra_layer=True))
    else:
        first = kind == "sdxl-refiner"
        second = open_clip_file(models["text_encoder_2"])
        out |= behind(f"conditioner.embedders.{0 if first else 1}.model.", second)
    if kind == "sdxl":
        out |= behind("conditioner.embedders.0.transformer.", clip_file(models["text_encoder"]))
    out |= {"alphas_cumprod": torch.ones(9), "betas": torch.ones(9), "model_ema.decay": torch.tensor(0.9)}
    return {key: value.contiguous() for key, value in out.items()}
