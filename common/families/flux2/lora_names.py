"""LoRA files' names for the layers of Flux.2: diffusers', and those of its authors, dotted or flat. A layer of theirs
that is q, k and v has one module for all three."""

from __future__ import annotations

from qwenimg.common.families.flux2.transformer_file import place
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.parts.authors_names import layers
from qwenimg.common.parts.texts.text_lora_names import language_model_names
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.loras.lora_names import DENOISER, Names, component_names


def names(checkpoint: Checkpoint) -> Names:
    """Return the names of the layers of the transformer and the text encoder."""
    transformer, text = (checkpoint[component].plan.shapes for component in ("transformer", "text_encoder"))
    paths = [name.removesuffix(".weight") for name in transformer if len(transformer[name]) == 2]
    return (
        component_names("transformer", transformer, DENOISER, places=layers(place, paths)),
        language_model_names(text, "model.", stored=qwen3.manifest(checkpoint["text_encoder"].config)),
    )
