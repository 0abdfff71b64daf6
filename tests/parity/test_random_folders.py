"""Passports of healthy models of random sizes pass, whichever backend records them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import passport_runs, random_folders
from support.tiny_qwen21 import see_small_pictures

from qwenimg.common.families.qwen_image import references
from qwenimg.common.parity.passport import passport_file

FIRST = 101  # seed; the constants come from others
EACH = 4  # folders of a family
QUICK = (("flux", 101), ("flux2", 102))


def cases() -> list[Any]:
    families = random_folders.FAMILIES.keys() - random_folders.CONTROLLED
    made = [(family, FIRST + i) for i in range(EACH) for family in sorted(families)]
    return [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in made]


@pytest.mark.parametrize(("family", "seed"), cases())
@pytest.mark.sample(0, rest=1)
def test_healthy_models_pass_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, seed: int) -> None:
    see_small_pictures(monkeypatch)
    monkeypatch.setattr(references, "AREA", 128**2)
    random_folders.write(tmp_path / family, family, seed)
    asked = random_folders.asked(family, seed)
    options = ["--prompt", asked["prompt"], "--size", f"{asked['width']}x{asked['height']}", "--seed", str(seed)]
    if "pictures" in asked:
        options += ["--pictures", str(asked["pictures"])]
    vae = (
        ["--vae", str(random_folders.write_tiny_vae(tmp_path / family, family, seed))]
        if family in random_folders.TINY_VAES
        else []
    )
    for first, second in (("cpu", "mlx"), ("mlx", "cpu")):
        passport = tmp_path / f"{first}.safetensors"
        passport_runs.record(tmp_path / family, passport, first, *options, *vae)
        passport_runs.check(tmp_path / family, passport, second, *vae)
        if family == "flux":  # token ids cannot be moved, and what rounds inside grows all the same
            blocks = passport_file.read(passport).blocks
            [t5] = [recorded for recorded in blocks if recorded.name == "text_encoder_2.whole"]
            print(f"the gain of T5's weights: {t5.results[0].gain:.2f}")
            assert t5.results[0].gain > 1.1


def test_there_are_forty() -> None:
    assert len(cases()) >= 40
