"""`qwenimg bench`: stages apart, a slope that leaves out what comes once, a share of the step's own products."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cli_runner import cli
from paper_cases import NETWORKS

from qwenimg import Step, backends
from qwenimg.common.measure import bench, peers
from qwenimg.common.measure.bench import STAGES, Ask
from qwenimg.common.measure.published import published
from qwenimg.common.precision.precision import MMDIT, UNET, bases
from qwenimg.common.runtime.kernels import Kernel, Kind
from qwenimg.common.runtime.observers import observe, seen

ASK = Ask(width=64, height=64, guidance=3.0, few=2, many=6, rounds=3)


class Clockwork:
    """A pipeline whose steps take 0.5 s each, and the first one 9 s more. texts: shapes of what its transformer makes
    of the tokens of a prompt, which an observer sees."""

    def __init__(self, texts: Sequence[tuple[int, ...]] = ()):
        self.engine, self.texts = self, texts

    observe = staticmethod(observe)

    def stream(self, prompt: str, *, steps: int, **asked: Any):
        for shape in self.texts:
            seen("linear", "txt_in", np.zeros(shape))
            seen("attention", "", np.zeros((1, 24, 96)))
        for i in range(steps):
            yield Step(index=i + 1, total=steps, sigma=1.0, seconds=0.5 + (9 if i == 0 else 0))
        yield SimpleNamespace(timing={"decode": 1.0}, steps=steps)


def test_the_slope_leaves_out_what_comes_once() -> None:
    slope, _, last = bench.steady(Clockwork(), ASK)  # type: ignore[arg-type]
    assert slope == 0.5 and last.steps == 6  # type: ignore[attr-defined]


class Rated:
    """An engine on which each operation takes a nanosecond, and the first run of a kernel 9 s more."""

    def __init__(self) -> None:
        self.asked: list[Kernel] = []

    def repeating(self, kernel: Kernel, parameters: int) -> Callable[[int], float]:
        assert parameters == 42
        self.asked.append(kernel)
        firsts = iter((9,))
        return lambda count: count * kernel.flops / 1e9 + next(firsts, 0)


def kernel(flops: float, width: int, kind: Kind = "product") -> Kernel:
    return Kernel(
        name="mm",
        kind=kind,
        dtype="bfloat16",
        shape=(1000, width),
        given=((1000, 2000), (2000, width)),
        flops=flops,
        reads=(),
        writes=(),
        region=0,
    )


def test_the_share_is_that_of_all_products() -> None:
    """0.002, 0.001 twice and 0.5 s of a step of 2 s: each shape is timed once, without its cold start."""
    engine = Rated()
    twice, attention = kernel(1e6, 250), kernel(5e8, 3, "attention")
    kernels = [kernel(2e6, 500), twice, kernel(0, 1, "memory"), twice, attention]
    share, rate = bench.share_of_products(engine, kernels, 42, 2.0)  # type: ignore[arg-type]
    assert np.isclose(share, 0.252) and np.isclose(rate, 1e9) and len(engine.asked) == 3


@pytest.mark.parametrize("name", ["qwen-image", "sd15"])
def test_a_step_is_counted_with_the_tokens_that_it_has(name: str) -> None:
    """Texts of 8 tokens in one batch and in turn, where on paper one of 64 is meant; of CLIP's it is 77."""
    subject = published(name)
    assert subject is not None
    for shapes in ([(2, 8, 96)], [(1, 8, 96), (1, 3, 96)]):
        made = bench.cases(Clockwork(shapes), subject, ASK)  # type: ignore[arg-type]
        asked = [(case.branches, case.text) for case in made]
        assert asked == ([(2, 77)] if name == "sd15" else [shape[:2] for shape in shapes])


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("network", ["qwen_dit", "unet"])
def test_every_product_can_be_timed_alone(backend: str, network: str) -> None:
    """Each gives a result of the shape that was counted, in its dtype."""
    engine = backends.load(backend)
    config, case = NETWORKS[network]
    policy = bases(UNET if network == "unet" else MMDIT)["fp32"]
    counted = backends.counter(apple=backend == "mlx")(network, config, policy, case)
    ops = import_module(f"qwenimg.backends.{'mlx' if backend == 'mlx' else 'torch'}.ops")
    products = [kernel for kernel in counted if kernel.kind != "memory"]
    for one in products:
        result = ops.alone(one, *([] if backend == "mlx" else [torch.device("cpu")]))()
        assert prod(result.shape) == prod(one.shape) and str(result.dtype).endswith(one.dtype), one
    assert engine.repeating(products[0], 0)(2) > 0 and len({one.name for one in products}) > 1


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_the_command(backend: str) -> None:
    ran = cli(
        "bench", "shapes", "--backend", backend, "-W", "64", "-H", "64", "--steps", "3", "--rounds", "1", "--json"
    )
    made = json.loads(ran.out)
    (arm,) = made["arms"]
    print(arm)
    assert ran.code == 0 and tuple(arm["stages"]) == STAGES and arm["device"].startswith("CPU")
    assert all(np.isfinite(seconds) for seconds in arm["stages"].values())
    assert arm["stages"]["total"] > arm["stages"]["load"] > 0
    if arm["stages"]["steady step"] <= 0:  # which a busy machine makes of two steps
        assert arm["share"] is arm["rate"] is None
    else:
        assert arm["share"] > 0 and arm["rate"] > 1e6


def test_the_table_and_refusals() -> None:
    ran = cli("bench", "shapes", "--backend", "cpu", "-W", "64", "-H", "64", "--steps", "3", "--rounds", "1")
    first, *_, last = ran.out.decode().splitlines()
    assert "slope of 2 to 3 steps" in first and last.startswith("load average")
    assert all(any(line.startswith(stage) for line in ran.out.decode().splitlines()) for stage in STAGES)
    cli("bench", "shapes", "--steps", "2").refused(2, "--steps 2", "give more")
    cli("bench", "no-such-model").refused(5, "no-such-model")
    cli("bench", "--on-paper", "h100", "--against", "diffusers").refused(2, "--on-paper runs nothing", "give one")
    cli("bench", "--on-paper", "h100", "--backend", "mlx").refused(2, "H100", "--backend cuda")
    cli("bench", "--on-paper", "m4-max", "--backend", "cpu").refused(2, "M4 Max", "--backend mlx")


def measured(step: float) -> bench.Measured:
    return bench.Measured(
        arm="x",
        device="CPU",
        precision="fp32",
        stages=dict.fromkeys(STAGES, step),
        processor_step=step,
        peak=None,
        versions={},
        load_average=0.0,
    )


@pytest.mark.parametrize(("difference", "ratio"), [(1e-6, 0.5), (0.2, "INVALID"), (float("nan"), "INVALID")])
def test_a_result_that_differs_has_no_ratio(difference: float, ratio: float | str) -> None:
    made = peers.Compared(ours=measured(1.0), peer=measured(2.0), difference=difference, limit=1e-3)
    assert made.ratio == made.processor_ratio == ratio and made.as_json(ASK)["ratio"] == ratio
    assert peers.shown(made, ASK)[-1].endswith(f"{ratio:.2f}" if isinstance(ratio, float) else ratio)


def test_a_slope_that_is_noise_has_no_ratio() -> None:
    made = peers.Compared(ours=measured(-0.1), peer=measured(2.0), difference=1e-6, limit=1e-3)
    assert made.ratio == "too short to measure"


@pytest.mark.slow
def test_against_diffusers() -> None:
    """The built-in model, which diffusers opens too: the same latents from the same noise."""
    small = ("-W", "64", "-H", "64", "--steps", "3", "--rounds", "1")
    ran = cli("bench", "shapes", "--against", "diffusers", "--backend", "cpu", *small, "--json")
    made = json.loads(ran.out)
    print(made["difference"], made["ratio"])
    ours, theirs = made["arms"]
    assert ran.code == 0 and made["difference"] < 1e-5 and theirs["arm"] == "diffusers"
    assert min(ours["peak"], theirs["peak"]) > 10**8, "two frameworks with a model"
    assert ours["stages"]["steady step"] <= 0 or ours["share"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd15", "sd21", "sdxl"])
def test_against_diffusers_for_stable_diffusion(name: str, folders: dict[str, Path]) -> None:
    """Each folder's own scheduler, both branches of guidance: the same latents from the same noise."""
    small = ("-W", "64", "-H", "80", "--steps", "4", "--rounds", "1", "--guidance", "5", "--precision", "fp32")
    ran = cli("bench", str(folders[name]), "--against", "diffusers", "--backend", "cpu", *small, "--json")
    made = json.loads(ran.out)
    print(name, made["difference"], made["ratio"])
    assert ran.code == 0 and made["difference"] < 1e-5 and made["ratio"] != "INVALID"


def test_only_text_to_image_folders_have_a_peer(folders: dict[str, Path]) -> None:
    cli("bench", str(folders["inpaint"]), "--against", "diffusers").refused(2, "--against diffusers takes folders of")
