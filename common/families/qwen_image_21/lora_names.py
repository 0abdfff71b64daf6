"""LoRA files' names for the layers of Qwen-Image-2.1: the checkpoint's names, dotted or flat, and ComfyUI's for the
two layers of the feed-forward that are one there."""

from __future__ import annotations

from qwenimg.common.families.qwen_image_21.transformer_file import place
from qwenimg.common.parts.authors_names import layers
from qwenimg.common.parts.texts.text_lora_names import language_model_names
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.loras.lora_names import DENOISER, Names, component_names

_HALVES = (".img_mlp.gate_layer.weight", ".img_mlp.proj.weight")


def names(checkpoint: Checkpoint) -> Names:
    """Return the names of the layers of the transformer and the text encoder."""
    transformer, text = (checkpoint[component].plan.shapes for component in ("transformer", "text_encoder"))
    paths = [name.removesuffix(".weight") for name in transformer if name.endswith(_HALVES)]
    return (
        component_names("transformer", transformer, DENOISER, places=layers(place, paths)),
        language_model_names(text, "model.", "model.language_model."),
    )
