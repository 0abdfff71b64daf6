"""Ways out of a refusal: each, planned again by the command's own words, fits and has the numbers that were said; some
are drawn.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.published import write_published

import qwenimg
from qwenimg.cli.main import run
from qwenimg.common.base.errors import DoesNotFit
from qwenimg.common.pipeline import encode
from qwenimg.common.pipeline.fit_options import FitOptions, amount_text, rounded_up
from qwenimg.common.runtime.runtime import limit_for, plannable

Planned = Callable[[dict[str, str]], Any]
SHORT = {"-p": "a red circle", "--steps": "2"}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(tmp_path_factory.mktemp("published") / "Qwen-Image")


@pytest.fixture
def places(published: Path, tiny_folder: Path, folders: dict[str, Path]) -> dict[str, str]:
    """Of models by a name of theirs."""
    return {"published": str(published), "tiny": str(tiny_folder), "shapes": "shapes"} | {
        name: str(folder) for name, folder in folders.items()
    }


# In float32 other ways fit than in bfloat16
pytestmark = pytest.mark.usefixtures("multiplies_bf16", "no_other_models")


@pytest.fixture
def planned(capfd: pytest.CaptureFixture[str]) -> Planned:
    """What `plan --json` prints of these options."""

    def call(options: dict[str, str]) -> Any:
        code = run(["plan", *words(options), "--json"])
        out, err = capfd.readouterr()
        assert code == 0, err
        return json.loads(out.splitlines()[-1])

    return call


def words(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (name, value) if word]


def options_of(text: str) -> dict[str, str]:
    found = shlex.split(text)
    return dict(zip(found[::2], found[1::2], strict=True))


def changed(options: dict[str, str], way: dict[str, Any]) -> dict[str, str]:
    """The command's `options` with those of the way in their place."""
    return {name: value for name, value in options.items() if name != way["without"]} | options_of(way["options"])


# And how many fit: one where neither bits nor a size alone, but a limit does, or only both together.
CASES = {
    "published --backend cpu --precision bf16 --memory 24GB": 4,
    "published --backend cpu --precision fp32 --memory 10GB": 2,
    "published --backend cpu --memory 4GB --size 1024x1024": 1,
    "published --backend cpu --memory 24GB --max-memory 12GB -q 8": 4,
    "published --backend cpu --memory 14GB -q 8": 3,
    "published --backend cpu --memory 24GB --max-memory 1MB": 1,
    "published --backend mlx --memory 24GB --max-memory 12GB -q 8": 3,
    "published --backend mlx --memory 12GB --max-memory 1MB --preset memory": 1,
    "published --backend cuda --memory 16GB": 4,
    "published --backend cuda --memory 12GB -q 6 --size 1664x928": 3,
    "published --backend cuda --memory 8GB --preset memory -q 8": 1,
    "shapes --backend mlx --size 1024x1024 --max-memory 60MB": 2,
    "shapes --backend cpu --size 1024x512 --max-memory 1MB -q 8": 1,
    "shapes --backend mlx --memory 12MB": 1,
    "tiny --backend cpu --size 256x256 --max-memory 1MB": 1,
    "sd15 --backend cpu --precision fp32 --size 512x256 --memory 8MB": 1,
    "sd15 --backend mlx --size 512x512 --max-memory 1MB -q 8": 1,
    "sdxl --backend cpu --size 512x512 --max-memory 2MB": 2,
    "sdxl --backend cuda --size 1024x1024 --memory 30MB -q 8": 1,
}

WITHOUT_BF16 = {
    "published --backend cpu --memory 24GB --max-memory 12GB -q 8": 3,
    "published --backend cpu --memory 4GB --size 1024x1024": 1,
}


@pytest.mark.parametrize(
    ("case", "count", "multiplies_bf16"),
    [(*row, True) for row in CASES.items()] + [(*row, False) for row in WITHOUT_BF16.items()],
    indirect=["multiplies_bf16"],
)
@pytest.mark.sample(1)
def test_every_way_is_planned_again_with_the_same_numbers(
    case: str, count: int, planned: Planned, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, text = case.partition(" ")
    options = {"-m": places[name], "--memory": "20GB"} | SHORT | options_of(text)
    found = planned(options)
    fitting = [way for way in found["ways"] if way["fits"]]
    print(case, *(f"{way['without']} {way['options']}: {way['peak_bytes']:,}" for way in fitting), sep="\n")
    assert not found["fits"] and len(fitting) == count
    monkeypatch.setattr(FitOptions, "all_changes", lambda self: [])  # the search again, for each that does not fit
    for way in found["ways"]:
        again = planned(changed(options, way))
        assert (again["fits"], again["peak_bytes"]) == (way["fits"], way["peak_bytes"]), way
        assert again["step_operations"] == way["step_operations"]
        assert again["step_streamed_bytes"] == pytest.approx(way["step_streamed_bytes"])


# Two changes together, of which neither suffices: the first that has the largest size, and the next larger one.
TOGETHER = {
    "sd15 --backend cpu --precision fp32 --size 1024x1024 --memory 5MB": (
        "--precision fp16,attention=fp32 --size 256x256",
        "384x384",
    ),
    "published --backend cuda --size 8192x8192 --memory 20GB": ("--max-memory 20GB --size 6144x6144", "8192x8192"),
}


@pytest.mark.parametrize("case", TOGETHER)
@pytest.mark.sample(0)
def test_two_changes_together_leave_the_largest_size(case: str, planned: Planned, places: dict[str, str]) -> None:
    both, larger = TOGETHER[case]
    name, _, text = case.partition(" ")
    options = {"-m": places[name]} | SHORT | options_of(text)
    assert [way["options"] for way in planned(options)["ways"] if way["fits"]][-1] == both
    limit = {"--max-memory": options["--memory"]}
    for change in ({}, {"-q": "8"}, {"-q": "6"}, {"-q": "4"}, {"--precision": "fp16"}, limit):
        assert not planned(options | change | {"--size": larger})["fits"], change


@pytest.mark.sample(0)
def test_a_plan_in_which_nothing_fits_says_so(places: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", places["published"], "--backend", "cpu", "--memory", "300MB"]) == 0
    text = capfd.readouterr().out
    assert "\n\nno bits and no size make it fit: it takes another machine\n" in text
    assert run(["plan", places["published"], "--backend", "cpu", "--memory", "12GB"]) == 0
    assert "no bits" not in capfd.readouterr().out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.sample(0)
def test_a_picture_to_encode_that_does_not_fit_names_what_fits(
    precision: str, planned: Planned, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It had words of its own, which named a precision that changes nothing: the VAE is float32 in both."""
    pixels = np.zeros((6000, 6000, 3), np.uint8)
    file = tmp_path / "big.png"
    file.write_bytes(encode.encode(pixels, None, ".png"))
    pipe = qwenimg.load("shapes", backend="cpu", precision=precision)
    monkeypatch.setattr(pipe.engine, "free_memory", lambda: 4 * 10**9)
    pipe.check("a red circle", image=pixels)
    with pytest.raises(DoesNotFit, match=r"^encoding a picture of 6000x6000 takes 4\.1 GB") as caught:
        pipe("a red circle", image=pixels, steps=2, seed=0)
    pipe.close()
    print(caught.value)
    options = {"-m": "shapes", "-i": str(file), "--backend": "cpu", "--precision": precision, "--memory": "4GB"}
    named = ways_of(str(caught.value))
    assert named
    for way in named:
        again = planned(options | SHORT | options_of(way.removeprefix("with ")))
        assert again["fits"], way


@pytest.mark.parametrize(
    ("machine", "out"),
    [
        ((0, ""), "it takes another machine"),
        ((10**12, ""), "close other programs"),
        ((10**12, "`ulimit -v`"), "close other programs or raise `ulimit -v`"),
        ((10**3, "`ulimit -v`"), "it takes another machine"),
    ],
)
@pytest.mark.sample(0)
def test_what_limits_memory_is_named(machine: tuple[int, str], out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = qwenimg.load("shapes", backend="cpu", precision="fp32")
    monkeypatch.setattr(pipe.engine, "free_memory", lambda: 0)
    monkeypatch.setattr(pipe.engine, "machine", lambda: machine)
    with pytest.raises(DoesNotFit) as caught:
        pipe("a red circle", steps=2, seed=0)
    pipe.close()
    print(caught.value)
    under = f" under {machine[1]} (" if machine[1] else " ("
    assert re.search(r" 0 bytes are free on CPU \(torch, .*?\)" + re.escape(under), str(caught.value))
    assert str(caught.value).endswith(f"; no bits and no size make it fit: {out}")


REFUSED = {
    "published --backend cpu -q 8 --max-memory 12GB --size 1024x1024": [
        "with -q 6",
        "without -q",
        "with --max-memory 16GB",
    ],
    "shapes --backend mlx --size 1024x1024 --max-memory 60MB": ["with --size 384x384", "with --max-memory 340MB"],
    "shapes --backend cpu --max-memory 1MB -q 8": [
        "with --max-memory 12MB",
    ],
}
REFUSED_WITHOUT_BF16 = {
    "published --backend cpu -q 8 --max-memory 12GB --size 1024x1024": [
        "with -q 4",
        "without -q",
        "with --max-memory 16GB",
    ],
}


@pytest.mark.parametrize(
    ("case", "ways", "multiplies_bf16"),
    [(*row, True) for row in REFUSED.items()] + [(*row, False) for row in REFUSED_WITHOUT_BF16.items()],
    indirect=["multiplies_bf16"],
)
@pytest.mark.sample(1)
def test_where_the_limit_is_in_the_way_it_takes_no_other_machine(
    case: str, ways: list[str], places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwenimg.backends.torch.engine.free_ram", lambda: 24 * 10**9)
    monkeypatch.setattr("qwenimg.backends.mlx.engine.free_ram", lambda: 24 * 10**9)
    assert ways_of(refusal(case, places)) == ways


def refusal(case: str, places: dict[str, str]) -> str:
    """What the command that draws says, before it reads a weight."""
    name, _, text = case.partition(" ")
    options = options_of(text)
    size = options.get("--size", "0x0").split("x")
    pipe = qwenimg.load(
        places[name],
        backend=options["--backend"],
        precision=options.get("--precision", "auto"),
        quantize=options.get("-q"),
        max_memory=options["--max-memory"],
    )
    asked = {} if size == ["0", "0"] else {"width": int(size[0]), "height": int(size[1])}
    with pytest.raises(DoesNotFit) as caught:
        pipe("a red circle", steps=2, **asked)
    pipe.close()
    print(caught.value)
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value) and "machine" not in str(caught.value)
    return str(caught.value)


def ways_of(message: str) -> list[str]:
    """`with -q 4`, `without -q and with --max-memory 14GB`"""
    return re.findall(r"(with(?:out)? [^()]*?) \(", message.split("; it fits ")[-1])


@pytest.mark.parametrize(
    "case",
    [
        f"{model} --backend {backend} --precision fp32 --size {size} --max-memory {limit}{bits}"
        for model, size, limit in (("tiny", "64x64", "2MB"), ("sd15", "128x128", "1MB"))
        for backend in ("cpu", "mlx")
        for bits in ("", " -q 8")
    ],
)
@pytest.mark.sample(0)
def test_what_a_refusal_names_is_drawn(
    case: str, places: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ways = ways_of(refusal(case, places))
    name, _, text = case.partition(" ")
    assert ways
    for i, way in enumerate(ways):
        picture = tmp_path / f"{i}.png"
        without = "-q" if way.startswith("without -q") else ""
        told = {"without": without, "options": way.replace("without -q", "").replace(" and ", "").replace("with ", "")}
        options = changed({"-m": places[name], "-o": str(picture)} | SHORT | options_of(text), told)
        assert run(words(options)) == 0, (way, capfd.readouterr().err)
        assert picture.stat().st_size, way


def test_limits() -> None:
    for planned in (1, 10**6, 700 * 10**6, 705 * 10**6, 12 * 10**9):
        assert plannable(limit_for(planned)) >= planned > plannable(limit_for(planned) - 3)
    assert [rounded_up(n) for n in (1, 99 * 10**6, 12_345_678_901, 1_234_567_890)] == [
        10**6, 99 * 10**6, 13 * 10**9, 1300 * 10**6,
    ]  # fmt: skip
    assert [amount_text(n) for n in (13 * 10**9, 1300 * 10**6)] == ["13GB", "1300MB"]
