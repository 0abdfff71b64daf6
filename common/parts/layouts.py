"""Every denoiser with `LAYOUTS`: LoRAs may name its layers as any of them does."""

from __future__ import annotations

from qwenimg.common.networks.denoisers import (
    anima_names,
    aura_names,
    cascade_names,
    chroma_names,
    ernie_names,
    flux2_names,
    flux3_names,
    flux_names,
    hunyuan_names,
    krea2_names,
    longcat_names,
    lumina_names,
    ovis_names,
    pixart_names,
    qwen21_names,
    qwen_names,
    sana_names,
    sd3_names,
    unet_names,
    zimage_names,
)
from qwenimg.common.networks.layout import Layouts

LAYOUTS: tuple[Layouts, ...] = (
    zimage_names.LAYOUTS,
    lumina_names.LAYOUTS,
    aura_names.LAYOUTS,
    sana_names.LAYOUTS,
    flux_names.LAYOUTS,
    flux2_names.LAYOUTS,
    flux3_names.LAYOUTS,
    longcat_names.LAYOUTS,
    ovis_names.LAYOUTS,
    pixart_names.LAYOUTS,
    hunyuan_names.LAYOUTS,
    chroma_names.LAYOUTS,
    ernie_names.LAYOUTS,
    krea2_names.LAYOUTS,
    anima_names.LAYOUTS,
    qwen_names.LAYOUTS,
    qwen21_names.LAYOUTS,
    sd3_names.LAYOUTS,
    unet_names.LAYOUTS,
    cascade_names.PRIOR,
)
