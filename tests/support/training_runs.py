"""What tests of several rooms share of `test_training`."""

from __future__ import annotations

from pathlib import Path

from training.config import RATES, ModelSize, ShapesConfig

SIZE = ModelSize(
    vae_base=6,
    heads=3,
    rope_axes=(4, 4, 4),
    layers=2,
    text_hidden=32,
    text_intermediate=48,
    text_heads=4,
    text_layers=1,
)


def options(stage: str, out: Path, **changes: object) -> ShapesConfig:
    toy = {
        "rate": RATES[stage],
        "steps": 200,
        "batch": 4,
        "sizes": ((32, 48), (48, 32)),
        "save_every": 1000,
        "size": SIZE,
    }
    return ShapesConfig(stage=stage, out=out, **{"precision": "fp32", **toy, **changes})
