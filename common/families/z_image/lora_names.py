"""LoRA files' names for the layers of Z-Image: diffusers', and those of its authors, which ComfyUI's files have."""

from __future__ import annotations

from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.z_image.transformer_file import place
from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.parts.authors_names import layers
from qwenimg.common.parts.texts.text_lora_names import language_model_names
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.loras.lora_names import DENOISER, ComponentNames, Names, component_names


def names(checkpoint: Checkpoint) -> Names:
    """Return the names of the layers of the transformer and the text encoder."""
    transformer, text = (checkpoint[component].plan.shapes for component in ("transformer", "text_encoder"))
    stored = qwen3.manifest(checkpoint["text_encoder"].config)
    return _transformer(transformer), language_model_names(text, "model.", stored=stored)


def _transformer(weights: Manifest) -> ComponentNames:
    layered = {name: shape for name, shape in weights.items() if name not in zimage_dit.NETWORK.tables}
    paths = [name.removesuffix(".weight") for name in layered if name.endswith(".weight")]
    others = {path: [zimage_dit.published(f"{path}.weight").removesuffix(".weight")] for path in paths}
    return component_names("transformer", layered, DENOISER, others, layers(place, paths))
