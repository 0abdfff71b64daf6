"""Every model under every policy, and every sampler, on the backends that are named: `pytest -m parity --backends
mlx,cuda`. What is named and not here is skipped by name; where none of them ran, the run fails (`tests/conftest.py`).

float64 and the pictures to compare with are torch's, on the CPU of this machine.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

import qwenimg
from qwenimg import backends
from qwenimg.common.base.errors import BackendMissing
from qwenimg.common.parity import check, record
from qwenimg.common.parity.passport import Passport
from qwenimg.common.parity.summary import lines
from qwenimg.common.sampling.table import SAMPLERS

pytestmark = [pytest.mark.parity, pytest.mark.slow]

ASKED = {"prompt": "a large blue star", "width": 64, "height": 48, "steps": 2, "seed": 0, "guidance": 3.0}
MODELS = ("shapes", "qwen", "sd15", "sd21", "sdxl")
POLICIES = ("fp32", "bf16", "bf16-plain,vae=bf16", "fp16", "fp16-plain,vae=fp16", "fp16-upcast")


@pytest.fixture
def there(backend: str) -> str:
    """The backend, where this machine has it."""
    pytest.importorskip("torch")
    try:
        backends.load(backend)
    except BackendMissing as error:
        pytest.skip(f"{backend}: {error}")
    return backend


@pytest.fixture(scope="module")
def places(tiny_folder: Path, folders: dict[str, Path]) -> dict[str, str]:
    found = {name: str(folder) for name, folder in folders.items()}
    return found | {"shapes": "shapes", "qwen": str(tiny_folder)}


@cache
def recorded(place: str, policy: str) -> Passport:
    pipe = qwenimg.load(place, "cpu", policy)
    return record.record(pipe, ASKED, exact=pipe.engine, notify=lambda text: None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_model(there: str, places: dict[str, str], model: str, policy: str) -> None:
    passport = recorded(places[model], policy)
    pipe = qwenimg.load(places[model], there, policy)
    judged = list(check.blocks(passport, pipe))
    drawn = check.picture(passport, pipe)
    print(model, policy, pipe.device, *lines(judged, drawn), sep="\n")
    assert [one.name for one in judged if one.failures] == [] and drawn.failures == ()


@cache
def latents(place: str, sampler: str) -> np.ndarray:
    return qwenimg.load(place, "cpu", "fp32")(**ASKED, sampler=sampler).latents


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sampler(there: str, places: dict[str, str], sampler: str) -> None:
    expected = latents(places["sd15"], sampler)
    made = qwenimg.load(places["sd15"], there, "fp32")(**ASKED, sampler=sampler).latents
    error = float(np.linalg.norm(made - expected) / np.linalg.norm(expected))
    print(f"{sampler} on {there}: {error:.1e}, at most {check.LATENTS:.0e}")
    assert error <= check.LATENTS
