"""The language models of Qwen that are text encoders, as rows of the network `decoder`: Qwen2.5-VL's, Qwen3 and
Qwen3-VL's.

What is unusual about them:
- Qwen2.5-VL's has biases of q, k and v, Qwen3 has norms of the heads of q and k, whose width is a field of its own;
- the configuration of Qwen2.5-VL is flat in published folders and nested under `text_config` in newly saved ones, that
  of Qwen3-VL is nested;
- the keys start with `model.` in published files, with `model.language_model.` in others, and with nothing where the
  model was saved alone; vision tower and head may be in the files;
- in GGUF the names are llama.cpp's, for the same tensors: q and k keep their order of rows, unlike those of a LLaMA;
- RoPE has three axes in the models that see, which are equal for text alone: that is plain RoPE of one axis;
- an image is conditioned by the states after the final norm (Qwen2.5-VL), before the last layer (Qwen3), or after the
  last layer (Qwen3-VL); a family may take others, after several layers side by side;
- where prompts are padded, pads see the real tokens only, and all their states condition an image too; a family may
  give them all one position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qwenimg.common.base.errors import ModelError
from qwenimg.common.networks.encoders import decoder, language_model
from qwenimg.common.networks.encoders.decoder import HEAD, DecoderConfig
from qwenimg.common.networks.encoders.language_model import COMPUTED, from_llama_cpp

MFLUX = "encoder."
"""Before all names of mflux's."""
TOWER = ("model.visual.", "visual.", "vision_tower.")
"""Starts of the names of a vision tower."""
HEADS = frozenset({HEAD, "output.weight", "language_model.lm_head.weight"})  # of transformers, llama.cpp, mlx-vlm
_HEADS = ("lm_head.", "output.", "language_model.lm_head.")
_OURS = {"in_files": False}


@dataclass(frozen=True, kw_only=True)
class QwenVLConfig(DecoderConfig):
    """The language part of `text_encoder/config.json`. Defaults: Qwen2.5-VL-7B."""

    hidden_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = field(default=28, metadata={"max": 1000})
    num_attention_heads: int = field(default=28, metadata={"max": 1024})
    num_key_value_heads: int = field(default=4, metadata={"max": 1024})
    head_dim: int = field(default=0, metadata=_OURS | {"min": 0, "max": 1024})
    vocab_size: int = field(default=152064, metadata={"max": 2**20})
    rope_theta: float = 1e6
    qkv_bias: bool = field(default=True, metadata=_OURS)
    repetition_penalty: float = field(default=1.05, metadata=_OURS)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", 0)  # it follows from the sizes, also after `replace`
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """The fields of `text_encoder/config.json`. Defaults: Qwen3-4B."""

    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = field(default=36, metadata={"min": 2, "max": 1000})
    num_attention_heads: int = field(default=32, metadata={"max": 1024})
    num_key_value_heads: int = field(default=8, metadata={"max": 1024})
    head_dim: int = field(default=128, metadata={"max": 1024})
    vocab_size: int = field(default=151936, metadata={"max": 2**20})
    rope_theta: float = 1e6
    qk_norm: bool = field(default=True, metadata=_OURS)
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    taps: tuple[int, ...] = field(default=(-2,), metadata=_OURS | {"min": -1000, "max": 1000})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_bias:
            raise ModelError("attention_bias is true: projections with a bias are not supported")


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(Qwen3Config):
    """The language part of `text_encoder/config.json`. Defaults: Qwen3-VL-8B."""

    hidden_size: int = 4096
    intermediate_size: int = 12288
    rope_theta: float = 5e6
    tie_word_embeddings: bool = False
    mrope_interleaved: bool = field(default=True, metadata=_OURS)
    taps: tuple[int, ...] = field(default=(-1,), metadata=_OURS | {"min": -1000, "max": 1000})


def language_fields(data: Mapping[str, Any], config: type[Any], kind: str) -> dict[str, Any]:
    """Return the fields of `config` from a config.json of the model type `kind`. Raises ModelError."""
    fields = language_model.language_fields(data, config, kind)
    return {name: value for name, value in fields.items() if name != "taps"}


def name_of(
    key: str, config: DecoderConfig | None, prefixes: tuple[str, ...], dropped: tuple[str, ...] = ()
) -> str | None:
    """Return the manifest key of a file's key in any known style. None for a tensor that is not used: with a name that
    starts with one of `dropped`, and a head, unless `config` has one."""
    key = key.removeprefix(MFLUX)
    if key in HEADS and config is not None and config.has_head:
        return HEAD
    if key.startswith((*dropped, *_HEADS)) or key.endswith(COMPUTED):
        return None
    prefix = next((prefix for prefix in prefixes if key.startswith(prefix)), "")
    return from_llama_cpp(key.removeprefix(prefix))


_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_SEEING_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")

QWEN2_5_VL = replace(
    decoder.NETWORK,
    kind="qwen2_5_vl",
    config=QwenVLConfig,
    fields=lambda data: language_fields(data, QwenVLConfig, "qwen2_5_vl"),
    rename=lambda key: name_of(key, None, _PREFIXES, TOWER),
    renames=lambda config: lambda key: name_of(key, config, _PREFIXES, TOWER),
    published=lambda name: name if name == HEAD else f"model.{name}",
    architectures=frozenset({"qwen2vl"}),
)
QWEN3 = replace(
    decoder.NETWORK,
    kind="qwen3",
    config=Qwen3Config,
    fields=lambda data: language_fields(data, Qwen3Config, "qwen3"),
    rename=lambda key: name_of(key, None, ("model.",)),
    renames=lambda config: lambda key: name_of(key, config, ("model.",)),
    published=lambda name: name if name == HEAD else f"model.{name}",
    architectures=frozenset({"qwen3"}),
)
QWEN3_VL = replace(
    decoder.NETWORK,
    kind="qwen3_vl",
    config=Qwen3VLConfig,
    fields=lambda data: language_fields(data, Qwen3VLConfig, "qwen3_vl"),
    rename=lambda key: name_of(key, None, _SEEING_PREFIXES, TOWER),
    renames=lambda config: lambda key: name_of(key, config, _SEEING_PREFIXES, TOWER),
    published=lambda name: name if name == HEAD else f"model.language_model.{name}",
    architectures=frozenset({"qwen3vl"}),
)
