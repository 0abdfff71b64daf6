"""Qwen3-VL's language model, the text encoder of Qwen-Image-2.1: configuration and manifest.

What is unusual about it, besides Qwen3 (`qwen3`), whose layers it has:
- the configuration is nested under `text_config`;
- the keys start with `model.language_model.` in transformers' files, and with `model.` in others;
- its RoPE has three axes, which are equal for text alone;
- the conditioning is the states after the last layer, without the final norm, or those after `taps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qwenimg.common.networks.encoders import language_model, qwen3
from qwenimg.common.networks.encoders.qwen3 import Qwen3Config

MODEL_TYPE = "qwen3_vl"
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
TOWER = ("model.visual.", "visual.", "vision_tower.")
"""Starts of the names of the vision tower."""
_NOT_NEEDED = (*TOWER, "lm_head.", "output.", "language_model.lm_head.")


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(Qwen3Config):
    """The language part of `text_encoder/config.json`. Defaults: Qwen3-VL-8B."""

    hidden_size: int = 4096
    intermediate_size: int = 12288
    rope_theta: float = 5e6

    @property
    def used_layers(self) -> int:
        return max(self.taps, default=self.num_hidden_layers)


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Qwen3VLConfig` from a config.json. Raises ModelError for an unsupported value."""
    fields = language_model.language_fields(data, Qwen3VLConfig, MODEL_TYPE)
    fields.pop("taps", None)
    return fields


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key in any known style; None for a tensor that text alone does not need."""
    if key.startswith(_NOT_NEEDED):
        return None
    prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), "")
    return qwen3.rename(key.removeprefix(prefix))


NETWORK = replace(
    qwen3.NETWORK,
    name="qwen3_vl",
    kind=MODEL_TYPE,
    config=Qwen3VLConfig,
    fields=fields,
    rename=rename,
    published=lambda name: f"model.language_model.{name}",
    architectures=frozenset({"qwen3vl"}),
)
