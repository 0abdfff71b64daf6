"""The keywords of the classes of `qwenimg.diffusers`, for type checkers and editors.

Written by tools/write_call_types.py, for type checkers, which run nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.families.load_options import Prediction
from qwenimg.common.request.coerce import Controls, Embeddings, Loras, Picture, Pictures


class Tensor(Protocol):
    """A tensor of torch."""

    def detach(self) -> Any: ...


class Generator(Protocol):
    """A torch.Generator."""

    def initial_seed(self) -> int: ...


class CallKeywords(TypedDict, total=False):
    """A call: diffusers' keywords, then the other options of a call here."""

    prompt: str | Sequence[str] | None
    negative_prompt: str | Sequence[str] | None
    prompt_2: str | Sequence[str] | None
    prompt_3: str | Sequence[str] | None
    negative_prompt_2: str | Sequence[str] | None
    negative_prompt_3: str | Sequence[str] | None
    height: int | None
    width: int | None
    num_inference_steps: int | None
    num_images_per_prompt: int | None
    clip_skip: int | None
    padding_mask_crop: int | None
    layers: int | None
    max_sequence_length: int | None
    guidance_scale: float | None
    true_cfg_scale: float | None
    guidance_rescale: float | None
    strength: float | None
    cfg_truncation: float | None
    cfg_normalization: float | None
    skip_layer_guidance_scale: float | None
    cross_attention_kwargs: Mapping[str, float] | None
    joint_attention_kwargs: Mapping[str, float] | None
    attention_kwargs: Mapping[str, float] | None
    image: Pictures | Tensor | NDArray[np.floating] | None
    mask_image: Picture | Tensor | NDArray[np.floating] | None
    generator: Generator | int | Sequence[Generator | int] | None
    latents: Tensor | NDArray[np.floating] | None
    skip_guidance_layers: Sequence[int] | None
    use_en_prompt: bool | None
    callback_on_step_end: Callable[..., Mapping[str, object] | None] | None
    callback_on_step_end_tensor_inputs: Sequence[str] | None
    rewrite: int | None
    caption: str | None
    steps: int | None
    guidance: float | None
    true_cfg: float | None
    cfg_end: float | None
    step_cache: float | None
    cached_calls: str | None
    skip_layers: str | None
    skip_layer_scale: float | None
    sampler: str | None
    schedule: str | None
    seed: int | None
    variation: str | None
    lora: Loras | None
    lora_mode: str | None
    few_steps: str | None
    embedding: Embeddings | None
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
    decoder_steps: int | None
    decoder_guidance: float | None


class LoadKeywords(TypedDict, total=False):
    """`from_pretrained`: those of diffusers, then of `qwenimg.load`."""

    torch_dtype: object | None
    dtype: object | None
    local_files_only: bool | None
    use_safetensors: bool | None
    scheduler: object | None
    notify: Callable[[str, str], None] | None
    backend: str | None
    compile: str | None
    preset: str | None
    precision: str | None
    fallback: bool | None
    check: bool | None
    quantize: int | str | None
    max_memory: str | int | None
    cache_prompts: bool | None
    offline: bool | None
    transformer: str | Path | None
    text_encoder: str | Path | None
    text_encoder_2: str | Path | None
    text_encoder_3: str | Path | None
    vae: str | Path | None
    effnet: str | Path | None
    models_dir: str | Path | Sequence[str | Path] | None
    wildcards: str | Path | Sequence[str | Path] | None
    preview_with: str | Path | None
    rewrite_with: str | Path | None
    refiner: str | Path | None
    tokenizer: str | Path | None
    ip_encoder: str | Path | None
    prediction: Prediction | None
    variant: str | None
