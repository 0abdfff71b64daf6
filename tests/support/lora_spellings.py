"""One change of a model's layers, spelled as many trainers and programs do, and the same change in the folder's own
weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from support import lora_cases as cases
from support.lora_cases import Arrays

Modules = dict[str, Arrays]
Tensors = dict[str, torch.Tensor]
ENDS = {"down": "lora_down.weight", "up": "lora_up.weight", "magnitude": "lora_magnitude_vector", "alpha": "alpha"}

# kind -> component -> what ComfyUI writes before a layer of this text encoder
TEXTS: dict[str, dict[str, str]] = {
    "qwen": {"text_encoder": "text_encoders.qwen25_7b.transformer.model."},
    "qwen21": {"text_encoder": "text_encoders.qwen3vl_8b.transformer.model."},
    "z-image": {"text_encoder": "text_encoders.qwen3_4b.transformer.model."},
    "flux2-klein": {"text_encoder": "text_encoders.qwen3_8b.transformer.model."},
    "flux2-dev": {"text_encoder": "text_encoders.mistral3_24b.transformer.model."},
    "flux3-base": {"text_encoder": "text_encoders.qwen3vl_4b.transformer.model."},
    "longcat": {"text_encoder": "text_encoders.qwen25_7b.transformer.model."},
    "chroma": {"text_encoder": "text_encoders.t5xxl.transformer."},
    "ernie": {"text_encoder": "text_encoders.ministral3_3b.transformer.model."},
    "krea2": {"text_encoder": "text_encoders.qwen3vl_4b.transformer.model."},
    "anima": {"text_encoder": "text_encoders.qwen3_06b.transformer.model."},
    "flux-dev": {
        "text_encoder": "text_encoders.clip_l.transformer.text_model.",
        "text_encoder_2": "text_encoders.t5xxl.transformer.",
    },
    "sd3": {
        "text_encoder": "text_encoders.clip_l.transformer.text_model.",
        "text_encoder_2": "text_encoders.clip_g.transformer.text_model.",
        "text_encoder_3": "text_encoders.t5xxl.transformer.",
    },
    "sd15": {"text_encoder": "text_encoders.clip_l.transformer.text_model."},
    "sd21": {"text_encoder": "text_encoders.clip_h.transformer.text_model."},
    "sdxl": {
        "text_encoder": "text_encoders.clip_l.transformer.text_model.",
        "text_encoder_2": "text_encoders.clip_g.transformer.text_model.",
    },
}


def denoiser(kind: str) -> str:
    return "unet" if kind.startswith("sd") and kind != "sd3" else "transformer"


def flat(path: str) -> str:
    return path.replace(".", "_")


def half_flat(path: str) -> str:
    """The path with a dot before its last part alone."""
    owner, dot, last = path.rpartition(".")
    return f"{flat(owner)}{dot}{last}"


def inside(path: str, wrapper: str = "_orig_mod") -> str:
    """The path with a wrapper behind its first number, as where each block was compiled for itself."""
    first, digit, rest = path.partition(".0.")
    return f"{first}.0.{wrapper}.{rest}" if digit else f"{wrapper}.{path}"


# A layer of the denoiser `{}`, by its path and by the tensor's role
SPELLINGS: dict[str, Callable[[str, str, str], str]] = {
    "PEFT, twice wrapped": lambda d, path, role: f"{d}.base_model.model.{path}",
    "PEFT, wrapped on both sides": lambda d, path, role: f"base_model.model.{d}.base_model.model.{path}",
    "SimpleTuner": lambda d, path, role: f"diffusion_model.{d}.{path}",
    "of DiffSynth, untouched": lambda d, path, role: f"pipe.dit.{path}",
    "of distributed training": lambda d, path, role: f"module.{path}",
    "compiled": lambda d, path, role: f"{d}._orig_mod.{path}",
    "compiled, bare": lambda d, path, role: f"_orig_mod.{path}",
    "compiled by blocks": lambda d, path, role: f"diffusion_model.{inside(path)}",
    "compiled by blocks, flat": lambda d, path, role: f"lora_unet_{flat(inside(path))}",
    "sharded": lambda d, path, role: f"{d}.{inside(path, '_fsdp_wrapped_module')}",
    "checkpointed": lambda d, path, role: f"{d}.{inside(path, '_checkpoint_wrapped_module')}",
    "with an underscore behind": lambda d, path, role: f"lora_unet_{flat(path)}_",
    "with an underscore behind one half": lambda d, path, role: f"lora_unet_{flat(path)}{'_' * (role == 'down')}",
    "dotted and flat": lambda d, path, role: f"lora_unet_{flat(path) if role == 'down' else half_flat(path)}",
}  # fmt: skip


def spelled(modules: Mapping[str, Arrays], name: Callable[[str, str], str]) -> Tensors:
    """The tensors of `modules` with the key that `name` gives for a path and a role."""
    return {
        f"{name(path, role)}.{ENDS[role]}": torch.from_numpy(array.copy())  # each tensor its own memory
        for path, arrays in modules.items()
        for role, array in arrays.items()
    }


def layers(folder: Path, component: str, known: Callable[[str], bool], count: int) -> Modules:
    """Factors for `count` of the layers that a LoRA may change, spread over the component."""
    there = {path: shape for path, shape in cases.shapes(folder, component).items() if known(path)}
    chosen = list(there)[:: max(1, len(there) // count)]
    return {path: cases.lora(there[path], i) for i, path in enumerate(chosen)}


def joined(modules: list[Arrays]) -> Arrays:
    """One module of several of the same inputs and rank, whose changes are below each other: a rank for each part."""
    rows, rank = sum(len(one["up"]) for one in modules), sum(len(one["down"]) for one in modules)
    up, at, column = np.zeros((rows, rank), np.float32), 0, 0
    for one in modules:
        height, width = one["up"].shape[:2]
        up[at : at + height, column : column + width] = one["up"]
        at, column = at + height, column + width
    return {"down": np.concatenate([one["down"] for one in modules]), "up": up}


def write_changed(folder: Path, target: Path, changes: Mapping[str, Modules], strength: float = 1.0) -> Path:
    """A copy of the folder with the products of `changes`, by component and path, added in float64."""
    shutil.copytree(folder, target)
    for component, modules in changes.items():
        left = set(modules)
        for file in sorted((target / component).glob("*.safetensors")):
            tensors = load_file(file)
            for key, value in tensors.items():
                path = key.removeprefix("text_model.").removesuffix(".weight")
                if key.endswith(".weight") and path in modules:
                    added = cases.added(modules[path], strength, tuple(value.shape))
                    tensors[key] = (value.double() + torch.from_numpy(added)).to(value.dtype)
                    left.discard(path)
            file.unlink()
            save_file(tensors, file)
        assert not left, left
    return target
