"""Krea 2's transformer on both backends against diffusers, in float32, and the forward written again in float64 against
diffusers' class."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.oracle_krea2 import exact
from support.policies import FP32
from support.relative import relative, relative_float32
from support.tiny_krea2 import DIT, tiny_dit, transformer_file

from qwenimg import backends
from qwenimg.common.networks.denoisers import krea2_conditioning, krea2_dit
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-6  # relative L2 of a forward; measured at most 8e-7
FLOAT64 = 1e-6  # of float32 to float64; measured at most 7e-7
FAULT = 1e-3  # the least that a fault changes, relative L2
CASES = [
    # rows and columns of the image; tokens of text; time
    ((5, 3), 13, 1.0),
    ((4, 8), 32, 0.625),
    ((1, 7), 1, 0.015625),
]
LAYERS, WIDTH = 12, 60  # of the text states


class Inputs:
    def __init__(self, grid: tuple[int, int], length: int, time: float):
        rng = np.random.default_rng(length)
        self.grid, self.time = grid, time
        self.tokens = rng.standard_normal((1, grid[0] * grid[1], 64)).astype(np.float32)
        self.text = rng.standard_normal((1, length, LAYERS * WIDTH)).astype(np.float32)

    def theirs(self, model: Any, longer: int = 0) -> np.ndarray:
        """diffusers' prediction. longer: so many pads in front of the last token of text, which it masks."""
        from diffusers import Krea2Pipeline

        text = torch.from_numpy(self.text).unflatten(-1, (LAYERS, WIDTH))
        text = torch.cat((text[:, :-1], torch.ones(1, longer, LAYERS, WIDTH), text[:, -1:]), dim=1)
        mask = torch.ones(text.shape[:2], dtype=torch.bool)
        mask[:, self.text.shape[1] - 1 : -1] = False
        with torch.inference_mode():
            return model(  # type: ignore[no-any-return]
                hidden_states=torch.from_numpy(self.tokens),
                encoder_hidden_states=text,
                timestep=torch.tensor([self.time]),
                position_ids=Krea2Pipeline.prepare_position_ids(text.shape[1], *self.grid, torch.device("cpu")),
                encoder_attention_mask=mask if longer else None,
                return_dict=False,
            )[0].numpy()


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer(tmp_path: Path, backend: str) -> None:
    model = exact(tiny_dit())
    model.save_pretrained(tmp_path)
    part = open_component(krea2_dit.NETWORK, tmp_path, read_config(krea2_dit.NETWORK, tmp_path), "transformer")
    engine = backends.load(backend)
    ours = engine.open(part.network, part.config, part.stored(FP32), FP32)
    errors = []
    for inputs in (Inputs(*case) for case in CASES):
        row = krea2_conditioning.time_row(part.config, 1000 * inputs.time, "float32")
        condition = ours.condition(engine.array(inputs.text), inputs.grid)
        result = np.asarray(engine.numpy(ours.predict(engine.array(inputs.tokens), row, condition)))
        errors.append(relative_float32(result, inputs.theirs(model)))
    print(f"{backend}: {', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT32})")
    assert max(errors) <= FLOAT32


# The forward in float64, by the equations alone


class Equations:
    def __init__(self, model: Any, inputs: Inputs):
        self.w = {name: value.double() for name, value in model.state_dict().items()}
        self.c, self.inputs = model.config, inputs

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.w.get(f"{name}.bias")
        return x @ self.w[f"{name}.weight"].T + (0 if bias is None else bias)

    def rms(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c.norm_eps) * (1 + self.w[f"{name}.weight"])

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T H D] at positions [T 3]: adjacent channels turn by the angle of their axis."""
        angles = [
            positions[:, axis] * self.c.rope_theta ** -(i / width)
            for axis, width in enumerate(self.c.axes_dims_rope)
            for i in range(0, width, 2)
        ]
        out = torch.empty_like(x)
        for j, angle in enumerate(angles):
            a, b, cos, sin = x[..., 2 * j], x[..., 2 * j + 1], torch.cos(angle)[:, None], torch.sin(angle)[:, None]
            out[..., 2 * j], out[..., 2 * j + 1] = a * cos - b * sin, a * sin + b * cos
        return out

    def attention(self, name: str, y: torch.Tensor, heads: int, positions: torch.Tensor | None) -> torch.Tensor:
        """y [T C]."""
        D = self.w[f"{name}.norm_q.weight"].shape[0]
        q, k, v = (self.linear(f"{name}.to_{x}", y).unflatten(-1, (-1, D)) for x in "qkv")
        q, k = self.rms(f"{name}.norm_q", q), self.rms(f"{name}.norm_k", k)
        if positions is not None:
            q, k = self.turned(q, positions), self.turned(k, positions)
        out = []
        for head in range(heads):
            of_keys = head * k.shape[1] // heads
            weights = (q[:, head] @ k[:, of_keys].T / D**0.5).softmax(-1)
            out.append(weights @ v[:, of_keys])
        return self.linear(f"{name}.to_out.0", torch.cat(out, -1) / (1 + torch.exp(-self.linear(f"{name}.to_gate", y))))

    def feed_forward(self, name: str, y: torch.Tensor) -> torch.Tensor:
        gate = self.linear(f"{name}.gate", y)
        return self.linear(f"{name}.down", gate / (1 + torch.exp(-gate)) * self.linear(f"{name}.up", y))

    def fused(self, name: str, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(f"{name}.attn", self.rms(f"{name}.norm1", x), self.c.text_num_attention_heads, None)
        return x + self.feed_forward(f"{name}.ff", self.rms(f"{name}.norm2", x))

    def text(self) -> torch.Tensor:
        tokens = []
        for states in torch.from_numpy(self.inputs.text)[0].double():
            x = states.reshape(LAYERS, WIDTH)
            for i in range(self.c.num_layerwise_text_blocks):
                x = self.fused(f"text_fusion.layerwise_blocks.{i}", x)
            tokens.append(self.w["text_fusion.projector.weight"][0] @ x)
        x = torch.stack(tokens)
        for i in range(self.c.num_refiner_text_blocks):
            x = self.fused(f"text_fusion.refiner_blocks.{i}", x)
        x = F.gelu(self.linear("txt_in.linear_1", self.rms("txt_in.norm", x)), approximate="tanh")
        return self.linear("txt_in.linear_2", x)

    def __call__(self) -> np.ndarray:
        half, text = self.c.timestep_embed_dim // 2, self.text()
        angles = 1000 * self.inputs.time * torch.exp(-np.log(10000.0) * torch.arange(half).double() / half)
        row = torch.cat((torch.cos(angles), torch.sin(angles)))
        temb = self.linear("time_embed.linear_1", row)
        temb = self.linear("time_embed.linear_2", F.gelu(temb, approximate="tanh"))
        shared = self.linear("time_mod_proj", F.gelu(temb, approximate="tanh")).unflatten(-1, (6, -1))
        x = torch.cat((text, self.linear("img_in", torch.from_numpy(self.inputs.tokens)[0].double())))
        places = [(0, r, c) for r in range(self.inputs.grid[0]) for c in range(self.inputs.grid[1])]
        positions = torch.tensor([*[(0, 0, 0)] * len(text), *places]).double()
        for i in range(self.c.num_layers):
            name = f"transformer_blocks.{i}"
            scale, shift, gate, scale2, shift2, gate2 = shared + self.w[f"{name}.scale_shift_table"]
            y = self.rms(f"{name}.norm1", x) * (1 + scale) + shift
            x = x + gate * self.attention(f"{name}.attn", y, self.c.num_attention_heads, positions)
            x = x + gate2 * self.feed_forward(f"{name}.ff", self.rms(f"{name}.norm2", x) * (1 + scale2) + shift2)
        scale, shift = temb + self.w["final_layer.scale_shift_table"]
        x = self.rms("final_layer.norm", x[len(text) :]) * (1 + scale) + shift
        return self.linear("final_layer.linear", x)[None].numpy()  # type: ignore[no-any-return]


def test_the_class_in_float64() -> None:
    """Pads, which diffusers has in every text, change nothing."""
    model = exact(tiny_dit())
    errors, padded = [], []
    for inputs in (Inputs(*case) for case in CASES):
        right = Equations(model, inputs)()
        errors.append(relative(inputs.theirs(model), right))
        padded.append(relative(inputs.theirs(model, longer=9), right))
    print(f"{', '.join(f'{error:.1e}' for error in [*errors, *padded])} (limit {FLOAT64})")
    assert max(errors + padded) <= FLOAT64


def test_a_fault_is_seen() -> None:
    """The time, the image's rows and columns, and the order of the text encoder's layers each change the forward."""
    model = exact(tiny_dit())
    inputs = Inputs(*CASES[1])
    right, changes = inputs.theirs(model), []
    layers = inputs.text.reshape(1, -1, LAYERS, WIDTH)[:, :, ::-1].reshape(inputs.text.shape).copy()
    for name, value in (("time", 0.6), ("grid", (8, 4)), ("text", inputs.text[:, :31]), ("text", layers)):
        wrong = Inputs(*CASES[1])
        setattr(wrong, name, value)
        changes.append(relative(Equations(model, wrong)(), right))
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > FAULT


def test_published_sizes() -> None:
    """Golden numbers and names: of the reference class on the meta device, whose defaults are the published sizes."""
    from diffusers import Krea2Transformer2DModel

    with torch.device("meta"):
        made = Krea2Transformer2DModel()
    theirs = {name: tuple(value.shape) for name, value in made.state_dict().items()}
    manifest = krea2_dit.manifest(krea2_dit.Krea2Config())
    assert {krea2_dit.published(name): shape for name, shape in manifest.items()} == theirs
    assert {krea2_dit.rename(name) for name in theirs} == manifest.keys()
    assert (sum(map(prod, manifest.values())), len(manifest)) == (12_820_073_036, 430)


def test_names() -> None:
    """The authors' names, by hand, lead back to those of the manifest."""
    model = tiny_dit()
    theirs, manifest = transformer_file(model), krea2_dit.manifest(krea2_dit.Krea2Config(**DIT))
    assert {krea2_dit.rename(name) for name in theirs} == manifest.keys()
    assert {krea2_dit.authors_name(name) for name in manifest} == theirs.keys()
