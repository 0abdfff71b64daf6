"""Every denoiser with `LAYOUTS`: LoRAs may name its layers as any of them does."""

from __future__ import annotations

from qwenimg.common.networks.denoisers import (
    flux2_names,
    flux_names,
    qwen21_names,
    qwen_names,
    sd3_names,
    unet_names,
    zimage_names,
)
from qwenimg.common.networks.layout import Layouts

LAYOUTS: tuple[Layouts, ...] = (
    zimage_names.LAYOUTS,
    flux_names.LAYOUTS,
    flux2_names.LAYOUTS,
    qwen_names.LAYOUTS,
    qwen21_names.LAYOUTS,
    sd3_names.LAYOUTS,
    unet_names.LAYOUTS,
)
