"""Every policy of every family on both backends: finite, and as near to float32 as docs/measured/precision.md says."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.crossed import crossed
from support.family_cases import ASKED, BACKENDS, FIRST, PROMPT, Opener, opener, places
from support.policies import parse
from support.relative import relative
from support.rules import ROOT

from qwenimg.common.families import registry
from qwenimg.common.precision.precision import DenoiserKind, bases, dtype_named

# That both backends compute alike under a policy is held in `parity/`, block by block.
QUICK = crossed(FIRST.values(), BACKENDS)
LIKE_OTHERS = ("sd21", "sdxl", "inpaint", "sdxl+refiner")
BASES = tuple(dict.fromkeys(name for family in registry.FAMILIES for name in family.precision.bases))
CHOSEN = 2  # policies with overrides, drawn for each kind
SHORT = ASKED | {"steps": 2}
PAGE = ROOT / "docs" / "measured" / "precision.md"
OVERRIDES = ("final_norm=off", "attention=fp32", "attention=fused", "matmul=fp32")
DTYPES = ("fp32", "bf16", "fp16")


def limits() -> dict[str, float]:
    """Of each policy in the table of docs/measured/precision.md: how far latents may be from float32's, relative L2."""
    page = PAGE.read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- begin limits -->\n(.*?)<!-- end limits -->", page, re.DOTALL)
    found = re.findall(r"^\| `([\w-]+)` \|.*\| ([\d.e+-]+) \|$", table, re.MULTILINE)
    return {name: float(limit) for name, limit in found}


@pytest.fixture
def load(kind: str, tiny: dict[str, Path]) -> Opener:
    return opener(kind, places(tiny, tiny["qwen"])[kind], tiny)


def mixed(kind: DenoiserKind, seed: str) -> list[str]:
    """Policies with two overrides each, the same in every run."""
    chance = random.Random(seed)
    parts = [f"{part}={dtype}" for part in ("text", kind.denoiser, "vae") for dtype in DTYPES]
    parts = [
        part for part in parts if kind.denoiser not in part or dtype_named(part.partition("=")[2]) not in kind.refused
    ]
    return [
        ",".join([chance.choice(list(bases(kind))), *chance.sample([*parts, *OVERRIDES], 2)]) for _ in range(CHOSEN)
    ]


def allowed(name: str, page: dict[str, float], kind: DenoiserKind) -> float:
    """The widest of what its base may be off by and of what plain 16 bit of an overridden part may, and of texts for
    which float16 is too narrow."""
    base, *overrides = name.split(",")
    dtypes = {override.rpartition("=")[2] for override in overrides if not override.startswith("vae")}
    dtypes |= {"bf16"} if kind.texts.get(base) == "bfloat16" else set()
    plain = {"fp16": "fp16-plain", "bf16": "bf16-plain", "off": "bf16-plain"}
    return max(page[base], *(page[plain.get(dtype, "fp32")] for dtype in dtypes | {"fp32"}))


def test_the_page_has_every_policy() -> None:
    assert limits().keys() == set(BASES)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [*QUICK, *(pytest.param(kind, b, marks=pytest.mark.slow) for kind in LIKE_OTHERS for b in BACKENDS)],
)
@pytest.mark.sample(0)
def test_every_policy(load: Opener, kind: str, backend: str) -> None:
    exact: Any = load(backend)(PROMPT, **SHORT)
    page, found = limits(), dict[str, float]()
    own = load(backend).precision.kind
    for name in [*own.bases, *mixed(own, kind)]:
        made = load(backend, name)(PROMPT, **SHORT)
        found[name] = relative(made.latents, exact.latents)
        assert np.isfinite(made.latents).all() and made.pixels.std() > 5, name
        assert made.recipe["precision"]["name"] == name == parse(name, on_gpu=True, kind=own).name
    print(f"{kind} {backend}:", ", ".join(f"{name} {error:.1e}" for name, error in found.items()))
    assert {name: error for name, error in found.items() if error > allowed(name, page, own)} == {}
    ordered = [found[name] for name in ("fp32", "fp16-upcast", "fp16-plain", "bf16-plain") if name in own.bases]
    assert ordered[0] == 0 and ordered == sorted(set(ordered))
