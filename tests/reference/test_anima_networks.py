"""Anima's transformer and text conditioner on both backends against diffusers, in float32, and the forwards written
again in float64 against diffusers' classes."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.oracle_anima import exact
from support.policies import FP32
from support.relative import relative, relative_float32
from support.tiny_anima import CONDITIONER, DIT, tiny_conditioner, tiny_dit, transformer_file

from qwenimg import backends
from qwenimg.common.networks.denoisers import anima_conditioning, anima_dit
from qwenimg.common.networks.encoders import anima_conditioner
from qwenimg.common.numbers.packing import pack
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-6  # relative L2 of a forward; measured at most 5e-7
FLOAT64 = 1e-6  # of float32 to float64; measured at most 5e-7
FAULT = 1e-3  # the least that a fault changes, relative L2
CASES = [
    # rows and columns of latents; tokens of text, the last of them zeros; time
    ((10, 6), 13, 4, 1.0),
    ((8, 16), 32, 20, 0.625),
    ((2, 14), 1, 0, 0.015625),
]


class Inputs:
    def __init__(self, size: tuple[int, int], length: int, zeros: int, time: float):
        rng = np.random.default_rng(length)
        self.size, self.time = size, time
        self.latents = rng.standard_normal((1, 16, *size)).astype(np.float32)
        self.text = rng.standard_normal((1, length, DIT["text_embed_dim"])).astype(np.float32)
        self.text[:, length - zeros :] = 0

    @property
    def grid(self) -> tuple[int, int]:
        return self.size[0] // 2, self.size[1] // 2

    def theirs(self, model: Any) -> np.ndarray:
        """diffusers' prediction, packed as ours."""
        with torch.inference_mode():
            made = model(
                hidden_states=torch.from_numpy(self.latents)[:, :, None],
                encoder_hidden_states=torch.from_numpy(self.text),
                timestep=torch.tensor([self.time]),
                padding_mask=torch.zeros(1, 1, 8 * self.size[0], 8 * self.size[1]),
                return_dict=False,
            )[0]
        return pack(made[:, :, 0].numpy())


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer(tmp_path: Path, backend: str) -> None:
    model = exact(tiny_dit())
    model.save_pretrained(tmp_path)
    part = open_component(anima_dit.NETWORK, tmp_path, read_config(anima_dit.NETWORK, tmp_path), "transformer")
    engine = backends.load(backend)
    ours = engine.open(part.network, part.config, part.stored(FP32), FP32)
    errors = []
    for inputs in (Inputs(*case) for case in CASES):
        row = anima_conditioning.time_row(part.config, 1000 * inputs.time, "float32")
        condition = ours.condition(engine.array(inputs.text), inputs.grid)
        result = np.asarray(engine.numpy(ours.predict(engine.array(pack(inputs.latents)), row, condition)))
        errors.append(relative_float32(result, inputs.theirs(model)))
    print(f"{backend}: {', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT32})")
    assert max(errors) <= FLOAT32


TEXTS = [
    # tokens of T5; of the language model
    (13, 9),
    (1, 1),
    (40, 70),  # more than it is filled up to
]


def texts(ids: int, states: int) -> tuple[list[int], np.ndarray]:
    rng = np.random.default_rng(ids)
    rows = rng.standard_normal((1, states, CONDITIONER["source_dim"])).astype(np.float32)
    return rng.integers(0, 900, ids).tolist(), rows


def conditioned(model: Any, ids: list[int], states: np.ndarray) -> np.ndarray:
    """diffusers' text."""
    with torch.inference_mode():
        return model(torch.from_numpy(states), torch.tensor([ids])).numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", BACKENDS)
def test_conditioner(tmp_path: Path, backend: str) -> None:
    model = tiny_conditioner()
    model.save_pretrained(tmp_path)
    network = anima_conditioner.NETWORK
    part = open_component(network, tmp_path, read_config(network, tmp_path), "text_conditioner")
    engine = backends.load(backend)
    ours, errors = engine.open(part.network, part.config, part.stored(FP32), FP32), []
    for ids, states in (texts(*case) for case in TEXTS):
        made, theirs = np.asarray(engine.numpy(ours.encode(ids, states))), conditioned(model, ids, states)
        assert made.shape == (1, max(len(ids), CONDITIONER["min_sequence_length"]), CONDITIONER["target_dim"])
        assert made.shape == theirs.shape and not made[:, len(ids) :].any()
        errors.append(relative_float32(made, theirs))
    print(f"{backend}: {', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT32})")
    assert max(errors) <= FLOAT32


# The forwards in float64, by the equations alone


class Equations:
    """Layers in float64, in numpy."""

    def __init__(self, model: Any):
        self.w = {name: value.double().numpy() for name, value in model.state_dict().items()}
        self.c = model.config

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        made = x @ self.w[f"{name}.weight"].T
        return made + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else made

    def rms(self, name: str, x: np.ndarray, eps: float) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.w[f"{name}.weight"]

    @staticmethod
    def turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
        """Halves of x [T H D] by angles [T D/2]."""
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    @staticmethod
    def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), -1)

    @staticmethod
    def gelu(x: np.ndarray) -> np.ndarray:
        return F.gelu(torch.from_numpy(x)).numpy()  # type: ignore[no-any-return]

    @staticmethod
    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))


class Transformer(Equations):
    def __init__(self, model: Any, inputs: Inputs):
        super().__init__(model)
        self.inputs = inputs

    def modulated(self, name: str, x: np.ndarray) -> tuple[np.ndarray, ...]:
        """The norm of x with shift and scale, and the gate if there is one."""
        mod = self.linear(f"{name}.linear_2", self.linear(f"{name}.linear_1", self.silu(self.time)))
        shift, scale, *gate = np.split(mod + self.shared[: len(mod)], len(mod) // x.shape[-1])
        normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return normed * (1 + scale) + shift, *gate

    def attention(self, name: str, x: np.ndarray, context: np.ndarray, angles: np.ndarray | None) -> np.ndarray:
        heads = self.c.num_attention_heads
        q, k, v = (
            self.linear(f"{name}.to_{part}", y).reshape(len(y), heads, -1)
            for part, y in (("q", x), ("k", context), ("v", context))
        )
        q, k = self.rms(f"{name}.norm_q", q, 1e-5), self.rms(f"{name}.norm_k", k, 1e-5)
        if angles is not None:
            q, k = self.turned(q, angles), self.turned(k, angles)
        return self.linear(f"{name}.to_out.0", self.attended(q, k, v))

    def angles(self) -> np.ndarray:
        rows, columns = self.inputs.grid
        side = self.c.attention_head_dim // 6 * 2
        parts = [np.zeros((rows * columns, self.c.attention_head_dim // 2 - side))]
        for scale, places in zip(self.c.rope_scale[1:], np.indices((rows, columns)).reshape(2, -1), strict=True):
            base = 1e4 * scale ** (side / (side - 2))
            parts.append(places[:, None] / base ** (np.arange(0, side, 2) / side))
        return np.concatenate(parts, axis=1)

    def __call__(self) -> np.ndarray:
        width = self.c.num_attention_heads * self.c.attention_head_dim
        turns = self.inputs.time * np.exp(-np.log(10000.0) * np.arange(width // 2) / (width // 2))
        row = np.concatenate((np.cos(turns), np.sin(turns)))
        self.time = self.rms("time_embed.norm", row, 1e-6)
        self.shared = self.linear("time_embed.t_embedder.linear_1", row)
        self.shared = self.linear("time_embed.t_embedder.linear_2", self.silu(self.shared))
        rows, columns = self.inputs.grid
        channels = np.concatenate((self.inputs.latents[0], np.zeros((1, *self.inputs.size)))).astype(np.float64)
        patches = channels.reshape(17, rows, 2, columns, 2).transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
        x, text, angles = (
            self.linear("patch_embed.proj", patches),
            self.inputs.text[0].astype(np.float64),
            self.angles(),
        )
        for i in range(self.c.num_layers):
            name = f"transformer_blocks.{i}"
            y, gate = self.modulated(f"{name}.norm1", x)
            x = x + gate * self.attention(f"{name}.attn1", y, y, angles)
            y, gate = self.modulated(f"{name}.norm2", x)
            x = x + gate * self.attention(f"{name}.attn2", y, text, None)
            y, gate = self.modulated(f"{name}.norm3", x)
            x = x + gate * self.linear(f"{name}.ff.net.2", self.gelu(self.linear(f"{name}.ff.net.0.proj", y)))
        [y] = self.modulated("norm_out", x)
        made = self.linear("proj_out", y).reshape(rows, columns, 2, 2, 16)
        return pack(made.transpose(4, 0, 2, 1, 3).reshape(1, 16, *self.inputs.size))


class Conditioner(Equations):
    def attention(self, name: str, x: np.ndarray, context: np.ndarray) -> np.ndarray:
        q, k, v = (
            self.linear(f"{name}.{part}_proj", y).reshape(len(y), self.c.num_attention_heads, -1)
            for part, y in (("q", x), ("k", context), ("v", context))
        )
        q, k = self.rms(f"{name}.q_norm", q, 1e-6), self.rms(f"{name}.k_norm", k, 1e-6)
        bases = 1e4 ** (-np.arange(0, q.shape[-1], 2) / q.shape[-1])
        q, k = (self.turned(y, np.arange(len(y))[:, None] * bases) for y in (q, k))
        return self.linear(f"{name}.o_proj", self.attended(q, k, v))

    def __call__(self, ids: list[int], states: np.ndarray) -> np.ndarray:
        x, context = self.w["embed.weight"][ids], states[0].astype(np.float64)
        for i in range(self.c.num_layers):
            name = f"blocks.{i}"
            y = self.rms(f"{name}.norm_self_attn", x, 1e-6)
            x = x + self.attention(f"{name}.self_attn", y, y)
            x = x + self.attention(f"{name}.cross_attn", self.rms(f"{name}.norm_cross_attn", x, 1e-6), context)
            y = self.gelu(self.linear(f"{name}.mlp.0", self.rms(f"{name}.norm_mlp", x, 1e-6)))
            x = x + self.linear(f"{name}.mlp.2", y)
        made = self.rms("norm", self.linear("out_proj", x), 1e-6)
        zeros = max(0, self.c.min_sequence_length - len(made))
        return np.concatenate((made, np.zeros((zeros, made.shape[1]))))[None]


def test_the_classes_in_float64() -> None:
    transformer, conditioner = exact(tiny_dit()), tiny_conditioner()
    errors = [relative(one.theirs(transformer), Transformer(transformer, one)()) for one in (Inputs(*c) for c in CASES)]
    for one in (texts(*case) for case in TEXTS):
        errors.append(relative(conditioned(conditioner, *one), Conditioner(conditioner)(*one)))
    print(f"{', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT64})")
    assert max(errors) <= FLOAT64


def test_a_fault_is_seen() -> None:
    """The time, the image's rows and columns, the zeros behind a text and the order of the states each change it."""
    model, inputs = exact(tiny_dit()), Inputs(*CASES[1])
    right, changes = inputs.theirs(model), []
    for name, value in (("time", 0.6), ("text", inputs.text[:, :12])):
        wrong = Inputs(*CASES[1])
        setattr(wrong, name, value)
        changes.append(relative(Transformer(model, wrong)(), right))
    wrong = Transformer(model, inputs)
    wrong.angles = lambda: np.zeros((32, 11))  # type: ignore[method-assign]
    changes.append(relative(wrong(), right))
    conditioner, (ids, states) = tiny_conditioner(), texts(*TEXTS[0])
    changes.append(relative(Conditioner(conditioner)(ids, states[:, ::-1]), conditioned(conditioner, ids, states)))
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > FAULT


def test_published_sizes() -> None:
    """Golden numbers and names: of the reference classes on the meta device."""
    from diffusers import AnimaTextConditioner, CosmosTransformer3DModel

    with torch.device("meta"):
        dit = CosmosTransformer3DModel(num_attention_heads=16, extra_pos_embed_type=None)
        text = AnimaTextConditioner()
    theirs = {name: tuple(value.shape) for name, value in dit.state_dict().items()}
    manifest = anima_dit.manifest(anima_dit.AnimaConfig())
    assert manifest == theirs
    assert (sum(map(prod, manifest.values())), len(manifest)) == (1_956_405_248, 567)
    theirs = {name: tuple(value.shape) for name, value in text.state_dict().items()}
    manifest = anima_conditioner.manifest(anima_conditioner.ConditionerConfig())
    assert {anima_conditioner.NETWORK.published(name): shape for name, shape in manifest.items()} == theirs
    assert {anima_conditioner.NETWORK.rename(name) for name in theirs} == manifest.keys()
    assert (sum(map(prod, manifest.values())), len(manifest)) == (134_663_680, 118)


def test_names() -> None:
    """The authors' names, by hand, are those of the manifest, and of diffusers' own table."""
    from diffusers.loaders.single_file_utils import convert_cosmos_transformer_checkpoint_to_diffusers as converted

    model = tiny_dit()
    file, manifest = transformer_file(model), anima_dit.manifest(anima_dit.AnimaConfig(**DIT))
    assert {anima_dit.authors_name(name) for name in manifest} == file.keys()
    assert converted({f"net.{name}": value for name, value in file.items()}).keys() == manifest.keys()
