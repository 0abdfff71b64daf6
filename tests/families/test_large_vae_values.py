"""A VAE whose values float32 holds, but not their squares: one verdict, on both backends, whole and in bands."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.in_bands import in_bands
from support.overflow_models import Weights, changed

import qwenimg
from qwenimg import NumericsError

NEAR, FAR = 1e15, 1e20  # with squares of 1e30, of which float32 holds the sum, and of 1e40
APART = 5e-6  # of the largest value, between the backends; 8e-7 was measured


def made(folder: Path, source: Path, factor: float) -> Path:
    def enlarge(weights: Weights) -> None:
        weights["decoder.conv_in.weight"] *= factor

    return changed(source, folder / f"{factor:g}", "vae", enlarge)


def decoded(folder: Path, backend: str) -> np.ndarray:
    with closing(qwenimg.load(folder, backend, "fp32")) as pipe:
        latents = np.random.default_rng(1).standard_normal((1, pipe.model.channels, 8, 6)).astype(np.float32)  # type: ignore[attr-defined]
        return np.asarray(pipe.model.vae.decode(latents))


@pytest.mark.parametrize("kind", ["sd3", "qwen"])
@pytest.mark.sample(1)
def test_both_backends_draw_or_refuse(
    kind: str, tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = (made(tmp_path, tiny[kind], factor) for factor in (NEAR, FAR))
    for way in ("whole", "in bands"):
        ours, theirs = (decoded(near, backend) for backend in ("cpu", "mlx"))
        apart = float(np.abs(ours - theirs).max() / np.abs(ours).max())
        print(f"{kind} {way}: {apart:.1e} apart")
        assert apart < APART and ours.std() > 0.01
        for backend in ("cpu", "mlx"):
            with pytest.raises(NumericsError) as caught:
                decoded(far, backend)
            print(f"{backend}: {caught.value}")
            assert caught.value.exit_code == 6 and "vae: non-finite value" in str(caught.value)
        in_bands(monkeypatch)
