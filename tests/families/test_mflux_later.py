"""FLUX.3, ERNIE-Image and Anima as mflux 0.24 saves them: its names, in shards and in codes, without configurations of
a pipeline."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_anima, tiny_ernie, tiny_flux3
from support.cli_runner import cli
from support.family_cases import BACKENDS
from support.mflux_folders import save_as_mflux
from support.relative import relative

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.components import read_config
from qwenimg.common.weights.storage import Packed

ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 5}
LIMIT = 1e-5  # kernels that lie otherwise in memory are multiplied otherwise
# Rows that codes divide
WIDE: dict[str, Callable[[], Any]] = {
    "flux3": lambda: tiny_flux3.tiny_dit(flow_map=False, attention_head_dim=32, num_attention_heads=2,
                                         axes_dims_rope=(8, 8, 8, 8)),
    "ernie": lambda: tiny_ernie.tiny_dit(hidden_size=64, num_attention_heads=2, rope_axes_dim=(8, 12, 12)),
    "anima": lambda: tiny_anima.tiny_dit(attention_head_dim=32, num_attention_heads=2),
}  # fmt: skip
CODED = {
    "flux3": "single_transformer_blocks.0.attn.to_q.weight",
    "ernie": "layers.0.self_attention.to_q.weight",
    "anima": "transformer_blocks.0.attn1.to_q.weight",
}
GUIDANCE = {"flux3": 4.0, "ernie": 4.0, "anima": 4.0}


@pytest.fixture(scope="module", params=WIDE)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(
    family: str,
    tiny_flux3: dict[str, Path],
    tiny_ernie: dict[str, Path],
    tiny_anima: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The tiny folder of the family, with a transformer whose rows codes divide."""
    source = {"flux3": tiny_flux3["flux3-base"], "ernie": tiny_ernie["ernie"], "anima": tiny_anima}[family]
    folder = shutil.copytree(source, tmp_path_factory.mktemp(family) / "model")
    shutil.rmtree(folder / "transformer")
    WIDE[family]().save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(autouse=True)
def of_these_sizes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mflux writes no configurations: the published ones have the tiny model's sizes."""
    monkeypatch.setattr(known_configs, "read", lambda name, part, network: read_config(network, model / part))


def saved_by_mflux(family: str, model: Path, out: Path, bits: int | None = None) -> Path:
    save_as_mflux(model, out, family, bits)
    for path in out.glob("*/config.json"):
        path.unlink()
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_it_draws_what_the_folder_of_diffusers_draws(family: str, model: Path, tmp_path: Path, backend: str) -> None:
    """Converted too."""
    saved = saved_by_mflux(family, model, tmp_path / f"{family}-mflux")
    assert cli("convert", str(saved), str(tmp_path / f"{family}-again"), "--quiet").code == 0
    expected, *made = (
        qwenimg.load(folder, backend, "fp32")("a ring", **ASKED)
        for folder in (model, saved, tmp_path / f"{family}-again")
    )
    for one in made:
        error = relative(one.latents, expected.latents)
        print(f"{family} on {backend}: {error:.1e} (limit {LIMIT})")
        assert error <= LIMIT and np.abs(one.pixels - expected.pixels.astype(float)).max() <= 1
        assert one.pixels.std() > 10 and one.recipe["guidance"] == GUIDANCE[family]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_codes_stay_codes(family: str, model: Path, tmp_path: Path, backend: str) -> None:
    """And `info` names the layout, and finds no fault."""
    saved = saved_by_mflux(family, model, tmp_path / f"{family}-mflux-8bit", 8)
    with qwenimg.load(saved, backend, "fp32") as pipe:
        entries = pipe.model.checkpoint["transformer"].plan.entries
        assert isinstance(entries[CODED[family]].storage, Packed)
        coded = pipe("a ring", **ASKED)
    exact = qwenimg.load(model, backend, "fp32")("a ring", **ASKED)
    error = relative(coded.latents, exact.latents)
    print(f"{family} on {backend}: {error:.1e}")
    assert 1e-6 < error < 0.1
    told = describe(saved)
    print(*told.lines, sep="\n")
    assert told.lines[0].startswith("layout: folder of mflux (its names, as ") and not told.faults
    assert registry.of_folder(saved).name == family
