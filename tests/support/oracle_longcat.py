"""diffusers' LongCat-Image pipelines as the reference for the whole way, with their defects worked around.

- Edit does not hand on `mm_token_type_ids`, and needs a processor, which needs torchvision: as in `oracle_edit`.
- RoPE's frequencies, as in `oracle`; exact sinusoids of times, as in `oracle_flux`.
- Prompts are drawn as they are, without being rewritten.
- With two words that have an apostrophe inside, the pipelines put one in place of the other: no such prompt.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from support import oracle, oracle_edit, peer
from support.oracle_flux import exact_sinusoids

SMALLER = 36  # by which the area of a picture is divided in tests


@cache
def pipeline(folder: Path, *, edits: bool = False) -> Any:
    pipe = peer.opened("LongCatImagePipeline", folder, torch_dtype=torch.float32, text_processor=None)
    oracle.compute_frequencies(pipe.text_encoder)
    pipe.transformer.time_embed.time_proj.forward = exact_sinusoids
    if not edits:
        return pipe
    oracle_edit._with_positions(pipe.text_encoder)
    processor: Any = oracle_edit.Processor(pipe.tokenizer)
    processor.image_processor = processor.images
    parts = pipe.components | {"text_processor": processor}
    made = peer.quiet().LongCatImageEditPipeline(**parts)
    made.set_progress_bar_config(disable=True)
    return made


def generate(
    folder: Path,
    prompt: str,
    seed: int,
    *,
    width: int,
    height: int,
    picture: np.ndarray | None = None,
    negative_prompt: str = "",
    steps: int,
    guidance: float,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64. picture: for Edit, which
    draws in the size in which it is seen."""
    pipe = pipeline(folder, edits=picture is not None)
    more: dict[str, Any] = (
        {"image": Image.fromarray(picture)}
        if picture is not None
        else {"width": width, "height": height, "enable_prompt_rewrite": False}
    )
    final = pipe(
        prompt=prompt,
        negative_prompt=negative_prompt,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        **more,
    ).images
    latents = pipe._unpack_latents(final, height, width, pipe.vae_scale_factor)
    return latents.numpy(), peer.decoded(pipe, latents)


def make_pictures_small(patch: Any) -> None:
    """Let theirs and ours see pictures in a small area; `patch` is a pytest.MonkeyPatch."""
    from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit as module

    from qwenimg.common.families.longcat import references

    theirs = module.calculate_dimensions
    patch.setattr(module, "calculate_dimensions", lambda area, ratio: theirs(area // SMALLER, ratio))
    patch.setattr(references, "AREA", references.AREA // SMALLER)
