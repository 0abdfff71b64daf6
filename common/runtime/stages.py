"""A run as data: its stages in order, each with the component that computes it and the bytes that it takes.

A family returns the stages of a request; `Residents` plans them and runs them by one rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwenimg.common.runtime.checkpoint import Component

DECODE = "decode"  # the stage after all steps


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to divide the work of a stage: smaller pieces take less memory and more passes."""

    activations: int  # bytes beside the weights while a piece is computed
    required: int | None = None  # overrides activations when deciding whether this split fits
    size: int | None = None  # of a piece: branches in one batch, or rows of a band; None: the whole
    passes: float = 0.0  # calls of the component in the whole run: each reads its streamed blocks
    results: int = 0  # bytes of results that stay in memory
    about: str = ""  # in the plan: `in bands of 32 rows`

    @property
    def needed(self) -> int:
        """The bytes that must be free for this split, besides the weights."""
        return self.activations if self.required is None else self.required


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a run, computed by one component."""

    name: str  # encode, text, pictures, adapter, modulation, control, denoise, refine, preview or decode
    resident: str  # name of the component in memory: stages with the same name share it
    component: Component  # with all of its blocks in memory
    splits: tuple[Split, ...]  # the preferred one first, the one with the least memory last
    title: str = ""  # its name in messages; "": the component's, or a step's if that is loaded
    wanted: int | None = None  # bytes beside the weights for which others are freed; None: those of the first split
    keeps: bool = True  # True: the component stays in memory for later stages
    calls_blocks: bool = True  # True: it calls the blocks, so that streamed ones take memory
    co_resident: frozenset[str] = frozenset()  # names of components that it also calls; never freed during it
    partners: tuple[Stage, ...] = ()  # later stages, beside whose components and results it stays in memory
    checked: bool = True  # False: it is refused only if it must be opened and its weights do not fit
    optional: bool = False  # True: it frees nothing, and is left out if it does not fit
    operations: float = 0.0  # multiplications and additions

    @property
    def frees_for(self) -> int:
        """The bytes, besides the weights, for which other components are freed."""
        return self.splits[0].needed if self.wanted is None else self.wanted
