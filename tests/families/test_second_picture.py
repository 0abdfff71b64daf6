"""Pictures one after the other at the lowest limit that suffices for one: what stays in memory from the first, the VAE
and the denoiser, makes room for the second, in the plan as in the run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_model import write_random_model

import qwenimg
from qwenimg import DoesNotFit, Pipeline
from qwenimg.common.pipeline import fit
from qwenimg.common.runtime.runtime import Change, limit_for

MODELS = ("qwen", "sd15", "sdxl")
FIRST = {"prompt": "a red circle", "width": 64, "height": 64, "steps": 2, "seed": 5, "guidance": 3.0}
# Another prompt, for which the text encoder is loaded again; a smaller picture; one from a picture, which is encoded.
OTHERS: tuple[dict[str, Any], ...] = (
    {"prompt": "two blue squares"}, {"width": 32}, {"image": np.full((64, 64, 3), 90, np.uint8), "strength": 0.9},
)  # fmt: skip


@pytest.fixture(scope="module")
def every(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    write_random_model(folder := tmp_path_factory.mktemp("second") / "qwen")
    return {**folders, "qwen": folder}


def opened(folder: Path, backend: str, limit: int | None = None) -> Pipeline:
    return qwenimg.load(folder, backend, "fp32", max_memory=limit)


def drawn(pipe: Pipeline, asked: Mapping[str, Any]) -> np.ndarray:
    return np.asarray(pipe(**asked).latents)


def lowest(folder: Path, backend: str, every: list[dict[str, Any]]) -> int:
    """The least --max-memory at which a fresh run of each of the pictures fits."""
    with closing(opened(folder, backend, 10**12)) as pipe:
        tight = pipe.model.variant(Change(max_memory=1))
        peaks = []
        for asked in every:
            known = {name: value for name, value in asked.items() if name != "image"}
            request = pipe.check(**known, image=asked.get("image"))
            peaks.append(fit.plan_memory(tight, request).largest.peak)
        return limit_for(max(peaks))


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(0, rest=2)
def test_what_fits_first_fits_again(name: str, backend: str, every: dict[str, Path]) -> None:
    """With the same bits as in a run of its own."""
    pictures = [FIRST, *(FIRST | other for other in OTHERS), FIRST]
    limit = lowest(every[name], backend, pictures)
    alone = []
    for asked in pictures:
        with closing(opened(every[name], backend, limit)) as pipe:
            alone.append(drawn(pipe, asked))
    with closing(opened(every[name], backend, limit)) as pipe:
        for asked, expected in zip(pictures, alone, strict=True):
            planned = fit.plan_memory(pipe.model, pipe.check(**asked))
            assert planned.fits(planned.budget)
            assert np.array_equal(drawn(pipe, asked), expected)
        print(name, backend, f"{limit:,}", f"{pipe.model.residents.weights:,}")
        assert pipe.model.residents.weights <= limit
    with closing(opened(every[name], backend, limit * 3 // 4)) as pipe, pytest.raises(DoesNotFit):
        for asked in pictures:
            drawn(pipe, asked)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(1)
def test_nothing_is_loaded_again_that_fits(name: str, every: dict[str, Path]) -> None:
    with closing(opened(every[name], "cpu", 10**12)) as pipe:
        drawn(pipe, FIRST)
        told: list[str] = []
        pipe.runtime.notify = lambda kind, text: told.append(text)
        drawn(pipe, FIRST)
    print(told)
    assert told and not [text for text in told if text.startswith(("loading", "freeing"))]
