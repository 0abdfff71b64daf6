"""Previews: a map from latents to colours that is fitted to the VAE itself, and computes only what is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import qwenimg
from qwenimg import Pipeline, Result, Step, UsageError
from qwenimg.common.pipeline import preview
from qwenimg.common.pipeline.preview import PreviewMap

# Of 255, RMS, by the built-in VAE, whose pictures have a few colours with sharp edges: measured 36 for noise, 24 for
# its pictures before one is learned, 9 after three, where a grey picture has 43 to 55.
OF_NOISE, AFTER_THREE = 40.0, 20.0
EXACT = 1e-3  # of 255, in float64, for a VAE that is linear


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of maps."""
    monkeypatch.setattr(preview, "folder", lambda: tmp_path / "previews")
    return tmp_path / "previews"


@pytest.fixture(scope="module")
def shapes() -> Pipeline:
    return qwenimg.load("shapes", backend="cpu")


def steps(pipe: Pipeline, prompt: str = "a red circle", **asked: Any) -> tuple[list[Step], Result]:
    *steps, result = pipe.stream(prompt, **{"seed": 7, "steps": 6, **asked})
    assert isinstance(result, Result)
    return steps, result  # type: ignore[return-value]


def means(result: Result, rows: int, columns: int) -> np.ndarray:
    """The mean colours of the squares of a picture, [rows, columns, 3]."""
    height, width = (side // count for side, count in zip(result.pixels.shape, (rows, columns), strict=False))
    return result.pixels.reshape(rows, height, columns, width, 3).mean((1, 3))


def rms(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a.astype(float) - b) ** 2)))


# The map


def linear_model(folder: Path, channels: int = 5, scale: int = 4) -> tuple[Any, np.ndarray]:
    """A model with a VAE whose pixels are a linear map of latents, and that map [1 + C, 3]."""
    weights = np.random.default_rng(2).normal(0, 0.05, (1 + channels, 3))
    file = folder / "vae"
    file.write_bytes(b"weights" * 99)
    opened = preview.open_regular(file)

    def decode(latents: np.ndarray) -> np.ndarray:
        colours = np.tensordot(weights[1:].T, latents[0], 1) + weights[0][:, None, None]
        return colours.repeat(scale, 1).repeat(scale, 2)[None]

    runtime = SimpleNamespace(notify=lambda kind, text: None)
    vae = SimpleNamespace(decode=decode, plan=SimpleNamespace(files=[opened]))
    return SimpleNamespace(vae=vae, scale=scale, channels=channels, decoded_channels=channels, runtime=runtime), weights


def test_a_linear_map_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "RIDGE", 0.0)
    model, weights = linear_model(tmp_path)
    made = preview.fitted(model, model.vae)
    latents = np.random.default_rng(3).normal(0, 2, (1, 5, 3, 7)).astype(np.float32)
    error = preview.difference(made._weights, latents, model.vae.decode(latents))
    print(f"difference {error:.1e} of 255")
    assert error < EXACT and np.abs(made._weights - weights).max() < 1e-5
    expected = np.clip((model.vae.decode(latents)[0, :, ::4, ::4] + 1) * 127.5, 0, 255)
    assert np.abs(made.colours(latents).transpose(2, 0, 1) - expected).max() <= 0.51


def test_values_that_are_not_finite_and_latents_of_one_value() -> None:
    flat = np.ones((1, 4, 8, 8), np.float32)
    made = PreviewMap(preview.sums_of(flat, np.full((1, 3, 8, 8), 0.5)), None)
    assert (made.colours(flat) == 191).all(), "nothing but the constant is known"
    assert made.colours(np.where(np.arange(8) < 4, flat, np.nan).astype(np.float32)).shape == (8, 8, 3)
    assert made.colours(np.full_like(flat, np.inf)).dtype == np.uint8


def test_it_learns_from_pictures_and_then_no_more() -> None:
    sums = preview.sums_of(np.zeros((1, 4, 2, 2), np.float32), np.zeros((1, 3, 2, 2)))
    made = PreviewMap(sums, None)
    for i in range(preview.ENOUGH + 3):
        made.learn([np.full((1, 4, 2, 2), i, np.float32)], [np.full((1, 3, 2, 2), 0.01 * i)])
    assert made._sums[0, 0] == preview.ENOUGH


@pytest.mark.parametrize("channels", [4, 16, 128])
def test_there_is_more_noise_than_unknowns(channels: int) -> None:
    noise = preview.noise(channels)
    independent = noise.shape[2] * noise.shape[3] // 4
    assert independent >= 4 * channels and min(noise.shape[2:]) >= 32 and 0.9 < noise.std() < 1.1
    assert (noise == preview.noise(channels)).all(), "the same at every time"


# The built-in model


@pytest.mark.sample(0)
def test_previews_of_the_built_in_model(shapes: Pipeline) -> None:
    lines: list[str] = []
    shapes.runtime.notify, notify = (lambda kind, text: lines.append(text)), shapes.runtime.notify
    shapes._preview = None
    with pytest.raises(UsageError, match="fit_preview"):
        next(shapes.stream("x", seed=1, steps=2)).preview()  # type: ignore[union-attr]
    shapes.fit_preview()
    shapes.runtime.notify = notify
    [line] = [line for line in lines if "fitted" in line]
    assert float(line.partition("differ by ")[2].split()[0]) < OF_NOISE, line
    errors = []
    for prompt in ("a red circle", "a blue star above a green square", "a ring", "a yellow triangle"):
        drawn, result = steps(shapes, prompt)
        whole = means(result, 32, 32)
        seen = [step.preview() for step in drawn]
        assert {(one.shape, one.dtype.name) for one in seen} == {((32, 32, 3), "uint8")}
        errors.append(rms(seen[-1], whole))
        grey = rms(whole.mean((0, 1)), whole)
        print(f"{prompt}: {', '.join(f'{rms(one, whole):.0f}' for one in seen)} of 255 by steps; one grey: {grey:.0f}")
        assert errors[-1] < grey
    assert errors[-1] < AFTER_THREE, "it has learned from three"


@pytest.mark.sample(0)
def test_a_preview_is_of_the_denoised_latents(shapes: Pipeline) -> None:
    """Latents in the middle of the steps are mostly noise: their colours are further from the picture."""
    shapes.fit_preview()
    drawn, result = steps(shapes)
    whole, made = means(result, 32, 32), shapes._preview
    assert made is not None
    noisy, clear = (rms(one, whole) for one in (made.colours(drawn[1].latents), drawn[1].preview()))
    print(f"after 2 of 6 steps: {clear:.0f} of 255, with the noise {noisy:.0f}")
    assert clear < 0.8 * noisy


def test_a_step_that_is_not_asked_copies_nothing(shapes: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes.fit_preview()
    copied: list[int] = []
    numpy: Callable[[Any], Any] = shapes.engine.numpy
    monkeypatch.setattr(shapes.engine, "numpy", lambda array: copied.append(1) or numpy(array))
    counts, asked = [], None
    for event in shapes.stream("a ring", seed=1, steps=3):
        counts.append(len(copied))
        if isinstance(event, Step) and event.index == 2:
            asked = event
            event.preview()
            counts.append(len(copied))
    assert [b - a for a, b in pairwise(counts)][:3] == [0, 1, 0]
    assert asked is not None and (asked.preview() == asked.preview()).all(), "also later"


@pytest.mark.sample(0)
def test_a_size_that_is_cropped(shapes: Pipeline) -> None:
    shapes.fit_preview()
    drawn, result = steps(shapes, width=70, height=50, steps=2)
    assert drawn[0].preview().shape == (7, 9, 3) and result.pixels.shape == (50, 70, 3)


@pytest.mark.sample(0)
def test_the_warm_up_is_not_learned_from(shapes: Pipeline) -> None:
    shapes._preview = None
    shapes.fit_preview()
    shapes("x", seed=0, steps=1)
    assert shapes._preview is not None and shapes._preview._sums[0, 0] == 1


@pytest.mark.sample(0)
def test_both_backends_show_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(PreviewMap, "learn", lambda *given: None)
    for backend in ("cpu", "mlx"):
        with qwenimg.load("shapes", backend=backend) as pipe:
            pipe.fit_preview()
            drawn, _ = steps(pipe, width=64, height=64, steps=3)
            seen.append(drawn[1].preview().astype(int))
    difference = np.abs(seen[0] - seen[1]).max()
    print(f"levels between the backends: {difference}")
    assert difference <= 1


# Its file


def test_the_map_is_kept(shapes: Pipeline, folder: Path) -> None:
    shapes._preview = None
    shapes.fit_preview()
    made, [file] = shapes._preview, folder.iterdir()
    assert made is not None and file.stat().st_size == 8 * 20**2
    shapes._preview = None
    shapes.fit_preview()
    assert shapes._preview is not None and (shapes._preview._weights == made._weights).all()


def broken(sums: np.ndarray, how: str) -> bytes:
    sums = sums.copy()
    if how == "NaN":
        sums[3, 3] = np.nan
    elif how == "uneven":
        sums[2, 3] += 1
    elif how == "negative":
        sums[2, 2] = -1
    elif how == "no picture":
        sums[0, 0] = 0
    elif how == "too many":
        sums[0, 0] = 1e9
    return sums.tobytes()[: -8 if how == "short" else None] + (b"\0" * 8 if how == "long" else b"")


@pytest.mark.parametrize("how", ["short", "long", "NaN", "uneven", "negative", "no picture", "too many", "empty"])
def test_a_file_that_is_broken_is_made_anew(how: str, tmp_path: Path, folder: Path) -> None:
    model, _ = linear_model(tmp_path)
    whole = preview.fitted(model, model.vae)
    [file] = folder.iterdir()
    data = b"" if how == "empty" else broken(whole._sums, how)
    file.write_bytes(data)
    again = preview.fitted(model, model.vae)
    assert (again._weights == whole._weights).all() and file.read_bytes() == whole._sums.tobytes() != data


@pytest.mark.parametrize("what", ["folder", "link", "pipe", "file in place of the folder", "other channels"])
def test_a_place_that_is_no_file_of_ours(what: str, tmp_path: Path, folder: Path) -> None:
    model, _ = linear_model(tmp_path)
    expected = preview.fitted(model, model.vae)._weights
    [file] = folder.iterdir()
    if what == "other channels":
        file.write_bytes(np.eye(8).tobytes())
    else:
        file.unlink()
    if what == "folder":
        file.mkdir()
    elif what == "link":
        file.symlink_to(file)
    elif what == "pipe":
        os.mkfifo(file)
    elif what.startswith("file"):
        folder.rmdir()
        folder.write_bytes(b"x")
    assert (preview.fitted(model, model.vae)._weights == expected).all()
