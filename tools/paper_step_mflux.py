"""Counts a forward of Z-Image's or FLUX.1's transformer for Metal on paper, ours and mflux's: a MODEL, no measurement.

    PYTHONPATH=src mflux-env/bin/python tools/paper_step_mflux.py flux

The layers of `bench_step_mflux.py`, in bfloat16 at 1024x1024 on an M4 Max: kernels, the bytes that memory-bound ones
move, and milliseconds, as `kernels_on_paper.py` has them. Ours is compiled. mflux runs its activations as compiled
chains, and compiles a whole step of Z-Image except on M1 and M2, as its pipelines do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import bench_step as steps
import mlx.core as mx
from mlx import nn
from mlx.nn.layers import activations
from mlx.utils import tree_map
from paper import mlx_kernels, on_paper
from paper.kernels import Case, Kernel

from qwenimg.common.base.text import aligned
from qwenimg.common.precision.machines import MACHINES
from qwenimg.common.precision.precision import bases

DTYPE, SIDE, TEXT = mx.bfloat16, 1024, {"z-image": 64, "flux": 512}
CHAINS: dict[str, Callable[[Any], Any]] = {  # functions that MLX compiles itself
    "silu": lambda x: x * mx.sigmoid(x),
    "gelu": lambda x: x * (1 + mx.erf(x / 1.4142135624)) / 2,
    "gelu_approx": lambda x: 0.5 * x * (1 + mx.tanh(0.7978845608 * (x + 0.044715 * x**3))),
}


def _zimage(config: Any) -> tuple[Any, Callable[[], Any]]:
    from mflux.models.z_image.model.z_image_transformer.transformer import ZImageTransformer

    model = ZImageTransformer(n_layers=config.n_layers, n_refiner_layers=config.n_refiner_layers)
    latents, time = mx.zeros((16, 1, SIDE // 8, SIDE // 8), DTYPE), mx.zeros((1,))
    text = mx.zeros((TEXT["z-image"], config.cap_feat_dim), DTYPE)
    return model, lambda: model(x=latents, timestep=time, sigmas=time, cap_feats=text)


def _flux(config: Any) -> tuple[Any, Callable[[], Any]]:
    from mflux.models.common.config.model_config import ModelConfig
    from mflux.models.flux.model.flux_transformer.transformer import Transformer

    model, noise = Transformer(ModelConfig.dev(), config.num_layers, config.num_single_layers), mx.zeros((2,))
    asked = SimpleNamespace(
        height=SIDE, width=SIDE, guidance=3.5, num_train_steps=1000, precision=DTYPE,
        scheduler=SimpleNamespace(sigmas=noise),
    )  # fmt: skip
    latents, text = mx.zeros((1, (SIDE // 16) ** 2, 64), DTYPE), mx.zeros((1, TEXT["flux"], 4096), DTYPE)
    return model, lambda: model(0, asked, latents, text, mx.zeros((1, 768), DTYPE))


THEIRS = {"z-image": _zimage, "flux": _flux}


def theirs(name: str, config: Any, *, whole: bool) -> list[Kernel]:
    """The kernels of mflux's forward; `whole`: compiled as one."""
    from mflux.models.common.config.model_config import ModelConfig

    ModelConfig.precision = DTYPE
    with mlx_kernels.as_on_gpu() as nodes:
        for chain, function in CHAINS.items():
            for owner in (nn, activations):
                setattr(owner, chain, lambda x, function=function: nodes.chain(function, [x]))
        model, call = THEIRS[name](config)
        model.update(tree_map(lambda weight: nodes.given(weight.shape, DTYPE), model.parameters()))
        graph = mlx_kernels.Graph(nodes)
        graph.trace(call, [], [], 0 if whole else -1)
    return graph.kernels


def main(name: str, *options: str) -> None:
    case = steps.cases()[name]
    policy = bases(case.kind)["bf16-plain"]
    size = Case(height=SIDE // 8, width=SIDE // 8, text=TEXT[name])
    whole = name == "z-image" and "--eager" not in options
    arms = {
        "ours, bf16-plain": mlx_kernels.kernels(case.network.name, case.config, policy, size),
        f"mflux{', compiled' if whole else ''}": theirs(name, case.config, whole=whole),
    }
    rows = [("MODEL, no measurement", "kernels", "memory-bound", "time")]
    for arm, kernels in arms.items():
        row = on_paper.stage("step", kernels, MACHINES["m4-max"], 1).compiled
        gigabytes = f"{row.memory_bound_bytes / 1e9:.2f} GB"
        rows.append((arm, str(row.kernels), gigabytes, f"{1000 * row.seconds:.0f} ms"))
    print("\n".join(aligned(rows)))


if __name__ == "__main__":
    main(*sys.argv[1:])
