"""Qwen2.5-VL with its vision tower on both backends, and its image processor, against transformers, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import seen_pictures
from support.relative import relative_float32
from support.seen_pictures import Seen, prompt, reference_inputs, states, theirs

from qwenimg.common.base.errors import UsageError
from qwenimg.common.networks.encoders import qwen_vl_vision
from qwenimg.common.networks.encoders.qwen_vl_vision import NETWORK, QwenVLVisionConfig
from qwenimg.common.numbers import rope
from qwenimg.common.parts.components import read_config
from qwenimg.common.pictures.patches import QWEN2_VL, patches, whole_blocks

BACKENDS = ("cpu", "mlx")
FLOAT32 = 3e-6  # relative L2 of a forward
# Pixels of pictures: windows that fit, that are cut at the right, at the bottom, at both; and less than one window
SIZES = [(96, 96), (108, 48), (96, 60), (132, 84), (60, 156), (24, 180)]


@pytest.fixture(scope="module")
def model() -> Any:
    return theirs()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text_encoder")
    model.save_pretrained(folder)
    return folder


def opened(folder: Path, backend: str) -> tuple[Any, Any]:
    return seen_pictures.opened(folder, backend, NETWORK)


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def seen(width: int, height: int, seed: int = 0) -> Seen:
    """A picture of which every pixel is seen: it needs no other size."""
    return seen_pictures.seen(height // 6, width // 6, seed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vision_tower(model: Any, folder: Path, backend: str) -> None:
    engine, ours = opened(folder, backend)
    for width, height in SIZES:
        one = seen(width, height)
        with torch.inference_mode():
            grid = torch.tensor([[1, one.rows, one.columns]])
            slots = model.model.visual(torch.from_numpy(one.patches), grid_thw=grid).pooler_output
        result = np.asarray(engine.numpy(ours.slots(*one)))[0]
        error = relative_float32(result, slots.numpy())
        print(f"{backend} {width}x{height}: {error:.1e} (limit {FLOAT32})")
        assert error <= FLOAT32 and result.std() > 0.1


PROMPTS = {
    "two pictures": [7, seen(96, 60, seed=1), 5, seen(60, 156, seed=2), 9],
    "one token between them": [3, seen(24, 48, seed=3), 1, seen(48, 24, seed=4), 1],
    "no picture": [12],
}


def reference_states(model: Any, ids: list[int], pictures: list[Seen]) -> np.ndarray:
    with torch.inference_mode():
        return model(output_hidden_states=True, **reference_inputs(ids, pictures)).hidden_states[-1].numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", PROMPTS)
def test_states_of_a_prompt_with_pictures(model: Any, folder: Path, backend: str, which: str) -> None:
    engine, ours = opened(folder, backend)
    ids, places, pictures = prompt(PROMPTS[which])
    error = relative_float32(states(engine, ours, ids, places, pictures), reference_states(model, ids, pictures))
    print(f"{backend} {which}: {error:.1e} (limit {FLOAT32})")
    assert error <= FLOAT32


# Planted faults


@contextmanager
def planted(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    layout = qwen_vl_vision.layout

    def wrong_windows(config: Any, rows: int, columns: int) -> Any:
        """Windows of half the width."""
        made = layout(config, rows, columns)
        return made._replace(groups=tuple((2 * count, size // 2) for count, size in made.groups))

    def no_partial_windows(config: Any, rows: int, columns: int) -> Any:
        """All windows of one size but the last, whatever the picture's."""
        made, size = layout(config, rows, columns), 64
        count, rest = divmod(rows * columns, size)
        return made._replace(groups=((count, size), (1, rest)) if rest else ((count, size),))

    def not_back(config: Any, rows: int, columns: int) -> Any:
        made = layout(config, rows, columns)
        return made._replace(back=np.arange(len(made.back)))

    def one_axis(length: int, pictures: Any) -> np.ndarray:
        return np.repeat(np.arange(length)[:, None], 3, axis=1)

    faults = {
        "windows": ("layout", wrong_windows),
        "partial windows": ("layout", no_partial_windows),
        "order": ("layout", not_back),
    }
    with monkeypatch.context() as patch:
        if name in faults:
            patch.setattr(qwen_vl_vision, *faults[name])
        else:
            patch.setattr(rope, "picture_positions", one_axis)
        yield


@pytest.mark.parametrize("fault", ["windows", "partial windows", "order", "one axis"])
def test_planted_faults_are_caught(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    engine, ours = opened(folder, "cpu")
    ids, places, pictures = prompt([7, seen(132, 84, seed=1), 5])
    theirs = reference_states(model, ids, pictures)
    assert relative_float32(states(engine, ours, ids, places, pictures), theirs) <= FLOAT32
    with planted(monkeypatch, fault):
        error = relative_float32(states(engine, ours, ids, places, pictures), theirs)
    print(f"{fault}: {error:.1e} (limit {FLOAT32})")
    assert error > 100 * FLOAT32


# Numbers


def test_positions() -> None:
    """Golden numbers: 3 tokens, 2 x 4 slots, 3 tokens, 5 x 3 slots, 4 tokens."""
    made = rope.picture_positions(33, [(3, 2, 4), (14, 5, 3)]).T
    assert made[:, :3].tolist() == [[0, 1, 2]] * 3
    assert made[0, 3:11].tolist() == [3] * 8
    assert made[1, 3:11].tolist() == [3, 3, 3, 3, 4, 4, 4, 4]
    assert made[2, 3:11].tolist() == [3, 4, 5, 6, 3, 4, 5, 6]
    assert made[:, 11:14].tolist() == [[7, 8, 9]] * 3
    assert made[0, 14:29].tolist() == [10] * 15
    assert made[:, 29:].tolist() == [[15, 16, 17, 18]] * 3


def test_the_published_windows() -> None:
    """8 x 8 patches; of 37 x 37 slots, 81 are whole, 18 have 1 x 4 or 4 x 1 slots, the last is one slot."""
    made = qwen_vl_vision.layout(QwenVLVisionConfig(), 74, 74)
    assert made.groups == ((81, 64), (18, 16), (1, 4))
    assert sorted(made.order.tolist()) == list(range(37 * 37)) and made.order[made.back].tolist() == list(range(1369))


def test_manifest_is_that_of_the_reference(model: Any, folder: Path) -> None:
    manifest = NETWORK.manifest(read_config(NETWORK, folder))
    stored = {name.replace("model.language_model.", "").replace("model.visual.", "visual."): tuple(value.shape)
              for name, value in model.state_dict().items() if not name.startswith("lm_head")}  # fmt: skip
    assert manifest == stored


def test_published_counts() -> None:
    manifest = NETWORK.manifest(QwenVLVisionConfig())
    tower = {name: shape for name, shape in manifest.items() if name.startswith("visual.")}
    assert (len(manifest), len(tower)) == (728, 390)
    assert sum(int(np.prod(shape)) for shape in tower.values()) == 676_550_144


def test_configurations_flat_and_nested_are_the_same() -> None:
    vision = {"depth": 32, "hidden_size": 1280, "in_chans": 3, "out_hidden_size": 3584, "num_heads": 16,
              "intermediate_size": 3420, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
              "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
              "temporal_patch_size": 2, "hidden_act": "silu", "model_type": "qwen2_5_vl"}  # fmt: skip
    flat = {"model_type": "qwen2_5_vl", "hidden_size": 3584, "vision_config": vision,
            "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}  # fmt: skip
    nested = {"model_type": "qwen2_5_vl", "vision_config": vision,
              "text_config": {"hidden_size": 3584, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                                                       "mrope_section": [16, 24, 24]}}}  # fmt: skip
    written = NETWORK.written(QwenVLVisionConfig())
    for data in (flat, nested, written):
        fields = {name: tuple(v) if isinstance(v, list) else v for name, v in NETWORK.fields(data).items()}
        assert QwenVLVisionConfig(**fields) == QwenVLVisionConfig()


# The image processor

PICTURES = [(392, 392), (1036, 1036), (512, 288), (448, 320), (672, 224), (97, 211), (20, 31), (5000, 3000), (28, 5600)]


@pytest.mark.parametrize("size", PICTURES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.sample(0)
def test_pixels_are_exactly_those_of_transformers(size: tuple[int, int]) -> None:
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 12_845_056})
    one = picture(*size)
    result = processor(images=[Image.fromarray(one)], return_tensors="np")
    values, rows, columns = patches(one, 14, 2, 2, QWEN2_VL)
    assert result["image_grid_thw"].tolist() == [[1, rows, columns]]
    assert values.dtype == np.float32 and np.array_equal(values, result["pixel_values"])


def test_golden_sizes() -> None:
    for size, expected in (((384, 384), (392, 392)), ((1024, 1024), (1036, 1036)), ((512, 288), (504, 280))):
        assert whole_blocks(*size, 28, QWEN2_VL) == expected


@pytest.mark.parametrize("size", [(1, 4000), (6000, 29), (0, 40)])
def test_narrow_pictures_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="too narrow: one side may be 200 times the other"):
        whole_blocks(*size, 28, QWEN2_VL)
