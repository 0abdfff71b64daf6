"""Whether a denoiser is compiled: as is asked, or by the seconds that it would save against those that it takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from qwenimg.common.base.amounts import duration
from qwenimg.common.base.arguments import check_seconds
from qwenimg.common.base.errors import BackendMissing, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.runtime.checkpoint import Checkpoint

MODES = ("auto", "on", "off")
_BLOCK = re.compile(r"(.*\b(?:(?:transformer_blocks|resnets)\.\d+|attentions\.\d+\.norm))\.(.*)")


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """What compiling is on an engine. Both numbers are expected, not measured."""

    share: float  # of a step's seconds that it saves; 0 where it saves nothing
    seconds: float  # that it takes for each kind of block
    about: str  # why, for a message
    missing: str = ""  # of what it needs


@dataclass(frozen=True, kw_only=True)
class Decision:
    on: bool
    line: str  # for the first lines of a run


def folder(framework: str = "") -> Path:
    """Where what was compiled is kept for later runs: the user's cache. framework: with its version, where it does not
    name a folder by that itself."""
    from platformdirs import user_cache_path

    return user_cache_path("qwenimg") / "compiled" / framework


def check(option: str, mode: str) -> None:
    """Raises UsageError."""
    if not isinstance(mode, str):
        raise UsageError(f"mode is {clean(mode, 40)}; choose one of {', '.join(MODES)}")
    if mode not in MODES:
        raise UsageError(f"--{option} {clean(mode, 40)!r} is not one of {', '.join(MODES)}")


def kinds(checkpoint: Checkpoint | None) -> int:
    """How many kinds of blocks the denoiser has: a kind is all with weights of the same names and shapes."""
    blocks: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for part in checkpoint.denoisers if checkpoint else ():
        for name, entry in part.plan.entries.items():
            if found := _BLOCK.match(name):
                blocks.setdefault(found[1], set()).add((found[2], entry.shape))
    return len(set(map(frozenset, blocks.values())))


def settled(option: str, mode: str, missing: str, otherwise: str) -> Decision | None:
    """`--option on` and `off`, which need no reckoning; of what is missing, `otherwise` says what to do without it.
    Raises BackendMissing."""
    if mode == "on" and missing:
        raise BackendMissing(f"--{option} on {missing}; {otherwise}")
    return None if mode == "auto" else Decision(on=mode == "on", line=f"--{option} {mode}")


def decide(mode: str, compiler: Compiler, seconds: float, *, kinds: int = 1, wanted: bool = False) -> Decision:
    """For a run whose steps take about so many seconds as it is, by a denoiser with so many kinds of blocks. `wanted`:
    a preset asks for it wherever it saves anything. Raises UsageError and BackendMissing."""
    check("compile", mode)
    check_seconds(seconds=seconds)
    if found := settled("compile", mode, compiler.missing, "install it, or use --compile off"):
        return found
    if compiler.missing and compiler.share:
        return Decision(on=False, line=f"--compile auto: off, since it {compiler.missing}")
    if not compiler.share:
        return Decision(on=False, line=f"--compile auto: off, since {compiler.about}")
    if wanted:
        return Decision(on=True, line="--compile auto: on, as the preset has it")
    saved, taken = compiler.share * seconds, compiler.seconds * max(1, kinds)
    on = saved > taken
    expected = f"it would save {duration(saved)} and take {duration(taken)}, as far as {compiler.about}"
    return Decision(on=on, line=f"--compile auto: {'on' if on else 'off'}, since {expected}")
