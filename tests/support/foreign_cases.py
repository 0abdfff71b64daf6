"""What tests of several rooms share of `test_foreign`."""

from __future__ import annotations

import json
from typing import Any

# mflux

MFLUX: dict[str, Any] = {
    "mflux_version": "0.17.5", "model": "Qwen/Qwen-Image", "base_model": "None", "seed": 42, "steps": 20,
    "guidance": 4.0,
    "height": 928, "width": 1664, "precision": "mlx.core.bfloat16", "quantize": 8, "generation_time_seconds": 12.5,
    "created_at": "2026-01-02T03:04:05", "lora_paths": ["/Users/someone/loras/ink.safetensors"], "lora_scales": [0.8],
    "image_path": None, "image_strength": None, "controlnet_image_path": None, "prompt": "猫, \"quoted\"",
    "negative_prompt": "blurry",
}  # fmt: skip


# InvokeAI

INVOKEAI: dict[str, Any] = {
    "app_version": "5.6.0", "generation_mode": "txt2img", "positive_prompt": "landscape",
    "negative_prompt": "low quality",
    "width": 768, "height": 432, "seed": 356120443, "rand_device": "cpu", "cfg_scale": 7.5, "steps": 50,
    "scheduler": "dpmpp_2m_sde_k", "clip_skip": 2, "cfg_rescale_multiplier": 0.2, "seamless_x": False,
    "model": {"key": "k", "hash": "blake3:0", "name": "stable-diffusion-xl-base-1-0", "base": "sdxl", "type": "main"},
    "controlnets": [{"control_model": {"name": "canny"}, "control_weight": 1}], "ipAdapters": [], "hrf_enabled": False,
    "loras": [{"model": {"name": "ink"}, "weight": 0.7}], "vae": {"name": "sd-vae-ft-mse"}, "positive_style_prompt": "",
}  # fmt: skip


# ComfyUI

COMFYUI: dict[str, Any] = {
    "3": {"class_type": "KSampler", "inputs": {
        "seed": 156680208700286, "steps": 20, "cfg": 8, "sampler_name": "euler", "scheduler": "normal", "denoise": 1,
        "model": ["4", 0], "positive": ["6", 0], "negative": ["7", 0], "latent_image": ["5", 0]}},
    "4": {"class_type": "CheckpointLoaderSimple",
    "inputs": {"ckpt_name": "SD1.5\\v1-5-pruned-emaonly-fp16.safetensors"}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 768, "batch_size": 1}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "glass bottle, 猫", "clip": ["4", 1]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "text, watermark", "clip": ["4", 1]}},
    "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
    "9": {"class_type": "SaveImage", "inputs": {"filename_prefix": "ComfyUI", "images": ["8", 0]}},
}  # fmt: skip


def graph(**changes: Any) -> str:
    """The graph above with nodes added, and inputs changed: `_3={"seed": 1}`."""
    nodes = {key: {**node, "inputs": dict(node["inputs"])} for key, node in COMFYUI.items()}
    for key, change in changes.items():
        if "class_type" in change:
            nodes[key[1:]] = change
        else:
            nodes[key[1:]]["inputs"] |= change
    return json.dumps(nodes)


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}
