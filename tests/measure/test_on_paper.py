"""Figures on paper: the kernels that are counted are those that run, and fusing and times follow their rules."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kernels_on_paper
import numpy as np
import pytest
import torch
from paper import on_paper
from paper.kernels import Case, Kernel, Kind, Span, fused
from paper.on_paper import LAUNCH, PASSES
from paper.published import published
from paper.torch_kernels import CALLS, PRODUCTS, kernels
from support.cli_runner import Ran, captured
from support.paper_cases import NETWORKS
from support.policies import BF16, FP32, UNET
from torch.profiler import ProfilerActivity, profile

from qwenimg.common.families.auraflow import memory as auraflow_memory
from qwenimg.common.families.ernie import memory as ernie_memory
from qwenimg.common.families.flux2 import memory as flux2_memory
from qwenimg.common.families.flux3 import memory as flux3_memory
from qwenimg.common.families.hunyuan import memory as hunyuan_memory
from qwenimg.common.families.krea2 import memory as krea2_memory
from qwenimg.common.families.sana import memory as sana_memory
from qwenimg.common.families.sd3 import memory as sd3_memory
from qwenimg.common.families.z_image import memory
from qwenimg.common.networks.network import import_network
from qwenimg.common.parts import cross_blocks, flux_blocks
from qwenimg.common.precision.machines import MACHINES
from qwenimg.common.precision.precision import bases
from qwenimg.common.weights.plan import LoadPlan

COMPARED = {"native_layer_norm", "native_group_norm", "addmm", "mm", "bmm", "convolution", "gelu", "silu", "cat"} | {
    "addcmul", "scaled_dot_product_attention", "rms_norm",
}  # fmt: skip


def paper(*arguments: str) -> Ran:
    return captured(kernels_on_paper.main, arguments)


def on_this_cpu(network: str, config: Any, case: Case) -> Counter[str]:
    """The operations of the same call, really run in float32, as torch's profiler records them."""
    module, plan = (
        import_network("qwenimg.backends.torch.networks", network),
        LoadPlan(component="x", entries={}, files=(), precision=FP32),
    )
    component = module.Runner(config, plan, FP32, torch.device("cpu"))
    torch.manual_seed(0)
    for name, parameter in list(component.model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        value = torch.nn.Parameter(torch.randn(parameter.shape) * 0.1, requires_grad=False)
        setattr(component.model.get_submodule(path), leaf, value)
    call = CALLS[network](component, config, case)
    call()
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as recorded, torch.inference_mode():
        call()
    found: Counter[str] = Counter()
    for event in recorded.events():
        name = event.name.removeprefix("aten::").removesuffix("_")  # the same in place
        found[name] += 1
        found["flops"] += int(event.flops or 0) if name in ("mm", "addmm", "bmm", "conv2d") else 0
    return found


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.sample(1)
def test_what_is_counted_is_what_runs(network: str) -> None:
    config, case = NETWORKS[network]
    counted, ran = kernels(network, config, FP32, case), on_this_cpu(network, config, case)
    names = Counter(kernel.name.removesuffix("_") for kernel in counted)
    compared = {name: (names[name], ran[name]) for name in sorted(COMPARED) if names[name] or ran[name]}
    flops = sum(kernel.flops for kernel in counted if kernel.name in PRODUCTS)
    print(network, len(counted), compared, flops, ran["flops"])
    assert all(mine == profiled for mine, profiled in compared.values()) and len(compared) > 3
    assert flops == ran["flops"]


@pytest.mark.sample(0)
def test_the_published_transformer_has_the_operations_of_its_formula() -> None:
    subject = published("qwen-image")
    assert subject is not None
    case, calls = subject.step(1024, 1024, True)
    assert (case.branches, calls) == (1, 2) and subject.step(512, 512, True) == (
        Case(height=64, width=64, text=64, branches=2),
        1,
    )
    counted = kernels(*subject.denoiser, BF16, case)
    L, S, C, layers = 4096, 64, 3072, 60
    products = layers * 24 * C**2 * (L + S) + 2 * (L * 64 * C + L * C * 64)
    attention = layers * 4 * (L + S) ** 2 * C
    found = {kind: sum(k.flops for k in counted if k.kind == kind) for kind in ("product", "attention")}
    print(found, products, attention)
    assert found == {"product": products, "attention": attention}
    assert sum(kernel.kind == "attention" for kernel in counted) == layers
    weights = {span for k in counted for span in k.reads if k.kind == "product"}
    assert sum(span.nbytes for span in weights) > 27e9 - 0.2e9, "every block has weights of its own"


def kernel(kind: Kind, reads: str, writes: str, region: int = 0, **more: Any) -> Kernel:
    """A kernel whose buffers are letters of 100 bytes each."""
    spans = [tuple(Span(ord(letter), 0, 100) for letter in letters) for letters in (reads, writes)]
    return Kernel(
        name=kind[0], kind=kind, dtype="bfloat16", shape=(50,), reads=spans[0], writes=spans[1], region=region, **more
    )


def test_fusing_keeps_what_is_used_outside() -> None:
    """norm, cast, product, cast, gated add of the stream, norm: two groups, and the stream is read and written once."""
    chain = [
        kernel("memory", "p", "x"),
        kernel("product", "x", "a"),
        kernel("memory", "a", "b"),  # cast of the update
        kernel("memory", "xbg", "y"),  # gated add
        kernel("memory", "y", "n"),  # norm
        kernel("memory", "n", "c"),  # cast
        kernel("product", "c", "d"),
        kernel("memory", "yd", "z"),
    ]
    made = fused(chain)
    print([(one.name, one.nbytes) for one in made])
    assert [one.kind for one in made] == ["memory", "product", "memory", "product", "memory"]
    group = made[2]
    assert {chr(span.buffer) for span in group.reads} == set("axg")
    assert {chr(span.buffer) for span in group.writes} == set("yc")  # y is read behind the second product
    assert group.nbytes == 500


def test_fusing_waits_for_products_and_regions() -> None:
    apart = [kernel("memory", "p", "a", region=0), kernel("memory", "a", "b", region=1)]
    assert fused(apart) == apart
    across = [kernel("memory", "pq", "a"), kernel("product", "a", "b"), kernel("memory", "ab", "c")]
    assert fused(across) == across, "the last reads the first's result and waits for the product behind it"
    table = [kernel("memory", "t", "u"), kernel("product", "w", "x"), kernel("memory", "xu", "y")]
    made = fused(table)
    assert [chr(span.buffer) for span in made[-1].reads] == ["x", "t"], "a table is made anew where it is read"
    assert len(made) == 2


def test_a_norm_looks_twice() -> None:
    """What is merged in front of a group norm is read for its moments and for its use, as an image alone is."""
    twice = (Span(ord("b"), 0, 100), Span(ord("b"), -1, 100))
    norm = replace(kernel("memory", "b", "n", launches=3), reads=twice)
    chain = [kernel("product", "p", "a"), kernel("memory", "a", "b"), norm, kernel("memory", "n", "s")]
    made = fused([*chain, kernel("product", "s", "t")])
    assert [(one.kind, one.nbytes, one.launches) for one in made][1] == ("memory", 300, 3)
    alone = fused([replace(norm, region=0), kernel("memory", "n", "s"), kernel("product", "s", "t")])
    assert len(alone) == 2 and (alone[0].nbytes, alone[0].launches) == (300, 3)


def test_a_second_reading_of_what_is_made_anew_is_one_too() -> None:
    """A copy of what the region is given, in front of a group norm: that is read twice, and nothing is copied."""
    twice = (Span(ord("c"), 0, 100), Span(ord("c"), -1, 100))
    norm = replace(kernel("memory", "c", "n", launches=3), reads=twice)
    (made,) = fused([kernel("memory", "x", "c"), norm])
    assert {chr(span.buffer) for span in made.reads} == {"x"} and made.looks_twice and made.nbytes == 300


def test_what_reads_mostly_the_same_is_one() -> None:
    """A norm of the stream and the stream with a bias; not what reads the stream behind the next product."""
    bias = (Span(ord("x"), 0, 100), Span(ord("b"), 0, 4))
    chain = [
        kernel("product", "p", "x"),
        kernel("memory", "x", "n"),
        replace(kernel("memory", "x", "y"), reads=bias),
        kernel("product", "n", "a"),
        kernel("memory", "xa", "z"),
    ]
    made = fused(chain)
    print([(one.name, one.nbytes) for one in made])
    assert [one.kind for one in made] == ["product", "memory", "product", "memory"]
    assert made[1].nbytes == 304 and {chr(span.buffer) for span in made[1].writes} == set("ny")
    small = [kernel("product", "p", "x"), kernel("product", "p", "y"), replace(kernel("memory", "x", "n"), reads=bias)]
    other = replace(kernel("memory", "y", "m"), reads=(Span(ord("y"), 0, 100), Span(ord("b"), 0, 4)))
    assert len(fused([*small, other])) == 4, "a bias alone is not mostly the same"


@pytest.mark.parametrize(("name", "side", "before"), [("sd15", 64, 3.354e9), ("sdxl", 128, 20.78e9)])
@pytest.mark.sample(0)
def test_memory_bound_bytes_of_a_compiled_unet(name: str, side: int, before: float) -> None:
    """At most 0.60 of those that the first eager form moved, with both branches of guidance (GEGLU is a pass behind its
    product: torch's products cannot end in it); and at most 30 kernels in a block."""
    subject = published(name)
    assert subject is not None
    counted = fused(
        kernels(*subject.denoiser, bases(UNET)["fp16-plain"], Case(height=side, width=side, text=77, branches=2))
    )
    bound = [one for one in counted if one.kind == "memory"]
    moved, most = sum(one.nbytes for one in bound), max(Counter(one.region for one in bound).values())
    print(f"{name}: {moved / 1e9:.2f} GB, {moved / before:.3f} of the first; at most {most} kernels in a block")
    assert moved <= 0.60 * before and most <= 30


def test_times_are_the_larger_of_operations_and_bytes() -> None:
    machine = MACHINES["h100"]
    big = Kernel(name="mm", kind="product", dtype="bfloat16", shape=(1,), flops=1e12, reads=(), writes=(), region=0)
    assert on_paper.seconds(big, machine) == 1e12 / (machine.teraflops * 1e12 * machine.products)
    moved = Kernel(
        name="add", kind="memory", dtype="float32", shape=(1,), reads=(Span(1, 0, 10**9),), writes=(), region=0
    )
    assert on_paper.seconds(moved, machine) == 1e9 / (1e9 * machine.gigabytes * PASSES)
    assert on_paper.seconds(kernel("memory", "a", "b", launches=3), machine) == 3 * LAUNCH


@pytest.mark.sample(0)
def test_rows_are_ordered() -> None:
    for network, (config, case) in NETWORKS.items():
        precision = bases(UNET)["bf16"] if network in ("unet", "kl_vae") else BF16
        counted = kernels(network, config, precision, case)
        for machine in MACHINES.values():
            made = on_paper.stage("x", counted, machine, 1)
            assert 0 < made.limit <= made.compiled.seconds <= made.eager.seconds
            assert made.compiled.kernels <= made.eager.kernels and made.compiled.flops == made.eager.flops
            assert np.isclose(made.eager.products, made.compiled.products)


@pytest.mark.parametrize("machine", ["h100", "4090", "m4-max"])
@pytest.mark.sample(0)
def test_z_image(machine: str) -> None:
    """A step of Turbo has the operations that its plan counts, and that of the base model two branches in turn."""
    step = {}
    for name in ("z-image-turbo", "z-image"):
        ran = paper(machine, name, "-W", "256", "-H", "256", "--json")
        made = json.loads(ran.out)
        assert ran.code == 0 and made["picture"]["limit_seconds"] < made["picture"]["compiled_seconds"]
        step[name] = made
    subject = published("z-image-turbo")
    assert subject is not None
    tokens = 16 * 16 + 64
    counted = step["z-image-turbo"]["step"]["eager"]["flops"]
    expected = memory.step_operations(subject.denoiser[1], tokens)
    print(f"{machine}: {counted / 1e12:.2f} x 10^12 operations, planned {expected / 1e12:.2f}")
    assert abs(counted / expected - 1) < 0.05


LATER: dict[str, Callable[[Any], float]] = {  # operations of a branch by its plan, for 256x256 and the text's tokens
    "flux-schnell": lambda config: flux_blocks.step_operations(config, 256 + 256),
    "flux2-klein-4b": lambda config: flux2_memory.step_operations(config, 256 + 512, 256 + 512),
    "flux2-klein-9b-kv": lambda config: flux2_memory.step_operations(config, 256 + 512, 256 + 512),
    "flux2-dev": lambda config: flux2_memory.step_operations(config, 256 + 512, 256 + 512),
    "flux3-klein": lambda config: flux3_memory.step_operations(config, (256, 80, 0)),
    "sd3-medium": lambda config: sd3_memory.step_operations(config, 256, 333),
    "longcat-image": lambda config: flux_blocks.step_operations(config, 256 + 512),
    "chroma1-hd": lambda config: flux_blocks.step_operations(config, 256 + 64),
    "ernie-image-turbo": lambda config: ernie_memory.step_operations(config, 256 + 64),
    "krea-2-turbo": lambda config: krea2_memory.step_operations(config, 256 + 64),
    "auraflow": lambda config: auraflow_memory.step_operations(config, 256 + 256),
    "pixart-sigma": lambda config: cross_blocks.step_operations(config, 256, 64, keeps=False),
    "sana-1.5": lambda config: sana_memory.step_operations(config, 64, 64),
    "hunyuan-dit": lambda config: hunyuan_memory.step_operations(config, 256, 77 + 256),
}


@pytest.mark.parametrize("machine", ["h100", pytest.param("m4-max", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LATER)
@pytest.mark.sample(0)
def test_later_families(name: str, machine: str) -> None:
    """A step has the operations that its plan counts."""
    ran = paper(machine, name, "-W", "256", "-H", "256", "--json")
    made, subject = json.loads(ran.out), published(name)
    assert ran.code == 0 and made["picture"]["limit_seconds"] < made["picture"]["compiled_seconds"]
    assert subject is not None
    expected = LATER[name](subject.denoiser[1])
    counted = made["step"]["eager"]["flops"] / made["step"]["calls"]
    print(f"{machine}, {name}: {counted / 1e12:.2f} x 10^12 operations, planned {expected / 1e12:.2f}")
    assert abs(counted / expected - 1) < 0.1


@pytest.mark.sample(0)
def test_the_command() -> None:
    ran = paper("h100", "shapes", "--json")
    made = json.loads(ran.out)
    assert ran.code == 0 and made["label"] == "MODEL" and made["machine"]["name"] == "h100"
    assert made["picture"]["limit_seconds"] < made["picture"]["compiled_seconds"] < made["picture"]["eager_seconds"]
    shown = paper("M4 Max", "shapes", "--guidance", "1", "--steps", "4")
    first, *_, last = shown.out.decode().splitlines()
    assert first.startswith("MODEL, not a measurement: shapes-v1") and "M4 Max" in first and last.startswith("MODEL")
    assert "one forward of 1 branch of guidance" in shown.out.decode() and "4 steps" in shown.out.decode()
    paper("h1000", "shapes").refused(2, "h1000", "qwenimg plan --on list")
    paper("h100", "no-such-model").refused(5, "no-such-model")
    paper("h100", "-W", "99999").refused(2, "99999")
    paper("h100", "--precision", "fp7").refused(2, "fp7")
