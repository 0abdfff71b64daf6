"""Qwen-Image as a row."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.families.family import Choices, Family
from qwenimg.common.families.qwen_image.checkpoint import REFUSED, open_folder
from qwenimg.common.families.qwen_image.model import QwenImage
from qwenimg.common.networks import qwen_dit, qwen_vae, qwen_vl
from qwenimg.common.pipeline.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.weights.precision import MMDIT

PUBLISHED_WIDTH = 3072
"""Of the published transformer. One that was made smaller by leaving out layers keeps it, a toy has less."""


def _open(folder: Path, choices: Choices) -> Checkpoint:
    return open_folder(folder)


def _model(runtime: Runtime, checkpoint: Checkpoint, refiner: Checkpoint | None) -> QwenImage:
    assert refiner is None
    return QwenImage(runtime, checkpoint)


def _defaults(checkpoint: Checkpoint) -> Defaults:
    return Defaults(qwen_sizes=checkpoint["transformer"].config.dim == PUBLISHED_WIDTH)


FAMILY = Family(
    name="qwen-image",
    title="Qwen-Image",
    pipelines=frozenset({"QwenImagePipeline"}),
    refused=REFUSED,
    networks=(qwen_dit.NETWORK, qwen_vl.NETWORK, qwen_vae.NETWORK),
    denoiser="transformer",
    components=(("transformer",), ("text_encoder",), ("vae",)),
    precision=MMDIT,
    open=_open,
    model=_model,
    defaults=_defaults,
    described=lambda folder: "Qwen-Image, text to image",
    layouts=(
        ("model.diffusion_model.transformer_blocks.", "Qwen-Image transformer, ComfyUI prefix (not supported yet)"),
        ("transformer_blocks.0.img_mod.1.weight", "Qwen-Image transformer, diffusers names"),
        ("decoder.up_blocks.0.resnets.0.norm1.gamma", "Qwen-Image VAE, diffusers names"),
        ("blk.0.attn_q.weight", "Qwen2.5-VL, llama.cpp's names"),
        ("visual.", "Qwen2.5-VL, transformers names"),
    ),
)
