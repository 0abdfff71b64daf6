"""Recording of a passport: generate one image, observe every block, then compute each again in float64."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.block import Block
from qwenimg.common.base.version import __version__
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.parity import inputs, writing
from qwenimg.common.parity.blocks import ComponentPolicy, modules, name_of, network, parts, shapes_sum
from qwenimg.common.parity.judged import figures
from qwenimg.common.parity.parity import dtype_name
from qwenimg.common.parity.passport.passport import (
    MAX_GAIN,
    Argument,
    Model,
    Passport,
    Recorded,
    RecordedCall,
    RecordedImage,
    RecordedResult,
    Side,
)
from qwenimg.common.parity.rerun import with_own
from qwenimg.common.parity.sample import (
    SEEN,
    Drawn,
    called,
    drawn_like,
    equal_rows,
    projected,
    rounded_otherwise,
    smaller,
)
from qwenimg.common.parity.tape import ENCODE, Tape, taped
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.result import Result, Step
from qwenimg.common.request.parts import PARTS
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Array, Engine
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.traced import TINY, Call, Dtype, Tree, Values, leaves, mapped

MOST_EQUAL = 64  # equal rows of a text that is stored whole
LARGE = 2**25  # parameters of a component; for a larger model, whole inputs and results of blocks are not stored
Notify = Callable[[str], None]
Exact = tuple["NDArray[np.float64] | None", float]


class Trace:
    """The last call of each block before `last` steps are done; if a step has several, its first."""

    def __init__(self, checkpoint: Checkpoint, last: int, whole: Mapping[str, bool]):
        """Prepare a trace. whole: for each component, whether to store arguments, or descriptions of random ones."""
        self.checkpoint, self.last, self.whole, self.done = checkpoint, last, whole, 0
        self.calls: dict[str, tuple[int, str, Call]] = {}

    def of(self, component: str) -> BlockRecorder:
        return BlockRecorder(self, component)

    def found(self) -> list[tuple[str, str, Call]]:
        """Return component, name and call of each block, in the order of their first calls."""
        return [(component, name, call) for name, (_, component, call) in self.calls.items()]


class BlockRecorder:
    """The observer of one open component."""

    def __init__(self, trace: Trace, component: str):
        self.trace, self.component = trace, component
        self.denoises = trace.checkpoint[component].role == "transformer"
        is_first = trace.checkpoint[component] is trace.checkpoint.denoisers[0]
        self.until = trace.last if is_first else 2**31  # a second denoiser's steps come after all of these
        self.modules = modules(trace.checkpoint[component].plan)

    def wants(self, path: str, block: Block) -> bool:
        if path not in self.modules:  # without weights: an activation among the layers of a list
            return False
        seen = self.trace.calls.get(self._name(path, block))
        return self.trace.done <= self.until and (seen is None or seen[0] < self.trace.done)

    def take(self, call: Call) -> None:
        """Keep the call without the arguments of control networks: the block is computed again without them."""
        name = self._name(call.path, call.block)
        call = replace(call, arguments=tuple(one for one in call.arguments if not _is_control(one)))
        stand_ins: Any = None  # descriptions of random arrays, no arrays of a backend
        if not self.trace.whole[self.component]:
            stand_ins = tuple(_sampled(call, name))
        elif self.denoises:
            stand_ins = _varied(call, name)
        if stand_ins is not None:
            call = replace(call, arguments=stand_ins, results=None)
        self.trace.calls[name] = (self.trace.done, self.component, call)

    def _name(self, path: str, block: Block) -> str:
        return f"{self.component}.{block.called(path)}"


def _is_control(argument: object) -> bool:
    """Return whether an argument is the changes of control networks: functions, or what is no `Tree`."""
    if isinstance(argument, tuple):
        return any(map(_is_control, argument))
    return not isinstance(argument, Values | Dtype | float | int | None)


@contextmanager
def watched(runtime: Runtime, trace: Trace) -> Iterator[None]:
    """Observe the components that `runtime` opens within the context."""

    def watch(component: Component, opened: Any) -> Any:
        name = name_of(component.plan, trace.checkpoint.components)
        runtime.engine.watch(opened, network(trace.checkpoint[name]).traced, trace.of(name))
        return opened

    runtime.observers.append(watch)
    try:
        yield
    finally:
        runtime.observers.remove(watch)


def record(
    pipe: Pipeline, asked: Mapping[str, Any], *, exact: Engine | None, sampled: bool = False, notify: Notify
) -> Passport:
    """Generate an image with the arguments `asked` (prompt, LoRAs, and what `inputs.read` returns), and record it.
    `pipe` has loaded nothing yet. exact: an engine that computes in float64. sampled: for small models too, replace
    inputs by random arrays and results by projections. Raises QwenimgError."""
    if pipe.model.inputs.fewest:
        asked = {"pictures": min(pipe.model.inputs.most, len(SEEN)), **asked}
    if "mask" in asked and "pictures" in asked:
        asked = {"strength": pipe.defaults.mask_strength, **asked}
    asked = {**asked, "seed": pipe.check(**called(asked)).seed}  # the same for all runs, even without one in `asked`
    checkpoint = inputs.weights(pipe, asked)
    policies = parts(checkpoint, pipe.precision)
    small = all(part.plan.parameters < LARGE for part in policies.values())
    whole = dict.fromkeys(policies, small and not sampled)
    trace = Trace(checkpoint, int(asked["steps"]) // 2, whole)
    notify(f"drawing a picture on {pipe.device}")
    tape = Tape()
    with watched(pipe.runtime, trace):
        with taped(pipe, tape):
            result = _drawn(pipe, called(asked), trace)
        seen = any(station.name.startswith(ENCODE) for station in tape.stations)
        if not seen and pipe.model.vae.has_encoder:
            again = {**asked, "steps": 2, "strength": 0.5, "image": result.pixels}
            pipe(**again)  # for the VAE's encoder
    pipe.free_transformer()
    run = with_own(pipe, called(asked), tape.stations, notify)
    recorder = Recorder(policies, whole, pipe.engine, exact, notify)
    blocks = recorder.blocks(trace.found())
    speaking = None if exact is None else writing.part(checkpoint, pipe.precision)
    if speaking is not None and exact is not None:
        notify("a text in float64")
    return Passport(
        version=__version__,
        created=datetime.now(UTC).replace(microsecond=0).isoformat(),
        model=model(pipe, asked),
        precision=pipe.precision.name,
        places=dict(result.recipe["precision"]),
        picture=_picture(pipe, asked, result),
        blocks=tuple(blocks),
        sides=(side(pipe.engine, pipe.tf32, [figures(policies[block.component], block) for block in blocks]),),
        run=run,
        writing=None if speaking is None or exact is None else writing.record(pipe.model.residents, *speaking, exact),
    )


def _drawn(pipe: Pipeline, asked: Mapping[str, Any], trace: Trace) -> Result:
    for event in pipe.stream(**asked):
        if isinstance(event, Step):
            trace.done = event.index
    assert isinstance(event, Result)
    return event


def _picture(pipe: Pipeline, asked: Mapping[str, Any], result: Result) -> RecordedImage:
    return RecordedImage(
        asked=RecordedCall(**{name: value for name, value in asked.items() if name not in inputs.FILES}).keywords(),
        sigmas=pipe.model.plan(pipe.check(**called(asked))).sigmas,
        noise=result.recipe["noise_sha256"],
        latents=result.latents,
        pixels=result.pixels,
        controls=inputs.recorded_controls(pipe, asked),
        mask=asked.get("mask"),
        embeddings=inputs.recorded_embeddings(pipe.check(**called(asked)), pipe),
    )


def model(pipe: Pipeline, asked: Mapping[str, Any]) -> Model:
    assert pipe.checkpoint is not None
    components, options = pipe.checkpoint.components.items(), pipe.options
    loras: dict[str, Any] = pipe.loras.recorded(asked.get("lora", ()))
    return Model(
        name=pipe.model_name,
        family=pipe.family,
        quantize=options.get("quantize", ""),
        fingerprints={name: fingerprint(component.plan.files) for name, component in components},
        shapes={name: shapes_sum(component.plan) for name, component in components},
        parts={part: options[part] for part in PARTS if part in options},
        prediction=options.get("prediction", ""),
        lora=loras.get("lora", ""),
        lora_fingerprints=tuple(loras.get("lora_fingerprints", ())),
    )


def side(engine: Engine, tf32: bool, rows: Iterable[tuple[Any, ...]] = ()) -> Side:
    return Side(backend=engine.name, device=engine.device, versions=engine.versions(), tf32=tf32, figures=tuple(rows))


class Recorder:
    """A converter of calls to the records of a passport."""

    def __init__(
        self,
        policies: Mapping[str, ComponentPolicy],
        whole: Mapping[str, bool],
        engine: Engine | None,
        exact: Engine | None,
        notify: Notify,
    ):
        """Open the components. whole: for each component, whether inputs and results are stored whole. engine: computes
        each block again, alone; None keeps the results of the calls, which are another program's."""
        self.parts, self.whole, self.notify = policies, whole, notify
        self.exact = {} if exact is None else {name: part.open(exact, "float64") for name, part in policies.items()}
        self.engine = engine
        self.again = {} if engine is None else {name: part.open(engine) for name, part in policies.items()}

    def blocks(self, calls: Iterable[tuple[str, str, Call]]) -> list[Recorded]:
        """Return the records of `calls`. For each kind of block with a norm there is one more, with a small input."""
        records, with_small = [], set[tuple[str, str]]()
        for component, name, call in calls:
            if not self.whole[component] and self.parts[component].is_whole(call.block, call.path):
                continue  # of a large model, they are not computed again
            self.notify(f"{name} in float64")
            records.append(self._recorded(component, name, call))
            kind = component, call.block.name
            if kind not in with_small and self.engine is not None and self.parts[component].has_norm(call.path):
                with_small.add(kind)
                stand_ins: Any = small_streams(call)
                small = replace(call, arguments=stand_ins, results=None)
                records.append(self._recorded(component, f"{name} small", small))
        return records

    def _recorded(self, component: str, name: str, call: Call) -> Recorded:
        arguments: tuple[Argument, ...] = call.arguments
        arrays = [values(argument) for argument in arguments]
        results, counts = call.results, Counter[str]()
        if self.engine is not None:
            with operations(self.engine) as counts:
                results = self.again[component].call(call.path, call.block, arrays)
        exact = self._exact(component, call, arrays, len(leaves(results)))
        recorded = [self._kept(component, f"{name} {i}", result, exact[i]) for i, result in enumerate(leaves(results))]
        return Recorded(
            component=component,
            block=call.block.name,
            path=call.path,
            name=name,
            arguments=arguments,
            results=tuple(recorded),
            operations=dict(counts),
        )

    def _exact(self, component: str, call: Call, given: list[Tree], results: int) -> list[Exact]:
        """Return the float64 value and the gain of each result. The gain is the effect of rounding the arguments, or
        the weights, in another way: rounding of weights also shows what rounds inside the block, and grows with the
        updates as the limit does."""
        if component not in self.exact:
            return [(None, 1.0)] * results
        seed = seed_of(f"{component}.{call.block.called(call.path)}")
        blocks = self.exact[component]
        exact = leaves(blocks.call(call.path, call.block, given))
        moved = [mapped(argument, lambda array: rounded_otherwise(array, seed)) for argument in given]
        changed = leaves(blocks.call(call.path, call.block, moved))
        reweighted = leaves(blocks.call(call.path, call.block, given, seed))
        root = self.parts[component].updates(call.block, call.path) ** 0.5
        gained: list[Exact] = []
        for i, one in enumerate(exact):
            before, after = (given[i], moved[i]) if i < call.block.streams else (None, None)
            by_arguments = _change(one.array, changed[i].array, before, after)
            by_weights = _change(one.array, reweighted[i].array, before, before) / root
            gained.append((one.array, min(max(1.0, by_arguments, by_weights), MAX_GAIN)))
        return gained

    def _kept(self, component: str, name: str, result: Values, exact: Exact) -> RecordedResult:
        wide, gain = exact
        about: dict[str, Any] = {"dtype": result.dtype, "shape": result.array.shape, "gain": gain}
        if self.whole[component]:
            return RecordedResult(**about, values=result.array, exact=wide)
        seed = seed_of(name)
        exactly = None if wide is None else projected(wide, seed)
        return RecordedResult(
            **about, values=projected(result.array.astype(np.float64), seed), seed=seed, exact=exactly
        )


def _change(exact: NDArray[Any], changed: NDArray[Any], given: Tree, moved: Tree) -> float:
    """Return an update's relative change in units of TINY. `given` and `moved`: its stream before and after."""
    change, update = changed - exact, exact
    if isinstance(given, Values) and isinstance(moved, Values) and given.array.shape == exact.shape:
        change, update = change - (moved.array - given.array), exact - given.array
    length = float(np.linalg.norm(update))
    return float(np.linalg.norm(change)) / (TINY * length) if length and np.isfinite(length) else 1.0


@contextmanager
def operations(engine: Engine) -> Iterator[Counter[str]]:
    """Count the operations within the context, by name and dtype of the result."""
    counts: Counter[str] = Counter()

    def look(name: str, path: str, result: Array) -> None:
        counts[f"{name} {dtype_name(result)}"] += 1

    with engine.observe(look):
        yield counts


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


def _sampled(call: Call, name: str) -> Iterator[Argument]:
    """Yield the arguments, the large ones replaced by random arrays; whole numbers and masks stay unchanged."""
    seeds = count(1)
    for i, argument in enumerate(call.arguments):
        axis = 1 if call.block.image and i == 0 and isinstance(argument, Values) and argument.array.ndim == 4 else -1

        def one(array: Values, axis: int = axis) -> Any:
            return drawn_like(array, seed_of(f"{name} argument {next(seeds)}"), axis) or array

        yield mapped(argument, one)


def _varied(call: Call, name: str) -> tuple[Argument, ...] | None:
    """Return the arguments with padded texts (many equal rows) replaced by random arrays; None if there is no such
    argument. Equal rows round the same way, and attention adds their errors up: on correct machines these are 4 to 10
    times the errors of other texts, and the gain does not predict them."""
    drawn = {
        i: drawn_like(argument, seed_of(f"{name} argument {i}"))
        for i, argument in enumerate(call.arguments)
        if _repeats(argument)
    }
    return tuple(drawn.get(i) or argument for i, argument in enumerate(call.arguments)) if drawn else None


def _repeats(argument: object) -> TypeGuard[Values]:
    """Return whether many but not all rows of an argument [B L C] are equal (padding)."""
    if not isinstance(argument, Values) or argument.array.ndim != 3:
        return False
    return MOST_EQUAL < equal_rows(argument) < int(argument.array.shape[1])


def small_streams(call: Call) -> tuple[Argument, ...]:
    """Return the arguments of `call` with the normalized ones scaled down, so far that a norm's epsilon matters."""
    arguments: tuple[Argument, ...] = call.arguments
    count = max(1, call.block.streams)
    return tuple(
        smaller(one) if i < count and isinstance(one, Values | Drawn) else one for i, one in enumerate(arguments)
    )


def values(given: Argument) -> Tree:
    """Return an argument with the values of its random arrays."""
    if isinstance(given, tuple):
        return tuple(values(part) for part in given)
    return given.values() if isinstance(given, Drawn) else given
