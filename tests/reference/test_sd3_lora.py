"""LoRAs for Stable Diffusion 3: as diffusers applies them, and in the names of all trainers alike."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import oracle_sd3
from support.relative import relative

import qwenimg
from qwenimg.common.base.errors import ModelError

LATENTS = 1e-4  # relative L2 of the final latents
PROMPT = "a photo of a red circle"
SIZE = {"width": 48, "height": 32}
RANK = 3
# Layers, their width in and out in the tiny model
LAYERS = {
    **{f"transformer_blocks.{i}.attn.{x}": (36, 36) for i in (0, 3) for x in ("to_q", "to_k", "to_v", "to_out.0")},
    **{f"transformer_blocks.1.attn.add_{x}_proj": (36, 36) for x in "qkv"},
    **{f"transformer_blocks.1.attn2.to_{x}": (36, 36) for x in "qkv"},
    "transformer_blocks.2.ff_context.net.0.proj": (36, 144),
    "transformer_blocks.0.norm1.linear": (36, 324),
    "transformer_blocks.3.norm1_context.linear": (36, 72),
    "norm_out.linear": (36, 72),
    "proj_out": (36, 64),
    "context_embedder": (60, 36),
    "time_text_embed.text_embedder.linear_1": (46, 36),
}
SWAPPED = ("transformer_blocks.3.norm1_context.linear", "norm_out.linear")
AUTHORS = (
    (r"transformer_blocks", "joint_blocks"),
    (r"(attn2?)\.to_[qkv]$", r"x_block.\1.qkv"),
    (r"attn\.add_[qkv]_proj$", "context_block.attn.qkv"),
    (r"(attn2?)\.to_out\.0", r"x_block.\1.proj"),
    (r"ff_context\.net\.0\.proj", "context_block.mlp.fc1"),
    (r"norm1\.linear", "x_block.adaLN_modulation.1"),
    (r"norm1_context\.linear", "context_block.adaLN_modulation.1"),
    (r"norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"proj_out", "final_layer.linear"),
    (r"time_text_embed\.text_embedder\.linear_1", "y_embedder.mlp.0"),
)


def factors() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Down and up of each layer; layers that are one in the authors' names share their down."""
    generator = torch.Generator().manual_seed(5)
    downs: dict[str, torch.Tensor] = {}
    found = {}
    for layer, (inputs, outputs) in LAYERS.items():
        name = authors(layer)
        if name not in downs:
            downs[name] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
        found[layer] = downs[name], 0.3 * torch.randn(outputs, RANK, generator=generator)
    return found


def authors(layer: str) -> str:
    for pattern, new in AUTHORS:
        layer = re.sub(pattern, new, layer)
    return layer


def peft(path: Path) -> Path:
    """As diffusers and PEFT write it."""
    tensors = {}
    for layer, (down, up) in factors().items():
        tensors |= {f"transformer.{layer}.lora_A.weight": down.clone(), f"transformer.{layer}.lora_B.weight": up}
    save_file(tensors, path)
    return path


def fused(path: Path, form: str) -> Path:
    """In the authors' names, with q, k and v in one module: kohya's underscores, or ComfyUI's dots."""
    modules: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for layer, (down, up) in factors().items():
        up = torch.cat(up.chunk(2)[::-1]) if layer in SWAPPED else up
        modules.setdefault(authors(layer), []).append((down, up))
    tensors = {}
    for name, parts in modules.items():
        down, up = parts[0][0], torch.cat([up for _, up in parts])
        if form == "kohya":
            module = "lora_unet_" + name.replace(".", "_")
            tensors |= {f"{module}.lora_down.weight": down.clone(), f"{module}.lora_up.weight": up * 2}
            tensors |= {f"{module}.alpha": torch.tensor(RANK / 2)}
        else:
            module = f"diffusion_model.{name}"
            tensors |= {f"{module}.lora_A.weight": down.clone(), f"{module}.lora_B.weight": up}
    save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def expected(tiny_sd3: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """diffusers' latents with the LoRA added to its weights."""
    pipe = oracle_sd3.pipeline.__wrapped__(tiny_sd3["medium"], "")
    pipe.load_lora_weights(peft(tmp_path_factory.mktemp("lora") / "peft.safetensors"))
    with torch.inference_mode():
        return np.asarray(
            pipe(
                PROMPT,
                generator=torch.Generator().manual_seed(7),
                output_type="latent",
                num_inference_steps=3,
                guidance_scale=4.0,
                **SIZE,
            ).images
        )


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("form", ["peft", "kohya", "comfyui"])
@pytest.mark.sample(1)
def test_a_lora_is_that_of_diffusers(
    tiny_sd3: dict[str, Path], tmp_path: Path, expected: np.ndarray, form: str, backend: str
) -> None:
    path = tmp_path / f"{form}.safetensors"
    lora = peft(path) if form == "peft" else fused(path, form)
    asked = {**SIZE, "steps": 3, "guidance": 4.0, "seed": 7}
    with closing(qwenimg.load(tiny_sd3["medium"], backend, "fp32")) as pipe:
        plain, changed = pipe(PROMPT, **asked).latents, pipe(PROMPT, **asked, lora=lora).latents
        again = pipe(PROMPT, **asked).latents
        beside = pipe(PROMPT, **asked, lora=lora, lora_mode="side").latents
    error, effect = relative(changed, expected), relative(plain, expected)
    print(
        f"{backend} {form}: {error:.1e} (limit {LATENTS}), {relative(beside, expected):.1e} beside; effect {effect:.2f}"
    )
    assert error <= LATENTS < 0.05 < effect
    assert relative(beside, expected) <= LATENTS
    assert np.array_equal(plain, again)


@pytest.mark.parametrize("prefix", ["text_encoder.", "lora_te1_"])
@pytest.mark.sample(1)
def test_a_lora_of_a_text_encoder_changes_pooled_texts_too(
    tiny_sd3: dict[str, Path], tmp_path: Path, prefix: str
) -> None:
    """Pooled texts are in the modulation, which is kept."""
    layer = "text_model.encoder.layers.1.mlp.fc2"
    module = prefix + (layer.replace(".", "_") if prefix.endswith("_") else layer)
    path = tmp_path / "te.safetensors"
    save_file({f"{module}.lora_down.weight": torch.ones(1, 44), f"{module}.lora_up.weight": torch.ones(20, 1)}, path)
    asked = {**SIZE, "steps": 2, "guidance": 1.0, "seed": 7}
    with closing(qwenimg.load(tiny_sd3["medium"], "cpu", "fp32")) as pipe:
        plain, changed = pipe(PROMPT, **asked).latents, pipe(PROMPT, **asked, lora=path).latents
    with closing(qwenimg.load(tiny_sd3["medium"], "cpu", "fp32")) as fresh:
        assert np.array_equal(fresh(PROMPT, **asked, lora=path).latents, changed)
    assert relative(changed, plain) > 1e-3


def test_a_lora_of_another_model_is_refused(tiny_sd3: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"transformer.x.lora_A.weight": torch.ones(1, 4), "transformer.x.lora_B.weight": torch.ones(4, 1)}, path)
    with closing(qwenimg.load(tiny_sd3["sd3"], "cpu", "fp32")) as pipe, pytest.raises(ModelError, match="not a LoRA"):
        pipe(PROMPT, **SIZE, steps=1, lora=path)
