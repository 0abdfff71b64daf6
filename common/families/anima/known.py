"""The Anima models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.base.config import MODULAR_INDEX
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import TOKENIZER_FILES, ConfigDownload

LICENSE = "CircleStone Labs Non-Commercial"
T5_TOKENIZER = "t5_tokenizer"
"""The folder of T5's tokenizer."""
_anima = partial(KnownModel, family="anima", license=LICENSE, bytes=5_630_000_000, memory=4_900_000_000)
BASE = _anima(
    name="anima",
    repo="circlestone-labs/Anima-Base-v1.0-Diffusers",
    title="Anima Base, 2B",
    purpose="anime and illustrations from tags and English text; not for commercial use",
    steps=40,
    guidance=4.0,
    aliases=("anima-base", "anima-2b"),
    files=("anima-base-v1.0", "anima-preview", "anima-preview2", "anima-preview3-base", "anima-aesthetic-v1.1"),
)
TURBO = {"steps": 10, "guidance": 1.0}
"""The values of Anima Turbo's model card that are not those of BASE. It is published as a file, with BASE's shapes."""
KNOWN = (BASE,)
SMALL_FILES = ConfigDownload(
    name="anima-files",
    repo="circlestone-labs/Anima-Base-v1.0-Diffusers",
    title="the small files of Anima",
    license=LICENSE,
    files=(
        MODULAR_INDEX,
        *(f"{part}/config.json" for part in ("transformer", "text_encoder", "text_conditioner", "vae")),
        *(f"tokenizer/{name}" for name in TOKENIZER_FILES),
        *(f"{T5_TOKENIZER}/{name}" for name in ("tokenizer.json", "tokenizer_config.json", "spiece.model")),
    ),
    family="anima",
)


def is_turbo(name: str) -> bool:
    """Return whether a file or folder called `name` is of Anima Turbo: no tensor tells it from Base."""
    return "turbo" in name.lower()
