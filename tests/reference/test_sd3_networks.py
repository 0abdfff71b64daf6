"""Stable Diffusion 3's transformer on both backends against diffusers, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_sd3 import KINDS, tiny_dit

from qwenimg import backends
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.networks.denoisers import sd3_conditioning, sd3_dit
from qwenimg.common.networks.denoisers.sd3_dit import SD3Config
from qwenimg.common.numbers.timesteps import sinusoids
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-6  # relative L2 of a forward; measured at most 6e-7
FAULT = 1e-2  # relative L2 that each planted fault exceeds: it is no rounding
CASES = [((10, 6), 13), ((2, 14), 7), ((38, 38), 21)]  # latents, the last as large as the table; tokens of text


def opened(model: Any, folder: Path, backend: str) -> tuple[Any, Any]:
    """The engine, and `model` as the component that it opens."""
    model.save_pretrained(folder)
    network = sd3_dit.NETWORK
    part = open_component(network, folder, read_config(network, folder), "transformer")
    engine = backends.load(backend)
    return engine, engine.open(part.network, part.config, part.stored(FP32), FP32)


def inputs(shape: tuple[int, int], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Latents, text states and pooled text."""
    rng = np.random.default_rng(shape)
    shapes = ((1, 16, *shape), (1, length, 60), (1, 46))
    latents, text, pooled = (rng.standard_normal(one).astype(np.float32) for one in shapes)
    return latents, text, pooled


def predicted(ours: Any, engine: Any, case: tuple, sigma: float, **options: Any) -> np.ndarray:
    latents, text, pooled = inputs(*case)
    h, w = case[0]
    condition = ours.condition(text, (h // 2, w // 2), **options)
    other = pooled[:, ::-1].copy()  # of another branch: its rows come first
    modulation = ours.modulate(sd3_conditioning.time_rows([871.5, 1000 * sigma]), [other, pooled])
    return np.asarray(engine.numpy(ours.predict(engine.array(latents), (modulation, 3), condition)))


def expected(model: Any, case: tuple, sigma: float, **options: Any) -> np.ndarray:
    # The reference's own sinusoid is in float32, whose angles of up to 1000 radians are worth 1e-5 of the result.
    model.time_text_embed.time_proj.forward = lambda t: torch.from_numpy(sinusoids(float(t), 256)).float()[None]
    latents, text, pooled = (torch.from_numpy(values) for values in inputs(*case))
    with torch.inference_mode():
        [velocity] = model(latents, text, pooled, torch.tensor([1000 * sigma]), return_dict=False, **options)
    return np.asarray(velocity.numpy())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_transformer(tmp_path: Path, kind: str, backend: str) -> None:
    model = tiny_dit(kind)
    engine, ours = opened(model, tmp_path, backend)
    for case in CASES:
        for sigma in (1.0, 0.625, 0.0625):
            result, theirs = predicted(ours, engine, case, sigma), expected(model, case, sigma)
            error = relative_float32(result, theirs)
            print(f"{backend} {kind} {case}, sigma {sigma}: {error:.1e} (limit {FLOAT32})")
            assert error <= FLOAT32 and result.std() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layers", [(1, 2), (0,), (3,), (0, 1, 2, 3)])
@pytest.mark.sample(2)
def test_layers_that_are_left_out(tmp_path: Path, layers: tuple[int, ...], backend: str) -> None:
    model = tiny_dit()
    engine, ours = opened(model, tmp_path, backend)
    result = predicted(ours, engine, CASES[0], 0.5, skip_layers=layers)
    error = relative_float32(result, expected(model, CASES[0], 0.5, skip_layers=list(layers)))
    effect = relative_float32(result, expected(model, CASES[0], 0.5))
    print(f"{backend} without {layers}: {error:.1e} (limit {FLOAT32}), differs from all layers by {effect:.2f}")
    assert error <= FLOAT32 < FAULT < effect


def test_table_by_its_formula_equals_the_reference(tmp_path: Path) -> None:
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    for width, most, sample in ((36, 19, 8), (64, 192, 128), (48, 24, 128)):
        config = SD3Config(
            attention_head_dim=width,
            num_attention_heads=1,
            caption_projection_dim=width,
            pos_embed_max_size=most,
            sample_size=sample,
        )
        theirs = get_2d_sincos_pos_embed(width, most, base_size=sample // 2, output_type="pt").float().numpy()
        assert np.array_equal(sd3_conditioning.positions(config, np.arange(most**2)[None])[0], theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_without_the_table_has_that_of_the_formula(tmp_path: Path, backend: str) -> None:
    from diffusers import SD3Transformer2DModel

    model = tiny_dit()
    fresh = SD3Transformer2DModel.from_config(model.config)
    model.pos_embed.pos_embed.copy_(fresh.pos_embed.pos_embed)
    _, ours = opened(model, tmp_path, backend)
    part = open_component(sd3_dit.NETWORK, tmp_path, ours.config, "transformer")
    engine = backends.load(backend)
    plan = part.stored(FP32).only(lambda name: name != sd3_dit.TABLE)
    result = predicted(engine.open(part.network, part.config, plan, FP32), engine, CASES[0], 0.5)
    error = relative_float32(result, expected(model, CASES[0], 0.5))
    print(f"{backend} without a table: {error:.1e} (limit {FLOAT32})")
    assert error <= FLOAT32


def test_an_image_larger_than_the_table_is_refused() -> None:
    with pytest.raises(UsageError, match=r"20 x 6 tokens is larger than this model's 19 a side \(304 px\)"):
        sd3_conditioning.window(SD3Config(pos_embed_max_size=19), 20, 6)


def test_manifest_is_that_of_the_reference(tmp_path: Path) -> None:
    for kind in KINDS:
        model, network = tiny_dit(kind), sd3_dit.NETWORK
        model.save_pretrained(tmp_path / kind)
        config = read_config(network, tmp_path / kind)
        stored = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        assert {sd3_dit.rename(key): shape for key, shape in stored.items()} == network.manifest(config)
        assert {network.published(key) for key in network.manifest(config)} == stored.keys()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch_size": 4}, "patch_size is 4"),
        ({"qk_norm": "layer_norm"}, "qk_norm is 'layer_norm': not supported"),
        ({"caption_projection_dim": 1535}, "caption_projection_dim 1535 must be the width of both streams"),
        ({"dual_attention_layers": (24,)}, r"dual_attention_layers \[24\] must be below num_layers 24"),
        ({"attention_head_dim": 1, "num_attention_heads": 6, "caption_projection_dim": 6}, "not a multiple of 4"),
    ],
)
def test_wrong_configurations_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        SD3Config(**values)


# Planted faults: each must be seen


def corner(config: SD3Config, rows: int, columns: int) -> np.ndarray:
    return (np.arange(rows)[:, None] * config.pos_embed_max_size + np.arange(columns)).reshape(1, -1)


def other_order(block: Any) -> None:
    """Give the second attention's modulation in the place of the feed-forward's, as chunks in a wrong order would."""
    linear = block.norm1.linear
    own = type(linear).forward

    def forward(temb: torch.Tensor) -> torch.Tensor:
        rows = own(linear, temb).chunk(9, dim=-1)
        return torch.cat((*rows[:3], *rows[6:], *rows[3:6]), dim=-1)

    linear.forward = forward


def updated_x(block: Any) -> None:
    """Feed the second attention what the joint attention has changed."""
    from qwenimg.backends.torch import ops

    first, own = {}, block.attn2.forward

    def both(img: torch.Tensor, txt: torch.Tensor) -> Any:
        first["out"] = type(block.attn).both(block.attn, img, txt)
        return first["out"]

    def forward(img: torch.Tensor, txt: torch.Tensor, mods: Any) -> Any:
        rows = ops.chunks(mods[0], 9, None)

        def later(x: torch.Tensor) -> torch.Tensor:
            changed = ops.gated(img, rows[2], first["out"][0])
            return own(ops.norm_modulate(changed, rows[6], rows[7], x.dtype, sd3_dit.NORM_EPS))

        block.attn2.forward = later
        return type(block).forward(block, img, txt, mods)

    block.attn.both, block.forward = both, forward


def swapped_rows(linear: Any) -> None:
    """Swap the halves of what a linear layer returns."""
    own = type(linear).forward
    linear.forward = lambda temb: torch.cat(own(linear, temb).chunk(2, dim=-1)[::-1], dim=-1)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda model: swapped_rows(model.norm_out.linear), id="norm_out swapped"),
        pytest.param(
            lambda model: swapped_rows(model.transformer_blocks[3].norm1_context.linear), id="context swapped"
        ),
        pytest.param(lambda model: other_order(model.transformer_blocks[0]), id="nine chunks in another order"),
        pytest.param(lambda model: updated_x(model.transformer_blocks[0]), id="attn2 sees the updated x"),
    ],
)
def test_a_planted_fault_is_seen(tmp_path: Path, fault: Callable[[Any], None]) -> None:
    model = tiny_dit()
    engine, ours = opened(model, tmp_path, "cpu")
    with torch.inference_mode():
        fault(ours.model)
    error = relative_float32(predicted(ours, engine, CASES[0], 0.5), expected(model, CASES[0], 0.5))
    print(f"{error:.1e} (at least {FAULT})")
    assert error > FAULT


def test_a_table_cut_at_the_corner_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_dit()
    engine, ours = opened(model, tmp_path, "cpu")
    monkeypatch.setattr(sd3_conditioning, "window", corner)
    error = relative_float32(predicted(ours, engine, CASES[0], 0.5), expected(model, CASES[0], 0.5))
    print(f"{error:.1e} (at least {FAULT})")
    assert error > FAULT
