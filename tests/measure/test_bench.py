"""`qwenimg bench`: stages apart, a slope that leaves out what comes once, a share of the step's own products."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_runner import cli

from qwenimg import Step
from qwenimg.common.measure import bench, peers
from qwenimg.common.measure.bench import STAGES, Ask
from qwenimg.common.runtime.kernels import Kernel

ASK = Ask(width=64, height=64, guidance=3.0, few=2, many=6, rounds=3)


class Clockwork:
    """A pipeline whose steps take 0.5 s each, and the first one 9 s more."""

    def stream(self, prompt: str, *, steps: int, **asked: Any):
        for i in range(steps):
            yield Step(index=i + 1, total=steps, sigma=1.0, seconds=0.5 + (9 if i == 0 else 0))
        yield SimpleNamespace(timing={"decode": 1.0}, steps=steps)


def test_the_slope_leaves_out_what_comes_once() -> None:
    slope, _, last = bench.steady(Clockwork(), ASK)  # type: ignore[arg-type]
    assert slope == 0.5 and last.steps == 6  # type: ignore[attr-defined]


def test_the_share_is_that_of_the_largest_product() -> None:
    """Two products of 2 and 1 GFLOP in two calls, at 4 GFLOP/s, in steps of 3 s: a share of 0.5."""
    asked = []

    def linear_seconds(rows: int, inner: int, columns: int, dtype: str) -> float:
        asked.append((rows, inner, columns, dtype))
        return 0.5

    def product(flops: float, shape: tuple[int, ...]) -> Kernel:
        return Kernel(
            name="mm", kind="product", dtype="bfloat16", shape=shape, flops=flops, reads=(), writes=(), region=0
        )

    kernels = [product(2e9, (1000, 500)), product(1e9, (1000, 250))]
    share, rate = bench.share_of_products(SimpleNamespace(linear_seconds=linear_seconds), kernels, 2, 3.0)  # type: ignore[arg-type]
    assert rate == 4e9 and np.isclose(share, 0.5) and set(asked) == {(1000, 2000, 500, "bfloat16")}


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
    assert arm["stages"]["total"] > arm["stages"]["load"] > 0 and arm["rate"] > 1e6 and arm["share"] is not None


def test_the_table_and_refusals() -> None:
    ran = cli("bench", "shapes", "--backend", "cpu", "-W", "64", "-H", "64", "--steps", "3", "--rounds", "1")
    first, *_, last = ran.out.decode().splitlines()
    assert "slope of 2 to 3 steps" in first and last.startswith("load average")
    assert all(any(line.startswith(stage) for line in ran.out.decode().splitlines()) for stage in STAGES)
    cli("bench", "shapes", "--steps", "2").refused(2, "--steps 2", "give more")
    cli("bench", "no-such-model").refused(5, "no-such-model")


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
    assert ran.code == 0 and made["difference"] < 1e-5 and [arm["arm"] for arm in made["arms"]][1] == "diffusers"


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
