"""The keywords of a call of a pipeline, for type checkers and editors.

Written by tools/write_call_types.py from the fields of `Request` and of `FamilyOptions`, for type checkers, which run
nothing.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.request.coerce import Controls, Embeddings, Loras, Picture, Pictures


class CallOptions(TypedDict, total=False):
    """Options of a call besides the prompt. None takes the model's default, or a random seed."""

    rewrite: int | None
    negative_prompt: str | None
    caption: str | None
    width: int | None
    height: int | None
    steps: int | None
    guidance: float | None
    true_cfg: float | None
    cfg_end: float | None
    step_cache: float | None
    cached_calls: str | None
    guidance_rescale: float | None
    cfg_normalization: float | None
    cfg_truncation: float | None
    skip_layers: str | None
    skip_layer_scale: float | None
    sampler: str | None
    schedule: str | None
    seed: int | None
    variation: str | None
    lora: Loras | None
    lora_mode: str | None
    few_steps: str | None
    layers: int | None
    embedding: Embeddings | None
    latents: NDArray[np.float32] | None
    image: Pictures | None
    strength: float | None
    mask: Picture | None
    only_masked: int | None
    mask_blur: float | None
    mask_fill: str | None
    mask_mode: str | None
    outpaint: str | dict[str, int] | None
    hires: float | None
    hires_strength: float | None
    hires_steps: int | None
    hires_with: str | None
    control: Controls | None
    control_mode: str | None
    refine_at: float | None
    clip_skip: int | None
    decoder_steps: int | None
    decoder_guidance: float | None
