"""Every model under every policy, some with a LoRA and in codes, and every sampler, on the backends that are named:
`pytest -m parity --backends mlx,cuda`. What is named and not here is skipped by name; where none of them ran, the run
fails (`tests/conftest.py`).

float64 and the pictures to compare with are torch's, on the CPU of this machine.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.lora_cases import write_lora

import qwenimg
from qwenimg import Pipeline, backends
from qwenimg.common.base.errors import BackendMissing
from qwenimg.common.hub.resolve import resolve
from qwenimg.common.parity import check, record
from qwenimg.common.parity.passport.passport import Passport
from qwenimg.common.parity.summary import lines
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.sampling.table import SAMPLERS

pytestmark = [pytest.mark.parity, pytest.mark.slow]

ASKED = {"prompt": "a large blue star", "width": 64, "height": 48, "steps": 2, "seed": 0, "guidance": 3.0}
MODELS = ("shapes", "qwen", "sd15", "sd21", "sdxl")
LORAS = {"shapes": "qwen", "sdxl": "sdxl"}  # of each model the kind of its layers
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
def recorded(
    place: str, policy: str, bits: str | None = None, loras: tuple[Lora, ...] = (), mode: str = "auto"
) -> Passport:
    pipe = qwenimg.load(place, "cpu", policy, quantize=bits)
    asked = ASKED | {"lora": loras, "lora_mode": mode}
    return record.record(pipe, asked, exact=pipe.engine, notify=lambda text: None)


def holds(passport: Passport, pipe: Pipeline, loras: tuple[Lora, ...] = ()) -> None:
    judged = list(check.blocks(passport, pipe, loras))
    drawn = check.picture(passport, pipe, loras)
    print(pipe.model_name, pipe.precision.name, pipe.device, *lines(judged, drawn), sep="\n")
    assert [one.name for one in judged if one.failures] == [] and drawn.failures == ()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_model(there: str, places: dict[str, str], model: str, policy: str) -> None:
    holds(recorded(places[model], policy), qwenimg.load(places[model], there, policy))


@pytest.mark.parametrize("bits", [None, "8", "4"])
@pytest.mark.parametrize("mode", ["auto", "side"])
@pytest.mark.parametrize("model", LORAS)
def test_lora_and_codes(
    there: str, places: dict[str, str], shared_folder: Path, model: str, mode: str, bits: str | None
) -> None:
    place, kind = places[model], LORAS[model]
    loras = (Lora(str(write_lora(resolve(place).folder, kind, shared_folder / f"{model}.safetensors")), 0.7),)
    passport = recorded(place, "bf16", bits, loras, mode)
    holds(passport, qwenimg.load(place, there, "bf16", quantize=bits), loras)


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
