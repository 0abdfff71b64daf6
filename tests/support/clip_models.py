"""Our CLIP on each backend with numpy outside, made from a folder of transformers."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwenimg.common.base.config import parse, read_json
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.parity import parity
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import LoadPlan
from support.parity_cases import MLX, TORCH, Twin
from support.policies import FP32

BACKENDS = {"torch": TORCH, "MLX": MLX}
# Relative L2. Measured at most 6e-7 in float32 and 4e-16 in float64: sums in another order over five layers.
FLOAT32, FLOAT64 = 5e-6, 1e-14


def opened(folder: Path) -> tuple[CLIPConfig, LoadPlan]:
    config = parse(CLIPConfig, clip.text_fields(read_json(folder / "config.json")), source=folder / "config.json")
    return config, keys.plan(folder, "text_encoder", clip.manifest(config), rename=clip.rename)


def model_on(twin: Twin, folder: Path, dtype: str, stream: str) -> Any:
    """Our model with the folder's weights."""
    config, plan = opened(folder)
    module = importlib.import_module(f"qwenimg.backends.{twin.name}.networks.encoders.clip")
    model = twin.load.empty(lambda: module.CLIPTextEncoder(config, twin.nn.DTYPES[stream]))
    device = [torch.device("cpu")] if twin.name == "torch" else []
    twin.load.fill(model, plan.stored(replace(FP32, text=dtype)), *device)
    plan.close()
    return model


def run(twin: Twin, model: Any, config: CLIPConfig, ids: np.ndarray, *how: Any) -> list[parity.Output]:
    """(states, pooled) of ids [B S]."""
    ends = [clip.eos_position(config, row.tolist()) for row in ids]
    if twin.name == "torch":
        with torch.inference_mode():
            made = model(torch.from_numpy(ids), ends, *how)
    else:
        import mlx.core as mx

        made = model(mx.array(ids.astype(np.int32)), ends, *how)
    if made[0].dtype == getattr(torch, "float64", None):
        return [parity.Output(values=part.numpy(), dtype="float64") for part in made]
    return [twin.output(part) for part in made]


def relative(ours: np.ndarray, theirs: torch.Tensor) -> float:
    expected = theirs.double().numpy()
    assert ours.shape == expected.shape and np.isfinite(ours).all() and expected.std() > 0.1
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))
