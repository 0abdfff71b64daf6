"""CLIP's text encoders against transformers, on both backends, in every dtype, and against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.clip_models import BACKENDS, FLOAT32, FLOAT64, model_on, opened, relative, run
from support.parity_cases import TORCH
from support.parity_verdict import judge
from support.refusals import refused
from support.tiny_clip import KINDS, tiny_clip

from qwenimg.common.base.config import parse
from qwenimg.common.base.errors import UsageError
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.parity import parity
from qwenimg.common.weights.values import read

LENGTHS = (1, 2, 13, 77)


def prompts(config: CLIPConfig, rows: int, length: int) -> np.ndarray:
    """Random ids; the end token, which is the largest, comes at another place of each row and then once more."""
    end = config.vocab_size - 1
    ids = np.random.default_rng(length).integers(1, end, (rows, length))
    for row in range(rows):
        ids[row, (length // 2 + row) % length :: max(1, length // 3)] = end
    return ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("clip")
    for kind in KINDS:
        tiny_clip(kind).save_pretrained(root / kind)
    return {kind: root / kind for kind in KINDS}


def expected_of(theirs: torch.nn.Module, ids: np.ndarray, skipped: int, normed: bool) -> list[torch.Tensor]:
    """What diffusers' pipelines take from transformers' model."""
    with torch.no_grad():
        made = theirs(torch.from_numpy(ids), output_hidden_states=True)
        states = made.hidden_states[-(skipped + 1)]
        inner = getattr(theirs, "text_model", theirs)
        states = inner.final_layer_norm(states) if normed else states
    return [states, made.text_embeds if hasattr(made, "text_embeds") else made.pooler_output]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_equal_to_transformers(folders: dict[str, Path], kind: str, backend: str) -> None:
    twin, theirs = BACKENDS[backend](), tiny_clip(kind)
    config, plan = opened(folders[kind])
    plan.close()
    model = model_on(twin, folders[kind], "float32", "float32")
    worst = 0.0
    for length in LENGTHS:
        ids = prompts(config, 3, length)
        for skipped, normed in ((0, True), (1, False), (2, True), (config.num_hidden_layers - 1, False)):
            ours = run(twin, model, config, ids, skipped, normed)
            for made, expected in zip(ours, expected_of(theirs, ids, skipped, normed), strict=True):
                assert made.dtype == "float32"
                worst = max(worst, relative(made.values, expected))
    print(f"{kind} on {backend}: {worst:.1e}")
    assert worst <= FLOAT32


@pytest.mark.parametrize("kind", KINDS)
def test_float64(folders: dict[str, Path], kind: str) -> None:
    """In float64 the torch twin is transformers to the last digits: nothing in it narrows."""
    theirs = tiny_clip(kind).double()
    config, plan = opened(folders[kind])
    plan.close()
    model = model_on(TORCH(), folders[kind], "float64", "float64")
    ids = prompts(config, 2, 13)
    for made, expected in zip(
        run(TORCH(), model, config, ids, 1, True), expected_of(theirs, ids, 1, True), strict=True
    ):
        assert made.dtype == "float64"
        error = relative(made.values, expected)
        print(f"{kind}: {error:.1e}")
        assert error <= FLOAT64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_parity(folders: dict[str, Path], tmp_path: Path, kind: str, dtype: str) -> None:
    """Both backends within the house's limits of float64, on weights that are exact in the dtype."""
    exact = {
        key: value.to(getattr(torch, dtype))
        for key, value in load_file(next(folders[kind].glob("*.safetensors"))).items()
    }
    (tmp_path / "config.json").write_text((folders[kind] / "config.json").read_text())
    save_file(exact, tmp_path / "model.safetensors")
    config, plan = opened(tmp_path)
    plan.close()
    ids = prompts(config, 2, 17)
    for stream in {"float32", dtype}:
        reference = run(TORCH(), model_on(TORCH(), tmp_path, "float64", "float64"), config, ids, 1, False)
        made = {
            name: run(twin(), model_on(twin(), tmp_path, dtype, stream), config, ids, 1, False)
            for name, twin in BACKENDS.items()
        }
        for index, (what, returned) in enumerate((("states", stream), ("pooled", dtype))):
            case = parity.Case(
                component=f"clip.{what}", dtype=dtype, returned=returned, blocks=config.num_hidden_layers
            )
            verdict = judge(case, reference[index].values, {name: outputs[index] for name, outputs in made.items()})
            print(verdict.row(f"{kind} stream {stream}"))
            assert verdict.ok


@pytest.mark.parametrize("backend", BACKENDS)
def test_pooled_at_the_first_end_token(tmp_path: Path, backend: str) -> None:
    """With a right eos_token_id the end token need not be the largest id."""
    theirs = tiny_clip("bigG", eos_token_id=7)
    theirs.save_pretrained(tmp_path)
    config, plan = opened(tmp_path)
    plan.close()
    ids = np.array([[3, 500, 7, 9, 7], [7, 8, 7, 7, 7]])
    assert [clip.eos_position(config, row.tolist()) for row in ids] == [2, 0]
    twin = BACKENDS[backend]()
    made = run(twin, model_on(twin, tmp_path, "float32", "float32"), config, ids, 0, True)
    error = relative(made[1].values, expected_of(theirs, ids, 0, True)[1])
    print(f"{backend}: {error:.1e}")
    assert error <= FLOAT32
    assert "eos_token_id 7" in refused(clip.eos_position, config, [1, 2, 3])


# Manifests and key styles

PUBLISHED = {"ViT-L": clip.VIT_L, "OpenCLIP-H": clip.OPEN_CLIP_H, "bigG": clip.OPEN_CLIP_BIG_G}
# Tensors and parameters as published: the text part of ViT-L/14, of ViT-H/14 without its last layer, and of bigG/14.
SIZES = {"ViT-L": (196, 123_060_480), "OpenCLIP-H": (372, 340_387_840), "bigG": (517, 694_659_840)}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_manifest_is_that_of_transformers(kind: str) -> None:
    """At full size, on torch's meta device."""
    from dataclasses import asdict

    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = PUBLISHED[kind]
    cls = CLIPTextModelWithProjection if config.projection_dim else CLIPTextModel
    with torch.device("meta"):
        theirs = cls(CLIPTextConfig(**{k: v for k, v in asdict(config).items() if v is not None}))
    expected = {clip.rename(key): tuple(value.shape) for key, value in theirs.state_dict().items()}
    manifest = clip.manifest(config)
    assert manifest == expected
    count = sum(int(np.prod(shape)) for shape in manifest.values())
    print(f"{kind}: {len(manifest)} tensors, {count:,} parameters")
    assert (len(manifest), count) == SIZES[kind]


@pytest.mark.parametrize("style", ["with prefix", "without prefix", "with position_ids"])
def test_key_styles(folders: dict[str, Path], tmp_path: Path, style: str) -> None:
    tensors = {clip.rename(key): value for key, value in load_file(folders["ViT-L"] / "model.safetensors").items()}
    prefix = "" if style == "without prefix" else "text_model."
    saved = {prefix + str(key): value for key, value in tensors.items()}
    if style == "with position_ids":
        saved["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    (tmp_path / "config.json").write_text((folders["ViT-L"] / "config.json").read_text())
    save_file(saved, tmp_path / "model.safetensors")
    config, plan = opened(tmp_path)
    plan.close()
    read = {
        name: checkpoint_values(tmp_path, name) for name in ("final_layer_norm.bias", "encoder.layers.2.mlp.fc1.weight")
    }
    assert plan.entries.keys() == clip.manifest(config).keys()
    for name, values in read.items():
        assert np.array_equal(values, tensors[name].numpy())


def checkpoint_values(folder: Path, name: str) -> np.ndarray:
    _, plan = opened(folder)
    values = read(plan.entries[name])
    plan.close()
    return values


def test_a_tensor_that_is_not_clips_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["ViT-L"] / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["ViT-L"] / "config.json").read_text())
    save_file(tensors | {"text_model.extra": torch.ones(2)}, tmp_path / "model.safetensors")
    assert "'text_model.extra'" in refused(opened, tmp_path)


# Configurations


def fields(**changes: Any) -> dict[str, Any]:
    published = {
        "architectures": ["CLIPTextModel"],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "dropout": 0.0,
        "eos_token_id": 2,
        "hidden_act": "quick_gelu",
        "hidden_size": 768,
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 77,
        "model_type": "clip_text_model",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 1,
        "projection_dim": 768,
        "torch_dtype": "float32",
        "transformers_version": "4.22.0.dev0",
        "vocab_size": 49408,
    }
    return published | changes


def test_published_configuration() -> None:
    assert parse(CLIPConfig, clip.text_fields(fields()), source="config.json") == clip.VIT_L
    projected = clip.text_fields(fields(architectures=["CLIPTextModelWithProjection"]))
    assert parse(CLIPConfig, projected, source="config.json").projection_dim == 768


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "t5"}, "'t5'"),
        ({"architectures": ["CLIPModel"]}, "CLIPModel"),
        ({"architectures": "CLIPTextModel"}, "architectures"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"hidden_size": 770}, "770"),
        ({"layer_norm_eps": 0}, "layer_norm_eps"),
        ({"use_attention_mask": True}, "use_attention_mask"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"max_position_embeddings": 76}, "from 77"),
        ({"eos_token_id": [1, 2]}, "eos_token_id"),
    ],
)
def test_refused_configurations(changes: dict[str, Any], named: str) -> None:
    assert named in refused(lambda: parse(CLIPConfig, clip.text_fields(fields(**changes)), source="config.json"))


def test_clip_skip_counts_as_in_diffusers() -> None:
    config = clip.VIT_L
    assert [clip.used_states(config, False, n) for n in (0, 1, 11)] == [(0, True), (1, True), (11, True)]
    assert [clip.used_states(config, True, n) for n in (0, 1, 10)] == [(1, False), (2, False), (11, False)]
    for sdxl, most in ((False, 11), (True, 10)):
        with pytest.raises(UsageError, match=f"0 to {most}"):
            clip.used_states(config, sdxl, most + 1)
