"""--preset, --precision and what other programs call their parts, from the command line to the policy."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from support.cli_runner import cli
from support.recipe_cases import recipe_from_png

import qwenimg
from qwenimg.common.families.registry import FAMILIES
from qwenimg.common.runtime.runtime import UNPLANNED_SHARE, WEIGHTS

SMALL = ("--size", "64x48", "--steps", "1", "-m", "shapes", "--backend", "cpu")


def test_the_presets_are_listed() -> None:
    ran = cli("presets")
    text = ran.out.decode()
    assert ran.code == 0 and all(name in text for name in ("quality", "balanced", "fast", "memory", "auto", "bf16"))
    assert max(map(len, text.splitlines())) < 120  # three columns: what families have alike is said once
    assert any(line.split() == ["fp16,attention=fp32", "in", "Stable", "Diffusion"] for line in text.splitlines())
    rows = json.loads(cli("presets", "--json").out)["presets"]
    assert [row["name"] for row in rows] == ["quality", "balanced", "fast", "memory"]
    assert all(row["precision"].keys() == {family.name for family in FAMILIES} for row in rows)


def test_auto_is_told_and_recorded_with_its_reason(tmp_path: Path) -> None:
    ran = cli("a red circle", *SMALL, "-o", str(tmp_path / "a.png"))
    assert ran.code == 0
    (line,) = [line for line in ran.err.splitlines() if "--preset auto" in line]
    assert "fp32, since a model of" in line
    precision = recipe_from_png(tmp_path / "a.png")["precision"]
    assert (precision["name"], precision["preset"]) == ("fp32", "auto") and precision["reason"] in line


@pytest.mark.sample(0)
def test_a_preset_is_its_policy_and_precision_comes_before(tmp_path: Path) -> None:
    cli("a red circle", *SMALL, "--preset", "balanced", "-o", str(tmp_path / "a.png"))
    ran = cli("a red circle", *SMALL, "--preset", "fast", "--precision", "fp32", "-o", str(tmp_path / "b.png"))
    a, b = (recipe_from_png(tmp_path / name)["precision"] for name in ("a.png", "b.png"))
    assert (a["name"], a["preset"]) == ("bf16", "balanced") and "reason" not in a
    assert (b["name"], b["preset"]) == ("fp32", "fast") and "since" not in ran.err
    again = cli("--from", str(tmp_path / "a.png"), "--backend", "cpu", "-o", str(tmp_path / "c.png"))
    assert again.code == 0 and recipe_from_png(tmp_path / "c.png")["precision"]["name"] == "bf16"
    other = cli(
        "--from", str(tmp_path / "a.png"), "--preset", "quality", "--backend", "cpu", "-o", str(tmp_path / "d.png")
    )
    assert other.code == 0 and recipe_from_png(tmp_path / "d.png")["precision"]["name"] == "fp32"


def test_memory_decodes_in_bands(tiny_folder: Path) -> None:
    told = []
    pipe = qwenimg.load(tiny_folder, "cpu", preset="memory", notify=lambda kind, text: told.append(text))
    pipe("x", width=64, height=544, steps=1, seed=0)
    assert pipe.precision.name == "bf16" and any("in bands of 64 rows" in text for text in told)


def _keep(told: list[tuple[str, str]], kind: str, text: str) -> None:
    told.append((kind, text))


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_memory_keeps_weights_in_8_bits_where_16_do_not_fit(backend: str) -> None:
    with closing(qwenimg.load("shapes", backend, preset="memory")) as pipe:
        whole = pipe.checkpoint.largest(pipe.precision)
        smaller = pipe.checkpoint.quantized("8").largest(pipe.precision)
        assert smaller < whole and "quantize" not in pipe.options
    for largest, bits in ((whole, None), (smaller, "8"), (smaller // 2, None)):  # of what fits
        told: list[tuple[str, str]] = []
        room = int(largest / WEIGHTS / (1 - UNPLANNED_SHARE)) + 2
        tell = partial(_keep, told)
        with closing(qwenimg.load("shapes", backend, preset="memory", max_memory=room, notify=tell)) as pipe:
            assert pipe.options.get("quantize") == bits
            assert any("weights in 8 bits" in text for _, text in told) == (bits is not None), told
    with closing(qwenimg.load("shapes", backend, preset="memory", quantize="6", max_memory=room)) as pipe:
        assert pipe.options["quantize"] == "6"


def test_the_part_of_another_family_is_refused() -> None:
    cli("a red circle", *SMALL, "--precision", "auto,unet=bf16").refused(2, "unet=bf16", "transformer")


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("a red circle", "--preset", "best").refused(2, "--preset 'best'", "quality, balanced, fast, memory, auto")
    cli("a red circle", "--fp16-vae").refused(2, "--fp16-vae", "--precision", "vae=")
    cli("a red circle", "--upcast-matmul").refused(2, "--precision auto,matmul=fp32")
    monkeypatch.setenv("QWENIMG_PRESET", "best")
    cli("a red circle").refused(2, "QWENIMG_PRESET", "best")
