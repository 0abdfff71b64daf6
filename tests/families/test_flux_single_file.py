"""A FLUX.1 in one file, as ComfyUI publishes it: what is drawn is what the folder draws; and files that are broken."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.comfy_files import comfy
from support.family_cases import BACKENDS
from support.file_mutants import assert_line, campaign, damaged
from support.refusals import refused
from support.spiece_files import trained, write_spiece
from support.tiny_clip import write_tiny_clip_tokenizer
from support.tiny_flux import one_file, write_tiny_flux

import qwenimg
from qwenimg import ModelError, UsageError
from qwenimg.common.conversion.convert import convert
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.describe import describe

ASKED: dict[str, Any] = {"prompt": "a red circle", "width": 64, "height": 48, "steps": 2, "seed": 3}
CLIP, T5 = "text_encoder", "text_encoder_2"
Tensors = dict[str, torch.Tensor]


class Made:
    """A folder, the same in one file, and the vocabularies of its text encoders."""

    def __init__(self, place: Path, variant: str = "dev"):
        self.folder, self.file, self.words = place / variant, place / "flux1.safetensors", place / "words"
        write_tiny_flux(self.folder, variant, single=True)
        self.tensors = one_file(self.folder)
        save_file(self.tensors, self.file)
        write_tiny_clip_tokenizer(self.words)
        write_spiece(self.words / "tokenizer_2", trained())

    def draw(self, model: Path, backend: str = "cpu", **options: Any) -> np.ndarray:
        with qwenimg.load(model, backend, "fp32", **options) as pipe:
            return pipe(**ASKED).latents


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def expected(made: Made) -> dict[str, np.ndarray]:
    return {backend: made.draw(made.folder, backend) for backend in BACKENDS}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_one_file_draws_what_the_folder_draws(made: Made, expected: Any, backend: str) -> None:
    assert np.array_equal(made.draw(made.file, backend, tokenizer=made.words), expected[backend])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["schnell", "fill", "kontext"])
def test_each_variant_in_one_file(tmp_path: Path, variant: str) -> None:
    """schnell by its lack of an embedding, Fill by its channels, Kontext by the name of the file."""
    made = Made(tmp_path, variant)
    name = made.file.with_name(f"my-{variant}.safetensors")
    made.file.rename(name)
    latents = made.draw(name, tokenizer=made.words)
    assert np.array_equal(latents, made.draw(made.folder))
    opened = registry.open_model(name, LoadOptions(tokenizer=made.words))
    opened.checkpoint.close()
    assert opened.checkpoint.variant == ("text" if variant == "schnell" else variant)


@pytest.mark.sample(0)
def test_a_vae_behind_another_prefix_and_t5_with_both_tables(made: Made, expected: Any, tmp_path: Path) -> None:
    values = one_file(made.folder, vae="first_stage_model.")
    prefix = "text_encoders.t5xxl.transformer."
    values[f"{prefix}encoder.embed_tokens.weight"] = values[f"{prefix}shared.weight"].clone()
    save_file(values, tmp_path / "a.safetensors")
    assert np.array_equal(made.draw(tmp_path / "a.safetensors", tokenizer=made.words), expected["cpu"])


def test_eight_bits_of_comfyui(made: Made, tmp_path: Path) -> None:
    """Plain float8, as published."""
    written = comfy(made.tensors, "plain", lambda name: "diffusion_model" in name and "linear" in name)
    save_file(written.tensors, tmp_path / "a.safetensors", metadata=written.notes)
    save_file({key: value.contiguous() for key, value in written.values.items()}, tmp_path / "b.safetensors")
    first, second = (made.draw(tmp_path / f"{name}.safetensors", tokenizer=made.words) for name in "ab")
    assert np.array_equal(first, second)


@pytest.mark.sample(0)
def test_parts_that_it_lacks_and_parts_in_its_place(made: Made, expected: Any, tmp_path: Path) -> None:
    save_file(one_file(made.folder, "vae"), tmp_path / "less.safetensors")
    texts = {CLIP: made.folder / CLIP, T5: made.folder / T5}
    less = tmp_path / "less.safetensors"
    assert np.array_equal(made.draw(less, tokenizer=made.words, **texts), expected["cpu"])
    given = {"vae": made.file, "transformer": made.folder / "transformer", T5: made.folder / T5}
    assert np.array_equal(made.draw(made.file, tokenizer=made.words, **given), expected["cpu"])
    assert np.array_equal(made.draw(made.folder, transformer=made.file, vae=made.file), expected["cpu"])
    text = refused(registry.open_model, less, LoadOptions(tokenizer=made.words))
    assert "lacks text_encoder, text_encoder_2: add --text-encoder FILE --text-encoder FILE" in text


@pytest.mark.sample(0)
def test_it_is_converted_to_a_folder(made: Made, expected: Any, tmp_path: Path) -> None:
    convert(made.file, tmp_path / "made", LoadOptions(tokenizer=made.words), Mock())
    assert np.array_equal(made.draw(tmp_path / "made"), expected["cpu"])
    assert describe(tmp_path / "made").lines[1] == "pipeline: Flux.1 dev, text to image"


def test_vocabularies_are_found_or_asked_for(made: Made, tmp_path: Path) -> None:
    alone = Path(shutil.copy(made.file, tmp_path / "a.safetensors"))
    assert "needs the vocabularies of CLIP and of T5" in refused(registry.open_model, alone)
    write_tiny_clip_tokenizer(tmp_path)
    assert "needs T5's vocabulary" in refused(registry.open_model, alone)
    write_spiece(tmp_path / "tokenizer_2", trained())
    registry.open_model(alone).checkpoint.close()
    with pytest.raises(UsageError, match="--tokenizer is for a model that has none"):
        registry.open_model(made.folder, LoadOptions(tokenizer=made.words))


def test_info(made: Made, tmp_path: Path) -> None:
    about = describe(made.file)
    assert not about.faults and about.lines[0] == "layout: Flux.1, single file"
    assert about.lines[1] == "type: dev: it is guidance-distilled"
    assert [line.partition(":")[0] for line in about.lines[3:7]] == ["transformer", CLIP, T5, "vae"]
    save_file(one_file(made.folder, "vae"), tmp_path / "less.safetensors")
    lacks, use = describe(tmp_path / "less.safetensors").lines[-2:]
    assert lacks.startswith(f"lacks: {CLIP}, {T5};") and use.endswith("less.safetensors, with what it lacks")
    kind = registry.identify_file(made.file)
    assert kind is not None and (kind.flag, kind.title) == ("-m", "a whole Flux.1 model")


# Broken files

MAIN, OF_CLIP = "model.diffusion_model.", "text_encoders.clip_l.transformer.text_model."
OF_T5 = "text_encoders.t5xxl.transformer."


def without(*keys: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(key) for key in keys]


def put(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({key: torch.ones(shape, dtype=dtype)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{MAIN}double_blocks.1.img_mod.lin.weight"), f"lacks tensor '{MAIN}double_blocks.1.img_mod"),
        (without(f"{OF_CLIP}encoder.layers.1.mlp.fc2.bias"), "lacks tensor 'text_encoders.clip_l"),
        (without(f"{OF_CLIP}final_layer_norm.weight"), "final_layer_norm"),
        (without(f"{OF_T5}encoder.final_layer_norm.weight"), "lacks tensor 'text_encoders.t5xxl"),
        (without(f"{OF_T5}shared.weight", f"{OF_T5}encoder.embed_tokens.weight"), "lacks tensor 'shared.weight'"),
        (without("vae.encoder.conv_in.bias"), "lacks tensor 'vae.encoder.conv_in.bias'"),
        (put(f"{MAIN}double_blocks.9.x", 2), "lacks tensor 'model.diffusion_model.double_blocks.2."),
        (put("model.other", 2), "holds unknown tensor 'model.other'"),
        (put(f"{OF_CLIP}encoder.layers.0.x", 2), "holds unknown tensor"),
        (put(f"{OF_T5}decoder.x", 2), "holds unknown tensor"),
        (put("vae.quant_conv.x", 2), "unknown tensor"),
        (put("text_encoders.clip_g.transformer.x", 2), "holds unknown tensor 'text_encoders.clip_g.transformer.x'"),
        (put(f"{MAIN}txt_in.weight", 128, 60), "wants text states of 60 channels, the text encoder makes 64"),
        (put(f"{MAIN}vector_in.in_layer.weight", 128, 65), "wants a pooled text of 65 channels"),
        (put(f"{MAIN}img_in.weight", 128, 0), "'in_channels' is 0"),
        (put(f"{MAIN}img_in.weight", 128, 65), "takes 65 channels"),
        (put(f"{OF_T5}shared.weight", 1000, 63), "text"),
        (put("vae.decoder.conv_in.weight", 32, 4, 3, 3), "vae"),
        (put(f"{MAIN}img_in.weight", 128, 64, dtype=torch.int64), "I64"),
    ],
)  # fmt: skip
@pytest.mark.sample(3)
def test_broken_files_are_refused(made: Made, tmp_path: Path, change: Callable[[Tensors], Any], message: str) -> None:
    tensors = dict(made.tensors)
    change(tensors)
    path = tmp_path / "it.safetensors"
    save_file(tensors, path)
    assert message in refused(registry.open_model, path, LoadOptions(tokenizer=made.words))
    assert "\n" not in "".join(describe(path).faults)


def test_cut_and_linked_files(made: Made, tmp_path: Path) -> None:
    whole = made.file.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path = tmp_path / "cut.safetensors"
        path.write_bytes(whole[:size])
        assert_line(refused(registry.open_model, path), path.name)
    link = tmp_path / "link.safetensors"
    link.symlink_to(made.file)
    registry.open_model(link, LoadOptions(tokenizer=made.words)).checkpoint.close()
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError):
        registry.open_model(link, LoadOptions(tokenizer=made.words))


def mutated(made: Made, path: Path, count: int, seed: int) -> Counter[str]:
    whole, chance = made.file.read_bytes(), random.Random(seed)
    header = 8 + int.from_bytes(whole[:8], "little")

    def outcome() -> str:
        path.write_bytes(damaged(whole, header, chance))
        try:
            registry.open_model(path, LoadOptions(tokenizer=made.words)).checkpoint.close()
        except ModelError as error:
            assert_line(str(error), path.name)
            return "refused"
        return "opened"

    def mutants() -> Iterator[Callable[[], str]]:
        yield from (outcome for _ in range(count))

    return campaign(mutants(), seed)


@pytest.mark.sample(0)
def test_damaged_files(made: Made, tmp_path: Path) -> None:
    """Each is refused in one line, or opened: where only values are damaged, or a note."""
    assert mutated(made, tmp_path / "it.safetensors", 40, 1)["refused"] > 20


@pytest.mark.slow
def test_many_damaged_files(made: Made, tmp_path: Path) -> None:
    assert mutated(made, tmp_path / "it.safetensors", 600, 2)["refused"] > 300
