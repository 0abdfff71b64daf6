"""Text states and pooled vectors of CLIPs and T5 together, as diffusers' pipelines of Flux.1 and SD3 make them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import spiece_files
from support.policies import FP32
from support.tiny_clip import tiny_clip, write_tiny_clip_tokenizer
from support.tiny_t5 import tiny_t5

from qwenimg import backends
from qwenimg.common.families.sd3.texts import SD3Texts
from qwenimg.common.networks.encoders import clip, t5
from qwenimg.common.parts.components import open_component, open_tokenizer, read_config
from qwenimg.common.parts.texts.padded_texts import ClipPooled, T5Texts
from qwenimg.common.prompts import clip as clip_tokenizer
from qwenimg.common.prompts import t5 as t5_tokenizer
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime

BACKENDS = ("cpu", "mlx")
FLOAT32 = 3e-6  # relative L2; measured at most 7e-7
PROMPTS = ("", "a photo of a Red Circle!! and 红色", "ka lo mi re the red " * 40)  # the last is cut
LENGTH = 101  # of T5's states
WIDTH = 148  # of T5: more than both CLIPs together

Models = dict[str, torch.nn.Module]


def flux() -> Models:
    return {"text_encoder": tiny_clip("ViT-L"), "text_encoder_2": tiny_t5(vocab_size=1100, d_model=WIDTH)}


def sd3() -> Models:
    return {
        "text_encoder": tiny_clip("ViT-L", projected=True, projection_dim=44),
        "text_encoder_2": tiny_clip("bigG", seed=8),
        "text_encoder_3": tiny_t5(vocab_size=1100, d_model=WIDTH),
    }


def tokenizer_of(name: str) -> str:
    return name.replace("text_encoder", "tokenizer")


def write(folder: Path, models: Models) -> Path:
    for name, model in models.items():
        model.save_pretrained(folder / name)
        place = folder / tokenizer_of(name)
        if "T5" in type(model).__name__:
            spiece_files.write_spiece(place, spiece_files.trained())
        else:
            write_tiny_clip_tokenizer(place, pad="!" if name == "text_encoder_2" else "<|endoftext|>")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {make.__name__: write(tmp_path_factory.mktemp(make.__name__), make()) for make in (flux, sd3)}


def opened(folder: Path) -> Checkpoint:
    parts, tokenizers = {}, {}
    for place in sorted(folder.glob("text_encoder*")):
        name = place.name
        is_t5 = (folder / tokenizer_of(name) / "spiece.model").exists()
        network, load = (t5.NETWORK, t5_tokenizer.load) if is_t5 else (clip.NETWORK, clip_tokenizer.load)
        parts[name] = open_component(network, place, read_config(network, place), name)
        tokenizers[name] = open_tokenizer(folder / tokenizer_of(name), load, parts[name].config)
    return Checkpoint(source=folder, components=parts, tokenizers=tokenizers, scheduler=None)


def residents(backend: str, told: Callable[[str, str], None] = lambda kind, text: None) -> Residents:
    return Residents(Runtime(backends.load(backend), FP32, told))


def relative(ours: Any, theirs: torch.Tensor) -> float:
    expected = theirs.double().numpy()
    assert ours.shape == expected.shape and ours.dtype == np.float32 and expected.std() > 0.1
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


def reference(kind: str, folder: Path) -> Any:
    import diffusers
    import transformers
    from transformers import CLIPTokenizer

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
    models = {"flux": flux, "sd3": sd3}[kind]()
    tokenizers = {
        tokenizer_of(name): spiece_files.hugging_face(spiece_files.trained())
        if "T5" in type(model).__name__
        else CLIPTokenizer.from_pretrained(folder / tokenizer_of(name))
        for name, model in models.items()
    }
    cls = {"flux": diffusers.FluxPipeline, "sd3": diffusers.StableDiffusion3Pipeline}[kind]
    return cls(transformer=None, vae=None, scheduler=None, **models, **tokenizers)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_flux(folders: dict[str, Path], backend: str) -> None:
    """A pooled vector without a projection, of the first end token, and T5's states."""
    checkpoint, device = opened(folders["flux"]), residents(backend)
    pooled = ClipPooled(device, checkpoint, "text_encoder")
    texts = T5Texts(device, checkpoint, "text_encoder_2", LENGTH)
    theirs, worst = reference("flux", folders["flux"]), 0.0
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = theirs.encode_prompt(prompt, max_sequence_length=LENGTH, device="cpu")
        [states], [vector] = texts.states([prompt]), pooled.states([prompt])
        ours = np.asarray(device.runtime.engine.numpy(states))
        assert [vector.shape] == pooled.shapes(prompt) and [ours.shape] == texts.shapes(prompt)
        worst = max(worst, relative(ours, expected[0]), relative(vector, expected[1]))
    print(f"{backend}: {worst:.1e} (limit {FLOAT32})")
    assert worst <= FLOAT32
    lost = [(texts.fill(prompt).lost, pooled.fill(prompt).lost) for prompt in PROMPTS]
    print(f"tokens cut off: {lost}")
    assert lost[:2] == [(0, 0), (0, 0)] and min(lost[2]) > 100


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_sd3(folders: dict[str, Path], backend: str) -> None:
    """The last states but one of both CLIPs side by side, both projected pooled vectors, and T5's states."""
    checkpoint, device = opened(folders["sd3"]), residents(backend)
    texts = SD3Texts(device, checkpoint, WIDTH, LENGTH)
    theirs, worst = reference("sd3", folders["sd3"]), 0.0
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected, _, expected_pooled, _ = theirs.encode_prompt(
                prompt, None, None, device="cpu", do_classifier_free_guidance=False, max_sequence_length=LENGTH
            )
        [states], [pooled] = zip(*texts.states([prompt]), strict=True)
        worst = max(worst, relative(states, expected), relative(pooled, expected_pooled))
    print(f"{backend}: {worst:.1e} (limit {FLOAT32})")
    assert worst <= FLOAT32


def test_states_of_the_last_layer_are_seen(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the norm, in place of those before it."""
    checkpoint, device = opened(folders["sd3"]), residents("cpu")
    [(states, _)] = SD3Texts(device, checkpoint, WIDTH, LENGTH).states([PROMPTS[1]])
    used = clip.used_states
    monkeypatch.setattr(clip, "used_states", lambda config, penultimate: used(config, penultimate=False))
    [(normed, _)] = SD3Texts(device, checkpoint, WIDTH, LENGTH).states([PROMPTS[1]])
    assert relative(normed, torch.from_numpy(states)) > 0.1


# The run


def test_each_text_encoder_is_a_stage_and_is_freed_before_the_next(folders: dict[str, Path]) -> None:
    checkpoint, told = opened(folders["sd3"]), list[str]()
    device = residents("cpu", lambda kind, text: told.append(text))
    texts, prompts = SD3Texts(device, checkpoint, WIDTH, LENGTH), PROMPTS[1:]
    stages = texts.encodings(prompts, True)
    assert [stage.component for stage in stages] == list(checkpoint.components.values())
    [planned] = device.plan(stages).stages
    largest = max(part.plan.nbytes for part in checkpoint.components.values())
    assert planned.weights == largest, "the largest, not the sum"
    texts.announce(prompts)
    assert len(told) == 3 and all(line.startswith("loading text encoder") for line in told)
    assert not device.weights, "nothing stays"
    assert texts.has(prompts) and not texts.encodings(prompts, True)
    texts.states(prompts)
    assert len(told) == 3, "each is loaded once for both prompts"
    texts.every[-1].forget()
    assert not texts.has(prompts) and [stage.component for stage in texts.encodings(prompts, True)] == [
        checkpoint["text_encoder_3"]
    ]


def test_loras_of_one_text_encoder_forget_its_states_alone(folders: dict[str, Path]) -> None:
    checkpoint, device = opened(folders["flux"]), residents("cpu")
    pooled = ClipPooled(device, checkpoint, "text_encoder")
    texts = T5Texts(device, checkpoint, "text_encoder_2", LENGTH)
    pooled.announce(["a"])
    texts.announce(["a"])
    name = "encoder.layers.0.mlp.fc1.weight"
    changed = checkpoint.with_deltas({"text_encoder": {name: (Delta(),)}})
    for each in (pooled, texts):
        each.renew(changed.texts)
    assert texts.has(["a"]) and not pooled.has(["a"])


class Delta:
    strength, mode, is_product, rank, inputs = 1.0, "fuse", False, None, None


def test_encoded_prompts_are_found_on_the_disk(folders: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told: list[str] = []
    made = []
    for _ in range(2):
        checkpoint, device = opened(folders["flux"]), residents("cpu", lambda kind, text: told.append(text))
        device.runtime.keep_prompts()
        pooled = ClipPooled(device, checkpoint, "text_encoder")
        texts = T5Texts(device, checkpoint, "text_encoder_2", LENGTH)
        made.append([np.asarray(texts.states(["ka lo"])[0]), pooled.states(["ka lo"])[0]])
    assert len(told) == 2, "one loading of each"
    assert all(np.array_equal(first, second) for first, second in zip(*made, strict=True))


def test_values_that_are_not_finite_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    from qwenimg.common.base.errors import NumericsError

    models = flux()
    models["text_encoder_2"].encoder.block[1].layer[1].DenseReluDense.wo.weight.data *= 3e38
    models["text_encoder"].final_layer_norm.weight.data.fill_(3e38)
    checkpoint, device = opened(write(tmp_path, models)), residents("cpu")
    with pytest.raises(NumericsError, match=r"encoder\.block\.\d\.layer\.1"):
        T5Texts(device, checkpoint, "text_encoder_2", LENGTH).states(["ka lo"])
    with pytest.raises(NumericsError, match="final_layer_norm"):
        ClipPooled(device, checkpoint, "text_encoder").states(["ka lo"])
