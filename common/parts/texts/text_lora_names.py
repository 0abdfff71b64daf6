"""LoRA files' names for the layers of text encoders: CLIP's, T5's and those of language models. ComfyUI's have the name
of the encoder in front."""

from __future__ import annotations

from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks.encoders.clip_names import LAYOUTS
from qwenimg.common.weights.loras.lora_names import TEXT, TEXT_1, TEXT_2, ComponentNames, component_names

_CLIP_L, _CLIP_G, _T5 = (
    "text_encoders_clip_l_transformer_",
    "text_encoders_clip_g_transformer_",
    "text_encoders_t5xxl_transformer_",
)
_STARTS = ("model.", "model.language_model.", "language_model.", "language_model.model.")  # of a language model's names
_ANY = ("text_encoders_transformer_", r"text_encoders_\w+?_transformer_")  # of the only text encoder
_POSITIONS, _PROJECTED, _EMBEDDED = (
    "embeddings.position_embedding.weight",
    "text_projection.weight",
    "embed_tokens.weight",
)


def clip_names(name: str, weights: Manifest, *words: str, two: bool) -> ComponentNames:
    """Return the table of the CLIP `name`, the only one or one of two text encoders, with more `words` in front."""
    second = name == "text_encoder_2"
    prefixes = ((*TEXT_2, _CLIP_G) if second else (*TEXT_1, _CLIP_L)) if two else (*TEXT_2, *TEXT, *_ANY)
    unused = {} if second else _not_used(weights)
    paths = (name.removesuffix(".weight") for name in (*weights, *unused) if name.endswith(".weight"))
    others = {path: [f"text_model.{path}", *(place.key for place in LAYOUTS.in_loras(path))] for path in paths}
    return component_names(name, weights, (*prefixes, *words), others, unused=unused)


def _not_used(weights: Manifest) -> Manifest:
    """Return what other programs have of a CLIP and no image depends on: the projection of OpenAI's, and the last of
    the 24 layers of OpenCLIP-H, which is cut to 23."""
    width = weights.get(_POSITIONS, (0, 0))[1]
    unused: Manifest = {} if _PROJECTED in weights or not width else {_PROJECTED: (width, width)}
    if not any(name.startswith("encoder.layers.23.") for name in weights):
        last = {name: shape for name, shape in weights.items() if name.startswith("encoder.layers.22.")}
        unused |= {name.replace(".22.", ".23.", 1): shape for name, shape in last.items()}
    return unused


def t5_names(name: str, weights: Manifest, *, unused: Manifest | None = None) -> ComponentNames:
    """Return the table of the T5 `name`. kohya's number of it is 3 beside one CLIP too. `unused`: its manifest, where
    the model does without it."""
    words = [f"{word}_te{number}_" for word in ("lora", "lycoris") for number in {"3", name[-1]}]
    return component_names(name, weights, (f"{name}_", _T5, *words), unused=unused)


def language_model_names(weights: Manifest, stored: Manifest) -> ComponentNames:
    """Return the table of a text encoder that is a language model. `stored`: its manifest, of which the forward may not
    use all layers. The output layer has the embedding's shape."""
    output = {"lm_head.weight": weights[_EMBEDDED]} if _EMBEDDED in weights else {}
    unused = {name: shape for name, shape in (output | stored).items() if name not in weights}
    paths = [name.removesuffix(".weight") for name in (*weights, *unused) if name.endswith(".weight")]
    others = {path: [start + path for start in _STARTS] for path in paths}
    return component_names("text_encoder", weights, (*TEXT, *_ANY), others, unused=unused)
