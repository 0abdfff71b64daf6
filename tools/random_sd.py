"""Stable Diffusion folders of published proportions at half or a quarter of the width, with random weights.

For measurements: what they draw is noise. Needs neither framework, nor diffusers or transformers.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from wide_checkpoint import write

from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.prompts.vocabulary import byte_symbols

Kind = Literal["sd15", "sdxl"]
BOS, EOS = "<|startoftext|>", "<|endoftext|>"
CROSS, PLAIN, UP_CROSS, UP = "CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"
TRAINED = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000,
    "steps_offset": 1, "timestep_spacing": "leading",
}  # fmt: skip
TEXTS: dict[Kind, dict[str, dict[str, Any]]] = {
    "sd15": {"": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6}},
    "sdxl": {
        "": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6},
        "_2": {
            "hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 10,
            "projection_dim": 640, "hidden_act": "gelu",
        },
    },
}  # fmt: skip
UNETS: dict[Kind, dict[str, Any]] = {
    "sd15": {
        "block_out_channels": [160, 320, 640, 640],
        "down_block_types": [CROSS, CROSS, CROSS, PLAIN],
        "up_block_types": [UP, UP_CROSS, UP_CROSS, UP_CROSS],
        "attention_head_dim": 8,
        "cross_attention_dim": 384,
    },
    "sdxl": {
        "block_out_channels": [160, 320, 640],
        "down_block_types": [PLAIN, CROSS, CROSS],
        "up_block_types": [UP_CROSS, UP_CROSS, UP],
        "attention_head_dim": [3, 5, 10],
        "transformer_layers_per_block": [1, 2, 10],
        "use_linear_projection": True,
        "cross_attention_dim": 1024,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 640 + 6 * 256,
    },
}
VAE = {"block_out_channels": [64, 128, 256, 256], "layers_per_block": 2, "latent_channels": 4}


def write_random_sd(folder: Path, kind: Kind, dtype: str = "F16") -> None:
    """A complete folder in diffusers layout, stored as `dtype`. model_index.json is written last."""
    config = UNetConfig(**{key: _tuple(value) for key, value in unet.unet_fields(UNETS[kind]).items()})
    vae = KLVAEConfig(**{key: _tuple(value) for key, value in VAE.items()})
    _write(folder / "unet", {"_class_name": unet.CLASS_NAME} | UNETS[kind], unet.manifest(config), dtype)
    _write(folder / "vae", {"_class_name": kl_vae.CLASS_NAME} | VAE, kl_vae.manifest(vae), dtype)
    index: dict[str, Any] = {"unet": ["diffusers", unet.CLASS_NAME], "vae": ["diffusers", kl_vae.CLASS_NAME]}
    for name, fields in TEXTS[kind].items():
        text = CLIPConfig(**fields, vocab_size=len(vocabulary()))
        kept = "CLIPTextModelWithProjection" if text.projection_dim else "CLIPTextModel"
        about = {"architectures": [kept], "model_type": clip.MODEL_TYPE} | asdict(text)
        _write(folder / f"text_encoder{name}", about, clip.manifest(text), dtype, "model")
        write_clip_tokenizer(folder / f"tokenizer{name}")
        index |= {f"text_encoder{name}": ["transformers", kept], f"tokenizer{name}": ["transformers", "CLIPTokenizer"]}
    index["_class_name"] = "StableDiffusionXLPipeline" if kind == "sdxl" else "StableDiffusionPipeline"
    _json(folder / "scheduler" / "scheduler_config.json", {"_class_name": "EulerDiscreteScheduler"} | TRAINED)
    _json(folder / "model_index.json", index)


def vocabulary() -> dict[str, int]:
    """CLIP's without merges: bytes, bytes that end a word, start and end."""
    symbols = byte_symbols()
    tokens = [*symbols, *(f"{symbol}</w>" for symbol in symbols), BOS, EOS]
    return {token: i for i, token in enumerate(tokens)}


def write_clip_tokenizer(folder: Path) -> None:
    """CLIP's tokenizer with these words."""
    _json(folder / "vocab.json", vocabulary())
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    special = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": EOS}
    _json(folder / "tokenizer_config.json", special | {"model_max_length": 77})


def _tuple(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _write(folder: Path, config: dict[str, Any], manifest: Any, dtype: str, stem: str = "") -> None:
    _json(folder / "config.json", config)
    write(folder / f"{stem or 'diffusion_pytorch_model'}.safetensors", manifest, dtype)


def _json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
