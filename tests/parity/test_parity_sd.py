"""Every kind of block of Stable Diffusion's UNet and VAE on both backends against float64, as `test_parity_blocks` does
for Qwen-Image. The float64 reference is itself held against diffusers in `test_unet.py` and `test_kl_vae.py`."""

from __future__ import annotations

import platform

import pytest
from measure_constants import GROWTH
from support.parity_sd import BASES, BLOCKS, POLICIES, RECORDED, SDBench, SDBlock
from support.sd_models import MLX

from qwenimg.common.precision.precision import Precision


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> SDBench:
    return SDBench(tmp_path_factory.mktemp("parity"))


CASES = [
    pytest.param(block, policy, id=f"{block.name}-{policy.name}") for block in BLOCKS for policy in POLICIES[block.part]
]


@pytest.mark.parametrize(("block", "precision"), CASES)
@pytest.mark.sample(1)
def test_block(bench: SDBench, block: SDBlock, precision: Precision) -> None:
    failures = []
    for family in block.judged:
        for verdict in bench.judge(block, precision, family):
            print(verdict.row(f"{precision.name} {family}"))
            failures += [(family, failure) for failure in verdict.failures]
    assert not failures


def test_near_constant_inputs_are_told(bench: SDBench) -> None:
    for block in BLOCKS:
        for verdict in bench.judge(block, BASES["fp32"], "near-constant"):
            print(verdict.row("fp32 near-constant"))
            assert all(figures.non_finite == 0 for figures in verdict.figures.values())


def test_every_block_has_recorded_figures() -> None:
    assert {block.name for block in BLOCKS} == RECORDED.keys()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
@pytest.mark.sample(6)
def test_no_worse_than_recorded(bench: SDBench, block: SDBlock) -> None:
    """Far below the limits, an error that grows says that something was changed for the worse."""
    if platform.machine() != "x86_64" or MLX().engine.on_gpu:
        pytest.skip("the figures were recorded on x86-64 CPUs")
    low = POLICIES[block.part][1]
    if block.case(low, "normal").dtype == "float32":
        low = BASES["bf16-plain"]
    for precision, recorded in zip((BASES["fp32"], low), RECORDED[block.name], strict=True):
        found = max(v.k(name) for v in bench.judge(block, precision) for name in v.figures)
        print(f"{block.name} {precision.name}: K {found:.2f}, recorded {recorded}")
        assert found <= GROWTH * recorded
