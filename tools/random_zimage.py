"""Z-Image-Turbo with random weights, of published proportions, narrower and of fewer layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tiny_tokenizer import write_tiny_tokenizer
from wide_checkpoint import write_part, write_small_files

from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.networks.denoisers.zimage_dit import ZImageConfig
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.networks.encoders.qwen3 import Qwen3Config
from qwenimg.common.networks.vaes import kl_vae

ZIMAGE = ZImageConfig(axes_lens=(1536, 512, 512), dim=1024, n_layers=8, n_heads=8, n_kv_heads=8, cap_feat_dim=1024)
ZIMAGE_TEXT = Qwen3Config(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=32000,
)  # fmt: skip
ZIMAGE_VAE = replace(kl_vae.FLUX_1, block_out_channels=(64, 128, 256, 256))


def write_random_zimage(folder: Path) -> None:
    """Write the whole folder; model_index.json is written last."""
    parts = {
        "transformer": (zimage_dit.NETWORK, ZIMAGE),
        "vae": (kl_vae.NETWORK, ZIMAGE_VAE),
        "text_encoder": (qwen3.NETWORK, ZIMAGE_TEXT),
    }
    for name, (network, config) in parts.items():
        write_part(folder / name, network, config)
    write_tiny_tokenizer(folder / "tokenizer")
    write_small_files(folder, "z-image-turbo")
