"""A picture whose VAE runs over bands of rows is that of the whole VAE: text to image, image to image, inpainting."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.in_bands import in_bands

import qwenimg

WIDTH, HEIGHT = 80, 144
BACKENDS = ("cpu", "mlx")
ONE = 1  # of 255: where a float32 sum in another order falls on the other side of a rounding


def given() -> dict[str, Any]:
    """A picture that is bright above and dark below, and a mask."""
    rows = np.linspace(255, 0, HEIGHT)[:, None, None] * np.ones((1, WIDTH, 3))
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[40:100, 20:60] = 255
    return {"image": rows.astype(np.uint8), "mask": mask}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["sd15", "sdxl", "qwen", "sana"])
@pytest.mark.sample(0)
def test_a_picture_in_bands_is_the_whole_one(
    folders: dict[str, Path],
    tiny: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    kind: str,
) -> None:
    said: list[str] = []
    folder = folders.get(kind, tiny[kind])
    asked: list[dict[str, Any]] = [{}, {"image": given()["image"], "strength": 0.5}]
    asked.append(given() | {"strength": 0.9})
    with closing(qwenimg.load(folder, backend, "fp32", notify=lambda _, text: said.append(text))) as pipe:

        def drawn(**more: Any) -> np.ndarray:
            made = pipe("a red circle", width=WIDTH, height=HEIGHT, steps=2, seed=3, **more)
            return np.asarray(made.pixels).astype(int)

        whole = [drawn(**more) for more in asked]
        assert not any("bands" in text for text in said)
        in_bands(monkeypatch)
        banded = [drawn(**more) for more in asked]
    assert sum("decoding in bands of 16 rows" in text for text in said) == 3
    assert sum("encoding the picture in bands of 16 rows" in text for text in said) >= 2
    apart = [int(np.abs(a - b).max()) for a, b in zip(whole, banded, strict=True)]
    print(f"{kind} on {backend}: {apart} of 255")
    assert max(apart) <= ONE and all(np.mean(a != b) < 1e-3 for a, b in zip(whole, banded, strict=True))
    assert all(picture.std() > 1 for picture in whole)


def test_a_limit_changes_no_bit_of_the_latents(tiny_sd3: dict[str, Path]) -> None:
    """Of SD 3, whose branches run one after the other with any memory: streamed blocks are the same, and only the VAE
    in bands adds up the sums of its norms in another order."""
    said: list[str] = []
    drawn = []
    for limit in (None, 1_200_000):
        notify = lambda _, text: said.append(text)  # noqa: E731
        with closing(qwenimg.load(tiny_sd3["large"], "cpu", "fp32", max_memory=limit, notify=notify)) as pipe:
            drawn.append(
                pipe("a red circle", width=96, height=96, steps=2, seed=3, guidance=3.0, negative_prompt="blurry")
            )
    assert any("loading transformer" in text and "streamed" in text for text in said), said
    assert any("decoding in bands" in text for text in said), said
    whole, limited = drawn
    apart = np.abs(whole.pixels.astype(int) - limited.pixels)
    print(f"{np.count_nonzero(apart)} of {apart.size} values differ, by {apart.max()}")
    assert np.array_equal(whole.latents, limited.latents) and apart.max() <= ONE
