"""Flux.1's transformer on both backends against diffusers, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.oracle_flux import exact_sinusoids
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_flux import tiny_dit

from qwenimg import backends
from qwenimg.common.networks.denoisers import flux_conditioning, flux_dit
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.timesteps import sinusoids
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-6  # relative L2 of a forward; measured at most 5e-7
VARIANTS = {"dev": {}, "schnell": {"guidance_embeds": False}}
SIGMAS = (1.0, 0.904531, 0.25)
GUIDANCE = 3.5


class Case:
    """A tiny model on one backend and in diffusers, an image of odd sides in tokens, and two texts."""

    def __init__(self, folder: Path, backend: str, **changes: Any):
        self.model = tiny_dit(**changes)
        self.model.save_pretrained(folder)
        self.model.time_text_embed.time_proj.forward = exact_sinusoids
        network = flux_dit.NETWORK
        part = open_component(network, folder, read_config(network, folder), "it")
        self.config = part.config
        self.engine = backends.load(backend)
        self.ours = self.engine.open(part.network, part.config, part.stored(FP32), FP32)
        rng = np.random.default_rng(0)
        self.h, self.w = 10, 6
        self.latents = rng.standard_normal((1, part.config.in_channels // 4, self.h, self.w)).astype(np.float32)
        self.texts = [rng.standard_normal((1, length, 60)).astype(np.float32) for length in (9, 14)]
        self.pooled = [rng.standard_normal((1, 26)).astype(np.float32) for _ in self.texts]

    def theirs(self, branch: int, sigma: float) -> np.ndarray:
        from diffusers import FluxPipeline

        tokens = packing.pack(self.latents)
        ids = FluxPipeline._prepare_latent_image_ids(1, self.h // 2, self.w // 2, "cpu", torch.float32)
        guidance = torch.tensor([GUIDANCE]) if self.config.guidance_embeds else None
        with torch.inference_mode():
            return self.model(
                hidden_states=torch.from_numpy(tokens),
                encoder_hidden_states=torch.from_numpy(self.texts[branch]),
                pooled_projections=torch.from_numpy(self.pooled[branch]),
                timestep=torch.tensor([sigma]),
                img_ids=ids,
                txt_ids=torch.zeros(self.texts[branch].shape[1], 3),
                guidance=guidance,
            ).sample.numpy()

    def errors(self) -> list[float]:
        """Relative errors of both texts at all noise levels; the rows of one modulation."""
        array = self.engine.array
        features = flux_conditioning.time_rows([1000 * sigma for sigma in SIGMAS], "float32")
        guidance = flux_conditioning.guidance_row(GUIDANCE, "float32")
        modulation = self.ours.modulate(features, guidance, [array(text) for text in self.pooled])
        errors = []
        for branch, text in enumerate(self.texts):
            condition = self.ours.condition(array(text), [(self.h // 2, self.w // 2)])
            for i, sigma in enumerate(SIGMAS):
                row = branch * len(SIGMAS) + i
                result = self.ours.predict(array(packing.pack(self.latents)), (modulation, row), condition)
                expected = self.theirs(branch, sigma)
                assert expected.std() > 0.1
                errors.append(relative_float32(np.asarray(self.engine.numpy(result)), expected))
        return errors


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sample(3)
def test_transformer(tmp_path: Path, backend: str, variant: str) -> None:
    errors = Case(tmp_path, backend, **VARIANTS[variant]).errors()
    print(f"{backend} {variant}: {', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT32})")
    assert max(errors) <= FLOAT32


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_channels_in_than_out(tmp_path: Path, backend: str) -> None:
    errors = Case(tmp_path, backend, in_channels=384, out_channels=64).errors()
    print(f"{backend} fill: {', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT32})")
    assert max(errors) <= FLOAT32


Patch = Callable[[pytest.MonkeyPatch, Any], None]


def halves_of_the_final_norm_swapped(patch: pytest.MonkeyPatch, ops: Any) -> None:
    chunks = ops.chunks
    patch.setattr(ops, "chunks", lambda x, n, index: chunks(x, n, index)[:: -1 if n == 2 else 1])


def image_before_text(patch: pytest.MonkeyPatch, ops: Any) -> None:
    joined = ops.joined
    patch.setattr(ops, "joined", lambda first, second, dtype: joined(second, first, dtype))


def gelu_by_the_error_function(patch: pytest.MonkeyPatch, ops: Any) -> None:
    patch.setattr(ops, "linear_gelu", lambda layer, x: ops.gelu_erf(layer(x)))


def guidance_not_times_1000(patch: pytest.MonkeyPatch, ops: Any) -> None:
    row = flux_conditioning.guidance_row
    patch.setattr(flux_conditioning, "guidance_row", lambda guidance, dtype: row(guidance / 1000, dtype))


def time_not_times_1000(patch: pytest.MonkeyPatch, ops: Any) -> None:
    rows = flux_conditioning.time_rows
    patch.setattr(flux_conditioning, "time_rows", lambda times, dtype: rows([t / 1000 for t in times], dtype))


FAULTS = (
    halves_of_the_final_norm_swapped,
    image_before_text,
    gelu_by_the_error_function,
    guidance_not_times_1000,
    time_not_times_1000,
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.sample(3)
def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, fault: Patch) -> None:
    case = Case(tmp_path, backend)
    name = "torch" if backend == "cpu" else "mlx"
    fault(monkeypatch, __import__(f"qwenimg.backends.{name}.ops", fromlist=["ops"]))
    errors = case.errors()
    print(f"{backend} {fault.__name__}: {min(errors):.1e}")
    assert min(errors) > 20 * FLOAT32


def test_the_modulation_is_freed(tmp_path: Path) -> None:
    """Its weights, a quarter of the model, are in memory only while it is made."""
    case = Case(tmp_path, "cpu")
    case.errors()
    once = {name for name in flux_dit.manifest(case.config) if flux_dit.is_modulation(name)}
    assert {name for name, value in case.ours.model.named_parameters() if value.is_meta} == once
    share = sum(value.numel() for name, value in case.ours.model.named_parameters() if name in once)
    print(f"modulation: {share / sum(value.numel() for value in case.ours.model.parameters()):.0%} of the tiny model")


def test_the_published_size() -> None:
    config = flux_dit.FluxConfig(guidance_embeds=True)
    manifest = flux_dit.manifest(config)
    sizes = {name: int(np.prod(shape)) for name, shape in manifest.items()}
    once = sum(size for name, size in sizes.items() if flux_dit.is_modulation(name))
    assert (len(manifest), round(sum(sizes.values()) / 1e4), round(once / 1e6)) == (1160, 1190141, 3280)


def test_half_precision_rounds_as_diffusers_does() -> None:
    """diffusers makes both numbers in the transformer's dtype: 3504 for a guidance of 3.5 in bfloat16."""
    for sigma, seen in ((0.904531, 904), (0.759511, 760), (0.512844, 512), (1.0, 1000)):
        time = torch.tensor([1000 * sigma]).to(torch.bfloat16) / 1000
        assert float(time.to(torch.bfloat16) * 1000) == seen
        assert np.array_equal(flux_conditioning.time_rows([1000 * sigma], "bfloat16")[0], sinusoids(seen, 256))
    assert float(torch.tensor([3.5]).to(torch.bfloat16) * 1000) == 3504
    assert np.array_equal(flux_conditioning.guidance_row(3.5, "bfloat16")[0], sinusoids(3504, 256))
    assert np.array_equal(flux_conditioning.guidance_row(3.5, "float32")[0], sinusoids(3500, 256))


def test_manifest_is_that_of_the_reference(tmp_path: Path) -> None:
    for name, changes in VARIANTS.items():
        model = tiny_dit(**changes)
        model.save_pretrained(tmp_path / name)
        config = read_config(flux_dit.NETWORK, tmp_path / name)
        assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == flux_dit.manifest(config)
