"""FLUX.2 klein base with random weights, of published proportions, narrower and of fewer layers."""

from __future__ import annotations

from pathlib import Path

from tiny_tokenizer import write_tiny_tokenizer
from wide_checkpoint import write_part, write_small_files

from qwenimg.common.networks.denoisers import flux2_dit
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.networks.encoders.qwen3 import Qwen3Config
from qwenimg.common.networks.vaes import flux2_vae
from qwenimg.common.networks.vaes.flux2_vae import Flux2VAEConfig

DIT = Flux2Config(
    num_layers=2, num_single_layers=8, num_attention_heads=8, joint_attention_dim=1536, guidance_embeds=False
)
TEXT = Qwen3Config(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=28, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=32000,
)  # fmt: skip
VAE = Flux2VAEConfig(block_out_channels=(64, 128, 256, 256))


def write_random_flux2(folder: Path) -> None:
    """Write the whole folder; model_index.json is written last."""
    networks = {"transformer": (flux2_dit.NETWORK, DIT), "text_encoder": (qwen3.NETWORK, TEXT)}
    for name, (network, config) in (networks | {"vae": (flux2_vae.NETWORK, VAE)}).items():
        write_part(folder / name, network, config)
    write_tiny_tokenizer(folder / "tokenizer")
    write_small_files(folder, "flux2-klein-base-4b")
