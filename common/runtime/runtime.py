"""Components on an engine: checked to fit before they are loaded, timed, and probed where a value is not finite."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.base.errors import DoesNotFit, NumericsError
from qwenimg.common.memory import beside
from qwenimg.common.precision import precision as policies
from qwenimg.common.precision import presets
from qwenimg.common.precision.ladder import advice
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.presets import Choice
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Array, Engine
from qwenimg.common.runtime.probe import NotFinite, Overflow, first_non_finite
from qwenimg.common.runtime.text_store import TextStore
from qwenimg.common.weights import streaming
from qwenimg.common.weights.finite import check_values
from qwenimg.common.weights.plan import LoadPlan

Notify = Callable[[str, str], None]

WEIGHTS = 0.8  # of what is free: what a preset's choice of bits leaves is for a step
# Of --max-memory, what a plan does not count: tokenizers, Python's objects, what allocators keep. 10 to 40 MB measured.
UNPLANNED, UNPLANNED_SHARE = 64 * 10**6, 1 / 8


def plannable(max_memory: int) -> int:
    """Bytes of --max-memory that a plan may use."""
    return max_memory - min(UNPLANNED, int(UNPLANNED_SHARE * max_memory))


def limit_for(planned: int) -> int:
    """The least --max-memory of which a plan may use so many bytes."""
    return min(planned + UNPLANNED, ceil(planned / (1 - UNPLANNED_SHARE)) + 1)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Options of a run that are to be others; None: as they are."""

    precision: str | None = None
    quantize: str | None = None  # "": without it
    max_memory: int | None = None
    converted: bool | None = None  # whether `quantize` was done once by `qwenimg convert`: to be asked what it needs


class Clock:
    """Seconds by stage since it was last cleared."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(stage, time.perf_counter() - start)

    def clear(self) -> None:
        self.seconds = {}


class Runtime:
    """An engine with a precision: loads within the memory there is. `notify(kind, text)` reports stages."""

    def __init__(
        self,
        engine: Engine,
        precision: Precision,
        notify: Notify,
        choice: Choice | None = None,
        max_memory: int | None = None,
        quantize: str | None = None,
    ):
        """choice: the preset, and why it was chosen. max_memory: bytes that a run is to stay below; blocks are then
        streamed where they do not all fit, as they are with a preset that asks for it. quantize: the codes that the
        weights were asked to be kept in."""
        self.engine, self.precision, self.notify, self.max_memory = engine, precision, notify, max_memory
        self.quantize = quantize
        self.choice = choice or Choice(preset="", precision=precision.name)
        self.clock = Clock()
        self.compiles: bool | None = None  # whether the denoiser is when it is opened; None is the engine's usual
        self.prompts: TextStore | None = None  # encoded ones that are kept on the disk
        self._held = 0  # bytes that another run on this engine holds, and would give up for this one

    def changed(self, checkpoint: Checkpoint, change: Change, held: int) -> tuple[Runtime, Checkpoint]:
        """What a run with other options would have, in place of this one, which holds so many bytes: policy and bits
        are chosen anew where they were not asked for. It loads and reports nothing."""
        bits = (self.quantize if change.quantize is None else change.quantize) or None
        limit = self.max_memory if change.max_memory is None else change.max_memory
        choice, policy, held = self.choice, self.precision, held + self._held
        if change.precision is not None or change.quantize is not None or choice.wishes.bits:
            checkpoint = checkpoint.as_stored()
            checkpoint = checkpoint if bits is None else checkpoint.quantised(bits)
            checkpoint = checkpoint.converted() if change.converted else checkpoint
            choice, policy = self._chosen(checkpoint, change.precision, held)
        found = Runtime(self.engine, policy, lambda kind, text: None, choice, limit, bits)
        found.prompts, found._held = self.prompts, held
        return found, found.reduced(checkpoint)

    def _chosen(self, checkpoint: Checkpoint, precision: str | None, held: int) -> tuple[Choice, Precision]:
        """As it is chosen for a run of `checkpoint` with `precision` or with what this run was asked for."""
        now, engine, kind = self.choice, self.engine, self.precision.kind
        asked = precision or (now.asked if now.asked and not now.fallback else self.precision.name)
        free = engine.free_memory() + held
        choice = presets.choose(now.preset or presets.AUTO, asked, kind, engine.facts, checkpoint.largest, free)
        return choice, policies.parse(choice.precision, on_gpu=engine.on_gpu, kind=kind)

    @property
    def streams(self) -> bool:
        return self.max_memory is not None or self.choice.wishes.tiled

    def room(self, loaded: int) -> int:
        """Bytes that a run may take, where `loaded` are taken already."""
        free = self.free(loaded)
        return free if self.max_memory is None else min(free, plannable(self.max_memory))

    def free(self, loaded: int) -> int:
        """The same on this device without --max-memory."""
        return self.engine.free_memory() + loaded + self._held

    def room_text(self, room: int) -> str:
        """The `room` of a run in a message, with what limits it."""
        if self.max_memory is None or room != plannable(self.max_memory):
            return self.free_text(room)
        return f"--max-memory {size_text(self.max_memory)} leaves {size_text(room)}"

    def free_text(self, free: int) -> str:
        _, limit = self.engine.machine()
        return f"{size_text(free)} are free on {self.engine.device}" + (f" under {limit}" if limit else "")

    def reduced(self, checkpoint: Checkpoint) -> Checkpoint:
        """`checkpoint` with its weights in the preset's bits, where they leave too little room as they are and enough
        so. Where neither does, they stay as they are: blocks whose codes are made while loading are not streamed."""
        room = int(WEIGHTS * self.room(0))
        if self.quantize is not None or not self.choice.wishes.bits or checkpoint.largest(self.precision) <= room:
            return checkpoint
        smaller = checkpoint.quantised(self.choice.wishes.bits)
        return smaller if smaller.largest(self.precision) <= room else checkpoint

    def fitted(self, component: Component, room: int) -> Component:
        """`component` with as few of its blocks streamed as leave its weights `room` bytes, where this run streams."""
        if not self.streams:
            return component
        whole = self.plan(component)
        plan = streaming.fitting(whole, component.streamable, room, self.engine.workspace.moved)
        return component if plan is whole else replace(component, plan=plan)

    def keep_prompts(self) -> None:
        """Keeps encoded prompts on the disk, and takes those that are there."""
        self.prompts = TextStore(self)

    # Loading

    def open(self, component: Component, title: str, more: int = 0) -> Any:
        """`component` on the engine, once it is known that its weights and `more` bytes fit. Raises DoesNotFit."""
        weights, count = self.weight_bytes(component), len(streaming.streamed_blocks(component.plan))
        streams = f", {counted(count, 'block')} streamed" if count else ""
        self.notify("stage", f"loading {title} ({size_text(weights)}{streams})")
        self.check_fit(f"the {title}", weights + more)
        with self.clock.timed(f"load {title}"):
            opened = self.engine.open(component.network, component.config, self.plan(component), self.precision)
            if self.compiles is not None and component.role == "transformer":
                on = self.compiles and not count  # streamed blocks are not always in memory
                line = self.engine.compile(opened, on, autotune=self.choice.wishes.compiled)
                if line:
                    self.notify("notice", line)
            return opened

    def plan(self, component: Component) -> LoadPlan:
        """Of its weights, as they are kept in memory."""
        return component.stored(self.precision)

    def weight_bytes(self, component: Component) -> int:
        """Bytes of the weights that are in memory at once as long as `component` is open."""
        return streaming.held(self.plan(component), self.engine.workspace.moved)

    def streamed_bytes(self, component: Component) -> int:
        """Bytes of its weights that every pass reads anew."""
        return streaming.read(self.plan(component))

    def opened_bytes(self, component: Component) -> int:
        """Bytes of the weights that are in memory before the first call, in which blocks are streamed."""
        passing = streaming.passing(self.plan(component), self.engine.workspace.moved)
        return self.weight_bytes(component) - passing

    def call_bytes(self, component: Component, activations: int, once: bool = False) -> int:
        """Return the bytes that a call takes beside weights: its activations, what the weights in codes are decoded to
        (`once`: as in `beside.decoded`), and what the kernels' library keeps."""
        workspace, plan = self.engine.workspace, self.plan(component)
        decoded = int(workspace.decoded * beside.decoded(plan, once))
        return activations + decoded + min(workspace.kept, beside.packed(plan))

    def loading_bytes(self, component: Component) -> int:
        """What loading it takes beside its weights (`beside.loading`)."""
        return beside.loading(self.plan(component), self.engine.workspace.moved)

    def check_fit(self, what: str, need: int) -> None:
        """Raises DoesNotFit before anything is allocated."""
        free = self.engine.free_memory()
        if need > free:
            raise DoesNotFit(
                f"{what} takes {size_text(need)} in {self.precision.name}, {self.free_text(free)}; close other programs"
            )

    # Values that are not finite

    def check_weights(self, component: Component, title: str) -> None:
        """Reads every weight of a `component` that is loaded only when the steps are done, and keeps none, so that a
        damaged one costs no step. Raises ModelError."""
        self.notify("stage", f"checking {title}")
        with self.clock.timed(f"check {title}"):
            check_values(self.plan(component))

    def check_finite(self, array: Array, title: str, part: str, again: Callable[[], Array]) -> None:
        """Raises Overflow that names block and operation where `array`, the result of `again`, is not finite."""
        if not self.engine.finite(array):
            raise self.overflow(title, part, first_non_finite(self.engine, again))

    def explain(self, title: str, step: int, calls: Iterable[Callable[[], Array]]) -> NumericsError:
        """Runs a step's `calls` of the denoiser again with probes: component, block and operation."""
        for again in calls:
            found = first_non_finite(self.engine, again)
            if found:
                return self.overflow(f"{title}, step {step}", "transformer", found)
        return NumericsError(f"step {step}: non-finite latents after guidance; lower --guidance")

    def overflow(self, title: str, part: str, found: NotFinite | None) -> Overflow:
        """What to say of a value of `part` that is not finite: where, in which dtype, how large, and what cures it."""
        cure = advice(self.precision, part, "" if found is None else found.operation)
        if found is None:
            return Overflow(f"{title}: non-finite values behind its last operation", cure, part, found)
        compute = self.precision.computes(part, found.where)
        inside = f" of {compute.dtype} products" if compute and compute.dtype != found.dtype else ""
        return Overflow(f"{title}: non-finite value at {found}{inside}, {found.maximum}", cure, part, found)
