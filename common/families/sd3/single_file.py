"""Stable Diffusion 3 in files with its authors' names: the transformer alone, with the VAE, or with all parts."""

from __future__ import annotations

from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.formats import gguf
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import sd3_dit
from qwenimg.common.networks.denoisers.sd3_names import LAYOUTS
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.vaes import kl_vae_names
from qwenimg.common.parts.texts.clip_files import Text

T5_PREFIX = "text_encoders.t5xxl.transformer."
_CLIP_L = CLIPConfig(projection_dim=768)
CLIPS = {
    "text_encoder": Text(component="text_encoder", prefix="text_encoders.clip_l.transformer.", like=_CLIP_L),
    "text_encoder_2": Text(
        component="text_encoder_2", prefix="text_encoders.clip_g.transformer.", like=clip.OPEN_CLIP_BIG_G
    ),
}
"""Both CLIPs as files have them."""
PREFIXES = {**{name: text.prefix for name, text in CLIPS.items()}, T5: T5_PREFIX}


def parts_of(header: Header) -> list[str]:
    """Return the names of the components in a file of the authors' names; none of another file."""
    names = header.tensors
    if not gguf.may_be(header, sd3_dit.NETWORK.architectures) or LAYOUTS.find_placed(names) is None:
        return []
    texts = [part for part, prefix in PREFIXES.items() if any(name.startswith(prefix) for name in names)]
    return ["transformer", *texts, *(["vae"] if kl_vae_names.LAYOUTS.find_placed(names) else [])]
