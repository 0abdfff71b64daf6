"""Components on an engine: checked to fit before they are loaded, timed, and probed for values that are not finite."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.base.errors import DoesNotFit, NumericsError
from qwenimg.common.memory import overhead
from qwenimg.common.precision import precision as policies
from qwenimg.common.precision import presets
from qwenimg.common.precision.ladder import advice
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.presets import Choice
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Array, Engine
from qwenimg.common.runtime.probe import NotFinite, Overflow, first_non_finite
from qwenimg.common.runtime.text_store import BUDGET, TextStore
from qwenimg.common.weights import streaming
from qwenimg.common.weights.plan import LoadPlan
from qwenimg.common.weights.values import check_values

Notify = Callable[[str, str], None]

WARNINGS = 50  # warnings that a recipe has

WEIGHTS = 0.8  # the share of free memory for weights when a preset chooses their bits; the rest is for a step
# Parts of --max-memory that no plan counts: tokenizers, Python's objects, allocators. 10 to 40 MB measured.
UNPLANNED, UNPLANNED_SHARE = 64 * 10**6, 1 / 8


def plannable(max_memory: int) -> int:
    """Return the bytes of --max-memory that a plan may use."""
    return max_memory - min(UNPLANNED, int(UNPLANNED_SHARE * max_memory))


def limit_for(planned: int) -> int:
    """Return the smallest --max-memory under which a plan may use `planned` bytes."""
    return min(planned + UNPLANNED, ceil(planned / (1 - UNPLANNED_SHARE)) + 1)


@dataclass(frozen=True, kw_only=True)
class Change:
    """New values of a run's options; None keeps the present one."""

    precision: str | None = None
    quantize: str | None = None  # "": without it
    max_memory: int | None = None
    converted: bool | None = None  # True: `quantize` was done by `qwenimg convert`, for plans


class Clock:
    """The seconds of each stage since the last `clear`."""

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


class Notices:
    """A function of messages (kind, text) that passes them on and keeps warnings. Warnings during a picture belong to
    it; warnings between pictures, such as from opening a model, belong to every later one."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._lasting: dict[str, None] = {}
        self._of_picture: dict[str, None] | None = None  # None: none is drawn

    def __call__(self, kind: str, text: str) -> None:
        if kind == "warning":
            kept = self._lasting if self._of_picture is None else self._of_picture
            if len(kept) < WARNINGS:
                kept[text] = None
        self._notify(kind, text)

    @contextmanager
    def of_picture(self) -> Iterator[None]:
        """Keep the warnings in the context for one picture alone."""
        self._of_picture = {}
        try:
            yield
        finally:
            self._of_picture = None

    @property
    def warnings(self) -> list[str]:
        """The warnings that hold for the picture that is drawn, each once."""
        return [*(self._lasting | (self._of_picture or {}))][:WARNINGS]


class Runtime:
    """An engine with a precision that loads within the free memory. `notify(kind, text)` reports stages and warnings,
    and keeps the latter for the pictures that they are about."""

    def __init__(
        self,
        engine: Engine,
        precision: Precision,
        notify: Notify,
        choice: Choice | None = None,
        max_memory: int | None = None,
        quantize: str | None = None,
    ):
        """Set the options of runs. choice: the preset, and the reason for it. max_memory: the limit of a run's bytes;
        blocks that do not fit are streamed, as with a preset that asks for it. quantize: the requested bits of the
        weights."""
        self.engine, self.precision, self.max_memory = engine, precision, max_memory
        self.notify = notify if isinstance(notify, Notices) else Notices(notify)
        self.quantize = self.bits = quantize  # bits: those that the weights have in the end
        self.choice = choice or Choice(preset="", precision=precision.name)
        self.clock = Clock()
        self.compiles: bool | None = None  # of the denoiser, when it is opened; None: the engine's default
        self.prompts: TextStore | None = None  # encoded prompts on the disk
        self.interrupt: Callable[[], None] = lambda: (
            None
        )  # called between a caption's tokens and before an upscaler's pass; raises to end the run
        # Functions of a component and its opened network, which return that or one in its place: those of a trace.
        self.observers: list[Callable[[Component, Any], Any]] = []
        self._held = 0  # bytes that another run on this engine holds, and would free for this one

    def changed(self, checkpoint: Checkpoint, change: Change, held: int) -> tuple[Runtime, Checkpoint]:
        """Return the runtime and the checkpoint of a run with other options in place of this one, which holds `held`
        bytes, for plans: nothing is loaded or reported. Policy and bits are chosen again unless they were requested."""
        bits = (self.quantize if change.quantize is None else change.quantize) or None
        limit = self.max_memory if change.max_memory is None else change.max_memory
        choice, policy, held = self.choice, self.precision, held + self._held
        if change.precision is not None or change.quantize is not None or choice.wishes.bits:
            checkpoint = checkpoint.as_stored()
            checkpoint = checkpoint if bits is None else checkpoint.quantized(bits)
            checkpoint = checkpoint.converted() if change.converted else checkpoint
            choice, policy = self._chosen(checkpoint, change.precision, held)
        runtime = Runtime(self.engine, policy, lambda kind, text: None, choice, limit, bits)
        runtime.prompts, runtime.observers, runtime._held = self.prompts, self.observers, held
        return runtime, runtime.reduced(checkpoint)

    def _chosen(self, checkpoint: Checkpoint, precision: str | None, held: int) -> tuple[Choice, Precision]:
        """Return the choice and the policy for a run of `checkpoint` with `precision`, or with the requested one."""
        now, engine, kind = self.choice, self.engine, self.precision.kind
        asked = precision or (now.asked if now.asked and not now.fallback else self.precision.name)
        free = engine.free_memory() + held
        choice = presets.choose(now.preset or presets.AUTO, asked, kind, engine.facts, checkpoint.largest, free)
        return choice, policies.parse(choice.precision, on_gpu=engine.on_gpu, kind=kind)

    @property
    def streams(self) -> bool:
        return self.max_memory is not None or self.choice.wishes.tiled

    def budget(self, loaded: int) -> int:
        """Return the bytes that a run may use in all; `loaded` of them are in use already."""
        free = self.machine_budget(loaded)
        return free if self.max_memory is None else min(free, plannable(self.max_memory))

    def machine_budget(self, loaded: int) -> int:
        """Return the bytes that this machine leaves a run, ignoring --max-memory; `loaded` of them are taken
        already."""
        return self.engine.free_memory() + loaded + self._held

    def budget_text(self, budget: int) -> str:
        """Return `budget` bytes of a run for a message, with their limit."""
        if self.max_memory is None or budget != plannable(self.max_memory):
            return self.free_text(budget)
        return f"--max-memory {size_text(self.max_memory)} leaves {size_text(budget)}"

    def free_text(self, free: int) -> str:
        _, limit = self.engine.machine()
        return f"{size_text(free)} are free on {self.engine.device}" + (f" under {limit}" if limit else "")

    def reduced(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return `checkpoint` with its weights in the preset's bits if they fit only so. If they never fit, they stay
        unchanged: blocks that are quantized while loading are not streamed."""
        budget = int(WEIGHTS * self.budget(0))
        if self.quantize is not None or not self.choice.wishes.bits or checkpoint.largest(self.precision) <= budget:
            return checkpoint
        smaller = checkpoint.quantized(self.choice.wishes.bits)
        if smaller.largest(self.precision) > budget:
            return checkpoint
        self.bits = self.choice.wishes.bits
        return smaller

    def with_streaming(self, component: Component, budget: int) -> Component:
        """Return `component` with the fewest blocks streamed so that its weights fit into `budget` bytes; unchanged if
        this run does not stream."""
        if not self.streams:
            return component
        whole = self.load_plan(component)
        plan = streaming.stream_to_fit(whole, component.streamable, budget, self.engine.workspace.moved)
        return component if plan is whole else replace(component, plan=plan)

    def keep_prompts(self, budget: int = BUDGET) -> None:
        """Store encoded prompts on disk, up to `budget` bytes, and read those stored before."""
        self.prompts = TextStore(self.notify, budget=budget)

    # Loading

    def open(self, component: Component, title: str, more: int = 0) -> Any:
        """Open `component` on the engine after a check that its weights and `more` bytes fit. Raises DoesNotFit."""
        weights, count = self.weight_bytes(component), len(streaming.streamed_blocks(component.plan))
        streams = f", {counted(count, 'block')} streamed" if count else ""
        self.notify("stage", f"loading {title} ({size_text(weights)}{streams})")
        self.check_fit(f"the {title}", weights + more)
        with self.clock.timed(f"load {title}"):
            opened = self.engine.open(component.network, component.config, self.load_plan(component), self.precision)
            for observer in self.observers:
                opened = observer(component, opened)
            if component.cached_blocks is not None:
                self.engine.hook_cached_blocks(opened, component.cached_blocks)
            if self.compiles is not None and component.role == "transformer":
                on = self.compiles and not count  # streamed blocks are not always in memory
                modules = component.compiled if on else None
                line = self.engine.compile(opened, modules, autotune=self.choice.wishes.compiled)
                if line:
                    self.notify("notice", line)
            return opened

    def load_plan(self, component: Component) -> LoadPlan:
        """Return the plan of its weights in memory."""
        return component.stored(self.precision)

    def weight_bytes(self, component: Component) -> int:
        """Return the most bytes of its weights in memory at once while `component` is open."""
        return streaming.peak_weight_bytes(self.load_plan(component), self.engine.workspace.moved)

    def streamed_bytes(self, component: Component) -> int:
        """Return the bytes of its weights that every pass reads."""
        return streaming.bytes_per_pass(self.load_plan(component))

    def opened_bytes(self, component: Component) -> int:
        """Return the bytes of its weights in memory before the first call, which starts streaming."""
        passing = streaming.in_flight_bytes(self.load_plan(component), self.engine.workspace.moved)
        return self.weight_bytes(component) - passing

    def call_bytes(self, component: Component, activations: int, once: bool = False) -> int:
        """Return the bytes of a call besides its weights: activations, decoded weights (`once`: as in
        `overhead.decoded`), and matrices that the kernels' library repacks."""
        workspace, plan = self.engine.workspace, self.load_plan(component)
        decoded = int(workspace.decoded * overhead.decoded(plan, once))
        return activations + decoded + min(workspace.kept, overhead.packed(plan))

    def loading_bytes(self, component: Component) -> int:
        """Return the peak bytes of loading, less its weights (`overhead.loading`)."""
        return overhead.loading(self.load_plan(component), self.engine.workspace.moved)

    def check_fit(self, what: str, need: int) -> None:
        """Raise DoesNotFit if `need` bytes are not free."""
        free = self.engine.free_memory()
        if need > free:
            raise DoesNotFit(
                f"{what} takes {size_text(need)} in {self.precision.name}, {self.free_text(free)}; close other programs"
            )

    # Values that are not finite

    def check_weights(self, component: Component, title: str) -> None:
        """Read every weight of a `component` that is loaded only after the steps, without keeping any, so that a
        damaged one costs no step. Raises ModelError."""
        self.notify("stage", f"checking the model's files ({title})")
        with self.clock.timed(f"check {title}"):
            check_values(self.load_plan(component))

    def check_finite(self, array: Array, title: str, part: str, again: Callable[[], Array]) -> None:
        """Raise Overflow that names block and operation if `array`, the result of `again`, is not finite."""
        if not self.engine.finite(array):
            raise self.overflow(title, part, first_non_finite(self.engine, again))

    def explain(self, title: str, step: int, calls: Iterable[Callable[[], Array]]) -> NumericsError:
        """Run a step's `calls` again with probes. Return an error that names component, block and operation."""
        for again in calls:
            cause = first_non_finite(self.engine, again)
            if cause:
                return self.overflow(f"{title}, step {step}", "transformer", cause)
        return NumericsError(f"step {step}: non-finite latents after guidance; lower --guidance")

    def overflow(self, title: str, part: str, found: NotFinite | None) -> Overflow:
        """Return the error for a value of `part` that is not finite: its place, dtype and size, and the remedy."""
        cure = advice(self.precision, part, "" if found is None else found.operation)
        if found is None:
            return Overflow(f"{title}: non-finite values behind its last operation", cure, part, found)
        compute = self.precision.computes(part, found.where)
        inside = f" of {compute.dtype} products" if compute and compute.dtype != found.dtype else ""
        return Overflow(f"{title}: non-finite value at {found}{inside}, {found.maximum}", cure, part, found)
