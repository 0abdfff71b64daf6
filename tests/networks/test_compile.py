"""Compiling from outside: one graph without breaks for all blocks of a kind, few compilations, and the eager result."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from support import parity_blocks, parity_sd
from support.cli_runner import cli
from support.paper_cases import NETWORKS
from support.parity_bench import Bench
from support.parity_cases import TEXT
from support.parity_sd import SDBench
from support.parity_verdict import judge
from support.policies import FP64, MMDIT, UNET
from support.relative import relative
from support.tiny_control import write_control_lora, write_controlnet, write_patches
from support.tiny_model import tiny_dit
from support.tiny_qwen21 import small_pictures

import qwenimg
from qwenimg.backends.mlx import compile as compiling_mlx
from qwenimg.backends.torch import compile as compiling_torch
from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.vaes.vae import WIDE
from qwenimg.common.base.block import CachedBlocks
from qwenimg.common.base.errors import BackendMissing, UsageError
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.encoders import decoder
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.network import Network, import_network
from qwenimg.common.parity import parity
from qwenimg.common.precision import presets
from qwenimg.common.precision.precision import Precision, bases
from qwenimg.common.precision.presets import Choice
from qwenimg.common.runtime import compiling
from qwenimg.common.runtime.compiling import Compiler
from qwenimg.common.runtime.observers import observe
from qwenimg.common.runtime.skipping import Skipping
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


def component(network: str, config: Any, precision: Precision, exact: bool = False) -> Any:
    """With random weights of the policy's dtypes; `exact`: all in float64, on the same rounded weights."""
    computed = FP64 if exact else precision
    module = import_network("qwenimg.backends.torch.networks", network)
    plan = LoadPlan(component="transformer", entries={}, files=(), precision=computed)
    made = module.Runner(config, plan, computed, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in list(made.model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        dtype = getattr(torch, precision.weight_dtype("transformer", name))
        value = (torch.randn(parameter.shape, generator=generator) * 0.1).to(dtype)
        value = torch.nn.Parameter(value.double() if exact else value, False)
        setattr(made.model.get_submodule(path), leaf, value)
    return made


def dit(policy: str, exact: bool = False) -> tuple[Any, Run]:
    made = component("qwen_dit", DIT, bases(MMDIT)[policy], exact)

    def run(text: int, height: int, width: int, branches: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        texts = [torch.randn(1, text, 72, generator=generator) for _ in range(branches)]
        condition = made.condition(texts, [(1, height // 2, width // 2)])
        modulation = made.modulate(np.linspace(-1, 1, 256)[None])
        latents = torch.randn(1, height * width // 4, 64, generator=generator)
        return made.predict(latents, (modulation, 0), condition)

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
COMPILED = {name: import_network("qwenimg.common.networks", name).NETWORK.compiled for name in DENOISERS}


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


# Tracing takes seconds: the usual tests trace one encoder of texts and one decoder only.
@pytest.mark.slow
@pytest.mark.parametrize("network", DENOISERS)
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_one_graph_for_all_blocks(network: str, policy: str, tmp_path: Path) -> None:
    """Traced, and run as it was traced: what the compiler is given computes the eager result."""
    made, run = DENOISERS[network](policy)
    expected = [run(*case) for case in CASES]
    torch._dynamo.utils.counters.clear()
    compiling_torch.compile(made.model, COMPILED[network], tmp_path, backend="eager")
    units = compiling_torch.units(made.model, COMPILED[network])
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


class Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


@pytest.mark.sample(0)
def test_modules_are_compiled_by_their_paths_and_not_by_the_names_of_classes(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.Sequential(Odd(), Odd()), "head": Odd()})
    compiling_torch.compile(model, re.compile(r"layers\.\d+"), tmp_path, backend="eager")
    with torch.inference_mode():
        model["head"](torch.ones(2, 3))
        assert counted() == (0, 0)
        for layer in model["layers"]:
            layer(torch.ones(2, 3))
    assert counted() == (1, 0), "both layers share one graph"


@pytest.mark.sample(0)
def test_blocks_that_calls_can_skip_share_compiled_code(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Odd(), Odd(), Odd())
    deep = CachedBlocks(after="0", paths=("1", "2"), adds=True)
    skipping = Skipping(model, deep, lambda x: x, lambda x: x)
    compiling_torch.compile(model, re.compile(r"\d+"), tmp_path, backend="eager")
    with torch.inference_mode():
        whole, added = skipping.run(lambda: model(torch.ones(2, 3)), lambda update: None)
        reused, _ = skipping.run(lambda: model(torch.ones(2, 3)), lambda update: added)
    assert counted() == (1, 0) and torch.allclose(whole, reused, atol=1e-6)


def test_paths_without_a_module_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no module of Odd is at transformer_blocks"):
        compiling_torch.compile(Odd(), re.compile(r"transformer_blocks\.\d+"), tmp_path, backend="eager")
    with pytest.raises(AssertionError, match="odd names no modules to compile"):
        Network(name="odd", role="transformer", kind="Odd", config=QwenDiTConfig, manifest=lambda config: {})


# What is run once or twice a picture, and is not compiled in a run: whole, on lengths, sizes and batches that change.
Whole = tuple[Callable[..., Any], list[tuple[Any, ...]]]
SIDES = ((1, 5, 6), (1, 7, 4), (2, 8, 8), (1, 9, 5))  # of batches of images


def text_encoder() -> Whole:
    def given(length: int) -> tuple[Any, ...]:
        tables = (torch.from_numpy(part).float() for part in decoder.text_table(TEXT, length))
        return torch.arange(length)[None], tuple(tables)

    return component("decoder", TEXT, bases(MMDIT)["fp32"]).model.forward, [given(length) for length in (5, 7, 9, 13)]


def clip() -> Whole:
    config = CLIPConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    asked: list[tuple[list[int], int, bool]] = [([5], 0, True), ([7, 9], 0, True), ([4, 12], 1, False), ([9], 1, True)]
    calls = [(torch.arange(77).repeat(len(ends), 1), ends, skipped, normed) for ends, skipped, normed in asked]
    return component("clip", config, bases(UNET)["fp32"]).model.forward, calls


def vae(network: str, *, encodes: bool) -> Whole:
    model = component(network, NETWORKS[network][0], bases(MMDIT)["fp32"]).model
    if encodes:
        return model.encode, [(torch.randn(B, 3, 8 * h, 8 * w),) for B, h, w in SIDES]
    channels = model.decoder.conv_in.in_channels
    return model.decode, [(torch.randn(B, channels, h, w), h, w, WIDE) for B, h, w in SIDES]


WHOLE: dict[str, Callable[[], Whole]] = {
    "decoder": text_encoder,
    "clip": clip,
    "qwen_vae, encoding": lambda: vae("qwen_vae", encodes=True),
    "qwen_vae, decoding": lambda: vae("qwen_vae", encodes=False),
    "kl_vae, encoding": lambda: vae("kl_vae", encodes=True),
    "kl_vae, decoding": lambda: vae("kl_vae", encodes=False),
}
LONG = ("clip", "qwen_vae, encoding", "qwen_vae, decoding", "kl_vae, encoding")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in WHOLE])
@pytest.mark.sample(0)
def test_every_other_network_is_one_graph(name: str) -> None:
    """Each would take longer to compile than that saves; nothing in it is in the way."""
    torch.manual_seed(1)
    forward, calls = WHOLE[name]()
    torch._dynamo.utils.counters.clear()
    compiling_torch.mark_constants()
    traced = torch.compile(forward, fullgraph=True, dynamic=True, backend="eager")
    errors = []
    with torch.inference_mode():
        for given in calls:
            pairs = zip(parts(traced(*given)), parts(forward(*given)), strict=True)
            errors += [float((made - eager).norm() / eager.norm()) for made, eager in pairs]
    graphs, breaks = counted()
    print(f"{name}: {graphs} graphs, {breaks} breaks, error {max(errors):.1e}")
    assert breaks == 0 and 0 < graphs <= MOST and max(errors) <= 2e-6


def parts(made: Any) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def test_rope_in_real_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler gets real numbers: the same rotation, a rounding apart."""
    torch.manual_seed(0)
    x, angle = torch.randn(2, 5, 3, 8), torch.rand(5, 4)
    freqs = ops.rope_freqs(angle.cos(), angle.sin())
    eager = ops.rotate_pairs(x, freqs, torch.float32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.allclose(ops.rotate_pairs(x, freqs, torch.float32), eager, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_compiled_blocks_over_lengths_hold_the_parity_criterion(policy: str, tmp_path: Path) -> None:
    """By torch's own C++ of this machine: as near to float64 of the same rounded weights as eager is."""
    assert compiling_torch.missing(on_gpu=False) == ""
    made, run = dit(policy)
    _, exact = dit(policy, exact=True)
    results = [{"eager": output(run(*case))} for case in CASES[:3]]
    compiling_torch.compile(made.model, COMPILED["qwen_dit"], tmp_path)
    dtype = bases(MMDIT)[policy].compute_dtype("transformer")
    judged = parity.Case(component="dit.model", dtype=dtype, returned="float32", blocks=DIT.num_layers)
    for case, result in zip(CASES, results, strict=False):
        verdict = judge(judged, output(exact(*case)).values, result | {"compiled": output(run(*case))})
        print(verdict.row(str(case)))
        assert verdict.ok
    assert counted() == (counted()[0], 0) and 0 < counted()[0] <= MOST


PICTURE = np.random.default_rng(2).integers(0, 256, (40, 60, 3), np.uint8)
BESIDE = ("qwen21", "qwen21 with a picture", "ControlNet", "patches", "both", "control by a LoRA")


@pytest.mark.slow
@pytest.mark.parametrize("kind", BESIDE)
def test_compiled_blocks_beside_references_and_control(
    kind: str,
    tiny_folder: Path,
    tiny_qwen21: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced within whole runs of two sizes: no break, few graphs, and the latents of the eager blocks."""
    controls = {
        "ControlNet": [(write_controlnet(tmp_path / "net"), PICTURE)],
        "patches": [(write_patches(tmp_path / "patches.safetensors"), PICTURE)],
        "control by a LoRA": [(write_control_lora(tmp_path / "lora.safetensors", tiny_dit()), PICTURE)],
    }
    controls["both"] = controls["ControlNet"] + controls["patches"]
    more = {"control": controls[kind]} if kind in controls else {"image": PICTURE} if "picture" in kind else {}
    folder = tiny_qwen21["qwen21"] if kind.startswith("qwen21") else tiny_folder
    sizes = ({"width": 64, "height": 64}, {"width": 96, "height": 64})

    def drawn(**options: Any) -> list[np.ndarray]:
        with qwenimg.load(folder, "cpu", "fp32", **options) as pipe:
            return [pipe("a ring", steps=3, guidance=3.0, seed=1, **size, **more).latents for size in sizes]

    with small_pictures():
        eager = drawn()
        monkeypatch.setattr(compiling_torch, "compile", partial(compiling_torch.compile, backend="eager"))
        errors = [relative(*pair) for pair in zip(drawn(compile="on"), eager, strict=True)]
    graphs, breaks = counted()
    print(f"{kind}: {graphs} graphs, {breaks} breaks, error {max(errors):.1e}")
    assert breaks == 0 and 0 < graphs <= MOST and max(errors) <= 1e-5


def output(made: torch.Tensor) -> parity.Output:
    return parity.Output(values=made.double().numpy(), dtype=parity.dtype_name(made))


@pytest.fixture
def mlx_compiles(tmp_path: Path) -> Iterator[None]:
    """Which the environment of the tests turns off."""
    import mlx.core as mx

    from qwenimg.backends.mlx import ops as nn

    mx.enable_compile()
    with compiling_mlx.fusing(True):
        mx.export_to_dot(str(tmp_path / "chain.dot"), nn.gelu(mx.ones(3)))
    assert "Compiled" in (tmp_path / "chain.dot").read_text()
    yield
    mx.disable_compile()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["dit.block", "unet.residual"])
def test_a_compiled_block_holds_the_parity_criterion(
    name: str, policy: str, tmp_path: Path, mlx_compiles: None
) -> None:
    """Of both backends, compiled by their own means, against float64 and against each other."""
    bench: Any = (SDBench if name == "unet.residual" else Bench)(tmp_path)
    block = {block.name: block for block in (*parity_blocks.BLOCKS, *parity_sd.BLOCKS)}[name]
    precision = bases(UNET if name == "unet.residual" else MMDIT)[policy]
    opened = bench.component(bench.make_torch(), block.part, precision, precision.stored_dtype(block.part))
    network = "unet" if name == "unet.residual" else "qwen_dit"
    compiling_torch.compile(getattr(opened, "model", opened), COMPILED[network], tmp_path / "compiled")
    failures = []
    for family in getattr(block, "judged", parity_blocks.FAMILIES):
        with compiling_mlx.fusing(True):
            verdicts = bench.judge(block, precision, family)
        for verdict in verdicts:
            print(verdict.row(f"{precision.name} {family}"))
            failures += [(family, failure) for failure in verdict.failures]
    assert not failures and counted()[0] > 0 and counted()[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_compiled_chains_of_mlx_compute_what_the_eager_do(policy: str, mlx_compiles: None) -> None:
    """On a CPU, where each chain is a call of the system's compiler."""
    import mlx.core as mx

    from qwenimg.backends.mlx import ops as nn

    rng = np.random.default_rng(0)
    wide = {"x": (1, 37, 24), "gate": (1, 1, 24), "shift": (1, 1, 24), "scale": (1, 1, 24)}
    given = {name: mx.array(rng.standard_normal(shape).astype(np.float32)) for name, shape in wide.items()}
    low = mx.array(rng.standard_normal((1, 37, 24)).astype(np.float32)).astype(nn.DTYPES["bfloat16"])
    out, limit = (nn.DTYPES["bfloat16"], 4e-3) if policy == "bf16" else (mx.float32, 1e-6)
    heads, angle = given["x"].reshape(1, 37, 3, 8), mx.array(rng.random((37, 4)).astype(np.float32))
    freqs = nn.rope_freqs(mx.cos(angle), mx.sin(angle))
    chains = {
        "norm_modulate": lambda: nn.norm_modulate(given["x"], given["shift"], given["scale"], out, 1e-6),
        "scaled": lambda: nn.scaled(given["x"], given["scale"], out),
        "gated": lambda: nn.gated(given["x"], given["gate"], low),
        "add": lambda: nn.add(given["x"], low),
        "rotate_pairs": lambda: nn.rotate_pairs(heads, freqs, out),
        "gelu": lambda: nn.gelu(given["x"].astype(out)),
    }
    for name, chain in chains.items():
        results = []
        for on in (False, True):
            with compiling_mlx.fusing(on):
                results.append(nn.numpy(chain()).astype(np.float64))
        error = float(np.linalg.norm(results[1] - results[0]) / np.linalg.norm(results[0]))
        print(f"{policy} {name}: {error:.1e} (limit {limit})")
        assert error <= limit


PAYS = Compiler(share=0.1, seconds=30, about="figures on paper say")
NEVER = Compiler(share=0.0, seconds=60, about="products are all")


@pytest.mark.sample(0)
def test_every_kind_of_block_is_compiled(folders: dict[str, Path]) -> None:
    """Which takes its time for each: a kind is one for torch too."""
    pipe = qwenimg.load(folders["sd15"], "cpu", "fp32")
    part = pipe.checkpoint["unet"]  # type: ignore[index]
    units = compiling_torch.units(component("unet", part.config, bases(UNET)["fp32"]).model, COMPILED["unet"])
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


@pytest.mark.parametrize(("autotune", "mode"), [(False, None), (True, "max-autotune-no-cudagraphs")])
def test_what_torch_is_asked_for(
    autotune: bool, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block is compiled whole, in the mode that was asked for, which torch has."""
    made, _ = dit("bf16")
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: asked.append(options))
    compiling_torch.compile(made.model, COMPILED["qwen_dit"], tmp_path, autotune=autotune)
    assert len(asked) == DIT.num_layers
    assert all(one["fullgraph"] and one["dynamic"] and one["mode"] == mode for one in asked), asked
    assert mode is None or mode in torch._inductor.list_mode_options()


def test_a_wrong_mode() -> None:
    with pytest.raises(UsageError, match="is not one of auto, on, off"):
        compiling.check("fast")


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
