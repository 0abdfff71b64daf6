"""Two savings that change nothing: modulation made once per schedule and freed, tables and masks made once per run.

Each is held against the plain path: every weight resident, everything made anew in every step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_model import write
from support.parity_cases import MLX, TORCH, Twin
from support.policies import FP32, FP64

import qwenimg
from qwenimg.common.networks.denoisers import qwen_conditioning, qwen_dit
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import Entry, LoadPlan

# Relative L2. The same products, but over all rows of a schedule at once: a library may sum them in another order.
LIMITS = {"fp64": 1e-12, "fp32": 1e-6}

SIZES = {
    "num_layers": 3,
    "attention_head_dim": 22,
    "num_attention_heads": 3,
    "joint_attention_dim": 60,
    "axes_dims_rope": (6, 8, 8),
}
TIMES = (981.7, 640.0, 437.3, 20.0)
OTHER_TIMES = (913.3, 55.5)
IMAGES = [(1, 5, 7), (1, 2, 3)]  # the second conditions the first; with zero_cond_t it is seen at timestep 0
MODELS = {
    "plain": ({}, 0),
    "zero_cond_t": ({"zero_cond_t": True}, 0),
    "additional 1": ({"zero_cond_t": True, "use_additional_t_cond": True}, 1),
}
ARMS = {"torch fp64": (TORCH, FP64), "torch fp32": (TORCH, FP32), "MLX fp32": (MLX, FP32)}


@contextmanager
def opened(folder: Path, model: str) -> Iterator[tuple[qwen_dit.QwenDiTConfig, LoadPlan, int]]:
    changes, addition = MODELS[model]
    config = qwen_dit.QwenDiTConfig(**(SIZES | changes))
    manifest = qwen_dit.manifest(config)
    plan = keys.plan(write(folder / "dit.safetensors", manifest, "F32"), "transformer", manifest, uses=qwen_dit.uses)
    yield config, plan, addition
    plan.close()


def transformer(twin: Twin, config: qwen_dit.QwenDiTConfig, plan: LoadPlan, precision: Precision) -> Any:
    return twin.engine.open("qwen_dit", config, plan.stored(precision), precision)


def all_resident(twin: Twin, made: Any) -> Any:
    device = [made.device] if twin.name == "torch" else []
    twin.load.fill(made.model, made.plan, *device)
    return made


def modulation_of(twin: Twin, plain: Any, timestep: float, addition: int) -> Any:
    """The modulation of one step, straight from the layers."""
    rows = twin.array(qwen_conditioning.time_rows(plain.config, [timestep], "float32"), plain_dtype(twin, plain))
    chosen = index(twin, addition)
    with torch.inference_mode():
        temb = plain.model.time_text_embed(rows, chosen)
        blocks = [(img, txt) for img, txt in (block.modulation(temb) for block in plain.model.transformer_blocks)]
        return blocks, plain.model.norm_out.modulation(temb)


def index(twin: Twin, value: int) -> Any:
    if twin.name == "torch":
        return torch.tensor([value])
    import mlx.core as mx

    return mx.array([value])


def plain_dtype(twin: Twin, made: Any) -> str:
    return "float64" if twin.name == "torch" and made.table_dtype == torch.float64 else "float32"


def texts(twin: Twin, made: Any, *lengths: int) -> list[Any]:
    rng = np.random.default_rng(5)
    width = made.config.joint_attention_dim
    return [twin.array(rng.standard_normal((1, length, width)), plain_dtype(twin, made)) for length in lengths]


def latents(twin: Twin, made: Any, images: list[tuple[int, int, int]]) -> Any:
    tokens = sum(math.prod(image) for image in images)
    values = np.random.default_rng(6).standard_normal((1, tokens, made.config.in_channels))
    return twin.array(values, plain_dtype(twin, made))


def relative(twin: Twin, ours: Any, theirs: Any) -> float:
    a, b = (np.asarray(twin.engine.numpy(x), np.float64) for x in (ours, theirs))
    assert a.shape == b.shape and np.isfinite(a).all() and b.std() > 0.1
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def resident(twin: Twin, model: Any) -> set[str]:
    """The parameters that have values: MLX has zeros for the others, of which no weight here consists."""
    if twin.name == "torch":
        return {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    from mlx.utils import tree_flatten

    return {name for name, value in tree_flatten(model.parameters()) if value.any().item()}


# Modulation


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sample(1)
def test_modulation_once_is_modulation_in_every_step(tmp_path: Path, model: str, arm: str) -> None:
    make, precision = ARMS[arm]
    twin = make()
    with opened(tmp_path, model) as (config, plan, addition):
        saving = transformer(twin, config, plan, precision)
        plain = all_resident(twin, transformer(twin, config, plan, precision))
        for times in (TIMES, OTHER_TIMES):  # the second schedule reads the freed weights again
            modulation = saving.modulate(qwen_conditioning.time_rows(config, times, "float32"), addition)
            assert resident(twin, saving.model) == {n for n in plan.entries if not qwen_dit.timestep_only(n)}
            worst = Counter[str]()
            for step, time in enumerate(times):
                once, final = modulation.at(step, config.zero_cond_t)
                blocks, plain_final = modulation_of(twin, plain, time, addition)
                for (img, txt), (plain_img, plain_txt) in zip(once, blocks, strict=True):
                    worst["rows"] = max(worst["rows"], relative(twin, img, plain_img))
                    worst["rows"] = max(worst["rows"], relative(twin, txt, plain_txt[:1]))
                worst["rows"] = max(worst["rows"], relative(twin, final, plain_final[:1]))
                velocities = velocity(twin, saving, modulation, step), plain_velocity(twin, plain, blocks, plain_final)
                worst["velocity"] = max(worst["velocity"], relative(twin, *velocities))
            print(f"{arm}, {model}, {len(times)} steps: rows {worst['rows']:.1e}, velocity {worst['velocity']:.1e}")
            assert max(worst.values()) <= LIMITS[precision.name]


def velocity(twin: Twin, made: Any, modulation: Any, step: int) -> Any:
    condition = made.condition(texts(twin, made, 9), IMAGES)
    return made.predict(latents(twin, made, IMAGES), (modulation, step), condition)


def plain_velocity(twin: Twin, plain: Any, blocks: list[Any], final: Any) -> Any:
    """The model's own forward on the modulation of one step, with tables made for it alone."""
    c = plain.condition(texts(twin, plain, 9), IMAGES)
    mods = [(img if plain.config.zero_cond_t else img[:1], txt[:1]) for img, txt in blocks]
    with torch.inference_mode():
        return plain.model(latents(twin, plain, IMAGES), c.txt, mods, final[:1], c.rope, c.index, c.mask)


def test_another_timestep_is_another_modulation(tmp_path: Path) -> None:
    """What the test above compares depends on the step by far more than its limit."""
    with opened(tmp_path, "plain") as (config, plan, _):
        made = transformer(TORCH(), config, plan, FP32)
        modulation = made.modulate(qwen_conditioning.time_rows(config, TIMES, "float32"))
        first, second = (velocity(TORCH(), made, modulation, step) for step in (0, 1))
    assert relative(TORCH(), first, second) > 0.01


# Tables and masks


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("lengths", [(9,), (9, 4)], ids=["one text", "padded batch"])
@pytest.mark.sample(3)
def test_tables_once_are_tables_in_every_step(tmp_path: Path, arm: str, lengths: tuple[int, ...]) -> None:
    make, precision = ARMS[arm]
    twin = make()
    with opened(tmp_path, "zero_cond_t") as (config, plan, _):
        made = transformer(twin, config, plan, precision)
        modulation = made.modulate(qwen_conditioning.time_rows(config, TIMES, "float32"))
        words, x = texts(twin, made, *lengths), latents(twin, made, IMAGES)
        once = made.condition(words, IMAGES)
        for step in range(len(TIMES)):
            kept = twin.engine.numpy(made.predict(x, (modulation, step), once))
            anew = twin.engine.numpy(made.predict(x, (modulation, step), made.condition(words, IMAGES)))
            assert kept.shape[0] == len(lengths) and np.array_equal(kept, anew), f"step {step}"


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_a_run_makes_them_once(tiny_folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three steps with two branches, then again: tables once per branch and run, modulation once in all."""
    calls = Counter[str]()
    for name in ("image_and_text_rope", "zero_index", "key_mask", "time_rows"):
        original = getattr(qwen_conditioning, name)
        monkeypatch.setattr(qwen_conditioning, name, counting(calls, name, original))
    pipe = qwenimg.load(tiny_folder, backend=backend, precision="fp32")
    twin = TORCH() if backend == "cpu" else MLX()
    monkeypatch.setattr(twin.load, "tensor", counting(calls, "modulation weights", twin.load.tensor, modulation_weight))
    for seed in (1, 2):
        pipe("a red circle", steps=3, width=32, height=48, seed=seed)
    weights = sum(qwen_dit.timestep_only(name) for name in pipe.model.checkpoint["transformer"].plan.entries)
    pipe.model.checkpoint.close()
    assert calls == {
        "image_and_text_rope": 4,
        "zero_index": 4,
        "key_mask": 4,
        "time_rows": 1,
        "modulation weights": weights,
    }


def modulation_weight(entry: Entry, *_: object) -> bool:
    return qwen_dit.timestep_only(entry.name)


def counting(calls: Counter[str], name: str, original: Any, counts: Any = None) -> Any:
    def call(*arguments: Any) -> Any:
        calls[name] += counts is None or counts(*arguments)
        return original(*arguments)

    return call
