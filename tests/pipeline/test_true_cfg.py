"""`true_cfg`, diffusers' `true_cfg_scale`: beside the guidance that Flux.1 is told, and another word for guidance in
every other family, by whose own formula it is the same prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli_runner import cli

import qwenimg
from qwenimg import UsageError
from qwenimg.common.families.flux.model import Flux
from qwenimg.common.families.flux2.model import Flux2
from qwenimg.common.families.qwen_image.model import QwenImage
from qwenimg.common.families.sd3.model import SD3
from qwenimg.common.families.z_image.model import ZImage
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg

ASKED: dict[str, Any] = {
    "prompt": "a ring",
    "negative_prompt": "dull",
    "width": 48,
    "height": 32,
    "steps": 1,
    "seed": 1,
}


@pytest.mark.parametrize(
    ("family", "guidance"),
    [(QwenImage, 3.0), (SD3, 3.0), (ZImage, 2.0), (Flux2, None)],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_it_is_guidance_by_the_formula_of_the_family(family: Any, guidance: float | None) -> None:
    """Z-Image's is pos + s (pos - neg), and so one less. FLUX.2 sets its own for each of its models."""
    given = Guidance(formula=cfg) if guidance is None else family.guidance
    guidance = guidance or 3.0
    assert given.resolve({"true_cfg": 3.0}) == {"guidance": guidance}
    assert given.resolve({"true_cfg": 3.0, "guidance": guidance}) == {"guidance": guidance}
    assert given.resolve({"true_cfg": None, "guidance": 7.0}) == {"true_cfg": None, "guidance": 7.0}
    with pytest.raises(
        UsageError, match=rf"another word for --guidance {guidance:g} in this model, and --guidance 5 is"
    ):
        given.resolve({"true_cfg": 3.0, "guidance": 5.0})


def test_in_a_distilled_model_it_has_the_effect_of_guidance() -> None:
    """None."""
    assert Guidance(formula=cfg, off=float("inf")).resolve({"true_cfg": 3.0}) == {"guidance": 3.0}


def test_flux_keeps_both() -> None:
    asked = {"true_cfg": 3.0, "guidance": 2.0}
    assert Flux.guidance.resolve(asked) == asked


@pytest.mark.parametrize(("kind", "guidance"), [("z-image", 1.5), ("qwen", 2.5)])
def test_both_words_draw_the_same(tiny: dict[str, Path], kind: str, guidance: float) -> None:
    with qwenimg.load(tiny[kind], "cpu", "fp32") as pipe:
        one, other, without = (
            pipe(**ASKED, **more) for more in ({"true_cfg": 2.5}, {"guidance": guidance}, {"true_cfg": 1.0})
        )
    assert np.array_equal(one.latents, other.latents) and not np.array_equal(one.latents, without.latents)
    assert one.recipe["guidance"] == guidance and "true_cfg" not in one.recipe and one.warnings == []


def test_the_command(tiny: dict[str, Path], tmp_path: Path) -> None:
    """In Flux.1 `--true-cfg-scale` is no other word for the guidance that the model is told."""
    out = (
        "--size",
        "48x32",
        "--steps",
        "1",
        "--seed",
        "1",
        "--backend",
        "cpu",
        "--overwrite",
        "-o",
        str(tmp_path / "a.png"),
    )
    dev = ("a ring", "-m", str(tiny["flux-dev"]), "-n", "dull", "--true-cfg-scale", "2.5")
    assert cli(*dev, *out).code == 0
    recipe = cli("info", str(tmp_path / "a.png"), "--json").out
    assert b'"true_cfg": 2.5' in recipe and b'"guidance": 3.5' in recipe
    image = ("a ring", "-m", str(tiny["z-image"]), "-n", "dull", "--true-cfg-scale", "2.5")
    assert cli(*image, *out).code == 0
    assert b'"guidance": 1.5' in cli("info", str(tmp_path / "a.png"), "--json").out
    cli(*image, "--guidance", "4", *out).refused(2, "--true-cfg is another word for --guidance 1.5 in this model")
