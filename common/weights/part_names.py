"""Prefixes before the names of a part's tensors, in a file of its own or of the whole model: strings only.

ComfyUI saves a whole model in one file: its transformer, its text encoders, each by its own name, and its VAE.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_OWN = ("model.diffusion_model.", "diffusion_model.", "model.model.", "net.")  # that no text encoder or VAE has
DENOISERS = (*_OWN, "model.", "_orig_mod.", "module.", "")
"""Of transformers and UNets: the first with which a name of the network's is in the file counts."""
VAES = ("first_stage_model.", "vae.")
PREFIXES = {"transformer": DENOISERS, "vae": ("", *VAES)}
"""By the role of a network, the prefixes that its names may have, the likeliest first; of a text encoder, any."""
_NAMED = r"(?:clip|t5|pile_t5|umt5|qwen|gemma|llama|mistral)\w{0,40}"
_TEXT = re.compile(
    rf"text_encoders\.(?:\w{{1,60}}\.(?:transformer\.)?|(?=\w{{1,20}}_model$))|text_encoder\.clip_g\.|{_NAMED}\.(?:transformer\.|(?=logit_scale$))",
    re.ASCII,
)
PARTS = ("text_encoder", "vae")
"""The parts beside a denoiser in the file of a whole model."""
_UNUSED = ("logit_scale", "scaled_fp8", "spiece_model", "tekken_model")  # behind a text encoder's prefix
_ADAPTER = re.compile(r"(?:\w+\.){1,2}llm_adapter\.", re.ASCII)  # of text, in a denoiser's file


def part_of(key: str) -> str | None:
    """Return the part (of PARTS) whose prefix `key` has; None for any other name."""
    return PARTS[0] if _TEXT.match(key) else PARTS[1] if key.startswith(VAES) else None


def plain(role: str, key: str) -> str | None:
    """Return the name of a tensor without its part's prefix, or None if it belongs to another part of a whole-model
    file. role: text, transformer or vae."""
    text = _TEXT.match(key)
    if role == "text" and text is not None:
        rest = key[text.end() :]
        return None if rest in _UNUSED else rest
    if text is not None or key.startswith("model_ema."):
        return None
    if role == "vae" and (prefix := next((one for one in VAES if key.startswith(one)), None)):
        return key.removeprefix(prefix)
    prefixes = DENOISERS[:-1] if role == "transformer" else ()
    if prefix := next((one for one in prefixes if key.startswith(one)), None):
        return key.removeprefix(prefix)
    return None if key.startswith((*_OWN, *VAES)) else key


def prefixes(role: str, names: Iterable[str], sign: str) -> Iterable[str]:
    """Return the prefixes that the name `sign` of a network may have among the `names` of a file, the likeliest
    first."""
    if role != "text":
        return PREFIXES[role]
    ends = (name for name in names if name == sign or name.endswith(f".{sign}"))
    own = (name for name in ends if plain(role, name) is not None or _ADAPTER.match(name))
    return dict.fromkeys(name.removesuffix(sign) for name in own)
