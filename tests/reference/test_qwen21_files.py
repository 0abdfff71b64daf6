"""Parts of Qwen-Image-2.1 in files of their own: pictures are those of the folder, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import lora_cases as cases
from support.cli_runner import cli
from support.tiny_qwen21 import fused

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.qwen_image_21 import memory
from qwenimg.common.hub.describe import describe
from qwenimg.common.pipeline import start
from qwenimg.common.runtime.stages import Stage

BACKENDS = ("cpu", "mlx")
ASKED: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "seed": 7}

Tensors = dict[str, torch.Tensor]


def part(folder: Path, name: str) -> Tensors:
    tensors: Tensors = {}
    for path in sorted((folder / name).glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def written(folder: Path, where: Path) -> dict[str, Path]:
    """All parts in files of their own: the transformer fused, the text encoder in bare names, the VAE behind a
    prefix."""
    text = {name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
            for name, value in part(folder, "text_encoder").items()}  # fmt: skip
    files: dict[str, Tensors] = {
        "transformer": {f"model.diffusion_model.{k}": v for k, v in fused(part(folder, "transformer")).items()},
        "text_encoder": text,
        "vae": {f"vae.{k}": v for k, v in part(folder, "vae").items()},
    }
    for name, tensors in files.items():
        save_file({key: value.contiguous() for key, value in tensors.items()}, where / f"{name}.safetensors")
    return {name: where / f"{name}.safetensors" for name in files}


def stages(pipe: Pipeline, **asked: Any) -> list[Stage]:
    request = pipe.check("a ring", **asked)
    return pipe.model.stages(request, pipe.model.plan(request), start.latent_shape(pipe.model, request))


PICTURE = np.random.default_rng(3).integers(0, 256, (48, 64, 3), np.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_parts_in_files_draw_the_same(tiny_qwen21: dict[str, Path], tmp_path: Path, backend: str) -> None:
    folder = tiny_qwen21["qwen21"]
    files = written(folder, tmp_path)
    whole = qwenimg.load(folder, backend, "fp32")("a ring", image=PICTURE, **ASKED)
    parts = qwenimg.load(folder, backend, "fp32", **files)("a ring", image=PICTURE, **ASKED)
    assert np.array_equal(whole.latents, parts.latents) and np.array_equal(whole.pixels, parts.pixels)


def test_a_text_encoder_without_its_tower(tiny_qwen21: dict[str, Path], tmp_path: Path) -> None:
    """It draws from text, with the same bits, and refuses pictures in one line."""
    folder = tiny_qwen21["qwen21"]
    text = {k: v for k, v in part(folder, "text_encoder").items() if "visual" not in k and "lm_head" not in k}
    save_file(text, tmp_path / "text.safetensors")
    pipe = qwenimg.load(folder, "cpu", "fp32", text_encoder=tmp_path / "text.safetensors")
    whole = qwenimg.load(folder, "cpu", "fp32")
    assert np.array_equal(pipe("a ring", **ASKED).latents, whole("a ring", **ASKED).latents)
    with pytest.raises(UsageError, match="the text encoder has no vision tower"):
        pipe("a ring", image=PICTURE, **ASKED)
    started, other = (pipe("a ring", image=one, strength=0.5, **ASKED) for one in (PICTURE, PICTURE[::-1]))
    assert not np.array_equal(started.latents, other.latents)


def test_info_says_what_each_file_is(tiny_qwen21: dict[str, Path], tmp_path: Path) -> None:
    files = written(tiny_qwen21["qwen21"], tmp_path)
    said = {name: describe(path).lines[0] for name, path in files.items()}
    print(*said.values(), sep="\n")
    assert "Qwen-Image-2.1's transformer, its feed-forward fused" in said["transformer"]
    assert "Qwen3-VL, a text encoder, with its vision tower" in said["text_encoder"]
    assert "Qwen-Image-2.1's VAE" in said["vae"]
    lines = describe(tiny_qwen21["qwen21-turbo"]).lines
    assert any("Qwen-Image-2.1-Turbo" in line and "non-commercial" in line for line in lines)


@pytest.mark.sample(0)
def test_converted_folders_draw_the_same(tiny_qwen21: dict[str, Path], tmp_path: Path) -> None:
    """Also Turbo's, whose noise levels are in model_index.json; and in 8 bits what `-q 8` draws."""
    for name, options in (("qwen21", ()), ("qwen21-turbo", ()), ("qwen21", ("-q", "8"))):
        folder, out = tiny_qwen21[name], tmp_path / f"{name}{''.join(options)}"
        assert cli("convert", str(folder), str(out), *options, "--quiet").code == 0
        asked = ASKED | ({"steps": 8} if "turbo" in name else {})
        before = qwenimg.load(folder, "cpu", "fp32", quantize=options[1] if options else None)("a ring", **asked)
        after = qwenimg.load(out, "cpu", "fp32")("a ring", **asked)
        assert np.array_equal(before.latents, after.latents) and np.array_equal(before.pixels, after.pixels), out
        assert sorted(path.name for path in (out / "processor").iterdir()), "the tokenizer"
        assert not (out / "tokenizer").exists()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_keys_and_values_made_anew_change_no_bit(
    tiny_qwen21: dict[str, Path], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Where those of text and references do not fit into memory, each step makes them anew; a step cache skips both."""
    folder, asked = tiny_qwen21["qwen21"], ASKED | {"steps": 4, "image": PICTURE, "guidance": 2.0}
    pipe = qwenimg.load(folder, backend, "fp32")
    kept, cached = pipe("a ring", **asked), pipe("a ring", cached_calls="2,4", **asked)
    assert "2 of 4 calls cached" in cached.recipe["step_cache_effect"]
    assert not np.array_equal(kept.latents, cached.latents)
    monkeypatch.setattr(memory, "known_bytes", lambda *given: 2**60)
    pipe = qwenimg.load(folder, backend, "fp32")
    plan = pipe.model.residents.plan(stages(pipe, **asked))
    [denoise] = [stage for stage in plan.stages if stage.name == "denoise"]
    assert "anew in each step" in denoise.about
    assert np.array_equal(kept.latents, pipe("a ring", **asked).latents)
    assert np.array_equal(cached.latents, pipe("a ring", cached_calls="2,4", **asked).latents)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_a_lora_of_a_fused_layer_is_that_of_its_halves(
    tiny_qwen21: dict[str, Path], tmp_path: Path, backend: str
) -> None:
    whole = cases.lora((396, 66), 3)
    halves = [{"down": whole["down"].copy(), "up": whole["up"][198 * i : 198 * (i + 1)]} for i in range(2)]
    mlp = "transformer_blocks.1.img_mlp"
    one, two = (
        cases.written(tmp_path / f"{name}.safetensors", made, cases.Dialect("diffusion_model.", cases.PEFT_HALVES))
        for name, made in {
            "one": {f"{mlp}.gate_up": whole},
            "two": {f"{mlp}.gate_layer": halves[0], f"{mlp}.proj": halves[1]},
        }.items()
    )
    pipe = qwenimg.load(tiny_qwen21["qwen21"], backend, "fp32")
    plain = pipe("a ring", **ASKED).latents
    first, second = (pipe("a ring", lora=f"{file}:0.7", **ASKED).latents for file in (one, two))
    assert np.array_equal(first, second) and not np.allclose(first, plain, rtol=0.01)
    assert np.array_equal(pipe("a ring", **ASKED).latents, plain), "a LoRA leaves no trace"
