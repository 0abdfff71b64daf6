"""Pictures as a model learns them: the VAE's latents, kept by content; captions, flips, masks and pairs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.families.stable_diffusion.expert import parts
from qwenimg.common.pictures import pixels
from qwenimg.common.training import encoded
from qwenimg.common.training.encoded import DataOptions, EncodedPictures, encode_texts, fitted
from qwenimg.common.training.folder import Folder, read_folder


@pytest.fixture
def pipe(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with closing(qwenimg.load(tiny_folder, "cpu", "fp32")) as pipe:
        yield pipe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    made = np.random.default_rng(1)
    for i in range(3):
        Image.fromarray(made.integers(0, 256, (96, 96 + 32 * i, 3), np.uint8)).save(place / f"{i}.png")
        (place / f"{i}.txt").write_text(f"picture {i}")
    return place


def calls(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that the VAE encodes from now on."""
    seen, real = list[tuple[int, ...]](), pipe.model.vae.encode

    def encode(values: Any) -> Any:
        seen.append(values.shape)
        return real(values)

    monkeypatch.setattr(pipe.model.vae, "encode", encode)
    return seen


OPTIONS = DataOptions(side=96, dropout=0.0)


def test_latents_are_kept_by_content(pipe: Pipeline, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(pipe, monkeypatch)
    first = EncodedPictures(pipe, read_folder(folder), OPTIONS)
    assert len(seen) == len(first) == 3
    again = EncodedPictures(pipe, read_folder(folder), OPTIONS)
    assert len(seen) == 3 and again.digest == first.digest
    for a, b in zip(first.whole, again.whole, strict=True):
        assert np.array_equal(a.latents, b.latents)
    (folder / "1.txt").write_text("changed")
    changed = EncodedPictures(pipe, read_folder(folder), OPTIONS)
    assert len(seen) == 3 and changed.digest != first.digest
    assert [one.request.prompt for one in changed.whole] == ["picture 0", "changed", "picture 2"]
    Image.new("RGB", (96, 96), "blue").save(folder / "0.png")
    assert EncodedPictures(pipe, read_folder(folder), OPTIONS).digest != changed.digest and len(seen) == 4


def test_captions_are_words_to_stable_diffusion(
    tiny: dict[str, Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where prompts have weights, alternations and parts: a name of a tag list is in brackets."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    captions = ("salt AND pepper", "hat (vocaloid:1.2), [a|b]", "{red|blue} BREAK")
    for number, caption in enumerate(captions):
        (folder / f"{number}.txt").write_text(caption)
    with closing(qwenimg.load(tiny["sd15"], "cpu", "fp32")) as pipe:
        requests = [one.request for one in EncodedPictures(pipe, read_folder(folder), OPTIONS).whole]
        assert [len(parts(one)) for one in requests] == [1, 1, 1]
        encode_texts(pipe.model, requests, lambda request: request)
    words = [r"salt and pepper", r"hat \(vocaloid:1.2\), \[a|b\]", r"{red|blue} break"]
    assert [one.prompt for one in requests] == words


def test_a_damaged_cache_is_told_and_made_again(pipe: Pipeline, folder: Path, tmp_path: Path) -> None:
    first = EncodedPictures(pipe, read_folder(folder), OPTIONS)
    files = sorted((tmp_path / "cache" / "qwenimg" / "latents").iterdir())
    assert len(files) == 3
    for number, file in enumerate(files):
        raw = bytearray(file.read_bytes())
        raw[-1 - number] ^= 255
        file.write_bytes(bytes(raw) if number else b"")
    told = list[str]()
    pipe.model.runtime.notify = lambda kind, text: told.append(text)
    pipe.notify = lambda kind, text: told.append(text)
    again = EncodedPictures(pipe, read_folder(folder), OPTIONS)
    assert sum("it is ignored" in line for line in told) == 3, told
    assert all(np.array_equal(a.latents, b.latents) for a, b in zip(first.whole, again.whole, strict=True))


def test_the_latents_are_the_vaes_mean_of_the_fitted_picture(pipe: Pipeline, folder: Path) -> None:
    [_, _, wide] = EncodedPictures(pipe, read_folder(folder), OPTIONS).whole
    picture = np.asarray(Image.open(folder / "2.png"))
    size = (wide.request.width, wide.request.height)
    assert size == (112, 64)  # of 160 x 96
    mean, _ = pipe.model.vae.encode(pixels.from_uint8(fitted(picture, *size)))
    assert np.array_equal(wide.latents, mean) and wide.latents.shape[2:] == (8, 14)


def test_flips_captions_and_their_order_follow_the_generator(pipe: Pipeline, folder: Path) -> None:
    options = DataOptions(side=96, dropout=0.25, flips=True)
    found = EncodedPictures(pipe, read_folder(folder), options)
    kinds = {"dropped": 0, "flipped": 0}
    for seed in range(400):
        one, same = (found.example(0, np.random.default_rng(seed)) for _ in range(2))
        assert one.latents is same.latents and one.request.prompt == same.request.prompt
        kinds["dropped"] += one.request.prompt == encoded.BLANK
        kinds["flipped"] += one.latents is not found.whole[0].latents
    print(kinds)
    assert 70 < kinds["dropped"] < 130 and 160 < kinds["flipped"] < 240
    plain, mirrored = found.examples[0].forms
    picture = np.asarray(Image.open(folder / "0.png"))
    mean, _ = pipe.model.vae.encode(pixels.from_uint8(np.ascontiguousarray(picture[:, ::-1])))
    assert np.array_equal(mirrored.latents, mean) and not np.array_equal(plain.latents, mean)


def test_alpha_is_white_or_a_mask(pipe: Pipeline, tmp_path: Path) -> None:
    place = tmp_path / "clear"
    place.mkdir()
    picture = np.full((96, 96, 4), 200, np.uint8)
    picture[:, 48:, 3] = 0
    picture[:48, :, 3] = 255
    picture[:8, :8, 3] = 128
    Image.fromarray(picture).save(place / "a.png")
    [white] = EncodedPictures(pipe, read_folder(place, "x"), OPTIONS).whole
    [masked] = EncodedPictures(pipe, read_folder(place, "x"), DataOptions(side=96, alpha_mask=True)).whole
    assert white.mask is None and np.array_equal(white.latents, masked.latents)
    assert masked.mask is not None and masked.mask.shape == (1, 1, 12, 12)
    assert masked.mask[0, 0, 0, 0] == pytest.approx(128 / 255) and masked.mask[0, 0, 0, 11] == 1
    assert masked.mask[0, 0, 11, 0] == pytest.approx(200 / 255) and masked.mask[0, 0, 11, 11] == 0


def test_no_step_opens_a_text_encoder(pipe: Pipeline, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = EncodedPictures(pipe, read_folder(folder), DataOptions(side=96))
    encode_texts(pipe.model, found.requests, lambda request: request)
    opened = list[str]()
    real = type(pipe.model.runtime).open

    def open_(self: Any, component: Any, title: str, more: int = 0) -> Any:
        opened.append(title)
        return real(self, component, title, more)

    monkeypatch.setattr(type(pipe.model.runtime), "open", open_)
    encode_texts(pipe.model, found.requests, lambda request: request)
    assert not opened
    (folder / "0.txt").write_text("other words")
    changed = EncodedPictures(pipe, read_folder(folder), DataOptions(side=96))
    encode_texts(pipe.model, changed.requests, lambda request: request)
    assert opened == ["text encoder"]


def test_pairs_of_a_model_that_edits(tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, color in (("source", "red"), ("target", "blue")):
        (tmp_path / "d" / name).mkdir(parents=True)
        Image.new("RGB", (96, 64), color).save(tmp_path / "d" / name / "a.png")
    data: Folder = read_folder(tmp_path / "d", "make it blue", pairs=True)
    with closing(qwenimg.load(tiny["qwen-edit"], "cpu", "fp32")) as edits:
        [one] = EncodedPictures(edits, data, DataOptions(side=96)).whole
        [seen] = edits.model.inputs.seen(one.request)
        mean, _ = edits.model.vae.encode(seen)
    assert len(one.references) == 1 and np.array_equal(one.references[0], mean)
    assert len(one.request.images) == 1 and (one.request.images[0][0, 0] == (255, 0, 0)).all()
