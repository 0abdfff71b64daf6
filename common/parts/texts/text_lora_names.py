"""LoRA files' names for the layers of text encoders: CLIP's, T5's and those of language models. ComfyUI's have the name
of the encoder in front."""

from __future__ import annotations

import re
from collections.abc import Iterator

from qwenimg.common.base.shape import Manifest
from qwenimg.common.weights.loras.lora_names import TEXT, TEXT_1, TEXT_2, ComponentNames, component_names

_PROJECTION = re.compile(r"(?P<owner>.+\.self_attn)\.(?P<letter>q|k|v|out)_proj")
_CLIP_L, _CLIP_G, _T5 = (
    "text_encoders_clip_l_transformer_",
    "text_encoders_clip_g_transformer_",
    "text_encoders_t5xxl_transformer_",
)
_ANY = ("text_encoders_transformer_", r"text_encoders_\w+?_transformer_")  # of the only text encoder
_TABLE = "embeddings.position_embedding.weight"
_PROJECTED = "text_projection.weight"


def text_part(name: str, weights: Manifest, *, two: bool) -> ComponentNames:
    """Return the table of the CLIP `name`, the only one or one of two."""
    second = name == "text_encoder_2"
    words = ((*TEXT_2, _CLIP_G) if second else (*TEXT_1, _CLIP_L)) if two else (*TEXT_2, *TEXT, *_ANY)
    # OpenAI's CLIP has a projection in other programs, which no image depends on
    width = weights.get(_TABLE, (0, 0))[1]
    unused: Manifest = {} if second or _PROJECTED in weights or not width else {_PROJECTED: (width, width)}
    paths = (name.removesuffix(".weight") for name in (*weights, *unused) if name.endswith(".weight"))
    return component_names(name, weights, words, {path: list(_others(path)) for path in paths}, unused=unused)


def _others(path: str) -> Iterator[str]:
    """Yield the path behind the name of the text model, and diffusers' older names of a projection."""
    yield f"text_model.{path}"
    if match := _PROJECTION.fullmatch(path):
        for prefix in ("", "text_model."):
            yield f"{prefix}{match['owner']}.to_{match['letter']}"


def t5_names(name: str, weights: Manifest, *words: str) -> ComponentNames:
    """Return the table of the T5 `name`. kohya's number of it is 3 beside one CLIP too."""
    return component_names(name, weights, (f"{name}_", "lora_te3_", "lycoris_te3_", _T5, *words))


def language_model_names(weights: Manifest, *starts: str, stored: Manifest | None = None) -> ComponentNames:
    """Return the table of a text encoder that is a language model, whose names may have one of `starts` in front.
    `stored`: its manifest, where the forward does not use all layers of it."""
    unused = {name: shape for name, shape in (stored or {}).items() if name not in weights}
    paths = [name.removesuffix(".weight") for name in (*weights, *unused) if name.endswith(".weight")]
    others = {path: [start + path for start in starts] for path in paths}
    return component_names("text_encoder", weights, (*TEXT, *_ANY), others, unused=unused)
