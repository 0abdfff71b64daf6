"""The configuration of a Flux.1 transformer in a folder that mflux saved, which has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig

GROUP = 64  # values of one scale, always in mflux
_GUIDANCE = "time_text_embed.guidance_embedder."


def sizes(folder: Path) -> dict[str, Any]:
    """Return the fields of the configuration of a transformer that mflux saved in which the published models differ:
    the input for guidance, and the channels that it takes and makes. Raises ModelError."""
    guided, channels = False, FluxConfig.in_channels
    for path in find_files(folder / "transformer").files:
        header = peek(path)
        guided = guided or any(key.startswith(_GUIDANCE) for key in header.tensors)
        scales, weight = (header.tensors.get(f"x_embedder.{leaf}") for leaf in ("scales", "weight"))
        if scales is not None and len(scales.shape) == 2:
            channels = GROUP * scales.shape[1]
        elif weight is not None and len(weight.shape) == 2 and weight.dtype != "U32":
            channels = weight.shape[1]
    return {"guidance_embeds": guided, "in_channels": channels, "out_channels": FluxConfig.in_channels}
