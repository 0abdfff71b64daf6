"""The variant of a Stable Diffusion 3 in a file, by its tensors and its name."""

from __future__ import annotations

import re
from pathlib import Path

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.families.sd3.checkpoint import parts_of
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers.sd3_dit import SD3Config

TURBO = "turbo"  # in the name of a distilled model, whose files do not show it
LARGE_LAYERS = 38
_BLOCK = re.compile(r"(?:joint|transformer)_blocks\.(\d{1,4})\.")


def reads(header: Header) -> bool:
    """Return whether a file with this header has a transformer with its authors' names."""
    return bool(parts_of(header))


def is_model(header: Header) -> bool:
    """Return whether a file with this header has the VAE beside a transformer with its authors' names."""
    return "vae" in parts_of(header)


def model_of(transformer: Path) -> str:
    """Return the name of the published model that the transformer in a folder or file is of, by its layers, and for
    the distilled one by its name. Raises ModelError."""
    names = [key for file in find_files(transformer).files for key in peek(file).tensors]
    count = len({match[1] for key in names if (match := _BLOCK.search(key))})
    if count == LARGE_LAYERS:
        return f"sd3.5-large{'-turbo' if TURBO in display_name(transformer).lower() else ''}"
    return "sd3.5-medium" if any(".attn2." in key for key in names) else "sd3-medium"


def variant(path: Path, config: SD3Config) -> str:
    """Return the variant, which the layers show."""
    kind = "3" if config.qk_norm is None else "3.5 medium" if config.dual_attention_layers else "3.5 large"
    second = f", {len(config.dual_attention_layers)} with a second attention" if config.dual_attention_layers else ""
    return f"Stable Diffusion {kind}, {counted(config.num_layers, 'layer')}{second}"
