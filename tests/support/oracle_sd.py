"""diffusers' Stable Diffusion pipelines as the reference, their known defects worked around in this one place.

- `clip_skip` of SD 1.x and 2.x looks for an attribute that transformers 5 no longer has: it is given.
- PNDM starts image-to-image with the wrong entries of its list of times: other schedulers are used there.
- A ControlNet Union gets the kinds of its pictures for both branches of guidance where it computes one, and stops.
- The loader of LoRAs gives every module of a text encoder the alpha that most of them have, since the names that it
  makes for other alphas are not those of the modules: each alpha is folded into its factor before.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from support import peer


@cache
def pipeline(folder: Path, class_name: str, dtype: torch.dtype = torch.float32) -> Any:
    pipe = peer.opened(class_name, folder)
    pipe.to(dtype)
    if getattr(pipe, "text_encoder", None) is not None and not hasattr(pipe.text_encoder, "text_model"):
        pipe.text_encoder.__dict__["text_model"] = pipe.text_encoder  # not as a part, which would be a circle
    return pipe


def generate(folder: Path, class_name: str, *, seed: int = 0, **asked: Any) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64. `image` and `mask_image`
    are uint8 arrays."""
    pipe = pipeline(folder, class_name)
    for name in ("image", "mask_image"):
        if isinstance(asked.get(name), np.ndarray):
            asked[name] = Image.fromarray(asked[name])
    generator = torch.Generator().manual_seed(seed)
    final = pipe(generator=generator, output_type="latent", **asked).images
    return final.numpy(), peer.decoded(pipe, final)


def load_lora(pipe: Any, path: Path, folded: Path) -> None:
    """Add the kohya file `path` to the weights of `pipe`, through the file `folded` in which each alpha is its rank."""
    tensors = load_file(path)
    for key in [key for key in tensors if key.endswith(".alpha")]:
        module = key.removesuffix(".alpha")
        rank = len(tensors[f"{module}.lora_down.weight"])
        tensors[f"{module}.lora_up.weight"] *= tensors[key] / rank
        tensors[key] = torch.tensor(float(rank))
    save_file(tensors, folded)
    pipe.load_lora_weights(folded)
    pipe.fuse_lora(components=[name for name in ("unet", "text_encoder", "text_encoder_2") if hasattr(pipe, name)])
    pipe.unload_lora_weights()


def _cut_kinds(union: Any) -> None:
    """Give the kinds of a Union to the branches that it computes."""
    forward = union.forward

    def cut(sample: torch.Tensor, *given: Any, control_type: torch.Tensor, **more: Any) -> Any:
        return forward(sample, *given, control_type=control_type[: len(sample)], **more)

    union.forward = cut


def controlled(folder: Path, class_name: str, nets: list[Path], *, seed: int = 0, **asked: Any) -> Any:
    """As `generate`, by a pipeline with the ControlNets `nets`, each a folder. `image` and `control_image` are uint8
    arrays, several as a list."""
    import diffusers

    name = "StableDiffusionXLPipeline" if "XL" in class_name else "StableDiffusionPipeline"
    parts = pipeline(folder, name).components
    part = "adapter" if "Adapter" in class_name else "controlnet"
    model = diffusers.ControlNetUnionModel if "Union" in class_name else diffusers.ControlNetModel
    model = diffusers.T2IAdapter if part == "adapter" else model
    opened = [model.from_pretrained(net, torch_dtype=torch.float32).eval() for net in nets]
    if "Union" in class_name:
        _cut_kinds(opened[0])
    cls = getattr(diffusers, class_name)
    keys = ("image_encoder", "feature_extractor", "safety_checker")
    pipe = cls(
        **{key: part for key, part in parts.items() if key not in keys}
        | ({} if "XL" in class_name else {"safety_checker": None, "feature_extractor": None}),
        **{part: opened if len(opened) > 1 else opened[0]},
    )
    pipe.set_progress_bar_config(disable=True)
    for key in ("image", "control_image", "mask_image"):
        given = asked.get(key)
        if isinstance(given, list):
            asked[key] = [Image.fromarray(one) for one in given]
        elif isinstance(given, np.ndarray):
            asked[key] = Image.fromarray(given)
    final = pipe(generator=torch.Generator().manual_seed(seed), output_type="latent", **asked).images
    with torch.no_grad():
        pixels = pipe.vae.decode(final / pipe.vae.config.scaling_factor, return_dict=False)[0]
    image = pipe.image_processor.postprocess(pixels, output_type="np")[0]
    return final.numpy(), (image * 255).round().astype(np.float64)
