"""FLUX.1 dev with random weights, in proportions like the published ones, narrower and of fewer layers."""

from __future__ import annotations

import sys
from pathlib import Path

from wide_checkpoint import write_part, write_small_files

from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.encoders import clip, t5
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig

FLUX = {
    "transformer": FluxConfig(
        num_layers=3, num_single_layers=6, num_attention_heads=8, joint_attention_dim=1024, pooled_projection_dim=256,
        guidance_embeds=True,
    ),
    "text_encoder": CLIPConfig(vocab_size=589, hidden_size=256, intermediate_size=1024, num_attention_heads=4),
    "text_encoder_2": T5Config(d_model=1024, d_ff=2560, num_layers=8, num_heads=16),
    "vae": KLVAEConfig(
        block_out_channels=(64, 128, 256, 256), layers_per_block=2, latent_channels=16, scaling_factor=0.3611,
        shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
    ),
}  # fmt: skip
FLUX_NETWORKS = {"transformer": flux_dit, "text_encoder": clip, "text_encoder_2": t5, "vae": kl_vae}


def write_random_flux(folder: Path) -> None:
    """Write the whole folder; model_index.json is written last."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from support.spiece_files import trained, write_spiece  # which trains a tokenizer
    from support.tiny_clip import write_tiny_clip_tokenizer

    for name, config in FLUX.items():
        write_part(folder / name, FLUX_NETWORKS[name].NETWORK, config)
    write_tiny_clip_tokenizer(folder / "tokenizer")
    write_spiece(folder / "tokenizer_2", trained())
    write_small_files(folder, "flux-dev")
