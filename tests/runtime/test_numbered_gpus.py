"""Several NVIDIA GPUs, each by its number. The driver is pretended: which GPU each question is about is what counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cli_runner import cli

from qwenimg import backends
from qwenimg.backends import paper
from qwenimg.common.base.errors import BackendMissing, UsageError

NAMES = ("NVIDIA RTX 2080 Ti", "NVIDIA RTX 4090")
FREE = (5 << 30, 20 << 30)


class Driver:
    """Two GPUs, and the calls that were made about them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.asked: list[int] = []
        patch = monkeypatch.setattr
        patch(torch.version, "hip", None)
        patch(torch.cuda, "is_available", lambda: True)
        patch(torch.cuda, "device_count", lambda: len(NAMES))
        patch(torch.cuda, "get_device_name", lambda device: NAMES[self._number(device)])
        patch(torch.cuda, "get_device_capability", lambda device: ((7, 5), (8, 9))[self._number(device)])
        patch(torch.cuda, "mem_get_info", lambda device: (FREE[self._number(device)], 24 << 30))
        for name in ("memory_reserved", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
            patch(torch.cuda, name, self._number)

    def _number(self, device: Any) -> int:
        assert isinstance(device, torch.device) and device.index is not None
        self.asked.append(device.index)
        return int(device.index)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_an_engine_asks_about_its_own_gpu(driver: Driver, name: str, number: int) -> None:
    engine = backends.load(name)
    assert (engine.name, engine.device, engine.free_memory()) == ("cuda", NAMES[number], FREE[number])
    engine.peak_memory()
    assert len(driver.asked) >= 6 and set(driver.asked) == {number}
    assert ("bfloat16" in engine.facts.units) is bool(number), "the capability of another GPU"


def test_a_gpu_that_is_not_there(driver: Driver) -> None:
    with pytest.raises(BackendMissing, match=r"cuda:2: of NVIDIA GPUs cuda:0 to cuda:1 are here"):
        backends.load("cuda:2")


def test_all_gpus_are_listed(driver: Driver) -> None:
    devices = backends.available()
    assert (devices["cuda"], devices["cuda:1"]) == NAMES and "cuda:2" not in devices


@pytest.mark.parametrize(
    "name", ["cuda:", "cuda:-1", "cuda:01", "cuda:100", "cuda:x", "cuda: 1", "cuda:1:1", "cpu:1", "cuda:١"]
)
def test_a_name_that_is_none(name: str) -> None:
    assert not backends.known(name)
    for refuse in (backends.load, lambda name: paper.on_paper(name, 8 << 30)):
        with pytest.raises(UsageError, match="is not one of auto, mlx, cuda, cpu"):
            refuse(name)
    cli("generate", "a red circle", "-m", "shapes", "--backend", name).refused(2, "is not one of")


def test_a_plan_for_the_second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "NVIDIA RTX 2080 Ti, 7.5, 5000\nNVIDIA RTX 4090, 8.9, 20000"
    monkeypatch.setattr(paper, "_answer", lambda *command: rows)
    second = paper.on_paper("cuda:1", None)
    assert (second.name, second.facts.name, second.free) == ("cuda", "NVIDIA RTX 4090", 20000 << 20)
    with pytest.raises(BackendMissing, match="cuda:2: no NVIDIA GPU of this number"):
        paper.on_paper("cuda:2", None)
