"""diffusers' Qwen-Image-Layered pipeline as the reference, with its defects worked around in this one place.

- `output_type="latent"` fails: the final latents are taken from the callback of the last step.
- Its captioner needs a processor, and so torchvision: the stand-in of `oracle_edit` takes its place. It writes at most
  512 tokens, here as many as a test asks for.
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
from support import oracle, peer
from support.oracle_edit import PAD, Processor


@cache
def pipeline(folder: Path) -> Any:
    pipe = peer.opened("QwenImageLayeredPipeline", folder, torch_dtype=torch.float32, processor=None)
    oracle.compute_frequencies(pipe.text_encoder)
    pipe.vl_processor = Captions(pipe.tokenizer)
    return pipe


class Captions(Processor):
    """The part of Qwen2VLProcessor that the captioner uses."""

    def __call__(self, text: str, **given: Any) -> Any:
        inputs = super().__call__([text], **given)
        pad = self.tokenizer.convert_tokens_to_ids(PAD)
        return inputs.__class__({**inputs, "mm_token_type_ids": (inputs["input_ids"] == pad).int()})

    def batch_decode(self, ids: Any, **given: Any) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode(ids, **given)
        return texts


def caption(folder: Path, image: np.ndarray, language: str, most: int, **changed: Any) -> tuple[str, list[int]]:
    """Return diffusers' caption of `image`, as the text encoder sees it, of at most so many tokens, and these.
    changed: settings of the generation."""
    pipe, tokens = pipeline(folder), list[int]()
    usual = pipe.text_encoder.generate

    def generate(**given: Any) -> torch.Tensor:
        made: torch.Tensor = usual(**(given | {"max_new_tokens": most} | changed))
        tokens.extend(made[0, given["input_ids"].shape[1] :].tolist())
        return made

    pipe.text_encoder.generate = generate
    try:
        text = pipe.get_image_caption(Image.fromarray(image), use_en_prompt=language == "en", device="cpu")
    finally:
        del pipe.text_encoder.generate
    return text, tokens


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
