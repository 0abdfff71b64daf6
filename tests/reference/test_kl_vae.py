"""Stable Diffusion's VAE: manifest and both halves against diffusers, tiles against the whole, float16's end."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from refusals import refused
from sd_models import MLX, TORCH, VAE_PUBLISHED, VAE_TINY, Side, relative, sides, tiny_vae, vae_config, vae_plan

from qwenimg.common.networks import kl_vae
from qwenimg.common.numbers import tiles
from qwenimg.common.parity import parity
from qwenimg.common.precision.precision import FP64, UNET, bases, parse
from qwenimg.common.runtime.probe import first_non_finite
from qwenimg.common.weights import keys

SD_BASES = bases(UNET)

# Relative L2 to diffusers in double. Measured: float32 at most 2.4e-6, diffusers' own 1.5e-6, float64 2e-15.
LIMITS = {"float32": 6e-6, "float64": 1e-13}
WHOLE = 2**20  # a tile side that no image reaches
# Tiles against the whole, where the picture is everywhere alike. Measured: 0.045 with tiles of 24 latents, 0.088 with
# 12; the reference's tiles 0.15 and 0.34. Where it is not, a tile's statistics are not the whole's: 0.22 and 0.46 (the
# reference 0.43 and 0.69) for slow waves and these random weights.
TILED = {24: 0.1, 12: 0.2}
SEAM = 2.5  # largest step of the error from one column or row to the next over the median step; a hard seam has 3.4

LATENTS = np.random.default_rng(0).standard_normal((2, 4, 9, 7))
PIXELS = np.random.default_rng(1).uniform(-1, 1, (2, 3, 36, 28))


def run(side: Side, values: np.ndarray, dtype: str, call) -> np.ndarray:
    with torch.inference_mode():
        return side.numpy(call(side.array(values, dtype)))


def both_halves(side: Side, model, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    height, width = LATENTS.shape[2:]
    decoded = run(side, LATENTS, dtype, lambda z: model.decode(z, height, width, WHOLE))
    return decoded, run(side, PIXELS, dtype, model.encode)


# Manifest


def test_published_manifest() -> None:
    from diffusers import AutoencoderKL

    with torch.device("meta"):
        model = AutoencoderKL(**VAE_PUBLISHED)
    made = kl_vae.manifest(vae_config(VAE_PUBLISHED))
    assert made == {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert (len(made), round(sum(map(prod, made.values())) / 1e6, 3)) == (248, 83.654)
    assert vae_config(dict(model.config)) == vae_config(VAE_PUBLISHED)
    assert vae_config(VAE_PUBLISHED).scale == 8


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_quant_conv": False, "use_post_quant_conv": False, "latent_channels": 16},
        {"layers_per_block": 3, "in_channels": 4, "out_channels": 5},
        {"block_out_channels": [8], "down_block_types": ["DownEncoderBlock2D"], "up_block_types": ["UpDecoderBlock2D"]},
    ],
)
def test_tiny_manifest(changes: dict) -> None:
    from diffusers import AutoencoderKL

    data = VAE_TINY | changes
    with torch.device("meta"):
        model = AutoencoderKL(**data)
    assert kl_vae.manifest(vae_config(data)) == {key: tuple(v.shape) for key, v in model.state_dict().items()}


def test_old_names_of_the_attention(tmp_path: Path) -> None:
    """As older files have them, and as diffusers renames them."""
    from diffusers import AutoencoderKL

    theirs = tiny_vae()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    new = safetensors.torch.load_file(file)
    old_names = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    old = dict(new)
    for today, before in old_names.items():
        old = {key.replace(today, before): value for key, value in old.items()}
    assert len(old.keys() - new.keys()) == 16
    assert {kl_vae.rename(key) for key in old} == {kl_vae.rename(key) for key in new} == new.keys()
    safetensors.torch.save_file(old, file, metadata={"format": "pt"})
    config, plan = vae_plan(tmp_path)
    assert {
        name: entry.source.first.key for name, entry in plan.entries.items() if name != entry.source.first.key
    }.keys() == new.keys() - old.keys()
    expected = AutoencoderKL.from_pretrained(tmp_path).double()
    with torch.no_grad():
        pixels = expected.decode(torch.from_numpy(LATENTS)).sample.numpy()
    assert relative(both_halves(TORCH(), TORCH().vae(config, plan, FP64), "float64")[0], pixels) <= LIMITS["float64"]


# Both halves


@pytest.mark.parametrize("quant", [True, False], ids=["quant_conv", "without"])
def test_both_halves(tmp_path: Path, quant: bool) -> None:
    theirs = tiny_vae(use_quant_conv=quant, use_post_quant_conv=quant)
    theirs.save_pretrained(tmp_path)
    config, plan = vae_plan(tmp_path)
    expected = {}
    for dtype in (torch.float32, torch.float64):
        theirs = theirs.to(dtype)
        with torch.no_grad():
            pixels = theirs.decode(torch.from_numpy(LATENTS).to(dtype)).sample
            moments = theirs.encode(torch.from_numpy(PIXELS).to(dtype)).latent_dist.parameters
        expected[dtype] = pixels.double().numpy(), moments.double().numpy()
    made = {
        label: both_halves(side, side.vae(config, plan, SD_BASES["fp32"]), "float32") for label, side in sides().items()
    }
    made |= {
        "diffusers": expected[torch.float32],
        "float64": both_halves(TORCH(), TORCH().vae(config, plan, FP64), "float64"),
    }
    for i, half in enumerate(("decoder", "encoder")):
        errors = {label: relative(parts[i], expected[torch.float64][i]) for label, parts in made.items()}
        print(f"{half}: " + ", ".join(f"{label} {error:.1e}" for label, error in errors.items()))
        assert errors["float64"] <= LIMITS["float64"]
        assert max(errors["torch"], errors["MLX"]) <= LIMITS["float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vae")
    tiny_vae().save_pretrained(made)
    return made


def test_both_backends_run_the_same_operations_in_the_same_dtypes(folder: Path) -> None:
    config, plan = vae_plan(folder)
    for policy in (SD_BASES["fp32"], parse("fp16,vae=fp16", on_gpu=False, kind=UNET)):
        traces = []
        for side in sides().values():
            model = side.vae(config, plan, policy)
            traces.append(parity.trace(side.engine, lambda s=side, m=model: both_halves(s, m, "float32")))
        assert traces[0] == traces[1]
        assert {operation.dtype for operation in traces[0]} == {policy.vae}


# Tiles


def waves(height: int, width: int) -> np.ndarray:
    """Latents [1 4 h w] that are bright here and dark there, over more than a tile."""
    y, x = np.mgrid[:height, :width] / 12
    slopes = np.random.default_rng(3).uniform(0.5, 2, (4, 3))
    return np.stack([np.sin(a * x + b * y + c) for a, b, c in slopes])[None]


NOISE = np.random.default_rng(2).standard_normal((1, 4, 33, 21))


@pytest.mark.parametrize("tile", TILED)
def test_tiles_are_near_the_whole(folder: Path, tile: int) -> None:
    """They cannot be equal: a group norm sees the tile alone. The reference's tiles are held beside it."""
    from diffusers import AutoencoderKL

    config, plan = vae_plan(folder)
    theirs = AutoencoderKL.from_pretrained(folder)
    theirs.enable_tiling()
    theirs.tile_latent_min_size, theirs.tile_sample_min_size = tile, tile * config.scale
    for z, limit, seam in ((NOISE, TILED[tile], SEAM), (0.5 * NOISE + waves(33, 21), 1.0, 10.0)):
        errors, seams = {}, {}
        for label, side in sides().items():
            model = side.vae(config, plan, SD_BASES["fp32"])
            whole = run(side, z, "float32", lambda a, m=model: m.decode(a, 33, 21, WHOLE))
            tiled = run(side, z, "float32", lambda a, m=model: m.decode(a, 33, 21, tile))
            errors[label] = relative(tiled, whole)
            for axis in (2, 3):
                steps = np.abs(np.diff(tiled - whole, axis=axis)).mean((0, 1, 5 - axis))
                seams[label, axis] = steps.max() / np.median(steps)
        with torch.no_grad():
            errors["diffusers"] = relative(theirs.decode(torch.from_numpy(z).float()).sample.numpy(), whole)
        print(f"tiles of {tile}: " + ", ".join(f"{label} {error:.3f}" for label, error in errors.items()))
        print(f"largest step of the error over the median: {max(seams.values()):.2f}")
        assert max(errors["torch"], errors["MLX"]) <= min(limit, errors["diffusers"])
        assert abs(errors["torch"] - errors["MLX"]) < 1e-4
        assert max(seams.values()) <= seam


@pytest.mark.parametrize(
    ("size", "tile", "overlap", "scale"),
    [(33, 16, 8, 4), (21, 11, 8, 8), (5, 5, 8, 2), (9, 2, 8, 3), (100, 7, 3, 1), (64, 32, 8, 8)],
)
def test_weights_of_tiles_add_up_to_one(size: int, tile: int, overlap: int, scale: int) -> None:
    total = np.zeros(size * scale)
    parts = tiles.fades(size, tile, overlap, scale)
    for part in parts:
        assert 0 <= part.read_start < part.read_stop <= size
        assert len(part.weights) == (part.read_stop - part.read_start) * scale
        assert all(0 <= weight <= 1 for weight in part.weights)
        total[part.read_start * scale : part.read_stop * scale] += part.weights
    assert np.abs(total - 1).max() < 1e-12
    assert len(parts) == -(-size // tile)


# Where float16 ends


@pytest.mark.parametrize("side", [TORCH, MLX], ids=["torch", "mlx"])
def test_an_overflow_in_float16_is_named(tmp_path: Path, side) -> None:
    """Like SDXL's VAE: weights that float16 holds, and an activation behind an upsampler that it does not."""
    side = side()
    theirs = tiny_vae()
    with torch.no_grad():
        theirs.decoder.up_blocks[1].upsamplers[0].conv.weight.mul_(3e4)
    theirs.save_pretrained(tmp_path)
    config, plan = vae_plan(tmp_path)
    assert config.force_upcast
    found = {}
    for name in ("fp16,vae=fp16", "fp16", "bf16,vae=bf16"):
        policy = parse(name, on_gpu=True, kind=UNET)
        model, z = side.vae(config, plan, policy), side.array(LATENTS[:1], "float32")

        def decode(model=model, z=z):
            with torch.inference_mode():
                return model.decode(z, 9, 7, WHOLE)

        found[name] = str(first_non_finite(side.engine, decode))
    print(side.name, found)
    where = "decoder.up_blocks.1.upsamplers.0.conv, operation conv2d, float16"
    assert found == {"fp16,vae=fp16": where, "fp16": "None", "bf16,vae=bf16": "None"}


# Refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"down_block_types": ["AttnDownEncoderBlock2D"] * 4}, "'AttnDownEncoderBlock2D': not supported"),
        ({"up_block_types": ["UpDecoderBlock2D"] * 3 + ["X"]}, "up_block_types is 'X'"),
        ({"mid_block_add_attention": False}, "mid_block_add_attention is False: not supported; expected true"),
        ({"act_fn": "gelu"}, "act_fn"),
        ({"norm_num_groups": 48}, "norm_num_groups 48"),
        ({"block_out_channels": []}, "block_out_channels is empty"),
        ({"latents_mean": [0.0] * 4}, "latents_mean"),
        ({"scaling_factor": 0.0}, "scaling_factor"),
        ({"scaling_factor": "0.2"}, "scaling_factor"),
        ({"layers_per_block": 0}, "layers_per_block"),
    ],
)
def test_refused(changes: dict, words: str) -> None:
    assert words in refused(vae_config, VAE_PUBLISHED | changes)


def test_a_checkpoint_of_another_model_is_refused(folder: Path) -> None:
    other = kl_vae.manifest(vae_config(VAE_TINY | {"latent_channels": 16}))
    assert "another model" in refused(keys.plan, folder, "vae", other)
