"""K of every kind of block is recorded, and does not grow."""

from __future__ import annotations

import platform

import pytest
from measure_constants import GROWTH, RANDOM, grown, of_model

from qwenimg import backends
from qwenimg.common.families import registry
from qwenimg.common.parity import constants
from qwenimg.common.parity.parity import LIMIT, MARGIN


def test_every_kind_of_block_is_recorded_with_date_and_command() -> None:
    kinds = {f"{row.name}.{block.name}" for row in registry.networks() for block in row.traced}
    document = constants.document()
    without = sorted(kinds - document["k"].keys())
    assert not without, "name a tiny folder in WRITERS of tools/measure_constants.py, and run it: --add NAME"
    assert document["k"].keys() == kinds
    assert all("float32" in row for row in document["k"].values())
    assert document["command"] == "python tools/measure_constants.py" and document["date"] > "2026-11"


def test_those_of_each_network_come_from_twelve_random_configurations() -> None:
    document = constants.document()
    configurations = document["configurations"]
    assert configurations.keys() == {kind.partition(".")[0] for kind in document["k"]}
    for network, row in configurations.items():
        count = sum(number for model, number in row.items() if model.startswith(RANDOM))
        print(f"{network}: {count} random configurations of {sum(row.values())}")
        assert count >= 12, f"run tools/measure_constants.py --add with random folders that have {network}"


def test_limits_follow_from_it() -> None:
    for kind in constants.document()["k"]:
        recorded = constants.recorded(kind, "float32")
        assert recorded and constants.limit(kind, "float32") == max(LIMIT["float32"], MARGIN * recorded)
        assert constants.limit(kind, "bfloat16") == 2 * LIMIT["bfloat16"]
    assert constants.limit("another.block", "float32") == LIMIT["float32"]


@pytest.mark.sample(0)
def test_none_has_grown_by_half() -> None:
    if platform.machine() != "x86_64" or backends.load("mlx").on_gpu:
        pytest.skip("the figures were recorded on x86-64 CPUs")
    found = list(of_model("shapes", "fp32"))
    assert len(found) > 50 and grown(found) == []


def test_one_that_grows_by_half_is_named() -> None:
    recorded = constants.recorded("qwen_dit.block", "float32")
    assert recorded is not None
    assert grown([("qwen_dit.block", "float32", 0.99 * GROWTH * recorded)]) == []
    assert len(grown([("qwen_dit.block", "float32", 1.01 * GROWTH * recorded)])) == 1
    assert len(grown([("another.block", "float32", 1.0), ("qwen_dit.block", "float32", float("nan"))])) == 2
