"""LoRA files' names for the layers of Stable Diffusion 3."""

from __future__ import annotations

from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.networks.encoders import t5
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.parts import lora_layers
from qwenimg.common.parts.texts.text_lora_names import t5_names
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.loras.lora_names import Names


def names(checkpoint: Checkpoint) -> Names:
    """Return the names of the layers, of T5 also where it is left out."""
    left_out = () if T5 in checkpoint.texts else (t5_names(T5, {}, unused=t5.manifest(T5Config())),)
    return (*lora_layers.names(checkpoint), *left_out)
