"""ControlNets of Flux.1 and the transformer under their control, on both backends, in float32: against the formula in
float64, written a second time here, and against diffusers, which the formula equals too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.policies import FP32
from support.relative import relative, relative_float32
from support.tiny_flux import tiny_dit
from support.tiny_flux_control import tiny_controlnet

from qwenimg import backends
from qwenimg.common.families.flux.known import CONTROL_LAYERS, CONTROLS
from qwenimg.common.networks.denoisers import flux_conditioning, flux_controlnet, flux_dit
from qwenimg.common.networks.denoisers.flux_controlnet import FluxControlNetConfig
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.timesteps import sinusoids
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.pipeline.models import control_stages

BACKENDS = ("cpu", "mlx")
FLOAT32 = 2e-6  # relative L2 of residuals and of a forward
SIGMA, SCALE, GUIDANCE, GRID = 0.61, 0.7, 3.5, (5, 3)
# Blocks of two streams and of one of the transformer; the ControlNet and the kind of its picture
CASES: dict[str, tuple[tuple[int, int], str, int | None]] = {
    "one for all, none of one stream": ((5, 4), "pro-2", None),
    "intervals that do not divide": ((5, 5), "union", 2),
    "as many": ((2, 1), "canny", None),
    "without guidance": ((3, 4), "schnell", None),
}


def exact_sinusoids(values: torch.Tensor) -> torch.Tensor:
    """The reference's own are in float32, whose angles of up to 3500 radians are worth 1e-5 of the result."""
    return torch.from_numpy(np.stack([sinusoids(float(value), 256) for value in values]))


# The formula


def formula(
    net: torch.nn.Module,
    kind: int | None,
    latents: np.ndarray,
    picture: np.ndarray,
    text: np.ndarray,
    pooled: np.ndarray,
) -> list[np.ndarray]:
    """The residuals of all blocks in float64, those of two streams first."""
    weights = {name: value.double().numpy() for name, value in net.state_dict().items()}
    config = net.config
    heads, size = config.num_attention_heads, config.attention_head_dim

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    def embedded(name: str, x: np.ndarray) -> np.ndarray:
        return linear(f"{name}.linear_2", silu(linear(f"{name}.linear_1", x)))

    def sinusoid(value: float) -> np.ndarray:
        angles = value * np.exp(-np.log(10000) * np.arange(128) / 128)
        return np.concatenate([np.cos(angles), np.sin(angles)])

    def normed(x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)

    def rms(name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights[f"{name}.weight"]

    def turned(x: np.ndarray) -> np.ndarray:
        even, odd = x[..., ::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)

    def split(name: str, norm: str, x: np.ndarray) -> np.ndarray:
        return rms(norm, linear(name, x).reshape(len(x), heads, size))

    def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        q, k = turned(q), turned(k)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", share / share.sum(-1, keepdims=True), v).reshape(len(q), -1)

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    temb = embedded("time_text_embed.timestep_embedder", sinusoid(1000 * float(np.float32(SIGMA))))
    if config.guidance_embeds:
        temb = temb + embedded("time_text_embed.guidance_embedder", sinusoid(1000 * GUIDANCE))
    temb = silu(temb + embedded("time_text_embed.text_embedder", pooled[0].astype(float)))
    img = linear("x_embedder", latents[0].astype(float)) + linear("controlnet_x_embedder", picture[0].astype(float))
    txt = linear("context_embedder", text[0].astype(float))
    if kind is not None:
        txt = np.concatenate([weights["controlnet_mode_embedder.weight"][[kind]], txt])
    S = len(txt)
    at = np.array([[0, 0, 0]] * S + [[0, row, column] for row in range(GRID[0]) for column in range(GRID[1])])
    angles = [at[:, i, None] / 10000 ** (np.arange(0, n, 2) / n) for i, n in enumerate(config.axes_dims_rope)]
    cos, sin = (one(np.concatenate(angles, axis=1))[:, None] for one in (np.cos, np.sin))

    residuals = []
    for i in range(config.num_layers):
        b = f"transformer_blocks.{i}."
        mods = [linear(f"{b}{name}.linear", temb).reshape(6, -1) for name in ("norm1", "norm1_context")]
        x, y = (normed(one) * (1 + m[1]) + m[0] for one, m in zip((img, txt), mods, strict=True))
        q = np.concatenate(
            [split(f"{b}attn.add_q_proj", f"{b}attn.norm_added_q", y), split(f"{b}attn.to_q", f"{b}attn.norm_q", x)]
        )
        k = np.concatenate(
            [split(f"{b}attn.add_k_proj", f"{b}attn.norm_added_k", y), split(f"{b}attn.to_k", f"{b}attn.norm_k", x)]
        )
        v = np.concatenate([linear(f"{b}attn.add_v_proj", y), linear(f"{b}attn.to_v", x)]).reshape(-1, heads, size)
        out = attended(q, k, v)
        img = img + mods[0][2] * linear(f"{b}attn.to_out.0", out[S:])
        txt = txt + mods[1][2] * linear(f"{b}attn.to_add_out", out[:S])
        for stream, (name, m) in enumerate(zip(("ff", "ff_context"), mods, strict=True)):
            one = (img, txt)[stream]
            wide = gelu(linear(f"{b}{name}.net.0.proj", normed(one) * (1 + m[4]) + m[3]))
            one = one + m[5] * linear(f"{b}{name}.net.2", wide)
            img, txt = (one, txt) if stream == 0 else (img, one)
        residuals.append(linear(f"controlnet_blocks.{i}", img))
    for i in range(config.num_single_layers):
        b, x = f"single_transformer_blocks.{i}.", np.concatenate([txt, img])
        shift, scale, gate = linear(f"{b}norm.linear", temb).reshape(3, -1)
        y = normed(x) * (1 + scale) + shift
        q, k = (split(f"{b}attn.to_{one}", f"{b}attn.norm_{one}", y) for one in "qk")
        out = attended(q, k, linear(f"{b}attn.to_v", y).reshape(-1, heads, size))
        x = x + gate * linear(f"{b}proj_out", np.concatenate([out, gelu(linear(f"{b}proj_mlp", y))], axis=1))
        txt, img = x[:S], x[S:]
        residuals.append(linear(f"controlnet_single_blocks.{i}", img))
    return residuals


class Case:
    """A tiny transformer and a ControlNet in diffusers and on one backend, an image of odd sides in tokens, a text and
    a picture."""

    def __init__(self, folder: Path, backend: str, layers: tuple[int, int], net: str, kind: int | None):
        self.engine, self.kind = backends.load(backend), kind
        self.model = tiny_dit(num_layers=layers[0], num_single_layers=layers[1], pooled_projection_dim=60)
        self.net = tiny_controlnet(net)
        self.transformer = self.opened(flux_dit.NETWORK, self.model, folder / "transformer")
        self.network = self.opened(flux_controlnet.NETWORK, self.net, folder / "controlnet")
        rng = np.random.default_rng(3)
        h, w = 2 * GRID[0], 2 * GRID[1]
        self.x, self.picture = (packing.pack(rng.standard_normal((1, 16, h, w)).astype(np.float32)) for _ in "xp")
        self.text = rng.standard_normal((1, 9, 60)).astype(np.float32)
        self.pooled = rng.standard_normal((1, 60)).astype(np.float32)

    def opened(self, network: Any, model: torch.nn.Module, folder: Path) -> Any:
        model.save_pretrained(folder)
        model.time_text_embed.time_proj.forward = lambda values: exact_sinusoids(values).to(model.dtype)
        part = open_component(network, folder, read_config(network, folder), "it")
        return self.engine.open(part.network, part.config, part.stored(FP32), FP32)

    def numpy(self, array: Any) -> np.ndarray:
        return np.asarray(self.engine.numpy(array))

    def given(self, model: torch.nn.Module, **more: Any) -> Any:
        from diffusers import FluxPipeline

        wide = model.dtype
        with torch.inference_mode():
            return model(
                hidden_states=torch.from_numpy(self.x).to(wide),
                encoder_hidden_states=torch.from_numpy(self.text).to(wide),
                pooled_projections=torch.from_numpy(self.pooled).to(wide),
                timestep=torch.tensor([SIGMA]).to(wide),
                img_ids=FluxPipeline._prepare_latent_image_ids(1, *GRID, "cpu", torch.float32),
                txt_ids=torch.zeros(self.text.shape[1], 3),
                guidance=torch.tensor([GUIDANCE]) if model.config.guidance_embeds else None,
                return_dict=False,
                **more,
            )

    def theirs(self) -> tuple[Any, Any]:
        mode = None if self.kind is None else torch.tensor([[self.kind]])
        picture = torch.from_numpy(self.picture).to(self.net.dtype)
        double, single = self.given(self.net, controlnet_cond=picture, controlnet_mode=mode, conditioning_scale=SCALE)
        return double or (), single or ()

    def predicted(self, double: Any = None, single: Any = None) -> np.ndarray:
        more = {"controlnet_block_samples": double or None, "controlnet_single_block_samples": single or None}
        return np.asarray(self.given(self.model, **more)[0])

    def changes(self) -> Any:
        array, rows = self.engine.array, flux_conditioning.time_rows([1000 * SIGMA], "float32")
        guidance = flux_conditioning.guidance_row(GUIDANCE, "float32")
        modulation = self.network.modulate(rows, guidance, [array(self.pooled)])
        condition = self.network.condition(array(self.text), (GRID, self.kind), array(self.picture))
        return self.network.predict(array(self.x), (modulation, 0), condition, SCALE)

    def ours(self, changes: Any) -> np.ndarray:
        array, rows = self.engine.array, flux_conditioning.time_rows([1000 * SIGMA], "float32")
        guidance = flux_conditioning.guidance_row(GUIDANCE, "float32")
        step = self.transformer.modulate(rows, guidance, [array(self.pooled)]), 0
        condition = self.transformer.condition(array(self.text), [GRID])
        config = self.transformer.config
        counts = config.num_layers, config.num_single_layers
        behind = [one for some, n in zip(changes, counts, strict=True) for one in control_stages.spread([some], n)]
        return self.numpy(self.transformer.predict(array(self.x), step, condition, behind))

    def errors(self) -> list[float]:
        """Errors of each residual against diffusers and against the formula, and of the transformer's prediction."""
        double, single = self.theirs()
        changes = self.changes()
        made = [self.numpy(one.values) for some in changes for one in some]
        exact = formula(self.net, self.kind, self.x, self.picture, self.text, self.pooled)
        expected = [one.numpy() for one in (*double, *single)]
        assert len(made) == len(expected) == len(exact) and all(one.std() > 0.1 for one in expected)
        errors = [relative_float32(*pair) for pair in zip(made, expected, strict=True)]
        errors += [relative_float32(one, SCALE * want[None]) for one, want in zip(made, exact, strict=True)]
        prediction = self.predicted(double, single)
        assert relative_float32(self.predicted(), prediction) > 0.05, "the residuals move the prediction"
        return [*errors, relative_float32(self.ours(changes), prediction)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_equals_diffusers_and_the_formula(tmp_path: Path, backend: str, case: str) -> None:
    errors = Case(tmp_path, backend, *CASES[case]).errors()
    print(f"{backend} {case}: {', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT32})")
    assert max(errors) <= FLOAT32


GOLDEN = 6.622356633


def test_the_formula_is_diffusers(tmp_path: Path) -> None:
    """In float64, but for the reference's tables of RoPE, which are rounded to float32; and a figure, to hold both."""
    case = Case(tmp_path, "cpu", *CASES["intervals that do not divide"])
    case.net.double()
    double, single = case.theirs()
    exact = formula(case.net, case.kind, case.x, case.picture, case.text, case.pooled)
    errors = [relative(SCALE * one[None], want.numpy()) for one, want in zip(exact, (*double, *single), strict=True)]
    figure = float(np.abs(exact[-1]).mean())
    print(f"the formula in float64: {max(errors):.1e} (limit 1e-8); mean size of the last residual {figure:.9f}")
    assert max(errors) <= 1e-8
    assert abs(figure - GOLDEN) <= 1e-8


# The manifests


def header_bytes(manifest: dict[str, tuple[int, ...]]) -> int:
    """Bytes of a file of these tensors in bfloat16 before the first of them."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in sorted(manifest.items()):
        end = start + 2 * int(np.prod(shape))
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    length = len(json.dumps(table, separators=(",", ":")))
    return 8 + length + -length % 8


def test_published_controlnets() -> None:
    """Tensors, and bytes in 16 bits: with a header as safetensors writes it they are those of the published files."""
    from diffusers import FluxControlNetModel

    found, of_file = {}, {"flux-controlnet-union-pro-2": 4_281_779_224, "flux-controlnet-union-pro": 6_603_953_920}
    for name, (double, single, kinds) in CONTROL_LAYERS.items():
        config = FluxControlNetConfig(num_layers=double, num_single_layers=single, num_mode=kinds)
        with torch.device("meta"):
            model = FluxControlNetModel(
                num_layers=double, num_single_layers=single, num_mode=kinds, guidance_embeds=True
            )
        made = flux_controlnet.manifest(config)
        assert made == {key: tuple(value.shape) for key, value in model.state_dict().items()}
        found[name] = 2 * sum(int(np.prod(shape)) for shape in made.values())
        [known] = [one for one in CONTROLS if one.name == name]
        assert abs(known.bytes - found[name]) <= 0.005 * known.bytes
        if name in of_file:
            assert found[name] + header_bytes(made) == of_file[name]
    print(found)


# Planted faults


def one_block_late(patch: pytest.MonkeyPatch, ops: Any) -> None:
    spread = control_stages.spread
    patch.setattr(control_stages, "spread", lambda controls, blocks: [(), *spread(controls, blocks)[:-1]])


def in_turn(patch: pytest.MonkeyPatch, ops: Any) -> None:
    """As XLabs' networks have it."""
    patch.setattr(
        control_stages, "spread", lambda controls, n: [[one[i % len(one)] for one in controls] for i in range(n)]
    )


def guidance_of_another_scale(patch: pytest.MonkeyPatch, ops: Any) -> None:
    row = flux_conditioning.guidance_row
    patch.setattr(flux_conditioning, "guidance_row", lambda guidance, dtype: row(1.01 * guidance, dtype))


def picture_instead_of_latents(patch: pytest.MonkeyPatch, ops: Any) -> None:
    add = ops.add
    patch.setattr(ops, "add", lambda x, update: add(update, update) if x.shape == update.shape else add(x, update))


FAULTS = (one_block_late, in_turn, guidance_of_another_scale, picture_instead_of_latents)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.__name__)
@pytest.mark.sample(3)
def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, fault: Any) -> None:
    case = Case(tmp_path, backend, *CASES["intervals that do not divide"])
    fault(monkeypatch, __import__(f"qwenimg.backends.{'torch' if backend == 'cpu' else 'mlx'}.ops", fromlist=["ops"]))
    worst = max(case.errors())
    print(f"{backend} {fault.__name__}: {worst:.1e} (limit {FLOAT32})")
    assert worst > 100 * FLOAT32
