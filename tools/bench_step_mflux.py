"""Times one forward of Z-Image's and FLUX.1's transformers at full width on MLX against mflux, in one run, with the
correctness beside the time.

    OMP_NUM_THREADS=1 PYTHONPATH=src mflux-env/bin/python tools/bench_step_mflux.py

It needs mflux, diffusers and qwenimg in one environment. The arms take turns in one process, on the same weights, and
are held against diffusers' forward. As the product does, ours makes what depends on no step (text, RoPE tables, for
FLUX.1 the modulation of a schedule) beforehand; mflux makes all in every step, and compiles Z-Image's as its pipeline
does. On a CPU both take torch's BLAS: MLX's own, in its wheel for Linux, is slow.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench
import bench_step as steps
import fast_blas  # noqa: F401 (before MLX)
import mlx.core as mx
import numpy as np
import torch
from bench import Arm
from bench_step import Inputs
from mlx.utils import tree_flatten

import qwenimg.backends
from qwenimg.common.numbers import packing

sys.path.insert(0, str(Path(__file__).resolve().parent / "against"))
from mflux_arm import filled


def _zimage(folder: Path, config: Any, given: Inputs) -> tuple[Any, Callable[[], Any], Callable[[Any], np.ndarray]]:
    """Return mflux's model, a step of it, and what makes of its result that of our forward."""
    from mflux.models.z_image.model.z_image_transformer.transformer import ZImageTransformer
    from mflux.models.z_image.variants.z_image import ZImage
    from mflux.models.z_image.weights.z_image_weight_mapping import ZImageWeightMapping

    model = ZImageTransformer(n_layers=config.n_layers, n_refiner_layers=config.n_refiner_layers)
    filled(model, folder, ZImageWeightMapping.get_transformer_mapping(), mx.float32, {"num_blocks": config.n_layers})
    latents, text, sigmas = mx.array(given[0][0][:, None]), mx.array(given[1][0]), mx.array([steps.SIGMA, 0.0])
    predict = ZImage._predict(model)
    asked = {"timestep": 1 - sigmas[:1], "sigmas": sigmas, "text_encodings": text, "negative_encodings": None}
    return model, lambda: predict(latents=latents, guidance=0.0, **asked), lambda y: -np.array(y)[:, 0]


def _flux(folder: Path, config: Any, given: Inputs) -> tuple[Any, Callable[[], Any], Callable[[Any], np.ndarray]]:
    from mflux.models.common.config.model_config import ModelConfig
    from mflux.models.flux.model.flux_transformer.transformer import Transformer
    from mflux.models.flux.weights.flux_weight_mapping import FluxWeightMapping

    model = Transformer(ModelConfig.dev(), config.num_layers, config.num_single_layers)
    filled(model, folder, FluxWeightMapping.get_transformer_mapping(), mx.float32, {"num_blocks": config.num_layers})
    height, width = (8 * side for side in given[0].shape[2:])
    asked = SimpleNamespace(
        height=height,
        width=width,
        guidance=steps.GUIDANCE,
        num_train_steps=1000,
        precision=mx.float32,
        scheduler=SimpleNamespace(sigmas=mx.array([steps.SIGMA, 0.0])),
    )
    tokens, text, pooled = mx.array(packing.pack(given[0])), mx.array(given[1]), mx.array(given[2])
    return model, lambda: model(0, asked, tokens, text, pooled), np.array


THEIRS = {"z-image": _zimage, "flux": _flux}


def their_arm(name: str, folder: Path, config: Any, given: Inputs) -> Arm:
    from mflux.models.common.config.model_config import ModelConfig

    ModelConfig.precision = mx.float32
    model, step, unpacked = THEIRS[name](folder, config, given)
    weights = sum(value.nbytes for _, value in tree_flatten(model.parameters()))

    def evaluated() -> Any:
        result = step()
        mx.eval(result)
        return result

    return Arm("mflux", evaluated, unpacked, weights)


def measure(name: str, options: argparse.Namespace, folder: Path) -> None:
    case = steps.cases()[name]
    file = steps.checkpoint(case, folder)
    given = steps.inputs(case, *map(int, options.tokens.split("+")))
    exact = steps.oracle_arm(case, steps.oracles(case, [file], torch.float32, "cpu"), given)
    reference = exact.numpy(exact.step())
    del exact
    gc.collect()
    [ours] = steps.our_arms(case, qwenimg.backends.load("mlx"), [steps.planned(case, case, file)], "fp32", given)
    rows = bench.rows_of([their_arm(name, folder, case.config, given), ours], "fp32", reference, options.runs)
    bench.show(f"{name}, fp32, {options.tokens} tokens", rows)


def main() -> None:
    parser = bench.options(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="z-image, flux; both without it")
    parser.add_argument("--tokens", metavar="IMAGE+TEXT", default="256+40")
    options = parser.parse_args()
    print(bench.header(options.runs, layers="few"))
    for name in options.models or THEIRS:
        with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
            measure(name, options, Path(folder))


if __name__ == "__main__":
    main()
