"""Stable Diffusion's UNet: its manifests and forwards against diffusers, what its configuration may not say, and where
float16 ends."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from support.crossed import crossed
from support.parity_recorded import Operation, trace
from support.policies import FP64, UNET
from support.refusals import refused
from support.sd_models import (
    MLX,
    PUBLISHED,
    TINY,
    TORCH,
    Given,
    reference,
    relative,
    sides,
    tiny_unet,
    unet_config,
    unet_plan,
)

from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.parity import parity
from qwenimg.common.precision.precision import bases
from qwenimg.common.runtime.probe import first_non_finite
from qwenimg.common.weights import keys

SD_BASES = bases(UNET)

# Relative L2 to diffusers in double. Measured: float32 at most 1.3e-6, diffusers' own float32 9e-7, float64 2e-15.
LIMITS = {"float32": 4e-6, "float64": 1e-13}
QUICK = ("fp32", "bf16", "fp16-plain", "fp16-upcast")  # of the bases: the others differ in the 16-bit dtype alone
SIZES = ((16, 24), (9, 13))  # the second halves to odd sides at every level
COUNTS = {  # tensors, and millions of parameters, as published
    "SD 1.5": (686, 859.521),
    "SD 2.1": (686, 865.911),
    "SDXL base": (1680, 2567.464),
    "SDXL refiner": (1220, 2259.527),
}

# Manifests


def shapes(model: torch.nn.Module) -> Manifest:
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def meta(data: dict) -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        return UNet2DConditionModel(**data)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.sample(3)
def test_published_manifest(name: str) -> None:
    model = meta(PUBLISHED[name])
    made = unet.manifest(unet_config(PUBLISHED[name]))
    print(f"{name}: {len(made)} tensors, {sum(map(prod, made.values())):,} parameters")
    assert made == shapes(model)
    assert (len(made), round(sum(map(prod, made.values())) / 1e6, 3)) == COUNTS[name]
    # As diffusers writes its configuration today, with every field that it has.
    assert unet_config(dict(model.config)) == unet_config(PUBLISHED[name])


@pytest.mark.parametrize(
    "changes",
    [
        *TINY.values(),
        TINY["SD 1.5"] | {"layers_per_block": [1, 3, 2, 1]},
        TINY["SD 2.1"] | {"transformer_layers_per_block": [2, 1, 3, 2], "time_embedding_type": "positional"},
        TINY["SDXL base"] | {"out_channels": 8, "in_channels": 5},
    ],
)
@pytest.mark.sample(3)
def test_tiny_manifest(changes: dict) -> None:
    config = unet_config(changes)
    made = unet.manifest(config)
    assert made == shapes(meta(changes))
    # What is loaded: the same numbers, and no convolution that is a matrix.
    used = {key: use.shape for key, use in unet.uses(made).items()}
    assert used.keys() == made.keys()
    assert all(prod(used[key]) == prod(made[key]) for key in made)
    assert {len(used[key]) for key in used if key.endswith(("proj_in.weight", "proj_out.weight"))} == {2}


# Forwards


@pytest.mark.parametrize(("name", "size"), crossed(TINY, SIZES))
@pytest.mark.sample(1)
def test_forward(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    theirs = tiny_unet(name)
    theirs.save_pretrained(tmp_path)
    config, plan = unet_plan(tmp_path)
    given = Given(config, size)
    expected = reference(theirs, given, torch.float64)
    errors = {"diffusers float32": relative(reference(theirs, given, torch.float32), expected)}
    for label, side in sides().items():
        made = side.predict(side.unet(config, plan, SD_BASES["fp32"]), given)
        assert parity.dtype_name(made) == "float32"
        errors[label] = relative(side.numpy(made), expected)
    exact = TORCH().predict(TORCH().unet(config, plan, FP64), given, "float64")
    assert exact.dtype == torch.float64
    errors["float64"] = relative(exact.numpy(), expected)
    print(f"{name}, {size}: " + ", ".join(f"{label} {error:.1e}" for label, error in errors.items()))
    assert errors["float64"] <= LIMITS["float64"]
    assert max(errors["torch"], errors["MLX"]) <= LIMITS["float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("unet")
    tiny_unet("SDXL base").save_pretrained(made)
    return made


@pytest.mark.parametrize("side", [TORCH, MLX], ids=["torch", "mlx"])
@pytest.mark.sample(1)
def test_images_of_a_batch_do_not_mix(folder: Path, side) -> None:
    """Each of two alone, with its own time, text and sizes, is what it is beside the other."""
    side = side()
    config, plan = unet_plan(folder)
    model, given = side.unet(config, plan, SD_BASES["fp32"]), Given(config, (9, 13))
    both = side.numpy(side.predict(model, given))
    for i in range(2):
        alone = Given(config, (9, 13))
        for name in ("latents", "features", "text", "addition"):
            setattr(alone, name, getattr(given, name)[i : i + 1])
        error = relative(side.numpy(side.predict(model, alone)), both[i : i + 1])
        print(f"{side.name}, image {i}: {error:.1e}")
        assert error <= LIMITS["float32"]  # sums in another order
    assert relative(both[:1], both[1:]) > 0.1


@pytest.mark.parametrize("side", [TORCH, MLX], ids=["torch", "mlx"])
def test_one_time_serves_a_whole_batch(folder: Path, side) -> None:
    side = side()
    config, plan = unet_plan(folder)
    model, given = side.unet(config, plan, SD_BASES["fp32"]), Given(config, (9, 13))
    given.features = given.features[[0, 0]]
    twice = side.numpy(side.predict(model, given))
    given.features = given.features[:1]
    assert relative(side.numpy(side.predict(model, given)), twice) <= LIMITS["float32"]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SD_BASES]
)
@pytest.mark.sample(0)
def test_both_backends_run_the_same_operations_in_the_same_dtypes(folder: Path, name: str) -> None:
    config, plan = unet_plan(folder)
    policy, given = SD_BASES[name], Given(config, (8, 6))
    traces = []
    for side in sides().values():
        model = side.unet(config, plan, policy)
        traces.append(trace(side.engine, lambda s=side, m=model: s.predict(m, given)))
    assert traces[0] == traces[1]
    wide = sum(operation.dtype == "float32" for operation in traces[0])
    print(f"{name}: {len(traces[0])} operations, {wide} with a float32 result")
    assert len(traces[0]) > 200
    assert traces[0][-1] == Operation(
        name="conv2d",
        path="conv_out",
        dtype="float32" if policy.final_norm else policy.transformer,
    )


# What is float32 in a 16-bit base: the operation and the path of its parameters, written out by hand.
WIDE = (
    ("linear", r"(time|add)_embedding\.linear_[12]|.*\.time_emb_proj"),
    ("conv2d", r"conv_in|conv_out|.*\.conv_shortcut"),
    ("group_norm", "conv_norm_out"),
    ("add", ""),  # of the stream, and of the embeddings
)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.sample(0)
def test_every_operation_is_in_the_dtype_of_the_policy(folder: Path, name: str) -> None:
    config, plan = unet_plan(folder)
    policy, given = SD_BASES[name], Given(config, (8, 6))
    for side in sides().values():
        model = side.unet(config, plan, policy)
        found = trace(side.engine, lambda s=side, m=model: s.predict(m, given))
        wrong, met = [], set()
        for operation in found:
            rows = [row for row in WIDE if row[0] == operation.name and re.fullmatch(row[1], operation.path)]
            met.update(rows)
            if operation.dtype != ("float32" if rows else policy.transformer):
                wrong.append(operation)
        print(f"{side.name} {name}: {len(found)} operations")
        assert not wrong and met == set(WIDE)
        weights = {key.rpartition(".")[0] for key in unet.manifest(config)}
        assert {operation.path for operation in found if operation.path} == weights, "every weight is used"


# Where float16 ends


def half(side, values: np.ndarray):
    """[B L H D] in float16, its axes as they are."""
    return side.array(values.reshape(-1), "float16").reshape(values.shape)


def large_logits(side) -> tuple[np.ndarray, np.ndarray]:
    """Attention whose scores reach 80 * 80 * 128 / sqrt(128) = 72,408, in float16, and what it should be."""
    q = np.full((1, 3, 1, 128), 80.0)
    k = np.full((1, 5, 1, 128), 80.0) * np.array([1, 0.5, -1, 0.25, 1.0])[None, :, None, None]
    v = np.random.default_rng(1).standard_normal((1, 5, 1, 128)).astype(np.float16).astype(np.float64)
    scores = np.einsum("blhd,bshd->bhls", q, k) / np.sqrt(128)
    assert scores.max() > np.finfo(np.float16).max
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhls,bshd->blhd", weights, v).reshape(1, 3, 128)
    return side.numpy(side.nn.attention(*(half(side, x) for x in (q, k, v)))), expected


def test_scores_beyond_float16_do_not_overflow() -> None:
    """The scores themselves would: in float16 their largest is infinite, and so the softmax NaN."""
    q = torch.full((1, 3, 128), 80.0, dtype=torch.float16)
    assert ((q @ q.transpose(1, 2)) * 128**-0.5).softmax(-1).isnan().all()
    for label, side in sides().items():
        made, expected = large_logits(side)
        error = relative(made, expected)
        print(f"{label}: {error:.1e}")
        assert error <= 1e-3  # two roundings to float16


@pytest.mark.parametrize("side", [TORCH, MLX], ids=["torch", "mlx"])
@pytest.mark.sample(0)
def test_an_overflow_in_float16_is_named(tmp_path: Path, side) -> None:
    """Queries of 1e5: float16 does not hold them, and the probe tells whose they are. bfloat16 does."""
    side = side()
    theirs = tiny_unet("SD 1.5")
    with torch.no_grad():
        theirs.mid_block.attentions[0].transformer_blocks[0].attn2.to_q.weight.mul_(1e5)
    theirs.save_pretrained(tmp_path)
    config, plan = unet_plan(tmp_path)
    given = Given(config, (8, 8))
    found = {}
    for name in ("fp16", "bf16"):
        model = side.unet(config, plan, SD_BASES[name])
        found[name] = str(first_non_finite(side.engine, lambda m=model: side.predict(m, given)))
    print(side.name, found)
    path = "mid_block.attentions.0.transformer_blocks.0.attn2.to_q"
    assert found == {"fp16": f"{path}, operation linear, float16", "bf16": "None"}


# Heads without a fused kernel


@pytest.mark.parametrize(("width", "padded"), [(40, 64), (64, 64), (72, 72), (110, 128), (160, 160), (512, 512)])
def test_padded_heads_are_exact(width: int, padded: int) -> None:
    """Zeros behind a head's channels change no bit of what the rest gives."""
    import mlx.core as mx

    attending = MLX().attending
    assert attending.padded_width(width) == padded
    rng = np.random.default_rng(width)
    q, k, v = (mx.array(rng.standard_normal((1, n, 2, width)).astype(np.float32)) for n in (9, 13, 13))
    wide = [attending.pad_heads(x, padded) for x in (q, k, v)]
    assert {x.shape[-1] for x in wide} == {padded}
    plain, exact = ([x.transpose(0, 2, 1, 3) for x in xs] for xs in ((q, k, v), wide))
    made = attending._attend(*exact, width**-0.5, None)
    assert not np.array(made[..., width:]).any()
    error = relative(np.array(made[..., :width]), np.array(attending._attend(*plain, width**-0.5, None)))
    print(f"{width} in {padded}: {error:.1e}")
    assert error <= 1e-7  # the same sums; a library may split a longer one elsewhere


@pytest.mark.parametrize("width", [40, 160])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_attention_where_a_gpu_has_kernels(monkeypatch: pytest.MonkeyPatch, width: int, dtype: str) -> None:
    """The way that Metal takes, walked on the CPU: 40 padded for its kernel, 160 in float32 and in chunks."""
    import mlx.core as mx

    attending, rng = MLX().attending, np.random.default_rng(width)
    heads = [mx.array(rng.standard_normal((2, n, 3, width)).astype(np.float32)) for n in (33, 7, 7)]
    q, k, v = (x.astype(MLX().nn.DTYPES[dtype]) for x in heads)
    expected, seen = np.array(attending.attention(q, k, v)), []
    attend = attending._attend
    monkeypatch.setattr(attending, "on_gpu", lambda: True)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(attending, "SCORE_BYTES", 4 * 2 * 3 * 7 * 10)  # ten rows of scores
    monkeypatch.setattr(attending, "_attend", lambda *a: seen.append((a[0].shape, a[0].dtype)) or attend(*a))
    made = np.array(attending.attention(q, k, v))
    error = relative(made.astype(np.float64), expected.astype(np.float64))
    print(f"{width} {dtype}: {error:.1e}, {seen}")
    if width == 40:
        assert seen == [((2, 3, 33, 64), MLX().nn.DTYPES[dtype])]
    else:
        assert seen == [((2, 3, rows, 160), mx.float32) for rows in (10, 10, 10, 3)]
    assert error <= (1e-6 if dtype == "float32" else 2e-3)  # on this CPU the kernel's place rounds scores to float16


# Refused


NARROW = {"block_out_channels": [2] * 4, "norm_num_groups": 1, "attention_head_dim": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"class_embed_type": "timestep"}, "class_embed_type is 'timestep'"),
        ({"num_class_embeds": 7}, "num_class_embeds"),
        ({"encoder_hid_dim": 32, "encoder_hid_dim_type": "text_proj"}, "encoder_hid_dim"),
        ({"dual_cross_attention": True}, "dual_cross_attention is True: not supported; expected false"),
        ({"addition_embed_type": "text"}, "addition_embed_type 'text'"),
        ({"addition_embed_type": "text_time"}, "text_time needs"),
        ({"resnet_time_scale_shift": "scale_shift"}, "resnet_time_scale_shift"),
        ({"mid_block_type": "UNetMidBlock2DSimpleCrossAttn"}, "mid_block_type"),
        ({"mid_block_type": None}, "mid_block_type"),
        ({"down_block_types": ["AttnDownBlock2D"] * 4}, "'AttnDownBlock2D' is not supported"),
        ({"up_block_types": ["DownBlock2D"] * 4}, "expected UpBlock2D or CrossAttnUpBlock2D"),
        ({"up_block_types": ["UpBlock2D"] * 3}, "up_block_types has 3 entries, block_out_channels 4"),
        ({"only_cross_attention": [True, False, False, False]}, "only_cross_attention"),
        ({"time_cond_proj_dim": 256}, "time_cond_proj_dim is 256"),
        ({"time_embedding_type": "fourier"}, "fourier"),
        ({"reverse_transformer_layers_per_block": [1, 1, 1, 1]}, "reverse_transformer_layers_per_block"),
        ({"transformer_layers_per_block": [[1, 1], 1, 1, 1]}, "transformer_layers_per_block"),
        ({"conv_in_kernel": 1}, "conv_in_kernel is 1"),
        ({"act_fn": "mish"}, "act_fn is 'mish'"),
        ({"norm_num_groups": 48}, "norm_num_groups 48 does not divide"),
        ({"norm_num_groups": None}, "norm_num_groups"),
        ({"attention_head_dim": 7}, "attention_head_dim 7"),
        ({"attention_head_dim": [8, 8]}, "attention_head_dim has 2 entries"),
        ({"block_out_channels": []}, "block_out_channels"),
        (NARROW | {"freq_shift": 1}, "begin with 2: the time needs an even number above 2"),
        ({"block_out_channels": 320}, "block_out_channels"),
        ({"cross_attention_dim": [768, 768]}, "cross_attention_dim"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"in_channels": 0}, "in_channels"),
        ({"layers_per_block": 10**6}, "layers_per_block"),
        ({"something_new": 1}, "something_new"),
    ],
)
def test_refused(changes: dict, words: str) -> None:
    assert words in refused(unet_config, PUBLISHED["SD 1.5"] | changes)


def test_fields_that_switch_something_off_are_accepted() -> None:
    off = {"only_cross_attention": [False] * 4, "class_embed_type": None, "upcast_attention": None, "dropout": 0.1}
    off |= {"mid_block_scale_factor": 1.0, "num_attention_heads": None, "dual_cross_attention": None}
    assert unet_config(PUBLISHED["SD 1.5"] | off) == unet_config(PUBLISHED["SD 1.5"])


def test_a_checkpoint_of_another_model_is_refused(folder: Path) -> None:
    config, _ = unet_plan(folder)
    other = unet.manifest(replace(config, cross_attention_dim=24))
    assert "another model" in refused(keys.plan, folder, "unet", other)
