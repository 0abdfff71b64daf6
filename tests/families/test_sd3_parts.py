"""Stable Diffusion 3 from one file, with parts from others, and without T5: what is drawn is what the folder draws."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_files import fitting, write
from support.silent_conversion import Silent
from support.spiece_files import trained, write_spiece
from support.tiny_clip import write_tiny_clip_tokenizer
from support.tiny_ldm import behind
from support.tiny_sd3 import T5, WIDE_CLIPS, models_of, one_file, transformer_file, write_tiny_sd3

import qwenimg
from qwenimg import ModelError, UsageError
from qwenimg.common.conversion.convert import convert
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.network import Network
from qwenimg.common.parts import known_configs

ASKED: dict[str, Any] = {"width": 32, "height": 48, "steps": 2, "guidance": 3.0, "seed": 7}
PROMPT = "a red circle"
BACKENDS = ("cpu", "mlx")
TEXTS = ("text_encoder", "text_encoder_2", T5)


class Made:
    """diffusers' models, their folder, and their files in a folder of their own."""

    def __init__(self, folder: Path):
        self.models = models_of("medium", wide=True)
        self.folder, self.files = folder / "sd3", folder / "files"
        write_tiny_sd3(self.folder, wide=True)
        self.files.mkdir()
        write_tiny_clip_tokenizer(self.files / "words")
        write_spiece(self.files / "words" / "tokenizer_3", trained())

    def save(self, name: str, tensors: dict[str, torch.Tensor]) -> Path:
        path = self.files / f"{name}.safetensors"
        if not path.exists():
            save_file({key: value.clone().contiguous() for key, value in tensors.items()}, path)
        return path

    def whole(self, *without: str) -> Path:
        models = {name: model for name, model in self.models.items() if name not in without}
        return self.save("-".join(["whole", *without]), one_file(models))

    @property
    def words(self) -> Path:
        return self.files / "words"

    def part(self, name: str) -> Path:
        """A text encoder in a file of its own."""
        return self.save(name, dict(self.models[name].state_dict()))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("sd3"))


@pytest.fixture(scope="module")
def drawn(made: Made) -> Callable[..., np.ndarray]:
    """Latents of a model with parts."""

    def draw(model: Path, backend: str = "cpu", **parts: Any) -> np.ndarray:
        with closing(qwenimg.load(model, backend, "fp32", **parts)) as pipe:
            return pipe(PROMPT, **ASKED).latents

    return draw


@pytest.fixture(scope="module")
def expected(made: Made, drawn: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    kept: dict[tuple[str, bool], np.ndarray] = {}

    def of(backend: str, t5: bool = True) -> np.ndarray:
        if (backend, t5) not in kept:
            kept[backend, t5] = drawn(made.folder, backend, **({} if t5 else {T5: "none"}))
        return kept[backend, t5]

    return of


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_one_file(made: Made, drawn: Any, expected: Any, backend: str) -> None:
    assert np.array_equal(drawn(made.whole(), backend, tokenizer=made.words), expected(backend))


@pytest.mark.sample(0)
def test_one_file_without_t5(made: Made, drawn: Any, expected: Any) -> None:
    without = drawn(made.whole(T5), tokenizer=made.words)
    assert np.array_equal(without, expected("cpu", t5=False))
    assert not np.allclose(without, expected("cpu"), rtol=0.01)
    assert np.array_equal(drawn(made.whole(), tokenizer=made.words, text_encoder_3="none"), without)


@pytest.mark.sample(0)
def test_one_file_and_its_parts_in_others(
    made: Made, drawn: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text encoders in any order: their tensors show which one each is, by the widths of the published ones."""
    read = known_configs.read

    def narrow(model: str, part: str, network: Network) -> Any:
        config = read(model, part, network)
        return replace(config, **{**WIDE_CLIPS[part], "projection_dim": 1}) if part in WIDE_CLIPS else config

    monkeypatch.setattr(known_configs, "read", narrow)
    clip_l, clip_g, t5 = map(made.part, TEXTS)
    given = {"text_encoder": t5, "text_encoder_2": clip_g, "text_encoder_3": clip_l, "tokenizer": made.words}
    assert np.array_equal(drawn(made.whole(*TEXTS), **given), expected("cpu"))
    assert np.array_equal(drawn(made.whole(*TEXTS, "vae"), vae=made.whole(*TEXTS), **given), expected("cpu"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["authors", "prefix", "diffusers", "whole", "gguf", "folder"])
@pytest.mark.sample(0)
def test_a_folder_with_another_transformer(
    made: Made, drawn: Any, expected: Any, tmp_path: Path, kind: str, backend: str
) -> None:
    model = made.models["transformer"]
    tensors = transformer_file(model)
    if kind == "gguf":
        path = made.files / "it.gguf"
        arrays = {key: value.numpy() for key, value in tensors.items()}
        write(path, {key: (value, fitting(value, "F32")) for key, value in arrays.items()}, "sd3")
    else:
        path = {
            "authors": lambda: made.save("authors", tensors),
            "prefix": lambda: made.save("prefix", behind("model.diffusion_model.", tensors)),
            "diffusers": lambda: made.save("diffusers", dict(model.state_dict())),
            "whole": made.whole,
            "folder": lambda: made.folder / "transformer",
        }[kind]()
    assert np.array_equal(drawn(made.folder, backend, transformer=path), expected(backend))


@pytest.mark.sample(0)
def test_a_folder_with_other_texts_and_vae(made: Made, drawn: Any, expected: Any) -> None:
    given = {name: made.part(name) for name in TEXTS} | {"vae": made.whole()}
    assert np.array_equal(drawn(made.folder, **given), expected("cpu"))
    assert np.array_equal(drawn(made.folder, text_encoder=made.folder / T5), expected("cpu"))


@pytest.mark.parametrize(
    ("without", "parts", "error", "message"),
    [
        (TEXTS, {}, ModelError, "lacks text_encoder, text_encoder_2: add --text-encoder FILE --text-encoder FILE"),
        (("vae",), {}, ModelError, "lacks vae: add --vae FILE"),
        ((), {"text_encoder": T5, "text_encoder_2": T5}, UsageError, "are both the model's text_encoder_3"),
        ((), {"text_encoder": "vae"}, ModelError, "holds no CLIP text encoder"),
        ((), {"transformer": "vae"}, ModelError, "holds no transformer of Stable Diffusion 3"),
    ],
)
@pytest.mark.sample(2)
def test_what_does_not_fit(
    made: Made, without: tuple[str, ...], parts: dict[str, str], error: type[Exception], message: str
) -> None:
    given = {part: made.part(name) for part, name in parts.items()}
    with pytest.raises(error, match=message):
        registry.open_model(made.whole(*without), LoadOptions(parts=given, tokenizer=made.words))


def test_unknown_and_missing_tensors(made: Made, tmp_path: Path) -> None:
    for name, change, message in (
        ("more", {"model.diffusion_model.x": torch.zeros(2)}, "holds unknown tensor 'model.diffusion_model.x'"),
        ("t5", {"text_encoders.t5xxl.transformer.decoder.x": torch.zeros(2)}, "holds unknown tensor"),
    ):
        path = tmp_path / f"{name}.safetensors"
        save_file(one_file(made.models) | change, path)
        with pytest.raises(ModelError, match=message):
            registry.open_model(path, LoadOptions(tokenizer=made.words))
    tensors = one_file(made.models)
    for key in (
        "text_encoders.t5xxl.transformer.encoder.final_layer_norm.weight",
        "first_stage_model.encoder.conv_in.bias",
    ):
        path = tmp_path / "less.safetensors"
        save_file({name: value for name, value in tensors.items() if name != key}, path)
        with pytest.raises(ModelError, match=f"lacks tensor '{key}'"):
            registry.open_model(path, LoadOptions(tokenizer=made.words))


def test_info(made: Made) -> None:
    lines = describe(made.whole(*TEXTS)).lines
    print("\n".join(lines))
    assert "type: Stable Diffusion 3.5 medium, 4 layers, 2 with a second attention" in lines
    assert any(line.startswith("lacks: text_encoder, text_encoder_2, text_encoder_3") for line in lines)
    whole = describe(made.folder)
    assert not whole.faults and "pipeline: Stable Diffusion 3, text to image" in whole.lines
    for name, flag in ((T5, "--text-encoder"), ("authors", "--transformer")):
        path = made.part(name) if name == T5 else made.save(name, transformer_file(made.models["transformer"]))
        kind = registry.identify_file(path)
        assert kind is not None and kind.flag == flag


# Conversion


@pytest.mark.parametrize("form", ["folder", "file", "file without table", "without T5", "parts"])
@pytest.mark.sample(0)
def test_a_converted_model_draws_the_same(made: Made, drawn: Any, expected: Any, tmp_path: Path, form: str) -> None:
    """And what is in the folder is whole in diffusers' names."""
    source, choices = made.folder, LoadOptions()
    if form.startswith("file"):
        source, choices = made.whole(), LoadOptions(tokenizer=made.words)
    if form == "file without table":
        tensors = one_file(made.models)
        tensors.pop("model.diffusion_model.pos_embed")
        source = made.save("no-table", tensors)
    elif form == "without T5":
        choices = LoadOptions(parts={T5: Path("none")})
    elif form == "parts":
        choices = LoadOptions(parts={"transformer": made.save("authors", transformer_file(made.models["transformer"]))})
    out = tmp_path / "out"
    convert(source, out, choices, Silent())
    assert not describe(out).faults
    assert (out / T5).is_dir() == (form != "without T5")
    parts = {} if form.startswith("without") else {"tokenizer": None}
    found = drawn(out, **parts)
    if form == "file without table":
        assert np.array_equal(found, drawn(source, tokenizer=made.words))
        assert not np.array_equal(found, expected("cpu"))
        assert "pos_embed.pos_embed" not in load_file(next((out / "transformer").glob("*.safetensors")))
    else:
        assert np.array_equal(found, expected("cpu", t5=form != "without T5"))
        tensors = load_file(next((out / "transformer").glob("*.safetensors")))
        wanted = made.models["transformer"].state_dict()
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[key], value) for key, value in wanted.items())


@pytest.mark.parametrize("source", ["folder", "file"])
@pytest.mark.sample(0)
def test_quantized_while_converting_and_while_loading(
    made: Made, drawn: Any, expected: Any, tmp_path: Path, source: str
) -> None:
    path, words = (made.folder, None) if source == "folder" else (made.whole(), made.words)
    out = tmp_path / "out"
    convert(path, out, LoadOptions(quantize="8", tokenizer=words), Silent())
    stored, loaded = drawn(out), drawn(path, quantize=8, tokenizer=words)
    assert np.array_equal(stored, loaded)
    exact = expected("cpu")
    error = float(np.linalg.norm(stored - exact) / np.linalg.norm(exact))
    print(f"{error:.1e}")
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "Q4_0"])
@pytest.mark.sample(0)
def test_gguf_stays_quantized_and_draws_alike_on_both_backends(
    made: Made, drawn: Any, expected: Any, kind: str
) -> None:
    path = made.files / f"{kind}.gguf"
    arrays = {key: value.numpy() for key, value in transformer_file(made.models["transformer"]).items()}
    write(path, {key: (value, fitting(value, kind)) for key, value in arrays.items()}, "sd3")
    one, other = (drawn(made.folder, backend, transformer=path) for backend in BACKENDS)
    exact = expected("cpu")
    error, apart = (float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in ((one, exact), (other, one)))
    print(f"{kind}: {error:.1e} from float32, backends {apart:.1e}")
    assert apart < 1e-4 < 0.3 and error < 0.3
