"""The decision to compile a denoiser: by option, or by the seconds that it would save and take."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.common.base.amounts import duration
from qwenimg.common.base.arguments import check_seconds
from qwenimg.common.base.errors import BackendMissing, UsageError
from qwenimg.common.base.text import clean

if TYPE_CHECKING:
    from qwenimg.common.runtime.checkpoint import Checkpoint

MODES = ("auto", "on", "off")


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """The expected effect of compiling on an engine. Neither number is measured."""

    share: float  # the share of a step's seconds that it saves; 0: nothing
    seconds: float  # the seconds that it takes for each kind of block
    about: str  # the reason, for a message
    missing: str = ""  # what it needs and lacks, for a message


@dataclass(frozen=True, kw_only=True)
class Decision:
    on: bool
    line: str  # for the first lines of a run


def folder(framework: str) -> Path:
    """Return the user's folder for compiled code that later runs use. framework: its name and version."""
    from platformdirs import user_cache_path

    return user_cache_path("qwenimg") / "compiled" / framework


def check(mode: str) -> None:
    """Check a value of --compile. Raises UsageError."""
    if not isinstance(mode, str):
        raise UsageError(f"mode is {clean(mode, 40)}; choose one of {', '.join(MODES)}")
    if mode not in MODES:
        raise UsageError(f"--compile {clean(mode, 40)!r} is not one of {', '.join(MODES)}")


def kinds(checkpoint: Checkpoint | None) -> int:
    """Return how many kinds of compiled modules the denoiser has: a kind's weights have the same names and shapes."""
    modules: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for part in checkpoint.denoisers if checkpoint else ():
        assert part.compiled is not None
        weights = re.compile(rf"(?P<path>{part.compiled.pattern})\.(?P<name>.+)")
        for name, entry in part.plan.entries.items():
            if match := weights.match(name):
                modules.setdefault(match["path"], set()).add((match["name"], entry.shape))
    return len(set(map(frozenset, modules.values())))


def decide(mode: str, compiler: Compiler, seconds: float, *, kinds: int = 1, wanted: bool = False) -> Decision:
    """Decide whether to compile for a run whose steps take about `seconds` uncompiled, with `kinds` kinds of blocks to
    compile. wanted: the preset asks to compile if that saves time. Raises UsageError and BackendMissing."""
    check(mode)
    check_seconds(seconds=seconds)
    if mode == "on" and compiler.missing:
        raise BackendMissing(f"--compile on {compiler.missing}; install it, or use --compile off")
    if mode != "auto":
        return Decision(on=mode == "on", line=f"--compile {mode}")
    if compiler.missing and compiler.share:
        return Decision(on=False, line=f"--compile auto: off, since it {compiler.missing}")
    if not compiler.share:
        return Decision(on=False, line=f"--compile auto: off, since {compiler.about}")
    if wanted:
        return Decision(on=True, line="--compile auto: on, as the preset has it")
    saved, cost = compiler.share * seconds, compiler.seconds * max(1, kinds)
    on = saved > cost
    expected = f"it would save {duration(saved)} and take {duration(cost)}, as far as {compiler.about}"
    return Decision(on=on, line=f"--compile auto: {'on' if on else 'off'}, since {expected}")
