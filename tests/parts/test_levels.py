"""The levels of a language model: what each loads, its texts on both backends, and what is said of files that lack a
part."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import seen_pictures
from support.policies import FP32
from support.refusals import refused
from support.seen_pictures import prompt, reference_inputs, seen
from support.tiny_model import randomise

from qwenimg import backends
from qwenimg.common.networks.encoders import clip, decoder, qwen, qwen3_vl_vision, qwen_vl_vision
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import on_paper, open_component, read_config
from qwenimg.common.parts.texts import levels
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.runtime.checkpoint import Component

BACKENDS = ("cpu", "mlx")
TOKENS, DISTINCT = 64, 20
WEIGHTS = "model.safetensors"


def opened(network: Network, folder: Path) -> Component:
    return open_component(network, folder, read_config(network, folder), "text_encoder")


@pytest.fixture(scope="module")
def qwen2_5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, folder = seen_pictures.theirs(), tmp_path_factory.mktemp("qwen2.5")
    for name, parameter in model.named_parameters():
        parameter.data *= 3 if "proj" in name and "visual" not in name else 1
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    from reference.test_qwen3_vl import theirs as model_with_deepstack

    model, folder = model_with_deepstack(), tmp_path_factory.mktemp("qwen3_vl")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tied model of eight layers, of which Z-Image takes seven and klein fewer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "head_dim": 32, "vocab_size": 640}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model, folder = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)), tmp_path_factory.mktemp("qwen3")
    randomise(model, 6)
    model.get_input_embeddings().weight.data *= 0.02
    model.save_pretrained(folder)
    return model.eval(), folder


def written(text: Component, backend: str, parts: list[Any]) -> list[int]:
    ids, places, pictures = prompt(parts)
    engine = backends.load(backend)
    ours = engine.open(text.network, text.config, text.stored(FP32), FP32)
    scores = engine.numpy(ours.begin(ids, places, [ours.slots(*one) for one in pictures]))
    tokens = [int(scores.argmax())]
    while len(tokens) < TOKENS:
        [scores] = engine.numpy(ours.follow(tokens[-1:]))
        tokens.append(int(scores.argmax()))
    return tokens


def expected(model: Any, parts: list[Any]) -> list[int]:
    ids, _, pictures = prompt(parts)
    with torch.inference_mode():
        made = model.generate(
            **reference_inputs(ids, pictures), do_sample=False, max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0
        )
    tokens: list[int] = made[0, len(ids) :].tolist()
    print(f"{len(set(tokens))} distinct")
    assert len(tokens) == TOKENS and len(set(tokens)) >= DISTINCT
    return tokens


TWO_PICTURES = [7, seen(10, 8, seed=1), 5, seen(14, 6, seed=2), 9]


@pytest.mark.parametrize("which", ["qwen2_5", "qwen3_vl"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_a_text_encoder_describes_pictures(request: pytest.FixtureRequest, which: str, backend: str) -> None:
    """Opened as for text alone, or with its vision tower. Two pictures, of which Qwen3-VL's add to further layers."""
    model, folder = request.getfixturevalue(which)
    rows = {"qwen2_5": (qwen.QWEN2_5_VL, qwen_vl_vision.NETWORK), "qwen3_vl": (qwen.QWEN3_VL, qwen3_vl_vision.NETWORK)}
    right = expected(model, TWO_PICTURES)
    for row in rows[which]:
        text = levels.describing(opened(row, folder))
        tokens = written(text, backend, TWO_PICTURES)
        same = sum(a == b for a, b in zip(tokens, right, strict=True))
        print(f"{backend} {which}, opened as {row.name}: {same} of {TOKENS} tokens")
        assert text.network == rows[which][1].name and tokens == right


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropped_layers_are_planned_again(qwen3: tuple[Any, Path], backend: str) -> None:
    model, folder = qwen3
    right = expected(model, [12])
    for taps in ((-2,), (2, 4, 6)):
        text = opened(qwen.QWEN3, folder)
        text = open_component(qwen.QWEN3, folder, replace(text.config, taps=taps), "text_encoder")
        assert written(levels.writing(text), backend, [12]) == right


def test_only_the_level_is_counted(qwen3: tuple[Any, Path], qwen2_5: tuple[Any, Path]) -> None:
    """Encoding counts what it did; writing adds layers, norm and head, describing the vision tower."""
    text = opened(qwen.QWEN3, qwen3[1])
    whole = levels.writing(text)
    added = whole.plan.entries.keys() - text.plan.entries.keys()
    assert {name.split(".")[1] for name in added if name.startswith("layers")} == {"7"}
    assert added - {name for name in added if name.startswith("layers")} == {"norm.weight"}
    assert all(whole.plan.entries[name] is entry for name, entry in text.plan.entries.items())
    assert levels.writing(text).plan is whole.plan and levels.writing(whole) is whole
    assert levels.alone(whole).plan.entries.keys() == text.plan.entries.keys()

    text = opened(qwen.QWEN2_5_VL, qwen2_5[1])
    sizes, head = [one.held(FP32) for one in (text, levels.writing(text), levels.describing(text))], 640 * 60
    print(f"{sizes} bytes to encode, to write and to describe")
    assert sizes[1] == sizes[0] + head * BYTES["float32"] and sizes[2] > sizes[1]
    tower = levels.describing(text).plan.entries.keys() - levels.writing(text).plan.entries.keys()
    assert all(name.startswith("visual.") for name in tower)
    published = on_paper(qwen.QWEN2_5_VL, qwen.QwenVLConfig(), "bfloat16")
    assert levels.writing(published).plan.nbytes - published.plan.nbytes == 2 * 544_997_376
    assert levels.describing(published).plan.parameters - published.plan.parameters == 544_997_376 + 676_550_144


def test_quantized_with_the_same_files(qwen3: tuple[Any, Path]) -> None:
    text = opened(qwen.QWEN3, qwen3[1]).quantized("8")
    whole = levels.writing(text)
    packed = {name for name, entry in whole.plan.entries.items() if "Packed" in type(entry.storage).__name__}
    assert "layers.7.mlp.up_proj.weight" in packed and "layers.0.mlp.up_proj.weight" in packed
    assert whole.plan.files == text.plan.files
    tokens = written(whole, "cpu", [12])
    assert len(tokens) == TOKENS


# What files lack


def without(folder: Path, to: Path, drop: Callable[[str], bool]) -> Path:
    shutil.copytree(folder, to)
    state = load_file(to / WEIGHTS)
    save_file({name: value for name, value in state.items() if not drop(name)}, to / WEIGHTS)
    return to


def test_files_without_a_head(qwen2_5: tuple[Any, Path], tmp_path: Path) -> None:
    folder = without(qwen2_5[1], tmp_path / "a", lambda name: name.startswith("lm_head"))
    text = opened(qwen.QWEN2_5_VL, folder)
    for level in (levels.writing, levels.describing):
        message = refused(level, text)
        print(message)
        assert f"{folder / WEIGHTS}: has no head (lm_head.weight)" in message and "\n" not in message
        assert "--with" in message and "text_encoder of Qwen-Image" in message


def test_files_without_a_vision_tower(qwen2_5: tuple[Any, Path], qwen3: tuple[Any, Path], tmp_path: Path) -> None:
    folder = without(qwen2_5[1], tmp_path / "a", lambda name: "visual" in name)
    text = opened(qwen.QWEN2_5_VL, folder)
    message = refused(levels.describing, text)
    print(message)
    assert f"{folder / WEIGHTS}: has no vision tower" in message and "ComfyUI's qwen_2.5_vl_7b" in message
    assert levels.writing(text).config.writes
    message = refused(levels.describing, opened(qwen.QWEN3, qwen3[1]))
    print(message)
    assert "sees no pictures" in message and "Qwen-Image-2.1" in message


def test_a_head_of_another_shape(qwen2_5: tuple[Any, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen2_5[1], tmp_path / "a"))
    state = load_file(folder / WEIGHTS)
    save_file(state | {"lm_head.weight": state["lm_head.weight"][:-8].clone()}, folder / WEIGHTS)
    text = opened(qwen.QWEN2_5_VL, folder)
    message = refused(levels.writing, text)
    print(message)
    assert "'lm_head.weight' has shape [632, 60], expected [640, 60]" in message


def test_other_text_encoders_do_not_write() -> None:
    text = on_paper(clip.NETWORK, clip.NETWORK.config(), "float16")
    message = refused(levels.writing, text)
    print(message)
    assert "CLIP" in message and "cannot write" in message


def test_unknown_fields_are_refused(qwen2_5: tuple[Any, Path]) -> None:
    """By name, unless their value switches something off, or they change nothing."""
    plain = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    for row in (qwen.QWEN2_5_VL, qwen.QWEN3, qwen.QWEN3_VL):
        data = plain | {"model_type": row.kind}
        harmless = {"attention_sinks": False, "use_cache": True, "_name_or_path": "x", "eos_token_id": 3, "top_k": 50}
        row.fields(data | harmless)
        for changed in (
            {"attention_sinks": 4},
            {"mlp_bias": True},
            {"logit_scale": 0.5},
            {"partial_rotary_factor": 0.5},
        ):
            message = refused(row.fields, data | changed)
            assert next(iter(changed)) in message and "does not know" in message
    assert decoder.manifest(replace(qwen.QwenVLConfig(), writes=True))[decoder.HEAD] == (152064, 3584)
