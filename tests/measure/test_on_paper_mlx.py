"""Kernels on Apple's chips: those counted are the ones of MLX's own graphs, as it compiles them, and few enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kernels_on_paper
import mlx.core as mx
import pytest
from paper import mlx_kernels as on_mlx
from paper.kernels import Case, Kernel, fused
from paper.published import published
from paper.torch_kernels import kernels as on_torch
from support.cli_runner import Ran, captured
from support.paper_cases import NETWORKS
from support.policies import BF16, UNET

from qwenimg.backends.mlx import compile as compiling
from qwenimg.backends.mlx import ops
from qwenimg.common.networks.denoisers.qwen_dit import MLP_RATIO, QwenDiTConfig
from qwenimg.common.precision.precision import bases

# Limits are what is counted, in bytes rounded up: a count is the same every time, so that one kernel more is a change.
MOST = 117  # bytes per number of a block's streams: 116.3 to 116.4 are counted, and mflux 0.24 moves 176
VIEWS = {"Reshape", "Slice", "Split", "Broadcast", "Transpose", "Squeeze", "ExpandDims", "Flatten", "Unflatten"}
LOW = mx.bfloat16


def paper(*arguments: str) -> Ran:
    return captured(kernels_on_paper.main, arguments)


@pytest.fixture(autouse=True)
def compiles() -> Iterator[None]:
    """Which the environment of the tests turns off."""
    mx.enable_compile()
    yield
    mx.disable_compile()


def numbers(*shape: int, dtype: mx.Dtype = mx.float32) -> Any:
    return mx.ones(shape, dtype)


CHAINS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "rotate_pairs": (lambda x, t: ops.rotate_pairs(x, t, LOW), [numbers(2, 5, 3, 8), numbers(5, 1, 4, 2)]),
    "gated": (ops.gated, [numbers(2, 5, 8), numbers(2, 1, 8), numbers(2, 5, 8, dtype=LOW)]),
    "add": (ops.add, [numbers(2, 5, 8), numbers(2, 5, 8, dtype=LOW)]),
    "gelu": (ops.gelu, [numbers(2, 5, 8, dtype=LOW)]),
    "silu": (ops.silu, [numbers(2, 5, 8, dtype=LOW)]),
    "geglu": (ops.geglu, [numbers(2, 5, 8, dtype=LOW)]),
    "joined": (lambda x, y: ops.joined(x, y, LOW), [numbers(2, 5, 8), numbers(2, 3, 8)]),
}


def drawn(made: Any, path: Path) -> Counter[str]:
    """The primitives of MLX's own drawing of what is to be evaluated for `made`."""
    mx.export_to_dot(str(path), made)
    names = (line.split('"')[1] for line in path.read_text().splitlines() if "label" in line)
    return Counter("Compiled" if name.startswith("Compiled") else name for name in names if name not in VIEWS)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_what_mlx_compiles_it_to(name: str, tmp_path: Path) -> None:
    function, given = CHAINS[name]
    mx.eval(given)
    with compiling.fusing(True):
        own = drawn(function(*given), tmp_path / "drawn.dot")
        with on_mlx.as_on_gpu() as nodes:
            graph = on_mlx.Graph(nodes)
            inputs = [nodes.given(x.shape, x.dtype) for x in given]
            graph.trace(lambda: function(*inputs), [], [], -1)
    counted = fused(graph.kernels)
    print(name, dict(own), [(kernel.name, kernel.nbytes) for kernel in counted])
    assert len(counted) == sum(own.values()) and sum(own.values()) <= 3
    if name != "joined":
        (chain,) = counted
        assert own == {"Compiled": 1} and max(chain.writes).nbytes == function(*given).nbytes
        most = sum(x.nbytes for x in given) + function(*given).nbytes + 64  # of constants
        assert chain.nbytes <= most, "each array is read once"


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.sample(3)
def test_products_are_those_of_torch(network: str) -> None:
    """By the operations of another framework's count. MLX leaves out what nothing reads: the last block's text."""
    config, case = NETWORKS[network]
    precision = bases(UNET)["bf16"] if network in ("unet", "kl_vae") else BF16
    mine, other = (count(network, config, precision, case) for count in (on_mlx.kernels, on_torch))
    flops = [sum(kernel.flops for kernel in counted if kernel.kind == "product") for counted in (mine, other)]
    unread = 0
    if isinstance(config, QwenDiTConfig):
        unread = case.branches * case.text * 2 * (1 + 2 * MLP_RATIO) * config.dim**2
    print(network, flops, unread, Counter(kernel.name for kernel in mine))
    assert flops[0] == flops[1] - unread
    assert sum(kernel.kind == "attention" for kernel in mine) == sum(kernel.kind == "attention" for kernel in other)


def memory_bound(kernels: list[Kernel]) -> tuple[int, int]:
    those = [kernel for kernel in kernels if kernel.kind == "memory"]
    return sum(kernel.launches for kernel in those), sum(kernel.nbytes for kernel in those)


@pytest.mark.parametrize(
    "side", [1024, pytest.param(512, marks=pytest.mark.slow), pytest.param(1328, marks=pytest.mark.slow)]
)
def test_a_block_moves_few_bytes(side: int) -> None:
    """One block of Qwen-Image, as the difference of three and two."""
    case = Case(height=side // 8, width=side // 8, text=64)
    (launches, nbytes), (fewer, less) = (
        memory_bound(fused(on_mlx.kernels("qwen_dit", QwenDiTConfig(num_layers=count), BF16, case))) for count in (3, 2)
    )
    streams = (case.height * case.width // 4 + 64) * QwenDiTConfig().dim
    print(f"{side}: {launches - fewer} memory-bound kernels, {(nbytes - less) / streams:.1f} bytes per number")
    assert (nbytes - less) / streams <= MOST and launches - fewer <= 36


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most", "gigabytes"), [("sd15", 882, 6.32), ("sdxl", 1710, 33.7)])
def test_a_unet(name: str, most: int, gigabytes: float) -> None:
    subject = published(name)
    assert subject is not None
    side = subject.defaults.width
    kernels = on_mlx.kernels(*subject.denoiser, bases(UNET)["fp16-plain"], subject.step(side, side, True)[0])
    launches, nbytes = memory_bound(fused(kernels))
    print(f"{name}: {launches} memory-bound kernels, {nbytes / 1e9:.2f} GB; eager {memory_bound(kernels)}")
    assert launches <= most and nbytes <= gigabytes * 1e9


def test_the_command() -> None:
    ran = paper("m4-max", "shapes")
    text = ran.out.decode()
    print(text)
    assert ran.code == 0 and "those of the graph on Apple's chips" in text and "bytes per number of its streams" in text
