"""Records a passport: draws one picture with a look at every block, then computes each block again in float64."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.block import Block
from qwenimg.common.base.version import __version__
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.parity.blocks import Part, network, parts, shapes_sum
from qwenimg.common.parity.judged import figures
from qwenimg.common.parity.parity import dtype_name
from qwenimg.common.parity.passport import MAX_GAIN, Given, Kept, Model, Passport, Picture, Recorded, Side
from qwenimg.common.parity.passport_schema import AskedJson
from qwenimg.common.parity.rerun import with_own
from qwenimg.common.parity.sample import TINY, Drawn, drawn_like, projected, rounded_otherwise, smaller
from qwenimg.common.parity.tape import Tape, taped
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.result import Result, Step
from qwenimg.common.precision.precision import Precision
from qwenimg.common.request.parts import PARTS
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Engine
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.traced import Call, Tree, Values, leaves, mapped
from qwenimg.common.weights.plan import LoadPlan

LARGE = 2**25  # parameters of a component: of such a model blocks' inputs and results are not kept whole
Notify = Callable[[str], None]
Exact = tuple["NDArray[np.float64] | None", float]


class Trace:
    """The last call of each block that came before `last` steps were done, the first where a step has several."""

    def __init__(self, checkpoint: Checkpoint, last: int, whole: Mapping[str, bool]):
        """whole: of each component, whether arguments are kept as they are, or what they are to be drawn like."""
        self.checkpoint, self.last, self.whole, self.done = checkpoint, last, whole, 0
        self.calls: dict[str, tuple[int, str, Call]] = {}

    def of(self, component: str) -> Look:
        return Look(self, component)

    def found(self) -> list[tuple[str, str, Call]]:
        """Component, name and call of each block, in the order of their first calls."""
        return [(component, name, call) for name, (_, component, call) in self.calls.items()]


class Look:
    """Of one component that is open."""

    def __init__(self, trace: Trace, component: str):
        self.trace, self.component = trace, component
        role = trace.checkpoint[component].role
        self.until = trace.last if role == "transformer" else 2**31

    def wants(self, path: str, block: Block) -> bool:
        seen = self.trace.calls.get(self._name(path, block))
        return self.trace.done <= self.until and (seen is None or seen[0] < self.trace.done)

    def take(self, call: Call) -> None:
        name = self._name(call.path, call.block)
        if not self.trace.whole[self.component]:
            stands: Any = tuple(_sampled(call, name))  # not of a backend: what is to be drawn in place of its arrays
            call = replace(call, arguments=stands, results=None)
        self.trace.calls[name] = (self.trace.done, self.component, call)

    def _name(self, path: str, block: Block) -> str:
        return f"{self.component}.{block.called(path)}"


class Watched:
    """An engine whose components show the calls of their blocks."""

    def __init__(self, engine: Engine, trace: Trace):
        self._engine, self._trace = engine, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def open(self, name: str, config: Any, plan: LoadPlan, precision: Precision) -> Any:
        opened = self._engine.open(name, config, plan, precision)
        blocks = network(self._trace.checkpoint[plan.component]).traced
        self._engine.watch(opened, blocks, self._trace.of(plan.component))
        return opened


@contextmanager
def watched(runtime: Runtime, trace: Trace) -> Iterator[None]:
    """What `runtime` opens meanwhile is traced."""
    engine = runtime.engine
    runtime.engine = Watched(engine, trace)
    try:
        yield
    finally:
        runtime.engine = engine


def record(
    pipe: Pipeline, asked: Mapping[str, Any], *, exact: Engine | None, sampled: bool = False, notify: Notify
) -> Passport:
    """Draws what `asked` says, `prompt` and LoRAs included, with `pipe`, which has nothing loaded yet.

    exact: an engine that computes in float64. sampled: inputs are drawn and results projected for small models too.
    Raises QwenimgError as a picture does."""
    asked = {**asked, "seed": pipe.check(**asked).seed}  # one for all runs, also where none was asked for
    checkpoint = with_loras(pipe, asked)
    found = parts(checkpoint, pipe.precision)
    small = all(part.plan.parameters < LARGE for part in found.values())
    whole = dict.fromkeys(found, small and not sampled)
    trace = Trace(checkpoint, int(asked["steps"]) // 2, whole)
    notify(f"drawing a picture on {pipe.device}")
    tape = Tape()
    with watched(pipe.runtime, trace):
        with taped(pipe, tape):
            result = _drawn(pipe, asked, trace)
        again = {**asked, "steps": 2, "strength": 0.5, "image": result.pixels}
        pipe(**again)  # for the VAE's encoder
    pipe.free_transformer()
    run = with_own(pipe, asked, tape.stations, notify)
    recorder = Recorder(found, whole, pipe.engine, exact, notify)
    blocks = recorder.blocks(trace.found())
    return Passport(
        version=__version__,
        created=datetime.now(UTC).replace(microsecond=0).isoformat(),
        model=model(pipe, asked),
        precision=pipe.precision.name,
        places=dict(result.recipe["precision"]),
        picture=_picture(pipe, asked, result),
        blocks=tuple(blocks),
        sides=(side(pipe.engine, pipe.tf32, [figures(found[block.component], block) for block in blocks]),),
        run=run,
    )


def _drawn(pipe: Pipeline, asked: Mapping[str, Any], trace: Trace) -> Result:
    for event in pipe.stream(**asked):
        if isinstance(event, Step):
            trace.done = event.index
    assert isinstance(event, Result)
    return event


def _picture(pipe: Pipeline, asked: Mapping[str, Any], result: Result) -> Picture:
    return Picture(
        asked=AskedJson(**{name: value for name, value in asked.items() if name != "lora"}).said(),  # which has paths
        sigmas=pipe.model.plan(pipe.check(**asked)).sigmas,
        noise=result.recipe["noise_sha256"],
        latents=result.latents,
        pixels=result.pixels,
    )


def with_loras(pipe: Pipeline, asked: Mapping[str, Any]) -> Checkpoint:
    """The weights of `pipe` with the LoRAs that `asked` has."""
    assert pipe.checkpoint is not None
    return pipe.checkpoint.with_deltas(pipe.loras.deltas(asked.get("lora", ""), asked.get("lora_mode", "auto")))


def model(pipe: Pipeline, asked: Mapping[str, Any]) -> Model:
    assert pipe.checkpoint is not None
    components, options = pipe.checkpoint.components.items(), pipe.options
    loras: dict[str, Any] = pipe.loras.recorded(asked.get("lora", ""))
    return Model(
        name=pipe.model_name,
        family=pipe.family,
        quantize=options.get("quantize", ""),
        fingerprints={name: fingerprint(component.plan.files) for name, component in components},
        shapes={name: shapes_sum(component.plan) for name, component in components},
        parts={part: options[part] for part in PARTS if part in options},
        prediction=options.get("prediction", ""),
        **loras,
    )


def side(engine: Engine, tf32: bool, found: Iterable[tuple[Any, ...]] = ()) -> Side:
    return Side(backend=engine.name, device=engine.device, versions=engine.versions(), tf32=tf32, figures=tuple(found))


class Recorder:
    """Makes of each call what a passport keeps of it."""

    def __init__(
        self,
        found: Mapping[str, Part],
        whole: Mapping[str, bool],
        engine: Engine | None,
        exact: Engine | None,
        notify: Notify,
    ):
        """whole: of each component, whether inputs and results are kept whole. engine: what computes each block again,
        alone; None keeps the results of the calls, which are another program's."""
        self.parts, self.whole, self.notify = found, whole, notify
        self.exact = {} if exact is None else {name: part.open(exact, "float64") for name, part in found.items()}
        self.engine = engine
        self.again = {} if engine is None else {name: part.open(engine) for name, part in found.items()}

    def blocks(self, calls: Iterable[tuple[str, str, Call]]) -> list[Recorded]:
        made, seen = [], set[tuple[str, str]]()  # of each kind with a norm, one also with a small input
        for component, name, call in calls:
            if not call.path and not self.whole[component]:
                continue  # of a large model no whole component is computed again
            self.notify(f"{name} in float64")
            made.append(self._recorded(component, name, call))
            kind = component, call.block.name
            if kind not in seen and self.engine is not None and self.parts[component].has_norm(call.path):
                seen.add(kind)
                stands: Any = small_streams(call)  # as where a call is taken
                small = replace(call, arguments=stands, results=None)
                made.append(self._recorded(component, f"{name} small", small))
        return made

    def _recorded(self, component: str, name: str, call: Call) -> Recorded:
        arguments: tuple[Given, ...] = call.arguments
        given = [values(argument) for argument in arguments]
        results, seen = call.results, Counter[str]()
        if self.engine is not None:
            with operations(self.engine) as seen:
                results = self.again[component].call(call.path, call.block, given)
        exact = self._exact(component, call, given, len(leaves(results)))
        kept = [self._kept(component, f"{name} {i}", made, exact[i]) for i, made in enumerate(leaves(results))]
        return Recorded(
            component=component,
            block=call.block.name,
            path=call.path,
            name=name,
            arguments=arguments,
            results=tuple(kept),
            operations=dict(seen),
        )

    def _exact(self, component: str, call: Call, given: list[Tree], results: int) -> list[Exact]:
        """Of each result, what float64 gives, and the gain."""
        if component not in self.exact:
            return [(None, 1.0)] * results
        seed = seed_of(f"{component}.{call.block.called(call.path)}")
        blocks = self.exact[component]
        exact = leaves(blocks.call(call.path, call.block, given))
        moved = [mapped(argument, lambda array: rounded_otherwise(array, seed)) for argument in given]
        changed = leaves(blocks.call(call.path, call.block, moved))
        return [
            (one.array, _gain(one.array, other.array, given[i], moved[i]) if i < max(1, call.block.streams) else 1.0)
            for i, (one, other) in enumerate(zip(exact, changed, strict=True))
        ]

    def _kept(self, component: str, name: str, made: Values, found: Exact) -> Kept:
        wide, gain = found
        about: dict[str, Any] = {"dtype": made.dtype, "shape": made.array.shape, "gain": gain}
        if self.whole[component]:
            return Kept(**about, values=made.array, exact=wide)
        seed = seed_of(name)
        exactly = None if wide is None else projected(wide, seed)
        return Kept(**about, values=projected(made.array.astype(np.float64), seed), seed=seed, exact=exactly)


def _gain(exact: NDArray[Any], changed: NDArray[Any], given: Tree, moved: Tree) -> float:
    """Times TINY that an update changes by. `given` and `moved`: the stream that it is for, before and after."""
    change, update = changed - exact, exact
    if isinstance(given, Values) and isinstance(moved, Values) and given.array.shape == exact.shape:
        change, update = change - (moved.array - given.array), exact - given.array
    length = float(np.linalg.norm(update))
    gain = float(np.linalg.norm(change)) / (TINY * length) if length and np.isfinite(length) else 1.0
    return min(max(1.0, gain), MAX_GAIN)


@contextmanager
def operations(engine: Engine) -> Iterator[Counter[str]]:
    """How many operations of each name and dtype of the result run meanwhile."""
    found: Counter[str] = Counter()

    def look(name: str, path: str, result: Array) -> None:
        found[f"{name} {dtype_name(result)}"] += 1

    with engine.observe(look):
        yield found


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


def _sampled(call: Call, name: str) -> Iterator[Given]:
    """What stands for the arguments. Whole numbers, masks and what is small stay as they are."""
    seeds = count(1)
    for i, argument in enumerate(call.arguments):
        axis = 1 if call.block.image and i == 0 and isinstance(argument, Values) and argument.array.ndim == 4 else -1

        def one(array: Values, axis: int = axis) -> Any:
            return drawn_like(array, seed_of(f"{name} argument {next(seeds)}"), axis) or array

        yield mapped(argument, one)


def small_streams(call: Call) -> tuple[Given, ...]:
    """Return the arguments of `call` with what is normalised first made so small that a norm's epsilon shows."""
    arguments: tuple[Given, ...] = call.arguments
    count = max(1, call.block.streams)
    return tuple(
        smaller(one) if i < count and isinstance(one, Values | Drawn) else one for i, one in enumerate(arguments)
    )


def values(given: Given) -> Tree:
    """An argument as it is computed with."""
    if isinstance(given, tuple):
        return tuple(values(part) for part in given)
    return given.values() if isinstance(given, Drawn) else given
