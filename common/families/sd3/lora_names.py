"""LoRA files' names for the layers of Stable Diffusion 3: diffusers', and those of its authors, which kohya's and
ComfyUI's files have."""

from __future__ import annotations

from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.sd3 import transformer_keys
from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.networks.denoisers.sd3_dit import TABLE, SD3Config
from qwenimg.common.networks.encoders import t5
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.parts.texts.text_lora_names import t5_names, text_part
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.loras.lora_names import DENOISER, ComponentNames, Names, component_names


def names(checkpoint: Checkpoint) -> Names:
    """Return the names of the layers of the transformer and of each text encoder, of T5 also where it is left out."""
    part = checkpoint["transformer"]
    texts = {name: text.plan.shapes for name, text in checkpoint.texts.items()}
    left_out = None if T5 in texts else t5.manifest(T5Config())
    third = t5_names(T5, texts.pop(T5, {}), unused=left_out)
    clips = (text_part(name, weights, two=True) for name, weights in texts.items())
    return (_transformer(part.config, part.plan.shapes), *clips, third)


def _transformer(config: SD3Config, weights: Manifest) -> ComponentNames:
    layers = {name: shape for name, shape in weights.items() if name != TABLE}
    places = {
        name.removesuffix(".weight"): [place._replace(key=place.key.removesuffix(".weight"))]
        for name, place in transformer_keys.places(layers, config, "").items()
        if name.endswith(".weight")
    }
    return component_names("transformer", layers, DENOISER, places=places)
