"""Chroma's transformer: its manifest and its forward against diffusers' class, and against the same equations written
out in float64 from nothing but the tensors; and T5 with padding that it does not see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_chroma
from support.flux_equations import Equations, Modulation, unit
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_chroma import tiny_dit
from support.tiny_t5 import tiny_t5

from qwenimg import backends
from qwenimg.common.networks.denoisers import chroma_conditioning, chroma_dit
from qwenimg.common.networks.encoders import t5
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.timesteps import sinusoids
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-6  # relative L2 of a forward
SIGMAS = (1.0, 0.90625, 0.25)  # times of which float32 has every digit
ROWS, COLUMNS = 5, 3


def modulation(equations: Equations, numbers: torch.Tensor, time: float) -> Modulation:
    """The vectors of one time, by the approximator. numbers: the class's sinusoids of the vectors' numbers."""
    config, linear, at = equations.config, equations.linear, "distilled_guidance_layer."
    both = torch.from_numpy(np.concatenate([sinusoids(time, 16), sinusoids(0.0, 16)]))
    x = linear(f"{at}in_proj", torch.cat([both.expand(len(numbers), -1), numbers.double()], -1))
    for i in range(config.approximator_layers):
        inner = linear(f"{at}layers.{i}.linear_1", unit(x, 2.0**-23) * equations.tensors[f"{at}norms.{i}.weight"])
        x = x + linear(f"{at}layers.{i}.linear_2", torch.nn.functional.silu(inner))
    vectors = list(linear(f"{at}out_proj", x))
    single, double = config.num_single_layers, config.num_layers
    text = 3 * single + 6 * double
    return Modulation(
        double=[(vectors[3 * single + 6 * i :][:6], vectors[text + 6 * i :][:6]) for i in range(double)],
        single=[vectors[3 * i : 3 * i + 3] for i in range(single)],
        head=vectors[-2:],
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer(tmp_path: Path, backend: str) -> None:
    model: Any = tiny_dit()
    model.save_pretrained(tmp_path)
    oracle_chroma.exact(model)
    network, equations = chroma_dit.NETWORK, Equations(model)
    part = open_component(network, tmp_path, read_config(network, tmp_path), "it")
    engine = backends.load(backend)
    ours = engine.open(part.network, part.config, part.stored(FP32), FP32)
    rng = np.random.default_rng(0)
    image = packing.pack(rng.standard_normal((1, 16, 2 * ROWS, 2 * COLUMNS)).astype(np.float32))
    seen = [(0, r, c) for r in range(ROWS) for c in range(COLUMNS)]
    made = ours.modulate(chroma_conditioning.features(part.config, [1000 * sigma for sigma in SIGMAS], "float32"))
    for length in (9, 14):
        text = rng.standard_normal((1, length, 60)).astype(np.float32)
        places = torch.tensor([(0, 0, 0)] * length + seen, dtype=torch.float64)
        condition = ours.condition(engine.array(text), [(ROWS, COLUMNS)])
        for row, sigma in enumerate(SIGMAS):
            result = np.asarray(engine.numpy(ours.predict(engine.array(image), (made, row), condition)))[0]
            rows = modulation(equations, model.time_text_embed.mod_proj, 1000 * sigma)
            img, txt = (torch.from_numpy(x[0]).double() for x in (image, text))
            expected = equations(img, txt, rows, places).numpy()
            with torch.inference_mode():
                theirs = model(
                    hidden_states=torch.from_numpy(image), encoder_hidden_states=torch.from_numpy(text),
                    timestep=torch.tensor([sigma]), txt_ids=places[:length], img_ids=places[length:],
                    return_dict=False,
                )[0][0].numpy()  # fmt: skip
            errors = [relative_float32(one, expected) for one in (result, theirs)]
            print(f"{backend} {length} {sigma}: ours {errors[0]:.1e}, diffusers {errors[1]:.1e} (limit {FLOAT32})")
            assert expected.std() > 0.1 and max(errors) <= FLOAT32


def test_the_numbers_of_vectors_are_those_of_the_class() -> None:
    """Also at the published size, where angles are rounded to float32."""
    from diffusers.models.transformers.transformer_chroma import ChromaCombinedTimestepTextProjEmbeddings

    config = chroma_dit.ChromaConfig()
    ours = chroma_conditioning.features(config, [0.0], "float32")[0, :, 32:]
    theirs = ChromaCombinedTimestepTextProjEmbeddings(16, config.vectors).mod_proj.numpy()
    print(f"{config.vectors} vectors: {np.abs(ours - theirs).max():.1e} apart")
    assert theirs.shape == (344, 32) and np.abs(ours - theirs).max() <= 1e-6


def test_the_published_size() -> None:
    from diffusers import ChromaTransformer2DModel

    config = chroma_dit.ChromaConfig()
    with torch.device("meta"):
        published = ChromaTransformer2DModel()
    stored = {name: tuple(value.shape) for name, value in published.state_dict().items()}
    assert stored == chroma_dit.manifest(config)
    assert round(sum(int(np.prod(shape)) for shape in stored.values()) / 1e6) == 8900


@pytest.mark.parametrize("backend", BACKENDS)
def test_t5_does_not_see_padding(tmp_path: Path, backend: str) -> None:
    model: Any = tiny_t5()
    model.save_pretrained(tmp_path)
    part = open_component(t5.NETWORK, tmp_path, read_config(t5.NETWORK, tmp_path), "it")
    engine = backends.load(backend)
    encoder = engine.open(part.network, part.config, part.stored(FP32), FP32)
    ids = [5, 9, 3, 12, 1, 0]
    with torch.inference_mode():
        mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
        expected = model(input_ids=torch.tensor([ids]), attention_mask=mask)[0].numpy()
    error = relative_float32(np.asarray(engine.numpy(encoder.encode(ids, 1))), expected)
    seen = relative_float32(np.asarray(engine.numpy(encoder.encode(ids))), expected)
    print(f"{backend}: {error:.1e} (limit {FLOAT32}); with padding that is seen {seen:.1e}")
    assert error <= FLOAT32 < seen
