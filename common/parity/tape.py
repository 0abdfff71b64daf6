"""Recording of a run's stations while a pipeline generates, and continuation from the recorded outputs of each.

Stations are at places where machines agree, however many branches of guidance they compute in a batch: the calls of the
text encoders and of what sees pictures in them, of IP-Adapters, Reduxes and their image encoders, of the denoiser with
guidance applied, and of the VAE, the rows of the denoiser's time, its text where a Redux makes a part of it, and the
changes by control networks after each of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.block import Block
from qwenimg.common.networks.encoders import clip_vision, ip_adapter, redux, siglip_vision
from qwenimg.common.numbers.noise import TorchCPUGenerator
from qwenimg.common.parity import inputs
from qwenimg.common.parity.blocks import name_of, network
from qwenimg.common.parity.sample import PROJECTIONS, projected
from qwenimg.common.parity.stations import Arrays, Station
from qwenimg.common.parts.control_net import Redux
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel, PreparedRun
from qwenimg.common.pipeline.models.flow_model import Controlling
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.steps.denoiser import Denoiser
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.engine import Array, Control, Engine
from qwenimg.common.runtime.traced import Call, leaves

ENCODE, DECODE = "vae.encode", "vae.decode"  # of each picture that the model sees; the last station, or of each layer


class Tape:
    """The stations of one run in their order. With recorded stations, the run continues with their outputs."""

    def __init__(self, recorded: Sequence[Station] = ()):
        self.recorded = {station.name: station for station in recorded}
        self._passed: dict[str, Station] = {}
        self._counts: dict[str, int] = {}
        self.running = False  # components stay open, and report calls, after the run

    @property
    def stations(self) -> tuple[Station, ...]:
        return tuple(self._passed.values())

    def passed(self, kind: str, inputs: Sequence[Any], outputs: Arrays) -> Arrays | None:
        """Record a station of a kind that comes several times. Return the outputs to continue with, or None."""
        if not self.running:
            return None
        self._counts[kind] = count = self._counts.get(kind, 0) + 1
        name = kind if kind == DECODE and count == 1 else f"{kind} {count}"
        self._passed[name] = Station(name=name, inputs=_copied(inputs), outputs=_copied(outputs))
        then = self.recorded.get(name)
        fits = then is not None and [one.shape for one in then.outputs] == [one.shape for one in outputs]
        return then.outputs if then is not None and fits else None

    def rows(self, name: str, rows: NDArray[Any]) -> None:
        """Record rows that enter the network at `name`, each once however many branches are in a batch."""
        if not self.running:
            return
        before = self._passed.get(name)
        distinct = [] if before is None else list(before.inputs[0])
        for row in rows.reshape(-1, rows.shape[-1]):
            distinct += [] if distinct and np.array_equal(distinct[-1], row) else [row]
        self._passed[name] = Station(name=name, inputs=(np.stack(distinct),))


def _copied(arrays: Sequence[Any]) -> Arrays:
    """Copy arrays, since a later step may write over them."""
    return tuple(np.array(array) for array in arrays)


@contextmanager
def taped(pipe: Pipeline, tape: Tape) -> Iterator[None]:
    """Record on `tape` the runs of `pipe` within the context. Prompts are always encoded."""
    model, runtime, prompts = pipe.model, pipe.runtime, pipe.runtime.prompts
    assert pipe.checkpoint is not None
    parts = pipe.checkpoint.components

    def station(component: Component, opened: Any) -> Any:
        """Return `opened` as a station, or a denoiser that reports the rows of its time and a Redux's text."""
        name = name_of(component.plan, {**parts, **inputs.control_networks(model)})
        if component.role == "text":
            return _ENCODERS.get(component.network, _TextEncoder)(opened, runtime.engine, tape, name)
        if component.role == "vae":
            return _VAE(opened, tape)
        times = [block for block in network(component).traced if block.name == "time"]
        runtime.engine.watch(opened, times, _Times(tape, name))
        if any(isinstance(net, Redux) for net in model.nets.values()):
            starts = [block for block in network(component).traced if block.name == "start"]
            runtime.engine.watch(opened, starts, _Texts(tape, name))
        return opened

    observed: Any = _Model(model, tape)
    pipe.model, runtime.prompts = observed, None
    runtime.observers.append(station)
    tape.running = True
    try:
        yield
    finally:
        tape.running = False
        runtime.observers.remove(station)
        pipe.model, runtime.prompts = model, prompts


# Places where a run is observed


class _TextEncoder:
    def __init__(self, opened: Any, engine: Engine, tape: Tape, name: str):
        self._opened, self._engine, self._tape, self._name = opened, engine, tape, name

    def slots(self, patches: NDArray[Any], *size: int) -> Any:
        """Return the slots of a picture. Its patches have the same bits everywhere, and are many: only their size is
        kept."""
        result = self._opened.slots(patches, *size)
        recorded = self._tape.passed(f"{self._name} picture", [np.asarray(size)], (self._engine.numpy(result),))
        return result if recorded is None else self._engine.array(recorded[0].copy())

    def encode(self, ids: Any, *rest: Any) -> Any:
        result = self._opened.encode(ids, *rest)
        arrays = result if isinstance(result, tuple) else (result,)
        # behind the numbers are slots of pictures, recorded before, places and vectors of textual inversion, or states
        count = 0 if rest and isinstance(rest[0], np.ndarray) else 3
        numbers, vectors = (rest[:1], rest[1:1]) if hasattr(self._opened, "slots") else (rest[:count], rest[count:])
        inputs = [np.asarray(ids, np.int64), *(np.asarray(one, np.int64) for one in numbers), *vectors]
        recorded = self._tape.passed(self._name, inputs, tuple(map(self._engine.numpy, arrays)))
        if recorded is None:
            return result
        states = tuple(self._engine.array(one.copy()) for one in recorded)
        return states if isinstance(result, tuple) else states[0]


class _ImageEncoder:
    def __init__(self, opened: Any, engine: Engine, tape: Tape, name: str):
        self._opened, self._engine, self._tape, self._name = opened, engine, tape, name

    def encode(self, patches: NDArray[Any]) -> Any:
        """Return the states of pictures, CLIP's embeddings too. Their patches are many: projections of each picture are
        kept."""
        result = self._opened.encode(patches)
        arrays = result if isinstance(result, tuple) else (result,)
        recorded = self._tape.passed(self._name, [_projections(patches)], tuple(map(self._engine.numpy, arrays)))
        if recorded is None:
            return result
        continued = tuple(self._engine.array(one.copy()) for one in recorded)
        return continued if isinstance(result, tuple) else continued[0]


class _Redux:
    def __init__(self, opened: Any, engine: Engine, tape: Tape, name: str):
        self._opened, self._engine, self._tape, self._name = opened, engine, tape, name

    def tokens(self, states: NDArray[Any]) -> Array:
        """Return the text tokens of pictures. Of their states projections of each picture are kept."""
        made: Array = self._opened.tokens(states)
        recorded = self._tape.passed(self._name, [_projections(states)], (self._engine.numpy(made),))
        return made if recorded is None else self._engine.array(recorded[0].copy())


class _IPAdapter:
    def __init__(self, opened: Any, engine: Engine, tape: Tape, name: str):
        self._opened, self._engine, self._tape, self._name = opened, engine, tape, name

    def pairs(self, features: NDArray[Any], empty: NDArray[Any]) -> list[tuple[Array, Array]]:
        """Return keys and values in each cross attention. They are many: projections of each row are kept."""
        pairs: list[tuple[Array, Array]] = self._opened.pairs(features, empty)
        outputs = np.stack([_projections(self._engine.numpy(one)) for pair in pairs for one in pair])
        self._tape.passed(self._name, [_projections(features), _projections(empty)], (outputs,))
        return pairs


def _projections(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return seeded random projections of each row of an array."""
    return np.stack([projected(row.astype(np.float64), 0) for row in rows])


_ENCODERS: dict[str, type[_ImageEncoder | _IPAdapter | _Redux]] = {
    clip_vision.NETWORK.name: _ImageEncoder,
    siglip_vision.NETWORK.name: _ImageEncoder,
    ip_adapter.NETWORK.name: _IPAdapter,
    redux.NETWORK.name: _Redux,
}


class _VAE:
    def __init__(self, opened: Any, tape: Tape):
        self._opened, self._tape = opened, tape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def decode(self, latents: NDArray[Any], tile: int | None = None) -> NDArray[Any]:
        pixels: NDArray[Any] = self._opened.decode(latents, tile)
        recorded = self._tape.passed(DECODE, [latents], (pixels,))
        return pixels if recorded is None else recorded[0].copy()

    def encode(self, pixels: NDArray[Any], tile: int | None = None) -> NDArray[Any]:
        """Return the latents of a picture. Its pixels have the same bits everywhere: only their shape is kept."""
        moments: NDArray[Any] = self._opened.encode(pixels, tile)
        recorded = self._tape.passed(ENCODE, [np.asarray(pixels.shape)], (moments,))
        return moments if recorded is None else recorded[0].copy()


class _Times:
    """An observer of the rows with the time, and with SDXL's sizes."""

    def __init__(self, tape: Tape, component: str):
        self._tape, self._component = tape, component

    def wants(self, path: str, block: Block) -> bool:
        return True

    def take(self, call: Call) -> None:
        rows = leaves(call.arguments[0])[0]
        self._tape.rows(f"{self._component}.{call.path}", rows.array)


class _Texts:
    """An observer of the text that enters the denoiser, of each branch: of its states projections are kept."""

    def __init__(self, tape: Tape, component: str):
        self._tape, self._component = tape, component

    def wants(self, path: str, block: Block) -> bool:
        return path == "context_embedder"

    def take(self, call: Call) -> None:
        self._tape.passed(f"{self._component} text", [_projections(leaves(call.arguments[0])[0].array)], ())


class _Model:
    """A model that records a station at each call of its denoiser."""

    def __init__(self, model: DiffusionModel, tape: Tape):
        self._model, self._tape = model, tape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @contextmanager
    def prepare(self, *asked: Any) -> Iterator[Any]:
        with self._model.prepare(*asked) as run:
            yield _Run(run, self._tape, self._model)


class _Run:
    def __init__(self, run: PreparedRun, tape: Tape, model: DiffusionModel):
        self._run, self._tape, self._model, self._engine = run, tape, model, model.runtime.engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def denoiser(self, *asked: Any) -> Any:
        denoiser = self._run.denoiser(*asked)
        if denoiser.control is not None and self._model.controls is not None and self._model.controls.by_block:
            network = next(iter(inputs.control_networks(self._model).values()))
            denoiser.control = _Controlling(denoiser.control, network.config.dim, self._tape, self._engine)
        return _Denoiser(denoiser, self._tape, self._engine)


class _Controlling:
    """Records the changes by control networks: seeded random projections of each block's change, of one stream for all
    blocks, since patches depend on the stream."""

    def __init__(self, control: Controlling, width: int, tape: Tape, engine: Engine):
        self._control, self._width, self._tape, self._engine = control, width, tape, engine

    def __call__(self, x: Array, sigma: float) -> Control:
        changes = self._control(x, sigma)
        drawn = TorchCPUGenerator(0).normal((1, x.shape[1], self._width))
        behind = [self._projected(some, self._engine.array(drawn)) for some in changes or ()]
        self._tape.passed("control", [np.asarray(sigma)], (np.stack(behind),) if behind else ())
        return changes

    def _projected(self, changes: Sequence[Any], stream: Array) -> NDArray[np.float64]:
        """Return the projections of the summed changes after one block."""
        values = (projected(self._engine.numpy(change(stream)).astype(np.float64), 0) for change in changes)
        return sum(values, np.zeros(PROJECTIONS))


class _Denoiser:
    def __init__(self, denoiser: Denoiser, tape: Tape, engine: Engine):
        self._denoiser, self._tape, self._engine = denoiser, tape, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._denoiser, name)

    def __call__(self, x: Array, sigma: float) -> Array:
        denoised = self._denoiser(x, sigma)
        recorded = self._tape.passed("step", [self._engine.numpy(x), sigma], (self._engine.numpy(denoised),))
        return denoised if recorded is None else self._engine.array(recorded[0].copy())
