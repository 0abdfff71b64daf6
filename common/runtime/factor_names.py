"""Names of the factors that a training changes: a layer's path and the factor, with the folder of a text encoder in
front: `text_encoder/encoder.layers.0.mlp.fc1.lora_A.weight`. A path without a folder is the denoiser's."""

from __future__ import annotations

from collections.abc import Iterable

DOWN, UP = ".lora_A.weight", ".lora_B.weight"


def joined(part: str, path: str) -> str:
    """Return the name of the layer `path` of a part; "" is the denoiser."""
    return f"{part}/{path}" if part else path


def split(layer: str) -> tuple[str, str]:
    """Return the part of a layer and its path there."""
    part, _, path = layer.rpartition("/")
    return part, path


def layers(factors: Iterable[str], part: str | None = None) -> list[str]:
    """Return the layers that have factors, of all parts or of one."""
    found = [name.removesuffix(DOWN) for name in factors if name.endswith(DOWN)]
    return found if part is None else [layer for layer in found if split(layer)[0] == part]
