"""LoRA files' names for the layers of Qwen-Image: the checkpoint's names, dotted or flat."""

from __future__ import annotations

from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.loras.lora_names import DENOISER, TEXT, Names, component_names


def names(checkpoint: Checkpoint) -> Names:
    """Return the names of the layers of the transformer and the text encoder."""
    transformer, text = (checkpoint[component].plan.shapes for component in ("transformer", "text_encoder"))
    others = {
        path: [f"model.{path}", f"model.language_model.{path}"]
        for path in (name.removesuffix(".weight") for name in text if name.endswith(".weight"))
    }
    return (component_names("transformer", transformer, DENOISER), component_names("text_encoder", text, TEXT, others))
