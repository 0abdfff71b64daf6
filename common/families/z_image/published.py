"""Z-Image as it is published, for code that reads no weight: two variants of the same shapes.

Turbo is distilled to 8 steps without guidance. The base model's card recommends 28 to 50 steps and guidance of 3 to 5;
its example has 50 and 4. A model's files tell them apart by the shift of the scheduler alone.
"""

from __future__ import annotations

import re

from qwenimg.common.base.config import parse
from qwenimg.common.families.z_image.known import BASE, TURBO
from qwenimg.common.families.z_image.small_files import scheduler
from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.networks.denoisers.zimage_dit import ZImageConfig
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.networks.encoders.qwen3 import Qwen3Config
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.parts.components import paper_checkpoint
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling.flow_match import FlowMatchConfig

SHIFTS = {TURBO.name: 3.0, BASE.name: 6.0}
"""The shift of each published model's scheduler."""
_DTYPES = {"z-image-turbo": "float32", "z-image": "bfloat16"}  # of the transformer's files


def transformer() -> ZImageConfig:
    return ZImageConfig(axes_lens=(1536, 512, 512))


def of_name(name: str) -> str:
    """Return the published model that a file or folder called `name` is of: Turbo, unless it is called Z-Image without
    that word."""
    lower = name.lower()
    is_base = "turbo" not in lower and re.search("z[-_]?image", lower) is not None
    return "z-image" if is_base else "z-image-turbo"


def published(name: str) -> Checkpoint | None:
    """Return the model known as `name`, without its files; None for another name."""
    if name not in SHIFTS:
        return None
    parts = {
        "transformer": (zimage_dit.NETWORK, transformer()),
        "text_encoder": (qwen3.NETWORK, Qwen3Config()),
        "vae": (kl_vae.NETWORK, kl_vae.FLUX_1),
    }
    dtypes = dict.fromkeys(parts, "bfloat16") | {"transformer": _DTYPES[name]}
    return paper_checkpoint(name, parts, parse(FlowMatchConfig, scheduler(SHIFTS[name]), source=name), dtypes)


def defaults(shift: float) -> Defaults:
    """Return the defaults of a model whose scheduler has this shift."""
    return Defaults(**(TURBO if shift == SHIFTS[TURBO.name] else BASE).usual)
