"""Stable Diffusion 3 in files with its authors' names: the transformer alone, with the VAE, or with all parts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from qwenimg.common.base.safe_files import bad
from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.formats import gguf
from qwenimg.common.formats.headers import open_header
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import sd3_dit
from qwenimg.common.networks.denoisers.sd3_dit import SD3Config
from qwenimg.common.networks.denoisers.sd3_names import LAYOUTS
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.parts.ldm_configs import Text
from qwenimg.common.parts.open_file import check_whole, find, open_named
from qwenimg.common.parts.texts import clip_files, t5_files
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import check_architecture

T5_PREFIX = "text_encoders.t5xxl.transformer."


def texts() -> tuple[Text, Text]:
    """Return both CLIPs as files have them."""
    first, second = (f"text_encoders.{name}.transformer." for name in ("clip_l", "clip_g"))
    return (
        Text(component="text_encoder", prefix=first, projected=True, renamed=True),
        Text(component="text_encoder_2", prefix=second, open_clip=True, projected=True, renamed=True),
    )


def parts_of(header: Header) -> list[str]:
    """Return the names of the components in a file of the authors' names; none of another file."""
    if not gguf.may_be(header, sd3_dit.NETWORK.architectures) or LAYOUTS.find_placed(header.tensors) is None:
        return []
    encoders = [text.component for text in texts() if text.within(header.tensors)]
    encoders += [T5] if any(key.startswith(T5_PREFIX) for key in header.tensors) else []
    return ["transformer", *encoders, *(["vae"] if kl_vae_names.LAYOUTS.find_placed(header.tensors) else [])]


def open_file(path: Path, *, for_rewrite: bool = False) -> dict[str, Component]:
    """Open the components in the file of a model. Raises ModelError for a tensor that is missing, unknown, of another
    shape or in a dtype that is not read."""
    header = open_header(path)
    with ExitStack() as stack:
        stack.callback(header.file.close)
        check_architecture(header, sd3_dit.NETWORK.architectures, "Stable Diffusion 3 model")
        names = parts_of(header)
        if not names:
            raise bad(path, "is no Stable Diffusion 3 model in one file: give the folder of the model")
        naming = find(header, LAYOUTS, "transformer")
        components = {
            "transformer": open_named(header, LAYOUTS, naming, SD3Config(), "transformer", for_rewrite=for_rewrite)
        }
        for text in texts():
            if text.component in names:
                components[text.component] = clip_files.within(header, text, for_rewrite=for_rewrite)
        if T5 in names:
            components[T5] = t5_files.within(header, T5_PREFIX, T5, for_rewrite=for_rewrite)
        if vae := kl_vae_names.LAYOUTS.find_placed(header.tensors):
            like = kl_vae.STABLE_DIFFUSION_3
            components["vae"] = open_named(header, kl_vae_names.LAYOUTS, vae, like, "vae", for_rewrite=for_rewrite)
        check_whole(header, components.values(), "Stable Diffusion 3")
        stack.pop_all()
        return components
