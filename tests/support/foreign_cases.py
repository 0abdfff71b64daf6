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


def _placed(id: int, kind: str, values: list[Any], inputs: dict[str, int | None], outputs: str = "") -> dict[str, Any]:
    """A node as ComfyUI's page saves it. inputs: links by name, with the kind after a `:`. outputs: kinds."""
    return {
        "id": id, "type": kind, "pos": [0, 0], "size": {"0": 210, "1": 100}, "flags": {}, "order": 0, "mode": 0,
        "inputs": [{"name": name.partition(":")[0], "type": name.partition(":")[2], "link": link}
                   for name, link in inputs.items()],
        "outputs": [{"name": one, "type": one, "links": []} for one in outputs.split()],
        "properties": {"Node name for S&R": kind}, "widgets_values": values,
    }  # fmt: skip


PAGE: dict[str, Any] = {
    "last_node_id": 20, "last_link_id": 30, "groups": [], "config": {}, "extra": {"ds": {"scale": 1}}, "version": 0.4,
    "nodes": [
        _placed(1, "CheckpointLoaderSimple", ["v1-5-pruned-emaonly.safetensors"], {}, "MODEL CLIP VAE"),
        _placed(2, "LoraLoader", ["ink.safetensors", 0.6, 0.6], {"model:MODEL": 1, "clip:CLIP": 2}, "MODEL CLIP"),
        _placed(3, "KSampler", [27, "fixed", 30, 6, "ddim", "ddim_uniform", 1],
                {"model:MODEL": 7, "positive:CONDITIONING": 17, "negative:CONDITIONING": 9, "latent_image:LATENT": 10},
                "LATENT"),
        _placed(4, "CLIPTextEncode", ["a girl with a necklace"], {"clip:CLIP": 3}, "CONDITIONING"),
        _placed(5, "CLIPTextEncode", ["blurry"], {"clip:CLIP": 4}, "CONDITIONING"),
        _placed(6, "EmptyLatentImage", [512, 640, 1], {}, "LATENT"),
        _placed(7, "IPAdapterApply", [0.8, 0, "original", 0, 1, False],
                {"ipadapter:IPADAPTER": 11, "clip_vision:CLIP_VISION": None, "image:IMAGE": 12, "model:MODEL": 20},
                "MODEL"),
        _placed(8, "IPAdapterModelLoader", ["ip-adapter-plus_sd15.safetensors"], {}, "IPADAPTER"),
        _placed(9, "LoadImage", ["venus.jpg", "image"], {}, "IMAGE MASK"),
        _placed(10, "ControlNetLoader", ["control_v11p_sd15_canny_fp16.safetensors"], {}, "CONTROL_NET"),
        _placed(11, "Canny", [0.1, 0.5], {"image:IMAGE": 13}, "IMAGE"),
        _placed(12, "ControlNetApply", [0.7], {"conditioning:CONDITIONING": 18, "control_net:CONTROL_NET": 15,
                                               "image:IMAGE": 16}, "CONDITIONING"),
        _placed(13, "VAEDecode", [], {"samples:LATENT": 21, "vae:VAE": 22}, "IMAGE"),
        _placed(14, "SaveImage", ["x"], {"images:IMAGE": 23}),
        _placed(15, "Reroute", [], {":*": 5}, "MODEL"),
        {**_placed(16, "LoraLoaderModelOnly", ["never.safetensors", 1], {"model:MODEL": 6}, "MODEL"), "mode": 4},
        {**_placed(17, "KSampler", [1, "fixed", 1, 1, "euler", "normal", 1], {}, "LATENT"), "mode": 2},
    ],
    "links": [
        [1, 1, 0, 2, 0, "MODEL"], [2, 1, 1, 2, 1, "CLIP"], [3, 2, 1, 4, 0, "CLIP"], [4, 2, 1, 5, 0, "CLIP"],
        [5, 2, 0, 15, 0, "MODEL"], [6, 15, 0, 16, 0, "MODEL"], [20, 16, 0, 7, 3, "MODEL"], [7, 7, 0, 3, 0, "MODEL"],
        [9, 5, 0, 3, 2, "CONDITIONING"], [10, 6, 0, 3, 3, "LATENT"], [11, 8, 0, 7, 0, "IPADAPTER"],
        [12, 9, 0, 7, 2, "IMAGE"], [13, 9, 0, 11, 0, "IMAGE"], [15, 10, 0, 12, 1, "CONTROL_NET"],
        [16, 11, 0, 12, 2, "IMAGE"], [17, 12, 0, 3, 1, "CONDITIONING"], [18, 4, 0, 12, 0, "CONDITIONING"],
        [21, 3, 0, 13, 0, "LATENT"], [22, 1, 2, 13, 1, "VAE"], [23, 13, 0, 14, 0, "IMAGE"], None,
    ],
}  # fmt: skip
"""A graph with an IP-Adapter and a ControlNet as ComfyUI's page saves it, with one node bypassed and one muted."""
