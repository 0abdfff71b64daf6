"""The processor that a test expects: its instructions decide in which dtype a CPU computes, so what fits there."""

from __future__ import annotations

import pytest


@pytest.fixture
def multiplies_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Make the probes say that the CPU has instructions for bfloat16, or none where the parameter is False."""
    import torch

    from qwenimg.backends import paper
    from qwenimg.backends.torch.ops import cpu

    has = bool(getattr(request, "param", True))
    multiplied = {torch.float32, torch.float64} | ({torch.bfloat16} if has else set())
    monkeypatch.setattr(cpu, "_multiplies", lambda dtype, device: device != "cpu" or dtype in multiplied)
    monkeypatch.setattr(paper, "_multiplies_bf16", lambda: has)
    return has
