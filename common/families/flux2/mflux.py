"""A Flux.2 klein folder that mflux saved: its names for some layers, strings only.

mflux has the published configurations alone, so a folder without them means these: the width of the transformer tells
the size, and the name of the folder whether it is distilled.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.flux2.networks import NETWORKS
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.weights.keys import Rename

SIGNS = ("time_guidance_embed.linear_",)
CHANNELS_LAST = ".mid_block.attentions.0.to_out.weight"
"""Text in tensor names of a VAE that only mflux's files have, whose kernels have their channels last."""
_TIME = ("time_guidance_embed.linear_", "time_guidance_embed.timestep_embedder.linear_")
_OUT = re.compile(r"^(transformer_blocks\.\d+\.attn|(?:en|de)coder\.mid_block\.attentions\.0)\.to_out\.(?!0\.)")


def _plain(part: str) -> Rename:
    """Return the function that renames keys of diffusers or mflux to those of the manifest."""
    rename = NETWORKS[part].rename

    def ours(key: str) -> str | None:
        plain = _OUT.sub(r"\1.to_out.0.", key.replace(*_TIME))
        return rename(plain) if rename else plain

    return ours


RENAMES: dict[str, Callable[[Manifest], Rename]] = {
    "transformer": lambda manifest: _plain("transformer"),
    "text_encoder": lambda manifest: qwen3.rename,
    "vae": lambda manifest: _plain("vae"),
}
"""For each part, from its manifest, the function that renames keys."""
