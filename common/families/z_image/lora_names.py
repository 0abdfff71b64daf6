"""LoRA files' names for the layers of Z-Image: diffusers', and those of its authors, which ComfyUI's files have."""

from __future__ import annotations

from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.z_image.transformer_file import place
from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.lora_names import DENOISER, TEXT, ComponentNames, Names, component_names


def names(checkpoint: Checkpoint) -> Names:
    """Return the names of the layers of the transformer and the text encoder."""
    text = checkpoint["text_encoder"].plan.shapes
    others = {path: [f"model.{path}"] for path in (name.removesuffix(".weight") for name in text)}
    return (
        _transformer(checkpoint["transformer"].plan.shapes),
        component_names("text_encoder", text, TEXT, others),
    )


def _transformer(weights: Manifest) -> ComponentNames:
    layers = {name: shape for name, shape in weights.items() if name not in zimage_dit.NETWORK.tables}
    paths = [name.removesuffix(".weight") for name in layers if name.endswith(".weight")]
    others = {path: [_layer(zimage_dit.published(f"{path}.weight"))] for path in paths}
    places = {path: [(there := place(f"{path}.weight"))._replace(key=_layer(there.key))] for path in paths}
    return component_names("transformer", layers, DENOISER, others, places)


def _layer(name: str) -> str:
    """Return the name of a layer without that of its weight."""
    return name.removesuffix(".weight")
