"""Folders of Qwen-Image, Qwen-Image-Edit-2511 and -Layered of published proportions, narrower, with random weights.

For measurements: what they draw is noise. Needs neither framework, nor diffusers or transformers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tiny_tokenizer import write_tiny_tokenizer
from wide_checkpoint import write as write_weights
from wide_checkpoint import write_small_files

from qwenimg.common.families.qwen_image import variants
from qwenimg.common.families.qwen_image.variants import QwenVariant, of_kind
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.encoders import qwen_vl, qwen_vl_caption, qwen_vl_vision
from qwenimg.common.networks.encoders.qwen_vl import QwenVLConfig
from qwenimg.common.networks.encoders.qwen_vl_vision import QwenVLVisionConfig
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig

DIT = QwenDiTConfig(num_layers=6, num_attention_heads=8, joint_attention_dim=1024)
TEXT = QwenVLConfig(
    hidden_size=1024, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=32000,
)  # fmt: skip
VAE = QwenVAEConfig(base_dim=48)
# A quarter of the published vision tower's width, and of its layers.
SEEING = QwenVLVisionConfig(
    **vars(TEXT), mrope_section=(16, 24, 24), vision_depth=8, vision_width=320, vision_inner=856, vision_heads=4,
    full_layers=(1, 3, 5, 7),
)  # fmt: skip
# Of more layers, so that two of them are little of it.
DEEP = replace(DIT, num_layers=24)
OF_DIFFUSERS = "diffusion_pytorch_model"


def write_qwen(folder: Path, dit: QwenDiTConfig, kind: QwenVariant = variants.TEXT) -> None:
    """Write a model of published proportions, narrower and of fewer layers; model_index.json is written last."""
    dit, vae, text = of_kind(dit, kind), of_kind(VAE, kind), SEEING if kind.images[0] else TEXT
    heading = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    network = qwen_vl_vision if kind.edits else qwen_vl_caption if kind.layered else qwen_vl
    keys = {network.NETWORK.published(key): shape for key, shape in network.manifest(text).items()}
    for name, config, manifest, stem in (
        ("transformer", {"_class_name": qwen_dit.CLASS_NAME} | vars(dit), qwen_dit.manifest(dit), OF_DIFFUSERS),
        ("vae", {"_class_name": qwen_vae.CLASS_NAME} | vars(vae), qwen_vae.manifest(vae), OF_DIFFUSERS),
        ("text_encoder", heading | network.NETWORK.written(text), keys, "model"),
    ):
        write_weights(folder / name / f"{stem}.safetensors", manifest, "BF16")
        (folder / name / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(folder / "tokenizer")
    write_small_files(folder, "qwen-image")
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": kind.pipeline}))
