"""Compiling from outside: one graph without breaks for all blocks of a kind, few compilations, and the eager result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from cli_runner import cli
from paper_cases import NETWORKS

import qwenimg
from qwenimg.backends.torch import compile as compiling_torch
from qwenimg.backends.torch import ops
from qwenimg.common.base.errors import BackendMissing, UsageError
from qwenimg.common.networks.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.unet import UNetConfig
from qwenimg.common.precision import presets
from qwenimg.common.precision.precision import MMDIT, UNET, Precision, bases
from qwenimg.common.precision.presets import Choice
from qwenimg.common.runtime import compiling
from qwenimg.common.runtime.compiling import Compiler
from qwenimg.common.runtime.observers import observe
from qwenimg.common.weights.plan import LoadPlan

DIT = QwenDiTConfig(
    num_layers=3, num_attention_heads=3, attention_head_dim=32, joint_attention_dim=72, axes_dims_rope=(8, 12, 12)
)
SMALL_UNET = UNetConfig(
    block_out_channels=(32, 32),
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    layers_per_block=(1, 1),
    transformer_layers_per_block=(2, 1),
    attention_head_dim=(4, 4),
    cross_attention_dim=24,
    norm_num_groups=8,
)
# Tokens of the text, sides of the latents, branches: lengths, sizes and batches in an order in which each changes.
CASES = ((5, 8, 10, 1), (7, 10, 12, 1), (9, 12, 14, 2), (4, 16, 16, 2), (13, 8, 8, 1))
MOST = 4  # compilations of one kind of block, or of a decoder
Run = Callable[[int, int, int, int], torch.Tensor]


def component(network: str, config: Any, precision: Precision) -> Any:
    """With random weights of the policy's dtypes."""
    module = import_module(f"qwenimg.backends.torch.networks.{network}")
    plan = LoadPlan(component="transformer", entries={}, files=(), precision=precision)
    made = module.Component(config, plan, precision, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in list(made.model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        dtype = getattr(torch, precision.weight_dtype("transformer", name))
        value = torch.nn.Parameter((torch.randn(parameter.shape, generator=generator) * 0.1).to(dtype), False)
        setattr(made.model.get_submodule(path), leaf, value)
    return made


def dit(policy: str) -> tuple[Any, Run]:
    made = component("qwen_dit", DIT, bases(MMDIT)[policy])

    def run(text: int, height: int, width: int, branches: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        texts = [torch.randn(1, text, 72, generator=generator) for _ in range(branches)]
        condition = made.condition(texts, [(1, height // 2, width // 2)])
        modulation = made.modulate(np.linspace(-1, 1, 256)[None])
        latents = torch.randn(1, height * width // 4, 64, generator=generator)
        return made.predict(latents, condition, modulation, 0)

    return made, run


def unet(policy: str) -> tuple[Any, Run]:
    made = component("unet", SMALL_UNET, bases(UNET)[policy])

    def run(text: int, height: int, width: int, branches: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        condition = made.condition(torch.randn(branches, text, 24, generator=generator).numpy(), None)
        latents = torch.randn(1, 4, height, width, generator=generator)
        return made.predict(latents, np.linspace(-1, 1, 32)[None], condition)

    return made, run


DENOISERS = {"qwen_dit": dit, "unet": unet}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # which a reset leaves
    yield
    torch._dynamo.reset()


def counted() -> tuple[int, int]:
    """Graphs and breaks since the last reset."""
    found = torch._dynamo.utils.counters
    return found["stats"]["unique_graphs"], sum(found["graph_break"].values())


# Tracing takes seconds: the usual tests trace one decoder only.
@pytest.mark.slow
@pytest.mark.parametrize("network", DENOISERS)
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_one_graph_for_all_blocks(network: str, policy: str, tmp_path: Path) -> None:
    """Traced, and run as it was traced: what the compiler is given computes the eager result."""
    made, run = DENOISERS[network](policy)
    expected = [run(*case) for case in CASES]
    torch._dynamo.utils.counters.clear()
    compiling_torch.compile(made.model, tmp_path, backend="eager")
    units = compiling_torch.units(made.model)
    kinds = len({(type(unit), *(weight.shape for weight in unit.parameters())) for unit in units})
    limit = {"fp32": 2e-6, "bf16": 1e-2}[policy]  # a product of a batch of two is rounded once or twice
    worst = max(float((run(*case) - right).norm() / right.norm()) for case, right in zip(CASES, expected, strict=True))
    graphs, breaks = counted()
    print(
        f"{network} {policy}: {len(units)} blocks of {kinds} kinds, {graphs} graphs, {breaks} breaks, error {worst:.1e}"
    )
    assert len(units) > 2 and breaks == 0 and 0 < graphs <= MOST * kinds and worst <= limit
    seen: list[str] = []
    with compiling_torch.eager(True), observe(lambda operation, path, result: seen.append(operation)):
        run(*CASES[0])
    assert "attention" in seen and counted()[0] == graphs, "an observer sees the eager operations"


@pytest.mark.parametrize("network", [pytest.param("qwen_vae", marks=pytest.mark.slow), "kl_vae"])
def test_a_decoder_is_one_graph(network: str) -> None:
    """What a decoder does behind its mid block, for images and tiles of every size: it is not compiled in a run, where
    it would take longer than it saves, and nothing in it is in the way."""
    decoder = component(network, NETWORKS[network][0], bases(MMDIT)["fp32"]).model.decoder
    channels = decoder.conv_in.out_channels
    torch._dynamo.utils.counters.clear()
    compiling_torch.settle()
    up = torch.compile(decoder.up, fullgraph=True, dynamic=True, backend="eager")
    torch.manual_seed(1)
    images = [torch.randn(1, channels, height, width) for height, width in ((5, 6), (7, 4), (8, 8), (9, 5))]
    with torch.inference_mode():
        worst = max(float((up(x) - decoder.up(x)).norm() / decoder.up(x).norm()) for x in images)
    graphs, breaks = counted()
    print(f"{network}: {graphs} graphs, {breaks} breaks, error {worst:.1e}")
    assert breaks == 0 and 0 < graphs <= MOST and worst <= 2e-6


def test_rope_in_real_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler gets real numbers: the same rotation, a rounding apart."""
    torch.manual_seed(0)
    x, angle = torch.randn(2, 5, 3, 8), torch.rand(5, 4)
    turns = ops.turns(angle.cos(), angle.sin())
    eager = ops.rotate_pairs(x, turns, torch.float32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.allclose(ops.rotate_pairs(x, turns, torch.float32), eager, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_compiled_block_computes_what_the_eager_does(policy: str, tmp_path: Path) -> None:
    """By the parity criterion: as far from float64 as eager is, by torch's own C++ of this machine."""
    assert compiling_torch.missing(on_gpu=False) == ""
    made, run = dit(policy)
    expected = [run(*case) for case in CASES[:3]]
    compiling_torch.compile(made.model, tmp_path)
    limit = {"fp32": 2e-6, "bf16": 1e-2}[policy]
    for case, right in zip(CASES, expected, strict=False):
        error = float((run(*case) - right).norm() / right.norm())
        print(f"{policy} {case}: {error:.1e} from eager, limit {limit}")
        assert error <= limit
    assert counted() == (counted()[0], 0) and counted()[0] <= MOST


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_compiled_chains_of_mlx_compute_what_the_eager_do(policy: str, tmp_path: Path) -> None:
    """On a CPU, where each chain is a call of the system's compiler. The environment of the tests turns that off."""
    import mlx.core as mx

    from qwenimg.backends.mlx import compile as compiling_mlx
    from qwenimg.backends.mlx import ops as nn

    rng = np.random.default_rng(0)
    wide = {"x": (1, 37, 24), "gate": (1, 1, 24), "shift": (1, 1, 24), "scale": (1, 1, 24)}
    given = {name: mx.array(rng.standard_normal(shape).astype(np.float32)) for name, shape in wide.items()}
    low = mx.array(rng.standard_normal((1, 37, 24)).astype(np.float32)).astype(nn.DTYPES["bfloat16"])
    out, limit = (nn.DTYPES["bfloat16"], 4e-3) if policy == "bf16" else (mx.float32, 1e-6)
    heads, angle = given["x"].reshape(1, 37, 3, 8), mx.array(rng.random((37, 4)).astype(np.float32))
    turns = nn.turns(mx.cos(angle), mx.sin(angle))
    chains = {
        "norm_modulate": lambda: nn.norm_modulate(given["x"], given["shift"], given["scale"], out, 1e-6),
        "gated": lambda: nn.gated(given["x"], given["gate"], low),
        "add": lambda: nn.add(given["x"], low),
        "rotate_pairs": lambda: nn.rotate_pairs(heads, turns, out),
        "gelu": lambda: nn.gelu(given["x"].astype(out)),
    }
    mx.enable_compile()
    try:
        for name, chain in chains.items():
            results = []
            for on in (False, True):
                with compiling_mlx.fusing(on):
                    results.append(nn.numpy(chain()).astype(np.float64))
            error = float(np.linalg.norm(results[1] - results[0]) / np.linalg.norm(results[0]))
            print(f"{policy} {name}: {error:.1e} (limit {limit})")
            assert error <= limit
    finally:
        mx.disable_compile()


PAYS = Compiler(share=0.1, seconds=30, about="figures on paper say")
NEVER = Compiler(share=0.0, seconds=60, about="products are all")


def test_every_kind_of_block_is_compiled(folders: dict[str, Path]) -> None:
    """Which takes its time for each: a kind is one for torch too."""
    pipe = qwenimg.load(folders["sd15"], "cpu", "fp32")
    part = pipe.checkpoint["unet"]  # type: ignore[index]
    units = compiling_torch.units(component("unet", part.config, bases(UNET)["fp32"]).model)
    kinds = len({(type(unit), *(weight.shape for weight in unit.parameters())) for unit in units})
    print(f"{len(units)} blocks of {kinds} kinds")
    assert compiling.kinds(pipe.checkpoint) == kinds > 2
    assert compiling.decide("auto", PAYS, 1000, kinds=3).on and not compiling.decide("auto", PAYS, 1000, kinds=4).on


@pytest.mark.parametrize(
    ("mode", "compiler", "seconds", "on", "said"),
    [
        ("auto", PAYS, 1000, True, "save roughly 1"),
        ("auto", PAYS, 100, False, "take roughly 30 s"),
        ("auto", NEVER, 1e6, False, "products are all"),
        ("on", NEVER, 0, True, "--compile on"),
        ("off", PAYS, 1e6, False, "--compile off"),
    ],
)
def test_the_decision(mode: str, compiler: Compiler, seconds: float, on: bool, said: str) -> None:
    made = compiling.decide(mode, compiler, seconds)
    assert made.on is on and said in made.line


@pytest.mark.parametrize(
    ("mode", "compiler", "on"),
    [("auto", PAYS, True), ("auto", NEVER, False), ("off", PAYS, False), ("on", NEVER, True)],
)
def test_the_fast_preset_compiles_where_that_saves_anything(mode: str, compiler: Compiler, on: bool) -> None:
    fast = {name: Choice(preset=name, precision="").wishes.compiled for name in presets.NAMES}
    assert [name for name, compiled in fast.items() if compiled] == ["fast"]
    assert compiling.decide(mode, compiler, 1, wanted=fast["fast"]).on is on


def test_a_wrong_mode() -> None:
    with pytest.raises(UsageError, match="is not one of auto, on, off"):
        compiling.check("compile", "fast")


def test_a_missing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiling_torch.missing(on_gpu=False) == ""
    monkeypatch.setattr(compiling_torch, "has_triton_package", lambda: False)
    assert "triton" in compiling_torch.missing(on_gpu=True)
    monkeypatch.setattr("shutil.which", lambda name: None)
    needs = compiling_torch.missing(on_gpu=False)
    assert "C++ compiler" in needs
    without = Compiler(share=0.1, seconds=1, about="", missing=needs)
    assert not compiling.decide("auto", without, 1e6).on
    with pytest.raises(BackendMissing, match=r"--compile on needs a C\+\+ compiler"):
        compiling.decide("on", without, 1e6)
    ran = cli("a red circle", "-m", "shapes", "--backend", "cpu", "--compile", "on", "--quiet")
    ran.refused(3, "--compile on needs a C++ compiler")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cli("x", "--compile", "fast").refused(2, "--compile", "'auto', 'on', 'off'")
    ran = cli("a red circle", "-m", "shapes", "--backend", "cpu", "--steps", "1", "--size", "64x64", "-o", "x.png")
    assert ran.code == 0 and "compile" not in ran.err
    timed = cli(
        "a red circle", "-m", "shapes", "--backend", "cpu", "--steps", "1", "--size", "64x64", "-o", "y.png",
        "--debug", "timing",
    )  # fmt: skip
    assert "--compile auto: off, since products are nearly all of a step on a CPU" in timed.err
