"""Components of a model, opened as a run opens them, for tests that look at a network by itself."""

from __future__ import annotations

from typing import Any

from qwenimg import Pipeline
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.weights import streaming


def open_part(pipe: Pipeline, name: str, activations: int = 0) -> Any:
    """Return the network `name` (as stages call it) with `activations` bytes beside its weights. It stays in memory."""
    model: Any = pipe.model
    if name.startswith("vae "):
        component = model.vae._parts[name.removeprefix("vae ")]
    else:
        component = model.checkpoint[name.replace(" ", "_")]
    stage = Stage(name="test", resident=name, component=component, splits=(Split(activations=activations),))
    return model.residents.acquire(stage)[0]


def network_of(pipe: Pipeline, name: str) -> Any:
    """Return the network `name` that is in memory, or None."""
    return pipe.model.residents._networks.get(name)


def stream_half(pipe: Pipeline) -> None:
    """Stream half of the transformer's blocks, and none of another part."""
    component: Any = pipe.model.checkpoint["transformer"]  # type: ignore[attr-defined]
    blocks = streaming.blocks(pipe.runtime.load_plan(component), component.streamable)
    half = sum(entry.nbytes for block in blocks.values() for entry in block) // 2
    room, fitted = (
        streaming.peak_weight_bytes(pipe.runtime.load_plan(component), None) - half,
        pipe.runtime.with_streaming,
    )
    patched: Any = pipe.runtime
    patched.max_memory = 2**40
    patched.with_streaming = lambda part, _: fitted(part, room if part.role == "transformer" else 0)
