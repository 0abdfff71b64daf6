"""Stable Diffusion's VAE: manifest and both halves against diffusers, bands against the whole, float16's end."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from support.parity_recorded import trace
from support.policies import FP64, UNET, parse
from support.refusals import refused
from support.sd_models import MLX, TORCH, VAE_PUBLISHED, VAE_TINY, Side, relative, sides, tiny_vae, vae_config, vae_plan

from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.numbers import moments
from qwenimg.common.precision.precision import bases
from qwenimg.common.runtime.probe import first_non_finite
from qwenimg.common.weights import keys

SD_BASES = bases(UNET)

# Relative L2 to diffusers in double. Measured: float32 at most 2.4e-6, diffusers' own 1.5e-6, float64 2e-15.
LIMITS = {"float32": 6e-6, "float64": 1e-13}
WHOLE = 2**20  # rows that no image has
# Bands against the whole, of the largest value: the same sums in float32 in other blocks. Measured: at most 1.4e-6 on
# torch, 5e-6 on MLX, whose own sums over a whole image are 4e-6 from float64 here.
BANDS = {"float32": 1e-5, "float64": 1e-13}
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}

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
            traces.append(trace(side.engine, lambda s=side, m=model: both_halves(s, m, "float32")))
        assert traces[0] == traces[1]
        assert {operation.dtype for operation in traces[0]} == {policy.vae}


# Bands


def uneven(height: int, width: int) -> np.ndarray:
    """Latents [1 4 h w] that are bright above and dark below: the moments of no band are those of the whole."""
    noise = np.random.default_rng(2).standard_normal((1, 4, height, width))
    return noise + np.linspace(2, -2, height)[:, None]


def pictures(height: int, width: int, scale: int) -> np.ndarray:
    pixels = np.random.default_rng(3).uniform(-1, 1, (1, 3, height * scale, width * scale))
    return 0.5 * pixels + np.linspace(-0.5, 0.5, height * scale)[:, None]


def farthest(made: np.ndarray, whole: np.ndarray) -> float:
    assert made.shape == whole.shape and np.isfinite(made).all()
    return float(np.abs(made - whole).max() / np.abs(whole).max())


def halves_apart(side: Side, model, dtype: str, size: tuple[int, int], scale: int, rows: int) -> tuple[float, float]:
    """How far both halves in bands of `rows` rows are from the whole."""
    z, x = uneven(*size), pictures(*size, scale)
    decoded = [run(side, z, dtype, lambda a, r=r: model.decode(a, *size, r)) for r in (rows, WHOLE)]
    encoded = [run(side, x, dtype, lambda a, r=r: model.encode(a, r)) for r in (rows, WHOLE)]
    return farthest(*decoded), farthest(*encoded)


@pytest.mark.parametrize(("size", "rows"), [((9, 7), 1), ((9, 7), 5), ((17, 6), 8), ((33, 21), 24), ((33, 21), 100)])
@pytest.mark.sample(1)
def test_bands_are_the_whole(folder: Path, size: tuple[int, int], rows: int) -> None:
    config, plan = vae_plan(folder)
    assert size[0] * config.scale > rows and any(TORCH().vae(config, plan, FP64).decoder.wide)
    cases = [("torch", TORCH(), FP64, "float64")]
    cases += [(label, side, SD_BASES["fp32"], "float32") for label, side in sides().items()]
    for label, side, policy, dtype in cases:
        errors = halves_apart(side, side.vae(config, plan, policy), dtype, size, config.scale, rows)
        print(f"{label} {dtype}, bands of {rows} of {size[0] * config.scale} rows: {errors[0]:.1e} {errors[1]:.1e}")
        assert max(errors) <= BANDS[dtype]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.sample(1)
def test_bands_in_16_bit_are_as_near_to_float64_as_the_whole(folder: Path, dtype: str) -> None:
    config, plan = vae_plan(folder)
    policy = parse({"bfloat16": "bf16,vae=bf16", "float16": "fp16,vae=fp16"}[dtype], on_gpu=True, kind=UNET)
    z = uneven(17, 9)
    exact = run(TORCH(), z, "float64", lambda a: TORCH().vae(config, plan, FP64).decode(a, 17, 9, WHOLE))
    for label, side in sides().items():
        model = side.vae(config, plan, policy)
        whole, made = (run(side, z, "float32", lambda a, r=r, m=model: m.decode(a, 17, 9, r)) for r in (WHOLE, 16))
        errors = relative(whole, exact), relative(made, exact)
        print(f"{label} {dtype}: whole {errors[0]:.1e}, in bands {errors[1]:.1e}")
        assert errors[1] <= 1.2 * errors[0] and errors[1] <= 8 * ROUNDING[dtype]


def test_moments_of_each_band_alone_are_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that tiles with their own statistics have."""
    from qwenimg.backends.torch.networks.vaes import bands

    config, plan = vae_plan(folder)
    monkeypatch.setattr(bands, "combined", lambda parts: parts[0])
    errors = halves_apart(TORCH(), TORCH().vae(config, plan, SD_BASES["fp32"]), "float32", (33, 21), config.scale, 24)
    print(f"with the first band's moments: {errors[0]:.2f} {errors[1]:.2f}")
    assert min(errors) > 1000 * BANDS["float32"]


@pytest.mark.parametrize("part", ["ResidualBlock", "Downsample", "Upsample"])
@pytest.mark.sample(1)
def test_rows_that_are_not_read_are_seen(folder: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    from qwenimg.backends.torch.networks.vaes import kl_vae as network

    config, plan = vae_plan(folder)
    layer = getattr(network, part)
    whole = layer.part
    less = {"ResidualBlock": 1, "Downsample": 0, "Upsample": 0}[part]
    monkeypatch.setattr(layer, "part", lambda self: whole(self)._replace(reach=less))
    errors = halves_apart(TORCH(), TORCH().vae(config, plan, FP64), "float64", (33, 21), config.scale, 24)
    assert max(errors) > 1e-6


def test_moments_of_parts_are_those_of_all() -> None:
    values = np.random.default_rng(4).standard_normal((3, 1000)) + 1e4
    parts = np.split(values, [1, 7, 500], axis=1)
    joined = moments.combined(
        [moments.moments(part.shape[1], part.mean(1), ((part - part.mean(1)[:, None]) ** 2).sum(1)) for part in parts]
    )
    assert joined.values == 1000
    assert np.allclose(joined.mean, values.mean(1), rtol=1e-14) and np.allclose(
        joined.variance, values.var(1), rtol=1e-9
    )


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
