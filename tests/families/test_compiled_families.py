"""Every transformer's blocks are one graph each, without a break, and a compiled run draws what an eager one draws.

Torch's tracer runs, and no code is generated: what the graphs compute is checked, not how fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import FIRST, SEEN
from support.relative import relative

import qwenimg

SMALL: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "guidance": 3.0, "seed": 4}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [*FIRST.values(), "flux2-kv", "flux3-base"])  # whose networks are others
def test_a_compiled_run(tiny: dict[str, Path], kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced, compiled = [], torch.nn.Module.compile

    def trace(self: torch.nn.Module, **options: Any) -> None:
        traced.append(self)
        compiled(self, fullgraph=True, dynamic=True, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", trace)
    picture = {"image": SEEN} if kind == "flux2-kv" else {}  # its blocks have a way of references
    latents = []
    for mode in ("off", "on"):
        with qwenimg.load(tiny[kind], "cpu", precision, compile=mode) as pipe:
            latents.append(pipe("a red circle", **SMALL, **picture).latents)
    error = relative(latents[1], latents[0])
    print(f"{kind}, {precision}: {len(traced)} blocks, latents differ by {error:.1e}")
    assert len(traced) > 1 and error < (1e-5 if precision == "fp32" else 2e-2)
