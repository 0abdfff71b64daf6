"""Small networks whose kernels are counted, and what each is run on."""

from __future__ import annotations

from typing import Any

from paper.kernels import Case

from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig

DIT = QwenDiTConfig(
    num_layers=2, num_attention_heads=3, attention_head_dim=32, joint_attention_dim=72, axes_dims_rope=(8, 12, 12)
)
SMALL_UNET = UNetConfig(
    block_out_channels=(32, 64, 64, 64), attention_head_dim=(4, 4, 4, 4), cross_attention_dim=24, norm_num_groups=8
)
NETWORKS: dict[str, tuple[Any, Case]] = {
    "qwen_dit": (DIT, Case(height=10, width=14, text=5, branches=2)),
    "unet": (SMALL_UNET, Case(height=9, width=8, text=7, branches=2)),
    "qwen_vae": (QwenVAEConfig(base_dim=12, num_res_blocks=1), Case(height=5, width=6)),
    "kl_vae": (KLVAEConfig(block_out_channels=(32, 64), norm_num_groups=8), Case(height=5, width=6)),
}
