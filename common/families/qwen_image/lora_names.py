"""LoRA files' names for the layers of Qwen-Image: the checkpoint's, dotted or flat."""

from __future__ import annotations

from qwenimg.common.parts.texts.text_lora_names import language_model_names
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.loras.lora_names import DENOISER, Names, component_names


def names(checkpoint: Checkpoint) -> Names:
    """Return the names of the layers of the transformer and the text encoder."""
    transformer, text = (checkpoint[component].plan.shapes for component in ("transformer", "text_encoder"))
    starts = ("model.", "model.language_model.")
    return component_names("transformer", transformer, DENOISER), language_model_names(text, *starts)
