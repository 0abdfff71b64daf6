"""ERNIE-Image's transformer and text encoder on both backends against diffusers and transformers, in float32, and the
forward written again in float64 against diffusers' class."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.oracle_ernie import exact
from support.policies import FP32
from support.relative import relative, relative_float32
from support.tiny_ernie import tiny_dit, tiny_text_encoder

from qwenimg import backends
from qwenimg.common.families.ernie.checkpoint import NETWORKS
from qwenimg.common.networks.denoisers import ernie_conditioning, ernie_dit
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-6  # relative L2 of a forward; measured at most 4e-7
FLOAT64 = 1e-6  # of float32 to float64
TEXT = 2e-6  # relative L2 of the text encoder's states
FAULT = 1e-3  # the least that a fault changes, relative L2
CASES = [
    # rows and columns of the image; tokens of text; timestep
    ((5, 3), 13, 1000.0),
    ((4, 8), 32, 625.5),
    ((1, 7), 1, 12.25),
]


class Inputs:
    def __init__(self, grid: tuple[int, int], length: int, timestep: float, states: int = 60):
        rng = np.random.default_rng(length)
        self.grid, self.timestep = grid, timestep
        self.tokens = rng.standard_normal((1, grid[0] * grid[1], 32)).astype(np.float32)
        self.text = rng.standard_normal((1, length, states)).astype(np.float32)

    def theirs(self, model: Any, longer: int = 0) -> np.ndarray:
        """diffusers' prediction as tokens. longer: so many pads behind the text, which it masks."""
        image = torch.from_numpy(self.tokens).transpose(1, 2).unflatten(2, self.grid)
        with torch.inference_mode():
            made = model(
                hidden_states=image,
                timestep=torch.tensor([self.timestep]),
                text_bth=F.pad(torch.from_numpy(self.text), (0, 0, 0, longer)),
                text_lens=torch.tensor([self.text.shape[1]]),
                return_dict=False,
            )[0]
        return made.flatten(2).transpose(1, 2).numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("states", [60, 66])
@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer(tmp_path: Path, backend: str, states: int) -> None:
    """Text states of the stream's width go in without a layer."""
    model = exact(tiny_dit(text_in_dim=states))
    model.save_pretrained(tmp_path)
    part = open_component(ernie_dit.NETWORK, tmp_path, read_config(ernie_dit.NETWORK, tmp_path), "transformer")
    engine = backends.load(backend)
    ours = engine.open(part.network, part.config, part.stored(FP32), FP32)
    errors = []
    for case in CASES:
        inputs = Inputs(*case, states)
        row = ernie_conditioning.time_row(part.config, inputs.timestep)
        condition = ours.condition(engine.array(inputs.text), inputs.grid)
        result = np.asarray(engine.numpy(ours.predict(engine.array(inputs.tokens), row, condition)))
        errors.append(relative_float32(result, inputs.theirs(model)))
    print(f"{backend}, {states} states: {', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT32})")
    assert max(errors) <= FLOAT32


# The forward in float64, by the equations alone


class Equations:
    def __init__(self, model: Any, inputs: Inputs):
        self.w = {name: value.double() for name, value in model.state_dict().items()}
        self.c, self.inputs = model.config, inputs

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.w.get(f"{name}.bias")
        return x @ self.w[f"{name}.weight"].flatten(1).T + (0 if bias is None else bias)

    def rms(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c.eps) * self.w[f"{name}.weight"]

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T H D]: channel j and channel j + D/2 are a pair; each turns by the angle of its own number, and each
        angle is that of two numbers."""
        angles = []
        for axis, width in enumerate(self.c.rope_axes_dim):
            for i in range(0, width, 2):
                angle = positions[:, axis] * self.c.rope_theta ** -(i / width)
                angles += [angle, angle]
        half, out = x.shape[-1] // 2, torch.empty_like(x)
        for j in range(half):
            low, high = x[..., j], x[..., j + half]
            a, b = angles[j][:, None], angles[j + half][:, None]
            out[..., j] = low * torch.cos(a) - high * torch.sin(a)
            out[..., j + half] = high * torch.cos(b) + low * torch.sin(b)
        return out

    def attention(self, name: str, y: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.linear(f"{name}.to_{x}", y).unflatten(-1, (self.c.num_attention_heads, -1)) for x in "qkv")
        q, k = (self.turned(self.rms(f"{name}.norm_{x}", one), positions) for x, one in (("q", q), ("k", k)))
        scores = torch.einsum("lhd,shd->hls", q, k) / q.shape[-1] ** 0.5
        return self.linear(f"{name}.to_out.0", torch.einsum("hls,shd->lhd", scores.softmax(-1), v).flatten(1))

    def __call__(self) -> np.ndarray:
        image, text = (torch.from_numpy(one)[0].double() for one in (self.inputs.tokens, self.inputs.text))
        length, width = len(text), self.c.hidden_size
        rates = torch.exp(-np.log(10000.0) * torch.arange(width // 2).double() / (width // 2))
        angles = self.inputs.timestep * rates
        row = torch.cat((torch.sin(angles), torch.cos(angles)))[None]
        temb = self.linear("time_embedding.linear_2", F.silu(self.linear("time_embedding.linear_1", row)))
        mods = self.linear("adaLN_modulation.1", F.silu(temb)).chunk(6, dim=-1)
        x = torch.cat((self.linear("x_embedder.proj", image), self.linear("text_proj", text)))
        places = [(length, r, c) for r in range(self.inputs.grid[0]) for c in range(self.inputs.grid[1])]
        positions = torch.tensor([*places, *((t, 0, 0) for t in range(length))]).double()
        for i in range(self.c.num_layers):
            shift, scale, gate, shift2, scale2, gate2 = mods
            y = self.rms(f"layers.{i}.adaLN_sa_ln", x) * (1 + scale) + shift
            x = x + gate * self.attention(f"layers.{i}.self_attention", y, positions)
            y = self.rms(f"layers.{i}.adaLN_mlp_ln", x) * (1 + scale2) + shift2
            g = self.linear(f"layers.{i}.mlp.gate_proj", y)
            g = g * 0.5 * (1 + torch.erf(g / 2**0.5))
            x = x + gate2 * self.linear(f"layers.{i}.mlp.linear_fc2", g * self.linear(f"layers.{i}.mlp.up_proj", y))
        scale, shift = self.linear("final_norm.linear", temb).chunk(2, dim=-1)
        x = x[: len(image)] - x[: len(image)].mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c.eps) * (1 + scale) + shift
        return self.linear("final_linear", x)[None].numpy()  # type: ignore[no-any-return]


def test_the_class_in_float64() -> None:
    """Pads, which diffusers has where it computes two texts at once, change nothing."""
    model = exact(tiny_dit())
    errors, padded = [], []
    for inputs in (Inputs(*case) for case in CASES):
        right = Equations(model, inputs)()
        errors.append(relative(inputs.theirs(model), right))
        padded.append(relative(inputs.theirs(model, longer=9), right))
    print(f"{', '.join(f'{error:.1e}' for error in [*errors, *padded])} (limit {FLOAT64})")
    assert max(errors + padded) <= FLOAT64


def test_a_fault_is_seen() -> None:
    """The place of the image behind the text, its rows and columns, and the time each change the forward."""
    model = exact(tiny_dit())
    inputs = Inputs(*CASES[1])
    right, changes = inputs.theirs(model), []
    for name, value in (("timestep", 600.0), ("grid", (8, 4)), ("text", inputs.text[:, :31])):
        wrong = Inputs(*CASES[1])
        setattr(wrong, name, value)
        changes.append(relative(Equations(model, wrong)(), right))
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > FAULT


def test_published_sizes() -> None:
    """Golden numbers and names: of the reference class on the meta device."""
    from diffusers import ErnieImageTransformer2DModel

    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 36, "ffn_hidden_size": 12288}
    with torch.device("meta"):
        made = ErnieImageTransformer2DModel(**sizes, text_in_dim=3072)
    theirs = {name: tuple(value.shape) for name, value in made.state_dict().items()}
    manifest = ernie_dit.manifest(ernie_dit.ErnieConfig())
    assert manifest == theirs and (sum(map(prod, manifest.values())), len(manifest)) == (8_033_490_048, 409)


# The text encoder


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_text_encoder(tmp_path: Path, backend: str, kind: str) -> None:
    """States are those in front of the last layer, which no file has to hold, nor the vision tower."""
    model, network = tiny_text_encoder(kind=kind), NETWORKS["text_encoder"]
    model.save_pretrained(tmp_path)
    part = open_component(network, tmp_path, read_config(network, tmp_path), "text_encoder")
    engine, ids = backends.load(backend), np.random.default_rng(5).integers(0, 700, 23).tolist()
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states

    def encoded(config: Any) -> np.ndarray:
        ours = engine.open(part.network, config, part.stored(FP32), FP32)
        return np.asarray(engine.numpy(ours.encode(ids)))

    made = encoded(part.config)
    before, right, after = (relative(made, one.numpy()) for one in states[-3:])
    unscaled = relative(encoded(replace(part.config, rope_type="default")), states[-2].numpy())
    print(
        f"{backend}, {kind}: {right:.1e} (limit {TEXT}); of other layers {before:.1e}, {after:.1e}, RoPE {unscaled:.1e}"
    )
    assert right <= TEXT and min(before, after, unscaled) > FAULT
