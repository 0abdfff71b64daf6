"""FLUX.3's transformer and text encoder on both backends against diffusers and transformers, in float32, and the
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
from support.oracle_flux3 import exact_sinusoids
from support.policies import FP32
from support.relative import relative, relative_float32
from support.tiny_flux3 import tiny_dit, tiny_text_encoder

from qwenimg import backends
from qwenimg.common.families.flux3.checkpoint import NETWORKS, TAPS
from qwenimg.common.networks.denoisers import flux3_conditioning, flux3_dit
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-6  # relative L2 of a forward; measured at most 5e-7
FLOAT64 = 1e-6  # of float32 to float64
TEXT = 1e-5  # relative L2 of 32 layers
FAULT = 1e-3  # the least that a fault changes, relative L2
CASES = [
    # rows and columns of the image and of its references; tokens of text; sigma and the one that the step goes to
    ([(5, 3)], 13, 1.0, 0.875),
    ([(4, 8), (7, 2)], 32, 0.625, 0.25),
    ([(3, 5), (2, 3), (4, 1)], 1, 0.25, 0.0),
]


def ids(grid: tuple[int, int], reference: int = 0) -> torch.Tensor:
    """As the pipeline of diffusers makes them."""
    from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids

    return _prepare_image_ids(*grid, 0.5, -reference)


def text_ids(length: int) -> torch.Tensor:
    return torch.cartesian_prod(*map(torch.arange, (1, 1, 1, length))).reshape(-1, 4).float()


class Inputs:
    def __init__(self, grids: list[tuple[int, int]], length: int, sigma: float, target: float):
        rng = np.random.default_rng(length)
        self.grids, self.sigma, self.target = grids, sigma, target
        self.tokens = [rng.standard_normal((1, h * w, 32)).astype(np.float32) for h, w in grids]
        self.text = rng.standard_normal((1, length, 480)).astype(np.float32)

    def theirs(self, model: Any) -> np.ndarray:
        more: dict[str, Any] = {"target_timestep": torch.tensor([self.target])} if model.config.flow_map else {}
        if len(self.grids) > 1:
            more["image_cond_hidden_states"] = torch.from_numpy(np.concatenate(self.tokens[1:], axis=1))
            more["image_cond_ids"] = torch.cat([ids(grid, k) for k, grid in enumerate(self.grids[1:], 1)])
        with torch.inference_mode():
            result = model(
                hidden_states=torch.from_numpy(self.tokens[0]),
                encoder_hidden_states=torch.from_numpy(self.text),
                timestep=torch.tensor([self.sigma]),
                img_ids=ids(self.grids[0]),
                txt_ids=text_ids(self.text.shape[1]),
                return_dict=False,
                **more,
            )[0]
        return result.numpy()  # type: ignore[no-any-return]


def exact(model: Any) -> Any:
    """With sinusoids from float64: the reference's own are in float32, whose angles of up to 1000 radians are worth
    more than the limits."""
    model.time_proj.forward = exact_sinusoids
    return model


@pytest.mark.parametrize("flow_map", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer(tmp_path: Path, backend: str, flow_map: bool) -> None:
    model = exact(tiny_dit(flow_map=flow_map, loud=False))
    model.save_pretrained(tmp_path)
    part = open_component(flux3_dit.NETWORK, tmp_path, read_config(flux3_dit.NETWORK, tmp_path), "transformer")
    engine = backends.load(backend)
    ours = engine.open(part.network, part.config, part.stored(FP32), FP32)
    errors = []
    for case in CASES:
        inputs = Inputs(*case)
        features = flux3_conditioning.time_rows(part.config, 1000 * inputs.sigma, "float32", 1000 * inputs.target)
        image, *references = map(engine.array, inputs.tokens)
        condition = ours.condition(engine.array(inputs.text), (inputs.grids, references))
        result = np.asarray(engine.numpy(ours.predict(image, features, condition)))
        errors.append(relative_float32(result, inputs.theirs(model)))
    print(f"{backend}, flow map {flow_map}: {', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT32})")
    assert max(errors) <= FLOAT32


# The forward in float64, by the equations alone


class Equations:
    def __init__(self, model: Any, inputs: Inputs):
        self.w = {name: value.double() for name, value in model.state_dict().items()}
        self.c, self.inputs = model.config, inputs

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].T

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c.eps)

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        parts = []
        for axis, width in enumerate(self.c.axes_dims_rope):
            rates = self.c.rope_theta ** -(torch.arange(0, width, 2).double() / width)
            parts.append(positions[:, axis : axis + 1].double() * rates)
        turn = torch.polar(torch.tensor(1.0).double(), torch.cat(parts, dim=1))
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn[:, None]).flatten(-2)

    def update(self, name: str, y: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        heads = self.c.num_attention_heads
        q, k, v = (self.linear(f"{name}.attn.to_{x}", y).unflatten(-1, (heads, -1)) for x in "qkv")
        gains = (self.w[f"{name}.attn.norm_{x}.weight"] for x in "qk")
        sizes = (torch.sqrt((x * x).mean(-1, keepdim=True) + self.c.eps) for x in (q, k))
        q, k = (x / size * gain for x, size, gain in zip((q, k), sizes, gains, strict=True))
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        scores = torch.einsum("lhd,shd->hls", q, k) / q.shape[-1] ** 0.5
        attended = torch.einsum("hls,shd->lhd", scores.softmax(-1), v).flatten(1)
        gate, values = self.linear(f"{name}.ff.linear_in", y).chunk(2, dim=-1)
        feed_forward = self.linear(f"{name}.ff.linear_out", gate * torch.sigmoid(gate) * values)
        return self.linear(f"{name}.attn.to_out.0", attended) + feed_forward

    def time(self, name: str, time: float) -> torch.Tensor:
        rates = torch.exp(-np.log(10000.0) * torch.arange(32).double() / 32)
        row = torch.cat((torch.cos(1000 * time * rates), torch.sin(1000 * time * rates)))[None]
        return self.linear(f"{name}.linear_2", F.silu(self.linear(f"{name}.linear_1", row)))

    def modulation(self, kind: str, stream: str, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(f"{kind}_stream_modulations.{stream}.linear", F.silu(temb)).chunk(3, dim=-1)

    def __call__(self) -> np.ndarray:
        image, *references = (torch.from_numpy(one)[0].double() for one in self.inputs.tokens)
        streams = {"txt": self.linear("context_embedder", torch.from_numpy(self.inputs.text)[0].double())}
        positions, names = {"txt": text_ids(len(streams["txt"]))}, {"txt": "txt_mode_blocks"}
        if references:
            streams["image_cond"] = self.linear("x_embedders.image_cond", torch.cat(references))
            grids = enumerate(self.inputs.grids[1:], 1)
            positions["image_cond"] = torch.cat([ids(grid, k) for k, grid in grids])
        streams["image"] = self.linear("x_embedders.image", image)
        positions["image"] = ids(self.inputs.grids[0])
        names |= {stream: f"mode_blocks.{stream}" for stream in ("image", "image_cond")}
        times = {stream: self.time("timestep_embedder", self.inputs.sigma * (stream == "image")) for stream in streams}
        if self.c.flow_map:
            target = self.time("target_timestep_embedder", self.inputs.target)
            times = {stream: time + target for stream, time in times.items()}
        for stream in streams:
            shift, scale, gate = self.modulation("early", stream, times[stream])
            for i in range(self.c.num_layers):
                y = self.norm(streams[stream]) * (1 + scale) + shift
                streams[stream] = streams[stream] + gate * self.update(f"{names[stream]}.{i}", y, positions[stream])
        counts = [len(one) for one in streams.values()]
        rows = [self.modulation("single", stream, times[stream]) for stream in streams]
        shift, scale, gate = (
            torch.cat([row[i].expand(count, -1) for row, count in zip(rows, counts, strict=True)]) for i in range(3)
        )
        x, where = torch.cat(list(streams.values())), torch.cat(list(positions.values()))
        for i in range(self.c.num_single_layers):
            x = x + gate * self.update(f"single_transformer_blocks.{i}", self.norm(x) * (1 + scale) + shift, where)
        scale, shift = self.linear("norm_out.linear", F.silu(times["image"])).chunk(2, dim=-1)
        last = self.norm(x[-len(image) :]) * (1 + scale) + shift
        return self.linear("proj_out", last)[None].numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("flow_map", [False, True])
def test_the_class_in_float64(flow_map: bool) -> None:
    model = exact(tiny_dit(flow_map=flow_map, loud=False))
    errors = [
        relative(inputs.theirs(model), Equations(model, inputs)()) for inputs in (Inputs(*case) for case in CASES)
    ]
    print(f"flow map {flow_map}: {', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT64})")
    assert max(errors) <= FLOAT64


def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of a step of 1, references in front, and time 0 for the image each change the forward."""
    model = exact(tiny_dit(flow_map=True))
    inputs = Inputs(*CASES[1])
    right, changes = inputs.theirs(model), []
    for name, value in (("sigma", 0.0), ("target", 0.0), ("grids", [(8, 4), (7, 2)]), ("grids", [(4, 8), (2, 7)])):
        wrong = Inputs(*CASES[1])
        setattr(wrong, name, value)
        changes.append(relative(Equations(model, wrong)(), right))
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > FAULT


@pytest.mark.parametrize(
    ("flow_map", "parameters", "tensors"), [(True, 5_548_681_984, 359), (False, 5_538_458_368, 357)]
)
def test_published_sizes(flow_map: bool, parameters: int, tensors: int) -> None:
    """Golden numbers and names: of the reference class on the meta device."""
    from diffusers import Flux3Transformer2DModel

    with torch.device("meta"):
        theirs = {
            name: tuple(value.shape) for name, value in Flux3Transformer2DModel(flow_map=flow_map).state_dict().items()
        }
    manifest = flux3_dit.manifest(flux3_dit.Flux3Config(flow_map=flow_map))
    assert manifest == theirs and (sum(map(prod, manifest.values())), len(manifest)) == (parameters, tensors)


# The text encoder


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "pads"), [(13, 7), (20, 0)])
def test_text_encoder(tmp_path: Path, backend: str, tokens: int, pads: int) -> None:
    """Every pad has position 1, and sees the real tokens alone."""
    model, network = tiny_text_encoder(), NETWORKS["text_encoder"]
    model.save_pretrained(tmp_path)
    part = open_component(network, tmp_path, read_config(network, tmp_path), "text_encoder")
    assert part.config.taps == TAPS and part.config.pad_position == 1
    engine = backends.load(backend)
    numbers = [*np.random.default_rng(tokens).integers(0, 500, tokens).tolist(), *pads * [3]]
    mask = torch.tensor([tokens * [1] + pads * [0]])
    with torch.inference_mode():
        states = model(
            input_ids=torch.tensor([numbers]),
            attention_mask=mask,
            position_ids=torch.arange(tokens + pads)[None].masked_fill(mask == 0, 1),
            output_hidden_states=True,
        ).hidden_states
    expected = torch.cat([states[tap] for tap in TAPS], dim=-1).numpy()

    def error(config: Any) -> float:
        ours = engine.open(part.network, config, part.stored(FP32), FP32)
        return relative(np.asarray(engine.numpy(ours.encode(numbers, pads))), expected)

    right, counted = error(part.config), error(replace(part.config, pad_position=None))
    print(f"{backend}, {pads} pads: {right:.1e} (limit {TEXT}), pads counted on {counted:.1e}")
    assert right <= TEXT and (counted > FAULT if pads else counted == right)
