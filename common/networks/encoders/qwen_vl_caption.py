"""Qwen2.5-VL whole: it sees a picture and writes about it, one token after another. The text encoder of
Qwen-Image-Layered, if its files have all of it.

What is unusual about it, besides the vision tower (`qwen_vl_vision`):
- the head `lm_head` is a matrix of its own, not the table of embeddings, and without a bias; only the state of the last
  token after the final norm goes through it;
- the keys and values of all tokens so far are kept, so that each further token runs through the layers alone;
- a written token has the position after the longest side of the picture and the text so far, not its number;
- `generation_config.json` has the tokens that end a text, and by how much a score is lowered that a token in the text
  has again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.encoders import qwen_vl_vision, vision_tower
from qwenimg.common.networks.encoders.qwen_vl import MFLUX
from qwenimg.common.networks.encoders.qwen_vl_vision import QwenVLVisionConfig
from qwenimg.common.networks.encoders.vision_tower import NESTED

HEAD = "lm_head.weight"
_HEADS = frozenset({HEAD, "output.weight", "language_model.lm_head.weight"})  # of transformers, llama.cpp, mlx-vlm
PENALTY = 1.05  # of the published model


@dataclass(frozen=True, kw_only=True)
class QwenCaptionConfig(QwenVLVisionConfig):
    """The configuration of all parts, and how a text is written. Defaults: Qwen2.5-VL-7B."""

    repetition_penalty: float = field(default=PENALTY, metadata=NESTED)
    eos_token_id: tuple[int, ...] = field(default=(), metadata=NESTED)  # (): the tokenizer's

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.repetition_penalty < math.inf:
            raise ModelError(f"repetition_penalty {self.repetition_penalty} is out of range")


def with_writing(config: QwenCaptionConfig, data: Mapping[str, Any]) -> QwenCaptionConfig:
    """Return `config` with what a generation_config.json says, and transformers' defaults for what it does not. Raises
    ModelError."""
    penalty, stops = data.get("repetition_penalty"), data.get("eos_token_id")
    penalty = 1.0 if penalty is None else penalty
    ids = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if isinstance(penalty, bool) or not isinstance(penalty, (int, float)):
        raise ModelError(f"repetition_penalty is {clean(penalty, 40)!r}; expected a number")
    if not all(type(one) is int for one in ids):
        raise ModelError(f"eos_token_id is {clean(stops, 40)}; expected one id or a list of ids")
    return replace(config, repetition_penalty=float(penalty), eos_token_id=tuple(ids))


def manifest(config: QwenVLVisionConfig) -> Manifest:
    """Return the shape of every tensor: vision tower, language model and head."""
    head = params.linear("lm_head", config.vocab_size, config.hidden_size, bias=False)
    return params.merge(qwen_vl_vision.manifest(config), head)


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key in any known style; None for a tensor that is not needed."""
    key = key.removeprefix(MFLUX)
    return HEAD if key in _HEADS else qwen_vl_vision.rename(key)


def is_language(name: str) -> bool:
    """Return whether the tensor `name` belongs to the language model alone, `qwen_vl`."""
    return name != HEAD and not name.startswith(vision_tower.PREFIX)


NETWORK = replace(
    qwen_vl_vision.NETWORK,
    name="qwen_vl_caption",
    config=QwenCaptionConfig,
    manifest=manifest,
    rename=rename,
    published=lambda name: f"model.{name}" if is_language(name) else name,
    traced=(),  # a passport always has a prompt
)
