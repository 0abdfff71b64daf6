"""Tiny models whose layers are wide enough for ComfyUI's rotations, and the same in its rotated 8 and 4 bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from support import tiny_edit, tiny_flux, tiny_flux2, tiny_model, tiny_qwen21, tiny_sd3, tiny_zimage
from support.comfy_files import comfy
from support.folder_tensors import tensors

# Heads whose rows are whole groups of a rotation, by the module that writes a kind's tiny folder
AXES = {tiny_model: (8, 12, 12), tiny_qwen21: (8, 12, 12), tiny_flux2: (8, 8, 8, 8)}
KINDS: dict[str, Callable[[Path], None]] = {
    "qwen": tiny_model.write_tiny_model,
    "qwen-2511": lambda folder: tiny_edit.write_tiny_edit(folder, "2511"),
    "qwen21": tiny_qwen21.write_tiny_qwen21,
    "z-image": lambda folder: tiny_zimage.write_tiny_zimage(
        folder, dit=tiny_zimage.WIDE, text={"hidden_size": tiny_zimage.WIDE["cap_feat_dim"]}
    ),
    "flux2-base": lambda folder: tiny_flux2.write_tiny_flux2(folder, distilled=False),
    "flux-dev": lambda folder: tiny_flux.write_tiny_flux(folder, "dev", wide=True),
    "sd3": lambda folder: tiny_sd3.write_tiny_sd3(folder, wide=True),
}
PARTS = ("transformer", "text_encoder", "text_encoder_2")


def write_wide(kind: str, folder: Path) -> Path:
    """Write a model of this kind by diffusers, with heads of 32 channels, unless it is there; return its folder."""
    if not folder.exists():
        with pytest.MonkeyPatch.context() as patch:
            for module, axes in AXES.items():
                patch.setattr(module, "DIT", module.DIT | {"attention_head_dim": 32, "axes_dims_rope": axes})
            KINDS[kind](folder)
    return folder


def written(folder: Path, out: Path, layout: str, parts: tuple[str, ...] = PARTS) -> tuple[Path, Path]:
    """The model with two of three matrices of each of `parts` in this layout, and with the values that these have."""
    coded, plain = out / "coded", out / "plain"
    for copy in (coded, plain):
        shutil.copytree(folder, copy)
    for part in (part for part in parts if (folder / part).is_dir()):
        stem = "diffusion_pytorch_model" if part == "transformer" else "model"
        weights = {name: value.float() for name, value in tensors(folder / part).items()}
        made = comfy(weights, layout, lambda name: "embed" not in name and "shared" not in name)
        for copy, held in ((coded, made.tensors), (plain, made.values)):
            for path in (*(copy / part).glob("*.safetensors"), *(copy / part).glob("*.index.json")):
                path.unlink()
            save_file(held, copy / part / f"{stem}.safetensors", {"format": "pt"})
    return coded, plain
