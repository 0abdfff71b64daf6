"""The speed of this machine: measured once, kept, and the same for plans, hints and runs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli_runner import cli

import qwenimg
from qwenimg import backends
from qwenimg.backends.paper import for_hints, on_paper
from qwenimg.common.memory import own_cache
from qwenimg.common.runtime import rates
from qwenimg.common.runtime.rates import Rates

RED = ("-p", "a red circle")
NEAR = 1.3  # by the same rates; a prompt of usual length has some words more than this one


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "qwenimg" / "rates.json"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The measurements, each of which finds another rate."""
    calls: list[tuple[object, ...]] = []

    def measure(engine: object, layer: str, dtype: str, small: bool) -> float:
        calls.append((layer, dtype, small))
        return 1e9 * len(calls)

    monkeypatch.setattr(rates, "measure", measure)
    return calls


def nothing() -> None:
    return None


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_rate_is_measured_once_and_kept(backend: str, place: Path, measured: list[tuple[object, ...]]) -> None:
    engine, paper = backends.load(backend), on_paper(backend, None)
    assert paper.rate is not None
    assert engine.rate("matmul", "float32", False) == paper.rate("matmul", "float32", False) == 1e9
    assert paper.rate("matmul", "float32", True) == engine.rate("matmul", "float32", True) == 2e9
    assert backends.rates(backend, nothing)("matmul", "float32") == 1e9  # type: ignore[arg-type, return-value]
    assert len(measured) == 2 and len(json.loads(place.read_text())) == 2
    assert backends.rates(backend, nothing).again("matmul", "float32") == 3e9  # type: ignore[arg-type, return-value]
    assert backends.rates(backend, nothing)("matmul", "float32") == 3e9  # type: ignore[arg-type, return-value]


def test_another_version_or_number_of_threads_is_another_machine(
    measured: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Rates("cpu", nothing)("matmul", "float32") == 1e9  # type: ignore[arg-type, return-value]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert Rates("cpu", nothing)("matmul", "float32") == 2e9  # type: ignore[arg-type, return-value]
    assert Rates("cuda", nothing, "NVIDIA X")("matmul", "float32") == 3e9  # type: ignore[arg-type, return-value]
    assert Rates("cpu of torch 99", nothing)("matmul", "float32") == 4e9  # type: ignore[arg-type, return-value]


def _folder(place: Path) -> None:
    place.mkdir(parents=True)


def _pipe(place: Path) -> None:
    place.parent.mkdir(parents=True)
    os.mkfifo(place)


def _text(text: str) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        place.parent.mkdir(parents=True)
        place.write_text(text)

    return write


@pytest.mark.parametrize(
    "damage",
    [
        _folder, _pipe, _text(""), _text("["), _text("[1]"), _text("{" + '"a":1,' * 999), _text("\ud7ff" * 99),
        lambda place: place.parent.write_text("a file in place of the folder"),
    ],
)  # fmt: skip
def test_a_broken_file_is_the_same_as_none(
    place: Path, measured: list[tuple[object, ...]], damage: Callable[[Path], None]
) -> None:
    damage(place)
    assert Rates("cpu", nothing)("matmul", "float32") == 1e9  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("value", ["0", "-1", "null", '"1e9"', "true", "1e31", "[1]", "9" * 40, "{}"])
def test_a_wrong_number_is_measured_again(place: Path, measured: list[tuple[object, ...]], value: str) -> None:
    assert Rates("cpu", nothing)("matmul", "float32") == 1e9  # type: ignore[arg-type, return-value]
    name = next(iter(json.loads(place.read_text())))
    place.write_text(f"{{{json.dumps(name)}: {value}}}")
    assert Rates("cpu", nothing)("matmul", "float32") == 2e9  # type: ignore[arg-type, return-value]
    assert json.loads(place.read_text())[name] == 2e9


def test_the_file_stays_small() -> None:
    for index in range(3):
        own_cache.keep("x.json", {f"{index} {i}": 1.0 for i in range(own_cache.MOST)})
    assert own_cache.number("x.json", "0 5") is None and own_cache.number("x.json", "2 5") == 1
    assert len(json.loads((own_cache.folder() / "x.json").read_text())) == own_cache.MOST


def test_no_home(monkeypatch: pytest.MonkeyPatch, measured: list[tuple[object, ...]]) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert Rates("cpu", nothing)("matmul", "float32") == 1e9  # type: ignore[arg-type, return-value]


def test_a_hint_measures_nothing(measured: list[tuple[object, ...]]) -> None:
    hints = for_hints("cpu")
    assert hints.rate is not None and hints.rate("matmul", "float32", False) % rates.USUAL == 0
    backends.rates("cpu", nothing)("matmul", "float32")  # type: ignore[arg-type, return-value]
    assert for_hints("cpu").rate("matmul", "float32", False) == 1e9  # type: ignore[misc]
    assert len(measured) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_small_network_is_estimated_by_small_layers(backend: str, precision: str) -> None:
    """Against the run itself, by processor time. A CPU was told 5 to 11 times too little, by the rate of large layers
    on all cores."""
    with qwenimg.load("shapes", backend, precision) as pipe:
        said = pipe.estimate("a red circle", steps=4).seconds
        pipe("a red circle", steps=1)
        begin = time.process_time()
        pipe("a red circle", steps=4)
        took = time.process_time() - begin
    print(f"said {said:.2f} s, took {took:.2f} s of processor time")
    off = 3.5 if backend == "cpu" else 7  # the tests give MLX a faster BLAS, which leaves the other operations
    assert took / off < said < took * off


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_plan_has_the_time_of_the_run(backend: str) -> None:
    """Without a prompt as with one: it was 4 times as long, that of the longest prompt. Memory still is of that."""
    with qwenimg.load("shapes", backend) as pipe:
        said = pipe.estimate("a red circle")
    found = [json.loads(cli("plan", "shapes", "--backend", backend, "--json", *more).out) for more in ((), RED)]
    ratios = [plan["picture_seconds"] / said.seconds for plan in found]
    print(f"{backend}: the run {said.seconds:.2f} s, plans {', '.join(f'{ratio:.2f}' for ratio in ratios)} of it")
    assert all(1 / NEAR < ratio < NEAR for ratio in ratios)
    assert found[0]["peak_bytes"] >= found[1]["peak_bytes"] == said.memory
    [eight] = [way for way in found[0]["ways"] if way["options"] == "-q 8"]
    assert 1 / NEAR < eight["picture_seconds"] / said.seconds < NEAR
