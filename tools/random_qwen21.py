"""Qwen-Image-2.1 with random weights, of published proportions, narrower and of fewer layers."""

from __future__ import annotations

from pathlib import Path

from tiny_tokenizer import write_tiny_tokenizer
from wide_checkpoint import write_part, write_small_files

from qwenimg.common.networks.denoisers import qwen21_dit
from qwenimg.common.networks.denoisers.qwen21_dit import Qwen21Config
from qwenimg.common.networks.encoders import qwen3_vl_vision
from qwenimg.common.networks.encoders.qwen3_vl_vision import Qwen3VLVisionConfig
from qwenimg.common.networks.vaes import qwen21_vae
from qwenimg.common.networks.vaes.qwen21_vae import Qwen21VAEConfig

DIT = Qwen21Config(num_layers=8, num_attention_heads=8, context_in_dim=1024)
TEXT = Qwen3VLVisionConfig(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=9, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=32000, vision_depth=6, vision_width=576, vision_inner=2152, vision_heads=8, deep_layers=(1, 3, 5),
)  # fmt: skip
VAE = Qwen21VAEConfig(base_dim=32, decoder_base_dim=48)


def write_random_qwen21(folder: Path) -> None:
    """Write the whole folder; model_index.json is written last."""
    networks = {"transformer": (qwen21_dit.NETWORK, DIT), "text_encoder": (qwen3_vl_vision.NETWORK, TEXT)}
    for name, (network, config) in (networks | {"vae": (qwen21_vae.NETWORK, VAE)}).items():
        write_part(folder / name, network, config)
    write_tiny_tokenizer(folder / "processor")
    write_small_files(folder, "qwen-image-2.1")
