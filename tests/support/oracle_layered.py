"""diffusers' Qwen-Image-Layered pipeline as the reference, with its defects worked around in this one place.

- `output_type="latent"` fails: the final latents are taken from the callback of the last step.
- It takes a prompt of nothing to its captioner, which our tests have not: they always give a prompt.
- RoPE's frequencies, as in `oracle`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qwenimg.common.numbers.packing import pack_frames, unpack_frames


@cache
def pipeline(folder: Path) -> Any:
    import diffusers
    import transformers

    transformers.logging.set_verbosity_error()
    diffusers.utils.logging.set_verbosity_error()
    pipe = diffusers.QwenImageLayeredPipeline.from_pretrained(folder, torch_dtype=torch.float32, processor=None)
    pipe.set_progress_bar_config(disable=True)
    rope = pipe.text_encoder.model.language_model.rotary_emb
    rope.inv_freq.copy_(rope.compute_default_rope_parameters(rope.config)[0])
    return pipe


def generate(
    folder: Path,
    prompt: str,
    image: np.ndarray,
    latents: np.ndarray,
    *,
    negative_prompt: str = " ",
    steps: int = 3,
    guidance: float = 4.0,
    normalize: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return diffusers' final latents [F, C, h, w], and the pixels of the layers [F - 1, H, W, 4] as uint8 values in
    float64, for noise [F, C, h, w], whatever the proportions of `image`."""
    last: list[torch.Tensor] = []

    def kept(pipe: Any, step: int, timestep: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        last[:] = [values["latents"]]
        return values

    from diffusers.pipelines.qwenimage import pipeline_qwenimage_layered as module

    pipe, height, width = pipeline(folder), *(8 * side for side in latents.shape[2:])
    usual = module.calculate_dimensions
    module.calculate_dimensions = lambda area, ratio: (width, height)
    try:
        [layers] = pipe(
            image=Image.fromarray(image).convert("RGBA"),
            prompt=prompt,
            negative_prompt=negative_prompt,
            true_cfg_scale=guidance,
            layers=len(latents) - 1,
            num_inference_steps=steps,
            latents=torch.from_numpy(pack_frames(latents)),
            output_type="np",
            cfg_normalize=normalize,
            callback_on_step_end=kept,
        ).images
    finally:
        module.calculate_dimensions = usual
    final = unpack_frames(last[0].float().numpy(), len(latents), *latents.shape[2:])
    return final, (np.asarray(layers) * 255).round().astype(np.float64)
