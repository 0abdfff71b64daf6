"""LoRA files in every dialect, and what each means by its formula in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Arrays = dict[str, np.ndarray]
RANK, ALPHA = 4, 1.0
PEFT_HALVES = {"down": "lora_A.weight", "up": "lora_B.weight"}
NAMED_HALVES = {"down": "lora_A.default.weight", "up": "lora_B.default.weight"}
KOHYA_HALVES = {"down": "lora_down.weight", "up": "lora_up.weight"}
OLD_HALVES = {"down": "lora.down.weight", "up": "lora.up.weight"}
_LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "net.0.proj"]
_CONFIG = {
    "transformer.lora_alpha": ALPHA,
    "transformer.r": RANK,
    "transformer.target_modules": [*_LAYERS, "net.2", "img_mod.1", "txt_mod.1"],
}
METADATA = {"lora_adapter_metadata": json.dumps(_CONFIG)}
RSLORA = {"lora_adapter_metadata": json.dumps(_CONFIG | {"transformer.use_rslora": True})}


@dataclass(frozen=True)
class Dialect:
    """How a trainer writes a module of the transformer: `prefix`, its path dotted or flat, and the ends of its keys."""

    prefix: str
    halves: Mapping[str, str]
    flat: bool = False
    alpha: bool = False
    metadata: Mapping[str, str] | None = None
    scale: float = 1.0  # that it means

    def key(self, path: str, role: str) -> str:
        return f"{self.prefix}{path.replace('.', '_') if self.flat else path}.{self.halves.get(role, role)}"


Q = ALPHA / RANK
QWEN = {
    "diffusers": Dialect("transformer.", PEFT_HALVES),
    "diffusers, alpha in the header": Dialect("transformer.", PEFT_HALVES, metadata=METADATA, scale=Q),
    "diffusers, rank-stabilised": Dialect("transformer.", PEFT_HALVES, metadata=RSLORA, scale=ALPHA / RANK**0.5),
    "diffusers of 2023": Dialect("transformer.", OLD_HALVES),
    "Lightning": Dialect("", KOHYA_HALVES, alpha=True, scale=Q),
    "Lightning, prefixed": Dialect("diffusion_model.", KOHYA_HALVES, alpha=True, scale=Q),
    "kohya, musubi": Dialect("lora_unet_", KOHYA_HALVES, flat=True, alpha=True, scale=Q),
    "kohya, alpha of the network": Dialect(
        "lora_unet_", KOHYA_HALVES, flat=True, metadata={"ss_network_alpha": "1.0", "ss_network_dim": "4"}, scale=Q
    ),
    "ai-toolkit": Dialect("diffusion_model.", PEFT_HALVES),
    "ai-toolkit, alpha": Dialect("diffusion_model.", PEFT_HALVES, alpha=True, scale=Q),
    "ComfyUI": Dialect("model.diffusion_model.", KOHYA_HALVES, alpha=True, scale=Q),
    "DiffSynth": Dialect("", NAMED_HALVES),
    "bare": Dialect("", PEFT_HALVES),
    "PEFT": Dialect("base_model.model.", PEFT_HALVES),
    "PEFT of a pipeline": Dialect("base_model.model.transformer.", PEFT_HALVES),
    "OneTrainer": Dialect("lora_transformer_", KOHYA_HALVES, flat=True, alpha=True, scale=Q),
    "OneTrainer, dotted": Dialect("transformer.", KOHYA_HALVES, alpha=True, scale=Q),
}


def rng(seed: int) -> np.random.RandomState:
    return np.random.RandomState(seed)


def lora(shape: tuple[int, ...], seed: int, rank: int = RANK) -> Arrays:
    """Factors for a weight, a kernel in the first one."""
    made = rng(seed)
    ones = (1,) * (len(shape) - 2)
    down = made.standard_normal((rank, *shape[1:])) / np.prod(shape[1:]) ** 0.5
    return {"down": down.astype(np.float32), "up": made.standard_normal((shape[0], rank, *ones)).astype(np.float32)}


def added(arrays: Arrays, scale: float, shape: tuple[int, ...]) -> np.ndarray:
    """scale * up @ down in float64."""
    up, down = (arrays[role].astype(np.float64) for role in ("up", "down"))
    return scale * (up.reshape(len(up), -1) @ down.reshape(len(down), -1)).reshape(shape)


def written(
    path: Path,
    modules: Mapping[str, Arrays],
    dialect: Dialect,
    dtype: torch.dtype = torch.float32,
    name: Callable[[str], str] = lambda path: path,
) -> Path:
    """A file of `modules` {path: factors}; `name` is what the trainer calls a path."""
    tensors = {}
    for module, arrays in modules.items():
        for role, array in arrays.items():
            tensors[dialect.key(name(module), role)] = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        if dialect.alpha:
            tensors[dialect.key(name(module), "alpha")] = torch.tensor(ALPHA)
    save_file(tensors, path, metadata=None if dialect.metadata is None else dict(dialect.metadata))
    return path


# Of the tiny models

# kind -> component: where it is, how a LoRA calls it, and some of its layers: streams, attention, modulation, kernels
LAYERS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "qwen": {
        "transformer": (
            "transformer.",
            (
                "img_in",
                "proj_out",
                "norm_out.linear",
                "transformer_blocks.0.img_mod.1",
                "transformer_blocks.2.attn.to_q",
            ),
        )
    },
    "z-image": {
        "transformer": (
            "transformer.",
            (
                "all_x_embedder.2-1",
                "cap_embedder.1",
                "noise_refiner.0.adaLN_modulation.0",
                "context_refiner.1.feed_forward.w2",
                "layers.2.attention.to_q",
                "all_final_layer.2-1.linear",
            ),
        ),
        "text_encoder": ("text_encoder.", ("layers.1.self_attn.q_proj",)),
    },
    "sd3": {
        "transformer": (
            "transformer.",
            (
                "context_embedder",
                "norm_out.linear",
                "proj_out",
                "transformer_blocks.0.norm1.linear",
                "transformer_blocks.1.attn2.to_v",
                "transformer_blocks.2.ff_context.net.2",
            ),
        ),
        "text_encoder": ("text_encoder.", ("encoder.layers.0.self_attn.q_proj",)),
    },
    "sdxl": {
        "unet": (
            "unet.",
            ("conv_in", "time_embedding.linear_1", "down_blocks.1.resnets.0.conv1", "mid_block.attentions.0.proj_in"),
        ),
        "text_encoder": ("text_encoder.text_model.", ("encoder.layers.0.self_attn.q_proj",)),
        "text_encoder_2": ("text_encoder_2.", ("encoder.layers.1.mlp.fc1", "text_projection")),
    },
}


def shapes(folder: Path, component: str) -> dict[str, tuple[int, ...]]:
    """Of the weights as they are stored, by the layer's path without `text_model.`."""
    found = {}
    for file in sorted((folder / component).glob("*.safetensors")):
        for key, value in load_file(file).items():
            found[key.removeprefix("text_model.").removesuffix(".weight")] = value.shape
    return found


def write_lora(folder: Path, kind: str, path: Path, seed: int = 0, *, components: tuple[str, ...] = ()) -> Path:
    """For the layers of LAYERS; `components`: of those only."""
    dialect = Dialect("", PEFT_HALVES, alpha=True)
    modules = {}
    for component, (prefix, layers) in LAYERS[kind].items():
        there = shapes(folder, component)
        for i, layer in enumerate(layers if not components or component in components else ()):
            modules[prefix + layer] = lora(there[layer], seed + i, rank=2)
    return written(path, modules, dialect)
