"""Descriptions of modules of a network: kinds that are compared between backends, and blocks that a call can skip."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Block:
    """A kind of modules of a network that can run alone, on their own weights and the arguments of one call."""

    name: str
    paths: re.Pattern[str]  # matches the modules' paths; the network itself is ""
    method: str = ""  # the method that is called; "" calls the module itself
    image: bool = False  # True: a first argument and a result with four axes are images
    streams: int = 0  # the first arguments that are residual streams; a result of a stream's shape is its update
    once: bool = False  # True: runs once for a schedule, on weights that are loaded for that only
    within: str = ""  # for a method of the network itself, the module that it runs
    depth: int = 0  # updates that it makes to a residual stream, without those of blocks inside it

    def called(self, path: str) -> str:
        """Return its name in a trace: the module's path, and the method."""
        return ".".join(part for part in (path, self.method) if part) or "whole"


@dataclass(frozen=True, kw_only=True)
class CachedBlocks:
    """The blocks of a denoiser that a step cache can skip. Each takes the stream first, as the block before them does,
    and returns it, alone or as the first of several arrays."""

    after: str  # the path of the block in front of them, whose update predicts how much theirs differ
    paths: tuple[str, ...]
    adds: bool  # True: they reuse what they added to the stream in an earlier call; False: the stream behind them
    image: bool = False  # True: the stream is an image

    @classmethod
    def but_first(cls, path: str, count: int, adds: bool = True) -> Self:
        """Return all blocks `path`.0 .. `path`.(count-1) but the first."""
        return cls(after=f"{path}.0", paths=tuple(f"{path}.{i}" for i in range(1, count)), adds=adds)
