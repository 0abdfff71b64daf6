"""`tools/bench_step.py` on narrow models: every denoiser's step is diffusers', so that its times compare the same."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench
import bench_step
import pytest
from support import frameworks  # noqa: F401

from qwenimg.common.base.config import parse
from qwenimg.common.families.stable_diffusion import control
from qwenimg.common.networks.denoisers import unet

HEADS = {"num_attention_heads": 2, "joint_attention_dim": 128}
NARROW: dict[str, dict[str, Any]] = {
    "qwen": HEADS,
    "edit": HEADS,
    "qwen21": {"num_attention_heads": 2, "context_in_dim": 128},
    "qwen21-kept": {"num_attention_heads": 2, "context_in_dim": 128},
    "z-image": {"dim": 256, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 128},
    "auraflow": {"num_attention_heads": 1, "caption_projection_dim": 256, "joint_attention_dim": 128},
    "lumina": {"dim": 192, "n_heads": 2, "n_kv_heads": 1, "cap_feat_dim": 128},
    "pixart": {"num_attention_heads": 2, "cross_attention_dim": 144, "caption_channels": 128},
    "hunyuan": {
        "num_attention_heads": 2, "hidden_size": 176, "cross_attention_dim": 64, "cross_attention_dim_t5": 128,
        "pooled_projection_dim": 64,
    },
    "flux": HEADS,
    "flux2": HEADS,
    "flux2-dev": HEADS,
    "flux3": HEADS,
    "anima": {"num_attention_heads": 2, "text_embed_dim": 128},
    "ernie": {"hidden_size": 256, "num_attention_heads": 2, "ffn_hidden_size": 192, "text_in_dim": 128},
    "krea2": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192, "text_hidden_dim": 64,
        "num_text_layers": 2, "text_num_attention_heads": 2, "text_num_key_value_heads": 2,
        "text_intermediate_size": 96,
    },
    "sana": {
        "num_attention_heads": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 64,
        "cross_attention_dim": 128, "caption_channels": 128,
    },
    "longcat": HEADS,
    "ovis": HEADS,
    "chroma": HEADS | {"approximator_hidden_dim": 64},
    "sd3": HEADS | {"caption_projection_dim": 128},
    "sd15": {"block_out_channels": [64] * 4, "cross_attention_dim": 64},
    "sd15-controlnet": {"block_out_channels": [64] * 4, "cross_attention_dim": 64},
    "sdxl": {
        "block_out_channels": [64] * 3,
        "cross_attention_dim": 64,
        "attention_head_dim": [2] * 3,
        "transformer_layers_per_block": [1] * 3,
    },
}  # fmt: skip


def narrow(name: str) -> bench_step.Case:
    case, change = bench_step.cases()[name], NARROW[name]
    if not case.fields:
        return replace(case, config=replace(case.config, **change), text=128)
    fields = dict(case.fields) | change
    config: unet.UNetConfig = parse(unet.UNetConfig, unet.unet_fields(fields), source=name)
    net = case.control and replace(case.control, fields=fields, config=control.config_like(config))
    return replace(case, fields=fields, config=config, control=net, text=64)


@pytest.mark.parametrize("name", bench_step.cases())
@pytest.mark.sample(1)
def test_a_step_is_that_of_diffusers(tmp_path: Path, name: str) -> None:
    options = argparse.Namespace(tokens=["24+12"], dtypes=["fp32"], cfg=name == "qwen", layers=2, device="cpu",
                                 backend="mlx", runs=2, peer="diffusers")  # fmt: skip
    [table] = bench_step.measure(name, narrow(name), options, tmp_path)
    peer, *ours = table["rows"]
    assert peer["arm"] == "diffusers" and len(ours) == (4 if name == "qwen" else 2)
    assert all(0 < row["relative_l2"] <= bench.FP32_TOLERANCE and row["ratio_of_medians"] != "INVALID" for row in ours)
