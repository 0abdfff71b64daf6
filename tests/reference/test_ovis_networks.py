"""Ovis-Image's transformer: its manifest and its forward against diffusers' class, and against the same equations
written out in float64 from nothing but the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.flux_equations import Equations, Modulation, unit
from support.oracle_flux import exact_sinusoids
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_ovis import tiny_dit

from qwenimg import backends
from qwenimg.common.networks.denoisers import flux_conditioning, ovis_dit
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.timesteps import sinusoids
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-6  # relative L2 of a forward
SIGMAS = (1.0, 0.90625, 0.25)  # times of which float32 has every digit
ROWS, COLUMNS = 5, 3  # of the image, in tokens


class GatedEquations(Equations):
    def activated(self, x: torch.Tensor) -> torch.Tensor:
        values, gate = x.chunk(2, -1)
        return values * gate / (1 + torch.exp(-gate))


def positions(length: int) -> torch.Tensor:
    text = [(0, i, i) for i in range(length)]
    image = [(0, row, column) for row in range(ROWS) for column in range(COLUMNS)]
    return torch.tensor([*text, *image], dtype=torch.float64)


def modulation(equations: Equations, time: float) -> Modulation:
    """The vectors of one time, by the blocks' own layers."""
    config, linear, silu = equations.config, equations.linear, torch.nn.functional.silu
    features, embed = torch.from_numpy(sinusoids(time, 256)).double(), "timestep_embedder.linear_"
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer(tmp_path: Path, backend: str) -> None:
    model: Any = tiny_dit()
    model.save_pretrained(tmp_path)
    model.time_proj.forward = exact_sinusoids
    network, equations = ovis_dit.NETWORK, GatedEquations(model)
    part = open_component(network, tmp_path, read_config(network, tmp_path), "it")
    engine = backends.load(backend)
    ours = engine.open(part.network, part.config, part.stored(FP32), FP32)
    rng = np.random.default_rng(0)
    image = packing.pack(rng.standard_normal((1, 16, 2 * ROWS, 2 * COLUMNS)).astype(np.float32))
    img = torch.from_numpy(image[0]).double()
    features = flux_conditioning.time_rows([1000 * sigma for sigma in SIGMAS], "float32")
    made = ours.modulate(features, flux_conditioning.guidance_row(0.0, "float32"), [None])
    for length, pads in ((9, 0), (14, 5)):
        text, places = rng.standard_normal((1, length, 60)).astype(np.float32), positions(length)
        text[:, length - pads :] = 0
        normed = unit(torch.from_numpy(text[0]).double()) * equations.tensors["context_embedder_norm.weight"]
        condition = ours.condition(engine.array(text), [(ROWS, COLUMNS)])
        for row, sigma in enumerate(SIGMAS):
            result = np.asarray(engine.numpy(ours.predict(engine.array(image), (made, row), condition)))[0]
            expected = equations(img, normed, modulation(equations, 1000 * sigma), places).numpy()
            with torch.inference_mode():
                theirs = model(
                    torch.from_numpy(image), torch.from_numpy(text), torch.tensor([sigma]),
                    img_ids=places[length:], txt_ids=places[:length], return_dict=False,
                )[0][0].numpy()  # fmt: skip
            errors = [relative_float32(one, expected) for one in (result, theirs)]
            print(f"{backend} {length} {sigma}: ours {errors[0]:.1e}, diffusers {errors[1]:.1e} (limit {FLOAT32})")
            assert expected.std() > 0.1 and max(errors) <= FLOAT32


def test_the_published_size() -> None:
    from diffusers import OvisImageTransformer2DModel

    config = ovis_dit.OvisConfig()
    with torch.device("meta"):
        published = OvisImageTransformer2DModel()
    theirs = {ovis_dit.rename(name): tuple(value.shape) for name, value in published.state_dict().items()}
    ours = ovis_dit.NETWORK.manifest(config)
    assert theirs == ours
    # in bfloat16 44,080 bytes less than the published file, which has a header of 397 names
    assert sum(int(np.prod(shape)) for shape in ours.values()) == 7_370_449_728
    written = {**ovis_dit.NETWORK.written(config)}
    kept = {key: list(value) if isinstance(value, tuple) else value for key, value in written.items()}
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in published.config.items()
            if not key.startswith("_")} | {"_class_name": "OvisImageTransformer2DModel"} == kept  # fmt: skip
