"""LoRAs of Flux transformers: random factors, and diffusers' converters as the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from qwenimg.common.networks.denoisers import flux_names

FLOAT32 = 1e-6  # relative L2 of a change of a weight
Tensors = dict[str, torch.Tensor]
Factors = dict[str, tuple[np.ndarray, np.ndarray]]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_diffusers(converter: str, tensors: Tensors) -> Factors:
    """Down and up of every layer, by diffusers' names."""
    from diffusers.loaders import lora_conversion_utils

    converted = getattr(lora_conversion_utils, converter)({key: value.clone() for key, value in tensors.items()})
    layers = {key.partition(".lora_")[0] for key in converted}
    return {
        layer.removeprefix("transformer."): tuple(
            converted[f"{layer}.lora_{side}.weight"].double().numpy() for side in "AB"
        )  # type: ignore[misc]
        for layer in layers
    }


def check_changes(changes: Any, expected: Factors) -> None:
    """Check that each weight's change, one of two factors, is that of `expected`, by its effect on a vector."""
    assert {name.removesuffix(".weight") for name in changes} == expected.keys()
    rng, worst = np.random.default_rng(0), 0.0
    for name, [one] in changes.items():
        (down, up), (theirs_down, theirs_up) = one.factors(), expected[name.removesuffix(".weight")]
        x = rng.standard_normal(down.shape[1])
        ours, theirs = up.astype(np.float64) @ (down @ x), theirs_up @ (theirs_down @ x)
        assert ours.shape == theirs.shape
        worst = max(worst, float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)))
    print(f"{len(changes)} weights: at most {worst:.1e} (limit {FLOAT32})")
    assert worst <= FLOAT32


def control_lora(seed: int = 9, *, rank: int = 3, strength: float = 0.05, **sizes: object) -> Tensors:
    """A LoRA by which tiny dev sees a control picture, in diffusers' names: every linear layer with a bias,
    `x_embedder` of twice the inputs, and weights of the norms of queries and keys."""
    from support.tiny_flux import tiny_dit

    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors: Tensors = {}
    model = tiny_dit(**sizes)
    for path, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            inputs = layer.in_features * (2 if path == "x_embedder" else 1)
            tensors[f"transformer.{path}.lora_A.weight"] = drawn(rank, inputs)
            tensors[f"transformer.{path}.lora_B.weight"] = drawn(layer.out_features, rank, scale=strength)
            tensors[f"transformer.{path}.lora_B.bias"] = drawn(layer.out_features, scale=2 * strength)
        elif path.rpartition(".")[2] in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            tensors[f"transformer.{path}.weight"] = 1 + drawn(*layer.weight.shape, scale=0.3)
    return tensors


def style_lora(seed: int = 3, rank: int = 2) -> Tensors:
    """A LoRA of dev's own sizes that changes `x_embedder` too."""
    generator = torch.Generator().manual_seed(seed)
    from support.tiny_flux import tiny_dit

    layers = [(path, one) for path, one in tiny_dit().named_modules() if isinstance(one, torch.nn.Linear)]
    tensors: Tensors = {}
    for path, layer in layers:
        if path == "x_embedder" or ".attn." in path:
            tensors[f"transformer.{path}.lora_A.weight"] = torch.randn(rank, layer.in_features, generator=generator)
            tensors[f"transformer.{path}.lora_B.weight"] = 0.1 * torch.randn(
                layer.out_features, rank, generator=generator
            )
    return tensors


def authors_control_lora(shapes: Mapping[str, tuple[int, ...]], rank: int) -> Tensors:
    """The same by its authors' names, as they publish it, for the shapes of FLUX.1 dev's transformer."""
    generator, tensors = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    layers: dict[str, list[int]] = {}
    for key in (key for key in shapes if key.endswith(".weight")):
        there = flux_names.place(key)
        path = there.key.removesuffix(".weight")
        if len(shapes[key]) == 1:
            tensors[there.key] = torch.randn(shapes[key], generator=generator)
            continue
        outputs, inputs = shapes[key]
        begin, end, of = there.rows
        layers[path] = [outputs * of // (end - begin), inputs * (2 if key == "x_embedder.weight" else 1)]
    for path, (outputs, inputs) in layers.items():
        tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
        tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
        tensors[f"{path}.lora_B.bias"] = torch.randn(outputs, generator=generator)
    return tensors
