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

import bench_step
import bench_step_flow as flow
import fast_blas  # noqa: F401 (before MLX)
import mlx.core as mx
import numpy as np
import torch
from bench_step import Arm, rows_of, show
from mlx.utils import tree_flatten
from wide_checkpoint import write

import qwenimg.backends
from qwenimg.common.families import registry
from qwenimg.common.numbers import packing

sys.path.insert(0, str(Path(__file__).resolve().parent / "against"))
from mflux_arm import filled

Given = tuple[np.ndarray, np.ndarray, np.ndarray]  # latents [1 C h w], text states [1 S D], pooled text [1 P]


def _zimage(folder: Path, config: Any, given: Given) -> tuple[Any, Callable[[], Any], Callable[[Any], np.ndarray]]:
    """Return mflux's model, a step of it, and what makes of its result that of our forward."""
    from mflux.models.z_image.model.z_image_transformer.transformer import ZImageTransformer
    from mflux.models.z_image.variants.z_image import ZImage
    from mflux.models.z_image.weights.z_image_weight_mapping import ZImageWeightMapping

    model = ZImageTransformer(n_layers=config.n_layers, n_refiner_layers=config.n_refiner_layers)
    filled(model, folder, ZImageWeightMapping.get_transformer_mapping(), mx.float32, {"num_blocks": config.n_layers})
    latents, text, sigmas = mx.array(given[0][0][:, None]), mx.array(given[1][0]), mx.array([flow.SIGMA, 0.0])
    predict = ZImage._predict(model)
    asked = {"timestep": 1 - sigmas[:1], "sigmas": sigmas, "text_encodings": text, "negative_encodings": None}
    return model, lambda: predict(latents=latents, guidance=0.0, **asked), lambda y: -np.array(y)[:, 0]


def _flux(folder: Path, config: Any, given: Given) -> tuple[Any, Callable[[], Any], Callable[[Any], np.ndarray]]:
    from mflux.models.common.config.model_config import ModelConfig
    from mflux.models.flux.model.flux_transformer.transformer import Transformer
    from mflux.models.flux.weights.flux_weight_mapping import FluxWeightMapping

    model = Transformer(ModelConfig.dev(), config.num_layers, config.num_single_layers)
    filled(model, folder, FluxWeightMapping.get_transformer_mapping(), mx.float32, {"num_blocks": config.num_layers})
    height, width = (8 * side for side in given[0].shape[2:])
    asked = SimpleNamespace(
        height=height,
        width=width,
        guidance=flow.GUIDANCE,
        num_train_steps=1000,
        precision=mx.float32,
        scheduler=SimpleNamespace(sigmas=mx.array([flow.SIGMA, 0.0])),
    )
    tokens, text, pooled = mx.array(packing.pack(given[0])), mx.array(given[1]), mx.array(given[2])
    return model, lambda: model(0, asked, tokens, text, pooled), np.array


THEIRS = {"z-image": _zimage, "flux": _flux}


def their_arm(name: str, folder: Path, config: Any, given: Given) -> Arm:
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
    case = flow.cases()[name]
    manifest = {case.network.published(key): shape for key, shape in case.network.manifest(case.config).items()}
    file = write(folder / "diffusion_pytorch_model.safetensors", manifest)
    given = flow.inputs(case, *map(int, options.tokens.split("+")))
    exact = flow.oracle_arm(case, flow.oracle(case, file, torch.float32, "cpu"), given)
    reference = exact.numpy(exact.step())
    del exact
    gc.collect()
    kind = next(family.precision for family in registry.FAMILIES if family.name == case.family)
    engine = qwenimg.backends.load("mlx")
    arms = [their_arm(name, folder, case.config, given), flow.our_arm(case, engine, folder, kind, "fp32", given)]
    about = {"model": name, "dtype": "fp32", "image_tokens": given[0].size // 64, "text_tokens": given[1].shape[1]}
    show({**about, "branches": 1, "rows": rows_of(arms, "fp32", reference, options.runs)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="z-image, flux; both without it")
    parser.add_argument("--tokens", metavar="IMAGE+TEXT", default="256+40")
    parser.add_argument("--runs", type=int, default=5, help="of every arm, after one that is not counted")
    options = parser.parse_args()
    print(bench_step.header(argparse.Namespace(**vars(options), backend="mlx", cfg=False, layers="few", device="cpu")))
    for name in options.models or THEIRS:
        with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
            measure(name, options, Path(folder))


if __name__ == "__main__":
    main()
