"""A tiny FLUX.1 Redux with its image encoder, made by diffusers and transformers, as the folder of its pipeline and as
ComfyUI has its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.tiny_model import randomise

STATES, TEXT = 48, 60  # channels of the image encoder, and of the text states of `tiny_flux`
SIDE, PATCH = 33, 7  # pixels of a picture and of a patch: the last five rows and columns are not seen
TOKENS = (SIDE // PATCH) ** 2


def tiny_siglip(seed: int = 51, **changes: Any) -> torch.nn.Module:
    """transformers' SigLIP vision model with its head, float32, randomised."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config: dict[str, Any] = {
        "hidden_size": STATES, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 16,
        "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    model = SiglipVisionModel(SiglipVisionConfig(**config | changes))
    randomise(model, seed)
    return model.eval()


def tiny_redux(seed: int = 52, **changes: Any) -> torch.nn.Module:
    """diffusers' image embedder, float32, randomised."""
    from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder

    model = ReduxImageEncoder(**{"redux_dim": STATES, "txt_in_features": TEXT} | changes)
    randomise(model, seed)
    return model.eval()


def processor(side: int = SIDE) -> Any:
    """transformers' processor on Pillow, as the published configuration has it but for the size."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": side, "width": side})


def encoder_file(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of an image encoder by their names in published files."""
    return {f"vision_model.{name.removeprefix('vision_model.')}": value for name, value in model.state_dict().items()}


def write_redux(folder: Path, seed: int = 52) -> Path:
    """Write the folder of the pipeline, with the file of its authors beside the parts, and return it."""
    from diffusers import FluxPriorReduxPipeline

    pipe = FluxPriorReduxPipeline(tiny_siglip(), processor(), tiny_redux(seed))
    pipe.save_pretrained(folder)
    save_file(dict(pipe.image_embedder.state_dict()), folder / "flux1-redux-dev.safetensors")
    return folder


def write_comfy(models: Path, seed: int = 52) -> Path:
    """Write the two files into ComfyUI's folders, and return that of the Redux. That of the encoder shows no pixels
    beyond its patches: its pictures have 28."""
    files = {
        models / "style_models" / "flux1-redux-dev.safetensors": dict(tiny_redux(seed).state_dict()),
        models / "clip_vision" / "sigclip_vision_patch14_384.safetensors": encoder_file(tiny_siglip()),
    }
    for path, tensors in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)
    return next(iter(files))
