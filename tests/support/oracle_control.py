"""diffusers' control pipelines for Qwen-Image as the reference.

- RoPE's frequencies, as in `oracle`.
- The inpainting pipeline draws the sample of its control picture from torch's own generator, and not from the given
  one: it gets none, and torch's own has the seed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qwenimg.common.numbers.packing import pack
from support import oracle

PARTS = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")


@cache
def pipeline(folder: Path, net: Path, several: bool, inpaints: bool) -> Any:
    import diffusers

    base = oracle.pipeline(folder, torch.float32)
    control = diffusers.QwenImageControlNetModel.from_pretrained(net, torch_dtype=torch.float32)
    if several:
        control = diffusers.QwenImageMultiControlNetModel([control])
    cls = diffusers.QwenImageControlNetInpaintPipeline if inpaints else diffusers.QwenImageControlNetPipeline
    pipe = cls(**{name: getattr(base, name) for name in PARTS}, controlnet=control)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(
    folder: Path,
    net: Path,
    prompt: str,
    pictures: list[np.ndarray],
    *,
    mask: np.ndarray | None = None,
    size: tuple[int, int],
    seed: int,
    scales: list[float],
    windows: list[tuple[float, float]],
    negative_prompt: str = " ",
    steps: int = 3,
    guidance: float = 4.0,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64."""
    several, inpaints = len(pictures) > 1, mask is not None
    pipe = pipeline(folder, net, several, inpaints)
    images = [Image.fromarray(picture) for picture in pictures]
    starts, ends = ([float(window[i]) for window in windows] for i in range(2))
    given: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed)}
    if mask is not None:
        torch.manual_seed(seed)
        given = {"control_mask": Image.fromarray(mask)}
    return oracle.drawn(
        pipe,
        prompt,
        size,
        negative_prompt=negative_prompt,
        steps=steps,
        guidance=guidance,
        control_image=images if several else images[0],
        controlnet_conditioning_scale=scales if several else scales[0],
        control_guidance_start=starts if several else starts[0],
        control_guidance_end=ends if several else ends[0],
        **given,
    )


# Control by a LoRA, for which diffusers has no pipeline: its own transformer with the LoRA, given the picture's tokens


def mean_of(pipe: Any, picture: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
    """The packed mean [1, L, 64] of a picture's latents, by diffusers' VAE."""
    resized = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS), np.float32)
    values = torch.from_numpy(resized).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    mean, std = (
        torch.tensor(v)[None, :, None, None, None] for v in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    with torch.no_grad():
        latents = (pipe.vae.encode(values).latent_dist.mode() - mean) / std
    return torch.from_numpy(pack(latents[:, :, 0].numpy()))


def in_context(
    folder: Path,
    lora: Path,
    prompt: str,
    picture: np.ndarray,
    *,
    size: tuple[int, int],
    seed: int,
    scale: float = 1.0,
    negative_prompt: str = " ",
    steps: int = 3,
    guidance: float = 4.0,
) -> tuple[np.ndarray, np.ndarray]:
    """The final latents and pixels of diffusers' classes, whose transformer sees `picture` behind the noise."""
    import diffusers

    base = oracle.pipeline(folder, torch.float32)
    dit = diffusers.QwenImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    pipe = diffusers.QwenImagePipeline(**{name: getattr(base, name) for name in PARTS[:-1]}, transformer=dit)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(str(lora), adapter_name="control")
    pipe.set_adapters(["control"], [scale])
    tokens, forward = mean_of(pipe, picture, size), dit.forward

    def seeing(hidden_states: torch.Tensor, img_shapes: list[list[Any]], **given: Any) -> Any:
        shapes = [[*one, one[0]] for one in img_shapes]
        result = forward(hidden_states=torch.cat((hidden_states, tokens), dim=1), img_shapes=shapes, **given)
        return (result[0][:, : hidden_states.shape[1]],)

    dit.forward = seeing
    generator = torch.Generator().manual_seed(seed)
    asked: dict[str, Any] = {"negative_prompt": negative_prompt, "steps": steps, "guidance": guidance}
    return oracle.drawn(pipe, prompt, size, **asked, generator=generator)
