"""FLUX.2 klein in fewer bits, converted, and with its transformer streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli_runner import cli

import qwenimg
from qwenimg.common.weights import streaming

ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 5}
PICTURE = np.random.default_rng(2).integers(0, 256, (64, 48, 3), np.uint8)


def drawn(folder: Path, backend: str, **options: Any) -> np.ndarray:
    pipe = qwenimg.load(folder, backend=backend, precision="fp32", **options)
    latents: np.ndarray = pipe("a ring", image=PICTURE, **ASKED).latents
    pipe.close()
    return latents


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("name", ["flux2-klein", "flux2-base", "flux2-dev"])
@pytest.mark.sample(0)
def test_a_converted_model_is_the_quantized_one(
    tiny_flux2: dict[str, Path], tmp_path: Path, name: str, backend: str
) -> None:
    """It keeps what it is, and its files have the same values."""
    ran = cli("convert", str(tiny_flux2[name]), str(tmp_path / "made"), "-q", "8")
    assert ran.code == 0, ran.err
    pipe = qwenimg.load(tmp_path / "made", backend=backend, precision="fp32")
    assert pipe.defaults.steps == (4 if name == "flux2-klein" else 50)
    pipe.close()
    assert np.array_equal(drawn(tmp_path / "made", backend), drawn(tiny_flux2[name], backend, quantize="8"))


@pytest.mark.parametrize("bits", [None, "4"])
@pytest.mark.parametrize("name", ["flux2-base", "flux2-dev"])
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_streamed_transformer_draws_the_same(
    tiny_flux2: dict[str, Path], backend: str, name: str, bits: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = tiny_flux2[name], {} if bits is None else {"quantize": bits}
    whole = drawn(folder, backend, **options)
    seen: list[int] = []
    fitting = streaming.stream_to_fit

    def noted(*arguments: Any) -> Any:
        plan = fitting(*arguments)
        if plan is not None and plan.component == "transformer":
            seen.append(sum(bool(entry.block) for entry in plan.entries.values()))
        return plan

    monkeypatch.setattr(streaming, "stream_to_fit", noted)
    pipe = qwenimg.load(folder, backend=backend, precision="fp32", **options)
    plan = pipe.estimate("a ring", image=PICTURE, **ASKED)
    pipe.close()
    for share in (0.97, 0.9, 0.8):
        try:
            limited = drawn(folder, backend, max_memory=int(plan.memory * share), **options)
        except qwenimg.DoesNotFit:
            continue
        assert np.array_equal(limited, whole), share
    assert max(seen, default=0) > 0, "nothing was streamed"
