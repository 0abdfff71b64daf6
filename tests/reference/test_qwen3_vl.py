"""Qwen3-VL, with and without its vision tower, on both backends against transformers, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import seen_pictures
from support.refusals import refused
from support.relative import relative_float32
from support.seen_pictures import SLOT, Seen, prompt, reference_inputs, seen, states
from support.tiny_model import randomise
from support.tiny_qwen21 import TEXT

from qwenimg.common.families.qwen_image_21 import references
from qwenimg.common.networks.encoders import decoder, qwen, qwen3_vl_vision
from qwenimg.common.networks.encoders.qwen import Qwen3VLConfig
from qwenimg.common.networks.encoders.qwen3_vl_vision import Qwen3VLVisionConfig
from qwenimg.common.networks.network import Network
from qwenimg.common.numbers import rope
from qwenimg.common.parts.components import read_config
from qwenimg.common.pictures.patches import QWEN3_VL, patches

BACKENDS = ("cpu", "mlx")
FLOAT32 = 3e-6  # relative L2 of a forward
VISION = {
    "depth": 5,
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_heads": 4,
    "out_hidden_size": 60,
    "patch_size": 6,
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [1, 3],
}
# Patches of pictures: rows and columns
SIZES = [(4, 6), (2, 2), (14, 8), (7 * 2, 7 * 2), (2, 20)]


def theirs(seed: int = 3) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(text_config=TEXT | {"vocab_size": 640}, vision_config=VISION, image_token_id=SLOT)
    model = Qwen3VLForConditionalGeneration(config)
    randomise(model, seed)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return theirs()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text_encoder")
    model.save_pretrained(folder)
    return folder


def opened(folder: Path, backend: str, network: Network = qwen3_vl_vision.NETWORK) -> tuple[Any, Any]:
    return seen_pictures.opened(folder, backend, network)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vision_tower(model: Any, folder: Path, backend: str) -> None:
    engine, ours = opened(folder, backend)
    for rows, columns in SIZES:
        one = seen(rows, columns)
        with torch.inference_mode():
            tower = model.model.visual(torch.from_numpy(one.patches), grid_thw=torch.tensor([[1, rows, columns]]))
        expected = np.stack([tower.pooler_output.numpy(), *(deep.numpy() for deep in tower.deepstack_features)])
        result = np.asarray(engine.numpy(ours.slots(*one)))
        errors = [relative_float32(a, b) for a, b in zip(result, expected, strict=True)]
        print(f"{backend} {rows}x{columns}: {', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT32})")
        assert max(errors) <= FLOAT32 and result.std() > 0.1


PROMPTS: dict[str, list[int | Seen]] = {
    "two pictures": [7, seen(4, 6, seed=1), 5, seen(14, 8, seed=2), 9],
    "one token between them": [3, seen(2, 4, seed=3), 1, seen(8, 2, seed=4), 1],
    "no picture": [12],
}


def reference_states(model: Any, ids: list[int], pictures: list[Seen]) -> np.ndarray:
    """The states in front of the final norm."""
    hook = model.model.language_model.norm.register_forward_hook(lambda module, given, result: given[0])
    try:
        with torch.inference_mode():
            return model(output_hidden_states=True, **reference_inputs(ids, pictures)).hidden_states[-1].numpy()
    finally:
        hook.remove()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", PROMPTS)
def test_states_of_a_prompt_with_pictures(model: Any, folder: Path, backend: str, which: str) -> None:
    engine, ours = opened(folder, backend)
    ids, places, pictures = prompt(PROMPTS[which])
    result = states(engine, ours, ids, places, pictures)
    error = relative_float32(result, reference_states(model, ids, pictures))
    print(f"{backend} {which}: {error:.1e} (limit {FLOAT32})")
    assert error <= FLOAT32


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_without_the_tower(model: Any, folder: Path, backend: str) -> None:
    engine, ours = opened(folder, backend, qwen.QWEN3_VL)
    for ids in (list(range(3, 20)), list(range(500, 400, -1))):
        error = relative_float32(np.asarray(engine.numpy(ours.encode(ids))), reference_states(model, ids, []))
        print(f"{backend} {len(ids)} tokens: {error:.1e} (limit {FLOAT32})")
        assert error <= FLOAT32


# Planted faults


@contextmanager
def planted(monkeypatch: pytest.MonkeyPatch, name: str, ours: Any) -> Iterator[None]:
    stretched = qwen3_vl_vision.stretched

    def not_to_corners(config: Any, rows: int, columns: int) -> Any:
        """By the middles of pixels, as a picture is scaled."""
        made = stretched(config, rows, columns)
        return made._replace(shares=np.full_like(made.shares, 0.25))

    def one_axis(length: int, pictures: Any) -> np.ndarray:
        return np.repeat(np.arange(length)[:, None], 3, axis=1)

    with monkeypatch.context() as patch:
        if name == "no deep slots":
            patch.setattr(ours.model, "added", lambda x, places, slots: x)
        elif name == "positions of patches":
            patch.setattr(qwen3_vl_vision, "stretched", not_to_corners)
        elif name == "one axis":
            patch.setattr(rope, "picture_positions", one_axis)
        else:
            patch.setattr(rope, "interleaved_axes", rope.section_axes)
        yield


@pytest.mark.parametrize("fault", ["no deep slots", "positions of patches", "one axis", "sections in a row"])
def test_planted_faults_are_caught(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    engine, ours = opened(folder, "cpu")
    ids, places, pictures = prompt([7, seen(8, 6, seed=1), 5])
    expected = reference_states(model, ids, pictures)
    assert relative_float32(states(engine, ours, ids, places, pictures), expected) <= FLOAT32
    with planted(monkeypatch, fault, ours):
        error = relative_float32(states(engine, ours, ids, places, pictures), expected)
    print(f"{fault}: {error:.1e} (limit {FLOAT32})")
    assert error > 100 * FLOAT32


# Numbers


def test_the_published_axes() -> None:
    """Of 64 angles, i % 3 == 1 is the row's and i % 3 == 2 the column's, below 60."""
    positions = np.array([[1000, 1, 0]])
    cos, sin = decoder.table_at(Qwen3VLVisionConfig(), positions)
    angles = np.array([5e6 ** (-i / 64) for i in range(64)])
    axis = np.array([i % 3 if i < 60 else 0 for i in range(64)])
    expected = angles * positions[0][axis]
    assert np.allclose(cos[0], np.cos(expected), atol=1e-12) and np.allclose(sin[0], np.sin(expected), atol=1e-12)


def test_the_table_is_stretched_to_the_corners() -> None:
    made = qwen3_vl_vision.stretched(Qwen3VLVisionConfig(), 20, 48)
    assert np.allclose(made.shares.sum(1), 1) and made.rows.max() == 2303
    corners = {0: 0, 47 * 20 + 18: 47}  # of the patches: of the table
    assert made.rows[0, 0] == corners[0] and np.allclose(made.shares[0], [1, 0, 0, 0])
    assert made.rows[-1, 0] == 48 * 48 - 1 and np.allclose(made.shares[-1], [1, 0, 0, 0])


def test_manifest_is_that_of_the_reference(model: Any, folder: Path) -> None:
    network = qwen3_vl_vision.NETWORK
    stored = {name: tuple(value.shape) for name, value in model.state_dict().items() if not name.startswith("lm_head")}
    manifest = network.manifest(read_config(network, folder))
    assert {network.published(name): shape for name, shape in manifest.items()} == stored
    assert all(network.rename and network.rename(name) in manifest for name in stored)
    assert (
        qwen.QWEN3_VL.rename("lm_head.weight") is None and qwen.QWEN3_VL.rename("model.visual.merger.norm.bias") is None
    )


def test_published_counts() -> None:
    manifest = qwen3_vl_vision.NETWORK.manifest(Qwen3VLVisionConfig())
    count = {name: int(np.prod(shape)) for name, shape in manifest.items()}
    tower = {name: size for name, size in count.items() if name.startswith("visual.")}
    assert (len(manifest), len(tower)) == (749, 351)  # and lm_head
    assert round(sum(tower.values()) / 1e4) == 57_639
    assert sum(count.values()) - sum(tower.values()) == 7_568_405_504  # with the final norm, which is not used


def test_configurations_are_the_same() -> None:
    vision = {"depth": 27, "hidden_size": 1152, "in_channels": 3, "out_hidden_size": 4096, "num_heads": 16,
              "intermediate_size": 4304, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
              "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
              "hidden_act": "gelu_pytorch_tanh", "model_type": "qwen3_vl"}  # fmt: skip
    sections = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    old = {"model_type": "qwen3_vl", "vision_config": vision,
           "text_config": {"hidden_size": 4096, "rope_theta": 5e6, "rope_scaling": sections}}  # fmt: skip
    new = {"model_type": "qwen3_vl", "vision_config": vision,
           "text_config": {"hidden_size": 4096, "rope_parameters": sections | {"rope_theta": 5e6}}}  # fmt: skip
    for network, config in ((qwen3_vl_vision.NETWORK, Qwen3VLVisionConfig()), (qwen.QWEN3_VL, Qwen3VLConfig())):
        for data in (old, new, network.written(config)):
            fields = {name: tuple(v) if isinstance(v, list) else v for name, v in network.fields(data).items()}
            assert network.config(**fields) == config


def test_only_layers_up_to_the_last_tap_are_used() -> None:
    config = Qwen3VLConfig(num_hidden_layers=8, taps=(2, 4))
    used = qwen.QWEN3_VL.used(config, qwen.QWEN3_VL.manifest(config))
    assert {name.split(".")[1] for name in used if name.startswith("layers.")} == {"0", "1", "2", "3"}
    assert config.state_size == 2 * config.hidden_size and Qwen3VLConfig().used_layers == 36


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": 50}, "num_position_embeddings 50 is not a square"),
        ({"deep_layers": (3, 1)}, "deepstack_visual_indexes [3, 1]"),
        ({"deep_layers": (27,)}, "deepstack_visual_indexes [27]"),
        ({"deep_layers": (1, 2, 3), "num_hidden_layers": 2}, "at most one for each of 2"),
        ({"mrope_section": (24, 20, 21)}, "mrope_section"),
        ({"vision_heads": 7}, "vision hidden_size 1152"),
    ],
)
def test_wrong_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    assert message in refused(Qwen3VLVisionConfig, **changes)


# The image processor

LARGE = pytest.param((6000, 3000), marks=pytest.mark.slow)  # more pixels than are seen
PICTURES = [(1024, 1024), (1376, 768), (448, 320), (97, 211), (20, 31), LARGE]


@pytest.mark.parametrize("size", PICTURES, ids=str)
def test_pixels_are_exactly_those_of_transformers(size: tuple[int, int]) -> None:
    """Also where the size must change, as that of pictures that the pipeline has made does not."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    half = [0.5, 0.5, 0.5]
    limits = {"shortest_edge": QWEN3_VL.least, "longest_edge": QWEN3_VL.most}
    processor = Qwen2VLImageProcessorPil(size=limits, patch_size=16, image_mean=half, image_std=half)
    one = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), np.uint8)
    result = processor(images=[Image.fromarray(one)], return_tensors="np")
    values, rows, columns = patches(one, 16, 2, 2, QWEN3_VL)
    assert result["image_grid_thw"].tolist() == [[1, rows, columns]]
    assert np.array_equal(values, result["pixel_values"])
    if size[0] % 32 == size[1] % 32 == 0:
        assert (rows, columns) == (size[1] // 16, size[0] // 16), "slots are those of the latents"


def test_a_picture_is_put_on_white_as_the_pipeline_does() -> None:
    """In the size of its latents, whatever its alpha."""
    from diffusers.image_processor import VaeImageProcessor

    rng = np.random.default_rng(2)
    one = rng.integers(0, 256, (211, 300, 4), np.uint8)
    width, height = references.size(one)
    resized = VaeImageProcessor(vae_scale_factor=16).resize(Image.fromarray(one), width=width, height=height)
    white = Image.new("RGB", resized.size, (255, 255, 255))
    white.paste(resized, mask=resized.getchannel("A"))
    assert np.array_equal(references.copy(one), np.asarray(white))
    assert np.array_equal(references.seen(one), np.asarray(resized)) and width % 32 == height % 32 == 0
