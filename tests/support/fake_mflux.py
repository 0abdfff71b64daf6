"""A stand-in for mflux 0.24: the names that `mflux_arm.py` imports, over diffusers' transformer on torch.

`Fake.install` writes it as a package. What it is to do is in the environment, since it runs in a process of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qwenimg.common.numbers import packing
from support.rules import ROOT

MODULES = {
    "mflux.models.common.config": "ModelConfig",
    "mflux.models.common.weights.mapping.weight_mapper": "WeightMapper",
    "mflux.models.qwen.latent_creator.qwen_latent_creator": "QwenLatentCreator",
    "mflux.models.qwen.model.qwen_transformer.qwen_transformer": "QwenTransformer",
    "mflux.models.qwen.model.qwen_vae.qwen_vae": "QwenVAE",
    "mflux.models.qwen.variants.txt2img.qwen_image": "QwenImage",
    "mflux.models.qwen.weights.qwen_weight_mapping": "QwenWeightMapping",
}
ABOUT = "Metadata-Version: 2.1\nName: mflux\nVersion: 0.24.0\n"
BLAS = "libtorch_cpu.so"  # before MLX's own, see `frameworks`


@dataclass(frozen=True, kw_only=True)
class Fake:
    """What one run of it does."""

    folder: str  # of the model, whose widths it takes
    seen: str = ""  # a folder, where it writes what each call of the transformer is given
    gain: float = 1.0  # of the velocity: where it is not 1, a planted difference
    computes: bool = True  # else the velocity is the latents, at once

    def install(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts the package into `place`, where processes that this one starts find it."""
        import torch

        for module, name in MODULES.items():
            file = place.joinpath(*module.split(".")).with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"from support.fake_mflux import {name}\n")
        (place / "mflux-0.24.0.dist-info").mkdir()
        (place / "mflux-0.24.0.dist-info" / "METADATA").write_text(ABOUT)
        path = [place, ROOT / "src", ROOT / "tests", *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, path)))
        monkeypatch.setenv("FAKE_MFLUX", json.dumps(asdict(self)))
        fast = Path(torch.__file__).parent / "lib" / BLAS
        if fast.exists():
            monkeypatch.setenv("LD_PRELOAD", str(fast))


def _fake() -> Fake:
    return Fake(**json.loads(os.environ["FAKE_MFLUX"]))


def _described(part: str) -> dict[str, Any]:
    """Its config.json without what is no field of ours."""
    found: dict[str, Any] = json.loads((Path(_fake().folder) / part / "config.json").read_text())
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items() if not name.startswith("_")}


class ModelConfig:
    precision = mx.bfloat16


class WeightMapper:
    @staticmethod
    def apply_mapping(stored: Mapping[str, Any], mapping: object, num_blocks: int | None = None) -> dict[str, Any]:
        return dict(stored)


class QwenWeightMapping:
    @staticmethod
    def get_transformer_mapping() -> list[object]:
        return []

    get_vae_mapping = get_transformer_mapping


class QwenLatentCreator:
    @staticmethod
    def pack_latents(latents: mx.array, height: int, width: int) -> mx.array:
        return mx.array(packing.pack(np.array(latents)))

    @staticmethod
    def unpack_latents(latents: mx.array, height: int, width: int) -> mx.array:
        return mx.array(packing.unpack(np.array(latents), height // 8, width // 8))


class _Network:
    """Of a manifest; its values are there once they are given."""

    def __init__(self, manifest: Mapping[str, tuple[int, ...]]):
        self._values = {name: mx.broadcast_to(mx.array(0.0), shape) for name, shape in manifest.items()}
        assert all(value.size == prod(manifest[name]) for name, value in self._values.items())

    def parameters(self) -> dict[str, mx.array]:
        return self._values

    def update(self, values: dict[str, mx.array]) -> None:
        self._values = values


class QwenVAE(_Network):
    def __init__(self) -> None:
        from qwenimg.common.networks.vaes import qwen_vae

        super().__init__(qwen_vae.manifest(qwen_vae.QwenVAEConfig(**_described("vae"))))

    def decode(self, latents: mx.array) -> mx.array:
        return latents


class QwenTransformer(_Network):
    def __init__(self, num_layers: int):
        from qwenimg.common.networks.denoisers import qwen_dit

        self.config = _described("transformer")
        assert num_layers == self.config["num_layers"]
        super().__init__(qwen_dit.manifest(qwen_dit.QwenDiTConfig(**self.config)))
        self.calls, self.model = 0, None

    def update(self, values: dict[str, mx.array]) -> None:
        super().update(values)
        if _fake().computes:
            self.model = self._opened(values)

    def _opened(self, values: dict[str, mx.array]) -> Any:
        import torch
        from diffusers import QwenImageTransformer2DModel

        torch.nn.Linear.reset_parameters = lambda self: None  # its weights come from the file
        model = QwenImageTransformer2DModel(**self.config)
        weights = {name: torch.from_numpy(np.array(value.astype(mx.float32))) for name, value in values.items()}
        model.load_state_dict(weights, strict=True)
        return model.requires_grad_(False)

    def __call__(self, t: int, config: Any, hidden: mx.array, text: mx.array, mask: mx.array) -> mx.array:
        fake, sigmas = _fake(), config.scheduler.sigmas
        assert mask.shape == text.shape[:2] and mask.min() == 1
        arrays = {"hidden": np.array(hidden), "text": np.array(text.astype(mx.float32))}
        if fake.seen:
            np.savez(Path(fake.seen) / f"{self.calls:03}.npz", t=t, sigmas=sigmas, **arrays)
        self.calls += 1
        return fake.gain * (self._computed(config, sigmas[t], **arrays) if self.model else hidden)

    def _computed(self, config: Any, sigma: float, hidden: np.ndarray, text: np.ndarray) -> mx.array:
        import torch

        found = self.model(
            hidden_states=torch.from_numpy(hidden),
            encoder_hidden_states=torch.from_numpy(text),
            encoder_hidden_states_mask=None,
            timestep=torch.tensor([sigma]),
            img_shapes=[[(1, config.height // 16, config.width // 16)]],
            return_dict=False,
        )[0]
        return mx.array(found.numpy())


class QwenImage:
    @staticmethod
    def compute_guided_noise(noise: mx.array, negative: mx.array, guidance: float) -> mx.array:
        """Guidance that keeps the norm of each token, as diffusers has it."""
        guided = negative + guidance * (noise - negative)
        return guided * (mx.linalg.norm(noise, axis=-1, keepdims=True) / mx.linalg.norm(guided, axis=-1, keepdims=True))
