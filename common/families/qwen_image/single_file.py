"""The configurations of Qwen-Image's parts in one file of a whole model, by the shapes of its tensors.

Unusual about it: nothing shows the axes of positions and the latents' statistics, which are the published ones, and
that heads of the text encoder have 128 channels.
"""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.families.qwen_image.layouts import RENAMES
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.encoders import qwen_vl
from qwenimg.common.networks.encoders.qwen_vl import QwenVLConfig
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig
from qwenimg.common.parts.authors_names import count_blocks
from qwenimg.common.parts.ldm_configs import Shapes, shape_of
from qwenimg.common.parts.texts import language_files
from qwenimg.common.weights.part_names import plain

_HEAD_DIM = QwenVLConfig().head_dim
_UP = re.compile(r"decoder\.(?:up_blocks\.0\.resnets\.(\d)\.conv1|upsamples\.(\d{1,2})\.residual\.2)\.weight")
_SAMPLER = re.compile(r"decoder\.(?:up_blocks\.\d\.upsamplers\.0|upsamples\.(\d{1,2}))\.resample\.1\.weight")


def config_of(header: Header, part: str, like: Any) -> Any:
    """Return the configuration of a part in the file; `like` has the fields that no tensor shows. Raises ModelError."""
    if part == "text_encoder":
        rename = RENAMES[part](qwen_vl.manifest(QwenVLConfig()))
        return replace(like, **language_files.sizes(header, rename, _HEAD_DIM))
    if part == "vae":
        return _vae(header, like)
    return _transformer(header, like)


def _transformer(header: Header, like: QwenDiTConfig) -> QwenDiTConfig:
    path, rename = header.file.path, RENAMES["transformer"](qwen_dit.manifest(like))
    shapes: Shapes = {name: one.shape for key, one in header.tensors.items() if (name := rename(key)) is not None}
    width, channels = shape_of(path, shapes, "img_in.weight", 2)
    [head_dim] = shape_of(path, shapes, "transformer_blocks.0.attn.norm_q.weight", 1)
    data: dict[str, Any] = asdict(like) | {
        "in_channels": channels,
        "out_channels": shape_of(path, shapes, "proj_out.weight", 2)[0] // like.patch_size**2,
        "num_layers": count_blocks(shapes, "transformer_blocks."),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // max(1, head_dim),
        "joint_attention_dim": shape_of(path, shapes, "txt_in.weight", 2)[1],
    }
    return parse(QwenDiTConfig, data, source=path)


def _vae(header: Header, like: QwenVAEConfig) -> QwenVAEConfig:
    """Return the configuration of the VAE, in diffusers' names or Wan's."""
    path = header.file.path
    shapes: Shapes = {name: one.shape for key, one in header.tensors.items() if (name := plain("vae", key)) is not None}
    first = next((name for name in ("encoder.conv_in.weight", "encoder.conv1.weight") if name in shapes), "")
    width = shape_of(path, shapes, first or "encoder.conv1.weight", 5)[0]
    sampler = min((int(match[1] or 100) for name in shapes if (match := _SAMPLER.fullmatch(name))), default=100)
    blocks = {int(match[1] or match[2]) for name in shapes if (match := _UP.fullmatch(name))}
    layers = sum(block < sampler for block in blocks)
    return parse(QwenVAEConfig, asdict(like) | {"base_dim": width, "num_res_blocks": layers - 1}, source=path)
