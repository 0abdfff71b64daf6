"""Qwen-Image's transformer and text encoder as GGUF files: what they draw, which names, what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, TensorNameMap, get_tensor_name_map
from random_model import write_random_model
from support.cli_runner import cli
from support.gguf_files import fitting, random_blocks, write

import qwenimg
from qwenimg.backends.mlx import load as mlx_load
from qwenimg.backends.torch import load as torch_load
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.formats.gguf_types import named
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.encoders import decoder, qwen
from qwenimg.common.networks.encoders.qwen import QwenVLConfig
from qwenimg.common.quant.gguf_blocks import STORAGE
from qwenimg.common.weights.storage import Packed
from qwenimg.common.weights.values import read, read_quantized

BACKENDS = ("cpu", "mlx")
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4}
# As small as in `random_model`, but rows that blocks of 32 divide; those of 256 in the text encoder's down projection
DIT = QwenDiTConfig(
    num_layers=2, attention_head_dim=32, num_attention_heads=3, joint_attention_dim=64, axes_dims_rope=(8, 12, 12)
)
TEXT = QwenVLConfig(
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=640,
)
LOSSLESS = ("F32", "F16", "BF16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that bfloat16 holds exactly, and so float32 too."""
    place = tmp_path_factory.mktemp("qwen") / "model"
    write_random_model(place, dit=DIT, text=TEXT, dtype="bfloat16")
    return place


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Of both parts the values by name: the transformer's own, the text encoder's llama.cpp's."""
    return {
        "transformer": floats(folder / "transformer"),
        "text_encoder": {llama_cpp(name): value for name, value in floats(folder / "text_encoder").items()},
    }


def floats(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file as load_torch

    (file,) = folder.glob("*.safetensors")
    return {name: value.float().numpy() for name, value in load_torch(file).items()}


@cache
def llama_cpp_names() -> TensorNameMap:
    return get_tensor_name_map(MODEL_ARCH.QWEN2VL, 28)


def llama_cpp(name: str) -> str:
    """What llama.cpp's own converter calls a tensor of Qwen2.5-VL."""
    found = llama_cpp_names().get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def written(path: Path, values: dict[str, np.ndarray], type: str, architecture: str | None) -> Path:
    tensors = {name: (value, type if type in LOSSLESS else fitting(value, type)) for name, value in values.items()}
    write(path, tensors, architecture)
    return path


ARCHITECTURES = {"transformer": "qwen_image", "text_encoder": "qwen2vl"}


def test_names_are_llama_cpps() -> None:
    """Every tensor of the published text encoder under the name that gguf's own table gives it."""
    for name in decoder.manifest(QwenVLConfig()):
        assert qwen.QWEN2_5_VL.rename(llama_cpp(f"model.{name}")) == name
    assert qwen.QWEN2_5_VL.rename("output.weight") is None
    for name in ("blk.0.attn_q_norm.weight", "v.blk.0.attn_q.weight", "rope_freqs.weight", "blk.x.attn_q.weight"):
        renamed = qwen.QWEN2_5_VL.rename(name)
        assert renamed and renamed not in decoder.manifest(QwenVLConfig()), "unknown, and refused by the planner"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("type", ["F32", "BF16"])
@pytest.mark.sample(1)
def test_lossless_files_draw_what_the_folder_draws(
    folder: Path, weights: dict[str, dict[str, np.ndarray]], type: str, backend: str, tmp_path: Path
) -> None:
    given = {
        part: written(tmp_path / f"{part}.bin", values, type, ARCHITECTURES[part]) for part, values in weights.items()
    }
    whole = qwenimg.load(folder, backend, "fp32")("a red circle", **ASKED)
    made = qwenimg.load(folder, backend, "fp32", **given)("a red circle", **ASKED)
    print(f"{type} {backend}: deviation of the picture {made.pixels.std():.0f}")
    assert np.array_equal(made.latents, whole.latents) and np.array_equal(made.pixels, whole.pixels)
    assert made.recipe["transformer"] == "transformer.bin" and made.recipe["text_encoder"] == "text_encoder.bin"


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, dict[str, np.ndarray]]) -> dict[str, Path]:
    """Both parts as such files are: vectors and odd rows in F32, the transformer in Q8_0, Q5_1 and Q4_0, the text
    encoder with blocks of 256 too, and the vocabulary in codes."""
    place = tmp_path_factory.mktemp("lossy")
    types = ("Q8_0", "Q5_1", "Q4_0", "Q5_0", "Q4_1")
    made: dict[str, dict[str, Any]] = {
        part: {
            name: (value, fitting(value, types[i % len(types)] if value.ndim == 2 else "F32"))
            for i, (name, value) in enumerate(values.items())
        }
        for part, values in weights.items()
    }
    for layer, type in enumerate(("Q4_K", "Q6_K", "IQ4_XS")):
        name = f"blk.{layer}.ffn_down.weight"
        assert made["text_encoder"][name][0].shape == (64, 256)
        blocks = random_blocks(type, 64, 256, layer).reshape(64, named(type).bytes)
        for at in {"Q4_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}[type]:
            blocks[:, at : at + 2] = np.full(64, 2e-4, "<f2").view(np.uint8).reshape(-1, 2)
        made["text_encoder"][name] = (blocks, type)
    for part, tensors in made.items():
        write(place / f"{part}.gguf", tensors, ARCHITECTURES[part])
    return {part: place / f"{part}.gguf" for part in made}


def test_lossy_files_have_the_same_bits_on_both_backends(folder: Path, lossy: dict[str, Path]) -> None:
    """Codes that stay and values that are decoded, of every tensor of both files; then a picture of them."""
    from qwenimg.backends.mlx.ops import quantized as on_mlx
    from qwenimg.backends.torch.ops import quantized as on_torch

    mx = pytest.importorskip("mlx.core")
    opened = registry.open_model(folder, LoadOptions(parts=lossy))
    kept: dict[str, int] = {}
    for part in lossy:
        for name, entry in opened.checkpoint[part].plan.entries.items():
            type = entry.source.first.dtype
            if isinstance(entry.storage, Packed):
                kept[type] = kept.get(type, 0) + 1
                parts, code = read_quantized(entry), entry.storage.code
                words, scales, biases = (torch.from_numpy(array) for array in parts.arrays)
                torchs = on_torch.decode(words.view(torch.int32), scales, biases, code).numpy()
                mlxs = np.array(on_mlx.decode(*map(mx.array, parts.arrays), code=code))
                assert np.array_equal(torchs, read(entry)), name
            else:
                assert type not in STORAGE or name == "embed_tokens.weight", name
                torchs = torch_load.tensor(entry, torch.device("cpu")).float().numpy()
                mlxs = np.array(mlx_load.tensor(entry).astype(mx.float32))
            assert np.array_equal(torchs, mlxs), name
    opened.checkpoint.close()
    print(kept)
    assert kept.keys() == {"Q8_0", "Q5_1", "Q4_0", "Q5_0", "Q4_1", "Q4_K"}


def test_lossy_files_draw_alike(folder: Path, lossy: dict[str, Path]) -> None:
    made = {backend: qwenimg.load(folder, backend, "fp32", **lossy)("a red circle", **ASKED) for backend in BACKENDS}
    pixels = {backend: result.pixels.astype(int) for backend, result in made.items()}
    whole = qwenimg.load(folder, "cpu", "fp32")("a red circle", **ASKED).pixels.astype(int)
    print(f"between backends {np.abs(pixels['cpu'] - pixels['mlx']).max()}, from the folder's own "
          f"{np.abs(pixels['cpu'] - whole).mean():.1f} of 255")  # fmt: skip
    assert np.abs(pixels["cpu"] - pixels["mlx"]).max() <= 1 and (pixels["cpu"] != whole).any()


def test_quantize_codes_what_is_decoded(folder: Path, lossy: dict[str, Path]) -> None:
    opened = registry.open_model(folder, LoadOptions(parts=lossy, quantize="8"))
    entries = opened.checkpoint["text_encoder"].plan.entries
    bits = {name: e.storage.code.bits if isinstance(e.storage, Packed) else 0 for name, e in entries.items()}
    assert bits["layers.0.mlp.down_proj.weight"] == 4, "Q4_K stays"
    assert bits["layers.1.mlp.down_proj.weight"] == 8, "Q6_K, which would be decoded"
    opened.checkpoint.close()


@pytest.mark.sample(0)
def test_a_lora_is_added_to_codes(folder: Path, lossy: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(5)
    low = {
        f"transformer.transformer_blocks.{block}.attn.to_v.lora_{side}.weight": rng.standard_normal(shape) * 0.4
        for block in range(2)
        for side, shape in (("A", (4, 96)), ("B", (96, 4)))
    }
    save_file({name: value.astype(np.float32) for name, value in low.items()}, tmp_path / "l.safetensors")
    made = {}
    for backend in BACKENDS:
        pipe = qwenimg.load(folder, backend, "fp32", **lossy)
        plain = pipe("a red circle", **ASKED).pixels.astype(int)
        made[backend] = pipe("a red circle", lora=str(tmp_path / "l.safetensors"), **ASKED).pixels.astype(int)
        assert (made[backend] != plain).any()
    assert np.abs(made["cpu"] - made["mlx"]).max() <= 1


def test_what_is_said_of_them(lossy: dict[str, Path]) -> None:
    said = {part: cli("info", str(path)).out.decode() for part, path in lossy.items()}
    print(*said.values())
    assert "layout: GGUF, Qwen-Image's transformer (--transformer)" in said["transformer"]
    assert "architecture: 'qwen_image'" in said["transformer"] and " as codes, " in said["transformer"]
    assert (
        "a text encoder of Qwen-Image and LongCat-Image (--text-encoder)" in said["text_encoder"]
        and "1 Q6_K" in said["text_encoder"]
    )


@pytest.mark.parametrize("part", ARCHITECTURES)
@pytest.mark.parametrize("said", ["llama", "flux", None])
def test_another_architecture_is_refused_by_its_name(
    folder: Path, weights: dict[str, dict[str, np.ndarray]], part: str, said: str | None, tmp_path: Path
) -> None:
    """A Llama's q and k lie in another order under the same names. Nothing said is taken for what the names say."""
    path = written(tmp_path / "a.gguf", weights[part], "F32", said)
    if said is None:
        registry.open_model(folder, LoadOptions(parts={part: path})).checkpoint.close()
        return
    expected = f"is a GGUF file of '{said}', not of a {part}: expected {ARCHITECTURES[part]}"
    with pytest.raises(ModelError, match=expected):
        registry.open_model(folder, LoadOptions(parts={part: path}))
    other = next(other for other in ARCHITECTURES if other != part)
    with pytest.raises(ModelError, match="is a GGUF file of"):
        registry.open_model(folder, LoadOptions(parts={other: path}))


def test_a_transformer_alone_is_no_model(lossy: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="is Qwen-Image's transformer and no whole model: give it with --transformer"):
        registry.open_model(lossy["transformer"])
