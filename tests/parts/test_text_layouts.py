"""Files of text encoders: which program's names they have, what their shapes show, and what of them is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.formats import gguf
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header, Stored
from qwenimg.common.networks.encoders import clip, clip_names, language_names, t5_names
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.encoders.qwen import Qwen3Config, Qwen3VLConfig, QwenVLConfig
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.networks.layout import Layouts
from qwenimg.common.parts.open_file import open_part

SIZES: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "vocab_size": 50}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
QWEN3 = Qwen3Config(**SIZES, **HEADS, head_dim=8)
QWEN3_VL = Qwen3VLConfig(**SIZES, **HEADS, head_dim=8)
QWEN2_5 = QwenVLConfig(**SIZES, **HEADS)
T5 = T5Config(vocab_size=50, d_model=24, d_kv=6, d_ff=40, num_layers=3, num_heads=4)
CLIP = CLIPConfig(vocab_size=50, hidden_size=128, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2)
_LAYERS = {"attention": "layer.0", "ff": "layer.1"}


def mflux_t5(name: str) -> str:
    """mflux's name of a tensor of T5."""
    if match := re.fullmatch(r"encoder\.block\.(\d+)\.layer\.([01])\.(.+)", name):
        block, layer, rest = match.groups()
        return f"t5_blocks.{block}.{('attention', 'ff')[int(layer)]}.{rest}"
    return name.removeprefix("encoder.")


FILES: dict[str, tuple[Layouts, Any, Callable[[str], str], str]] = {
    "Qwen3": (language_names.QWEN3, QWEN3, lambda name: f"model.{name}", "transformers' names"),
    "Qwen3, with any prefix": (language_names.QWEN3, QWEN3, lambda name: f"a.b.{name}", "transformers' names"),
    "Qwen2.5-VL of mlx-vlm": (
        language_names.QWEN2_5_VL,
        QWEN2_5,
        lambda name: f"language_model.model.{name}",
        "mlx-vlm's names",
    ),
    "Qwen2.5-VL of mflux": (language_names.QWEN2_5_VL, QWEN2_5, lambda name: f"encoder.{name}", "mflux's names"),
    "Qwen3-VL": (language_names.QWEN3_VL, QWEN3_VL, lambda name: f"model.language_model.{name}", "transformers' names"),
    "T5": (t5_names.LAYOUTS, T5, lambda name: f"text_encoders.t5xxl.transformer.{name}", "transformers' names"),
    "T5 of mflux": (t5_names.LAYOUTS, T5, mflux_t5, "mflux's names"),
    "CLIP": (clip_names.LAYOUTS, CLIP, clip.published, "transformers' names"),
    "CLIP, with any prefix": (clip_names.LAYOUTS, CLIP, lambda name: f"a.b.text_model.{name}", "transformers' names"),
}


def written(path: Path, shapes: dict[str, tuple[int, ...]], name: Callable[[str], str]) -> Path:
    random = np.random.default_rng(5)
    save_file({name(key): random.standard_normal(shape, np.float32) for key, shape in shapes.items()}, path)
    return path


@pytest.mark.parametrize("kind", FILES)
def test_shapes_show_the_configuration(kind: str, tmp_path: Path) -> None:
    layouts, config, name, title = FILES[kind]
    manifest = layouts.network.manifest(config)
    path = written(tmp_path / "a.safetensors", manifest, name)
    naming = layouts.find(peek(path).tensors)
    assert naming is not None and naming.layout.names == title
    # what no shape of Qwen2.5-VL shows is the width of a head
    like = replace(config, hidden_size=48, num_attention_heads=8) if "Qwen2" in kind else type(config)()
    part = open_part(layouts, path, like, "text_encoder")
    assert part.config == config
    keys = {entry.name: entry.source.first.key for entry in part.plan.entries.values()}
    assert keys and all(keys[one] == name(one) for one in keys), keys
    part.plan.close()


@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2.5-VL of mflux", "Qwen3-VL", "CLIP"])
def test_a_file_of_the_expected_width_has_all_layers(kind: str, tmp_path: Path) -> None:
    """A file that ends early, at a layer's border, would else be a model with fewer layers."""
    layouts, config, name, _ = FILES[kind]
    manifest = {key: shape for key, shape in layouts.network.manifest(config).items() if "layers.2." not in key}
    if kind == "Qwen3":  # whose last layer no image depends on
        manifest = {key: shape for key, shape in manifest.items() if "layers.1." not in key}
    path = written(tmp_path / "a.safetensors", manifest, name)
    with pytest.raises(ModelError, match=r"a\.safetensors: lacks tensor") as caught:
        open_part(layouts, path, config, "text_encoder")
    print(caught.value)
    assert len(str(caught.value)) <= 300


def claimed(names: tuple[str, ...], architecture: str | None = None) -> set[str]:
    tensors = {name: Stored("F16", (8,), 0, 0) for name in names}
    notes = {} if architecture is None else {gguf.ARCHITECTURE: architecture}
    form = cast(Any, "safetensors" if architecture is None else "GGUF")
    kind = registry.identify(Header(file=cast(Any, None), tensors=tensors, metadata=notes, format=form))
    return set() if kind is None else {family.name for family in kind.families}


def test_qwen3_and_qwen3_vl_differ_by_prefix_tower_or_architecture() -> None:
    norm, tower, cpp = "layers.0.self_attn.q_norm.weight", "visual.patch_embed.proj.weight", "blk.0.attn_q_norm.weight"
    alone, sees = {"z-image", "flux2", "anima", "ovis"}, {"qwen-image-2.1", "flux3", "krea2"}
    for start in ("", "model.", "text_encoders.qwen3_4b.transformer.model."):
        assert claimed((start + norm,)) == alone
    for names in (
        (f"model.language_model.{norm}",),
        (f"language_model.model.{norm}",),
        (f"model.{norm}", tower),
        (f"model.{norm}", f"model.{tower}"),
        (norm, tower),
    ):
        assert claimed(names) == sees, names
    assert claimed((cpp,), "qwen3") == alone and claimed((cpp,), "qwen3vl") == sees
    assert claimed((cpp,), "") == alone and claimed((cpp,), "llama") == set()


def test_clips_bare_names_are_not_those_of_qwen() -> None:
    """CLIP's `encoder.layers.0.self_attn.k_proj.bias` has the name of Qwen2.5-VL's tensor after mflux's prefix."""
    names = (
        "embeddings.token_embedding.weight",
        *(f"encoder.layers.0.{name}" for name in ("self_attn.k_proj.bias", "layer_norm1.weight", "mlp.fc1.bias")),
    )
    assert claimed((*names, "final_layer_norm.weight")) == {"stable-diffusion"}
