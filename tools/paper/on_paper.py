"""What a picture takes on a machine that is not here: a MODEL, never a measurement.

The kernels of one step and of decoding are counted (`tools/paper/kernels.py`), and each is given the time that its
operations and bytes take at the machine's rates. Left out: what the host does, gaps between kernels, and what a kernel
may lose to shapes that do not suit it. Three rows:

eager     every kernel by itself, as the program runs it
compiled  memory-bound kernels of a compiled unit fused where a compiler fuses them; a unit is a transformer block
          on cards, and a chain of elementwise operations on Apple's chips
limit     the operations at the machine's highest rate, or the weights read once: no program is faster in this dtype
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paper.kernels import Counts, Kernel, fused
from paper.published import Subject
from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.text import aligned
from qwenimg.common.precision.machines import Machine
from qwenimg.common.precision.precision import Precision

LABEL = "MODEL"
PASSES = 0.85  # of the bandwidth that memory-bound kernels reach
LAUNCH = 3e-6  # seconds that the smallest kernel takes


@dataclass(frozen=True, kw_only=True)
class Row:
    """Of some kernels, in seconds, operations and bytes."""

    seconds: float
    kernels: int  # launches
    products: float
    attention: float
    memory_bound: float
    flops: float
    memory_bound_bytes: float
    memory_bound_kernels: int

    def times(self, count: int) -> Row:
        return Row(**{name: value * count for name, value in asdict(self).items()})


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step, or decoding."""

    name: str
    calls: int  # of the network
    eager: Row
    compiled: Row
    limit: float  # seconds


@dataclass(frozen=True, kw_only=True)
class PerBlock:
    """Memory-bound kernels of one of a transformer's equal blocks, and their bytes per number of its streams."""

    kernels: float
    nbytes: float


@dataclass(frozen=True, kw_only=True)
class OnPaper:
    model: str
    machine: Machine
    precision: str
    width: int
    height: int
    steps: int
    branches: int
    step: Stage
    decoding: Stage
    blocks: dict[str, PerBlock]  # eager and compiled; nothing where the blocks differ

    def picture(self, of: Callable[[Stage], float]) -> float:
        """Seconds of all steps and of decoding."""
        return self.steps * of(self.step) + of(self.decoding)

    def as_json(self) -> dict[str, Any]:
        made = {"label": LABEL, **asdict(self)}
        made["picture"] = {
            "eager_seconds": self.picture(lambda stage: stage.eager.seconds),
            "compiled_seconds": self.picture(lambda stage: stage.compiled.seconds),
            "limit_seconds": self.picture(lambda stage: stage.limit),
        }
        return made


def on_paper(
    count: Counts,
    subject: Subject,
    machine: Machine,
    precision: Precision,
    *,
    size: tuple[int, int],
    steps: int,
    guided: bool,
) -> OnPaper:
    """Counts a step and the decoding of one picture of `subject`, width by height, and gives them their times."""
    width, height = size
    case, calls = subject.step(width, height, guided)
    step = count(*subject.denoiser, precision, case)
    decoding = count(*subject.vae, precision, subject.decoding(width, height))
    made = stage("step", step, machine, calls)
    return OnPaper(
        model=subject.name,
        machine=machine,
        precision=precision.name,
        width=width,
        height=height,
        steps=steps,
        branches=case.branches,
        step=made,
        decoding=stage("decoding", decoding, machine, 1),
        blocks=_blocks(made, *subject.blocks(case)),
    )


def _blocks(step: Stage, count: int, numbers: int) -> dict[str, PerBlock]:
    """`count` blocks, each with streams of so many `numbers`. What a step does around its blocks counts as theirs."""
    rows = {"eager": step.eager, "compiled": step.compiled} if count else {}
    return {
        name: PerBlock(
            kernels=row.memory_bound_kernels / step.calls / count,
            nbytes=row.memory_bound_bytes / step.calls / count / numbers,
        )
        for name, row in rows.items()
    }


def stage(name: str, kernels: Sequence[Kernel], machine: Machine, calls: int) -> Stage:
    """`calls` times the same kernels."""
    return Stage(
        name=name,
        calls=calls,
        eager=row(kernels, machine).times(calls),
        compiled=row(fused(kernels), machine).times(calls),
        limit=limit(kernels, machine) * calls,
    )


def row(kernels: Sequence[Kernel], machine: Machine) -> Row:
    parts = {"product": 0.0, "attention": 0.0, "memory": 0.0}
    for kernel in kernels:
        parts[kernel.kind] += seconds(kernel, machine)
    bound = [kernel for kernel in kernels if kernel.kind == "memory"]
    return Row(
        seconds=sum(parts.values()),
        kernels=sum(kernel.launches for kernel in kernels),
        products=parts["product"],
        attention=parts["attention"],
        memory_bound=parts["memory"],
        flops=sum(kernel.flops for kernel in kernels),
        memory_bound_bytes=sum(kernel.nbytes for kernel in bound),
        memory_bound_kernels=sum(kernel.launches for kernel in bound),
    )


def seconds(kernel: Kernel, machine: Machine) -> float:
    """Of one kernel: its operations or its bytes, whichever take longer, and no less than a launch."""
    moved = kernel.nbytes / (1e9 * machine.gigabytes * PASSES)
    share = {"product": machine.products, "attention": machine.attention, "memory": 1.0}[kernel.kind]
    return max(kernel.flops / (machine.peak(kernel.dtype) * share), moved, kernel.launches * LAUNCH)


def limit(kernels: Sequence[Kernel], machine: Machine) -> float:
    """Seconds below which no program comes: operations at the highest rate, and every buffer that no kernel writes,
    which is weights and inputs, read once."""
    written = {span.buffer for kernel in kernels for span in kernel.writes}
    given = {span for kernel in kernels for span in kernel.reads if span.buffer not in written}
    computing = sum(kernel.flops / machine.peak(kernel.dtype) for kernel in kernels)
    return max(computing, sum(span.nbytes for span in given) / (1e9 * machine.gigabytes))


def lines(made: OnPaper) -> list[str]:
    """As text."""
    machine, calls = made.machine, made.step.calls
    forwards = f"{calls} forwards" if calls > 1 else "one forward"
    batch = f"{forwards} of {made.branches} branch{'es' if made.branches > 1 else ''}"
    rows: list[tuple[str, ...]] = [
        ("", "", "kernels", "TFLOP", "memory-bound", "time: products", "attention", "memory-bound", "total")
    ]
    for part in (made.step, made.decoding):
        for name, each in _forms(part):
            rows.append((part.name, name, *_cells(each)))
        rows.append((part.name, "limit", "", "", "", "", "", "", _time(part.limit)))
    whole = [
        f"{name} {_time(made.picture(of))}"
        for name, of in (
            ("eager", lambda stage: stage.eager.seconds),
            ("compiled", lambda stage: stage.compiled.seconds),
            ("limit", lambda stage: stage.limit),
        )
    ]
    blocks = [
        f"a block, {name}: {each.kernels:.0f} memory-bound kernels, {each.nbytes:.0f} bytes per number of its streams"
        for name, each in made.blocks.items()
    ]
    kernels = (
        "those of the graph on Apple's chips"
        if machine.title.startswith("Apple")
        else "those that the dispatcher hands out"
    )
    return [
        f"{LABEL}, not a measurement: {made.model} in {made.precision}, {made.width}x{made.height}, on {machine.title}",
        f"a step is {batch} of guidance; kernels: {kernels}; rates: {_rates(machine)}",
        *aligned(rows),
        *blocks,
        f"a picture of {made.steps} steps, without text encoder and loading: {', '.join(whole)}",
        f"{LABEL}: no host, no gaps between kernels; rates: {machine.source}",
    ]


def _forms(stage: Stage) -> tuple[tuple[str, Row], ...]:
    return ("eager", stage.eager), ("compiled", stage.compiled)


def _cells(row: Row) -> tuple[str, ...]:
    parts = (row.products, row.attention, row.memory_bound, row.seconds)
    moved = size_text(row.memory_bound_bytes)
    return (f"{row.kernels:,}", f"{row.flops / 1e12:.1f}", moved, *(_time(part) for part in parts))


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _rates(machine: Machine) -> str:
    return (
        f"{machine.teraflops:.4g} TFLOP/s in 16 bit, of which products reach {machine.products:.2f} and attention "
        f"{machine.attention:.2f}; {machine.teraflops32:.4g} in float32; {machine.gigabytes:,.0f} GB/s, "
        f"of which {PASSES:.2f}; {LAUNCH * 1e6:.0f} us a kernel at least"
    )
