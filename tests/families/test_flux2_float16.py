"""FLUX.2 in float16: streams and products of the feed-forward beyond what it holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from support.crossed import crossed
from support.family_cases import BACKENDS
from support.relative import relative

import qwenimg

ASKED = {"width": 48, "height": 32, "steps": 2, "seed": 5}
# Layers whose weights are enlarged, and how much; what each makes beyond 65504, in a run in float32
LARGE = {
    "text stream": {"transformer_blocks.0.ff_context.linear_out.weight": 3e4},
    "feed-forward": {
        "transformer_blocks.0.ff.linear_in.weight": 300,
        "transformer_blocks.0.ff.linear_out.weight": 1e-5,
    },
    "single block": {
        "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight": 300,
        "single_transformer_blocks.0.attn.to_out.weight": 1e-5,
    },
}


@pytest.mark.parametrize(("case", "backend"), crossed(LARGE, BACKENDS))
@pytest.mark.sample(0)
def test_values_beyond_float16(tiny_flux2: dict[str, Path], tmp_path: Path, case: str, backend: str) -> None:
    """Under fp16 the streams are float32 and products scaled: as in float32. Under fp16-plain a stream is clipped as in
    diffusers, and finite; another value is found."""
    folder = shutil.copytree(tiny_flux2["flux2-klein"], tmp_path / "large")
    for file in (folder / "transformer").glob("*.safetensors"):
        values = load_file(file)
        save_file({name: value * LARGE[case].get(name, 1) for name, value in values.items()}, file)

    def drawn(precision: str) -> np.ndarray:
        with qwenimg.load(folder, backend, precision) as pipe:
            return pipe("a ring", **ASKED).latents

    exact = drawn("fp32")
    errors = {name: relative(drawn(name), exact) for name in ("fp16", "fp16-upcast")}
    print(f"{backend}, {case}: {errors}")
    assert max(errors.values()) < 0.02
    if case == "text stream":
        assert np.isfinite(relative(drawn("fp16-plain"), exact))
    else:
        with pytest.raises(qwenimg.NumericsError, match="--precision fp16"):
            drawn("fp16-plain")
