"""LongCat-Image's transformer: its manifest and its forward against diffusers' class, and against the same equations
written out in float64 from nothing but the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.flux_equations import Equations, Modulation
from support.oracle_flux import exact_sinusoids
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_longcat import tiny_dit

from qwenimg import backends
from qwenimg.common.networks.denoisers import flux_conditioning, longcat_dit
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.timesteps import sinusoids
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-6  # relative L2 of a forward
SIGMAS = (1.0, 0.90625, 0.25)  # times of which float32 has every digit
GRIDS = [(5, 3), (3, 4)]  # of the image and of a reference, in tokens


def positions(length: int) -> torch.Tensor:
    text = [(0, i, i) for i in range(length)]
    seen = [(1 + k, length + r, length + c) for k, (rows, columns) in enumerate(GRIDS) for r in range(rows)
            for c in range(columns)]  # fmt: skip
    return torch.tensor([*text, *seen], dtype=torch.float64)


def modulation(equations: Equations, time: float) -> Modulation:
    """The vectors of one time, by the blocks' own layers."""
    config, linear, silu = equations.config, equations.linear, torch.nn.functional.silu
    features, embed = torch.from_numpy(sinusoids(time, 256)).double(), "time_embed.timestep_embedder.linear_"
    temb = silu(linear(f"{embed}2", silu(linear(f"{embed}1", features))))
    blocks = (f"transformer_blocks.{i}." for i in range(config.num_layers))
    singles = (f"single_transformer_blocks.{i}.norm.linear" for i in range(config.num_single_layers))
    scale, shift = linear("norm_out.linear", temb).chunk(2)
    return Modulation(
        double=[
            (linear(f"{at}norm1.linear", temb).chunk(6), linear(f"{at}norm1_context.linear", temb).chunk(6))
            for at in blocks
        ],
        single=[linear(name, temb).chunk(3) for name in singles],
        head=(shift, scale),
    )


def theirs(model: Any, img: torch.Tensor, txt: torch.Tensor, sigma: float, places: torch.Tensor) -> torch.Tensor:
    length = txt.shape[0]
    with torch.inference_mode():
        return model(
            hidden_states=img[None].float(),
            encoder_hidden_states=txt[None].float(),
            timestep=torch.tensor([sigma]),
            txt_ids=places[:length],
            img_ids=places[length:],
            return_dict=False,
        )[0][0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer(tmp_path: Path, backend: str) -> None:
    model = tiny_dit()
    model.save_pretrained(tmp_path)
    model.time_embed.time_proj.forward = exact_sinusoids
    network, equations = longcat_dit.NETWORK, Equations(model)
    part = open_component(network, tmp_path, read_config(network, tmp_path), "it")
    engine = backends.load(backend)
    ours = engine.open(part.network, part.config, part.stored(FP32), FP32)
    rng = np.random.default_rng(0)
    latents = [rng.standard_normal((1, 16, 2 * h, 2 * w)).astype(np.float32) for h, w in GRIDS]
    image, reference = (packing.pack(one) for one in latents)
    features = flux_conditioning.time_rows([1000 * sigma for sigma in SIGMAS], "float32")
    made = ours.modulate(features, flux_conditioning.guidance_row(0.0, "float32"), [None])
    for length in (9, 14):
        text, places = rng.standard_normal((1, length, 60)).astype(np.float32), positions(length)
        img, txt = (torch.from_numpy(x[0]).double() for x in (np.concatenate([image, reference], 1), text))
        condition = ours.condition(engine.array(text), GRIDS, [engine.array(reference)])
        for row, sigma in enumerate(SIGMAS):
            result = np.asarray(engine.numpy(ours.predict(engine.array(image), (made, row), condition)))[0]
            expected = equations(img, txt, modulation(equations, 1000 * sigma), places)[: image.shape[1]].numpy()
            reference_class = theirs(model, img, txt, sigma, places)[: image.shape[1]].numpy()
            errors = [relative_float32(one, expected) for one in (result, reference_class)]
            print(f"{backend} {length} {sigma}: ours {errors[0]:.1e}, diffusers {errors[1]:.1e} (limit {FLOAT32})")
            assert expected.std() > 0.1 and max(errors) <= FLOAT32


def test_the_published_size() -> None:
    from diffusers import LongCatImageTransformer2DModel

    config = longcat_dit.LongCatConfig()
    with torch.device("meta"):
        published = LongCatImageTransformer2DModel(num_layers=10, num_single_layers=20)
    stored = {longcat_dit.rename(name): tuple(value.shape) for name, value in published.state_dict().items()}
    assert stored == longcat_dit.NETWORK.manifest(config)
    assert round(sum(int(np.prod(shape)) for shape in stored.values()) / 1e6) == 6271
    written = {**longcat_dit.NETWORK.written(config)}
    kept = {key: list(value) if isinstance(value, tuple) else value for key, value in written.items()}
    assert {key: value for key, value in published.config.items() if not key.startswith("_")} | {
        "_class_name": "LongCatImageTransformer2DModel"
    } == kept
