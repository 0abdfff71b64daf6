"""Components of a model, opened as a run opens them, for tests that look at a network by itself."""

from __future__ import annotations

from typing import Any

from qwenimg import Pipeline
from qwenimg.common.runtime.stages import Split, Stage


def open_part(pipe: Pipeline, name: str, activations: int = 0) -> Any:
    """Return the network `name` (as stages call it) with `activations` bytes beside its weights. It stays in memory."""
    model: Any = pipe.model
    if name.startswith("vae "):
        component = model.vae._parts[name.removeprefix("vae ")]
    else:
        component = model.checkpoint[name.replace(" ", "_")]
    stage = Stage(name="test", resident=name, component=component, splits=(Split(activations=activations),))
    return model.residents.enter(stage)[0]


def network_of(pipe: Pipeline, name: str) -> Any:
    """Return the network `name` that is in memory, or None."""
    return pipe.model.residents._networks.get(name)
