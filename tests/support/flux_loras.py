"""LoRAs of Flux transformers: random factors, and diffusers' converters as the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

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
